-- Learning-rate schedules: functions of the update index t = 0 … total-1 to a scale.
--
-- A schedule object has scale(t, total) and describe(); any function(t, total) is one too. Shapes
-- follow SPEC §3: the last update of warmup_cosine and linear stands at the floor.
local core = require "perigee.core"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local check = require "perigee.check"

local schedule = {}

local Schedule = { __name = "a schedule" }
Schedule.__index = Schedule

local function new(name, options, scale)
  return setmetatable({ name = name, options = options, compute = scale,
    where = errors.where() }, Schedule)
end

local function number(options, name, default, range)
  local value = options[name]
  if value == nil then value = default end
  return check.number(nil, "schedule " .. name, value, range)
end

local fraction = { min = 0, max = 1 }

local function open(name, options, known)
  if options == nil then options = {} end
  check.table(nil, "pg.schedule." .. name, options)
  keys.check(options, known, "pg.schedule." .. name)
  return options
end

-- W of SPEC §3: trunc(fraction * total), refused unless 0 <= W < total.
local function warmup_length(share, total)
  return errors.try(core.schedule_warmup(share, total))
end

local shapes = {
  linear = function(x) return 1 - x end,
  cosine = function(x) return 0.5 * (1 + math.cos(math.pi * x)) end,
  sqrt = function(x) return 1 - math.sqrt(x) end, -- "1 - sqrt" cooldown
}
local shape_names = { "linear", "cosine", "sqrt" }

-- From 1 to `floor` over `length` updates; i = 0 … length-1. The last update runs at the floor.
local function decay(shape, i, length, floor)
  if length <= 1 then return floor end
  return floor + (1 - floor) * shapes[shape](math.min(1, i / (length - 1)))
end

