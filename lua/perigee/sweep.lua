-- pg.sweep and `perigee sweep`: many runs of one recipe, each a process of its own in a directory
-- of its own, restartable. What is finished stays; the same command goes on with the rest.
local core = require "perigee.core"
local check = require "perigee.check"
local cluster = require "perigee.sweep.cluster"
local errors = require "perigee.errors"
local grid = require "perigee.sweep.grid"
local keys = require "perigee.keys"
local launch = require "perigee.sweep.launch"
local look = require "perigee.sweep.look"
local open = require "perigee.open"
local pairing = require "perigee.sweep.pairing"
local place = require "perigee.sweep.place"
local plan = require "perigee.sweep.plan"
local progress = require "perigee.sweep.progress"
local recipe = require "perigee.recipe"
local record = require "perigee.sweep.record"
local request = require "perigee.slurm.request"
local stages = require "perigee.sweep.stages"
local stock = require "perigee.sweep.stock"

local sweep = {}

local call_keys = { "recipe", "set", "out", "jobs", "threads", "device", "compute", "gpus_per_run",
  "quiet", "order", "signals", table.unpack(recipe.sweep_keys) }

-- ---- specification ------------------------------------------------------------------------------
-- Check and complete `options`: what the recipe's own `sweep` says stands where they say nothing.
local function specify(options)
  check.table(nil, "pg.sweep", options)
  keys.check(options, call_keys, "pg.sweep")
  local spec = {}
  for key, value in pairs(options) do spec[key] = value end
  check.string(nil, "sweep.recipe", spec.recipe)
  if spec.set ~= nil then check.table(nil, "sweep.set", spec.set) end
  for _, name in ipairs { "jobs", "threads", "gpus_per_run", "samples" } do
    if spec[name] ~= nil then
      check.integer(nil, "sweep." .. name, spec[name], 1,
        name == "samples" and grid.most_samples or nil)
    end
  end
  for _, name in ipairs { "grid", "runs" } do
    if spec[name] ~= nil then check.table(nil, "sweep." .. name, spec[name]) end
  end
  if spec.filter ~= nil and type(spec.filter) ~= "function" then
    check.fail(nil, "sweep.filter", spec.filter, "a function of a point")
  end
  local first = open.read(spec.recipe, spec.set):spec()
  local own = first.sweep or {}
  if spec.slurm then
    spec.request = request.resolve(spec.slurm, own.slurm)
    if spec.gpus_per_run then
      errors.usage("--gpus-per-run is of this machine: with --slurm expected --slurm-gpus")
    end
  end
  if not spec.grid and not spec.runs then
    for _, key in ipairs(recipe.sweep_keys) do
      if spec[key] == nil and key ~= "slurm" then spec[key] = own[key] end
    end
    if spec.slurm and not spec.grid and not spec.runs then spec.runs = { {} } end -- one run
    if not spec.grid and not spec.runs then
      errors.usage("sweep: expected --grid name=value,value,… (or a recipe with its own sweep = "
        .. "{ grid = … })")
    end
  end
  spec.axes, spec.list = spec.grid, spec.runs -- as they were given
  if spec.slurm and (spec.tuning or spec.halving) then
    errors.usage("sweep.%s: its runs depend on each other: expected without --slurm",
      spec.tuning and "tuning" or "halving")
  end
  stages.check(spec)
  spec.name = first.name
  spec.out = spec.out or ("runs/%s-sweep"):format(first.name)
  spec.out = #spec.out > 1 and spec.out:gsub("/+$", "") or spec.out
  return spec
end

