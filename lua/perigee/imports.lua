-- model.init = FOLDER: a model that somebody trained, as Hugging Face has it (config.json and
-- safetensors, or a checkpoint). A recipe need not repeat its sizes; what it states must agree.
local core = require "perigee.core"
local check = require "perigee.check"
local data = require "perigee.data"
local errors = require "perigee.errors"

local imports = {}

local shapes = { "layers", "width", "heads", "head_dim", "mlp", "vocab" }
local constants = { "context", "norm_eps", "rope_base", "logit_scale", "head" }

-- The sizes of the folder, nil when model.init is none. A resumed run has them in its directory.
function imports.sizes(run)
  local folder = run.spec.model.init
  if not folder or core.fs.kind(folder) == "file" then return nil end
  local own = run.options.directory and data.read_json(run.options.directory .. "/config.json")
  if type(own) == "table" and type(own.model) == "table" then return own.model end
  if core.fs.kind(folder) ~= "directory" then return nil end
  return errors.located(run.spec.where, function()
    return errors.try(core.checkpoint_config(run.ctx, folder))
  end)
end

-- Whether a recipe has all sizes without the folder's.
function imports.require_sizes(run, theirs)
  local spec = run.spec
  if theirs or spec.model.preset or not spec.model.init then return end
  for _, key in ipairs { "layers", "width", "heads", "context" } do
    if spec.model[key] == nil then
      errors.at(spec.where, "model.%s is missing and model.init = %s is not a folder with a "
        .. "config.json that has it: expected a whole number", key, check.show(spec.model.init))
    end
  end
end

-- `model`, as the recipe states it, with the folder's values where it states none.
function imports.complete(run, model, theirs)
  if not theirs then return model end
  if not model.preset then
    for _, list in ipairs { shapes, constants } do
      for _, key in ipairs(list) do
        if model[key] == nil then model[key] = theirs[key] end
      end
    end
  end
  local resolved = errors.try(core.model_config(model))
  for _, key in ipairs(shapes) do
    if resolved[key] ~= theirs[key] then
      errors.at(run.spec.where, "model.%s = %s differs from the %s of model.init = %s: expected "
        .. "the same, or none", key, check.show(resolved[key]), check.show(theirs[key]),
        check.show(run.spec.model.init))
    end
  end
  return model
end

-- Ids mean the same in the folder's tokenizer and in the data's, where both have one that is read:
-- a model knows nothing of other ids.
local function compare_tokenizers(run)
  local folder, theirs = run.spec.model.init, run.spec.data:tokenizer_path()
  local ours = folder .. "/tokenizer.json"
  if not theirs or core.fs.kind(ours) ~= "file" then return end
  if core.fs.sha256(ours) == core.fs.sha256(theirs) then return end
  local a <close> = core.tokenizer(run.ctx, ours)
  if not a then return end -- no kind that data can have been prepared with
  local b <close> = errors.try(core.tokenizer(run.ctx, theirs))
  for id = 0, b:vocab() - 1 do
    local x, y = id < a:vocab() and a:bytes(id) or nil, b:bytes(id)
    if x ~= y then
      errors.at(run.spec.where, "token %d is %s in %s and %s in %s: expected data prepared with "
        .. "the tokenizer of model.init", id, check.show(x), ours, check.show(y), theirs)
    end
  end
end

-- The data's ids are ids of the model.
function imports.check_data(run, theirs)
  local vocab, from = run.spec.data:vocabulary(run.ctx)
  if vocab and vocab > theirs.vocab then
    errors.at(run.spec.where, "the vocabulary of %s has %d tokens (%s), that of model.init = %s "
      .. "has %d: expected no more", run.spec.data.path, vocab, from,
      check.show(run.spec.model.init), theirs.vocab)
  end
  if core.fs.kind(run.spec.model.init) == "directory" then compare_tokenizers(run) end
end

return imports
