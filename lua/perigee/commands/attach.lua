-- perigee attach DIR
local console = require "perigee.repl.console"
local core = require "perigee.core"

local command = {
  name = "attach", usage = "attach DIR [-e CODE]… [--json]",
  description = "The prompt of perigee repl inside a run that is training. Code runs on the "
    .. "training thread between two updates, with a time limit; pause(), continue(), set(role, "
    .. "{ lr = x }), checkpoint(), hook(…), unhook(n) and limit(seconds) are there too. What is "
    .. "run is recorded in metrics.jsonl. Only the user who trains may attach, on the machine "
    .. "where the first rank runs: elsewhere through srun --overlap or ssh.",
  positional = { 1, 1 },
  options = {
    { name = "e", value = "CODE", many = true,
      help = "run this and leave: exit code 0, or 1 after an error" },
    { name = "json", help = "each result as one JSON line; what the code prints goes to standard "
      .. "error" },
  },
}

function command.run(options, positional)
  local remote = require "perigee.repl.remote"
  core.signals.install()
  local host = remote.attach(positional[1], { json = options.json })
  local code = console.talk(host, { code = options.e, json = options.json })
  host:close()
  if host.over and not options.e then io.stdout:write(host.over, "\n") end
  return code
end

return command
