-- A sweep on a Slurm cluster: one array of jobs for what is missing, and how far it is. slurm.json
-- in the sweep's folder lists what was submitted, by the names of the jobs: each is written before
-- sbatch is asked, so that what Slurm has is found again whatever happens in between.
local core = require "perigee.core"
local call = require "perigee.slurm.call"
local data = require "perigee.data"
local directory = require "perigee.directory"
local errors = require "perigee.errors"
local launch = require "perigee.sweep.launch"
local look = require "perigee.sweep.look"
local pairing = require "perigee.sweep.pairing"
local place = require "perigee.sweep.place"
local progress = require "perigee.sweep.progress"
local record = require "perigee.sweep.record"
local request = require "perigee.slurm.request"
local script = require "perigee.slurm.script"
local stock = require "perigee.sweep.stock"

local cluster = {}

-- ---- slurm.json ---------------------------------------------------------------------------------
-- { name, job, runs = { name, … } } of each submission, the oldest first.
local function submissions(out)
  local path = out .. "/slurm.json"
  local ok, value = pcall(data.read_json, path)
  local list = ok and (value == nil and {} or type(value) == "table" and value.submissions)
  local sound = type(list) == "table"
  for _, entry in ipairs(sound and list or {}) do
    sound = sound and type(entry) == "table" and type(entry.runs) == "table"
      and type(entry.name) == "string" and entry.name:find "^[%w._-]+$" ~= nil
  end
  if not sound then
    errors.world(("EFORMAT: %s does not list what was submitted: look with squeue, then move it "
      .. "away"):format(path), "EFORMAT")
  end
  return list
end

