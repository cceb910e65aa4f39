-- config.json: everything that was resolved before update 1. No absolute paths.
local core = require "perigee.core"
local errors = require "perigee.errors"
local check = require "perigee.check"
local directory = require "perigee.directory"
local routing = require "perigee.routing"
local sources = require "perigee.sources"

local config = {}

local function params_object(values)
  local names, list = {}, {}
  for name in pairs(values) do names[#names + 1] = name end
  table.sort(names)
  for i, name in ipairs(names) do
    local value = values[name]
    list[i] = { name, type(value) == "string" and directory.public_path(value) or value }
  end
  return directory.object(list)
end

local function recipe_object(reading)
  local files = {}
  for i, file in ipairs(reading.files) do
    files[i] = directory.object { { "kind", file.kind },
      { "name", directory.public_path(file.name) }, { "file", file.archived },
      { "sha256", file.sha256 } }
  end
  local commit, modified = sources.commit(reading)
  return directory.object {
    { "file", directory.public_path(reading.path) },
    { "sha256", reading.sha256 },
    { "files", #files > 0 and core.json.array(files) or nil },
    { "git_commit", commit },
    { "git_modified", modified },
  }
end

local function model_object(resolved, spec)
  local object = {}
  for _, key in ipairs { "layers", "width", "heads", "head_dim", "mlp", "vocab", "context",
    "norm_eps", "rope_base", "logit_scale", "init_std", "weights" } do
    object[#object + 1] = { key, resolved[key] }
  end
  if resolved.head then
    local list = {}
    for _, key in ipairs { "rank", "extra", "backward_rank", "backward_seed", "residual" } do
      list[#list + 1] = { key, resolved.head[key] }
    end
    object[#object + 1] = { "head", directory.object(list) }
  end
  object[#object + 1] = { "preset", spec.model.preset }
  object[#object + 1] = { "init", spec.model.init and directory.public_path(spec.model.init) }
  return directory.object(object)
end

local function shard_counts(run, pattern)
  local shards = core.shards(run.ctx, run.spec.data.path, pattern)
  if not shards then return nil end
  return directory.object { { "shards", #shards }, { "tokens", shards.tokens } }
end

local function routing_list(run)
  local list = {}
  for i, row in ipairs(routing.rows(run.spec.entries, run.spec.schedule, run.total)) do
    list[i] = directory.object {
      { "parameter", row.parameter }, { "count", row.count }, { "rows", row.rows },
      { "columns", row.columns }, { "role", row.role }, { "optimizer", row.optimizer },
      { "settings", row.settings }, { "peak_lr", row.peak_lr }, { "scale_factor", row.scale },
      { "weight_decay", type(row.decay) == "number" and row.decay or nil },
      { "weight_decay_scale", row.decay_scale }, { "schedule", row.schedule },
    }
  end
  return core.json.array(list)
end

-- Which attention trains, where there is a choice: they differ in rounding.
function config.attention(run)
  local c = run.model_config
  local line = errors.try(run.ctx:attention { compute = run.compute, batch = run.spec.batch.micro,
    time = c.context, heads = c.heads, head_dim = c.head_dim })
  return line ~= "" and line or nil
end

local function host_object(run)
  local host = core.host()
  return directory.object {
    { "device", run.ctx:device() }, { "device_name", errors.try(run.ctx:describe()).name },
    { "attention", config.attention(run) },
    { "threads", run.ctx:threads() },
    { "cpu", host.cpu }, { "cores", host.cores }, { "cpu_level", run.ctx:cpu_level() },
  }
end

function config.build(run)
  local spec = run.spec
  local hooks = {}
  for _, list in ipairs { spec.hooks, spec.checkpoints } do
    for _, hook in ipairs(list) do hooks[#hooks + 1] = hook.occasion.text end
  end
  local host = core.host()
  local warmup = spec.schedule.options.warmup
  return directory.object {
    { "format", 1 },
    { "name", spec.name },
    { "recipe", recipe_object(run.reading) },
    { "params", params_object(run.params) },
    { "seed", directory.object { { "init", spec.seed.init }, { "data", spec.seed.data } } },
    { "model", model_object(run.model_config, spec) },
    { "parameters", run.model_config.weights },
    { "initial_weights", run.initial_weights },
    { "data", directory.object {
      { "path", directory.public_path(spec.data.path) },
      { "digest", run.data_digest },
      { "vocabulary_from", run.vocab_from },
      { "train_pattern", spec.data.train }, { "val_pattern", spec.data.val },
      { "train", shard_counts(run, spec.data.train) },
      { "val", shard_counts(run, spec.data.val) },
      { "updates_per_epoch", run.updates_per_epoch },
    } },
    { "batch", directory.object {
      { "sequences", spec.batch.sequences }, { "micro", spec.batch.micro },
      { "accumulation", spec.batch.sequences // (spec.batch.micro * run.world) },
      { "ranks", run.world },
      { "shard_optimizer", run.world > 1 and spec.shard_optimizer or nil },
      { "tokens_per_update", run.tokens_per_update },
    } },
    { "plan", directory.object {
      { "updates", run.total }, { "run_updates", run.last },
      { "tokens_per_parameter", spec.tokens_per_parameter },
      { "target_tokens", spec.tokens_per_parameter
        and math.tointeger(spec.tokens_per_parameter * run.model_config.weights) or nil },
      { "scheduled_tokens", run.total * run.tokens_per_update },
      { "warmup_updates", warmup and errors.try(core.schedule_warmup(warmup, run.total)) or nil },
    } },
    { "schedule", spec.schedule:describe() },
    { "clip", spec.clip },
    { "log_every", spec.log.every },
    { "optimizers", routing_list(run) },
    { "hooks", core.json.array(hooks) },
    { "increments", spec.increments },
    { "fork", run.fork_record },
    { "compute", directory.object {
      { "precision", run.compute }, { "storage", "fp32" }, { "cross_entropy", "fp32" },
      { "squares_summed_in", "fp64" }, { "recompute", spec.recompute },
    } },
    { "diameter", "all pairs, centred rows, winning pair in fp64" },
    { "hilbert_panel", "first positions of every rank's validation slices" },
    { "host", host_object(run) },
    { "versions", directory.object {
      { "perigee", core.version }, { "lua", _VERSION }, { "openblas", host.openblas },
    } },
  }
end

-- The lines printed before update 1.
function config.header(run)
  local c = run.model_config
  local spec = run.spec
  local lines = {
    ("%s: %s parameters (%d blocks, width %d, %d heads of %d, mlp %d, vocabulary %d, context %d)")
      :format(spec.name, check.show(c.weights), c.layers, c.width, c.heads, c.head_dim, c.mlp,
      c.vocab, c.context),
    ("%d updates of %d sequences (%d micro-batches, %d tokens), schedule %s%s"):format(
      run.last, spec.batch.sequences, spec.batch.sequences // (spec.batch.micro * run.world),
      run.tokens_per_update, spec.schedule:describe(),
      run.last < run.total and (" planned for %d"):format(run.total) or ""),
    ("seed %d (weights), %d (data); clip %s; %s in %s%s, %d threads%s"):format(spec.seed.init,
      spec.seed.data, spec.clip and check.show(spec.clip) or "off", run.ctx:device(),
      run.compute, spec.recompute == "none" and "" or ", recompute " .. spec.recompute,
      run.ctx:threads(), run.world > 1 and (" in each of %d ranks"):format(run.world) or ""),
    routing.table_text(routing.rows(spec.entries, spec.schedule, run.total)),
  }
  return table.concat(lines, "\n")
end

return config
