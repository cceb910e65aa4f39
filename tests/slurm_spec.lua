-- Sweeps on Slurm, without one: what is submitted, the script, restart and refusals, with programs
-- of the same names in its place. tests/slurm.sh has a real Slurm.
local support = require "lua_support"
local sweeps = require "sweep_support"
local core = support.core

local bin, out, recipe

-- A program in front of PATH.
local function program(name, text)
  local path = support.write(bin .. "/" .. name, "#!/bin/sh\n" .. text .. "\n")
  assert(os.execute("chmod +x " .. support.quote(path)))
end

-- A command with these programs; its exit code and what it printed.
local function shell(command)
  local log = support.folder() .. "/out"
  local _, _, code = os.execute(("PATH=%s:$PATH; export PATH; %s >%s 2>&1 </dev/null"):format(
    support.quote(bin), command, support.quote(log)))
  return code, support.read(log)
end

local function words(...)
  local list = {}
  for i, word in ipairs { ... } do list[i] = support.quote(word) end
  return table.concat(list, " ")
end

local function sweep(...)
  return shell(words(support.program, "sweep", recipe, "--out", out, "--threads", "1", "--slurm",
    ...))
end

local grid = { "--grid", "head=adamw,rownorm", "--grid", "seed=0,1" }

local function submitted()
  local text = core.fs.read(bin .. "/calls") or ""
  return select(2, text:gsub("\n", ""))
end

