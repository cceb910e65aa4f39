-- pg.ema: an average of the weights over updates, W' <- decay W' + (1 - decay) W after each one, in
-- fp32 beside them. ema:validation{…} measures the validation loss of the averaged weights: they
-- change places with the weights for its time.
local core = require "perigee.core"
local check = require "perigee.check"
local diagnostics = require "perigee.diagnostics"
local errors = require "perigee.errors"
local keepers = require "perigee.keepers"
local keys = require "perigee.keys"
local runs = require "perigee.run"

local ema = {}

local Ema = { __name = "an average of weights", is_keeper = true }
Ema.__index = Ema
Ema.__tostring = function(self) return ("pg.ema { decay = %s }"):format(check.show(self.decay)) end

-- pg.ema { decay, from, name }
function ema.new(options)
  local where = errors.where()
  check.table(where, "pg.ema", options, "{ decay = … }")
  keys.check(options, { "decay", "from", "name" }, "pg.ema", where)
  local self = { where = where, of = setmetatable({}, { __mode = "k" }) }
  self.decay = check.number(where, "pg.ema decay", options.decay, { min = 0, max = 1,
    open_max = true })
  self.from = check.integer(where, "pg.ema from", options.from or 0, 0)
  self.name = check.string(where, "pg.ema name", options.name or "ema")
  if not self.name:match("^[%w_]+$") then
    check.fail(where, "pg.ema name", self.name, "letters, digits and _")
  end
  return setmetatable(self, Ema)
end

-- Averages by the model's order of parameters; nil where there is no memory, as in a dry run.
function Ema:prepare(handle)
  local run = runs.inner(handle)
  if self.of[handle] or not run.model then return self.of[handle] end
  local averages = {}
  for i, parameter in ipairs(run.parameters) do averages[i] = parameter.value:clone() end
  self.of[handle] = averages
  keepers.continue(run, self)
  return averages
end

function Ema:__call(handle)
  local averages = self:prepare(handle)
  for i, parameter in ipairs(handle.parameters) do
    if handle.update <= self.from then
      averages[i]:copy_(parameter.value)
    else
      averages[i]:lerp_(parameter.value, 1 - self.decay)
    end
  end
end

-- Averages; and a matrix while they change places with the weights.
function Ema.bytes(_, parameters)
  local all, largest = 0, 0
  for _, parameter in ipairs(parameters) do
    local bytes = 4 * parameter.rows * parameter.columns
    all, largest = all + bytes, math.max(largest, bytes)
  end
  return all, largest
end

function Ema:saved(handle)
  local list = {}
  for i, parameter in ipairs(handle.parameters) do
    list[i] = { parameter.name, self:prepare(handle)[i] }
  end
  return { decay = self.decay }, list
end

function Ema:restore(handle, _, load, kept)
  for i, parameter in ipairs(handle.parameters) do
    if kept(parameter) then
      local saved = load(parameter.name)
      self.of[handle][i]:copy_(saved)
      saved:close()
    end
  end
end

function Ema:tensors(handle)
  local named = {}
  for i, parameter in ipairs(handle.parameters) do
    named[parameter.name] = self:prepare(handle)[i]:clone()
  end
  return named
end

function Ema:forget(handle)
  for _, average in ipairs(self.of[handle] or {}) do average:close() end
  self.of[handle] = nil
end

-- Weights and averages change places, compute copies included.
local function swap(run, averages)
  core.uninterrupted(function()
    for i, parameter in ipairs(run.parameters) do
      local value <close> = parameter.value:clone()
      parameter.value:copy_(averages[i])
      averages[i]:copy_(value)
      errors.try(run.model:refresh(parameter.name))
    end
  end)
end

-- f() while the run's weights are the averaged ones.
function Ema:during(handle, f)
  local run, averages = runs.inner(handle), self:prepare(handle)
  swap(run, averages)
  local results = table.pack(pcall(f))
  swap(run, averages)
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

-- A diagnostic: loss of the averaged weights over a prefix of the validation split, as
-- validation/NAME_loss, and its perplexity and tokens.
function Ema:validation(options)
  check.table(nil, "ema:validation", options, "{ tokens = n }")
  keys.check(options, { "tokens" }, "ema:validation")
  local tokens = check.integer(nil, "ema:validation tokens", options.tokens, 1)
  return diagnostics.new(self.name .. "_validation", function(run)
    run:validation_tokens(tokens)
    self:prepare(run)
  end, function(run)
    local found = self:during(run, function() return run:validate { tokens = tokens } end)
    local name = "validation/" .. self.name
    run:log(name .. "_loss", found.loss)
    run:log(name .. "_perplexity", math.exp(found.loss))
    run:log(name .. "_tokens", found.tokens)
    return found.loss
  end)
end

return ema
