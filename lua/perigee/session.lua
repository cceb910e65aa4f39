-- A session of a run: a new one, a fork of a checkpoint, or a resume. Each ends with a Run that is
-- ready to loop, or with nothing left behind.
local board = require "perigee.board"
local core = require "perigee.core"
local check = require "perigee.check"
local checkpoints = require "perigee.checkpoints"
local config = require "perigee.config"
local console = require "perigee.console"
local data = require "perigee.data"
local directory = require "perigee.directory"
local errors = require "perigee.errors"
local keepers = require "perigee.keepers"
local open = require "perigee.open"
local profile = require "perigee.profile"
local recipe = require "perigee.recipe"
local runs = require "perigee.run"
local sources = require "perigee.sources"
local state = require "perigee.state"
require "perigee.handle"

local session = {}

local function identity_of(reading, values)
  return sources.identity(reading, values, function(path)
    return core.fs.sha256(path) or "none"
  end)
end

-- The recipe of a call: an object, or a path to read. Fills run.reading, params, identity.
local function take_recipe(run, from, options, archive)
  if recipe.is(from) then
    if options.set ~= nil then
      errors.misuse("set: the recipe is an object already; give the path of a recipe file, or use "
        .. "recipe:with{…}")
    end
    -- A script that built its recipe is itself the source.
    local script = from.where and from.where:match("^(.*):%d+$")
    local file = script and io.open(script, "rb")
    local text = file and file:read("a") or ""
    if file then file:close() end
    run.reading = { path = script or "script.lua", text = text, files = {}, script = true }
    run.params = {}
    run.identity = identity_of(run.reading, {})
    return from
  end
  check.string(nil, "recipe", from, "a pg.recipe")
  local rec, reading, values = open.read(from, options.set, archive)
  run.reading, run.params = reading, values
  run.identity = identity_of(reading, values)
  return rec
end

-- Run f(run); on any error free the run and pass the error on.
local function building(f)
  local run = runs.new()
  local ok, e = xpcall(f, function(e)
    run.trace = debug.traceback(errors.text(e), 2)
    return e
  end, run)
  if ok then return run.handle, run end
  session.trace = run.trace
  if run.comm then
    run.comm:fail(errors.text(e))
  elseif not run.joining and not run.in_memory then
    core.excuse(errors.text(e))
  end
  run:release()
  error(e, 0)
end

local function attach_console(run)
  run.console = console.new { quiet = run.options.quiet or run.rank > 0, last = run.last,
    tokens_per_update = run.tokens_per_update }
end

-- Load a checkpoint's part for a fork; returns the record for config.json.
local function load_fork(run, fork)
  local path = run:from_first(function()
    return checkpoints.resolve(run.ctx, fork.checkpoint)
  end)
  local host = checkpoints.host_state(path)
  local keep, any_reset = {}, false
  for role, policy in pairs(fork.slots) do
    keep[role] = policy == "keep"
    any_reset = any_reset or policy == "reset"
  end
  local theirs = errors.try(core.checkpoint_config(run.ctx, path))
  for _, key in ipairs { "layers", "width", "heads", "head_dim", "mlp", "vocab" } do
    if theirs[key] ~= run.model_config[key] then
      errors.world(("EFORMAT: fork: model.%s = %s in the recipe, %s in %s: expected the same")
        :format(key, check.show(run.model_config[key]), check.show(theirs[key]), path), "EFORMAT")
    end
  end
  state.replay_changes(run, host, keep)
  errors.try(run.core:load(path, { slots = fork.slots,
    restart_data = fork.data == "restart" }))
  state.restore(run, host)
  keepers.resume(run, path, host.kept, keep)
  run.session, run.elapsed_before = 1, 0.0
  -- Hooks that a stop left over belong to the parent's own continuation.
  run.pending, run.entries = {}, {}
  if run.update >= run.last then
    errors.world(("ESTATE: fork: %s has %d updates already and this recipe ends at %d: expected "
      .. "updates > %d (numbers are absolute)"):format(path, run.update, run.last, run.update),
      "ESTATE")
  end
  run.saved_update = nil
  return directory.object {
    { "run", path:match("([^/]+)/checkpoints/%d+$") },
    { "checkpoint", path:match("([^/]+)$") },
    { "manifest_sha256", errors.try(core.fs.sha256(path .. "/manifest.json")) },
    { "update", run.update },
    { "slots", directory.object { { "embedding", fork.slots.embedding },
      { "backbone", fork.slots.backbone }, { "head", fork.slots.head } } },
    { "data", fork.data },
  }
