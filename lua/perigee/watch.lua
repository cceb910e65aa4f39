-- Live curves of runs, read from their directories while others train them: a table of the runs and
-- a panel for each metric, as lines of text.
local collect = require "perigee.report.collect"
local console = require "perigee.console"
local core = require "perigee.core"
local data = require "perigee.data"
local gnuplot = require "perigee.repl.gnuplot"
local keys = require "perigee.keys"
local errors = require "perigee.errors"
local look = require "perigee.sweep.look"
local metrics = require "perigee.metrics"

local watch = {}

local Watch = {}
Watch.__index = Watch

watch.metrics = { "train/loss", "validation/loss", "diagnostics/lm_head_step/diameter_exact",
  "validation/hilbert_step/rms" }

local least_panel, most_panel, two_beside = 10, 24, 130 -- rows, rows, columns
local marks = { "*", "#", "$", "%", "@", "&", "=" }     -- gnuplot's, by line type

-- options: metrics (a list of names), last (of the updates, how many), log ("x", "y" or "xy"). The
-- folders must exist; runs in them may come later.
function watch.open(paths, options)
  local self = setmetatable({ paths = paths, metrics = options.metrics or watch.metrics,
    chosen = options.metrics ~= nil, last = options.last, log = options.log, runs = {},
    by_dir = {} }, Watch)
  for _, path in ipairs(paths) do
    if core.fs.kind(path) ~= "directory" then
      errors.world(("ENOENT: %s is not a folder: expected a run, a sweep, or a folder of runs")
        :format(path), "ENOENT")
    end
  end
  return self
end

local function new_run(found)
  return { dir = found.dir, name = found.name, state = { status = "waiting" }, series = {},
    follower = metrics.follow(found.dir .. "/metrics.jsonl"), values = {} }
end

-- The update at which a run will end, as its config.json says.
local function planned(dir)
  local ok, config = pcall(data.read_json, dir .. "/config.json")
  local plan = ok and type(config) == "table" and config.plan
  return type(plan) == "table" and math.type(plan.updates) == "integer" and plan.updates or nil
end