local function write(out, list)
  local objects = {}
  for i, entry in ipairs(list) do
    objects[i] = directory.object { { "name", entry.name }, { "job", entry.job },
      { "runs", core.json.array(table.move(entry.runs, 1, #entry.runs, 1, {})) } }
  end
  directory.write_json(out .. "/slurm.json", directory.object { { "format", 1 },
    { "submissions", core.json.array(objects) } })
end

-- What Slurm has, by the run's name.
local function active(list)
  local names, by_run = {}, {}
  for i, entry in ipairs(list) do names[i] = entry.name end
  local found = call.squeue(names)
  for _, entry in ipairs(list) do
    for task, state in pairs(found[entry.name] or {}) do
      local run = entry.runs[task + 1]
      if run then by_run[run] = state end
    end
  end
  return by_run
end

-- Refuse to train here what Slurm trains or will.
function cluster.check_idle(out)
  if core.fs.kind(out .. "/slurm.json") == nil then return end
  local ok, by_run = pcall(active, submissions(out))
  local name, task = next(ok and by_run or {})
  if name then
    errors.world(("ESTATE: %s is job %s of Slurm: wait for it, or scancel it, or go on with "
      .. "--slurm"):format(name, task.id), "ESTATE")
  end
end

-- ---- how far it is ------------------------------------------------------------------------------
local queued = { PENDING = true, REQUEUED = true, REQUEUE_HOLD = true, REQUEUE_FED = true,
  SPECIAL_EXIT = true, CONFIGURING = true }

-- Set run.state from the run's folder and from what Slurm says.
local function judge(self, run, task)
  local state = run.state
  run.task = nil
  if state.status == "finished" or state.status == "paused" then return end
  if task then
    run.task = task
    state.status, state.reason = queued[task.state] and "queued" or "running", nil
    local values = look.tail(run.dir):read()
    state.update = values["progress/update"] or state.update
    state.loss = values["validation/loss"] or values["train/loss"] or state.loss
  elseif state.status == "failed" and not state.reason then
    state.reason = stock.last_words(("%s/logs/%s.log"):format(self.out, run.name))
  end
end

local function stock_up(self, list, only_look)
  local by_run = active(list)
  for _, run in ipairs(self.runs) do
    stock.take(run, only_look or by_run[run.name] ~= nil)
    judge(self, run, by_run[run.name])
  end
end

-- Runs that are neither done nor with Slurm, nor hopeless.
local function missing(runs)
  local list = {}
  for _, run in ipairs(runs) do
    if not run.task and not run.tried and run.state.status ~= "finished" then
      list[#list + 1] = run
    end
  end
  return list
end

local function conclude(self)
  self.failed, self.complete = {}, true
  for _, run in ipairs(self.runs) do
    if run.state.status == "failed" then self.failed[#self.failed + 1] = run end
    if run.state.status ~= "finished" then self.complete = false end
  end
  if self.complete then self.pairing = pairing.check(self.runs) end
end

-- ---- submitting ---------------------------------------------------------------------------------
local function prepare(self, runs, job)
  local words = request.words(self.request, job, #runs, self.jobs)
  local text = script.text(runs, words, { cwd = errors.try(core.fs.cwd()), recipe = self.recipe,
    out = self.out, reading = self.runs[1].plan.reading, request = self.request,
    program = launch.program(), device = self.device, compute = self.compute,
    threads = self.threads or self.request.cpus })
  return words, text
end

-- A name that no other submission has: of this folder at this moment.
local function job_name(self)
  local h = 0x811c9dc5
  local own = ("%s %d %.6f"):format(core.fs.real(self.out) or self.out, core.host().pid,
    core.time())
  for i = 1, #own do h = (h ~ own:byte(i)) * 0x01000193 & 0xffffffff end
  return ("%s-%08x"):format(self.name:gsub("[^%w._-]", "_"):sub(1, 60), h)
end

local function submit(self, list, runs)
  local name = job_name(self)
  local words, text = prepare(self, runs, name)
  local entry = { name = name, runs = {} }
  for i, run in ipairs(runs) do entry.runs[i] = run.name end
  errors.try(core.fs.make(self.out .. "/slurm"))
  local path = ("%s/slurm/%s.sh"):format(errors.try(core.fs.real(self.out)), name)
  errors.try(core.fs.write(path, text))
  list[#list + 1] = entry
  write(self.out, list)
  local ok, job, why = pcall(call.sbatch, path, words)
  if not ok then job, why = nil, job end
  if not job then
    -- It may have been taken and only the answer lost.
    local asked, found = pcall(call.squeue, { name })
    local _, task = next(asked and found[name] or {})
    job = task and task.id:match "^%d+"
    if not job then
      if asked or not ok then
        list[#list] = nil
        write(self.out, list)
        core.fs.remove(path)
      end
      if not ok then error(why, 0) end
      errors.world("ESTATE: sbatch: " .. why, "ESTATE")
    end
  end
  entry.job = job
  write(self.out, list)
  for i, run in ipairs(runs) do
    run.task = { id = ("%s_%d"):format(job, i - 1), state = "PENDING" }
    run.state.status, run.state.reason = "queued", nil
  end
  return job
end

local function work(self)
  self.before = record.read(self.out)
  local list = submissions(self.out)
  stock_up(self, list)
  stock.check_others(self)
  record.write_recipe(self)
  local runs = missing(self.runs)
  self.submitted = #runs
  if #runs > 0 then
    local job = submit(self, list, runs)
    self.progress:line(("job %s: %d run%s submitted"):format(job, #runs, #runs > 1 and "s" or ""))
  end
  conclude(self)
  record.write(self)
end

-- ---- the call -----------------------------------------------------------------------------------
-- The script that would be submitted now.
function cluster.dry_run(self)
  for _, run in ipairs(self.runs) do stock.take(run, true) end
  local runs = missing(self.runs)
  if #runs == 0 then return "" end
  local _, text = prepare(self, runs, job_name(self))
  return text
end

-- Submit what is missing, or only look. Returns self as sweep.run does; interrupted is false.
function cluster.run(self)
  self.progress = progress.new(self)
  self.progress.tty = false
  self.interrupted = false
  if self.only_look then
    stock_up(self, submissions(self.out), true)
    conclude(self)
  else
    self.place = place.take(self.out, function() self.progress:waits() end,
      function() return false end)
    local ok, e = pcall(work, self)
    self.place:leave()
    if not ok then error(e, 0) end
  end
  self.progress:cluster(self)
  return self
end

return cluster
