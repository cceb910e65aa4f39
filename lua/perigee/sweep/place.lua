-- The folder of a sweep: one sweep works in it at a time, and none beside runs that an earlier one
-- has left to save.
--
-- The sweep holds the lock of the folder itself. Its runs inherit that of logs/, so that it ends
-- with the last of their processes, however the sweep ended.
local core = require "perigee.core"
local errors = require "perigee.errors"

local place = {}

local Place = {}
Place.__index = Place

-- Make the folder and take both locks. `waits` is called when runs of an earlier sweep still save,
-- `stop` says whether to give that up. nil then.
function place.take(out, waits, stop)
  errors.try(core.fs.make(out))
  local own, message, name = core.fs.lock(out)
  if not own then
    if name == "ESTATE" then
      errors.world(("ESTATE: another sweep works in %s: expected one at a time"):format(out), name)
    end
    errors.world(message, name)
  end
  local self = setmetatable({ out = out, logs = out .. "/logs", own = own }, Place)
  local ok, e = pcall(function()
    errors.try(core.fs.make(self.logs))
    local told = false
    while true do
      local shared, text, code = core.fs.lock(self.logs)
      if shared then
        self.shared = shared
        return
      end
      if code ~= "ESTATE" then errors.world(text, code) end
      if not told then waits() end
      told = true
      if stop() then return end
      core.sleep(0.1)
    end
  end)
  if not ok then
    self:leave()
    error(e, 0)
  end
  if not self.shared then
    self:leave()
    return nil
  end
  return self
end

function Place:log(name) return ("%s/%s.log"):format(self.logs, name) end

function Place:leave()
  if self.shared then core.fs.unlock(self.shared) end
  core.fs.unlock(self.own)
end

return place
