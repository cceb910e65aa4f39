-- pg.optim.NAME{…}: optimizers with checked hyperparameters. Names, defaults and ranges come from
-- the core's descriptors; pg.optim.define makes new ones that are used alike.
local core = require "perigee.core"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local check = require "perigee.check"

local optim = {}

local Optimizer = { __name = "an optimizer" }
Optimizer.__index = Optimizer

local descriptors -- name -> descriptor of the core, in `names` order
local names
local defined = {} -- name -> constructor of an optimizer in Lua

local function load_descriptors()
  if descriptors then return end
  descriptors, names = {}, {}
  for _, descriptor in ipairs(core.optimizers()) do
    descriptors[descriptor.name] = descriptor
    names[#names + 1] = descriptor.name
  end
end

local function copy_pair(value) return { value[1], value[2] } end

local function range_of(hyper)
  return { min = hyper.min, max = hyper.max, open_min = hyper.open_min,
    open_max = hyper.open_max, integer = hyper.kind == "integer" }
end

-- A value of hyperparameter `hyper`, checked; the message says `name.hyper`.
local function checked(where, label, hyper, value)
  if hyper.kind == "number" or hyper.kind == "integer" then
    return check.number(where, label, value, range_of(hyper))
  elseif hyper.kind == "boolean" then
    return check.boolean(where, label, value)
  elseif hyper.kind == "choice" then
    return check.one_of(where, label, value, hyper.choices)
  elseif hyper.kind == "pair" then
    local range = range_of(hyper)
    local allowed = ("two numbers, each %s"):format(check.range_text(range))
    if type(value) ~= "table" or #value ~= 2 then check.fail(where, label, value, allowed) end
    keys.check(value, {}, label, where, 2)
    for i = 1, 2 do
      check.number(where, ("%s[%d]"):format(label, i), value[i], range)
    end
    return copy_pair(value)
  end
  return value
end

local policies = { "lr", "independent" }

-- What every optimizer takes beside its own hyperparameters.
local common = { "weight_decay_scale", "cautious", "clip" }

local function build(descriptor, options, userdata)
  local label = "pg.optim." .. descriptor.name
  local where = errors.where()
  if options == nil then options = {} end
  check.table(where, label, options)
  local known = {}
  for _, hyper in ipairs(descriptor.hypers) do known[#known + 1] = hyper.name end
  table.move(common, 1, #common, #known + 1, known)
  keys.check(options, known, label, where)
  local self = { name = descriptor.name, descriptor = descriptor, where = where, hypers = {},
    functions = {}, userdata = userdata }
  for _, hyper in ipairs(descriptor.hypers) do
    local value = options[hyper.name]
    local field = label .. "." .. hyper.name
    if value == nil then
      value = hyper.default
      if value == nil then
        errors.at(where, "%s is missing: expected %s", field, check.range_text(range_of(hyper)))
      end
      if type(value) == "table" then value = copy_pair(value) end
    elseif type(value) == "function" then
      if hyper.kind ~= "number" and hyper.kind ~= "integer" then
        check.fail(where, field, value, ("a %s; only numbers may be functions of the update")
          :format(hyper.kind))
      end
      self.functions[hyper.name] = value
    else
      value = checked(where, field, hyper, value)
    end
    self.hypers[hyper.name] = value
  end
  -- Without a statement parameters keep the policy of the entry that they had.
  self.states_decay_scale = options.weight_decay_scale ~= nil
  self.decay_scale = check.one_of(where, label .. ".weight_decay_scale",
    options.weight_decay_scale or "lr", policies)
  self.cautious = check.boolean(where, label .. ".cautious", options.cautious or false)
  self.clip = options.clip or false
  if self.clip then
    check.number(where, label .. ".clip", self.clip, { min = 0, open_min = true })
  end
  return setmetatable(self, Optimizer)
end

-- The same optimizer with some hyperparameters changed.
function Optimizer:with(changes)
  local options = self:stated_options()
  for name, value in pairs(self.hypers) do options[name] = value end
  for name, value in pairs(changes) do options[name] = value end
  return build(self.descriptor, options, self.userdata)
end

-- Those of `common` that were given.
function Optimizer:stated_options()
  return { weight_decay_scale = self.states_decay_scale and self.decay_scale or nil,
    cautious = self.cautious or nil, clip = self.clip or nil }
end

function optim.is(value) return getmetatable(value) == Optimizer end
function Optimizer:is_frozen() return self.name == "frozen" end

-- The hyperparameters at update index t as plain values; functions are called and checked.
function Optimizer:values(t, total)
  local values = {}
  for _, hyper in ipairs(self.descriptor.hypers) do
    local value = self.hypers[hyper.name]
    if type(value) == "function" then
      value = checked(errors.defined(value),
        ("pg.optim.%s.%s at update %d"):format(self.name, hyper.name, t), hyper, value(t, total))
    end
    values[hyper.name] = value
  end
  return values
end

-- Only what changes with the update; nil when nothing does.
function Optimizer:changing(t, total)
  if not next(self.functions) then return nil end
  local all, some = self:values(t, total), {}
  for name in pairs(self.functions) do some[name] = all[name] end
  return some
end

-- The peak learning rate at update index t; 0 for frozen.
function Optimizer:peak(t, total)
  local lr = self.hypers.lr
  if lr == nil then return 0 end
  if type(lr) == "function" then return self:values(t, total).lr end
  return lr
end

-- What the core assigns: its own registered optimizer or one defined in Lua.
function Optimizer:core_optimizer()
  return self.userdata or errors.try(core.optimizer(self.name))
end

-- What the shape of a parameter multiplies the step by.
function Optimizer:factor(rows, columns)
  local hypers = {}
  for name, value in pairs(self.hypers) do
    if type(value) ~= "function" then hypers[name] = value end
  end
  return self:core_optimizer():factor(hypers, rows, columns)
end

-- "adamw { betas = {0.9, 0.999}, … }" in the descriptor's order.
function Optimizer:describe()
  local parts = {}
  for _, hyper in ipairs(self.descriptor.hypers) do
    local value = self.hypers[hyper.name]
    local text
    if type(value) == "table" then
      text = ("{%s, %s}"):format(check.show(value[1]), check.show(value[2]))
    elseif type(value) == "function" then
      text = "function at " .. errors.defined_briefly(value)
    else
      text = check.show(value)
    end
    parts[#parts + 1] = ("%s = %s"):format(hyper.name, text)
  end
  if self.decay_scale ~= "lr" then
    parts[#parts + 1] = ('weight_decay_scale = "%s"'):format(self.decay_scale)
  end
  if self.cautious then parts[#parts + 1] = "cautious = true" end
  if self.clip then parts[#parts + 1] = "clip = " .. check.show(self.clip) end
  return ("%s { %s }"):format(self.name, table.concat(parts, ", "))
end

-- A form that state.json can hold, and back.
function Optimizer:to_data()
  local hypers = {}
  for _, hyper in ipairs(self.descriptor.hypers) do
    local value = self.hypers[hyper.name]
    if type(value) == "function" then
      errors.misuse("run:set_optimizer: %s of %s is a function, which a checkpoint cannot hold: "
        .. "give a number, or use run.state and set it again", hyper.name, self.name)
    end
    hypers[hyper.name] = value
  end
  local data = self:stated_options()
  data.name, data.hypers = self.name, hypers
  return data
end

function optim.from_data(data)
  load_descriptors()
  local options = {}
  for name, value in pairs(data.hypers) do options[name] = value end
  for _, name in ipairs(common) do options[name] = data[name] end
  if defined[data.name] then return defined[data.name](options) end
  if not descriptors[data.name] then
    errors.world(("the checkpoint uses optimizer '%s', which this recipe does not define")
      :format(data.name), "ESTATE")
  end
  return build(descriptors[data.name], options)
end

local slot_shapes = { "matrix", "row", "column", "rows_square", "columns_square", "scalar",
  "rows_factor", "columns_factor" }

-- The descriptor of an optimizer in Lua: hyperparameter kinds come from the defaults.
local function descriptor_of(spec, where)
  local hypers = {}
  for name, default in pairs(spec.defaults) do
    local label = "pg.optim.define defaults." .. tostring(name)
    local hyper = { name = name, default = default, kind = type(default), help = "" }
    if type(name) ~= "string" then check.fail(where, label, name, "a name") end
    for _, taken in ipairs(common) do
      if name == taken then
        check.fail(where, label, default, "a name that is no option of every optimizer")
      end
    end
    if type(default) == "table" then
      hyper.kind = "pair"
      hyper.default = checked(where, label, hyper, default)
    elseif hyper.kind ~= "number" and hyper.kind ~= "boolean" then
      check.fail(where, label, default, "a number, a boolean or a pair of numbers")
    end
    if name == "lr" or name == "weight_decay" then hyper.min = 0 end
    hypers[#hypers + 1] = hyper
  end
  -- lr first, weight_decay last, the others by name: a fixed order for descriptions.
  local function rank(name)
    return (name == "lr" and "0" or name == "weight_decay" and "2" or "1") .. name
  end
  table.sort(hypers, function(a, b) return rank(a.name) < rank(b.name) end)
  local slots = {}
  for name in pairs(spec.slots) do slots[#slots + 1] = name end
  table.sort(slots)
  return { name = spec.name, help = spec.help or "", hypers = hypers, slots = slots }
end

-- pg.optim.define { name, slots, defaults, increment } -> constructor
function optim.define(spec)
  load_descriptors()
  local where = errors.where()
  check.table(where, "pg.optim.define", spec)
  keys.check(spec, { "name", "slots", "defaults", "increment", "help" }, "pg.optim.define", where)
  check.string(where, "pg.optim.define name", spec.name)
  if not spec.name:match("^[%a_][%w_]*$") or #spec.name > 64 then
    check.fail(where, "pg.optim.define name", spec.name, "letters, digits and _")
  end
  if descriptors[spec.name] then
    check.fail(where, "pg.optim.define name", spec.name, "a name that the core does not use")
  end
  local slots = spec.slots or {}
  check.table(where, "pg.optim.define slots", slots, "a table of slot name = shape")
  for name, shape in pairs(slots) do
    check.string(where, "pg.optim.define slot name", name)
    check.one_of(where, "pg.optim.define slots." .. name, shape, slot_shapes)
  end
  local defaults = { lr = 1e-3, weight_decay = 0 }
  for name, value in pairs(check.table(where, "pg.optim.define defaults", spec.defaults or {})) do
    defaults[name] = value
  end
  if type(spec.increment) ~= "function" then
    check.fail(where, "pg.optim.define increment", spec.increment, "a function(w, h)")
  end
  local full = { name = spec.name, slots = slots, defaults = defaults, help = spec.help,
    increment = spec.increment }
  local descriptor = descriptor_of(full, where)
  local userdata
  local function construct(options)
    userdata = userdata or errors.try(core.define_optimizer {
      name = full.name, slots = full.slots, defaults = full.defaults,
      increment = full.increment })
    return build(descriptor, options, userdata)
  end
  defined[spec.name] = construct
  return construct
end

-- Help of one optimizer, from its descriptor.
function optim.help(name)
  load_descriptors()
  local descriptor = descriptors[check.one_of(nil, "optimizer", name, names)]
  local lines = { ("%s: %s"):format(name, descriptor.help) }
  for _, hyper in ipairs(descriptor.hypers) do
    local default = type(hyper.default) == "table"
      and ("{%s, %s}"):format(check.show(hyper.default[1]), check.show(hyper.default[2]))
      or check.show(hyper.default)
    lines[#lines + 1] = ("  %-14s %s (default %s)"):format(hyper.name, hyper.help, default)
  end
  return table.concat(lines, "\n")
end

function optim.names()
  load_descriptors()
  return names
end

-- pg.optim: constructors by name.
optim.public = setmetatable({ define = optim.define, help = optim.help }, {
  __names = optim.names, -- for completion
  __index = function(t, name)
    load_descriptors()
    local descriptor = descriptors[name]
    if not descriptor then
      local known = table.move(names, 1, #names, 1, {})
      known[#known + 1] = "define"
      errors.misuse("pg.optim has no '%s'%s", tostring(name), keys.suggestion(name, known))
    end
    local function construct(options) return build(descriptor, options) end
    rawset(t, name, construct)
    return construct
  end,
})

return optim
