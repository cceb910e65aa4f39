-- A client of a live run, for specs.
local support = require "lua_support"
local protocol = require "perigee.attach.protocol"
local core = support.core

-- A client of a run of this process: ask(code) sends; after a step, answer() is the result.
local client = {}

local Client = {}
Client.__index = Client

function client.connect(out)
  local place = support.json(out .. "/attach.json")
  return setmetatable({ channel = protocol.channel(assert(core.socket.connect(place.socket))),
    asked = 0, output = "" }, Client)
end

function Client:ask(code)
  self.asked = self.asked + 1
  self.channel:send { id = self.asked, run = code }
end

-- Everything the run has sent; the last result, or nil.
function Client:answer()
  local result
  while true do
    local message = self.channel:receive()
    if not message then return result end
    if message.output then self.output = self.output .. message.output end
    if message.result then result = message.result end
    if message.hello then self.hello = message.hello end
    if message.over then self.over = message.over end
    if message.insert or message.show then self.completed = message end
  end
end

-- What clients did, of metrics.jsonl.
function client.lines(out)
  local list = {}
  for _, line in ipairs((support.metrics(out))) do
    if line["attach/update"] then list[#list + 1] = line end
  end
  return list
end

return client