end

-- mpirun ends ranks a second after it was told to end, unless told otherwise: too little for the
-- checkpoint of most runs.
local function note_launcher(run)
  if run.rank == 0 and run.launch.by == "mpirun" and os.getenv "OMPI_COMM_WORLD_SIZE"
    and not os.getenv "OMPI_MCA_odls_base_sigkill_timeout" then
    run.console:note("note: mpirun kills the ranks 1 s after Ctrl-C, with or without a checkpoint: "
      .. "start it with --mca odls_base_sigkill_timeout 600")
  end
end

-- A new run of a recipe (object or path). options: open.option_keys, and `fork` from the command.
function session.new(from, options)
  return building(function(run)
    run.joining = options.device == "cpu"
    local rec = take_recipe(run, from, options)
    open.prepare(run, rec, options)
    open.initialise(run)
    local fork = options.fork or run.spec.fork
    if fork then run.fork_record = load_fork(run, fork) end
    run.initial_weights = open.compare_weights(run)
    open.prepare_hooks(run)
    attach_console(run)
    run.out = run:from_first(function() return directory.reserve(options.out, run.spec.name) end)
    local ok, e = pcall(function()
      if run.rank > 0 then return end
      run.lock = errors.try(core.fs.lock(run.out))
      sources.archive_names(run.reading)
      directory.write_json(run.out .. "/config.json", config.build(run))
      directory.write_json(run.out .. "/state.json", state.place(run))
      directory.write_recipe(run.out, run.reading) -- where it is, the others are
      run.metrics = errors.try(core.metrics(run.ctx, run.out .. "/metrics.jsonl"))
      board.open(run)
      profile.prepare(run)
    end)
    if not ok then
      if run.rank == 0 then core.fs.remove(run.out) end
      error(e, 0)
    end
    run.console:print(config.header(run))
    if run.fork_record then
      run.console:print(("forked from %s/%s at update %d"):format(run.fork_record.run or "?",
        run.fork_record.checkpoint or "?", run.update))
    end
    run.console:print("run directory: " .. run.out)
    note_launcher(run)
    run:start()
  end)
end

-- Everything up to the point where a new run would create its directory, without the memory that it
-- would take; the caller releases it.
function session.plan(from, options)
  options.purpose = "train --dry-run"
  return building(function(run)
    run.planning = true
    open.resolve(run, take_recipe(run, from, options), options)
    open.check_data(run)
    open.prepare_hooks(run)
    attach_console(run)
  end)
end

-- ---- resume ----------------------------------------------------------------------------------

-- Refuse a recipe that is not the one that the run began with.
local function compare_recipe(run, place, options)
  if place.recipe == run.identity then return false end
  if not options.allow_changed_recipe then
    errors.world(("ESTATE: the recipe is not the one that %s began with (%s): use "
      .. "--allow-changed-recipe to continue with it"):format(options.directory,
      run.reading.path), "ESTATE")
  end
  return true
end

-- Tell when the original file has changed; the run continues with its own copy.
local function note_original(run, place)
  local original = place.paths.recipe
  local file = original and io.open(original, "rb")
  if not file then return end
  local text = file:read("a")
  file:close()
  if text ~= run.reading.text then
    run.console:note(("note: %s has changed since; this run continues with its own copy, %s/"
      .. "recipe.lua"):format(original, run.out))
  end
end

