-- From a recipe to a run that could take its first step, without writing anything: context, data,
-- optimizers, memory, model, hooks. Whatever can be refused is refused here.
local core = require "perigee.core"
local check = require "perigee.check"
local config = require "perigee.config"
local errors = require "perigee.errors"
local imports = require "perigee.imports"
local keepers = require "perigee.keepers"
local keys = require "perigee.keys"
local memory = require "perigee.memory"
local params = require "perigee.params"
local random = require "perigee.random"
local recipe = require "perigee.recipe"
local routing = require "perigee.routing"
local sources = require "perigee.sources"
local tensors = require "perigee.tensors"
local tracker = require "perigee.tracker"

local open = {}

local option_keys = { "out", "set", "device", "threads", "compute", "recompute", "micro",
  "max_updates", "max_time", "quiet", "signals", "rank_timeout", "profile", "attach" }
open.option_keys = option_keys

function open.check_options(options, what)
  check.table(nil, what .. " options", options)
  keys.check(options, option_keys, what)
  if options.out ~= nil then check.string(nil, "out", options.out) end
  if options.threads ~= nil then
    check.integer(nil, "threads", options.threads, 0, core.max_threads)
  end
  if options.micro ~= nil then check.integer(nil, "micro", options.micro, 1) end
  if options.recompute ~= nil then
    check.one_of(nil, "recompute", options.recompute, recipe.recompute)
  end
  if options.attach ~= nil then check.boolean(nil, "attach", options.attach) end
  if options.max_updates ~= nil then check.integer(nil, "max_updates", options.max_updates, 1) end
  if options.max_time ~= nil then
    check.number(nil, "max_time", options.max_time, { min = 0, open_min = true })
  end
  if options.set ~= nil then check.table(nil, "set", options.set) end
  if options.profile ~= nil and type(options.profile) ~= "boolean" then
    check.string(nil, "profile", options.profile, "true")
  end
end

-- Read a recipe file with parameters set. Returns the recipe, the reading, the parameter values.
function open.read(path, given, archive)
  local values, reading, result = random.during_reading(params.with, given or {}, sources.run,
    path, { archive = archive })
  if not recipe.is(result) then
    errors.world(("EFORMAT: %s returned %s: expected `return pg.recipe { … }`"):format(path,
      check.show(result)), "EFORMAT")
  end
  return result, reading, values
end

-- The plan of a recipe for a model of so many weights: length of the schedule, where the run ends,
-- tokens of one update.
function open.plan(spec, weights, context, max_updates)
  local tokens = spec.batch.sequences * context
  local total = spec.updates
  if not total then
    local target = spec.tokens_per_parameter * weights
    total = math.floor(target / tokens)
    if total < 1 then
      errors.at(spec.where, "tokens_per_parameter = %s gives less than one update: %d tokens, "
        .. "expected at least the %d of one update", check.show(spec.tokens_per_parameter),
        math.floor(target), tokens)
    end
  end
  return total, math.min(total, max_updates or spec.max_updates or total), tokens
end

-- Every schedule and function-valued hyperparameter must answer at both ends of the plan.
local function check_schedules(run)
  local function both_ends(f)
    f(0)
    f(run.total - 1)
  end
  local spec = run.spec
  errors.guard_world(spec.schedule.where, function()
    both_ends(function(t) spec.schedule:scale(t, run.total) end)
  end)
  for _, entry in ipairs(spec.entries) do
    errors.guard_world(entry.where, function()
      if entry.schedule then
        both_ends(function(t) entry.schedule:scale(t, run.total) end)
      end
      both_ends(function(t) entry.optimizer:values(t, run.total) end)
    end)
  end
end

