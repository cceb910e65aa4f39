-- perigee watch DIR…
local core = require "perigee.core"
local watch = require "perigee.watch"

local command = {
  name = "watch",
  usage = "watch DIR… [--metric NAME]… [--last N] [--log AXES] [--every SECONDS] [--once]",
  description = "Draw the curves of runs in the terminal while they train, with their state, "
    .. "speed and the time that is left. DIR is a run, a sweep's folder, or a folder of runs. It "
    .. "ends with the last run, or with Ctrl-C, and only reads: the runs do not notice. Where "
    .. "standard error is no terminal, and with --once, it prints one picture.",
  positional = { 1, math.maxinteger },
  options = {
    { name = "metric", value = "NAME", many = true,
      help = "a curve of metrics.jsonl, instead of losses, row diameter and Hilbert RMS" },
    { name = "last", value = "N", kind = "integer", min = 1, help = "only the last N updates" },
    { name = "log", value = "AXES", choices = { "x", "y", "xy" }, help = "logarithmic axes" },
    { name = "every", value = "SECONDS", kind = "number", min = 0.1,
      help = "time between two pictures (default 2)" },
    { name = "once", help = "one picture" },
  },
}

local function write(lines, columns)
  for _, line in ipairs(lines) do
    local cut = utf8.offset(line, columns) -- the last column stays free: some terminals wrap there
    io.stderr:write(cut and line:sub(1, cut - 1) or line, "\27[K\n")
  end
end

-- The other screen of the terminal, which leaves what was there before as it was.
local function screen()
  io.stderr:write "\27[?1049h\27[?25l"
  return setmetatable({}, { __close = function()
    io.stderr:write "\27[?25h\27[?1049l"
    io.stderr:flush()
  end })
end

local function draw_until_the_end(watched, every)
  local _ <close> = screen()
  while not core.signals.pending() do
    watched:read()
    local terminal = core.terminal()
    local lines = watched:frame(terminal.columns, terminal.rows - 1)
    io.stderr:write "\27[H"
    write(lines, terminal.columns)
    io.stderr:write "\27[J"
    io.stderr:flush()
    if watched:ended() then break end
    core.sleep(every)
  end
end

function command.run(options, positional)
  local watched = watch.open(positional, { metrics = options.metric, last = options.last,
    log = options.log })
  watched:read()
  watched:check_names()
  local terminal = core.terminal()
  if terminal.tty and not options.once then
    core.signals.install()
    draw_until_the_end(watched, options.every or 2)
    terminal = core.terminal()
  end
  -- What stays: the last picture.
  watched:read()
  local lines = watched:frame(terminal.columns, terminal.tty and terminal.rows - 1 or 100)
  io.stdout:write(table.concat(lines, "\n"), "\n")
  return 0
end

return command
