-- Messages between a live run and the clients attached to it: JSON objects, one a line. A byte 3
-- between lines, as the key ^C sends, asks to end the command that runs.
--
--   from the client                          from the run
--   { id, run = code, seconds, json }        { id, began = true }, { output = text } …,
--                                            { id, result = { ok, text | json, error, … } }
--   { id, complete = line }                  { id, insert, show }
--                                            { hello = { … } } at first, { over = text } at the end
local core = require "perigee.core"

local protocol = {}

local longest = 1 << 24 -- bytes of one message
local most_waiting = 1 << 23 -- bytes that a client has not read

local Channel = {}
Channel.__index = Channel

function protocol.channel(socket)
  return setmetatable({ socket = socket, received = "", waiting = {}, size = 0 }, Channel)
end

function Channel:close()
  self.gone = true
  self.socket:close()
end

-- Hand over what the other end takes without waiting; marks the channel when it is gone.
function Channel:flush()
  while not self.gone and self.size > 0 do
    local text = table.concat(self.waiting)
    local sent = self.socket:send(text)
    if sent == nil then
      self.gone = true
      return
    end
    self.waiting, self.size = { text:sub(sent + 1) }, #text - sent
    if sent == 0 then return end
  end
end

-- Queue a message. A client that does not read what it asked for is given up.
function Channel:send(message)
  if self.gone then return end
  local text = core.json.encode(message) .. "\n"
  self.waiting[#self.waiting + 1] = text
  self.size = self.size + #text
  self:flush()
  if self.size > most_waiting then self.gone = true end
end

-- The next message as a table; nil when there is none yet. Marks the channel at its end.
function Channel:receive()
  if self.gone then return nil end
  local line, rest = self.received:match("^\3*([^\n]*)\n(.*)$")
  if not line then
    local text = self.socket:receive()
    if text == nil then
      self.gone = true
      return nil
    end
    if text == "" then return nil end
    self.received = self.received .. text
    if #self.received > longest then
      self.gone = true
      return nil
    end
    return self:receive()
  end
  -- Asked to end before it began.
  local cancelled = rest:sub(1, 1) == "\3"
  self.received = rest
  local message = core.json.decode(line)
  if type(message) ~= "table" then
    self.gone = true
    return nil
  end
  message.cancelled = cancelled or nil
  return message
end

return protocol
