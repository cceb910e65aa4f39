-- pg.recipe{…}: checks every value and keeps the table as it was written, so that :with{…} can
-- derive a variant. recipe:spec() is the normalised form that a run is opened from.
local core = require "perigee.core"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local check = require "perigee.check"
local data = require "perigee.data"
local schedule = require "perigee.schedule"
local routing = require "perigee.routing"
local hooks = require "perigee.hooks"
local sources = require "perigee.sources"

local recipe = {}

local Recipe = { __name = "a recipe" }
Recipe.__index = Recipe

local known = { "name", "seed", "model", "data", "batch", "updates", "tokens_per_parameter",
  "max_updates", "schedule", "clip", "log", "optimizers", "hooks", "compute", "device", "threads",
  "recompute", "increments", "fork", "shard_optimizer", "rank_timeout", "sweep" }
local model_keys = { "preset", "layers", "width", "heads", "head_dim", "mlp", "vocab", "context",
  "norm_eps", "rope_base", "init_std", "logit_scale", "init", "head" }
local head_keys = { "rank", "extra", "backward_rank", "backward_seed", "residual" }

-- pg.model "190m", pg.model { … } or pg.model("190m", { context = 256 }): a plain table.
function recipe.model(preset, changes)
  local model = {}
  if type(preset) == "table" then
    changes = preset
  else
    model.preset = check.string(nil, "pg.model", preset, "a table of sizes")
  end
  if changes ~= nil then
    check.table(nil, "pg.model", changes)
    keys.check(changes, model_keys, "pg.model")
    for k, v in pairs(changes) do model[k] = v end
  end
  return model
end

local function checked_seed(where, value)
  if value == nil then value = 0 end
  if type(value) == "table" then
    keys.check(value, { "init", "data" }, "seed", where)
    return {
      init = check.integer(where, "seed.init", value.init or 0, 0),
      data = check.integer(where, "seed.data", value.data or 0, 0),
    }
  end
  local seed = check.integer(where, "seed", value, 0, nil, "{ init = …, data = … }")
  return { init = seed, data = seed }
end

-- What tests of cause change about the head: core/model.h, pg_head_config. Sizes that depend on
-- others are checked with them.
local function checked_head(where, head)
  check.table(where, "model.head", head, "{ rank, extra, backward_rank, backward_seed, residual }")
  keys.check(head, head_keys, "model.head", where)
  local least = { rank = 1, extra = 0, backward_rank = 1, backward_seed = 0 }
  local copy = {}
  for name, value in pairs(head) do
    if name == "residual" then
      copy[name] = check.boolean(where, "model.head.residual", value)
    else
      copy[name] = check.integer(where, "model.head." .. name, value, least[name])
    end
  end
  return copy
end

local function checked_model(where, model)
  check.table(where, "model", model, "a table of sizes or pg.model \"190m\"")
  keys.check(model, model_keys, "model", where)
  local copy = {}
  for k, v in pairs(model) do copy[k] = v end
  local elsewhere = model.preset or model.init -- where sizes come from that are not given
  for _, name in ipairs { "width", "heads", "head_dim", "mlp", "context" } do
    if model[name] ~= nil then
      copy[name] = check.integer(where, "model." .. name, model[name], 1)
    elseif not elsewhere and name ~= "head_dim" and name ~= "mlp" then
      errors.at(where, "model.%s is missing: expected a whole number >= 1", name)
    end
  end
  if model.layers ~= nil then
    copy.layers = check.integer(where, "model.layers", model.layers, 0)
  elseif not elsewhere then
    errors.at(where, "model.layers is missing: expected a whole number >= 0")
  end
  if model.vocab ~= nil then
    copy.vocab = check.integer(where, "model.vocab", model.vocab, 2)
  end
  for _, name in ipairs { "norm_eps", "rope_base", "logit_scale" } do
    if model[name] ~= nil then
      check.number(where, "model." .. name, model[name], { min = 0, open_min = true })
    end
  end
  local std = model.init_std
  if type(std) == "table" then
    keys.check(std, routing.roles, "model.init_std", where)
    for role, value in pairs(std) do
      check.number(where, "model.init_std." .. role, value, { min = 0 })
    end
  elseif std ~= nil then
    check.number(where, "model.init_std", std,
      { min = 0, also = "{ embedding = …, backbone = …, head = … }" })
  end
  if model.head ~= nil then copy.head = checked_head(where, model.head) end
  if model.init ~= nil then check.string(where, "model.init", model.init) end
  if model.preset ~= nil then check.string(where, "model.preset", model.preset) end
  return copy
