-- Messages between a live run and the clients attached to it: JSON objects, one a line. A byte 3
-- between lines, as the key ^C sends, asks to end the command that runs.
--
--   from the client                          from the run
--   { id, run = code, columns, json }        { id, began = true }, { output = text } …,
--                                            { id, result = { ok, text | json, error, … } }
--   { id, complete = line }                  { id, insert, show }
--                                            { hello = { … } } at first, { over = text } at the end
local core = require "perigee.core"
local errors = require "perigee.errors"

local protocol = {}

local longest = 1 << 23 -- bytes of one message
local most_waiting = 1 << 23 -- bytes that a client has not read, before one more message

local Channel = {}
Channel.__index = Channel

function protocol.channel(socket)
  return setmetatable({ socket = socket, waiting = {}, size = 0,
    pieces = {}, held = 0, -- of a line that has not arrived whole
    fresh = "", at = 1 }, Channel) -- fresh: what arrived last, from byte `at` on not looked at
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

-- Queue a message; nil and a text when it is too long for the other end, or no valid UTF-8. A
-- client that does not read what it asked for is given up.
function Channel:send(message)
  if self.gone then return true end
  local whole, text = pcall(core.json.encode, message)
  if not whole then return nil, "the message cannot be sent: " .. errors.text(text) end
  text = text .. "\n"
  if #text > longest then
    return nil, ("the message has %d bytes, at most %d are sent: take a part, or write a file")
      :format(#text, longest)
  end
  local before = self.size
  self.waiting[#self.waiting + 1] = text
  self.size = self.size + #text
  self:flush()
  if before > most_waiting and self.size > most_waiting then self.gone = true end
  return true
end

-- The next whole line of what has arrived, without the key ^C sent before it; nil when there is
-- none yet.
local function next_line(self)
  local stop = self.fresh:find("\n", self.at, true)
  local part = self.fresh:sub(self.at, (stop or 0) - 1)
  if part ~= "" then
    self.pieces[#self.pieces + 1] = part
    self.held = self.held + #part
  end
  if self.held > longest then self.gone = true end
  if not stop then
    self.fresh, self.at = "", 1
    return nil
  end
  local line = table.concat(self.pieces)
  self.pieces, self.held, self.at = {}, 0, stop + 1
  return (line:gsub("^\3+", ""))
end

-- The next message as a table; nil when there is none yet: it reads once at most, since training
-- waits. Marks the channel at its end.
function Channel:receive()
  if self.gone then return nil end
  local line = next_line(self)
  if not line then
    local text = self.socket:receive()
    if text == nil then
      self.gone = true
      return nil
    end
    self.fresh = text
    line = next_line(self)
  end
  if self.gone or not line then return nil end
  local message = core.json.decode(line)
  if type(message) ~= "table" then
    self.gone = true
    return nil
  end
  message.cancelled = self.fresh:byte(self.at) == 3 or nil -- asked to end before it began
  return message
end

return protocol
