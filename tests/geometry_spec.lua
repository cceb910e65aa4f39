-- pg.geometry on matrices small enough to reckon by hand, and against the definitions in Lua.
local support = require "bind_support"
local core = support.core
local pg = require "perigee"

-- Numbers in [-1, 1) that fp32 holds exactly, the same ones every time.
local function cloud(rows, columns, seed)
  local state, t = seed or 1, {}
  for i = 1, rows do
    t[i] = {}
    for j = 1, columns do
      state = (state * 1103515245 + 12345) % 2147483648
      t[i][j] = (state >> 8) / 2 ^ 22 - 1
    end
  end
  return t
end

local function distance(a, b)
  local sum = 0.0
  for k = 1, #a do sum = sum + (a[k] - b[k]) ^ 2 end
  return math.sqrt(sum)
end

local function near(expected, got, relative)
  assert(math.abs(got - expected) <= relative * math.abs(expected),
    ("%.17g, expected %.17g"):format(got, expected))
end

describe("pg.geometry", function()
  local ctx

  local function tensor(t) return core.tensor(ctx, t) end
  before_each(function() ctx = support.context() end)
  after_each(function()
    support.finish(ctx)
    support.clean()
  end)

  it("finds the diameter with its pair, bracket and cost", function()
    local d = assert(pg.geometry.diameter(tensor { { 0, 0 }, { 3, 4 }, { -3, 4 }, { -3, 4 } }))
    assert.equal(6, d.value)
    assert.same({ 2, 3 }, d.rows)
    assert(d.bracket.lower <= 6 and 6 <= d.bracket.upper and d.multiply_adds > 0)
    near(2 * d.bracket.lower, d.bracket.upper, 1e-12)
    assert.matches("diameter 6 between rows 2 and 3", tostring(d))
    local none = assert(pg.geometry.diameter(tensor { { 1, 2 }, { 1, 2 } }))
    assert.same({ 0, nil, 0, 0 }, { none.value, none.rows, none.bracket.lower, none.bracket.upper })
  end)

  it("finds nearest rows, the smaller one first among equals", function()
    local t = tensor { { 0, 0 }, { 3, 4 }, { 0, 1 }, { 0, -1 }, { 0, 0 } }
    local found = assert(pg.geometry.neighbours(t, 1, 3))
    assert.same({ 5, 3, 4 }, { found[1].row, found[2].row, found[3].row })
    assert.same({ 0, 1, 1 }, { found[1].distance, found[2].distance, found[3].distance })
    assert.equal(0, found[2].cosine)
    assert.equal(4, #assert(pg.geometry.neighbours(t, { row = 2 })))
    near(0.8, assert(pg.geometry.neighbours(t, 2, 1))[1].cosine, 1e-7)
  end)

  it("describes the norms of rows", function()
    local t = tensor { { 3, 4 }, { 0, 0 }, { 0, 1 }, { 2, 0 } }
    local n = assert(pg.geometry.row_norms(t, { bins = 5 }))
    assert.same({ 4, 0, 5, 2, 1, 1 }, { n.count, n.min, n.max, n.mean, n.median, n.zeros })
    near(math.sqrt(30 / 4), n.rms, 1e-15)
    local counts = {}
    for i, bin in ipairs(n.histogram) do
      counts[i] = bin.count
      assert(bin.from == i - 1 and bin.to == i)
    end
    assert.same({ 1, 1, 1, 0, 1 }, counts)
    local log = assert(pg.geometry.row_norms(t, { bins = 1, log = true })).histogram
    assert.same({ { from = 1, to = 5, count = 3 } }, log)
  end)

  it("shares the square out by how often tokens were seen", function()
    local t = tensor { { 3, 4 }, { 0, 0 }, { 0, 1 }, { 2, 0 }, { 0, 2 } }
    local expected = { { least = 0, most = 0, count = 2, share_of_rows = 0.4, share = 25 / 34,
      rms = math.sqrt(12.5) },
      { least = 1, most = 9, count = 2, share_of_rows = 0.4, share = 5 / 34,
        rms = math.sqrt(2.5) },
      { least = 100, most = 999, count = 1, share_of_rows = 0.2, share = 4 / 34, rms = 2.0 } }
    local list = assert(pg.geometry.participation(t, { 0, 0, 9, 100, 1 }))
    for i, bucket in ipairs(list) do assert.same(expected[i], bucket) end
    assert.equal(3, #list)
    assert.error_matches(function() pg.geometry.participation(t, { 1 }) end, "1 counts for 5 rows")
  end)

  it("knows what all rows have in common", function()
    assert.equal(1, pg.geometry.common_mode(tensor { { 1, 2 }, { 1, 2 } }).value)
    assert.equal(0, pg.geometry.common_mode(tensor { { 1, 2 }, { -1, -2 } }).value)
    assert.equal(0, pg.geometry.common_mode(tensor { { 0, 0 } }).value)
    near(math.sqrt(0.5), pg.geometry.common_mode(tensor { { 1, 1 }, { 1, -1 } }).value, 1e-7)
  end)

  it("finds the smallest separation, of all rows and of some", function()
    local t = tensor { { 0, 0 }, { 3, 4 }, { 0, 1 }, { 0, -1 }, { 0.5, 1 }, { 3, 4 } }
    local s = assert(pg.geometry.separation(t))
    assert.same({ 0, 2, 6, 0 }, { s.value, s.rows[1], s.rows[2], s.rho })
    s = assert(pg.geometry.separation(t, { 6, { row = 5 }, 1, 3 }))
    assert.same({ 0.5, 3, 5, 5, 0.1 }, { s.value, s.rows[1], s.rows[2], s.diameter, s.rho })
    s = assert(pg.geometry.separation(tensor { { 1, 2 }, { 1, 2 } }))
    assert.same({ 0, 0, nil }, { s.value, s.diameter, s.rho })
    assert.error_matches(function() pg.geometry.separation(t, { 1, 1 }) end, "is listed twice")
    assert.error_matches(function() pg.geometry.separation(t, { 7, 1 }) end, "rows%[1%] = 7")
    assert.error_matches(function() pg.geometry.separation(t, { 1 }) end, "at least 2 rows")
  end)

  it("encloses all rows in the smallest ball, with a certificate", function()
    -- An equilateral triangle of side 1, a point inside, one on the circle through two of them.
    local h = math.sqrt(3) / 2
    local r = assert(pg.geometry.radius(tensor { { 0, 0 }, { 1, 0 }, { 0.5, h }, { 0.5, 0.3 } }))
    near(1 / math.sqrt(3), r.value, 2e-6) -- the gap, and the sides' rounding to fp32
    near(1 / math.sqrt(3), r.jung, 2e-6)
    assert.equal(3, #r.support)
    near(0.5, r.centre[1], 1e-5)
    local values = cloud(90, 6, 7)
    r = assert(pg.geometry.radius(tensor(values), { gap = 1e-9 }))
    assert(r.bracket.upper - r.bracket.lower <= 1e-9 * r.bracket.upper)
    -- The certificate, from its definition.
    local upper, centre, lower = 0, { 0, 0, 0, 0, 0, 0 }, 0
    for _, row in ipairs(values) do upper = math.max(upper, distance(row, r.centre)) end
    for _, s in ipairs(r.support) do
      for k = 1, 6 do centre[k] = centre[k] + s.weight * values[s.row][k] end
    end
    for _, s in ipairs(r.support) do
      lower = lower + s.weight * distance(values[s.row], centre) ^ 2
    end
    assert(upper <= r.bracket.upper and math.sqrt(lower) >= r.bracket.lower)
    near(upper, r.bracket.upper, 1e-11)
    near(math.sqrt(lower), r.bracket.lower, 1e-11)
    assert(r.jung >= 0.5 and r.jung <= math.sqrt(6 / 14)) -- Jung in 6 dimensions
    local one = assert(pg.geometry.radius(tensor { { 3, 4 } }))
    assert.same({ 0, nil }, { one.value, one.jung })
  end)

  it("reduces a matrix to its singular values", function()
    local s = assert(pg.geometry.spectrum(tensor { { 3, 0 }, { 0, -4 }, { 0, 0 } }))
    near(4, s.value, 1e-14)
    near(3, s.values[2], 1e-14)
    near(25 / 16, s.stable_rank, 1e-14)
    near(4 / 3, s.condition, 1e-14)
    local p, q = 3 / 7, 9 / 25
    near(math.exp(-p * math.log(p) - (1 - p) * math.log(1 - p)), s.effective_rank, 1e-14)
    near(math.exp(-q * math.log(q) - (1 - q) * math.log(1 - q)), s.effective_rank_squares, 1e-14)
    s = assert(pg.geometry.spectrum(tensor { { 1, 2, 3, 4 } })) -- wider than high
    near(math.sqrt(30), s.value, 1e-14)
    assert.equal(1, #s.values)
    s = assert(pg.geometry.spectrum(tensor { { 0, 0 }, { 0, 0 } }))
    assert.same({ 0, 0, 0 }, { s.value, s.stable_rank, s.effective_rank })
    s = assert(pg.geometry.spectrum(tensor { { 1, 1 }, { 1, 1 } }))
    assert.is_nil(s.condition)
    near(1, s.stable_rank, 1e-12)
  end)

  it("refuses what is not finite with its place, and changes nothing", function()
    local values = cloud(40, 5)
    local t = tensor(values)
    for name, f in pairs { diameter = pg.geometry.diameter, common_mode = pg.geometry.common_mode,
      row_norms = pg.geometry.row_norms, separation = pg.geometry.separation,
      radius = pg.geometry.radius, spectrum = pg.geometry.spectrum,
      neighbours = function(x) return pg.geometry.neighbours(x, 1, 2) end } do
      assert(f(t))
      assert.same(values, t:to_table(), name)
      local bad = t:clone()
      bad:set(3, 2, 0 / 0)
      local none, message, code = f(bad)
      assert(none == nil and code == "ENONFINITE", name)
      assert.matches(name .. ".*row 2, column 1 %(counted from 0%)", message)
    end
    assert.error_matches(function() pg.geometry.diameter(3) end, "a tensor or a parameter")
    assert.error_matches(function() return pg.geometry.diametre end, "did you mean 'diameter'")
  end)

  it("agrees with the definition on a cloud", function()
    local values = cloud(60, 7)
    local t, most, least = tensor(values), 0, math.huge
    for i = 1, 60 do
      for j = 1, i - 1 do
        local d = distance(values[i], values[j])
        most, least = math.max(most, d), math.min(least, d)
      end
    end
    near(most, pg.geometry.diameter(t).value, 1e-15)
    near(least, pg.geometry.separation(t).value, 1e-15)
  end)
end)
