-- The methods of `run`, for hooks and scripts.
local core = require "perigee.core"
local check = require "perigee.check"
local checkpoints = require "perigee.checkpoints"
local errors = require "perigee.errors"
local keepers = require "perigee.keepers"
local keys = require "perigee.keys"
local optim = require "perigee.optim"
local panels = require "perigee.panels"
local runs = require "perigee.run"
local state = require "perigee.state"
local weights = require "perigee.weights"

local methods = runs.methods
local inner = runs.inner

local function open_run(handle)
  local run = inner(handle)
  if run.closed then errors.misuse("the run is closed") end
  return run
end

-- ---- the loop --------------------------------------------------------------------------------

-- for update in run:updates() do … end. After a `break` or an error in the body, close the run
-- (`local run <close> = …` does): that writes the line of the last update, a checkpoint, a summary.
function methods.updates(handle)
  local run = open_run(handle)
  local function next_update()
    local ok, result = xpcall(run.next_update, function(e)
      run.trace = run.trace or debug.traceback(errors.text(e), 2)
      return e
    end, run)
    if ok then return result end
    run:fail(result)
    error(result, 0)
  end
  -- No closing value as a fourth result: Lua 5.4.4 loses it when a loop that is left early has
  -- captured variables. Closing the run completes an update that a `break` left open.
  return next_update
end

-- One update; returns the number of completed updates, or nil when the run is over.
function methods.step(handle)
  local run = open_run(handle)
  if run.busy then
    errors.misuse("the run is inside an update: a hook or an optimizer may not advance it")
  end
  local ok, result = pcall(run.next_update, run)
  if ok then return result end
  run:fail(result)
  error(result, 0)
end

-- True while code of a client runs, a command or a hook: rank 0 alone does, while the others wait
-- for its next step.
local function alone(run)
  local attached = run.attached
  return run.world > 1 and attached ~= nil and (attached.serving or attached.hooking) or false
end

-- End after this update, as planned: the interval is reported and a final checkpoint saved.
function methods.stop(handle, reason)
  local run = open_run(handle)
  reason = reason == nil and "run:stop" or check.string(nil, "reason", reason)
  if alone(run) then
    run.attached:order { stop = reason }
  else
    run.stop_reason = reason
  end
  run:changed("stop: " .. reason)
end

function methods.close(handle) inner(handle):close() end

-- Save a checkpoint of the present update; returns its path. From a hook or the loop's body it is
-- saved when the update is complete, after its metrics line.
function methods.checkpoint(handle)
  local run = open_run(handle)
  if run.in_memory then
    errors.misuse("the run is in memory, its directory is left alone: save(\"FOLDER\") writes a "
      .. "checkpoint elsewhere")
  end
  local complete = run.status ~= "running" or run.line_written
  if complete and alone(run) then
    run.attached:order { checkpoint = true }
    return checkpoints.path(run.out, run.attached:next_order())
  end
  if complete then return core.uninterrupted(run.save_checkpoint, run) end
  run.save_requested = true
  return checkpoints.path(run.out, run.update)
end

-- ---- logging and saving ----------------------------------------------------------------------

local reserved = { nonfinite = true, session = true, ["data/batch_hash"] = true }
for _, name in ipairs { "progress/update", "progress/tokens", "progress/tpp", "progress/epoch",
  "optimizer/schedule_scale", "train/loss", "train/perplexity", "train/grad_norm",
  "train/grad_norm_max", "train/clipped_fraction", "train/would_clip_fraction",
  "performance/tokens_per_second", "performance/seconds_per_update",
  "performance/data_wait_seconds", "performance/elapsed_seconds", "memory/peak_allocated_gib",
  "memory/peak_reserved_gib", "events/epoch", "events/checkpoint",
  "performance/checkpoint_seconds" } do
  reserved[name] = true
end

