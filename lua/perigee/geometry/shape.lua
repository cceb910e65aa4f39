-- The shape of the cloud of rows: how near two rows come, the smallest ball around all, the
-- spectrum.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local rows = require "perigee.geometry.rows"
local support = require "perigee.geometry.support"

local shape = {}
local number, result = support.number, support.result

-- ---- separation ----------------------------------------------------------------------------

local function render_separation(s)
  return ("separation %s between rows %d and %d%s, in %.3g s"):format(number(s.value), s.rows[1],
    s.rows[2], s.rho and (" (%s of the diameter)"):format(number(s.rho)) or "", s.seconds)
end

-- delta = min_{i<j} ||t_i - t_j||, exactly, and rho = delta / D of the same rows (nil when D = 0).
-- `list`: rows or tokens, only they count.
function shape.separation(t, list)
  t = support.matrix(t, "separation")
  local chosen
  if list ~= nil then
    check.table(nil, "separation rows", list, "a list of at least two rows or tokens")
    chosen = {}
    local seen = {}
    for k, row in ipairs(list) do
      chosen[k] = support.row(row, ("separation rows[%d]"):format(k), t:shape()[1])
      if seen[chosen[k]] then errors.misuse("separation: row %d is listed twice", chosen[k]) end
      seen[chosen[k]] = true
    end
  end
  local found = errors.try(core.separation(t, chosen))
  found.rho = found.diameter > 0 and found.value / found.diameter or nil
  return result(found, render_separation)
end

-- ---- the smallest ball ---------------------------------------------------------------------

local function render_radius(r)
  return ("covering radius %s to %s (%d rows carry it), Jung ratio %s; %d passes in %.3g s")
    :format(number(r.bracket.lower), number(r.bracket.upper), #r.support, number(r.jung), r.passes,
      r.seconds)
end

-- The radius of the smallest ball around all rows, between certified bounds: `centre` gives the
-- upper one, the largest distance of a row from it, and the weights of `support` the lower one,
-- sqrt(sum_i w_i ||t_i - sum_j w_j t_j||^2). jung = value / D. options.gap: at most this share of
-- the upper bound lies between them, 1e-6 unless given.
function shape.radius(t, options)
  options = check.table(nil, "radius options", options or {})
  keys.check(options, { "gap" }, "radius options")
  local gap = check.number(nil, "radius gap", options.gap or 1e-6, { min = 1e-12, max = 0.5 })
  t = support.matrix(t, "radius")
  local found = errors.try(core.ball(t, gap))
  local whole = rows.diameter(t)
  found.value = (found.bracket.lower + found.bracket.upper) / 2
  found.diameter = whole.value
  found.jung = whole.value > 0 and found.value / whole.value or nil
  found.seconds = found.seconds + whole.seconds
  return result(found, render_radius)
end

-- ---- spectrum ------------------------------------------------------------------------------

local function render_spectrum(s)
  return ("spectral norm %s  Frobenius %s  stable rank %s  effective rank %s (of squares %s)  "
    .. "condition %s"):format(number(s.value), number(s.norm), number(s.stable_rank),
    number(s.effective_rank), number(s.effective_rank_squares), number(s.condition))
end

-- exp of the entropy of values / sum.
local function effective(values, power)
  local sum, entropy = 0.0, 0.0
  for _, x in ipairs(values) do sum = sum + x ^ power end
  for _, x in ipairs(values) do
    local p = x ^ power / sum
    if p > 0 then entropy = entropy - p * math.log(p) end
  end
  return math.exp(entropy)
end

-- Singular values and what follows from them: value = sigma_1, stable_rank = ||t||_F^2 / sigma_1^2,
-- effective_rank = exp(entropy of sigma / sum sigma), effective_rank_squares the same of sigma^2,
-- condition = sigma_1 / sigma_min (nil when that is below 1e-7 sigma_1, its accuracy). Of a zero
-- matrix only the norms, 0, and ranks of 0.
function shape.spectrum(t)
  local start = core.clock()
  local values = errors.try(core.spectrum(support.matrix(t, "spectrum")))
  local square, top, least = 0.0, values[1], values[#values]
  for _, x in ipairs(values) do square = square + x * x end
  local zero = top == 0
  return result({ value = top, norm = math.sqrt(square), values = values,
    stable_rank = zero and 0.0 or square / (top * top),
    effective_rank = zero and 0.0 or effective(values, 1),
    effective_rank_squares = zero and 0.0 or effective(values, 2),
    condition = not zero and least > 1e-7 * top and top / least or nil,
    seconds = core.clock() - start }, render_spectrum)
end

return shape
