-- The figures of a report: drawings for perigee.repl.gnuplot, and their data.
local collect = require "perigee.report.collect"
local statistics = require "perigee.statistics"

local figures = {}

local function finite(x) return type(x) == "number" and x == x and math.abs(x) ~= math.huge end

-- Points { tokens, mean, deviation or nil, n } at the tokens that every finished run of the group
-- reports: a mean over other runs at the next point would step without any run doing so.
local function curve(group, measure)
  local at, order = {}, {}
  for _, run in ipairs(group.finished) do
    for _, line in ipairs(run.lines) do
      local tokens, value = line["progress/tokens"], line[measure.metric]
      if finite(tokens) and finite(value) and tokens > 0 and (value > 0 or not measure.log) then
        if not at[tokens] then
          at[tokens] = {}
          order[#order + 1] = tokens
        end
        table.insert(at[tokens], value)
      end
    end
  end
  table.sort(order)
  local points = {}
  for _, tokens in ipairs(order) do
    local list = at[tokens]
    if #list == #group.finished then
      points[#points + 1] = { tokens, statistics.mean(list), statistics.deviation(list), #list }
    end
  end
  return points
end

-- The last third of the tokens, with the range of the means in it: { x from, to, y from, to }.
local function last_third(curves)
  local most, low, high = 0, math.huge, -math.huge
  for _, c in ipairs(curves) do most = math.max(most, c.points[#c.points][1]) end
  local inside = 0
  for _, c in ipairs(curves) do
    for _, point in ipairs(c.points) do
      if point[1] >= most * 2 / 3 then
        local d = point[3] or 0
        inside = inside + 1
        low, high = math.min(low, point[2] - d), math.max(high, point[2] + d)
      end
    end
  end
  if inside < 2 * #curves or high <= low then return nil end
  local margin = 0.05 * (high - low)
  return { most * 2 / 3, most, low - margin, high + margin }
end

local function trajectory(groups, measure)
  local curves, series = {}, {}
  for _, group in ipairs(groups) do
    local points = curve(group, measure)
    if #points > 0 then curves[#curves + 1] = { group = group, points = points } end
  end
  if #curves == 0 then return nil end
  for i, c in ipairs(curves) do
    local band, line = {}, {}
    for k, p in ipairs(c.points) do
      line[k] = { p[1], p[2] }
      if p[3] then
        -- Below 0 a logarithmic axis ends.
        local low = measure.log and math.max(p[2] - p[3], p[2] * 1e-2) or p[2] - p[3]
        band[#band + 1] = { p[1], low, p[2] + p[3] }
      end
    end
    if #band > 1 then series[#series + 1] = { style = "band", color = i, rows = band } end
    series[#series + 1] = { style = #line > 1 and "lines linewidth 2" or "points", color = i,
      rows = line, title = ("%s (n = %d)"):format(c.group.key, #c.group.finished) }
  end
  local last = {}
  for i, c in ipairs(curves) do
    last[i] = ("%s %s"):format(c.group.key, measure.format:format(c.points[#c.points][2]))
  end
  return { name = measure.key, data = curves, title = measure.title .. " against tokens",
    alt = ("%s against tokens, mean and one sample deviation over seeds. At the end: %s."):format(
      measure.title, table.concat(last, "; ")),
    drawing = { series = series, xlabel = "tokens", counts = true, ylabel = measure.title,
      log = measure.log and "xy" or "x", key = "bottom left",
      inset = not measure.log and last_third(curves) or nil } }
end

-- Final loss against a rate, a line for each value of the other parameters.
local function against_rate(groups, name)
  local by_rest, order = {}, {}
  for _, group in ipairs(groups) do
    local parts, losses = {}, {}
    for key, value in pairs(group.point) do
      if key ~= name then parts[#parts + 1] = ("%s=%s"):format(key, tostring(value)) end
    end
    for _, run in ipairs(group.finished) do losses[#losses + 1] = run.final.loss end
    table.sort(parts)
    local rest = table.concat(parts, " ")
    if #losses > 0 and group.point[name] > 0 then
      if not by_rest[rest] then
        by_rest[rest] = { group = { key = rest == "" and "all" or rest }, points = {} }
        order[#order + 1] = by_rest[rest]
      end
      table.insert(by_rest[rest].points, { group.point[name], statistics.mean(losses),
        statistics.deviation(losses), #losses })
    end
  end
  if #order == 0 then return nil end
  local series = {}
  for i, c in ipairs(order) do
    series[i] = { style = "linespoints pointtype 7", color = i, rows = {}, title = c.group.key }
    for k, p in ipairs(c.points) do series[i].rows[k] = { p[1], p[2] } end
  end
  return { name = "loss-" .. name, data = order, title = "final validation loss against " .. name,
    x = name, alt = "Final validation loss against " .. name .. ", mean over seeds.",
    drawing = { series = series, xlabel = name, ylabel = "validation loss", log = "x" } }
end

-- { { name, title, alt, drawing, data } … }
function figures.all(groups, rates)
  local list = {}
  for _, measure in ipairs(collect.measures) do
    list[#list + 1] = trajectory(groups, measure)
  end
  for _, name in ipairs(rates) do list[#list + 1] = against_rate(groups, name) end
  return list
end

function figures.csv(figure)
  local lines = { ("runs,%s,mean,deviation,n"):format(figure.x or "tokens") }
  for _, c in ipairs(figure.data) do
    for _, p in ipairs(c.points) do
      lines[#lines + 1] = ('"%s",%.17g,%.17g,%s,%d'):format(c.group.key:gsub('"', '""'), p[1],
        p[2], p[3] and ("%.17g"):format(p[3]) or "", p[4])
    end
  end
  return table.concat(lines, "\n") .. "\n"
end

return figures
