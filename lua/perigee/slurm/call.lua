-- Slurm's programs: sbatch and squeue, what they print and what they refuse.
local core = require "perigee.core"
local errors = require "perigee.errors"

local call = {}

-- Runs a program; its exit code and all that it printed.
local function invoke(words)
  local output = os.tmpname()
  local process, message, name = core.spawn { args = words, env = core.environment(),
    output = output }
  local code, signal
  while process do
    code, signal = process:poll()
    if code then break end
    core.sleep(0.02)
  end
  local text = core.fs.read(output) or ""
  os.remove(output)
  if not process then
    if name == "ENOENT" then
      message = ("ENOENT: %s is not there: expected Slurm's programs on PATH"):format(words[1])
    end
    errors.world(message, name)
  end
  return signal ~= 0 and 128 + signal or code, text
end

-- What a program complains of, in one line.
local function complaint(text, code)
  local parts = {}
  for line in text:gmatch "[^\n]+" do
    parts[#parts + 1] = line:gsub("^%w+: ", ""):gsub("^error: ", "")
  end
  return #parts > 0 and table.concat(parts, "; ") or ("exit code %d"):format(code)
end

-- Submit the script at `path` with sbatch's options `words`; the job's number, as text, or nil and
-- why not.
function call.sbatch(path, words)
  local line = { "sbatch", "--parsable" }
  table.move(words, 1, #words, #line + 1, line)
  line[#line + 1] = path
  local code, text = invoke(line)
  local job = code == 0 and ("\n" .. text):match "\n(%d+)[;%w]*\n"
  if job then return job end
  return nil, complaint(text, code)
end

-- Tasks that Slurm has of jobs with these names: { [name] = { [task] = { id, state, reason } } }.
function call.squeue(names)
  local found = {}
  if #names == 0 then return found end
  local code, text = invoke { "squeue", "--noheader", "--array", "--format=%j|%F|%K|%T|%r",
    "--name=" .. table.concat(names, ",") }
  if code ~= 0 then
    errors.world(("ESTATE: squeue: %s: nothing was submitted"):format(complaint(text, code)),
      "ESTATE")
  end
  for line in text:gmatch "[^\n]+" do
    local job, id, task, state, reason = line:match "^([^|]*)|(%d+)|(%d+)|(%u+)|(.*)$"
    if job then
      found[job] = found[job] or {}
      found[job][tonumber(task)] = { id = ("%s_%s"):format(id, task), state = state,
        reason = reason ~= "None" and reason or nil }
    end
  end
  return found
end

return call
