-- Rows as points: the diameter, neighbours, norms, and what of a matrix its rows carry.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local report = require "perigee.repl.report"
local support = require "perigee.geometry.support"

local rows = {}
local number, result = support.number, support.result

-- ---- the diameter --------------------------------------------------------------------------

local function render_diameter(d)
  if not d.rows then return "diameter 0: all rows are alike" end
  return ("diameter %s between rows %d and %d, in %.3g s"):format(number(d.value), d.rows[1],
    d.rows[2], d.seconds)
end

-- D = max_{i<j} ||t_i - t_j||, exactly, and the pair that attains it (the smallest one of several;
-- none when D = 0). bracket: R <= D <= 2R with R = max_i ||t_i - mean row||.
function rows.diameter(t)
  return result(errors.try(core.diameter(support.matrix(t, "diameter"))), render_diameter)
end

-- ---- neighbours ----------------------------------------------------------------------------

local function render_neighbours(list)
  local lines = { { "row", "distance", "cosine" } }
  for i, entry in ipairs(list) do
    lines[i + 1] = { tostring(entry.row), number(entry.distance), number(entry.cosine) }
  end
  return report.columns(lines)
end

-- The n rows nearest to row i in Euclidean distance, i left out: a list of { row, distance,
-- cosine }, nearest first, the smaller row first among equals.
function rows.neighbours(t, i, n)
  t = support.matrix(t, "neighbours")
  errors.try(core.check_finite(t, "neighbours"))
  local count = t:shape()[1]
  i = support.row(i, "neighbours row", count)
  local others = math.max(1, count - 1)
  n = check.integer(nil, "neighbours n", n == nil and math.min(8, others) or n, 1, others)
  local from = t:row(i)
  local distances = (t - from):row_norms():to_table()
  local least = 1e-37 -- a cosine with a zero row is 0
  local cosines = t:matmul(from):div_(t:row_norms():maximum_(least))
    :div_(math.max(from:norm(), least)):to_table()
  local order = {}
  for k = 1, count do
    if k ~= i then order[#order + 1] = k end
  end
  table.sort(order, function(a, b)
    if distances[a] ~= distances[b] then return distances[a] < distances[b] end
    return a < b
  end)
  local list = {}
  for k = 1, math.min(n, #order) do
    local row = order[k]
    list[k] = { row = row, distance = distances[row], cosine = cosines[row] }
  end
  return result(list, render_neighbours)
end

-- ---- norms ---------------------------------------------------------------------------------

-- The norms of the rows as a list, and the sum of their squares.
local function norms_of(t, label)
  t = support.matrix(t, label)
  errors.try(core.check_finite(t, label))
  if t:shape()[1] == 0 then errors.misuse("%s: the matrix has no rows", label) end
  local list, square = t:row_norms():to_table(), 0.0
  for _, x in ipairs(list) do square = square + x * x end
  return list, square
end

local function render_norms(n)
  local lines = { ("norms of %d rows: min %s  median %s  mean %s  rms %s  max %s; %d are 0"):format(
    n.count, number(n.min), number(n.median), number(n.mean), number(n.rms), number(n.max),
    n.zeros) }
  local table_rows = { { "from", "to", "rows" } }
  for _, bin in ipairs(n.histogram) do
    table_rows[#table_rows + 1] = { number(bin.from), number(bin.to), tostring(bin.count) }
  end
  lines[2] = report.columns(table_rows)
  return table.concat(lines, "\n")
end

-- Norms of the rows with a histogram: `bins` (20) intervals of equal width from the smallest to the
-- largest norm, or with `log` of equal ratio and without the rows that are 0.
function rows.row_norms(t, options)
  options = check.table(nil, "row_norms options", options or {})
  keys.check(options, { "bins", "log" }, "row_norms options")
  local bins = check.integer(nil, "row_norms bins", options.bins or 20, 1, 10000)
  local log = check.boolean(nil, "row_norms log", options.log or false)
  local norms, square = norms_of(t, "row_norms")
  table.sort(norms)
  local count, sum, zeros = #norms, 0.0, 0
  for _, x in ipairs(norms) do
    sum = sum + x
    if x == 0 then zeros = zeros + 1 end
  end
  local histogram, first = {}, log and zeros + 1 or 1
  if first <= count then
    local forth, back = function(x) return x end, function(x) return x end
    if log then forth, back = math.log, math.exp end
    local low, high = forth(norms[first]), forth(norms[count])
    if low == high then bins = 1 end
    for b = 1, bins do
      histogram[b] = { from = b == 1 and norms[first] or back(low + (high - low) * (b - 1) / bins),
        to = b == bins and norms[count] or back(low + (high - low) * b / bins), count = 0 }
    end
    local b = 1
    for i = first, count do
      while b < bins and norms[i] >= histogram[b].to do b = b + 1 end
      histogram[b].count = histogram[b].count + 1
    end
  end
  return result({ count = count, min = norms[1], max = norms[count], mean = sum / count,
    rms = math.sqrt(square / count), median = report.quantile(norms, 0.5),
    p10 = report.quantile(norms, 0.1), p90 = report.quantile(norms, 0.9), zeros = zeros,
    histogram = histogram }, render_norms)
end

-- ---- who carries the matrix ----------------------------------------------------------------

local function render_participation(p)
  local lines = { { "seen", "rows", "of rows", "of square", "rms norm" } }
  for i, bucket in ipairs(p) do
    local seen = bucket.most == bucket.least and tostring(bucket.least)
      or ("%d - %d"):format(bucket.least, bucket.most)
    lines[i + 1] = { seen, tostring(bucket.count), ("%.2f %%"):format(100 * bucket.share_of_rows),
      ("%.2f %%"):format(100 * bucket.share), number(bucket.rms) }
  end
  return report.columns(lines, { true })
end

-- Shares of the squared Frobenius norm by how often a row's token was seen: counts[row] is that
-- number, a list or a vector. The buckets are 0, 1 to 9, 10 to 99, …, empty ones left out: a list
-- of { least, most, count, share_of_rows, share, rms }.
function rows.participation(t, counts)
  local norms, square = norms_of(t, "participation")
  if type(counts) == "userdata" then counts = support.matrix(counts, "counts"):to_table() end
  check.table(nil, "participation counts", counts, "a list or a vector of a count for every row")
  if #counts ~= #norms then
    errors.misuse("participation: %d counts for %d rows", #counts, #norms)
  end
  local buckets, largest = {}, -1
  for i, norm in ipairs(norms) do
    local seen = check.number(nil, ("counts[%d]"):format(i), counts[i], { min = 0 })
    local k, limit = 0, 1
    while seen >= limit do k, limit = k + 1, limit * 10 end
    local bucket = buckets[k]
    if not bucket then
      bucket = { least = k == 0 and 0 or limit // 10, most = k == 0 and 0 or limit - 1, count = 0,
        square = 0.0 }
      buckets[k], largest = bucket, math.max(largest, k)
    end
    bucket.count, bucket.square = bucket.count + 1, bucket.square + norm * norm
  end
  local list = {}
  for k = 0, largest do
    local b = buckets[k]
    if b then
      list[#list + 1] = { least = b.least, most = b.most, count = b.count,
        share_of_rows = b.count / #norms, share = square > 0 and b.square / square or 0.0,
        rms = math.sqrt(b.square / b.count) }
    end
  end
  return result(list, render_participation)
end

-- ||mean row|| sqrt(V) / ||t||_F, in [0, 1]: the share of the Frobenius norm that all rows have in
-- common. A common row changes no probability.
function rows.common_mode(t)
  t = support.matrix(t, "common_mode")
  local norms, square = norms_of(t, "common_mode")
  local mean = t:mean(1):norm()
  local share = square > 0 and math.min(1, mean * math.sqrt(#norms / square)) or 0.0
  return result({ value = share, mean_norm = mean, norm = math.sqrt(square) }, function(c)
    return ("common mode %s of the norm %s"):format(number(c.value), number(c.norm))
  end)
end

return rows
