-- What a sweep shows: on a terminal a table that is redrawn, else a line when something happens.
local console = require "perigee.console"
local core = require "perigee.core"
local pairing = require "perigee.sweep.pairing"

local progress = {}

local Progress = {}
Progress.__index = Progress

function progress.new(sweep)
  local terminal = core.terminal()
  return setmetatable({ quiet = sweep.quiet, tty = terminal.tty and not sweep.quiet,
    columns = terminal.columns, rows = terminal.rows, drawn = 0, shown_at = -math.huge,
    sweep = sweep }, Progress)
end

local function number(value, format) return value and format:format(value) or "-" end

-- Where a run is, from its metrics while it trains.
local function measure(run)
  if run.tail then
    local values = run.tail:read()
    run.state.update = values["progress/update"] or run.state.update
    run.state.loss = values["validation/loss"] or values["train/loss"] or run.state.loss
    if values["progress/update"] and not run.first_seen then
      run.first_seen = { core.clock(), values["progress/update"] }
    end
  end
end

-- Seconds to its end, from what it did since it was first seen.
local function eta(run)
  local seen, update = run.first_seen, run.state.update
  if run.state.status ~= "running" or not seen or not update or update <= seen[2] then
    return nil
  end
  local target = run.until_update or run.plan.last
  return (core.clock() - seen[1]) / (update - seen[2]) * (target - update)
end

function Progress:erase()
  if self.drawn > 0 then io.stderr:write(("\27[%dA\27[J"):format(self.drawn)) end
  self.drawn = 0
end

function Progress:line(text)
  if self.quiet then return end
  self:erase()
  io.stdout:write(text, "\n")
  io.stdout:flush()
end

local function of(run)
  return ("%d/%d"):format(run.state.update or 0, run.until_update or run.plan.last)
end

function Progress:began(run)
  if self.tty then return end
  self:line(("%s: %s"):format(run.name, run.resumes and "resumed" or "started"))
end

function Progress:ended(run)
  run.first_seen = nil
  if self.tty and run.state.status ~= "failed" then return end
  self:line(("%s: %s%s, update %s, loss %s"):format(run.name, run.state.status,
    run.state.status == "failed" and (" (%s)"):format(run.state.reason or "?") or "", of(run),
    number(run.state.loss, "%.5f")))
end

function Progress:stopping(why)
  self:line(("%s: all runs save a checkpoint and stop"):format(why))
end

function Progress:waits()
  self:line "runs that an ended sweep has left still save: waiting for them"
end

-- At most twice a second. What does not fit on the screen is counted.
function Progress:show(runs)
  if not self.tty or core.clock() - self.shown_at < 0.5 then return end
  self.shown_at = core.clock()
  local rows, counts, hidden = { { "run", "state", "update", "loss", "left" } }, {}, 0
  for _, run in ipairs(runs) do
    measure(run)
    counts[run.state.status] = (counts[run.state.status] or 0) + 1
    local active = run.state.status == "running"
    if active or #rows < self.rows - 3 then
      local left = eta(run)
      rows[#rows + 1] = { run.name, run.state.status, of(run), number(run.state.loss, "%.4f"),
        left and console.duration(left) or "" }
    else
      hidden = hidden + 1
    end
  end
  local summary = {}
  for status, count in pairs(counts) do summary[#summary + 1] = ("%d %s"):format(count, status) end
  table.sort(summary)
  if hidden > 0 then summary[#summary + 1] = ("%d not shown"):format(hidden) end
  local lines = console.columns(rows)
  lines[#lines + 1] = table.concat(summary, ", ")
  self:erase()
  for _, line in ipairs(lines) do
    io.stderr:write(line:sub(1, self.columns - 1), "\n")
  end
  io.stderr:flush()
  self.drawn = #lines
end

-- How far the runs of a cluster are.
function Progress:cluster(sweep)
  local rows = { { "run", "state", "update", "loss", "job" } }
  for _, run in ipairs(sweep.runs) do
    local task = run.task
    rows[#rows + 1] = { run.name, run.state.status, of(run), number(run.state.loss, "%.5f"),
      task and task.id .. (task.reason and (" (%s)"):format(task.reason) or "") or "" }
  end
  for _, line in ipairs(console.columns(rows)) do self:line(line) end
  self:finish(sweep)
end

-- The end: what did not finish, and whether runs can be compared.
function Progress:finish(sweep)
  if self.tty then
    self.shown_at = -math.huge
    self:show(sweep.runs)
    self.drawn = 0
  end
  local finished = 0
  for _, run in ipairs(sweep.runs) do
    if run.state.status == "finished" then finished = finished + 1 end
  end
  self:line(("%s: %d of %d runs finished"):format(sweep.out, finished, #sweep.runs))
  for _, run in ipairs(sweep.failed) do
    self:line(("failed: %s: %s"):format(run.name, run.state.reason or "no reason was left"))
  end
  if sweep.interrupted or not sweep.pairing then return end
  for _, line in ipairs(pairing.lines(sweep.pairing)) do self:line(line) end
  if sweep.tuned then
    for _, entry in ipairs(sweep.tuned) do
      self:line(("tuned %s with %d runs: %s"):format(entry.method, entry.runs,
        entry.choice or "nothing finished"))
    end
  end
end

return progress
