-- What a continuation needs beyond weights, slots and the data position: kept as JSON under "host"
-- in a checkpoint's state.json.
local core = require "perigee.core"
local errors = require "perigee.errors"
local optim = require "perigee.optim"
local pack = require "perigee.pack"

local state = {}

local format = 1

local function absolute(path)
  if path:sub(1, 1) == "/" then return path end
  return core.fs.cwd() .. "/" .. path
end

-- What belongs to this machine or names a recipe exactly: the run directory's own state.json, and a
-- part of every checkpoint's.
function state.place(run)
  local files = {}
  for i, file in ipairs(run.reading.files) do
    files[i] = { kind = file.kind, name = file.name, file = file.archived }
  end
  return {
    files = core.json.array(files), -- names as the recipe calls them
    recipe = run.identity,
    script = run.reading.script or nil, -- pg.open with a recipe object
    params = run.params,
    compute = run.compute,
    recompute = run.spec.recompute,
    paths = {
      working_directory = core.fs.cwd(),
      data = absolute(run.spec.data.path),
      recipe = absolute(run.reading.origin or run.reading.path),
      out = absolute(run.out),
    },
  }
end

-- The last step's values, so that hooks that run right after a resume see them.
local last_values = { "loss", "grad_norm", "clip_factor", "scale", "batch_hash" }

-- kept: states of the hooks' keepers.
function state.collect(run, kept)
  local last = {}
  for _, name in ipairs(last_values) do last[name] = run[name] end
  local entries = {}
  for i, entry in ipairs(run.written or run.entries) do
    entries[i] = { name = entry[1], value = pack.encode(entry[2], entry[1]) }
  end
  local final = {}
  for name, value in pairs(run.final) do final[name] = pack.encode(value, name) end
  local changes = {}
  for i, change in ipairs(run.changes) do changes[i] = change end
  local pending = {}
  for i, index in ipairs(run.pending) do pending[i] = index end
  local host = state.place(run)
  host.format = format
  host.update, host.tokens = run.update, run.tokens
  host.data_digest, host.data_sample = run.data_digest, run.data_sample
  host.micro = run.spec.batch.micro
  host.splits = { val = run.spec.data.val, test = run.spec.data.test }
  host.session = run.session
  host.elapsed_seconds = run:elapsed()
  host.interval = run.tracker:save()
  host.last, host.final = last, final
  host.epoch = run.reported_epoch or 0
  host.state = pack.encode(run.state, "run.state")
  host.random = { random = run.random.random:save(), math = run.random.math:save() }
  host.optimizer_changes = core.json.array(changes)
  host.pending_hooks = core.json.array(pending)
  host.line = core.json.array(entries)
  host.kept = kept
  return host
end

-- One change of optimizers or hyperparameters of `names`, and what a checkpoint keeps of it.
function state.change(run, change, names)
  if change.set then
    run:change_hypers(names, change.set)
  else
    run:change_optimizer(names, optim.from_data(change.optimizer))
  end
  run.changes[#run.changes + 1] = { update = change.update, parameters = core.json.array(names),
    optimizer = change.optimizer, set = change.set }
end

-- Changes recorded in a checkpoint, again. `keep` (role -> boolean) limits those of optimizers to
-- roles whose slots are kept by a fork, which has the hooks of its own recipe alone.
function state.replay_changes(run, host, keep)
  for _, change in ipairs(host.optimizer_changes or {}) do
    local names = {}
    for _, name in ipairs(change.parameters or {}) do
      local parameter = run.by_name[name]
      if not parameter then
        errors.world(("ESTATE: the checkpoint changed the optimizer of %s, which this model does "
          .. "not have"):format(name), "ESTATE")
      end
      if not keep or keep[parameter.role] then names[#names + 1] = name end
    end
    if #names > 0 then state.change(run, change, names) end
  end
  if not keep then
    require("perigee.attach.hooks").replay(run, host.optimizer_changes or {})
  end
end

-- Everything else, after the core's part has been loaded.
function state.restore(run, host)
  if host.format ~= format then
    errors.world(("EFORMAT: state.json has host format %s: expected %d"):format(
      tostring(host.format), format), "EFORMAT")
  end
  run.update, run.tokens = run.core:updates(), run.core:tokens()
  run.line_written, run.saved_update = true, run.update
  run.state = pack.decode(host.state)
  run.random.random:load(host.random.random)
  run.random.math:load(host.random.math)
  run.tracker:load(host.interval)
  run.elapsed_before = host.elapsed_seconds
  run.session = host.session
  run.reported_epoch = host.epoch
  for _, name in ipairs(last_values) do run[name] = host.last[name] end
  run.final = {}
  for name, value in pairs(host.final) do run.final[name] = pack.decode(value) end
  run.pending, run.entries = {}, {}
  for i, index in ipairs(host.pending_hooks or {}) do
    if run.spec.hooks[index] then run.pending[#run.pending + 1] = index end
    if i == 1 then
      for j, entry in ipairs(host.line or {}) do
        run.entries[j] = { entry.name, pack.decode(entry.value) }
      end
    end
  end
  for _, a in pairs(run.assignments) do
    local t = math.max(0, run.update - 1)
    a.scale = (a.schedule or run.spec.schedule):scale(t, run.total)
  end
  run:note_rates(math.max(0, run.update - 1))
end

return state
