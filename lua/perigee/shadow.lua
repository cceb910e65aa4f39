-- pg.shadow: another optimizer for some parameters, kept alive on this run's gradients. After every
-- update it makes the increment that it would have made from the same clipped gradients with the
-- same scale of the schedule, in slots of its own; nothing is applied. An optimizer that reads
-- weights sees those after the update.
local check = require "perigee.check"
local errors = require "perigee.errors"
local keepers = require "perigee.keepers"
local keys = require "perigee.keys"
local optim = require "perigee.optim"
local routing = require "perigee.routing"
local runs = require "perigee.run"

local shadow = {}

local Shadow = { __name = "a shadow", is_keeper = true }
Shadow.__index = Shadow
Shadow.__tostring = function(self) return "pg.shadow " .. self.optimizer:describe() end

-- pg.shadow { role =, match =, except =, optimizer, name = }
function shadow.new(options)
  local where = errors.where()
  check.table(where, "pg.shadow", options, "{ role = … or match = …, pg.optim.NAME{…} }")
  keys.check(options, { "role", "match", "except", "name" }, "pg.shadow", where, 1)
  local self = { where = where, optimizer = options[1], of = setmetatable({}, { __mode = "k" }) }
  if not optim.is(self.optimizer) or self.optimizer:is_frozen() then
    check.fail(where, "pg.shadow[1]", self.optimizer, "an optimizer, pg.optim.NAME{…}")
  end
  self.select = routing.selector(options, where, "pg.shadow")
  self.name = check.string(where, "pg.shadow name", options.name or self.optimizer.name)
  if not self.name:match("^[%w_]+$") then
    check.fail(where, "pg.shadow name", self.name, "letters, digits and _")
  end
  return setmetatable(self, Shadow)
end

-- Trials by name of parameter; nil where there is no memory, as in a dry run.
function Shadow:prepare(handle)
  local run = runs.inner(handle)
  if self.of[handle] then return self.of[handle] end
  local chosen = {}
  for _, parameter in ipairs(run.parameters) do
    if self.select(parameter) then
      if parameter.optimizer == "frozen" then
        errors.at(self.where, "pg.shadow: %s is frozen and has no gradient", parameter.name)
      end
      chosen[#chosen + 1] = parameter
    end
  end
  if #chosen == 0 then errors.at(self.where, "pg.shadow matches no parameter") end
  if not run.model then return nil end
  local trials = {}
  for _, parameter in ipairs(chosen) do
    trials[parameter.name] = errors.try(run.core:trial(parameter, {
      optimizer = self.optimizer:core_optimizer(),
      hypers = self.optimizer:values(run.update, run.total) }))
  end
  self.of[handle] = trials
  keepers.continue(run, self)
  return trials
end

-- In the model's order, since a function of Lua may be called.
local function each(handle, trials, f)
  for _, parameter in ipairs(handle.parameters) do
    if trials[parameter.name] then f(parameter, trials[parameter.name]) end
  end
end

function Shadow:__call(handle)
  local run = runs.inner(handle)
  local hypers = self.optimizer:changing(run.update - 1, run.total)
  each(handle, self:prepare(handle), function(parameter, trial)
    local scale = run.assignments[run.owner[parameter.name]].scale or run.scale
    errors.try(trial:increment(scale, hypers))
  end)
end

-- Slots and increments; and their copies while a checkpoint is written.
function Shadow:bytes(parameters)
  local all = 0
  for _, parameter in ipairs(parameters) do
    if self.select(parameter) then
      all = all + 4 * parameter.rows * parameter.columns
        + self.optimizer:core_optimizer():slot_bytes(parameter.rows, parameter.columns)
    end
  end
  return all, all
end

function Shadow:saved(handle)
  local updates, list = {}, {}
  each(handle, self:prepare(handle), function(parameter, trial)
    local count, tensors = trial:state()
    updates[parameter.name] = count
    local names = {}
    for name in pairs(tensors) do names[#names + 1] = name end
    table.sort(names)
    for _, name in ipairs(names) do
      list[#list + 1] = { parameter.name .. "." .. name, tensors[name] }
    end
  end)
  return { optimizer = self.optimizer.name, updates = updates }, list
end

function Shadow:restore(handle, state, load, kept)
  each(handle, self.of[handle], function(parameter, trial)
    local count = state.updates[parameter.name]
    if not (count and kept(parameter)) then return end
    if state.optimizer ~= self.optimizer.name then
      errors.world(("ESTATE: the checkpoint's shadow %q is of %s, this one of %s: expected another "
        .. "name"):format(self.name, state.optimizer, self.optimizer.name), "ESTATE")
    end
    local tensors = select(2, trial:state())
    for name, tensor in pairs(tensors) do
      tensor:close()
      tensors[name] = load(parameter.name .. "." .. name)
    end
    errors.try(trial:resume(count, tensors))
  end)
end

function Shadow:tensors(handle)
  local named = {}
  each(handle, self:prepare(handle), function(parameter, trial)
    named[parameter.name] = trial:value()
  end)
  return named
end

function Shadow:forget(handle)
  for _, trial in pairs(self.of[handle] or {}) do trial:close() end
  self.of[handle] = nil
end

return shadow
