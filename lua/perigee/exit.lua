-- os.exit while a run trains would end it without a summary and leave other ranks to guess. In a
-- recipe that is being read, and inside an update, it is an error instead, which ends the run and
-- the program as any error there does; in the loop of a script it leaves that loop first, as
-- closing the run does.
local errors = require "perigee.errors"

local exit = {}
local leave = os.exit
local text = "os.exit was called before the run ended: expected run:stop(reason)"

-- training(): a list of the runs that are being opened or train.
function exit.guard(training)
  os.exit = function(code, close) -- luacheck: ignore 122
    local whole = true
    for _, run in ipairs(training()) do
      if run.busy or run.status == "prepared" then
        local where = errors.where()
        -- Kept, since the caller may catch the error: Run:ending raises it again.
        run.left = where and where .. ": " .. text or text
        error(run.left, 0)
      elseif run.world > 1 then
        run:fail(text)
        whole = false
      else
        whole = pcall(run.close, run) and whole
      end
    end
    if not whole and (code == nil or code == true or code == 0) then code = false end
    leave(code, close)
  end
end

return exit
