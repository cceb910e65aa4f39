-- run.state as JSON: plain tables, numbers, strings and booleans, exactly. What JSON cannot say
-- (integer keys, bytes that are not UTF-8, non-finite numbers) is wrapped in one-key objects:
-- { array = […] }, { map = {…} }, { pairs = [[k, v], …] }, { bytes = hex }, { number = "inf" }.
local core = require "perigee.core"
local errors = require "perigee.errors"
local check = require "perigee.check"

local pack = {}

-- Two JSON levels per table level must stay within core.json's depth limit.
local max_depth = 24

local function hex(text)
  return (text:gsub(".", function(c) return ("%02x"):format(c:byte()) end))
end

local function is_text(value) return utf8.len(value) ~= nil and not value:find("\0", 1, true) end

-- A key's order in `pairs`: numbers, then strings, then booleans.
local function key_order(a, b)
  local ka, kb = type(a), type(b)
  if ka ~= kb then return ka < kb end
  if ka == "boolean" then return not a and b end
  return a < b
end

local function encode(value, path, open, depth)
  local kind = type(value)
  if kind == "boolean" then return value end
  if kind == "number" then
    if value ~= value then return { number = "nan" } end
    if value == math.huge then return { number = "inf" } end
    if value == -math.huge then return { number = "-inf" } end
    return value
  end
  if kind == "string" then
    return is_text(value) and value or { bytes = hex(value) }
  end
  if kind ~= "table" then
    errors.misuse("%s is a %s: run.state holds plain tables, numbers, strings and booleans only",
      path, kind)
  end
  if getmetatable(value) ~= nil then
    errors.misuse("%s is %s with a metatable: run.state holds plain tables, numbers, strings and "
      .. "booleans only", path, check.show(value))
  end
  if open[value] then errors.misuse("%s contains itself", path) end
  if depth > max_depth then
    errors.misuse("%s is nested deeper than %d tables", path:sub(1, 120), max_depth)
  end
  open[value] = true
  local count, strings, list = 0, true, {}
  for k in next, value do
    count = count + 1
    list[count] = k
    if type(k) ~= "string" or not is_text(k) then strings = false end
    if type(k) == "table" or type(k) == "function" or type(k) == "userdata" then
      errors.misuse("%s has a key that is a %s: expected strings, numbers or booleans", path,
        type(k))
    end
  end
  local out
  if count > 0 and count == #value then
    local array = {}
    for i = 1, count do
      array[i] = encode(value[i], ("%s[%d]"):format(path, i), open, depth + 1)
    end
    out = { array = core.json.array(array) }
  elseif strings then
    local map = {}
    for _, k in ipairs(list) do
      map[k] = encode(value[k], path .. "." .. k, open, depth + 1)
    end
    out = { map = map }
  else
    table.sort(list, key_order)
    local entries = {}
    for i, k in ipairs(list) do
      local at = ("%s[%s]"):format(path, check.show(k))
      entries[i] = core.json.array { encode(k, at, open, depth + 1),
        encode(value[k], at, open, depth + 1) }
    end
    out = { pairs = core.json.array(entries) }
  end
  open[value] = nil
  return out
end

function pack.encode(value, name) return encode(value, name or "run.state", {}, 1) end

local special = { nan = 0 / 0, inf = math.huge, ["-inf"] = -math.huge }

function pack.decode(value)
  if type(value) ~= "table" then return value end
  if value.number then return special[value.number] end
  if value.bytes then
    return (value.bytes:gsub("%x%x", function(h) return string.char(tonumber(h, 16)) end))
  end
  local out = {}
  if value.array then
    for i, v in ipairs(value.array) do out[i] = pack.decode(v) end
  elseif value.map then
    for k, v in pairs(value.map) do out[k] = pack.decode(v) end
  elseif value.pairs then
    for _, entry in ipairs(value.pairs) do
      out[pack.decode(entry[1])] = pack.decode(entry[2])
    end
  end
  return out
end

return pack
