-- Checks of values with one form of message: what it is, the value given, what is allowed.
local errors = require "perigee.errors"
local keys = require "perigee.keys"

local check = {}

-- Deepest nesting of tables in a recipe or in run.state.
check.max_depth = 32

-- A value as it appears in messages: short, quoted, never raising.
function check.show(value)
  local kind = type(value)
  if kind == "string" then
    local text = value:sub(1, 60):gsub("[%c\128-\255]", function(c)
      return ("\\%d"):format(c:byte())
    end)
    return #value > 60 and ('"%s…"'):format(text) or ('"%s"'):format(text)
  elseif kind == "number" then
    if math.type(value) == "integer" then return tostring(value) end
    if value ~= value then return "nan" end
    local short = ("%.14g"):format(value)
    if tonumber(short) ~= value then short = ("%.17g"):format(value) end
    return (short:gsub(",", ".")) -- a locale may have a decimal comma
  elseif kind == "boolean" or kind == "nil" then
    return tostring(value)
  elseif kind == "table" then
    local name = rawget(debug.getmetatable(value) or {}, "__name")
    return type(name) == "string" and name or "a table"
  end
  return "a " .. kind
end

function check.fail(where, name, value, allowed)
  errors.at(where, "%s = %s is not allowed: expected %s", name, check.show(value), allowed)
end

-- Text of a range: "a number > 0 and <= 1".
function check.range_text(range)
  local text = range.integer and "a whole number" or "a number"
  local parts = {}
  if range.min and range.min > -math.huge then
    parts[#parts + 1] = (range.open_min and "> " or ">= ") .. check.show(range.min)
  end
  if range.max and range.max < math.huge then
    parts[#parts + 1] = (range.open_max and "< " or "<= ") .. check.show(range.max)
  end
  if #parts > 0 then text = text .. " " .. table.concat(parts, " and ") end
  return text
end

function check.in_range(value, range)
  if type(value) ~= "number" or value ~= value then return false end
  if not range.infinite and (value == math.huge or value == -math.huge) then return false end
  if range.integer and math.tointeger(value) == nil then return false end
  if range.min and (value < range.min or (range.open_min and value == range.min)) then
    return false
  end
  if range.max and (value > range.max or (range.open_max and value == range.max)) then
    return false
  end
  return true
end

-- range: { min=, max=, open_min=, open_max=, integer=, infinite= (allow inf), also = text }
function check.number(where, name, value, range)
  range = range or {}
  if not check.in_range(value, range) then
    local allowed = check.range_text(range)
    if range.also then allowed = allowed .. ", or " .. range.also end
    check.fail(where, name, value, allowed)
  end
  return range.integer and math.tointeger(value) or value
end

function check.integer(where, name, value, min, max, also)
  return check.number(where, name, value, { min = min, max = max, integer = true, also = also })
end

function check.string(where, name, value, also)
  if type(value) ~= "string" or value == "" then
    check.fail(where, name, value, "a non-empty string" .. (also and (", or " .. also) or ""))
  end
  return value
end

function check.boolean(where, name, value)
  if type(value) ~= "boolean" then check.fail(where, name, value, "true or false") end
  return value
end

function check.table(where, name, value, allowed)
  if type(value) ~= "table" then check.fail(where, name, value, allowed or "a table") end
  return value
end

-- One of a list of strings; the nearest is suggested.
function check.one_of(where, name, value, list)
  for _, allowed in ipairs(list) do
    if value == allowed then return value end
  end
  local quoted = {}
  for i, allowed in ipairs(list) do quoted[i] = ('"%s"'):format(allowed) end
  local hint = ""
  if type(value) == "string" then
    hint = ("; did you mean '%s'?"):format(keys.nearest(value:sub(1, 60), list))
  end
  check.fail(where, name, value, table.concat(quoted, " or ") .. hint)
end

-- "auto", "cpu", "cuda" or "cuda:N"; returns the device and its index.
function check.device(where, name, value)
  local index = type(value) == "string" and value:match("^cuda:(%d%d?%d?)$")
  if index then return "cuda", math.tointeger(index) end
  if value ~= "auto" and value ~= "cpu" and value ~= "cuda" then
    check.fail(where, name, value, '"auto", "cpu", "cuda" or "cuda:N"')
  end
  return value, 0
end

-- Refuse tables that contain themselves or nest deeper than max_depth. Objects (tables with a
-- metatable) are left alone: they were checked when they were made.
function check.nesting(where, name, value)
  local open = {}
  local function visit(t, path, depth)
    if type(t) ~= "table" or getmetatable(t) ~= nil then return end
    if open[t] then errors.at(where, "%s contains itself (at %s)", name, path) end
    if depth > check.max_depth then
      errors.at(where, "%s is nested deeper than %d tables (at %s…)", name, check.max_depth,
        path:sub(1, 80))
    end
    open[t] = true
    for k, v in next, t do
      if type(v) == "table" then
        local step = type(k) == "string" and ("." .. k:sub(1, 20))
          or ("[%s]"):format(check.show(k))
        visit(v, path .. step, depth + 1)
      end
    end
    open[t] = nil
  end
  visit(value, name, 1)
end

return check
