-- perigee fork CHECKPOINT RECIPE --out DIR
local cli = require "perigee.cli"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local loop = require "perigee.commands.loop"
local recipe = require "perigee.recipe"
local routing = require "perigee.routing"
local session = require "perigee.session"

local command = {
  name = "fork", usage = "fork CHECKPOINT RECIPE [--out DIR] [--slots P] [--data P]",
  description = "Start a new run from a checkpoint (or from the latest one of a run directory). "
    .. "Update numbers stay absolute, so that the recipe's `updates` is where the fork ends.",
  positional = { 2, 2 },
  options = cli.with_training {
    { name = "out", value = "DIR", help = "the run directory, which must not exist" },
    { name = "slots", value = "POLICY", many = true,
      help = "keep or reset optimizer state, also per role: head=reset (repeatable)" },
    { name = "data", value = "POLICY", choices = { "continue", "restart" },
      help = "continue or restart the data order" },
  },
}

-- { "keep" } or { "head=reset", … } -> what a recipe's fork.slots may be.
local function slots_policy(list)
  if not list then return nil end
  local slots = {}
  for _, text in ipairs(list) do
    local role, policy = text:match("^(%w+)=(%w+)$")
    policy = policy or text
    if policy ~= "keep" and policy ~= "reset" then
      errors.usage("--slots %s is not allowed: expected keep, reset or ROLE=keep|reset", text)
    end
    if not role then
      if #list > 1 then errors.usage("--slots %s: give one policy, or one per role", text) end
      return policy
    end
    local known = false
    for _, name in ipairs(routing.roles) do known = known or name == role end
    if not known then
      errors.usage("--slots %s: unknown role%s", text, keys.suggestion(role, routing.roles))
    end
    slots[role] = policy
  end
  return slots
end

function command.run(options, positional)
  options.set = cli.settings(options.set)
  options.signals = true
  options.attach, options.no_attach = not options.no_attach, nil
  options.fork = recipe.checked_fork("fork",
    { positional[1], slots = slots_policy(options.slots), data = options.data })
  options.data, options.slots = nil, nil
  return loop(session.new(positional[2], options))
end

return command
