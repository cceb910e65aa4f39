-- plot(…): curves of metrics or lists, histograms, and the cloud of a matrix's rows in its first
-- two principal directions.
local check = require "perigee.check"
local core = require "perigee.core"
local errors = require "perigee.errors"
local gnuplot = require "perigee.repl.gnuplot"
local keys = require "perigee.keys"
local measure = require "perigee.repl.measure"
local metrics = require "perigee.metrics"
local report = require "perigee.repl.report"
local show = require "perigee.repl.print"
local tokens = require "perigee.repl.tokens"

local plot = {}

local option_keys = { "x", "y", "histogram", "bins", "scatter", "labels", "file", "title", "xlabel",
  "ylabel", "log", "width", "height" }

-- ---- metrics -------------------------------------------------------------------------------

-- The last line of every update, in order: of the run directory, then those of steps in memory.
local function lines_of(v)
  local lines = v._directory and metrics.read(v._directory .. "/metrics.jsonl") or {}
  local at = {}
  for i, line in ipairs(lines) do at[line["progress/update"]] = i end
  for _, line in ipairs(v._run and v._run.lines or {}) do
    local update = line["progress/update"]
    if update then
      at[update] = at[update] or #lines + 1
      lines[at[update]] = line
    end
  end
  table.sort(lines, function(a, b) return a["progress/update"] < b["progress/update"] end)
  return lines
end
plot.lines_of = lines_of

