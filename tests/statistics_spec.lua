-- Statistics of few runs, against values of published tables and by hand.
local statistics = require "perigee.statistics"

local function near(expected, found, tolerance)
  assert(math.abs(found - expected) <= tolerance, ("%.17g, expected %.17g"):format(found, expected))
end

describe("statistics", function()
  it("have t quantiles of the tables, and the closed forms of 1 and 2 degrees", function()
    -- Two-sided 5 % and 1 %, printed to three digits in every table of Student's t.
    for n, t in pairs { [1] = 12.706, [2] = 4.303, [3] = 3.182, [4] = 2.776, [9] = 2.262,
      [29] = 2.045, [120] = 1.980 } do
      near(t, statistics.t_quantile(0.05, n), 5.001e-4)
    end
    near(9.925, statistics.t_quantile(0.01, 2), 5.001e-4)
    -- Fewer than 100 roundings of 1.1e-16 each in the fraction and the gammas.
    for _, p in ipairs { 0.9, 0.5, 0.05, 0.001 } do
      local t1 = 1 / math.tan(math.pi * p / 2)
      near(t1, statistics.t_quantile(p, 1), 1e-12 * t1)
      local q = 1 - p
      local t2 = q * math.sqrt(2 / (1 - q * q))
      near(t2, statistics.t_quantile(p, 2), 1e-12 * t2)
    end
    near(1.0, statistics.t_tail(0, 5), 0)
  end)

  it("take n - 1, and have no deviation of one number", function()
    assert.equal(2.5, statistics.mean { 1, 2, 3, 4 })
    near(math.sqrt(5 / 3), statistics.deviation { 1, 2, 3, 4 }, 1e-15)
    assert.is_nil(statistics.deviation { 3 })
    assert.is_nil(statistics.mean {})
    near(1, statistics.deviation { 1e9, 1e9 + 1, 1e9 + 2 }, 0)
    assert.error_matches(function() statistics.mean { 1, 0 / 0 } end, "finite number")
  end)

  it("pair by seed", function()
    -- Differences 1, 2, 3: mean 2, deviation 1, half width t/√3; p of t = 2√3 with 2 degrees.
    local r = statistics.paired({ 1, 1, 1 }, { 2, 3, 4 })
    assert.same({ 3, 2.0, 1.0 }, { r.n, r.mean, r.deviation })
    local half = 0.95 * math.sqrt(2 / (1 - 0.95 ^ 2)) / math.sqrt(3)
    near(2 - half, r.low, 1e-12)
    near(2 + half, r.high, 1e-12)
    near(1 - math.sqrt(12 / 14), r.p, 1e-13)
    near(24 ^ (1 / 3), r.ratio, 1e-14)
    local one = statistics.paired({ 2 }, { 3 })
    assert.is_nil(one.deviation or one.low or one.p)
    assert.is_nil(statistics.paired({ -1, 1 }, { 1, 1 }).ratio)
    assert.error_matches(function() statistics.paired({ 1 }, {}) end, "expected pairs")
  end)

  it("correct by Holm", function()
    local p = statistics.holm { 0.01, 0.04, 0.03, 0.005 }
    for i, x in ipairs { 0.03, 0.06, 0.06, 0.02 } do near(x, p[i], 1e-15) end
    assert.same({}, statistics.holm {})
    assert.same({ 1.0, 1.0 }, statistics.holm { 0.6, 0.9 })
  end)
end)
