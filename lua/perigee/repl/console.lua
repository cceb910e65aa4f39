-- The conversation with a terminal, a pipe or one line of code. What runs the code is a `host`:
--   host:run(text) -> "incomplete" | an outcome; host:shown(outcome) -> text
--   host:complete(line) -> text to insert, text to show; host:banner() -> text
local core = require "perigee.core"
local errors = require "perigee.errors"
local show = require "perigee.repl.print"

local console = {}

-- The history's file, in a folder of this user alone; nil when there is no place for it.
local function history_file()
  local state = os.getenv "XDG_STATE_HOME"
  if not state or state:sub(1, 1) ~= "/" then
    local home = os.getenv "HOME"
    if not home or home == "" then return nil end
    state = home .. "/.local/state"
  end
  local folder = state .. "/perigee"
  if not core.fs.make(folder) then return nil end
  return folder .. "/history"
end

local function write(text)
  io.stdout:write(text)
  io.stdout:flush()
end

-- Show one outcome; true when it was a success.
local function report(host, outcome, json)
  if json then
    local ok, line = pcall(host.json or show.json, outcome)
    if not ok then
      line = show.json { ok = false, error = "the result cannot be written: " .. errors.text(line) }
    end
    write(line .. "\n")
    return outcome.ok and ok
  end
  local text = host:shown(outcome)
  if outcome.ok then
    write(text)
  else
    io.stdout:flush()
    io.stderr:write(text)
  end
  return outcome.ok
end

-- A signal other than SIGINT ends the conversation.
local function ended_by_signal()
  local pending = core.signals.pending()
  core.signals.clear()
  return pending ~= nil and pending ~= "SIGINT"
end

local function terminal(host)
  local editor = errors.try(core.line { history = history_file(),
    complete = function(line) return host:complete(line) end })
  core.signals.install()
  write(host:banner())
  local text
  while true do
    local line, reason = editor:read(text and ">> " or "> ")
    if reason == "end" and not core.signals.pending() then break end
    if line == nil then
      text = nil
      write("\n")
      if ended_by_signal() then break end
    else
      if line:find("%S") then editor:add(line) end
      text = text and text .. "\n" .. line or line
      local outcome = host:run(text)
      if outcome ~= "incomplete" then
        text = nil
        report(host, outcome, false)
        if ended_by_signal() or host.over then break end
      end
    end
  end
  write("\n")
  editor:close()
  core.signals.clear()
  core.signals.uninstall()
  return 0
end

local function pipe(host, json)
  local text
  local good = true
  core.signals.install()
  for line in io.stdin:lines() do
    text = text and text .. "\n" .. line or line
    local outcome = host:run(text)
    if outcome ~= "incomplete" then
      text = nil
      if not json or not outcome.ok or outcome.values.n > 0 then
        good = report(host, outcome, json) and good
      end
      if outcome.reason == "interrupted" or host.over then break end
    end
  end
  if text and text:find("%S") then
    report(host, { ok = false, error = "the last chunk is incomplete: " .. show.quoted(text) },
      json)
    good = false
  end
  core.signals.uninstall()
  return good and 0 or 1
end

-- options: code (list of chunks to run, then leave), json. Returns the exit code.
function console.talk(host, options)
  if options.code then
    core.signals.install()
    for _, code in ipairs(options.code) do
      local outcome = host:run(code)
      if outcome == "incomplete" then
        outcome = { ok = false, error = "the chunk is incomplete: " .. show.quoted(code) }
      end
      if not report(host, outcome, options.json) then return 1 end
    end
    core.signals.uninstall()
    return 0
  end
  if core.terminal().input and core.terminal().output and not options.json then
    return terminal(host)
  end
  return pipe(host, options.json)
end

return console
