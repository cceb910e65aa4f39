-- What a sweep finds in its folder before it starts anything: how far its runs are, and what is not
-- of this sweep.
local core = require "perigee.core"
local difference = require "perigee.sweep.difference"
local errors = require "perigee.errors"
local look = require "perigee.sweep.look"

local stock = {}

-- A run that was begun with another recipe or other parameters.
local function refuse_changed(dir, state, reading, params)
  local what = difference.recipe_of(state.identity) ~= difference.recipe_of(
    reading.identity) and "another recipe" or "other parameters"
  errors.world(("ESTATE: %s was begun with %s: finish it with that one, or give the sweep another "
    .. "--out\n%s"):format(dir, what, difference.text(dir, state, reading, params)), "ESTATE")
end

-- A stage of a sweep ended this run before its own end: it can go on.
function stock.note_pause(state, run)
  if state.status == "finished" and state.reason == "max_updates"
    and (state.update or 0) < run.plan.last then
    state.status = "paused"
  end
end

-- Set run.state from its directory; refuse what is not the run of this sweep. `active`: it may be
-- at work, so that what looks unfinished stays.
function stock.take(run, active)
  local state = look.at(run.dir)
  if state.status == "damaged" then
    errors.world(("EFORMAT: %s: expected a run directory of this sweep; move it away and the run "
      .. "starts over"):format(state.reason), "EFORMAT")
  end
  if state.identity and state.identity ~= run.plan.identity then
    refuse_changed(run.dir, state, run.plan.reading, run.plan.params)
  end
  stock.note_pause(state, run)
  -- Became non-finite: it would again. Other failures are the machine's, or repaired by now.
  run.tried = state.status == "failed" and tostring(state.reason):find "finite" ~= nil
  if state.status == "waiting" and (state.empty or state.begun) and not active then
    core.fs.remove(run.dir)
  end
  run.state = state
end

-- Runs of earlier grids in the folder are of the same recipe too: they are reported together.
function stock.check_others(self)
  local reading, mine = self.runs[1].plan.reading, {}
  for _, run in ipairs(self.runs) do mine[run.name] = true end
  for _, old in ipairs(self.before.runs) do
    local name = type(old.dir) == "string" and not old.dir:find "/" and old.dir
    if name and not mine[name] then
      local dir = ("%s/%s"):format(self.out, name)
      local state = look.at(dir)
      if state.identity and difference.recipe_of(state.identity)
        ~= difference.recipe_of(reading.identity) then
        refuse_changed(dir, state, reading)
      end
    end
  end
end

-- The last line of what a run printed, for a failure that it left no summary of.
function stock.last_words(log)
  local text = core.fs.read(log) or ""
  local line = text:match "([^\n]+)\n*$"
  return line and line:gsub("^perigee: ", "") or "it printed nothing"
end

return stock