-- The data where the recipe says, or where it was when the checkpoint was written.
local function data_path(rec, place)
  local stated = rec:spec().data.path
  if core.fs.kind(stated) == "directory" then return nil end
  local before = place.paths.data
  if core.fs.kind(before) == "directory" then return before end
  return nil
end

local function describe_directory(path)
  if core.fs.kind(path) ~= "directory" then
    errors.world(("ENOENT: %s is not a folder: expected a run directory"):format(path), "ENOENT")
  end
  local described = data.read_json(path .. "/config.json")
  local place = data.read_json(path .. "/state.json")
  if type(described) ~= "table" or type(place) ~= "table" or type(place.paths) ~= "table"
    or core.fs.kind(path .. "/recipe.lua") ~= "file" then
    errors.world(("ENOENT: %s is not a run directory: expected config.json, state.json and "
      .. "recipe.lua in it"):format(path), "ENOENT")
  end
  return place
end

-- A script that opened its own run cannot be run again for its recipe.
local function refuse_script(path, place, options)
  if place.script and not options.recipe then
    errors.world(("ESTATE: %s was made by a script (%s): resume it there with pg.resume(%q, "
      .. "{ recipe = … })"):format(path, tostring(place.paths.recipe), path), "ESTATE")
  end
end

-- Parameter values of the run, with changes on top.
local function given_params(place, set)
  local given = {}
  for name, value in pairs(place.params or {}) do given[name] = value end
  for name, value in pairs(set or {}) do given[name] = value end
  return given
end

local function find_checkpoint(run, path)
  run.skipped = {}
  local found = run:from_first(function()
    local newest, _, skipped = checkpoints.latest(run.ctx, path)
    run.skipped = skipped
    return newest
  end)
  return found, found and math.tointeger(tonumber(found:match("(%d+)$")))
end

-- What is no checkpoint: in the way of a run that goes on, passed over by one that is finished.
local function note_invalid(run)
  local list = run.skipped
  if not run.already_finished then
    list = checkpoints.set_aside_invalid(run.ctx, run.out, list)
  end
  for _, entry in ipairs(list) do
    run.console:note(("skipped %s: %s%s"):format(entry.path, entry.reason,
      entry.aside and "; set aside as " .. entry.aside or ""))
  end
end

local function continue_from(run, found, host, options)
  if found then
    if host.data_digest ~= run.data_digest then
      errors.world(("EDATA: the data in %s has digest %s, the run began with %s: expected the same "
        .. "shards"):format(run.spec.data.path, run.data_digest, host.data_digest), "EDATA")
    end
    -- nil in checkpoints of programs that took none.
    if host.data_sample and host.data_sample ~= run.data_sample then
      errors.world(("EDATA: the tokens in %s have changed: their samples have digest %s, when %s "
        .. "was written %s"):format(run.spec.data.path, run.data_sample, found, host.data_sample),
        "EDATA")
    end
    state.replay_changes(run, host)
    errors.try(run.core:load(found))
    state.restore(run, host)
    keepers.resume(run, found, host.kept)
    run.last_checkpoint = found
  else
    open.initialise(run)
    if run.spec.fork then load_fork(run, run.spec.fork) end
  end
  run.session = (host and host.session or 1) + 1
  if options.max_updates == nil and host and run.update >= run.last and #run.pending == 0 then
    run.already_finished = true
  end
end

-- One process at a time works in a run directory: two would sweep each other's unfinished saves.
local function take_lock(path)
  local launch = core.launch()
  if launch and launch.rank > 0 then return nil end -- the first rank's, for all
  return errors.try(core.fs.lock(path))
end

