-- What a client of a live run can call beside the names of every prompt. Each of these returns a
-- text for the client; what they change is noted by the run (run:changed).
local check = require "perigee.check"
local errors = require "perigee.errors"
local live = require "perigee.attach.hooks"

local names = {}

-- Names for one client of `server`.
function names.of(server, client)
  local run = server.run
  local handle = run.handle
  local api = {}

  -- Training waits until continue(), or until the client that paused it leaves; with stay = true
  -- until continue() alone.
  function api.pause(options)
    local stay = options ~= nil and check.table(nil, "pause", options).stay or false
    server.paused = { client = client, stay = check.boolean(nil, "pause stay", stay) }
    server:note("pause")
    return ("paused at update %d; continue() goes on"):format(server:next_order())
  end

  api["continue"] = function()
    if not server.paused then return "training is not paused" end
    server.paused = nil
    server:note("continue")
    return ("training goes on after update %d"):format(run.update)
  end

  function api.set(selector, changes)
    handle:set(selector, changes)
    return "from update " .. server:next_order() + 1 .. " on"
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
      errors.misuse("hook: it would run on rank 0 alone, without the other %d ranks: put it into "
        .. "the recipe", run.world - 1)
    end
    local index, text = live.add(run, item, client.limit, server.code, client.workspace.env)
    server:note(text)
    return index
  end

  function api.unhook(index)
    live.remove(run, index)
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
