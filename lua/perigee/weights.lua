-- Weights of another time as a model beside a run's: those of a checkpoint, or those that the run
-- started from. They cost the memory of a second model while they are there.
local core = require "perigee.core"
local checkpoints = require "perigee.checkpoints"
local errors = require "perigee.errors"

local weights = {}

-- The model of a checkpoint, or of a run directory's newest one, in a context.
function weights.of_checkpoint(ctx, path, compute)
  local found = checkpoints.resolve(ctx, path)
  local model = errors.try(core.model(ctx, errors.try(core.checkpoint_config(ctx, found)), compute))
  errors.try(model:load(found .. "/model.safetensors"))
  return model
end

-- What a run started from: the draw of its seed, the file of model.init, or the checkpoint that it
-- was forked from.
function weights.of_start(run)
  local spec, compute = run.spec, run.model:compute()
  local fork = run.options.fork or spec.fork
  if fork then
    return errors.located(spec.where, weights.of_checkpoint, run.ctx, fork.checkpoint, compute)
  end
  local model = errors.try(core.model(run.ctx, run.model_config, compute))
  if spec.model.init then
    errors.try(model:load(spec.model.init))
  else
    model:init(spec.seed.init)
  end
  return model
end

-- What an update added to the head, decay excluded, [classes, width]: its increment, or of a head
-- A B = (A' + S_A) (B' + S_B) the change of the product, A S_B + S_A B - S_A S_B. `increment` gives
-- that of a parameter by its name. nil when there is none. A product is a tensor of the caller's.
function weights.head_step(model, increment)
  local list = model:parameters()
  local outer, inner = list[#list], list[#list - 1]
  local step = increment(outer.name)
  if step == nil or not (model:config().head or {}).rank then return step end
  local inner_step = increment(inner.name)
  if inner_step == nil then return step:matmul(inner.value) end -- B is frozen
  local before <close> = inner.value - inner_step
  local rest <close> = step:matmul(before)
  return outer.value:matmul(inner_step):add_(rest)
end

-- The same of a checkpoint whose weights `model` holds.
function weights.saved_head_step(ctx, model, path)
  local file = path .. "/increment.safetensors"
  if core.fs.kind(file) ~= "file" then return nil end
  local saved = {}
  for _, entry in ipairs(errors.try(core.tensors(ctx, file))) do saved[entry.name] = true end
  return weights.head_step(model, function(name)
    return saved[name] and errors.try(core.load_tensor(ctx, file, name)) or nil
  end)
end

return weights