-- Vocabulary: that of model.init's folder, else model.vocab, else dataset.json, else the tokenizer,
-- else an error.
local function resolve_vocabulary(run, theirs)
  local spec = run.spec
  if theirs then
    imports.check_data(run, theirs)
    return spec.model.vocab or theirs.vocab, "model.init"
  end
  if spec.model.vocab then return spec.model.vocab, "model.vocab" end
  local vocab, from = spec.data:vocabulary(run.ctx)
  if not vocab and spec.model.preset then return nil, "the preset" end
  if not vocab then
    errors.at(spec.where, "the vocabulary is unknown: %s has neither dataset.json nor "
      .. "tokenizer.json; expected model.vocab = n", spec.data.path)
  end
  return vocab, from
end

local function model_table(run, vocab)
  local model = {}
  for key, value in pairs(run.spec.model) do
    if key ~= "init" then model[key] = value end
  end
  model.vocab = vocab
  return model
end

local function open_context(run)
  local spec, options = run.spec, run.options
  if options.context then -- a run in memory shares that of the prompt
    run.launch, run.ctx, run.borrowed = errors.try(core.launch()), options.context, true
    run.comm = errors.try(core.comm(run.ctx, {}))
    tensors.use(run.ctx)
    return
  end
  local wanted = options.device or spec.device
  local device, index = check.device(nil, "device", wanted)
  local threads = options.threads or spec.threads
  local launch = errors.try(core.launch())
  if launch.world > 1 and threads == 0 and not os.getenv "OMP_NUM_THREADS" then
    threads = core.launch_threads(core.host().cores)
  end
  run.launch, run.rank, run.world = launch, launch.rank, launch.world
  if launch.local_size > 1 and wanted:match("^cuda:") then
    errors.at(spec.where, "device = %q is one GPU for the %d ranks of a machine: expected \"cuda\"",
      wanted, launch.local_size)
  end
  local function context(name, number)
    return core.context { device = name, device_index = number,
      threads = threads > 0 and threads or nil }
  end
  -- One GPU per rank; all ranks choose alike, so "auto" is the cpu only where there is no GPU.
  if launch.local_size > 1 and device ~= "cpu" then
    index = launch.local_rank
    if device == "auto" then
      local probe = context("cuda", index) or context("cuda", 0)
      device = probe and "cuda" or "cpu"
      if probe then probe:close() else index = 0 end
    end
  end
  local ctx, message, name = context(device, index)
  if not ctx and run.planning and name == "EDEVICE" then -- a plan needs no GPU
    run.planned_for = { device = device, message = message }
    ctx, message, name = context("cpu")
  end
  run.ctx = errors.try(ctx, message, name)
  tensors.use(ctx)
  if launch.by == "environment" and launch.rank == 0 and ctx:device() == "cuda"
    and not options.quiet then
    local master = launch.master == "" and "127.0.0.1" or launch.master
    io.stderr:write(("rank 0 of %d waits for the others at %s:%d (MASTER_ADDR, MASTER_PORT)\n")
      :format(launch.world, master, launch.port))
  end
  local timeout = options.rank_timeout or spec.rank_timeout
  -- From here on the communicator tells the others, unless "auto" found a device without one.
  run.joining = not (device == "cpu" and wanted == "auto" and launch.by == "environment")
  run.comm = errors.try(core.comm(ctx, { timeout = timeout, device_index = index }))
end

-- Before an error that all ranks raise alike: none reports it to the others, who know.
local function leave(run)
  if run.world > 1 then errors.try(run.comm:leave()) end
end

-- The sequences of a micro-batch, which without a statement are what one rank takes.
local function split_batch(run)
  local spec, world = run.spec, run.world
  local batch = spec.batch
  if not batch.given and batch.sequences % world == 0 then
    batch.micro = batch.sequences // world
  end
  if batch.sequences % (batch.micro * world) ~= 0 then
    leave(run)
    errors.at(spec.where, "batch.sequences = %d cannot be split over %d ranks%s: expected a "
      .. "multiple of %d", batch.sequences, world,
      batch.given and (" in micro-batches of %d"):format(batch.micro) or "",
      batch.given and batch.micro * world or world)
  end
end

