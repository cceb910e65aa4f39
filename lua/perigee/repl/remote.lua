-- The prompt's host at the other end of a socket: a live run executes the code between updates.
local core = require "perigee.core"
local errors = require "perigee.errors"
local evaluate = require "perigee.repl.evaluate"
local protocol = require "perigee.attach.protocol"
local data = require "perigee.data"

local remote = {}

local Remote = {}
Remote.__index = Remote

local lost = "the connection was lost before the run said that it ends"

local function write(text)
  io.stdout:write(text)
  io.stdout:flush()
end

-- Where the run in a directory listens, as its attach.json says.
local function place_of(path)
  path = #path > 1 and path:gsub("/+$", "") or path
  local place = data.read_json(path .. "/attach.json")
  if type(place) ~= "table" or type(place.socket) ~= "string"
    or type(place.hostname) ~= "string" then
    errors.world(("ENOENT: %s has no attach.json: no run is live there that clients can attach to")
      :format(path), "ENOENT")
  end
  return place
end

local function connect(path, place)
  local here = core.host().hostname
  if place.hostname ~= here then
    local job = place.job
      and ("srun --jobid %s --overlap --pty -w %s"):format(place.job, place.hostname)
    errors.world(("EIO: the run is live on %s and this is %s: %s perigee attach %s"):format(
      tostring(place.hostname), here, job or "ssh -t " .. tostring(place.hostname), path), "EIO")
  end
  local socket, message = core.socket.connect(place.socket)
  if not socket then
    errors.world(("EIO: nobody answers at the socket that %s/attach.json names (process %s, %s): "
      .. "the run was killed"):format(path, tostring(place.pid), message), "EIO")
  end
  return socket
end

-- Handle what is not an answer. Returns an answer with this id, or nil.
function Remote:take(message, id)
  if message.output then
    if self.json then
      io.stderr:write(message.output)
    else
      write(message.output)
    end
  elseif message.over then
    self.over = message.over
  elseif message.id == id then
    return message
  end
end

-- The next message within `seconds`, or nil.
function Remote:next(seconds)
  local message = self.channel:receive()
  if message or self.channel.gone then return message end
  core.socket.wait({ self.channel.socket }, seconds)
  return self.channel:receive()
end

-- Attach to the run in `path`. options: json.
function remote.attach(path, options)
  local place = place_of(path)
  local self = setmetatable({ channel = protocol.channel(connect(path, place)), asked = 0,
    place = place, json_results = options.json }, Remote)
  if options.json then self.json = function(outcome) return outcome.line end end
  -- The greeting comes after the update that is running now.
  local told = false
  local started = core.clock()
  while not self.hello do
    local message = self:next(0.2)
    if message then
      if message.hello then self.hello = message.hello else self:take(message) end
    end
    if self.over or self.channel.gone then
      errors.world("EIO: " .. (self.over or lost), "EIO")
    end
    if core.signals.pending() then errors.world("ECANCELED: interrupted", "ECANCELED") end
    if not told and core.clock() - started > 2 and core.terminal().tty then
      told = true
      io.stderr:write("waiting for the update that is running to end …\n")
    end
  end
  return self
end

function Remote:banner()
  local h = self.hello
  return ("attached to %s, update %d of %d, as client %d; code runs between updates for at most "
    .. "%g s: limit(seconds) changes that; pause(), continue(), set, checkpoint(), hook, help(); "
    .. "Ctrl-D leaves\n"):format(h.out, h.update, h.last, h.client, h.limit)
end

local function failed(text)
  return { ok = false, error = text, text = text .. "\n",
    line = core.json.encode { ok = false, error = text } }
end

-- Send code and wait for its end, showing what it prints. Ctrl-C asks the run to end the command; a
-- second one leaves it alone.
function Remote:run(text)
  local _, problem = evaluate.compile(text, {})
  if problem == "incomplete" then return "incomplete" end
  self.asked = self.asked + 1
  local id = self.asked
  local sent, too_long = self.channel:send { id = id, run = text, json = self.json_results,
    columns = core.terminal().columns }
  if not sent then return failed(too_long) end
  local interrupts = 0
  while true do
    local message = self:next(0.2)
    local answer = message and self:take(message, id)
    if answer and answer.result then
      local r = answer.result
      return { ok = r.ok, text = r.text, line = r.json, reason = r.reason,
        values = { n = r.values or 0 }, error = r.error }
    end
    if self.channel.gone or self.over then
      self.over = self.over or lost
      return failed(self.over)
    end
    if core.signals.pending() then
      if core.signals.pending() ~= "SIGINT" or interrupts > 0 then
        return { ok = false, error = "left alone", text = "left alone; it may still run\n",
          line = core.json.encode { ok = false, error = "left alone" } }
      end
      core.signals.clear()
      interrupts = interrupts + 1
      self.channel.socket:send("\3")
    end
    self.channel:flush()
  end
end

function Remote.shown(_, outcome) return outcome.text or "" end

-- Within a short while: the run may be in the middle of an update.
function Remote:complete(line)
  self.asked = self.asked + 1
  self.channel:send { id = self.asked, complete = line }
  local patience = core.clock() + 1
  while core.clock() < patience and not self.over and not self.channel.gone do
    local message = self:next(0.05)
    local answer = message and self:take(message, self.asked)
    if answer then return answer.insert, answer.show end
  end
end

function Remote:close() self.channel:close() end

return remote