end

local function checked_batch(where, batch)
  check.table(where, "batch", batch, "{ sequences = …, micro = … }")
  keys.check(batch, { "sequences", "micro" }, "batch", where)
  local sequences = check.integer(where, "batch.sequences", batch.sequences, 1)
  local micro = check.integer(where, "batch.micro", batch.micro or sequences, 1)
  if sequences % micro ~= 0 then
    errors.at(where, "batch.micro = %d is not allowed: expected a divisor of batch.sequences = %d",
      micro, sequences)
  end
  return { sequences = sequences, micro = micro, given = batch.micro ~= nil }
end

-- What the backward pass computes again instead of reading what the forward pass kept.
recipe.recompute = { "none", "block" }

-- What `perigee sweep` does without a grid on its command line.
recipe.sweep_keys = { "grid", "runs", "filter", "samples", "sample_seed", "tuning", "halving",
  "slurm" }

local slot_policies = { "keep", "reset" }

function recipe.checked_fork(where, fork)
  if fork == nil then return nil end
  check.table(where, "fork", fork, "{ CHECKPOINT, slots = …, data = … }")
  keys.check(fork, { "checkpoint", "slots", "data" }, "fork", where, 1)
  local slots, policy = fork.slots or "keep", {}
  if type(slots) == "table" then
    keys.check(slots, routing.roles, "fork.slots", where)
    for _, role in ipairs(routing.roles) do
      policy[role] = check.one_of(where, "fork.slots." .. role, slots[role] or "keep",
        slot_policies)
    end
  else
    check.one_of(where, "fork.slots", slots, slot_policies)
    for _, role in ipairs(routing.roles) do policy[role] = slots end
  end
  return {
    checkpoint = check.string(where, "fork[1]", fork[1] or fork.checkpoint),
    slots = policy,
    data = check.one_of(where, "fork.data", fork.data or "continue", { "continue", "restart" }),
  }
end

local function checked_name(where, name)
  check.string(where, "name", name)
  if not name:match("^[%w_][%w_.+-]*$") or #name > 100 then
    check.fail(where, "name", name, "letters, digits and _ . + - (at most 100)")
  end
  return name
end

