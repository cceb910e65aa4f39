-- Run a prepared run to its end and report; shared by train, resume and fork.
local checkpoints = require "perigee.checkpoints"
local console = require "perigee.console"
local errors = require "perigee.errors"
local runs = require "perigee.run"

local function report(run)
  local final = run.final
  local parts = { ("%s at update %d"):format(run.status, run.update) }
  if run.reason and run.status ~= "finished" then
    parts[1] = ("%s (%s) at update %d of %d"):format(run.status, run.reason, run.update, run.last)
  end
  if final["validation/loss"] then
    local at = final["validation/update"]
    parts[#parts + 1] = ("validation loss %.5f%s"):format(final["validation/loss"],
      at and at ~= run.update and (" (at update %d)"):format(at) or "")
  end
  if final["diagnostics/lm_head_step/diameter_exact"] then
    parts[#parts + 1] = ("diameter %.5e"):format(final["diagnostics/lm_head_step/diameter_exact"])
  end
  if final["validation/hilbert_step/rms"] then
    parts[#parts + 1] = ("Hilbert RMS %.5e"):format(final["validation/hilbert_step/rms"])
  end
  parts[#parts + 1] = console.duration(run:elapsed())
  run.console:print(table.concat(parts, ", "))
  if run.status == "stopped" then
    run.console:note(("checkpoint %s; continue with: %s resume %s"):format(
      checkpoints.name(run.update), arg and arg[0] or "perigee", run.out))
  end
end

-- What hooks print is printed once, not by every rank.
local function silence()
  print = function() end -- luacheck: ignore 121
  io.output("/dev/null")
end

return function(handle)
  local run = runs.inner(handle)
  if run.rank > 0 then silence() end
  local ok, e = pcall(function()
    for _ in handle:updates() do end -- luacheck: ignore 542
  end)
  if not ok then
    local session = require "perigee.session"
    session.trace = run.trace
    run.console:clear()
    if run.saved_update == run.update and run.update > 0 and run.rank == 0 then
      io.stderr:write(("perigee: saved %s; continue with: %s resume %s\n"):format(
        run.last_checkpoint, arg and arg[0] or "perigee", run.out))
    end
    run:release()
    error(e, 0)
  end
  report(run)
  local status = run.status
  handle:close()
  if status ~= "stopped" and status ~= "finished" then
    errors.world("the run ended as " .. status, "ESTATE")
  end
  return status == "stopped" and 75 or 0
end
