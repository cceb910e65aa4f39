-- What a client of a live run can call beside the names of every prompt. Each of these returns a
-- text for the client; what they change is noted by the run (run:changed).
local check = require "perigee.check"
local core = require "perigee.core"
local errors = require "perigee.errors"
local hooks = require "perigee.hooks"

local names = {}

-- One hook of a recipe's list as a client gives it.
local function one_hook(item)
  local actions, checkpoints = hooks.normalise({ item }, nil)
  if #checkpoints > 0 then
    errors.misuse("hook: a pg.checkpoint{…} belongs into the recipe: checkpoint() saves now")
  end
  return actions[1]
end

-- Names for one client of `server`.
function names.of(server, client)
  local run = server.run
  local handle = run.handle
  local api = {}

  -- Training waits until continue(), or until the client that paused it leaves; with stay = true
  -- until continue() alone.
  function api.pause(options)
    if run.world > 1 then
      errors.misuse("pause: the other %d ranks would wait in vain", run.world - 1)
    end
    local stay = options ~= nil and check.table(nil, "pause", options).stay or false
    server.paused = { client = client, stay = check.boolean(nil, "pause stay", stay) }
    server:note("pause")
    return ("paused at update %d; continue() goes on"):format(run.update)
  end

  api["continue"] = function()
    if not server.paused then return "training is not paused" end
    server.paused = nil
    server:note("continue")
    return ("training goes on after update %d"):format(run.update)
  end

  function api.set(selector, changes)
    handle:set(selector, changes)
    return "from update " .. run.update + 1 .. " on"
  end

  function api.checkpoint()
    local path = handle:checkpoint()
    server:note("checkpoint")
    return path
  end

  -- hook(pg.every(10, f)), hook(f): from the next update on. A hook from here that fails, or works
  -- longer than the time limit, is removed; training goes on.
  function api.hook(item)
    if run.world > 1 then
      errors.misuse("hook: it would run on rank 0 alone, without the other %d ranks", run.world - 1)
    end
    local made = one_hook(item)
    local meta = getmetatable(made.action)
    if type(meta) == "table" and meta.prepare then made.action:prepare(handle) end
    local index = #run.spec.hooks + 1
    local action, limit = made.action, client.limit
    made.action = function(r)
      server.hooking = true
      local ok, problem, _, reason = core.guard({ seconds = limit }, function() action(r) end)
      server.hooking = false
      if ok or reason == "interrupted" then return end -- a signal to the run is no fault of it
      made.removed = true
      local text = ("hook %d was removed: %s"):format(index, reason or errors.text(problem))
      server:record { { "attach/update", run.update }, { "attach/hook", index },
        { "attach/error", text } }
      server:tell(text .. "\n")
    end
    made.index = index
    local occasion = made.occasion
    made.occasion = setmetatable({ text = occasion.text, due_at = function(update, last)
      return not made.removed and occasion:due(update, last)
    end }, getmetatable(occasion))
    run.spec.hooks[index] = made
    server.hooks[index] = made
    server:note(("hook %d: %s"):format(index, occasion.text))
    return index
  end

  function api.unhook(index)
    local made = server.hooks[check.integer(nil, "unhook", index)]
    if not made or made.removed then
      errors.misuse("unhook: %d is not a hook that hook(…) added", index)
    end
    made.removed = true
    server:note(("hook %d removed"):format(index))
    return ("hook %d is removed"):format(index)
  end

  -- The time limit of this client's next commands.
  function api.limit(seconds)
    if seconds ~= nil then
      client.limit = check.number(nil, "limit", seconds, { min = 0, open_min = true, max = 3600 })
    end
    return ("commands run for at most %g s"):format(client.limit)
  end

  return api
end

return names