local function take(run, line)
  local update = line["progress/update"]
  if math.type(update) ~= "integer" then return end
  for name, value in pairs(line) do
    if type(value) == "number" and type(name) == "string" then
      run.values[name] = value
      local series = run.series[name]
      if not series then
        series = { rows = {} }
        run.series[name] = series
      end
      -- An update that is reported again, by a run that went on from a checkpoint, counts anew.
      local rows = series.rows
      while #rows > 0 and rows[#rows][1] >= update do rows[#rows] = nil end
      rows[#rows + 1] = { update, value }
    end
  end
  run.heard = core.clock()
end

-- What is new since the last call.
function Watch:read()
  for _, found in ipairs(collect.find(self.paths)) do
    if not self.by_dir[found.dir] then
      self.by_dir[found.dir] = new_run(found)
      self.runs[#self.runs + 1] = self.by_dir[found.dir]
    end
  end
  for _, run in ipairs(self.runs) do
    local lines, restarted = run.follower:read()
    if restarted then run.series, run.values = {}, {} end
    for _, line in ipairs(lines) do take(run, line) end
    run.state = look.at(run.dir)
    run.total = run.total or planned(run.dir)
    local first = run.first or { core.clock(), run.values["progress/update"] }
    run.first = first[2] and first or nil
  end
end

local over = { finished = true, failed = true, damaged = true, stopped = true }

-- Whether nothing more is to come; false while there is no run.
function Watch:ended()
  for _, run in ipairs(self.runs) do
    if not over[run.state.status] then return false end
  end
  return #self.runs > 0
end

local function number(value, format) return value and format:format(value) or "-" end

-- A run whose directory has no last word trains, unless nothing has come for a while.
local function status(run)
  if run.state.status ~= "interrupted" then return run.state.status end
  local silent = run.heard and core.clock() - run.heard or 0
  if silent < 60 then return "running" end
  return "silent " .. console.duration(silent)
end

-- Seconds to its end, at the pace since the watch began, or of its last report.
local function left(run)
  local update, first = run.values["progress/update"], run.first
  if run.state.status ~= "interrupted" or not update or not run.total then return "" end
  local pace = run.values["performance/seconds_per_update"]
  if first and update > first[2] then pace = (run.heard - first[1]) / (update - first[2]) end
  return pace and console.duration(pace * math.max(0, run.total - update)) or ""
end

local function row(run)
  local v = run.values
  return { run.name, status(run), ("%s/%s"):format(v["progress/update"] or run.state.update or 0,
    run.total or "?"), number(v["train/loss"], "%.4f"), number(v["validation/loss"], "%.4f"),
    v["performance/tokens_per_second"]
      and console.grouped(math.max(0, math.min(1e15, v["performance/tokens_per_second"]))) or "-",
    left(run) }
end

-- Those that train come first, then those that have something to say.
local function rank(run)
  if run.state.status == "interrupted" then return 1 end
  return run.values["progress/update"] and 2 or 3
end

-- The table, of `most` rows.
function Watch:table(most)
  local order, counts = {}, {}
  for i, run in ipairs(self.runs) do
    order[i] = i
    local name = status(run):match "^%a+"
    counts[name] = (counts[name] or 0) + 1
  end
  table.sort(order, function(a, b)
    local x, y = rank(self.runs[a]), rank(self.runs[b])
    if x ~= y then return x < y end
    return a < b
  end)
  local rows = { { "run", "state", "update", "loss", "validation", "tok/s", "left" } }
  for _, i in ipairs(order) do
    if #rows < most - 1 or (#rows < most and #rows == #order) then
      rows[#rows + 1] = row(self.runs[i])
    end
  end
  local lines = console.columns(rows)
  if #rows - 1 < #order then
    local words = {}
    for name, count in pairs(counts) do words[#words + 1] = ("%d %s"):format(count, name) end
    table.sort(words)
    lines[#lines + 1] = ("%d more; in all %s"):format(#order - #rows + 1, table.concat(words, ", "))
  end
  for _, run in ipairs(self.runs) do
    if run.state.status == "failed" or run.state.status == "damaged" then
      lines[#lines + 1] = ("%s: %s"):format(run.name, run.state.reason or "no reason was left")
    end
  end
  return lines
end

-- At most `most` points: means over runs of neighbours, which a terminal could not tell apart.
local function thinned(rows, from, most, positive)
  local kept = {}
  for _, point in ipairs(rows) do
    if point[1] >= from and (not positive or point[2] > 0) then kept[#kept + 1] = point end
  end
  if #kept <= most then return kept end
  local list = {}
  for i = 1, most do
    local first, last = (i - 1) * #kept // most + 1, i * #kept // most
    local x, y = 0, 0
    for k = first, last do x, y = x + kept[k][1], y + kept[k][2] / (last - first + 1) end
    list[i] = { x / (last - first + 1), y }
  end
  return list
end

-- The runs that are drawn: those of which something is known, running ones first, one for each
-- mark; and how many there are in all.
function Watch:drawn()
  local list, all = {}, 0
  for wanted = 1, 2 do
    for _, run in ipairs(self.runs) do
      if rank(run) == wanted and next(run.series) then
        all = all + 1
        if #list < #marks then list[#list + 1] = run end
      end
    end
  end
  return list, all
end

-- A panel, as lines of text; nil when no run that is drawn reports the metric.
function Watch:panel(name, runs, width, height)
  local curves, newest = {}, 0
  for _, run in ipairs(runs) do newest = math.max(newest, run.values["progress/update"]) end
  for i, run in ipairs(runs) do
    local rows = run.series[name] and run.series[name].rows
    if rows then
      rows = thinned(rows, self.last and newest - self.last or 0, 2 * width,
        self.log and self.log:find "y")
      if #rows > 0 then
        curves[#curves + 1] = { rows = rows,
          style = ("%s linetype %d"):format(#rows > 1 and "lines" or "points", i) }
      end
    end
  end
  if #curves == 0 then return nil end
  local lines = {}
  local text = gnuplot.draw { series = curves, title = name, log = self.log,
    width = math.max(20, width - 1), height = height - 1 }
  for line in text:gmatch "[^\n\f]+" do lines[#lines + 1] = line end
  return lines
end

-- Which mark is which run.
local function legend(runs, all, columns)
  local lines, line = {}, ""
  local words = {}
  for i, run in ipairs(runs) do words[i] = marks[i] .. " " .. run.name end
  if all > #runs then words[#words + 1] = ("and %d runs not drawn"):format(all - #runs) end
  for _, word in ipairs(words) do
    if #line > 0 and #line + 3 + #word >= columns then
      lines[#lines + 1] = line
      line = ""
    end
    line = #line > 0 and line .. "   " .. word or word
  end
  lines[#lines + 1] = line
  return lines
end

local function padded(line, width)
  local length = utf8.len(line) or #line
  return line .. (" "):rep(width - length)
end

-- Panels one below the other, or two beside each other.
local function arrange(panels, beside, width)
  local lines = {}
  for i = 1, #panels, beside do
    for k = 1, #panels[i] do
      local parts = {}
      for j = i, math.min(#panels, i + beside - 1) do
        parts[#parts + 1] = padded(panels[j][k] or "", width)
      end
      lines[#lines + 1] = (table.concat(parts, " "):gsub("%s+$", ""))
    end
  end
  return lines
end

-- A name that was asked for and that no run has reported although one has reported others.
function Watch:check_names()
  local known, names = {}, {}
  for _, run in ipairs(self.runs) do
    for name in pairs(run.series) do
      if not known[name] then names[#names + 1] = name end
      known[name] = true
    end
  end
  if not self.chosen or #names == 0 then return end
  table.sort(names)
  for _, name in ipairs(self.metrics) do
    if not known[name] and not name:find("/", 1, true) then
      errors.usage("--metric %s is no metric of these runs%s", name, keys.suggestion(name, names))
    end
  end
end

-- What a terminal of these sizes shows, as a list of lines.
function Watch:frame(columns, rows)
  if #self.runs == 0 then
    return { ("no run in %s yet"):format(table.concat(self.paths, ", ")) }
  end
  local lines = self:table(math.max(3, math.min(#self.runs + 2, rows // 3)))
  local runs, all = self:drawn()
  local names = {}
  for _, name in ipairs(self.metrics) do
    for _, run in ipairs(runs) do
      if run.series[name] then
        names[#names + 1] = name
        break
      end
    end
  end
  if #names == 0 then
    lines[#lines + 1] = "nothing was reported yet"
    return lines
  end
  if #self.runs > 1 then
    for _, line in ipairs(legend(runs, all, columns)) do lines[#lines + 1] = line end
  end
  local beside = columns >= two_beside and #names > 1 and 2 or 1
  local room = rows - #lines - 1
  local levels = math.max(1, math.min((#names + beside - 1) // beside, room // least_panel))
  local height = math.max(8, math.min(most_panel, room // levels))
  local width = (columns - (beside - 1)) // beside
  local panels = {}
  for i = 1, math.min(#names, levels * beside) do
    panels[#panels + 1] = self:panel(names[i], runs, width, height)
  end
  for _, line in ipairs(arrange(panels, beside, width)) do lines[#lines + 1] = line end
  if #names > levels * beside then
    lines[#lines + 1] = "no room for " .. table.concat(names, ", ", levels * beside + 1)
  end
  return lines
end

return watch
