-- Reading recipe files: the main file and every Lua file that it loads with require, dofile or
-- loadfile are recorded, so that a run directory holds all of them, and a resume reads them from
-- there.
local errors = require "perigee.errors"
local check = require "perigee.check"

local sources = {}

local current -- the reading in progress: { path, text, files }
local modules_of_last = {} -- names in package.loaded that the last reading put there

local function read_file(path)
  local file, message = io.open(path, "rb")
  if not file then return nil, message end
  local text = file:read("a")
  file:close()
  if text == nil then return nil, path .. ": is not a readable file" end
  return text
end

-- Compile text; like loadfile, a first line that starts with # is skipped. Binary chunks are
-- refused: they can crash the interpreter.
local function compile(text, path, env)
  text = text:gsub("^#[^\n]*", "")
  local chunk, message = load(text, "@" .. path, "t", env or _G)
  -- Too deep a nesting is reported without a place.
  if not chunk and not message:find(":%d+: ") then message = path .. ": " .. message end
  return chunk, message
end

local function record(kind, name, path, text)
  for _, file in ipairs(current.files) do
    if file.kind == kind and file.name == name then return end
  end
  current.files[#current.files + 1] = { kind = kind, name = name, path = path, text = text }
end

-- The text behind a module or file name: the archive first, then the disk.
local function find(kind, name, search)
  local archived = current.archive and current.archive[kind .. ":" .. name]
  if archived then
    record(kind, name, archived.path, archived.text)
    return archived.text, archived.path
  end
  local path = search(name)
  if not path then return nil end
  local text = read_file(path)
  if text then record(kind, name, path, text) end
  return text, path
end

local function module_searcher(name)
  if name:match("^perigee%f[%z.]") then return nil end
  local text, path = find("module", name, function(n)
    return package.searchpath(n, package.path)
  end)
  if not text then return nil end
  local chunk, message = compile(text, path)
  if not chunk then error(message, 0) end
  current.modules[#current.modules + 1] = name
  return chunk, path
end

local function open_file(name)
  local text, path = find("file", name, function(n) return n end)
  if not text then return nil, ("cannot open %s"):format(name) end
  return text, path
end

local function recording_loadfile(name, mode, ...)
  local text, path = open_file(name)
  if not text then return nil, path end
  if mode and not tostring(mode):find("t") then return nil, "attempt to load a text chunk" end
  return compile(text, path, (...))
end

local function recording_dofile(name)
  local text, path = open_file(name)
  if not text then error(path, 2) end
  local chunk, message = compile(text, path)
  if not chunk then error(message, 0) end
  return chunk()
end

-- "file:line" of the call that matches `pattern`. A chunk that ends in `return pg.recipe {…}`
-- has left the stack by the time of the call, so its own text is searched.
function sources.call_site(pattern)
  local where = errors.where()
  if not current then return where end
  if where then
    local file = where:match("^(.*):%d+$")
    if file == current.path then return where end
    for _, loaded in ipairs(current.files) do
      if loaded.path == file then return where end
    end
  end
  local line = 0
  for text in (current.text .. "\n"):gmatch("(.-)\n") do
    line = line + 1
    if text:gsub("%-%-.*$", ""):find(pattern) then return ("%s:%d"):format(current.path, line) end
  end
  return current.path
end

-- Run the chunk of `path` with recording on. options.archive: "kind:name" -> { path, text }, used
-- before the disk. Returns { path, text, files }, then what the chunk returned.
function sources.run(path, options)
  options = options or {}
  local text, message = read_file(path)
  if not text then
    errors.world(("ENOENT: cannot read recipe %s: %s"):format(check.show(path), message),
      "ENOENT")
  end
  local chunk, problem = compile(text, path)
  if not chunk then error(problem, 0) end
  for _, name in ipairs(modules_of_last) do package.loaded[name] = nil end
  local outer, outer_path = current, package.path
  local outer_dofile, outer_loadfile = dofile, loadfile
  current = { path = path, text = text, files = {}, modules = {}, archive = options.archive }
  local mine = current
  -- Files beside the recipe are found whatever the working directory is.
  package.path = (path:match("^(.*/)") or "./") .. "?.lua;" .. package.path
  table.insert(package.searchers, 2, module_searcher)
  -- luacheck: push ignore 121 122
  dofile, loadfile = recording_dofile, recording_loadfile
  local results = table.pack(xpcall(chunk, function(e)
    if type(e) == "string" then sources.trace = debug.traceback(e, 2) end
    return e
  end))
  dofile, loadfile = outer_dofile, outer_loadfile
  -- luacheck: pop
  for i, searcher in ipairs(package.searchers) do
    if searcher == module_searcher then
      table.remove(package.searchers, i)
      break
    end
  end
  package.path, current, modules_of_last = outer_path, outer, mine.modules
  if not results[1] then error(results[2], 0) end
  return { path = path, text = text, files = mine.files }, table.unpack(results, 2, results.n)
end

-- Where the files of a reading go in a run directory: recipe.lua, and recipe/N-NAME.lua.
function sources.archive_names(reading)
  for i, file in ipairs(reading.files) do
    local base = file.name:gsub("^.*/", ""):gsub("%.lua$", ""):gsub("[^%w_.-]", "_")
    file.archived = ("recipe/%d-%s.lua"):format(i, base)
  end
  return reading
end

-- An archive table for sources.run from what state.json lists: { kind, name, file }.
function sources.from_directory(directory, listed)
  local archive = {}
  for _, file in ipairs(listed or {}) do
    local path = directory .. "/" .. file.file
    local text = read_file(path)
    if text then archive[file.kind .. ":" .. file.name] = { path = path, text = text } end
  end
  return archive
end

-- What identifies a recipe: the hashes of its files and the values of its parameters, as one text.
-- `hash` is a function of a path.
function sources.identity(reading, values, hash)
  local parts = {}
  for _, file in ipairs(reading.files) do
    file.sha256 = hash(file.path)
    parts[#parts + 1] = ("%s %s %s"):format(file.kind, file.name, file.sha256)
  end
  for name, value in pairs(values) do
    parts[#parts + 1] = ("set %s=%s"):format(name, check.show(value))
  end
  table.sort(parts)
  reading.sha256 = hash(reading.path)
  return table.concat({ "recipe " .. reading.sha256, table.unpack(parts) }, "; ")
end

local function run_command(command)
  local pipe = io.popen(command, "r")
  if not pipe then return nil end
  local text = pipe:read("a")
  return pipe:close() and text or nil
end

-- The git commit of the recipe's folder and whether its files differ from it; nil without git.
function sources.commit(reading)
  local folder = reading.path:match("^(.*)/") or "."
  local quoted = "'" .. folder:gsub("'", "'\\''") .. "'"
  local commit = run_command("git -C " .. quoted .. " rev-parse HEAD 2>/dev/null")
  commit = commit and commit:match("^%x+")
  if not commit then return nil end
  local status = run_command("git -C " .. quoted .. " status --porcelain -- . 2>/dev/null")
  return commit, status ~= nil and status ~= ""
end

return sources
