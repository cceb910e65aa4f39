-- Completion at the prompt: names, fields along chains of `.`, `:` and `[1]`, and tokens inside
-- tok "…". Only what can be looked at without running code of the user is followed: fields of
-- tables, methods of userdata, and objects whose metatable lists their names (__names). What is
-- expensive to make is not made for its names: __peek gives a stand-in.
local core = require "perigee.core"
local show = require "perigee.repl.print"

local complete = {}

local keywords = { "and", "break", "do", "else", "elseif", "end", "false", "for", "function",
  "goto", "if", "in", "local", "nil", "not", "or", "repeat", "return", "then", "true", "until",
  "while" }

complete.parameter_fields = { "name", "role", "layer", "rows", "columns", "updates", "optimizer",
  "value", "gradient", "increment", "slots" }

local function add_keys(names, t)
  for key in next, t do
    if type(key) == "string" then names[key] = true end
  end
end

-- Names that may follow `value` and a point, as a set.
function complete.names(value)
  local names = {}
  local meta = debug.getmetatable(value)
  if type(value) == "table" then add_keys(names, value) end
  if type(value) == "string" then add_keys(names, string) end
  if type(meta) ~= "table" then return names end
  if meta.__name == "perigee.tensor" then add_keys(names, core.tensor_methods) end
  if meta.__name == "perigee.parameter" then
    for _, name in ipairs(complete.parameter_fields) do names[name] = true end
    add_keys(names, core.parameter_methods)
  end
  if type(meta.__index) == "table" then
    for name in pairs(complete.names(meta.__index)) do names[name] = true end
  end
  if meta.__names then
    local ok, list = pcall(meta.__names, value)
    for _, name in ipairs(ok and list or {}) do names[name] = true end
  end
  return names
end

-- value[key] where that is safe to look at; nil otherwise.
local function step(value, key)
  local meta = debug.getmetatable(value)
  if type(value) == "table" then
    local found = rawget(value, key)
    if found ~= nil then return found end
    if type(meta) ~= "table" then return nil end
    if type(meta.__index) == "table" then return step(meta.__index, key) end
    if not meta.__names then return nil end
  elseif type(value) ~= "userdata" then
    return nil
  end
  local peek = type(meta) == "table" and meta.__peek or function(t, k) return t[k] end
  local ok, found = pcall(peek, value, key)
  return ok and found or nil
end

-- The chain at the end of a line: its steps, what is typed of the last name, and whether it follows
-- a colon; nil when there is no chain.
local function parse(line)
  local chain = line:match("[%w_%.:%[%]\"']*$")
  local typed = chain:match("[%a_][%w_]*$") or ""
  local rest = chain:sub(1, #chain - #typed)
  if rest == "" then
    -- A digit before the name, as in 1e, is no name.
    if line:sub(1, #line - #typed):match("%d$") then return nil end
    return {}, typed, false
  end
  local colon = rest:sub(-1) == ":"
  if not rest:match("[.:]$") then return nil end
  rest = rest:sub(1, -2)
  local steps = {}
  local at = 1
  while at <= #rest do
    local from, to, name = rest:find("^[.]?([%a_][%w_]*)", at)
    local key = name
    if not from then
      local number
      from, to, number = rest:find("^%[(%d+)%]", at)
      key = math.tointeger(tonumber(number))
    end
    if not from then
      from, to, name = rest:find("^%[[\"']([^\"']*)[\"']%]", at)
      key = name
    end
    if not from then return nil end
    steps[#steps + 1] = key
    at = to + 1
  end
  return #steps > 0 and steps or nil, typed, colon
end

local function common_prefix(list)
  local prefix = list[1]
  for _, text in ipairs(list) do
    while text:sub(1, #prefix) ~= prefix do prefix = prefix:sub(1, -2) end
  end
  -- Not within a character.
  while #prefix > 0 and not utf8.len(prefix) do prefix = prefix:sub(1, -2) end
  return prefix
end

local most_shown = 100

-- The longest text that all candidates share beyond what is typed, and a list when that is nothing.
local function choose(candidates, typed, ending)
  if #candidates == 0 then return nil, nil end
  table.sort(candidates)
  local prefix = common_prefix(candidates)
  if #candidates == 1 then return prefix:sub(#typed + 1) .. (ending or ""), nil end
  if #prefix > #typed then return prefix:sub(#typed + 1), nil end
  local shown = table.move(candidates, 1, math.min(#candidates, most_shown), 1, {})
  local text = table.concat(shown, "  ")
  if #candidates > most_shown then
    text = ("%s  … %d more"):format(text, #candidates - most_shown)
  end
  return nil, text
end

-- Token texts inside a string that begins with `typed`, as they are written in Lua.
local function tokens(workspace, typed, quote)
  local found, seen = {}, {}
  for _, text in ipairs(workspace:token_texts()) do
    local written = show.quoted(text, #text):sub(2, -2)
    if written:sub(1, #typed) == typed and not seen[written] then
      seen[written] = true
      found[#found + 1] = written
    end
  end
  return choose(found, typed, quote)
end

-- What the tab key does after `line`: text to insert, text to show; each may be nil.
function complete.line(workspace, line)
  local quote, typed = line:match("tok%s*%(?%s*([\"'])([^\"']*)$")
  if quote then return tokens(workspace, typed, quote) end
  local steps, name, colon = parse(line)
  if not steps then return nil, nil end
  local value = workspace.env
  for i, key in ipairs(steps) do
    local found = step(value, key)
    if found == nil and i == 1 then found = _G[key] end
    value = found
    if value == nil then return nil, nil end
  end
  local names = complete.names(value)
  if #steps == 0 then
    add_keys(names, _G)
    for _, word in ipairs(keywords) do names[word] = true end
  end
  local candidates = {}
  for candidate in pairs(names) do
    local fits = candidate:sub(1, #name) == name and candidate:match("^[%a_][%w_]*$")
      and (name ~= "" or candidate:sub(1, 1) ~= "_")
    if fits and (not colon or type(step(value, candidate)) == "function") then
      candidates[#candidates + 1] = candidate
    end
  end
  return choose(candidates, name)
end

return complete