-- squeue's answer: { task = state } of the last submission.
local function queue(states)
  local record = support.json(out .. "/slurm.json")
  local last = record.submissions[#record.submissions]
  local lines = {}
  for task, state in pairs(states) do
    lines[#lines + 1] = ("%s|%s|%d|%s|Priority\n"):format(last.name, last.job, task, state)
  end
  support.write(bin .. "/queue", table.concat(lines))
end

-- A task of the last submission, as Slurm starts it.
local function start(task)
  local record = support.json(out .. "/slurm.json")
  local last = record.submissions[#record.submissions]
  return shell(("SLURM_JOB_ID=%d SLURM_ARRAY_JOB_ID=%s SLURM_ARRAY_TASK_ID=%d bash %s"):format(
    100 + task, last.job, task, support.quote(("%s/slurm/%s.sh"):format(out, last.name))))
end

before_each(function()
  sweeps.prepare()
  local folder = support.folder() .. "/it's a folder; $x `y` %j"
  assert(core.fs.make(folder))
  recipe = support.write(folder .. "/the \"recipe\".lua", sweeps.text:format(sweeps.data))
  out = folder .. "/swe ep"
  bin = support.folder()
  program("sbatch", ('printf "%%s " "$@" | tr "\\n" " " >>%s/calls; echo >>%s/calls\n'):format(bin,
    bin) .. 'echo 7123')
  program("squeue", ("cat %s/queue 2>/dev/null; exit 0"):format(bin))
  program("srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
  program("scontrol", ('case "$*" in *show*) echo "JobId=1 JobState=RUNNING x";; '
    .. '*) echo "$@" >>%s/requeues;; esac'):format(bin))
end)
after_each(support.clean)

describe("the script of an array", function()
  it("is valid, has a task for each run and all that was asked for", function()
    local code, text = sweep("--dry-run", "--jobs", "3", "--slurm-partition", "gpu",
      "--slurm-account", "lab", "--slurm-time", "1:00:00", "--slurm-constraint", "[a|b]&c",
      "--slurm-gpus", "h100:2", "--slurm-memory", "16G", "--slurm-cpus", "4", "--slurm-qos", "low",
      "--slurm-grace", "90", "--nodes", "2", "--slurm-option", "--nice=9",
      table.unpack(grid))
    assert.equal(0, code, text)
    for _, word in ipairs { "array=0-3%3", "partition=gpu", "account=lab", "time=1:00:00",
      "constraint=[a|b]&c", "gres=gpu:h100:2", "mem=16G", "cpus-per-task=4", "qos=low",
      "signal=TERM@90", "nodes=2", "ntasks-per-node=2", "requeue", "nice=9", "output=/dev/null" } do
      assert(text:find("\n#SBATCH --" .. word .. "\n", 1, true), word .. "\n" .. text)
    end
    assert.matches("%-%-nodes=2 %-%-ntasks=4 %-%-ntasks%-per%-node=2 %-%-cpus%-per%-task=4", text)
    for task, name in ipairs { "head=adamw,seed=0", "head=adamw,seed=1", "head=rownorm,seed=0",
      "head=rownorm,seed=1" } do
      assert(text:find(("\n  %d) run='%s' "):format(task - 1, name), 1, true), text)
    end
    local path = support.write(support.folder() .. "/script.sh", text)
    assert.equal(0, (shell("bash -n " .. path)))
    if os.execute "command -v shellcheck >/dev/null" then
      local bad, complaints = shell("shellcheck -e SC2016 " .. path) -- $x is meant as it is
      assert.equal(0, bad, complaints)
    end
    assert.is_nil(core.fs.kind(out))
    assert.equal(0, submitted())
  end)
  it("takes the command line before the environment before the recipe", function()
    support.write(recipe, (sweeps.text:format(sweeps.data):gsub("sweep = { ",
      'sweep = { slurm = { partition = "c", account = "c", qos = "c" }, ')))
    local code, text = shell("PERIGEE_SLURM_PARTITION=b PERIGEE_SLURM_ACCOUNT=b "
      .. "PERIGEE_SLURM_OPTION='--nice=1 --hold' " .. words(support.program, "sweep", recipe,
      "--slurm", "--dry-run", "--out", out, "--slurm-partition", "a"))
    assert.equal(0, code, text)
    assert.matches("\n#SBATCH %-%-partition=a\n#SBATCH %-%-account=b\n#SBATCH %-%-qos=c\n"
      .. "#SBATCH %-%-nice=1\n#SBATCH %-%-hold\n", text)
    assert.matches("\n#SBATCH %-%-array=0%-1\n", text) -- the recipe's own grid
  end)
end)

describe("a submitted sweep", function()
  it("trains in its tasks, is submitted once, and only what is missing again", function()
    local code, text = sweep(table.unpack(grid))
    assert.equal(0, code, text)
    assert.matches("job 7123: 4 runs submitted", text)
    assert.matches("\nhead=rownorm,seed=1 +queued", text)
    assert.equal(1, submitted())
    queue { [0] = "RUNNING", [1] = "PENDING", [2] = "PENDING", [3] = "PENDING" }
    assert.equal(75, (sweep("--status", table.unpack(grid))))
    code, text = sweep(table.unpack(grid))
    assert.equal(0, code, text)
    assert.matches("head=adamw,seed=0 +running", text)
    assert.matches("7123_1 %(Priority%)", text)
    assert.equal(1, submitted())
    code, text = shell(words(support.program, "sweep", recipe, "--out", out, "--threads", "1",
      table.unpack(grid)))
    assert.equal(1, code)
    assert.matches("is job 7123_%d of Slurm", text)

    assert.equal(0, (start(0)))
    assert.equal(0, (start(3)))
    queue {}
    code, text = sweep("--status", table.unpack(grid))
    assert.equal(75, code)
    assert.matches("head=adamw,seed=0 +finished +4/4", text)
    assert.matches("head=adamw,seed=1 +waiting", text)
    code, text = sweep(table.unpack(grid))
    assert.equal(0, code, text)
    assert.matches("2 runs submitted", text)
    assert.same({ "head=adamw,seed=1", "head=rownorm,seed=0" },
      support.json(out .. "/slurm.json").submissions[2].runs)
    assert.equal(0, (start(0)))
    assert.equal(0, (start(1)))
    code, text = sweep(table.unpack(grid))
    assert.equal(0, code, text)
    assert.matches("4 of 4 runs finished", text)
    assert.matches("runs are paired", text)
    assert.equal(2, submitted())
    assert.equal(0, (sweep("--status", table.unpack(grid))))
  end)
  it("goes back into the queue with a checkpoint, and goes on from there", function()
    assert.equal(0, (sweep("--set", "wait=0.3")))
    -- The signal that Slurm sends to a run.
    program("srun", 'while [ "${1#--}" != "$1" ]; do shift; done\n"$@" & pid=$!\n'
      .. ("until grep -q update '%s'/*/metrics.jsonl 2>/dev/null; do sleep 0.05; done\n"):format(
        (out:gsub("'", "'\\''"))) .. "kill -TERM $pid; wait $pid; exit $?")
    local code, text = start(0)
    assert.equal(75, code, text)
    assert.equal("requeue 7123_0\n", support.read(bin .. "/requeues"))
    program("srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    code, text = start(0)
    assert.equal(0, code, text)
    local log = support.read(out .. "/logs/head=adamw.log")
    assert.matches("stopped", log)
    assert.matches("finished at update 4", log)
    assert.equal(0, (start(0))) -- a task that starts once more than it should
    -- Cancelled, or requeued by Slurm: the job does not count as running then.
    program("scontrol", ('case "$*" in *show*) echo "JobId=1 JobState=CANCELLED x";; '
      .. '*) echo "$@" >>%s/requeues;; esac'):format(bin))
    program("srun", "exit 75")
    assert.equal(75, (start(1)))
    assert.equal("requeue 7123_0\n", support.read(bin .. "/requeues"))
  end)
  it("clears what a run left that had not begun, and nothing else", function()
    assert.equal(0, (sweep()))
    local dir = out .. "/head=adamw"
    assert(core.fs.make(dir))
    support.write(dir .. "/config.json.tmp-12", "{")
    assert.equal(0, (start(0)))
    dir = out .. "/head=rownorm"
    assert(core.fs.make(dir))
    support.write(dir .. "/notes", "mine")
    assert.equal(1, (start(1)))
    assert.equal("mine", support.read(dir .. "/notes"))
  end)
  it("does not begin runs with a recipe that has changed since", function()
    assert.equal(0, (sweep()))
    support.write(recipe, support.read(recipe) .. "\n-- other")
    assert.equal(1, (start(0)))
    assert.matches("has changed since", support.read(out .. "/logs/head=adamw.log"))
    assert.is_nil(core.fs.kind(out .. "/head=adamw"))
  end)
  it("names failures, and submits them again unless their numbers were not finite", function()
    assert.equal(0, (sweep("--set", "fail=2")))
    assert.not_equal(0, (start(0)))
    queue { [1] = "PENDING" }
    local code, text = sweep("--status", "--set", "fail=2")
    assert.equal(1, code)
    assert.matches("failed: head=adamw: .*the hook gives up", text)
    code, text = sweep("--set", "fail=2")
    assert.equal(0, code, text)
    assert.matches("1 run submitted", text)
  end)
end)

describe("what goes wrong with Slurm", function()
  it("is one line, and nothing is lost", function()
    program("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    local code, text = sweep()
    assert.equal(1, code)
    assert.equal("perigee: ESTATE: sbatch: invalid partition specified: x\n", text)
    assert.equal(0, #support.json(out .. "/slurm.json").submissions)
    os.remove(bin .. "/sbatch")
    if not os.execute "command -v sbatch >/dev/null" then
      code, text = sweep()
      assert.equal(1, code)
      assert.matches("^perigee: ENOENT: sbatch is not there[^\n]+\n$", text)
    end
  end)
  it("finds a job of which the answer was lost", function()
    -- Taken, but the answer did not come in time.
    program("sbatch", ('for w; do case $w in --job-name=*) '
      .. 'echo "${w#--job-name=}|9|0|PENDING|None" >%s/queue;; esac; done\n'):format(bin)
      .. "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1")
    local code, text = sweep()
    assert.equal(0, code, text)
    assert.matches("job 9: 2 runs submitted", text)
    assert.equal("9", support.json(out .. "/slurm.json").submissions[1].job)
  end)
  it("submits nothing when squeue does not answer", function()
    assert.equal(0, (sweep()))
    program("squeue", "echo 'slurm_load_jobs error: Unable to contact controller' >&2; exit 1")
    local code, text = sweep()
    assert.equal(1, code)
    assert.matches("^perigee: ESTATE: squeue: [^\n]*Unable to contact[^\n]+\n$", text)
    assert.equal(1, submitted())
  end)
  it("refuses a second one at the same time, and what makes no sense", function()
    assert(core.fs.make(out))
    local lock = assert(core.fs.lock(out))
    local code, text = sweep()
    core.fs.unlock(lock)
    assert.equal(1, code)
    assert.matches("another sweep works in", text)
    local function refused(pattern, ...)
      local status, said = shell(words(support.program, "sweep", recipe, "--out", out, ...))
      assert.equal(2, status, said)
      assert.matches(pattern, said)
    end
    refused("%-%-status: expected with %-%-slurm", "--status")
    refused("%-%-nodes: expected with %-%-slurm", "--nodes", "2")
    refused("%-%-slurm%-time: expected with %-%-slurm", "--slurm-time", "3")
    refused("expected %-%-slurm%-gpus", "--slurm", "--gpus-per-run", "2")
    support.write(recipe, (sweeps.text:format(sweeps.data):gsub("sweep = { ",
      "sweep = { halving = { budgets = { 2, 4 }, keep = 0.5 }, ")))
    refused("sweep.halving: its runs depend on each other", "--slurm")
    code, text = sweep("--grid", "seed=0", "--slurm-partition", "a b")
    assert.not_equal(0, code)
    assert.matches("slurm.partition", text)
    assert.equal(0, submitted())
  end)
end)
