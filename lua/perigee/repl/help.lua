-- help(x): from the reference, lua/doc/*.md, which is installed beside the module. Its tables are
-- the source: a row is found by any name in its first cell, and a sentence by a `pg.NAME` that
-- begins it. Optimizers add their descriptors' ranges and help.
local core = require "perigee.core"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local optim = require "perigee.optim"
local report = require "perigee.repl.report"
local show = require "perigee.repl.print"

local help = {}

local own = debug.getinfo(1, "S").source:match("^@(.*)repl/help%.lua$") or ""

local function read(path)
  local file = io.open(path, "rb")
  if not file then return nil end
  local text = file:read("a")
  file:close()
  return text
end

local entries, order -- name -> list of { section, text }; all of them

-- "run:validate { tokens = n }" -> "run:validate", and its last part "validate".
local function names_in(cell)
  local names = {}
  for code in cell:gmatch("`([^`]+)`") do
    local name = code:match("^[%w_%.:%%/…%-]+") or code
    names[#names + 1] = name:gsub("^pg%.", "")
    local last = name:match("[%.:]([%a_][%w_]*)$")
    if last then names[#names + 1] = last end
  end
  return names
end

local function add(section, names, text)
  local entry = { section = section, text = text }
  order[#order + 1] = entry
  for _, name in ipairs(names) do
    entries[name] = entries[name] or {}
    if entries[name][#entries[name]] ~= entry then table.insert(entries[name], entry) end
  end
end

local function plain(text) return (text:gsub("`", ""):gsub("%*", "")) end

local function cells_of(line)
  local cells = {}
  for cell in (line:gsub("^|", ""):gsub("\\|", "\1")):gmatch("%s*(.-)%s*|") do
    cells[#cells + 1] = (cell:gsub("\1", "|"))
  end
  return cells
end

-- Running text: what begins a sentence as `pg.NAME…` is described until the next such sentence.
local function add_paragraph(section, lines)
  local text = "\n" .. table.concat(lines, " "):gsub("([%.:]) (`pg%.)", "%1\n%2")
  for piece in text:gmatch("\n(`pg%.[^\n]*)") do
    add(section, names_in(piece:match("^`[^`]+`")), plain(piece))
  end
end

local function parse(text)
  entries, order = {}, {}
  local paragraph = {}
  local section, header = "", nil
  for line in text:gmatch("[^\n]*") do
    local title = line:match("^#+ (.*)$")
    if line:match("^[%w`]") then
      paragraph[#paragraph + 1] = line
    else
      if paragraph[1] then add_paragraph(section, paragraph) end
      paragraph = {}
    end
    if title then
      section, header = title, nil
    elseif line:match("^|%-") then -- luacheck: ignore 542
      -- Below a header.
    elseif line:match("^|") then
      local cells = cells_of(line)
      if not header then
        header = cells
      else
        local parts = {}
        for i, cell in ipairs(cells) do
          local label = i > 1 and #cells > 2 and header[i] and header[i] ~= ""
            and plain(header[i]) .. ": " or ""
          parts[i] = (i > 1 and "  " or "") .. label .. plain(cell)
        end
        add(section, names_in(cells[1]), table.concat(parts, "\n"))
      end
    elseif line:match("^%- `") then
      add(section, names_in(line:match("^%- (`[^`]+`)")), plain(line:sub(3)))
      header = nil
    else
      header = nil
    end
  end
  if paragraph[1] then add_paragraph(section, paragraph) end
end

-- All pages in the order in which the first lists them.
local function reference()
  for _, folder in ipairs { own .. "doc/", own .. "../doc/" } do
    local pages = { read(folder .. "README.md") }
    for page in (pages[1] or ""):gmatch("%]%(([%w_]+%.md)%)") do
      pages[#pages + 1] = read(folder .. page)
    end
    if pages[1] then return table.concat(pages, "\n") end
  end
  return ""
end

local function load_reference()
  if not entries then parse(reference()) end
end

-- The section of that title as it stands.
local function lookup(name)
  load_reference()
  return entries[name] or entries[name:gsub("^pg%.", "")]
end

local function render(list)
  local lines = {}
  for _, entry in ipairs(list) do
    lines[#lines + 1] = ("[%s] %s"):format(entry.section, entry.text)
  end
  return table.concat(lines, "\n")
end

local function is_optimizer(name)
  for _, known in ipairs(optim.names()) do
    if known == name then return true end
  end
  return false
end

-- Text about a name; nil when there is none.
function help.text(name)
  local parts = {}
  if is_optimizer(name) then parts[1] = optim.help(name) end
  local found = lookup(name)
  if found then parts[#parts + 1] = render(found) end
  return parts[1] and table.concat(parts, "\n") or nil
end

local function all_names()
  load_reference()
  local names = {}
  for name in pairs(entries) do names[#names + 1] = name end
  for _, name in ipairs(optim.names()) do
    if not entries[name] then names[#names + 1] = name end
  end
  table.sort(names)
  return names
end

local overview = [[
run  model  head  inc  parameters  tok "…"      the first one opened; several: runs[i], a, b, …
head:neighbours(tok " king", 8)                 nearest rows, as tokens
inc:diameter()   hilbert{ tokens = 2048 }       size of the last increment, as distance and function
oracle{ seconds = 20 }                          what the last gradient could give at best
panel(n)   compare(a, b, panel)                 validation positions; two checkpoints on them
step(n)   what_if(pg.optim.adamw{}, { warm = 8 })   train in memory; what another optimizer would do
plot("train/loss")   plot{ scatter = head }     in the terminal; file = "x.svg" for a file
open("DIR")   help(x)   help "run:validate"     help of anything, from the reference
]]

-- Names under which a function is known, by where it lives.
local function name_of_function(f)
  local pg = require "perigee"
  local runs = require "perigee.run"
  local view = require "perigee.repl.view"
  for _, place in ipairs { { "run:", runs.methods }, { "", core.tensor_methods },
    { "", core.parameter_methods }, { "", view.methods }, { "", pg }, { "optim.", pg.optim },
    { "schedule.", pg.schedule }, { "diagnostics.", pg.diagnostics }, { "data.", pg.data } } do
    for name, value in next, place[2] do
      if value == f then return place[1] .. name end
    end
  end
end

-- What a value is called in the reference: a list of names to try, and a text about it.
local function names_of_value(self, value)
  local kind = type(value)
  if kind == "function" then
    for name, f in next, self.env do
      if f == value then return { name } end
    end
    local name = name_of_function(value)
    return name and { name, name:match("[%w_]+$") } or {}
  end
  if optim.is(value) then return { value.name } end
  local meta = debug.getmetatable(value)
  local complete = require "perigee.repl.complete"
  if kind == "table" or kind == "userdata" then
    local names = {}
    for name in pairs(complete.names(value)) do
      if name:sub(1, 1) ~= "_" then names[#names + 1] = name end
    end
    table.sort(names)
    local what = type(meta) == "table" and meta.__name or "a table"
    return {}, ("%s, with %s"):format(tostring(what), table.concat(names, ", "))
  end
  return {}, ("%s %s"):format(kind, show.brief(value))
end

-- help(), help "name", help(value)
function help.show(self, ...)
  if select("#", ...) == 0 then
    return report.new({}, function() return overview .. "help names: " ..
      table.concat(optim.names(), ", ") .. ", recipe keys, schedules, metrics, run:METHOD, …" end)
  end
  local value = ...
  if type(value) == "string" then
    local text = help.text(value)
    if not text then
      errors.misuse("help: nothing is called %s; did you mean '%s'?", show.quoted(value),
        keys.nearest(value:sub(1, 60), all_names()))
    end
    return report.new({ name = value, text = text }, function(r) return r.text end)
  end
  local names, text = names_of_value(self, value)
  local parts = { text }
  for _, name in ipairs(names) do
    local found = help.text(name)
    if found then
      parts[#parts + 1] = found
      break
    end
  end
  if #parts == 0 then parts[1] = "the reference does not name this " .. type(value) end
  return report.new({ text = table.concat(parts, "\n") }, function(r) return r.text end)
end

return help
