-- What a run shows: a header, a progress line (a bar on a terminal, plain lines otherwise), notes.
-- Progress goes to standard error, the header and the result to standard output.
local core = require "perigee.core"

local console = {}

local Console = {}
Console.__index = Console

-- "1h02m", "3m20s", "12s"
function console.duration(seconds)
  if seconds ~= seconds or seconds == math.huge or seconds < 0 then return "?" end
  local s = math.floor(seconds + 0.5)
  if s >= 86400 then return ("%dd%02dh"):format(s // 86400, s % 86400 // 3600) end
  if s >= 3600 then return ("%dh%02dm"):format(s // 3600, s % 3600 // 60) end
  if s >= 60 then return ("%dm%02ds"):format(s // 60, s % 60) end
  return ("%ds"):format(s)
end

-- 1234567 -> "1,234,567"
function console.grouped(n)
  local text = ("%d"):format(math.floor(n + 0.5))
  local count
  repeat text, count = text:gsub("^(-?%d+)(%d%d%d)", "%1,%2") until count == 0
  return text
end

-- Lines of cells, columns aligned.
function console.columns(rows)
  local widths, lines = {}, {}
  for _, row in ipairs(rows) do
    for i, cell in ipairs(row) do widths[i] = math.max(widths[i] or 0, #cell) end
  end
  for n, row in ipairs(rows) do
    local cells = {}
    for i, cell in ipairs(row) do cells[i] = cell .. (" "):rep(widths[i] - #cell) end
    lines[n] = (table.concat(cells, "  "):gsub("%s+$", ""))
  end
  return lines
end

-- options: quiet, last (update), tokens_per_update, terminal = { tty, columns } (default: ask)
function console.new(options)
  local terminal = options.terminal or core.terminal()
  return setmetatable({
    quiet = options.quiet, last = options.last, tokens_per_update = options.tokens_per_update,
    tty = terminal.tty and not options.quiet, columns = terminal.columns or 80,
    out = options.out or io.stdout, err = options.err or io.stderr,
    shown_at = -math.huge, rate = nil, open_line = false,
  }, Console)
end

function Console:clear()
  if self.open_line then self.err:write("\r\27[K") end
  self.open_line = false
end

-- A line that stays, on standard output.
function Console:print(text)
  if self.quiet then return end
  self:clear()
  self.out:write(text, text:sub(-1) == "\n" and "" or "\n")
  self.out:flush()
end

-- A line that stays, on standard error.
function Console:note(text)
  if self.quiet then return end
  self:clear()
  self.err:write(text, "\n")
  self.err:flush()
end

local function bar(share, width)
  local full = math.floor(share * width + 0.5)
  return "[" .. ("="):rep(full) .. (" "):rep(width - full) .. "]"
end

-- After an update. values: update, loss, seconds (of the step), wall (since the last call),
-- logged (a report is due), grad_norm, lr, peak_gib.
function Console:progress(v)
  if self.quiet then return end
  -- Exponential means over about ten updates: speed of the steps, and wall time for the ETA.
  local blend = self.rate and 0.1 or 1
  self.rate = (self.rate or 0) * (1 - blend) + blend * v.seconds
  self.wall = (self.wall or 0) * (1 - blend) + blend * math.max(v.wall, v.seconds)
  local speed = self.tokens_per_update / self.rate
  local eta = console.duration((self.last - v.update) * self.wall)
  if v.logged then
    -- A report stays on the screen; on a terminal the bar goes on below it.
    self:clear()
    self.err:write(("update %d/%d  loss %.5f  grad_norm %.3f  lr %.3e  %s tok/s  "
      .. "peak %.2f GiB  eta %s\n"):format(v.update, self.last, v.loss, v.grad_norm, v.lr,
      console.grouped(speed), v.peak_gib, eta))
    self.err:flush()
  elseif self.tty then
    local now = core.clock()
    if now - self.shown_at < 0.1 then return end
    self.shown_at = now
    local text = ("%d/%d  loss %.4f  %s tok/s  eta %s"):format(v.update, self.last, v.loss,
      console.grouped(speed), eta)
    local width = math.min(30, self.columns - #text - 4)
    if width >= 5 then text = bar(v.update / self.last, width) .. " " .. text end
    self.err:write("\r\27[K", text:sub(1, math.max(1, self.columns - 1)))
    self.err:flush()
    self.open_line = true
  end
end

function Console:validation(update, loss, hilbert)
  local text = ("update %d  val_loss %.5f"):format(update, loss)
  if hilbert then text = text .. ("  hilbert_rms %.5e"):format(hilbert) end
  self:note(text)
end

return console
