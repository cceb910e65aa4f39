-- pg.params: what the command line (--set k=v), a sweep or a host program may set in a recipe. The
-- defaults give the types; pg.choice restricts to a list.
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local check = require "perigee.check"

local params = {}

local Choice = { __name = "a pg.choice" }
Choice.__index = Choice

-- The settings in force while a recipe is being read: `given` are the values from outside,
-- `declared` collects what the recipe declares.
local scope

-- pg.choice { "rownorm", "adamw" }: the first is the default.
function params.choice(list)
  check.table(nil, "pg.choice", list, "a list of values")
  if #list == 0 then check.fail(nil, "pg.choice", list, "at least one value") end
  local kind = type(list[1])
  for i, value in ipairs(list) do
    if type(value) ~= kind or (kind ~= "string" and kind ~= "number") then
      check.fail(nil, ("pg.choice[%d]"):format(i), value, "strings only, or numbers only")
    end
  end
  keys.check(list, {}, "pg.choice", nil, #list)
  return setmetatable({ values = table.move(list, 1, #list, 1, {}) }, Choice)
end

local function allowed_text(default)
  if getmetatable(default) == Choice then
    local shown = {}
    for i, v in ipairs(default.values) do shown[i] = check.show(v) end
    return table.concat(shown, " or ")
  elseif type(default) == "boolean" then
    return "true or false"
  elseif math.type(default) == "integer" then
    return "a whole number, as the default " .. default
  elseif type(default) == "number" then
    return "a number, as the default " .. check.show(default)
  end
  return "a string"
end

-- The value of `given` (a string from a command line, or a Lua value) as the default's type; nil
-- when it does not fit.
local function convert(given, default)
  if getmetatable(default) == Choice then
    local value = given
    if type(default.values[1]) == "number" then value = tonumber(given) end
    for _, allowed in ipairs(default.values) do
      if value == allowed then return allowed end
    end
    return nil
  elseif type(default) == "boolean" then
    if given == true or given == "true" then return true end
    if given == false or given == "false" then return false end
    return nil
  elseif type(default) == "number" then
    local value = type(given) == "boolean" and nil or tonumber(given)
    if not value or value ~= value or value == math.huge or value == -math.huge then return nil end
    if math.type(default) == "integer" then return math.tointeger(value) end
    return value + 0.0
  end
  return type(given) == "string" and given or nil
end

-- pg.params { name = default, … } -> table of values.
function params.declare(defaults)
  check.table(nil, "pg.params", defaults, "a table of defaults")
  local values = {}
  local given = scope and scope.given or {}
  for name, default in pairs(defaults) do
    if type(name) ~= "string" or not name:match("^[%a_][%w_]*$") then
      errors.misuse("pg.params: %s is not a name (letters, digits, _)", check.show(name))
    end
    local kind = type(default)
    if getmetatable(default) ~= Choice and kind ~= "number" and kind ~= "string"
      and kind ~= "boolean" then
      check.fail(nil, "pg.params." .. name, default, "a number, string, boolean or pg.choice")
    end
    if given[name] ~= nil then
      local value = convert(given[name], default)
      if value == nil then
        errors.usage("%s = %s is not allowed: expected %s", name, check.show(given[name]),
          allowed_text(default))
      end
      values[name] = value
    elseif getmetatable(default) == Choice then
      values[name] = default.values[1]
    else
      values[name] = default
    end
    if scope then
      scope.declared[name] = { default = default, value = values[name] }
    end
  end
  return setmetatable(values, {
    __index = function(_, key)
      local known = {}
      for name in pairs(defaults) do known[#known + 1] = name end
      table.sort(known)
      errors.misuse("params has no '%s'%s", tostring(key), keys.suggestion(key, known))
    end,
  })
end

-- Call f with these values in force. Returns f's results after a table of what was declared
-- (name -> value). A given name that nothing declared is a usage error.
function params.with(given, f, ...)
  local outer = scope
  scope = { given = given or {}, declared = {} }
  local mine = scope
  local results = table.pack(pcall(f, ...))
  scope = outer
  if not results[1] then error(results[2], 0) end
  local known, values = {}, {}
  for name, entry in pairs(mine.declared) do
    known[#known + 1] = name
    values[name] = entry.value
  end
  table.sort(known)
  local names = {}
  for name in pairs(mine.given) do names[#names + 1] = tostring(name) end
  table.sort(names)
  for _, name in ipairs(names) do
    if mine.declared[name] == nil then
      if #known == 0 then
        errors.usage("the recipe has no parameter '%s': it declares none with pg.params", name)
      end
      errors.usage("the recipe has no parameter '%s'%s", name, keys.suggestion(name, known))
    end
  end
  return values, table.unpack(results, 2, results.n)
end

-- "k=v" -> k, v; a usage error otherwise.
function params.parse(text)
  local name, value = text:match("^([%a_][%w_]*)=(.*)$")
  if not name then errors.usage("--set %s: expected name=value", text) end
  return name, value
end

return params