-- Names that diagnostics write through run:log, and what they hold.
local measured = { ["validation/loss"] = "number", ["validation/hilbert_step/rms"] = "number",
  ["validation/hilbert_step/tokens"] = "number",
  ["diagnostics/lm_head_step/diameter_exact"] = "number",
  ["diagnostics/lm_head_step/diameter_tokens"] = "table",
  ["diagnostics/lm_head_step/diameter_text"] = "table" }
for _, name in ipairs { "diameter_lower", "diameter_upper", "common_mode", "spectral_norm", "norm",
  "stable_rank", "effective_rank", "separation", "rho" } do
  measured["diagnostics/lm_head_step/" .. name] = "number"
end

local function loggable(name, value, depth)
  local kind = type(value)
  if kind == "number" or kind == "boolean" then return end
  if kind == "string" then
    if not utf8.len(value) then
      check.fail(nil, ("run:log %q value"):format(name), value, "text in UTF-8")
    end
    return
  end
  if kind == "table" and getmetatable(value) == nil and depth < 4 then
    local names = 0
    for k in pairs(value) do if type(k) == "string" then names = names + 1 end end
    local count = 0
    for _ in pairs(value) do count = count + 1 end
    if names ~= count and (names > 0 or #value ~= count) then
      check.fail(nil, ("run:log %q value"):format(name), value,
        "a list 1, 2, … or a table of names, not both")
    end
    for k, v in pairs(value) do
      if type(k) ~= "string" and math.type(k) ~= "integer" then
        check.fail(nil, ("run:log %q key"):format(name), k, "a string or a position")
      end
      loggable(name, v, depth + 1)
      if type(v) == "number" and (v ~= v or v == math.huge or v == -math.huge) then
        check.fail(nil, ("run:log %q element"):format(name), v, "a finite number")
      end
    end
    return
  end
  check.fail(nil, ("run:log %q value"):format(name), value,
    "a number, a string, a boolean or a table of these")
end

-- Add a value to this update's metrics line.
function methods.log(handle, name, value)
  local run = open_run(handle)
  check.string(nil, "run:log name", name)
  if reserved[name] or not utf8.len(name) then
    check.fail(nil, "run:log name", name, "a name in UTF-8 that the run does not write itself")
  end
  loggable(name, value, 1)
  if measured[name] and type(value) ~= measured[name] then
    check.fail(nil, ("run:log %q value"):format(name), value, "a " .. measured[name])
  end
  table.insert(run.entries, { name, value })
end

-- Write a tensor as NAME.safetensors into the run directory; returns the path.
function methods.save(handle, name, tensor)
  local run = open_run(handle)
  check.string(nil, "run:save name", name)
  local allowed = "a file name of letters, digits and _ . - (with / for folders)"
  if not name:match("^[%w_.%-/]+$") or name:sub(1, 1) == "/" or name:find("..", 1, true)
    or name:match("^checkpoints/") or name:sub(-1) == "/" then
    check.fail(nil, "run:save name", name, allowed)
  end
  if type(tensor) ~= "userdata" then check.fail(nil, "run:save tensor", tensor, "a tensor") end
  local path = ("%s/%s"):format(run.out, name)
  if not path:match("%.safetensors$") then path = path .. ".safetensors" end
  if run.rank ~= 0 or run.in_memory then return path end
  local folder = path:match("^(.*)/")
  errors.try(core.fs.make(folder))
  errors.try(core.save_tensors(run.ctx, path, { { "tensor", tensor } },
    { update = tostring(run.update), run = run.spec.name }))
  return path
end

-- ---- parameters ------------------------------------------------------------------------------

function methods.parameter(handle, name)
  local run = open_run(handle)
  check.string(nil, "run:parameter name", name)
  local found = run.by_name[name]
  if found then return found end
  local known = {}
  for _, parameter in ipairs(run.parameters) do known[#known + 1] = parameter.name end
  errors.misuse("run:parameter: no parameter is called %s; did you mean '%s'?",
    check.show(name), keys.nearest(name:sub(1, 80), known))
end

local function together(run, what)
  if alone(run) then
    errors.misuse("%s needs all %d ranks: a client runs on rank 0 alone", what, run.world)
  end
end

local function named(names)
  return #names == 1 and names[1] or ("%s and %d more"):format(names[1], #names - 1)
end

-- Of a client of several ranks: all of them make the change when they meet next.
local function ordered(run, change, text)
  if not alone(run) then return false end
  run.attached:order(change)
  run.attached:note(text)
  return true
end

-- From the next update on, another optimizer for the selected parameters.
function methods.set_optimizer(handle, selector, optimizer)
  local run = open_run(handle)
  if not optim.is(optimizer) then
    check.fail(nil, "run:set_optimizer optimizer", optimizer, "pg.optim.NAME{…}")
  end
  local names = run:select(selector)
  local change = { parameters = core.json.array(names), optimizer = optimizer:to_data() }
  if ordered(run, change, ("%s: %s"):format(named(names), optimizer:describe())) then return end
  core.uninterrupted(function()
    run:change_optimizer(names, optimizer)
    change.update = run.update
    table.insert(run.changes, change)
    run:changed(("%s: %s"):format(named(names), optimizer:describe()),
      ("%s: %s"):format(table.concat(names, ", "), optimizer:describe()))
  end)
end

-- From the next update on, other hyperparameters: { lr = x }. Slots and update counts stay.
function methods.set(handle, selector, changes)
  local run = open_run(handle)
  check.table(nil, "run:set", changes, "hyperparameters, as { lr = 1e-3 }")
  local parts, own = {}, {} -- own: the caller may change its table later
  for name, value in pairs(changes) do
    own[name] = type(value) == "table" and table.move(value, 1, #value, 1, {}) or value
    if type(value) == "function" then
      errors.misuse("run:set: %s is a function, which a checkpoint cannot hold: give a number",
        tostring(name))
    end
    parts[#parts + 1] = ("%s = %s"):format(name, type(value) == "table"
      and ("{%s, %s}"):format(check.show(value[1]), check.show(value[2])) or check.show(value))
  end
  if #parts == 0 then check.fail(nil, "run:set", changes, "at least one hyperparameter") end
  table.sort(parts)
  local names, text = run:select(selector), table.concat(parts, ", ")
  run:check_hypers(names, own)
  local change = { parameters = core.json.array(names), set = own }
  if ordered(run, change, ("%s: %s"):format(named(names), text)) then return end
  core.uninterrupted(function()
    run:change_hypers(names, own)
    change.update = run.update
    table.insert(run.changes, change)
    run:changed(("%s: %s"):format(named(names), text),
      ("%s: %s"):format(table.concat(names, ", "), text))
  end)
end

-- Change weights: fn(value) works on the parameter's tensor in place.
function methods.edit(handle, parameter, fn)
  local run = open_run(handle)
  if type(parameter) == "string" then parameter = methods.parameter(handle, parameter) end
  if run.by_name[parameter.name] == nil then
    check.fail(nil, "run:edit parameter", parameter, "a parameter of this run")
  end
  if type(fn) ~= "function" then check.fail(nil, "run:edit", fn, "a function(tensor)") end
  together(run, "run:edit")
  -- What was changed before an error has been changed.
  local ok, e = pcall(fn, parameter.value)
  core.uninterrupted(function()
    errors.try(run.model:refresh(parameter.name))
    run:changed(parameter.name .. ": edited", run.world > 1 and ("%s: edited, weights %s"):format(
      parameter.name, errors.try(run.model:sha256(parameter.name))))
  end)
  if not ok then error(e, 0) end
end

-- ---- measurements ----------------------------------------------------------------------------

-- Tokens that a validation of `requested` tokens really uses (SPEC §2); too few is an error.
function methods.validation_tokens(handle, requested)
  local run = open_run(handle)
  check.integer(nil, "validation tokens", requested, 1)
  local time, micro = run.model_config.context, run.spec.batch.micro * run.world
  local wanted = math.max(1, requested // (micro * time))
  local groups, tokens = run.spec.data:validation_groups(run.ctx, time, micro)
  if wanted > groups then
    errors.world(("EDATA: validation tokens = %d needs %d batches of %d x %d tokens: the "
      .. "validation split %s holds %d (%d tokens)"):format(requested, wanted, micro, time,
      run.spec.data.val, groups, tokens), "EDATA")
  end
  return wanted * micro * time
end

-- { loss, tokens, batches, seconds }
function methods.validate(handle, options)
  local run = open_run(handle)
  check.table(nil, "run:validate", options, "{ tokens = n }")
  keys.check(options, { "tokens" }, "run:validate")
  check.integer(nil, "run:validate tokens", options.tokens, 1)
  together(run, "run:validate")
  return run:cancellable(function()
    return errors.try(run.core:validate { tokens = options.tokens })
  end)
end

-- Where a run's panels are read and its matrices measured. nil stands for the only open run.
panels.add_place(function(value)
  local run = runs.find(value)
  if not run or run.closed or not run.ctx then return nil end
  return { owner = run, ctx = run.ctx, source = run.spec.data, context = run.model_config.context,
    vocab = run.model_config.vocab, world = run.world, micro = run.spec.batch.micro,
    model = run.model, core = run.core }
end)

-- Read a panel of validation positions; n, { tokens, ranks, micro, spread } or pg.panel{…}.
function methods.panel(handle, options)
  local run = open_run(handle)
  local panel = panels.read(options, panels.place(run), "run:panel")
  run.panels = run.panels or {}
  table.insert(run.panels, panel)
  return panel
end

-- { parameter's name = tensor }, copies: the averaged weights of pg.ema, the last increments of
-- pg.shadow, by their name.
function methods.kept(handle, name)
  local run = open_run(handle)
  local names = {}
  for _, keeper in ipairs(keepers.of(run)) do
    if keeper.name == name then return keeper:tensors(handle) end
    names[#names + 1] = keeper.name
  end
  errors.misuse("run:kept: no hook of this run keeps tensors as %s%s", check.show(name),
    #names > 0 and " (known: " .. table.concat(names, ", ") .. ")" or "")
end

-- What the last update added to the head U, decay excluded: its increment, or with U = A B what
-- became of the increments of both.
function methods.head_increment(handle)
  local run = open_run(handle)
  return weights.head_step(run.model, function(name) return run.by_name[name].increment end)
end

-- Hilbert RMS of a matrix (default: the head's increment) over a panel.
function methods.hilbert(handle, panel, matrix, with_ranges)
  local run = open_run(handle)
  together(run, "run:hilbert")
  local product <close> = matrix == nil and (run.model_config.head or {}).rank
    and methods.head_increment(handle) or nil
  panel = panels.read(panel, panels.place(run), "run:hilbert panel")
  return run:cancellable(function()
    return errors.try(run.core:hilbert(panel, product or matrix, with_ranges))
  end)
end

-- { value, rows, … } of a matrix: see core.diameter.
function methods.diameter(handle, matrix)
  local run = open_run(handle)
  return run:cancellable(function() return errors.try(core.diameter(matrix)) end)
end

-- The text of a token as valid UTF-8 (other bytes as \xNN); nil when the data has no tokenizer.
function methods.token_text(handle, id)
  local run = open_run(handle)
  if not run.tokenizer_path then return nil end
  if not run.tokenizer then
    run.tokenizer = errors.try(core.tokenizer(run.ctx, run.tokenizer_path))
  end
  -- A model may have more rows than its tokenizer has tokens.
  if id >= run.tokenizer:vocab() then return nil end
  local bytes = run.tokenizer:bytes(id)
  if not bytes then return nil end
  if utf8.len(bytes) then return bytes end
  return (bytes:gsub("[\128-\255]", function(c) return ("\\x%02x"):format(c:byte()) end))
end

-- Bytes of the state that a checkpoint would hold for the host: raises when run.state cannot be
-- saved, naming the path.
function methods.check_state(handle)
  return #core.json.encode(state.collect(open_run(handle)))
end

return methods