-- The normalised form. Everything that needs no data and no device is checked here.
local function normalise(raw, where)
  check.nesting(where, "recipe", raw)
  keys.check(raw, known, "recipe", where)
  local spec = { where = where }
  spec.name = checked_name(where, raw.name == nil and "run" or raw.name)
  spec.seed = checked_seed(where, raw.seed)
  if raw.model == nil then errors.at(where, "model is missing: expected a table of sizes") end
  spec.model = checked_model(where, raw.model)
  if raw.data == nil then
    errors.at(where, "data is missing: expected pg.data.shards { path = FOLDER }")
  end
  spec.data = data.from(raw.data, where)
  if raw.batch == nil then
    errors.at(where, "batch is missing: expected { sequences = …, micro = … }")
  end
  spec.batch = checked_batch(where, raw.batch)
  if (raw.updates == nil) == (raw.tokens_per_parameter == nil) then
    errors.at(where, "expected either updates = n or tokens_per_parameter = x%s",
      raw.updates == nil and "" or ", not both")
  end
  if raw.updates ~= nil then spec.updates = check.integer(where, "updates", raw.updates, 1) end
  if raw.tokens_per_parameter ~= nil then
    spec.tokens_per_parameter = check.number(where, "tokens_per_parameter",
      raw.tokens_per_parameter, { min = 0, open_min = true })
  end
  if raw.max_updates ~= nil then
    spec.max_updates = check.integer(where, "max_updates", raw.max_updates, 1)
  end
  spec.schedule = raw.schedule == nil and schedule.constant {}
    or schedule.from(raw.schedule, where)
  if raw.clip == false then
    spec.clip = false
  else
    spec.clip = check.number(where, "clip", raw.clip == nil and 1.0 or raw.clip,
      { min = 0, open_min = true, also = "false to measure the norm only" })
  end
  local log = raw.log or {}
  check.table(where, "log", log, "{ every = n, tensorboard = true or false }")
  keys.check(log, { "every", "tensorboard" }, "log", where)
  if log.tensorboard ~= nil and type(log.tensorboard) ~= "boolean" then
    errors.at(where, ("log.tensorboard must be true or false, got %s"):format(
      tostring(log.tensorboard)))
  end
  spec.log = { every = check.integer(where, "log.every", log.every or 10, 1),
    tensorboard = log.tensorboard ~= false }
  if raw.optimizers == nil then
    errors.at(where, "optimizers is missing: expected a list of { role = …, pg.optim.NAME{…} }")
  end
  spec.entries = routing.entries(raw.optimizers, where)
  spec.hooks, spec.checkpoints = hooks.normalise(raw.hooks or {}, where)
  spec.compute = check.one_of(where, "compute", raw.compute or "auto", { "auto", "fp32", "bf16" })
  spec.device = raw.device or "auto"
  check.device(where, "device", spec.device)
  spec.threads = check.integer(where, "threads", raw.threads or 0, 0,
    core.max_threads)
  spec.increments = check.one_of(where, "increments", raw.increments or "head",
    { "head", "all" })
  spec.recompute = check.one_of(where, "recompute", raw.recompute or "none", recipe.recompute)
  spec.fork = recipe.checked_fork(where, raw.fork)
  if raw.shard_optimizer ~= nil and type(raw.shard_optimizer) ~= "boolean" then
    check.fail(where, "shard_optimizer", raw.shard_optimizer, "true or false")
  end
  spec.shard_optimizer = raw.shard_optimizer ~= false -- with several ranks
  if raw.rank_timeout ~= nil then
    spec.rank_timeout = check.number(where, "rank_timeout", raw.rank_timeout,
      { min = 0, open_min = true })
  end
  if raw.sweep ~= nil then
    check.table(where, "sweep", raw.sweep, "{ grid = { … } }")
    keys.check(raw.sweep, recipe.sweep_keys, "sweep", where)
  end
  spec.sweep = raw.sweep -- read by perigee sweep, see perigee.sweep
  return spec
end

-- `schedule` knows its total when the recipe states it in updates: recipe.schedule:dump().
local function build(raw, where)
  local normal = normalise(raw, where)
  local bound = normal.updates and normal.schedule:bind(normal.updates) or normal.schedule
  return setmetatable({ raw = raw, where = where, name = normal.name, schedule = bound }, Recipe)
end

function recipe.new(raw)
  local where = sources.call_site("%f[%w_]recipe%s*[%({]")
  if type(raw) ~= "table" then check.fail(where, "pg.recipe", raw, "a table") end
  if getmetatable(raw) == Recipe then raw = raw.raw end
  return build(raw, where)
end

function recipe.is(value) return getmetatable(value) == Recipe end

-- A fresh normalised form: entries and hooks carry per-run fields.
function Recipe:spec() return normalise(self.raw, self.where) end

local function plain(value) return type(value) == "table" and getmetatable(value) == nil end
local function is_array(t) return #t > 0 end

-- Tables merge key by key, arrays and everything else replace. Nothing of the originals changes.
local function merge(old, new)
  if not (plain(old) and plain(new)) or is_array(old) or is_array(new) then return new end
  local out = {}
  for k, v in pairs(old) do out[k] = v end
  for k, v in pairs(new) do
    if plain(v) and plain(old[k]) then out[k] = merge(old[k], v) else out[k] = v end
  end
  return out
end

-- One of a pair of keys that exclude each other displaces the other.
local exclusive = { updates = "tokens_per_parameter", tokens_per_parameter = "updates" }

function Recipe:with(changes)
  local where = sources.call_site(":with%s*[%({]")
  check.table(where, "recipe:with", changes)
  check.nesting(where, "recipe:with", changes)
  keys.check(changes, known, "recipe:with", where)
  local raw = merge(self.raw, changes)
  for key, other in pairs(exclusive) do
    if changes[key] ~= nil and changes[other] == nil then raw[other] = nil end
  end
  return build(raw, where)
end

return recipe