-- Linear warmup over a share of the plan, then a cosine to `floor` of the peak (the paper's).
function schedule.warmup_cosine(options)
  options = open("warmup_cosine", options, { "warmup", "floor" })
  local warmup = number(options, "warmup", 0.1, { min = 0, max = 1, open_max = true })
  local floor = number(options, "floor", 0.1, fraction)
  return new("warmup_cosine", { warmup = warmup, floor = floor }, function(t, total)
    return core.warmup_cosine(t, total, warmup_length(warmup, total), floor)
  end)
end

-- The peak throughout, after an optional warmup.
function schedule.constant(options)
  options = open("constant", options, { "warmup", "scale" })
  local warmup = number(options, "warmup", 0, { min = 0, max = 1, open_max = true })
  local scale = number(options, "scale", 1, { min = 0 })
  return new("constant", { warmup = warmup, scale = scale }, function(t, total)
    local w = warmup_length(warmup, total)
    return t < w and scale * t / w or scale
  end)
end

-- Warmup, then a straight line to the floor.
function schedule.linear(options)
  options = open("linear", options, { "warmup", "floor" })
  local warmup = number(options, "warmup", 0, { min = 0, max = 1, open_max = true })
  local floor = number(options, "floor", 0, fraction)
  return new("linear", { warmup = warmup, floor = floor }, function(t, total)
    local w = warmup_length(warmup, total)
    if t < w then return t / w end
    return decay("linear", t - w, total - w, floor)
  end)
end

-- Warmup, stable, decay over the last share of the plan.
function schedule.wsd(options)
  options = open("wsd", options, { "warmup", "decay", "floor", "shape" })
  local warmup = number(options, "warmup", 0.1, { min = 0, max = 1, open_max = true })
  local share = number(options, "decay", 0.2, fraction)
  local floor = number(options, "floor", 0, fraction)
  local shape = check.one_of(nil, "schedule shape", options.shape or "linear", shape_names)
  if warmup + share > 1 then
    errors.misuse("pg.schedule.wsd: warmup + decay = %s is not allowed: expected at most 1",
      check.show(warmup + share))
  end
  return new("wsd", { warmup = warmup, decay = share, floor = floor, shape = shape },
    function(t, total)
      local w = warmup_length(warmup, total)
      local length = math.floor(share * total)
      local first = total - length
      if t < w then return t / w end
      if t < first then return 1 end
      return decay(shape, t - first, length + 1, floor)
    end)
end

-- For a branch of a run: the peak up to update index `from`, then a decay over `length` updates.
-- Update numbers are absolute. Here and in wsd the floor would be reached one update after the
-- last: with a floor of 0 no update is spent at scale 0.
function schedule.cooldown(options)
  options = open("cooldown", options, { "from", "length", "shape", "floor" })
  local from = check.integer(nil, "schedule from", options.from, 0)
  local length = check.integer(nil, "schedule length", options.length, 1)
  local floor = number(options, "floor", 0, fraction)
  local shape = check.one_of(nil, "schedule shape", options.shape or "linear", shape_names)
  return new("cooldown", { from = from, length = length, shape = shape, floor = floor },
    function(t)
      if t < from then return 1 end
      if t >= from + length then return floor end
      return decay(shape, t - from, length + 1, floor)
    end)
end

-- A schedule object from what a recipe may write: an object or a function.
function schedule.from(value, where, name)
  if getmetatable(value) == Schedule then return value end
  if type(value) == "function" then
    local made = new("function", {}, value)
    made.where = errors.defined(value)
    return made
  end
  check.fail(where, name or "schedule", value,
    "pg.schedule.NAME{…} or a function(update, total) that returns a scale")
end

function schedule.is(value) return getmetatable(value) == Schedule end

-- The scale of update index t, checked.
function Schedule:scale(t, total)
  local scale = self.compute(t, total)
  if type(scale) ~= "number" or scale ~= scale or scale < 0 or scale == math.huge then
    errors.at(self.where, "the schedule gave %s at update %d of %d: expected a finite number >= 0",
      check.show(scale), t, total)
  end
  return scale
end

-- "warmup_cosine { floor = 0.1, warmup = 0.1 }"
function Schedule:describe()
  if self.name == "function" then return "function at " .. (self.where:gsub("^.*/", "")) end
  local parts = {}
  for name, value in pairs(self.options) do
    parts[#parts + 1] = ("%s = %s"):format(name, check.show(value))
  end
  table.sort(parts)
  return ("%s { %s }"):format(self.name, table.concat(parts, ", "))
end

-- A copy that knows its total, for dump() and values() without one.
function Schedule:bind(total)
  local bound = {}
  for k, v in pairs(self) do bound[k] = v end
  bound.total = total
  return setmetatable(bound, Schedule)
end

-- The scales of all updates in a list; entry 1 belongs to update index 0.
function Schedule:values(total)
  total = check.integer(nil, "total", total or self.total or 100, 1)
  local list = {}
  for t = 0, total - 1 do list[t + 1] = self:scale(t, total) end
  return list
end

-- A table as text: update index, scale; every `step`-th line and the last.
function Schedule:dump(total, step)
  local values = self:values(total)
  step = check.integer(nil, "step", step or 1, 1)
  local lines = { "update\tscale" }
  for t = 0, #values - 1 do
    if t % step == 0 or t == #values - 1 then
      lines[#lines + 1] = ("%d\t%s"):format(t, check.show(values[t + 1]))
    end
  end
  return table.concat(lines, "\n") .. "\n"
end

-- pg.schedule: an unknown name is an error that suggests one.
schedule.public = setmetatable({
  warmup_cosine = schedule.warmup_cosine, constant = schedule.constant,
  linear = schedule.linear, wsd = schedule.wsd, cooldown = schedule.cooldown,
}, {
  __index = function(_, name)
    errors.misuse("pg.schedule has no '%s'%s", tostring(name),
      keys.suggestion(name, { "warmup_cosine", "constant", "linear", "wsd", "cooldown" }))
  end,
})

return schedule