-- Everything of a run directory but its state. Returns whether the recipe has changed.
local function reopen(run, path, place, options)
  refuse_script(path, place, options)
  local settings = { set = given_params(place, options.set) }
  local archive = sources.from_directory(path, place.files)
  local from = options.recipe or (path .. "/recipe.lua")
  if recipe.is(from) then settings = {} end
  local rec = take_recipe(run, from, settings, archive)
  if options.recipe == nil then run.reading.origin = place.paths.recipe end
  local changed = compare_recipe(run, place, options)
  options.data_path = options.data_path or data_path(rec, place)
  -- What "auto" was resolved to, or the command line asked for, unless a new recipe says.
  if not (changed and rec:spec().compute ~= "auto") then
    options.compute = options.compute or place.compute
  end
  if not changed then options.recompute = options.recompute or place.recompute end
  open.prepare(run, rec, options)
  return changed
end

-- Continue the run in `path`. options: also recipe (another file), allow_changed_recipe, micro.
function session.resume(path, options)
  path = #path > 1 and path:gsub("/+$", "") or path
  options.directory, options.purpose = path, "resume"
  return building(function(run)
    run.out = path
    local place = describe_directory(path)
    run.lock = take_lock(path)
    local changed = reopen(run, path, place, options)
    local found, update = find_checkpoint(run, path)
    local host = found and checkpoints.host_state(found)
    continue_from(run, found, host, options)
    if run.world > 1 then open.compare_weights(run) end
    open.prepare_hooks(run)
    attach_console(run)
    if run.rank == 0 then note_invalid(run) end
    if run.already_finished then
      errors.try(run.comm:leave())
      return
    end
    if run.rank > 0 then
      run:start()
      return
    end
    profile.prepare(run)
    if changed then
      run.initial_weights = data.read_json(path .. "/config.json").initial_weights
      -- The earlier source stays beside the new one.
      errors.try(core.fs.rename(path .. "/recipe.lua",
        ("%s/recipe.session-%d.lua"):format(path, run.session - 1)))
      directory.write_recipe(path, run.reading)
      directory.write_json(path .. "/config.json", config.build(run))
      directory.write_json(path .. "/state.json", state.place(run))
    end
    checkpoints.sweep(path)
    run.metrics = errors.try(core.metrics(run.ctx, path .. "/metrics.jsonl"))
    board.open(run)
    local marker = {
      { "session", run.session }, { "session/from_update", run.update },
      { "session/recipe_changed", changed }, { "session/micro", run.spec.batch.micro },
      { "session/device", run.ctx:device() }, { "session/compute", run.compute },
      { "session/recompute", run.spec.recompute }, { "session/ranks", run.world },
      { "session/started_at", core.time() },
    }
    local attention = config.attention(run)
    if attention then marker[#marker + 1] = { "session/attention", attention } end
    if run.replayed_hooks then
      marker[#marker + 1] = { "session/hooks", core.json.array(run.replayed_hooks) }
    end
    errors.try(run.metrics:write(marker))
    if not found then
      run.console:note(("no valid checkpoint in %s: starting over"):format(path))
    end
    run.console:print(config.header(run))
    run.console:print(found and ("resuming %s at update %d from %s"):format(path, update, found)
      or ("run directory: " .. path))
    for _, text in ipairs(run.replayed_hooks or {}) do
      run.console:note("of a client: " .. text)
    end
    note_original(run, place)
    note_launcher(run)
    run:start()
  end)
end

-- The run of a directory as its checkpoint `found` left it, in memory: nothing is written, and
-- whoever trains there is not disturbed. options: context (that the caller keeps), quiet, compute,
-- data_path.
function session.in_memory(path, found, options)
  options.directory = path
  return building(function(run)
    run.out, run.in_memory = path, true
    local place = describe_directory(path)
    reopen(run, path, place, options)
    continue_from(run, found, checkpoints.host_state(found), options)
    run.last_checkpoint = found
    open.prepare_hooks(run)
    attach_console(run)
    -- The lines of its updates, for plots.
    local lines = {}
    run.lines = lines
    run.metrics = {
      write = function(_, line)
        local values = {}
        for _, entry in ipairs(line) do values[entry[1]] = entry[2] end
        lines[#lines + 1] = values
        return true
      end,
      close = function() end,
    }
    run:start()
  end)
end

return session
