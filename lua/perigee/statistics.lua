-- Statistics of few runs: sample deviations, paired t intervals, geometric means of ratios, and
-- Holm's correction. Never a bootstrap: three seeds have no distribution to draw from.
local check = require "perigee.check"
local errors = require "perigee.errors"

local statistics = {}

local function numbers(what, list)
  check.table(nil, what, list, "a list of numbers")
  for i, x in ipairs(list) do
    if type(x) ~= "number" or x ~= x or x == math.huge or x == -math.huge then
      check.fail(nil, ("%s[%d]"):format(what, i), x, "a finite number")
    end
  end
  return list
end

-- The mean; nil of nothing. Two passes, so that a large common part costs no digits.
function statistics.mean(list)
  numbers("mean", list)
  if #list == 0 then return nil end
  local sum = 0.0
  for _, x in ipairs(list) do sum = sum + x end
  local mean, rest = sum / #list, 0.0
  for _, x in ipairs(list) do rest = rest + (x - mean) end
  return mean + rest / #list
end

-- The sample standard deviation (n - 1); nil of fewer than two.
function statistics.deviation(list)
  local mean = statistics.mean(list)
  if #list < 2 then return nil end
  local sum = 0.0
  for _, x in ipairs(list) do sum = sum + (x - mean) ^ 2 end
  return math.sqrt(sum / (#list - 1))
end

-- Logarithm of the gamma function for x > 0: Stirling's series beyond 10, the recurrence below.
local function log_gamma(x)
  local shift = 0.0
  while x < 10 do
    shift = shift - math.log(x)
    x = x + 1
  end
  local z = 1 / (x * x)
  return shift + (x - 0.5) * math.log(x) - x + 0.5 * math.log(2 * math.pi)
    + (1 / 12 - z * (1 / 360 - z * (1 / 1260 - z * (1 / 1680 - z / 1188)))) / x
end

-- The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22),
-- evaluated by Lentz's method where it converges fast, else by I_x(a, b) = 1 - I_{1-x}(b, a).
local function incomplete_beta(x, a, b)
  if x <= 0 then return 0.0 end
  if x >= 1 then return 1.0 end
  if x > (a + 1) / (a + b + 2) then return 1 - incomplete_beta(1 - x, b, a) end
  local tiny = 1e-300
  local c, d = 1.0, 1 - (a + b) * x / (a + 1)
  d = 1 / (math.abs(d) < tiny and tiny or d)
  local f = d
  for m = 1, 1000 do
    for half = 0, 1 do
      local t
      if half == 0 then
        t = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
      else
        t = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
      end
      d = 1 + t * d
      d = 1 / (math.abs(d) < tiny and tiny or d)
      c = 1 + t / c
      if math.abs(c) < tiny then c = tiny end
      f = f * d * c
    end
    if math.abs(d * c - 1) < 1e-16 then break end
  end
  return f * math.exp(a * math.log(x) + b * math.log(1 - x) + log_gamma(a + b) - log_gamma(a)
    - log_gamma(b)) / a
end

-- Two-sided tail of Student's t with n degrees of freedom: P(|T| >= |t|).
function statistics.t_tail(t, n)
  return incomplete_beta(n / (n + t * t), n / 2, 0.5)
end

-- The t of that two-sided tail, by bisection: t_quantile(0.05, 2) = 4.30265…
function statistics.t_quantile(tail, n)
  check.number(nil, "t_quantile", tail, { min = 0, max = 1, open_min = true })
  check.integer(nil, "degrees of freedom", n, 1)
  local low, high = 0.0, 1.0
  while statistics.t_tail(high, n) > tail do high = 2 * high end
  for _ = 1, 200 do
    local middle = (low + high) / 2
    if middle == low or middle == high then break end
    if statistics.t_tail(middle, n) > tail then low = middle else high = middle end
  end
  return (low + high) / 2
end

-- b against a, pair by pair: { n, mean and deviation of b - a, low and high of the 95 % interval of
-- that mean, p of no difference, ratio = geometric mean of b/a when all are positive }.
function statistics.paired(a, b)
  numbers("paired[1]", a)
  numbers("paired[2]", b)
  if #a ~= #b then errors.misuse("paired: %d and %d numbers: expected pairs", #a, #b) end
  local differences, logarithms, positive = {}, 0.0, #a > 0
  for i = 1, #a do
    differences[i] = b[i] - a[i]
    positive = positive and a[i] > 0 and b[i] > 0
    if positive then logarithms = logarithms + math.log(b[i] / a[i]) end
  end
  local n = #a
  local result = { n = n, mean = statistics.mean(differences),
    deviation = statistics.deviation(differences),
    ratio = positive and math.exp(logarithms / n) or nil }
  if n >= 2 then
    local half = statistics.t_quantile(0.05, n - 1) * result.deviation / math.sqrt(n)
    result.low, result.high = result.mean - half, result.mean + half
    if result.deviation > 0 then
      result.p = statistics.t_tail(result.mean / (result.deviation / math.sqrt(n)), n - 1)
    else
      result.p = result.mean == 0 and 1.0 or 0.0
    end
  end
  return result
end

-- Holm's step-down adjustment of p-values: the family-wise error stays below any level that an
-- adjusted value is compared with (Holm 1979).
function statistics.holm(list)
  numbers("holm", list)
  local order = {}
  for i = 1, #list do order[i] = i end
  table.sort(order, function(i, j)
    if list[i] ~= list[j] then return list[i] < list[j] end
    return i < j
  end)
  local adjusted, most = {}, 0.0
  for rank, i in ipairs(order) do
    most = math.max(most, math.min(1.0, (#list - rank + 1) * list[i]))
    adjusted[i] = most
  end
  return adjusted
end

return statistics