-- The first of the "; "-separated parts in which two texts differ.
local function difference(ours, theirs)
  local have = {}
  for part in (ours .. "; "):gmatch("(.-); ") do have[part] = true end
  for part in (theirs .. "; "):gmatch("(.-); ") do
    if not have[part] then return part end
  end
  return "less"
end

-- All ranks must be about to train the same thing. Called by all of them.
local function compare_ranks(run, what, text)
  if run.world == 1 then return end
  local texts = errors.try(run.comm:gather(text))
  for i = 2, run.world do
    if texts[i] ~= texts[1] then
      leave(run)
      errors.world(("EPEER: %s of rank %d is not that of rank 0 (%s, not %s): expected the same on "
        .. "all ranks"):format(what, i - 1, difference(texts[1], texts[i]),
        difference(texts[i], texts[1])), "EPEER")
    end
  end
end

-- What products compute in: bf16 pays on a GPU, on a CPU only when asked for. `device`: not that of
-- the context.
function open.compute(ctx, wanted, device)
  check.one_of(nil, "compute", wanted, { "auto", "fp32", "bf16" })
  if wanted ~= "auto" then return wanted end
  return (device or ctx:device()) == "cuda" and "bf16" or "fp32"
end

-- Options of the core's run.
local function core_options(run)
  local spec = run.spec
  return {
    data = spec.data.path, train = spec.data.train, val = spec.data.val,
    sequences = spec.batch.sequences, micro = spec.batch.micro,
    clip = spec.clip or math.huge, data_seed = spec.seed.data, read_ahead = spec.data.read_ahead,
    keep_increments = spec.increments, comm = run.comm, shard_optimizer = spec.shard_optimizer,
    recompute = spec.recompute,
  }
end

-- Hand the parameters of every entry to its optimizer.
local function assign_entries(run)
  run.assignments = {}
  run.owner = {}
  for _, entry in ipairs(run.spec.entries) do
    if #entry.parameters > 0 then
      errors.located(entry.where, run.assign, run, entry.optimizer, entry.parameters,
        entry.schedule, entry.decay_scale)
    end
  end
  errors.try(run.core:check())
end

local function index_parameters(run, parameters)
  run.parameters, run.by_name = parameters, {}
  for _, parameter in ipairs(parameters) do
    run.by_name[parameter.name] = parameter
    if parameter.role == "head" then run.head = parameter end
    if parameter.role == "embedding" then run.embedding = parameter end
  end
end

-- Parameters as descriptions without memory, in the entries that update them.
local function route_descriptions(run)
  local described = core.model_parameters(run.model_config)
  for i, parameter in ipairs(described) do parameter.index, parameter.updates = i, 0 end
  index_parameters(run, described)
  routing.route(run.spec.entries, described, run.spec.where)
  for _, entry in ipairs(run.spec.entries) do
    for _, parameter in ipairs(entry.parameters) do parameter.optimizer = entry.optimizer.name end
  end
end

-- A switch that only acts on what is trained needs something to act on.
local function check_head(run)
  local head, spec = run.model_config.head or {}, run.spec
  local function trained(role)
    for _, parameter in ipairs(run.parameters) do
      if (parameter.role == "head") == (role == "head") and parameter.optimizer ~= "frozen" then
        return true
      end
    end
    return false
  end
  if head.residual == false and run.head.optimizer == "frozen" then
    errors.at(spec.where, "model.head.residual = false: %s is frozen and has no gradient to "
      .. "project", run.head.name)
  end
  if head.backward_rank and not trained "rest" then
    errors.at(spec.where, "model.head.backward_rank = %d: nothing below the head is trained",
      head.backward_rank)
  end
end

