-- perigee sweep RECIPE --grid name=a,b
local cli = require "perigee.cli"
local cluster = require "perigee.sweep.cluster"
local errors = require "perigee.errors"
local grid = require "perigee.sweep.grid"
local plan = require "perigee.sweep.plan"
local rate = require "perigee.rate"
local request = require "perigee.slurm.request"
local sweep = require "perigee.sweep"

local command = {
  name = "sweep",
  usage = "sweep RECIPE [--grid NAME=A,B]… [--set NAME=VALUE]… [--jobs N | --slurm] [--out DIR]",
  description = "Train a recipe at every point of a grid, each run in its own process and folder. "
    .. "The same command again goes on with what is missing. Without --grid the recipe's own sweep "
    .. "is taken. Exit codes: 0 all finished, 1 some failed, 2 usage, 75 stopped by a signal with "
    .. "checkpoints. With --slurm: 0 submitted or with Slurm already, 1 refused or some failed; "
    .. "with --status: 0 all finished, 1 some failed, 75 some not finished yet.",
  positional = { 1, 1 },
  options = {
    { name = "grid", value = "NAME=A,B", many = true, help = "an axis: the values of a parameter, "
      .. "or NAME=uniform:a:b, NAME=loguniform:a:b" },
    { name = "samples", value = "N", kind = "integer", min = 1, max = grid.most_samples,
      help = "how many draws of the random axes" },
    { name = "sample-seed", value = "N", kind = "integer", min = 0,
      help = "the seed of these draws (default 0)" },
    { name = "set", value = "NAME=VALUE", many = true, help = "a parameter of all runs" },
    { name = "out", value = "DIR", help = "the sweep's folder (default: runs/NAME-sweep)" },
    { name = "jobs", value = "N", kind = "integer", min = 1, max = 4096,
      help = "runs at a time (default 1; on GPUs as many as there are); they share the threads" },
    { name = "gpus-per-run", value = "N", kind = "integer", min = 1, max = 64,
      help = "GPUs of each run, one process each (default 1)" },
    { name = "dry-run", help = "show the plan, train nothing, write nothing" },
    rate.option,
    cli.device_option, cli.compute_option, cli.threads_option,
    { name = "quiet", help = "print nothing but errors" },
  },
}
table.move(request.options, 1, #request.options, #command.options + 1, command.options)

function command.run(options, positional)
  local axes, order
  for _, text in ipairs(options.grid or {}) do
    local name, axis = grid.parse(text)
    axes, order = axes or {}, order or {}
    if axes[name] then errors.usage("--grid %s is given twice", name) end
    axes[name], order[#order + 1] = axis, name
  end
  local slurm = request.from_options(options)
  if slurm and options.rate then errors.usage("--rate: expected without --slurm") end
  local self = sweep.plan { recipe = positional[1], grid = axes, order = order,
    set = cli.settings(options.set), samples = options.samples,
    sample_seed = options.sample_seed, out = options.out, jobs = options.jobs,
    gpus_per_run = options.gpus_per_run, device = options.device, compute = options.compute,
    threads = options.threads, quiet = options.quiet, slurm = slurm, signals = true }
  if slurm then
    if options.dry_run then
      io.stdout:write(cluster.dry_run(self))
      return 0
    end
    self.only_look = options.status
    sweep.run(self)
    return #self.failed > 0 and 1 or options.status and not self.complete and 75 or 0
  end
  if options.dry_run then
    local speed = rate.from(options.rate, options.device or self.runs[1].plan.device,
      options.threads, options.gpus_per_run or 1)
    for _, line in ipairs(plan.lines(self.runs, speed)) do print(line) end
    return 0
  end
  if options.rate then errors.usage("--rate: expected with --dry-run") end
  sweep.run(self)
  return self.interrupted and 75 or self.complete and 0 or 1
end

return command
