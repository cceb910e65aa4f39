-- perigee train RECIPE
local cli = require "perigee.cli"
local loop = require "perigee.commands.loop"
local plan = require "perigee.commands.plan"
local session = require "perigee.session"

local command = {
  name = "train", usage = "train RECIPE [--set name=value]… [--out DIR] [--max-time T]",
  description = "Train a recipe. The run directory (default: runs/NAME-NNN) must not exist yet. "
    .. "Exit codes: 0 done, 1 error, 2 usage, 75 stopped by a signal or --max-time with a "
    .. "checkpoint to resume from.",
  positional = { 1, 1 },
  options = cli.with_training {
    { name = "dry-run", help = "show the ranks and the plan, train nothing, write nothing" },
    { name = "out", value = "DIR", help = "the run directory, which must not exist" },
  },
}

function command.run(options, positional)
  options.set = cli.settings(options.set)
  options.signals = true
  options.attach, options.no_attach = not options.no_attach, nil
  if options.dry_run then
    options.dry_run = nil
    return plan(positional[1], options)
  end
  return loop(session.new(positional[1], options))
end

return command
