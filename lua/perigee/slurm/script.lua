-- The batch script of a sweep's array: a task for each run. It starts the run or goes on with it,
-- and goes back into the queue when the run has saved before its end.
local launch = require "perigee.sweep.launch"
local quote = require "perigee.slurm.quote"

local script = {}

local function quoted(words)
  local list = {}
  for i, word in ipairs(words) do list[i] = quote(word) end
  return table.concat(list, " ")
end

-- What `perigee train` has behind its recipe and --out.
local function settings(run, options)
  local words = launch.command({ set = run.set, dir = run.dir },
    { program = "perigee", recipe = options.recipe })
  return { table.unpack(words, 6) } -- program, train, recipe, --out, dir
end

local begin = [[
set -u
# Of the submitting shell, which is no rank of this run.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
unset PERIGEE_JOB PERIGEE_LISTENER PERIGEE_PARENT
]]

local choose = [[
dir=$out/$run
exec >>"$out/logs/$run.log" 2>&1

# as_planned FILE SHA256: it is read again when the run begins.
as_planned() {
  [ "$(sha256sum <"$1" | cut -d ' ' -f 1)" = "$2" ] || {
    echo "perigee: $1 has changed since the run was submitted: it was not begun"
    exit 1
  }
}

if [ -e "$dir/recipe.lua" ]; then # a run that has begun goes on
  words=(resume "$dir")
else
]]

local leftover = [[
  # What a run leaves that ended before it had begun, and nothing else.
  if [ -d "$dir" ] && [ -z "$(find "$dir" -mindepth 1 -maxdepth 1 ! -name 'config.json*' \
    ! -name 'state.json*' ! -name 'recipe' ! -name 'recipe.lua.*')" ]; then
    rm -rf -- "$dir"
  fi
  words=(train "$recipe" --out "$dir" "${settings[@]}")
fi
]]

local meet = [[
# Where the ranks meet: at the first node, at a port of this job.
node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol -o show node "$node" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
]]

local finish = [[
code=$?
# Saved before its end: back into the queue, unless Slurm puts it there itself (as after a
# preemption) or it was cancelled; then it does not count as running.
task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
if [ "$code" = 75 ]; then
  case $(scontrol -o show job "$task") in
    *' JobState=RUNNING '*) scontrol requeue "$task" || echo "perigee: it is not requeued" ;;
  esac
fi
exit "$code"
]]

-- runs: in the order of the tasks; words: sbatch's. options: cwd, recipe, out, reading, request,
-- program, threads, device, compute.
function script.text(runs, words, options)
  local lines = { "#!/bin/bash",
    ("# Made by perigee sweep: runs and tasks, %d of them."):format(#runs) }
  local function add(text, ...)
    lines[#lines + 1] = select("#", ...) > 0 and text:format(...) or text
  end
  for _, word in ipairs(words) do add("#SBATCH " .. word) end
  add(begin .. "cd -- %s || exit 1", quote(options.cwd))
  add("perigee=%s", quote(options.program))
  add("recipe=%s", quote(options.recipe))
  add("out=%s", quote(options.out))
  add "case ${SLURM_ARRAY_TASK_ID-} in"
  for i, run in ipairs(runs) do
    add("  %d) run=%s settings=(%s) ;;", i - 1, quote(run.name), quoted(settings(run, options)))
  end
  add '  *) echo "perigee: task ${SLURM_ARRAY_TASK_ID-} is none of this array" >&2; exit 2 ;;'
  add "esac"
  lines[#lines + 1] = choose:gsub("\n$", "")
  local reading = options.reading
  for _, file in ipairs { { path = reading.path, sha256 = reading.sha256 },
    table.unpack(reading.files) } do
    add("  as_planned %s %s", quote(file.path), file.sha256)
  end
  lines[#lines + 1] = leftover:gsub("\n$", "")
  local asked = options.request
  local ranks = asked.nodes * asked.ranks
  if ranks > 1 then lines[#lines + 1] = meet:gsub("\n$", "") end
  add "# Slurm signals the run itself; this shell only has to live longer."
  add "trap : TERM"
  local common = {}
  for _, name in ipairs { "threads", "device", "compute" } do
    if options[name] then common[#common + 1] = ("--%s %s"):format(name, quote(options[name])) end
  end
  -- Ranks on CPUs are MPI's; those on GPUs meet by themselves.
  add("srun --export=ALL --kill-on-bad-exit=0 --nodes=%d --ntasks=%d --ntasks-per-node=%d%s%s \\",
    asked.nodes, ranks, asked.ranks,
    ranks > 1 and not asked.gpus and ' --mpi="${SLURM_MPI_TYPE:-pmix}"' or "",
    asked.cpus and (" --cpus-per-task=%d"):format(asked.cpus) or "")
  add('  "$perigee" "${words[@]}" %s', table.concat(common, " "))
  return table.concat(lines, "\n") .. "\n" .. finish
end

return script
