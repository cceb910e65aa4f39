-- Runs as processes of this machine: `perigee train`, or `perigee resume` for what was interrupted.
local core = require "perigee.core"
local errors = require "perigee.errors"

local launch = {}

-- The words that start the perigee program: this one, or that which belongs to the loaded module.
function launch.program()
  local own = core.program()
  if own and own:match "/perigee$" then return own end
  local module = package.searchpath("perigee.core", package.cpath)
  for _, place in ipairs { "/../../perigee", "/../../../../bin/perigee" } do
    local path = module and module:match "^(.*)/[^/]*$" .. place
    if path and core.fs.kind(path) == "file" then return core.fs.real(path) end
  end
  errors.world("ENOENT: the perigee program is not where the module is: start the sweep with "
    .. "`perigee run SCRIPT`", "ENOENT")
end

-- The command of a run. options: recipe, threads, device, compute, program.
function launch.command(run, options)
  local words = { options.program or launch.program() }
  local function add(...)
    for _, word in ipairs { ... } do words[#words + 1] = tostring(word) end
  end
  if run.resumes then
    add("resume", run.dir)
  else
    add("train", options.recipe, "--out", run.dir)
    local names = {}
    for name in pairs(run.set) do names[#names + 1] = name end
    table.sort(names)
    for _, name in ipairs(names) do
      local value = run.set[name]
      add("--set", ("%s=%s"):format(name, math.type(value) == "float" and ("%.17g"):format(value)
        or tostring(value)))
    end
  end
  if options.threads then add("--threads", options.threads) end
  if options.device then add("--device", options.device) end
  if options.compute then add("--compute", options.compute) end
  if run.until_update then add("--max-updates", run.until_update) end
  return words
end

-- The environment of rank `rank` of `world`: the sweep's own, without what would make it a rank of
-- the sweep's launcher. Ranks meet at `port`, of which rank 0 has the descriptor `listener`.
local function environment(slot, rank, world, name, port, listener)
  local env, dropped = {}, { RANK = true, WORLD_SIZE = true, LOCAL_RANK = true,
    LOCAL_WORLD_SIZE = true, MASTER_PORT = true, MASTER_ADDR = true, PERIGEE_JOB = true,
    PERIGEE_LISTENER = true, CUDA_VISIBLE_DEVICES = slot.gpus ~= nil }
  for _, text in ipairs(core.environment()) do
    if not dropped[text:match "^[^=]*"] then env[#env + 1] = text end
  end
  local function set(key, value) env[#env + 1] = ("%s=%s"):format(key, value) end
  set("PERIGEE_PARENT", core.host().pid)
  if slot.gpus then set("CUDA_VISIBLE_DEVICES", table.concat(slot.gpus, ",")) end
  if world > 1 then
    set("RANK", rank)
    set("LOCAL_RANK", rank)
    set("WORLD_SIZE", world)
    set("MASTER_ADDR", "127.0.0.1")
    set("MASTER_PORT", port)
    set("PERIGEE_JOB", name)
    if rank == 0 then set("PERIGEE_LISTENER", listener) end
  end
  return env
end

local Job = {}
Job.__index = Job

-- Start a run in a slot, one process for each of its GPUs (one without). `log` takes what it says.
-- options: also lock, a descriptor that its processes keep.
function launch.start(run, slot, log, options)
  local world = slot.gpus and #slot.gpus or 1
  local job = setmetatable({ run = run, slot = slot, processes = {} }, Job)
  -- Rank 0 takes over a socket that listens already: no other program can come by its port.
  local meeting <close> = world > 1 and errors.try(core.listener()) or nil
  local port = meeting and meeting:port()
  for rank = 0, world - 1 do
    local inherit = { options.lock }
    if meeting and rank == 0 then inherit[#inherit + 1] = meeting:descriptor() end
    local process, message, name = core.spawn { args = launch.command(run, options),
      env = environment(slot, rank, world, run.name, port, 2 + #inherit), output = log,
      inherit = inherit }
    if not process then
      job:kill "SIGTERM"
      errors.world(message, name)
    end
    job.processes[rank + 1] = process
  end
  return job
end

-- nil while a process of it runs; else the exit code of the first that is not 0, and its signal.
function Job:poll()
  local code, signal = 0, 0
  for _, process in ipairs(self.processes) do
    local own, by = process:poll()
    if not own then return nil end
    if code == 0 and signal == 0 then code, signal = own, by end
  end
  return code, signal
end

function Job:kill(signal)
  for _, process in ipairs(self.processes) do process:kill(signal) end
end

return launch
