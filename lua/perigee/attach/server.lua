-- A live run's ear: clients of the same user connect to a Unix socket, and what they send is run by
-- the training thread between two updates, one command at a time, each with a time limit.
--
-- run.lua calls pump() at that one safe point; without clients that costs one accept() that finds
-- nobody. Whatever a client does, training goes on: a command that fails or takes too long is
-- answered with an error, and a client that goes away ends its command.
local core = require "perigee.core"
local directory = require "perigee.directory"
local errors = require "perigee.errors"
local names = require "perigee.attach.names"
local protocol = require "perigee.attach.protocol"
local show = require "perigee.repl.print"

local server = {}

local Server = {}
Server.__index = Server

local time_limit = 10 -- seconds, unless a client asks for another
local most_clients = 16
local beat = 1 -- seconds of a pause after which the other ranks hear that it goes on

local opened = 0 -- in this process

-- Sockets that killed processes left behind, perhaps one with this process's number.
local function sweep(folder)
  if core.fs.kind(folder) ~= "directory" then return end
  for _, name in ipairs(core.fs.list(folder) or {}) do
    local path = folder .. "/" .. name
    if name:find("^%d+%-%d+%.sock$") and core.socket.abandoned(path) then core.fs.remove(path) end
  end
end

-- Listen for clients of a run; nil and a note when that is not possible: training needs no clients.
function server.open(run)
  local host, folder = core.host(), core.socket.folder()
  opened = opened + 1
  sweep(folder)
  local listener, path = core.socket.listen(folder, ("%d-%d.sock"):format(host.pid, opened))
  if not listener then
    run.console:note("no clients can attach: " .. path)
    return nil
  end
  directory.write_json(run.out .. "/attach.json", directory.object {
    { "socket", path }, { "pid", host.pid }, { "hostname", host.hostname },
    { "job", os.getenv "SLURM_JOB_ID" }, { "started_at", core.time() } })
  return setmetatable({ run = run, listener = listener, path = path, clients = {}, orders = {},
    count = 0, changes = {} }, Server)
end

function Server:close()
  if self.closed then return end
  self.closed = true
  for _, client in ipairs(self.clients) do
    client.channel:send { over = ("the run has ended: %s at update %d"):format(self.run.status,
      self.run.update) }
    client.channel:close()
  end
  self.clients = {}
  self.listener:close()
  core.fs.remove(self.run.out .. "/attach.json")
end

-- ---- clients -------------------------------------------------------------------------------

local piece = 1 << 20 -- bytes of a printed text in one message

