-- What the ranks of a run settle together: methods of a Run (run.lua).
local core = require "perigee.core"
local errors = require "perigee.errors"
local optim = require "perigee.optim"
local record = require "perigee.record"
local state = require "perigee.state"

local Ranks = {}

-- f() on rank 0, a string or nil; its result on all ranks.
function Ranks:from_first(f)
  if self.world == 1 then return f() end
  local value = self.rank == 0 and f() or nil
  local text = errors.try(self.comm:gather(value and "=" .. value or ""))[1]
  return text:sub(1, 1) == "=" and text:sub(2) or nil
end

local stops = { "--max-time", "SIGINT", "SIGTERM" }

-- A whole number that fp64 holds, for a text (FNV-1a).
local function number_of(text)
  local hash = 0xcbf29ce484222325
  for i = 1, #text do hash = (hash ~ text:byte(i)) * 0x100000001b3 end
  return hash >> 12
end

-- Ranks whose hooks changed different things: all of them say so.
function Ranks:refuse_changes(own)
  local texts = errors.try(self.comm:gather(own))
  errors.try(self.comm:leave())
  for rank = 1, self.world - 1 do
    if texts[rank + 1] ~= texts[1] then
      local function shown(text) return text == "" and "nothing" or text end
      errors.world(("EPEER: rank %d changed %s, rank 0 %s, at update %d: expected the same on all "
        .. "ranks"):format(rank, shown(texts[rank + 1]), shown(texts[1]), self.update), "EPEER")
    end
  end
end

-- What one rank wants all do, after the same update; and the peaks of memory over all ranks.
function Ranks:agree()
  if self.world == 1 then return end
  local own = self:own_signal()
  local code = 0
  for i, name in ipairs(stops) do
    if name == own then code = i end
  end
  local changes = table.concat(self.since_agreed or {}, "; ")
  local changed = number_of(changes)
  self.since_agreed = nil
  local all = errors.try(self.comm:meet(("the end of update %d"):format(self.update), { code,
    self.stop_reason and 1 or 0, self.save_requested and 1 or 0, self.ctx:peak_bytes(),
    record.peak_resident() or 0, changed, -changed,
    self.attached and self.attached:has_clients() and 1 or 0 }))
  if all[6] ~= -all[7] then self:refuse_changes(changes) end
  self.agreed_signal = stops[math.tointeger(all[1])]
  if all[2] > 0 then self.stop_reason = self.stop_reason or "run:stop on another rank" end
  self.save_requested = all[3] > 0 or nil
  self.take_orders = all[8] > 0
  self.peak_bytes, self.peak_resident = all[4], all[5] > 0 and all[5] or nil
end

-- ---- clients -------------------------------------------------------------------------------

-- One order of a client. It was checked when it was given; what other orders have made impossible
-- since changes nothing, on any rank.
local function follow(run, text)
  local order = core.json.decode(text)
  if order.stop then
    run.stop_reason = run.stop_reason or order.stop
  elseif order.checkpoint then
    run:save_checkpoint()
  else
    order.update = run.update
    local ok, problem = true, nil
    if order.optimizer then -- a client may have defined one, which other ranks do not know
      ok, problem = pcall(optim.from_data, order.optimizer)
      local unknown = errors.try(run.comm:meet("a client's optimizer", { ok and 0 or 1 }))[1] > 0
      if ok and unknown then
        ok, problem = false, ("optimizer '%s' is not defined on all ranks: nothing was changed")
          :format(order.optimizer.name)
      end
    end
    if ok then
      ok, problem = pcall(state.change, run, order, order.parameters)
      run:changed(nil, text .. (ok and "" or ": " .. errors.text(problem)))
    end
    if not ok and run.attached then run.attached:failed(errors.text(problem)) end
  end
end

-- What the clients of rank 0 want all ranks to do, and the signals of all. True while they pause.
local function follow_orders(run)
  local attached = run.attached
  local texts = errors.try(run.comm:gather(core.json.encode {
    signal = run:own_signal(), paused = attached and attached.paused ~= nil or nil,
    orders = attached and core.json.array(attached:take_orders()) or nil }))
  local first
  for _, text in ipairs(texts) do
    local said = core.json.decode(text)
    first = first or said
    run.agreed_signal = run.agreed_signal or said.signal
  end
  for _, order in ipairs(first.orders or {}) do follow(run, order) end -- texts, alike on all
  return first.paused and not run.agreed_signal and not run.stop_reason
end

-- Between two updates. The ranks meet for orders when a client was there as the update ended.
function Ranks:serve_clients()
  local together = self.take_orders or false
  self.take_orders = false
  repeat
    if self.attached then self.attached:pump(together) end
  until not together or not follow_orders(self)
end

return Ranks