local function metric_series(views, name)
  local list, known = {}, {}
  for _, v in ipairs(views) do
    local rows = {}
    for _, line in ipairs(lines_of(v)) do
      if type(line[name]) == "number" then
        rows[#rows + 1] = { line["progress/update"], line[name] }
      end
      for key, value in pairs(line) do
        if type(value) == "number" then known[key] = true end
      end
    end
    if #rows > 0 then
      list[#list + 1] = { rows = rows, style = "lines",
        title = #views > 1 and ("%s: %s"):format(v.path, name) or name }
    end
  end
  if #list == 0 then
    local names = {}
    for key in pairs(known) do names[#names + 1] = key end
    table.sort(names)
    if #names == 0 then errors.misuse("plot: what is opened has no metrics") end
    errors.misuse("plot: there is no metric %s%s", show.quoted(name),
      keys.suggestion(name, names))
  end
  return list
end

-- ---- numbers -------------------------------------------------------------------------------

local most_values = 1 << 22

-- The elements of a list or a tensor, all finite.
local function numbers(value, label)
  if show.is_tensor(value) then
    if value:elements() > most_values then
      errors.misuse("%s: %d elements are too many, at most %d are drawn: take rows, or norms",
        label, value:elements(), most_values)
    end
    value = value:to_table()
  end
  check.table(nil, label, value, "a list of numbers or a tensor")
  local list = {}
  local function add(part)
    for i, x in ipairs(part) do
      if type(x) == "table" then
        add(x)
      elseif type(x) ~= "number" or x ~= x or x == math.huge or x == -math.huge then
        check.fail(nil, ("%s[%d]"):format(label, i), x, "a finite number")
      else
        list[#list + 1] = x
      end
    end
  end
  add(value)
  if #list == 0 then errors.misuse("%s: there is nothing to draw", label) end
  return list
end

local function curve(y, x, title)
  local rows = {}
  local ys = numbers(y, "plot y")
  local xs = x ~= nil and numbers(x, "plot x") or nil
  if xs and #xs ~= #ys then
    errors.misuse("plot: x has %d numbers and y %d: expected as many", #xs, #ys)
  end
  for i, value in ipairs(ys) do rows[i] = { xs and xs[i] or i, value } end
  return { rows = rows, style = #rows > 1 and "lines" or "points", title = title }
end

-- Counts in `bins` equal intervals from the least to the largest value.
function plot.histogram(values, bins)
  local least, most = math.huge, -math.huge
  for _, x in ipairs(values) do least, most = math.min(least, x), math.max(most, x) end
  if most == least then return { { least, #values } } end
  local width = (most - least) / bins
  local rows = {}
  for b = 1, bins do rows[b] = { least + (b - 0.5) * width, 0 } end
  for _, x in ipairs(values) do
    local b = math.min(bins, 1 + math.floor((x - least) / width))
    rows[b][2] = rows[b][2] + 1
  end
  return rows
end

-- ---- the cloud of rows ---------------------------------------------------------------------

-- The first two principal directions of the rows of x, by power iteration on the d x d matrix of
-- the centred rows, the second one orthogonal to the first. Returns the coordinates of every row,
-- and the share of the variance in each direction. It stops when a direction turns by less than
-- 1e-5, or after 500 rounds: where two variances are that close, any direction between is as good.
function plot.principal(x)
  local centred = x:center_rows()
  local square = centred:t():matmul(centred)
  local d = x:shape()[2]
  local total = centred:square():sum()
  local found, shares = {}, {}
  for k = 1, math.min(2, d) do
    local v = square:row(1):clone()
    for i, start in ipairs(core.random(k, "principal", 0, d)) do v[i] = start end
    local before
    for _ = 1, 500 do
      v = square:matmul(v)
      for _, other in ipairs(found) do v:sub_(other * (v * other):sum()) end
      local norm = v:norm()
      if norm == 0 then break end
      v:div_(norm)
      if before and (v - before):norm() < 1e-5 then break end
      before = v
    end
    found[k] = v
    shares[k] = total > 0 and (v * square:matmul(v)):sum() / total or 0
  end
  local coordinates = {}
  for k, v in ipairs(found) do coordinates[k] = centred:matmul(v):to_table() end
  if not coordinates[2] then
    coordinates[2], shares[2] = {}, 0
    for i = 1, #coordinates[1] do coordinates[2][i] = 0 end
  end
  return coordinates, shares
end

-- The rows that get a label: given ones, else the `count` farthest from the centre of the picture.
local function labelled(first, second, wanted, all)
  local rows = {}
  if type(wanted) == "table" then
    for i, item in ipairs(wanted) do
      local token = all and (tokens.is(item) or type(item) == "string") and all:token(item)
      rows[i] = token and token.row or check.integer(nil, "plot labels", item, 1, #first)
    end
    return rows
  end
  local order = {}
  for i = 1, #first do order[i] = i end
  local function far(i) return first[i] ^ 2 + second[i] ^ 2 end
  table.sort(order, function(a, b)
    if far(a) ~= far(b) then return far(a) > far(b) end
    return a < b
  end)
  return table.move(order, 1, math.min(wanted, #order), 1, rows)
end

local function scatter(options, drawing)
  local matrix = measure.matrix_of(options.scatter, "plot scatter")
  local shape = matrix:shape()
  if #shape ~= 2 then check.fail(nil, "plot scatter", matrix, "a matrix") end
  local coordinates, shares = plot.principal(matrix)
  local first, second = coordinates[1], coordinates[2]
  local all = measure.tokens_for(shape[1])
  local wanted = options.labels
  if wanted == nil then wanted = options.file and 40 or 16 end
  if type(wanted) ~= "table" then
    wanted = check.integer(nil, "plot labels", wanted, 0, nil, "a list of tokens or rows")
  end
  -- A terminal has no room for more.
  local stride = options.file and 1 or math.max(1, #first // 4000)
  local points, labels = {}, {}
  for i = 1, #first, stride do points[#points + 1] = { first[i], second[i] } end
  for i, row in ipairs(labelled(first, second, wanted, all)) do
    local token = all and all:by_row(row)
    labels[i] = { first[row], second[row], token and token.text or tostring(row) }
  end
  drawing.series = { { rows = points,
    style = options.file and "points pointtype 7 pointsize 0.3" or "dots" } }
  if #labels > 0 then drawing.series[2] = { rows = labels, style = "labels" } end
  drawing.xlabel = drawing.xlabel or ("first direction, %.1f %% of the variance"):format(
    100 * shares[1])
  drawing.ylabel = drawing.ylabel or ("second, %.1f %%"):format(100 * shares[2])
  return { shares = shares }
end

-- ---- plot ----------------------------------------------------------------------------------

local function series_of(views, options)
  local list = {}
  for i, item in ipairs(options) do
    if type(item) == "string" then
      for _, series in ipairs(metric_series(views, item)) do list[#list + 1] = series end
    elseif type(item) == "number" then
      return { curve(table.move(options, 1, #options, 1, {}), options.x) }
    else
      list[#list + 1] = curve(item, options.x, #options > 1 and tostring(i) or nil)
    end
  end
  if options.y ~= nil then list[#list + 1] = curve(options.y, options.x) end
  if #list == 0 then
    errors.misuse("plot: expected a metric's name, lists of numbers, y, histogram or scatter")
  end
  return list
end

-- plot("train/loss"), plot{ list, … }, plot{ x =, y = }, plot{ histogram = t, bins = n },
-- plot{ scatter = m, labels = n or list }; file = "x.svg" | ".pdf" | ".png".
-- columns: of the terminal that shows it, else of this process's.
function plot.plot(views, given, columns)
  if type(given) == "string" or show.is_tensor(given) then given = { given } end
  check.table(nil, "plot", given, "a metric's name, a tensor, or a table")
  local options = given
  keys.check(options, option_keys, "plot", nil, #options)
  columns = columns or core.terminal().columns
  local drawing = { file = options.file and check.string(nil, "plot file", options.file),
    title = options.title, xlabel = options.xlabel, ylabel = options.ylabel,
    width = check.integer(nil, "plot width", options.width
      or math.max(20, math.min(columns - 1, 110)), 20, 1000),
    height = check.integer(nil, "plot height", options.height or 24, 8, 1000),
    log = options.log and check.one_of(nil, "plot log", options.log, { "x", "y", "xy" }) }
  local result = {}
  if options.scatter ~= nil then
    result = scatter(options, drawing)
  elseif options.histogram ~= nil then
    local bins = check.integer(nil, "plot bins", options.bins or 40, 1, 10000)
    local rows = plot.histogram(numbers(options.histogram, "plot histogram"), bins)
    drawing.series, drawing.boxes = { { rows = rows, style = "boxes" } }, true
    result.bins = rows
  else
    drawing.series = series_of(views, options)
    for _, item in ipairs(options) do
      if type(item) == "string" then drawing.xlabel = drawing.xlabel or "update" end
    end
  end
  local drawn = gnuplot.draw(drawing)
  if drawing.file then
    result.file = drawn:sub(1, 1) == "/" and drawn or core.fs.cwd() .. "/" .. drawn
    return report.new(result, function(r) return "written to " .. r.file end)
  end
  result.text = drawn
  return report.new(result, function(r) return r.text end)
end

return plot
