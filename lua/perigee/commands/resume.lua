-- perigee resume DIR
local cli = require "perigee.cli"
local loop = require "perigee.commands.loop"
local runs = require "perigee.run"
local session = require "perigee.session"

local command = {
  name = "resume", usage = "resume DIR [--micro N] [--allow-changed-recipe] [--max-time T]",
  description = "Continue a run from its latest valid checkpoint, exactly. Without one, the run "
    .. "starts over in the same directory. The recipe is the run's own copy, DIR/recipe.lua; a "
    .. "changed one is refused unless --allow-changed-recipe.",
  positional = { 1, 1 },
  options = cli.with_training {
    { name = "micro", value = "N", kind = "integer", min = 1,
      help = "sequences per micro-batch (same data, equal up to rounding)" },
    { name = "allow-changed-recipe", help = "continue with a recipe that has changed" },
    { name = "recipe", value = "FILE", help = "use this recipe file instead of the run's copy" },
  },
}

function command.run(options, positional)
  options.set = cli.settings(options.set)
  options.signals = true
  options.attach, options.no_attach = not options.no_attach, nil
  local handle = session.resume(positional[1], options)
  local run = runs.inner(handle)
  if run.already_finished then
    run.console:print(("%s is finished at update %d"):format(run.out, run.update))
    run:release()
    return 0
  end
  return loop(handle)
end

return command