-- What a command prints, at once. A client that does not read holds up its own command only until
-- the time limit.
local function output(client, text)
  local channel = client.channel
  text = utf8.len(text) and text or show.quoted(text, #text)
  local at = 1
  repeat
    local stop = at + piece <= #text and utf8.offset(text, 0, at + piece) or #text + 1
    channel:send { output = text:sub(at, stop - 1) }
    at = stop
    while channel.size > 1 << 16 and not channel.gone do
      core.socket.wait({}, 0.02, { channel.socket })
      channel:flush()
    end
  until at > #text
end

function Server:greet(socket)
  local workspace = require "perigee.repl.workspace"
  local view = require "perigee.repl.view"
  self.count = self.count + 1
  local run = self.run
  local client = { number = self.count, limit = time_limit, channel = protocol.channel(socket) }
  if #self.clients >= most_clients then
    client.channel:send { over = ("%d clients are attached already"):format(most_clients) }
    client.channel:close()
    return
  end
  client.workspace = workspace.new { ctx = run.ctx, functions = names.of(self, client), live = true,
    out = function(text) output(client, text) end }
  client.workspace:add(view.of_run(run.handle))
  self.clients[#self.clients + 1] = client
  client.channel:send { hello = { version = core.version, name = run.spec.name, out = run.out,
    update = run.update, last = run.last, world = run.world, limit = client.limit,
    client = client.number } }
end

-- To all clients.
function Server:tell(text)
  for _, client in ipairs(self.clients) do client.channel:send { output = text } end
end

local function drop_gone(self)
  local left = {}
  for _, client in ipairs(self.clients) do
    if client.channel.gone then
      client.channel:close()
      if self.paused and self.paused.client == client and not self.paused.stay then
        self.paused = nil
        self:record { { "attach/update", self.run.update }, { "attach/client", client.number },
          { "attach/changes", core.json.array { "continue: the client that paused has left" } } }
      end
    else
      left[#left + 1] = client
    end
  end
  self.clients = left
end

-- ---- several ranks -------------------------------------------------------------------------

-- Whether the ranks have to meet for orders after their present update.
function Server:has_clients()
  return #self.clients > 0 or #self.orders > 0 or self.paused ~= nil
end

-- The update after which an order of now is followed.
function Server:next_order()
  return self.run.update + ((self.run.world == 1 or self.together) and 0 or 1)
end

-- What all ranks shall do: a change of state.change, { stop = reason } or { checkpoint = true }.
function Server:order(what) table.insert(self.orders, core.json.encode(what)) end

-- An order that could not be followed.
function Server:failed(text)
  self:record { { "attach/update", self.run.update }, { "attach/error", text } }
  self:tell(text .. "\n")
end

function Server:take_orders()
  local orders = self.orders
  self.orders = {}
  return orders
end

-- ---- commands ------------------------------------------------------------------------------

-- A line of its own in metrics.jsonl: { name, value } …, those without a value left out.
function Server:record(list)
  local line = {}
  for _, entry in ipairs(list) do
    if entry[2] ~= nil then line[#line + 1] = entry end
  end
  if self.run.metrics then errors.try(self.run.metrics:write(line)) end
end

-- A change that the command in progress made, in words.
function Server:note(text)
  if self.serving then table.insert(self.changes, text) end
end

local function printable(text, most)
  text = #text > most and text:sub(1, most) .. "…" or text
  return utf8.len(text) and text or show.quoted(text, #text)
end

-- Around code of a client.
function Server:enter()
  self.changes, self.serving = {}, true
  self.run.saved_update = nil -- whatever it changes: what was saved may not hold any more
  self.run.busy = true
  self.run.core:alone(true)
end

function Server:leave()
  self.run.busy, self.serving = false, false
  self.run.core:alone(false)
end

-- Run one command and answer it. What it did is recorded: its text, how it ended, its changes.
function Server:serve(client, message)
  local run = self.run
  local code = message.run
  if message.cancelled then
    client.channel:send { id = message.id, result = { ok = false, error = "interrupted",
      text = "interrupted\n" } }
    return
  end
  client.channel:send { id = message.id, began = true }
  client.workspace.columns = math.type(message.columns) == "integer" and message.columns or nil
  local limits = { seconds = client.limit, socket = client.channel.socket }
  self:enter()
  self.code = code
  local outcome = client.workspace:run(code, limits)
  local result
  if outcome == "incomplete" then
    outcome = { ok = false, error = "the chunk is incomplete" }
  end
  if message.json then
    local ok, text = core.guard(limits, show.json, outcome)
    result = { ok = outcome.ok, json = ok and text
      or show.json { ok = false, error = "the result cannot be written: " .. errors.text(text) } }
  else
    result = { ok = outcome.ok, text = client.workspace:shown(outcome, limits) }
    if not utf8.len(result.text) then result.text = show.quoted(result.text, #result.text) end
  end
  self:leave()
  self:record { { "attach/update", run.update }, { "attach/client", client.number },
    { "attach/command", printable(code, 4000) }, { "attach/ok", outcome.ok },
    { "attach/error", not outcome.ok and printable(outcome.error, 1000) or nil },
    { "attach/changes", #self.changes > 0 and core.json.array(self.changes) or nil } }
  result.reason, result.values = outcome.reason, outcome.ok and outcome.values.n or nil
  local sent, problem = client.channel:send { id = message.id, result = result }
  if not sent then
    client.channel:send { id = message.id, result = { ok = false, error = problem,
      text = problem .. "\n", json = message.json and show.json { ok = false, error = problem }
        or nil } }
  end
end

-- For the tab key of somebody who does not wait long.
function Server:complete(client, message)
  self:enter()
  local insert, list = client.workspace:complete(tostring(message.complete),
    { seconds = math.min(client.limit, 1), socket = client.channel.socket })
  self:leave()
  client.channel:send { id = message.id, insert = insert, show = list }
end

-- Messages that have arrived, not endlessly many: training waits.
local function answer(self, client)
  client.channel:flush()
  for _ = 1, 16 do
    local message = client.channel:receive()
    if not message then return end
    if type(message.run) == "string" then
      self:serve(client, message)
    elseif message.complete then
      self:complete(client, message)
    else
      client.channel.gone = true
      return
    end
  end
end

local function accept_all(self)
  while true do
    local socket, refused = self.listener:accept()
    if not socket then
      if refused then self.run.console:note("attach: " .. refused) end
      return refused and accept_all(self)
    end
    self:greet(socket)
  end
end

local function wait(self, seconds)
  local list = { self.listener }
  for _, client in ipairs(self.clients) do list[#list + 1] = client.channel.socket end
  core.socket.wait(list, seconds)
end

-- Serve who is there; while paused, until training may go on.
local function serve_all(self)
  accept_all(self)
  if #self.clients == 0 and not self.paused then return end
  local waited, began = false, core.clock()
  while true do
    for _, client in ipairs(self.clients) do answer(self, client) end
    drop_gone(self)
    if not self.paused or self.run:own_signal() or self.run.stop_reason then break end
    if self.run.world > 1
      and (not self.together or #self.orders > 0 or core.clock() > began + beat) then
      break
    end
    waited = true
    wait(self, 0.2)
    accept_all(self)
  end
  if waited then self.run.progress_clock = core.clock() end -- no part of the next update's time
end

-- Between two updates; with several ranks `together` says that they follow orders right after it.
-- What goes wrong here costs the clients, not the training.
function Server:pump(together)
  self.together = together
  local ok, problem = pcall(serve_all, self)
  if ok then return end
  self:leave()
  self.paused = nil
  self.run.console:note("attach: " .. errors.text(problem))
  for _, client in ipairs(self.clients) do client.channel:close() end
  self.clients = {}
end

return server
