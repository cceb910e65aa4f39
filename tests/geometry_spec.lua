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

  it("refuses what is not finite with its place, and changes nothing", function()
    local values = cloud(40, 5)
    local t = tensor(values)
    for name, f in pairs { diameter = pg.geometry.diameter, common_mode = pg.geometry.common_mode,
      row_norms = pg.geometry.row_norms,
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
    local t, best = tensor(values), 0
    for i = 1, 60 do
      for j = 1, i - 1 do best = math.max(best, distance(values[i], values[j])) end
    end
    near(best, pg.geometry.diameter(t).value, 1e-15)
  end)
end)
