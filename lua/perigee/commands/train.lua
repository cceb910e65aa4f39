-- perigee train RECIPE
local cli = require "perigee.cli"
local errors = require "perigee.errors"
local loop = require "perigee.commands.loop"
local plan = require "perigee.commands.plan"
local rate = require "perigee.rate"
local session = require "perigee.session"

local command = {
  name = "train", usage = "train RECIPE [--set name=value]… [--out DIR] [--max-time T]",
  description = "Train a recipe. The run directory (default: runs/NAME-NNN) must not exist yet. "
    .. "Exit codes: 0 done, 1 error, 2 usage, 75 stopped by a signal or --max-time with a "
    .. "checkpoint to resume from.",
  positional = { 1, 1 },
  options = cli.with_training {
    { name = "dry-run", help = "show the ranks and the plan, train nothing, write nothing" },
    rate.option,
    { name = "out", value = "DIR", help = "the run directory, which must not exist" },
  },
}

function command.run(options, positional)
  options.set = cli.settings(options.set)
  options.signals = true
  options.attach, options.no_attach = not options.no_attach, nil
  local dry_run, speed = options.dry_run, options.rate
  options.dry_run, options.rate = nil, nil
  if dry_run then return plan(positional[1], options, speed) end
  if speed then errors.usage("--rate: expected with --dry-run") end
  return loop(session.new(positional[1], options))
end

return command
