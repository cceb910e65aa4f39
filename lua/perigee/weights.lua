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

return weights