-- Fill `run` (see run.lua) from a recipe with all that is known before it has memory. The caller
-- closes it on failure.
function open.resolve(run, rec, options)
  run.options = options
  run.recipe = rec
  local spec = rec:spec()
  run.spec = spec
  if options.data_path then spec.data = spec.data:at(options.data_path) end
  if options.micro then
    if spec.batch.sequences % options.micro ~= 0 then
      errors.usage("--micro %d is not allowed: expected a divisor of batch.sequences = %d",
        options.micro, spec.batch.sequences)
    end
    spec.batch.micro, spec.batch.given = options.micro, true
  end
  spec.recompute = options.recompute or spec.recompute
  spec.data:require_folder()
  open_context(run)
  -- Read before ranks meet: no other one of this machine has allocated anything yet.
  run.available = run.ctx:available()
  compare_ranks(run, "the command, the recipe or a parameter", ("perigee %s; %s; %s"):format(
    core.version, options.purpose or "train", run.identity))
  split_batch(run)
  run.compute = open.compute(run.ctx, options.compute or spec.compute,
    run.planned_for and run.planned_for.device)
  local theirs = imports.sizes(run)
  imports.require_sizes(run, theirs)
  local vocab, from = resolve_vocabulary(run, theirs)
  run.vocab_from = from
  run.model_config = errors.located(spec.where, function()
    return errors.try(core.model_config(imports.complete(run, model_table(run, vocab), theirs)))
  end)
  run.total, run.last, run.tokens_per_update = open.plan(spec, run.model_config.weights,
    run.model_config.context, options.max_updates)
  errors.guard_world(spec.where, function() config.attention(run) end) -- or the device cannot
  check_schedules(run)
  route_descriptions(run)
  check_head(run)
  run.core_options = core_options(run)
  run.need = memory.estimate(run)
  run.data_digest = errors.try(core.digest(run.ctx, spec.data.path))
  run.data_sample = errors.try(core.sample(run.ctx, spec.data.path))
  compare_ranks(run, "the data or an option", ("data %s; tokens %s; --micro %d; updates %d; "
    .. "--max-updates %d; --compute %s; --recompute %s"):format(run.data_digest, run.data_sample,
    spec.batch.micro, run.total, run.last, run.compute, spec.recompute))
  run.tokenizer_path = spec.data:tokenizer_path()
end

-- The weights that a run starts from.
function open.initialise(run)
  local spec = run.spec
  if spec.model.init then
    errors.try(run.model:load(spec.model.init))
  else
    run.model:init(spec.seed.init)
  end
end

-- The same and its memory: a run that could take its first step, once it has weights.
function open.prepare(run, rec, options)
  open.resolve(run, rec, options)
  local spec = run.spec
  memory.refuse(run)
  run.model = errors.try(core.model(run.ctx, run.model_config, run.compute))
  index_parameters(run, run.model:parameters())
  for _, entry in ipairs(spec.entries) do
    for i, described in ipairs(entry.parameters) do
      entry.parameters[i] = run.by_name[described.name]
    end
  end
  run.core = errors.located(spec.where, function()
    return errors.try(core.run(run.model, run.core_options))
  end)
  run.updates_per_epoch = run.core:loader().updates_per_epoch
  assign_entries(run)
  run.tracker = tracker.new { tokens_per_update = run.tokens_per_update,
    max_norm = spec.clip or 1.0, clipping = spec.clip ~= false }
  run.random = random.pair(spec.seed.init)
end

-- Before the first update of a session: all ranks have the same weights. Their SHA-256.
function open.compare_weights(run)
  local sha256 = errors.try(run.model:sha256())
  compare_ranks(run, "the weights", "weights " .. sha256)
  return sha256
end

-- Without memory: whether the data serves such a run.
function open.check_data(run)
  errors.located(run.spec.where, function()
    run.updates_per_epoch = errors.try(core.run_data(run.ctx, run.model_config, run.core_options))
  end)
end

-- Hooks that measure get ready (panels are read, sizes checked).
function open.prepare_hooks(run)
  keepers.of(run) -- refuses two of one name
  for _, hook in ipairs(run.spec.hooks) do
    local meta = getmetatable(hook.action)
    if type(meta) == "table" and meta.prepare then
      errors.guard_world(hook.where, function() hook.action:prepare(run.handle) end)
    end
  end
end

return open