-- ---- the loop -----------------------------------------------------------------------------------
local function slots_of(spec)
  local cores, gpus = core.host().cores, nil
  if spec.device and spec.device:match "^cuda" or spec.gpus_per_run then
    gpus = {}
    local visible = os.getenv "CUDA_VISIBLE_DEVICES"
    if visible then
      for name in visible:gmatch "[^,]+" do gpus[#gpus + 1] = name end
    else
      for index = 0, 63 do
        local ctx = core.context { device = "cuda", device_index = index }
        if not ctx then break end
        ctx:close()
        gpus[#gpus + 1] = index
      end
    end
    local per_run = spec.gpus_per_run or 1
    if #gpus < per_run then
      errors.world(("EDEVICE: %d GPUs for a run: this machine shows %d"):format(per_run, #gpus),
        "EDEVICE")
    end
  end
  local per_run = spec.gpus_per_run or 1
  local jobs = spec.jobs or gpus and #gpus // per_run or 1
  if gpus and jobs * per_run > #gpus then
    errors.usage("--jobs %d of %d GPUs each are more than the %d of this machine", jobs, per_run,
      #gpus)
  end
  local slots = {}
  for number = 1, jobs do
    slots[number] = { number = number, threads = spec.threads or math.max(1, cores // jobs),
      gpus = gpus and table.move(gpus, (number - 1) * per_run + 1, number * per_run, 1, {}) }
  end
  return slots
end

local function conclude(self, job, code, signal)
  local run = job.run
  local state = look.at(run.dir)
  if signal == 15 and job.told then
    state.status = state.status == "waiting" and "waiting" or "interrupted" -- before it could save
  elseif signal ~= 0 then
    state.status, state.reason = "failed", ("ended by signal %d%s"):format(signal,
      signal == 9 and ", as when memory runs out" or "")
  elseif code == 75 then
    state.status = "stopped"
  elseif code ~= 0 then
    state.status, state.reason = "failed", stock.last_words(self.place:log(run.name))
  else
    stock.note_pause(state, run)
  end
  run.state, run.job, run.tail = state, nil, nil
  run.tried = true
  self.progress:ended(run)
  record.write(self)
end

-- Whether a run has something left to do in this stage.
local function pending(run)
  if run.job or run.tried then return false end
  local status = run.state.status
  if status == "finished" then return false end
  return not (run.until_update and (run.state.update or 0) >= run.until_update
    and status == "paused")
end

-- The recipe as it was planned: a process that starts reads it again.
local function check_unchanged(reading)
  local files = { { path = reading.path, sha256 = reading.sha256 },
    table.unpack(reading.files) }
  for _, file in ipairs(files) do
    if core.fs.sha256(file.path) ~= file.sha256 then
      errors.world(("ESTATE: %s has changed since the sweep began: expected the same until its "
        .. "last run has started"):format(file.path), "ESTATE")
    end
  end
end

local function begin(self, run, slot)
  run.resumes = run.state.status ~= "waiting"
  if not run.resumes then check_unchanged(run.plan.reading) end
  run.tail = look.tail(run.dir)
  run.job = launch.start(run, slot, self.place:log(run.name), { recipe = self.recipe,
    threads = slot.threads, device = self.device, compute = self.compute,
    lock = self.place.shared })
  run.state = { status = "running", update = run.state.update, loss = run.state.loss }
  self.progress:began(run)
end

local function stop_jobs(self)
  local any = false
  for _, run in ipairs(self.runs) do
    if run.job then
      run.job:kill "SIGTERM"
      run.job.told = true
      any = true
    end
  end
  return any
end

-- After an error: until the last of the runs has saved.
local function wait_for_jobs(self)
  while true do
    local busy = false
    for _, run in ipairs(self.runs) do
      if run.job and run.job:poll() then
        run.job, run.state = nil, look.at(run.dir)
      elseif run.job then
        busy = true
      end
    end
    if not busy then return end
    core.sleep(0.05)
  end
end

-- Run what is pending of `runs`, until nothing is, or a signal has stopped all. false then.
local function work(self, runs)
  local stopping = false
  while true do
    local busy, left = 0, 0
    if not stopping and core.signals.pending() then
      stopping = true
      stop_jobs(self)
      self.progress:stopping(core.signals.pending())
    end
    for _, run in ipairs(runs) do
      if run.job then
        local slot = run.job.slot
        local code, signal = run.job:poll()
        if code then
          conclude(self, run.job, code, signal)
          slot.taken = nil
        else
          busy = busy + 1
        end
      end
    end
    for _, run in ipairs(runs) do
      if pending(run) then
        left = left + 1
        for _, slot in ipairs(self.slots) do
          if not stopping and not slot.taken then
            slot.taken = run
            begin(self, run, slot)
            busy, left = busy + 1, left - 1
            break
          end
        end
      end
    end
    self.progress:show(self.runs)
    if busy == 0 and (stopping or left == 0) then return not stopping end
    core.sleep(0.1)
  end
end

-- ---- the call -----------------------------------------------------------------------------------
-- Everything that is known before a run starts: { name, out, runs, … }.
function sweep.plan(options)
  local self = specify(options)
  self.runs = plan.runs(self, grid.points(self))
  stages.plan(self)
  return self
end

local function signalled(self) return self.signals and core.signals.pending() ~= nil end

local function work_through(self)
  cluster.check_idle(self.out)
  self.before = record.read(self.out)
  self.slots = slots_of(self)
  for _, run in ipairs(self.runs) do stock.take(run) end
  stock.check_others(self)
  record.write_recipe(self)
  record.write(self)
  local through = stages.run(self, function(runs) return work(self, runs) end,
    function(set) -- more runs, of a later stage
      local added = plan.runs(self, set)
      for _, run in ipairs(added) do stock.take(run) end
      table.move(added, 1, #added, #self.runs + 1, self.runs)
      return added
    end)
  self.pairing = pairing.check(self.runs)
  record.write(self)
  return through
end

-- Run it. Returns self: runs (with state), complete, interrupted, failed (a list).
function sweep.run(self)
  if self.slurm then return cluster.run(self) end
  if self.signals then core.signals.install() end
  self.progress = progress.new(self)
  self.place = place.take(self.out, function() self.progress:waits() end,
    function() return signalled(self) end)
  if self.place then
    local ok, through = pcall(work_through, self)
    if not ok then
      if stop_jobs(self) then self.progress:stopping "an error" end
      wait_for_jobs(self)
      pcall(record.write, self) -- what the runs have come to; the error may be that it cannot
    end
    self.place:leave()
    if not ok then error(through, 0) end
    self.interrupted = not through
  else
    self.interrupted = true
    for _, run in ipairs(self.runs) do run.state = look.at(run.dir) end
  end
  self.failed, self.complete = {}, not self.interrupted
  for _, run in ipairs(self.runs) do
    if run.state.status == "failed" then self.failed[#self.failed + 1] = run end
    if run.state.status ~= "finished" and run.state.status ~= "paused" then
      self.complete = false
    end
  end
  self.progress:finish(self)
  return self
end

-- pg.sweep { recipe, grid, runs, filter, jobs, out, … }: runs it and returns { out, complete,
-- interrupted, runs = { { name, params, dir, status, reason, update } } }.
function sweep.public(options)
  return errors.guard(function()
    local self = sweep.plan(options)
    if self.quiet == nil then self.quiet = true end
    sweep.run(self)
    local out = { out = self.out, complete = self.complete, interrupted = self.interrupted,
      pairing = self.pairing, tuned = self.tuned, runs = {} }
    for i, run in ipairs(self.runs) do
      out.runs[i] = { name = run.name, params = run.plan.params, dir = run.dir,
        status = run.state.status, reason = run.state.reason, update = run.state.update,
        loss = run.state.loss }
    end
    return out
  end)
end

return sweep
