-- What the runs of a sweep ask of Slurm: from options, else the environment, else the recipe. What
-- none of them says is sbatch's own affair, with its own SBATCH_… variables.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local keys = require "perigee.keys"

local request = {}

-- sbatch: its option, where it takes the text as it is.
request.fields = {
  { name = "partition", value = "NAME", sbatch = "partition", help = "the partition" },
  { name = "account", value = "NAME", sbatch = "account", help = "the account that pays" },
  { name = "qos", value = "NAME", sbatch = "qos", help = "the quality of service" },
  { name = "time", value = "TIME", sbatch = "time",
    help = "the time limit of one start, as sbatch has it; a run goes on in the next" },
  { name = "constraint", value = "TEXT", sbatch = "constraint", help = "features of the nodes" },
  { name = "memory", value = "SIZE", sbatch = "mem", help = "memory of each node, as 16G" },
  { name = "cpus", value = "N", kind = "integer", min = 1, max = core.max_threads,
    help = "CPUs of each rank (default: as many as --threads)" },
  { name = "gpus", value = "[TYPE:]N", help = "GPUs of each node for a run, a rank on each" },
  { name = "grace", value = "SECONDS", kind = "integer", min = 1, max = 65535,
    help = "how long before the time limit a run saves and goes back into the queue (default 60)" },
  { name = "option", value = "TEXT", many = true, help = "one more option of sbatch, --nice=9" },
}

local names = { "nodes" }
for i, field in ipairs(request.fields) do names[i + 1] = field.name end

-- The options of a command line.
request.options = {
  { name = "slurm", help = "submit the runs to Slurm, as one array of jobs; without a grid one "
    .. "run. The same command again submits what is missing" },
  { name = "status", help = "with --slurm: only say how far the runs are" },
  { name = "nodes", value = "N", kind = "integer", min = 1, max = 65536,
    help = "with --slurm: nodes of each run (default 1)" },
}
for _, field in ipairs(request.fields) do
  local option = { name = "slurm-" .. field.name }
  for key, value in pairs(field) do
    if key ~= "name" and key ~= "sbatch" then option[key] = value end
  end
  request.options[#request.options + 1] = option
end

-- Options of a command line, as parsed -> a table for pg.sweep's `slurm`, or nil without --slurm.
function request.from_options(options)
  local found = { nodes = options.nodes }
  for _, field in ipairs(request.fields) do
    found[field.name] = options["slurm_" .. field.name]
  end
  if options.slurm then return found end
  local name = next(found)
  if name then
    errors.usage("--%s: expected with --slurm", name == "nodes" and name or "slurm-" .. name)
  end
  if options.status then errors.usage("--status: expected with --slurm") end
end

-- One word without what would end it in a script.
local function checked_text(name, value)
  if math.type(value) == "integer" then value = tostring(value) end
  if type(value) ~= "string" or not value:find "^[^%s%c'\"\\#]+$" then
    check.fail(nil, "slurm." .. name, value, "a word without quotes, as sbatch takes it")
  end
  return value
end

local function from_environment(field)
  local variable = "PERIGEE_SLURM_" .. field.name:upper()
  local text = os.getenv(variable)
  if not text or text == "" then return nil end
  if field.many then
    local list = {}
    for word in text:gmatch "%S+" do list[#list + 1] = word end
    return list
  end
  if field.kind ~= "integer" then return text end
  return math.tointeger(tonumber(text)) or errors.usage("%s = %s is not allowed: expected a whole "
    .. "number >= %d", variable, text, field.min)
end

-- given: pg.sweep's `slurm`; own: the recipe's. Returns what is asked for, complete: also ranks (of
-- a node).
function request.resolve(given, own)
  for where, part in pairs { ["pg.sweep.slurm"] = given, ["sweep.slurm"] = own or {} } do
    check.table(nil, where, part, "{ partition = …, … }")
    keys.check(part, names, where)
  end
  own = own or {}
  local found = { nodes = given.nodes or own.nodes or 1, grace = 60, option = {} }
  check.integer(nil, "slurm.nodes", found.nodes, 1, 65536)
  for _, field in ipairs(request.fields) do
    local value = given[field.name]
    if value == nil then value = from_environment(field) end
    if value == nil then value = own[field.name] end
    if value ~= nil then
      if field.kind == "integer" then
        check.integer(nil, "slurm." .. field.name, value, field.min, field.max)
      elseif field.many then
        check.table(nil, "slurm." .. field.name, value, "a list of sbatch's options")
        for i, word in ipairs(value) do
          value[i] = checked_text(field.name, word)
          if not value[i]:find "^%-%-%a" then
            check.fail(nil, "slurm." .. field.name, word, "an option of sbatch, as --nice=10")
          end
        end
      else
        value = checked_text(field.name, value)
      end
      found[field.name] = value
    end
  end
  found.ranks = 1
  if found.gpus then
    local kind, count = found.gpus:match "^(.-):?(%d+)$"
    found.ranks = math.tointeger(tonumber(count))
    if not found.ranks or found.ranks < 1 or kind:find ":" then
      check.fail(nil, "slurm.gpus", found.gpus, "their number, or TYPE:NUMBER")
    end
  end
  return found
end

-- The options of sbatch, as words; all that its environment could change is among them.
-- job: the name; count: of runs; at_once: most that run at a time, or nil.
function request.words(self, job, count, at_once)
  local words = {
    "--job-name=" .. job,
    ("--array=0-%d%s"):format(count - 1, at_once and "%" .. at_once or ""),
    "--output=/dev/null", "--requeue", ("--signal=TERM@%d"):format(self.grace),
    ("--nodes=%d"):format(self.nodes), ("--ntasks-per-node=%d"):format(self.ranks),
  }
  if self.cpus then words[#words + 1] = ("--cpus-per-task=%d"):format(self.cpus) end
  if self.gpus then words[#words + 1] = "--gres=gpu:" .. self.gpus end
  for _, field in ipairs(request.fields) do
    if field.sbatch and self[field.name] then
      words[#words + 1] = ("--%s=%s"):format(field.sbatch, self[field.name])
    end
  end
  return table.move(self.option, 1, #self.option, #words + 1, words)
end

return request
