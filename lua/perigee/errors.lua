-- Errors of the Lua layer, of three kinds.
--
--   misuse   a wrong value in a recipe, hook or script: raised as a string "file:line: message",
--            where the position is the nearest caller outside this module
--   world    I/O, memory, data, a device: a failure object that carries the core's error name;
--            public functions turn it into `nil, "NAME: text", "NAME"`
--   usage    the command line: a failure object that makes the program exit with 2
local errors = {}

local own_folder = debug.getinfo(1, "S").source:match("^@(.*)errors%.lua$") or "@"

local Failure = {}
Failure.__index = Failure
Failure.__name = "perigee failure"
Failure.__tostring = function(self) return self.message end

-- True for chunks of this module (and of C), which are never the place to blame.
local function internal(info)
  if info.what == "C" then return true end
  local source = info.source
  return source:sub(1, #own_folder + 1) == "@" .. own_folder
end

-- "file:line" of the nearest function on the stack outside this module, or nil. A chunk that ends
-- in `return pg.recipe {…}` is a tail call and has left the stack: sources.lua knows that file.
function errors.where()
  local level = 2
  while true do
    local info = debug.getinfo(level, "Sl")
    if not info then return nil end
    if not internal(info) and info.currentline > 0 then
      return ("%s:%d"):format(info.short_src, info.currentline)
    end
    level = level + 1
  end
end

-- "file:line" where a function was defined.
function errors.defined(f)
  local info = debug.getinfo(f, "S")
  if info.what == "C" then return "a C function" end
  return ("%s:%d"):format(info.short_src, info.linedefined)
end

-- The same without folders, for config.json.
function errors.defined_briefly(f) return (errors.defined(f):gsub("^.*/", "")) end

-- Misuse at a known place ("file:line" or nil for the nearest caller outside).
function errors.at(where, format, ...)
  local message = select("#", ...) > 0 and format:format(...) or format
  where = where or errors.where()
  error(where and (where .. ": " .. message) or message, 0)
end

function errors.misuse(format, ...) errors.at(nil, format, ...) end

function errors.usage(format, ...)
  local message = select("#", ...) > 0 and format:format(...) or format
  error(setmetatable({ message = message, usage = true }, Failure), 0)
end

function errors.world(message, name)
  error(setmetatable({ message = message, name = name or "EIO" }, Failure), 0)
end

-- Like assert for functions of the core: `nil, "NAME: text", "NAME"` becomes a failure object.
function errors.try(value, message, name, ...)
  if value == nil then errors.world(message or "unknown failure", name) end
  return value, message, name, ...
end

-- A position inside this module ("…/lua/perigee/open.lua:12: ", put there by the binding's checks)
-- says nothing to the user: cut it off. Long names are shortened to "...end/of/path".
function errors.strip(message)
  local prefix, rest = message:match("^%.*([^:\n]-)[%w_]+%.lua:%d+: (.*)$")
  if not prefix then return message end
  local folder = own_folder
  for _, own in ipairs { folder, folder .. "bench/", folder .. "commands/", folder .. "repl/",
    folder .. "attach/", folder .. "geometry/", folder .. "sweep/",
    folder .. "report/" } do
    if prefix ~= "" and own:sub(-#prefix) == prefix then return rest end
  end
  return message
end

-- Call f; misuse that it raises is located at `where` instead of inside this module.
function errors.located(where, f, ...)
  local results = table.pack(pcall(f, ...))
  if results[1] then return table.unpack(results, 2, results.n) end
  local e = results[2]
  if type(e) == "string" then
    local stripped = errors.strip(e)
    if stripped ~= e then errors.at(where, "%s", stripped) end
  end
  error(e, 0)
end

function errors.is_failure(e) return getmetatable(e) == Failure end

-- One line of valid UTF-8 without control characters, and not endless.
local function one_line(text)
  text = text:gsub("%s*\n%s*", " | ")
  if #text > 4000 then text = text:sub(1, 4000) .. "…" end
  text = text:gsub("[%z\1-\8\11-\31\127]", function(c) return ("\\x%02x"):format(c:byte()) end)
  if utf8.len(text) then return text end
  return (text:gsub("[\128-\255]", function(c) return ("\\x%02x"):format(c:byte()) end))
end

-- The text of any error value, in one line, whatever it is and whatever its __tostring does.
function errors.text(e)
  if type(e) == "string" then return one_line(errors.strip(e)) end
  if e == nil then return "nil was raised as an error" end
  local ok, text = pcall(tostring, e)
  if not ok or type(text) ~= "string" then
    return ("an error object of type %s, whose __tostring fails"):format(type(e))
  end
  text = one_line(text)
  local meta = debug.getmetatable(e)
  if type(meta) == "table" and meta.__tostring then return text end
  return ("an error object of type %s was raised (%s)"):format(type(e), text)
end

-- Call f; a world failure gets the position of the recipe line that asked for it.
function errors.guard_world(where, f)
  local ok, e = pcall(f)
  if ok then return end
  if errors.is_failure(e) and not e.usage and where and not e.located then
    e.message, e.located = where .. ": " .. e.message, true
  end
  error(e, 0)
end

-- Call f; world failures come back as `nil, message, name`, other errors pass through.
function errors.guard(f, ...)
  local results = table.pack(xpcall(f, function(e)
    if errors.is_failure(e) then return e end
    return { error = e, trace = debug.traceback("", 2) }
  end, ...))
  if results[1] then return table.unpack(results, 2, results.n) end
  local e = results[2]
  if errors.is_failure(e) then
    if e.usage then error(e, 0) end
    return nil, e.message, e.name
  end
  error(e.error, 0)
end

return errors
