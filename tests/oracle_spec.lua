-- pg.geometry.oracle and its checker: what Lua adds to tests/unit/oracle_test.c.
local support = require "bind_support"
local core = support.core
local pg = require "perigee"

describe("pg.geometry.oracle", function()
  local ctx
  local g

  before_each(function()
    ctx = support.context()
    g = core.tensor(ctx, { { 3, 0 }, { 0, 4 }, { 0, 0 }, { -3, -4 } })
  end)
  after_each(function()
    g = nil
    support.finish(ctx)
    support.clean()
  end)

  it("brackets the optimum and shows its certificates", function()
    local o = assert(pg.geometry.oracle(g))
    local exact = math.sqrt(25 + 12 * math.sqrt(3)) -- Fermat's point
    assert(o.lower <= exact and exact <= o.upper and o.gap <= 1e-6)
    assert.equal(o.gap, (o.upper - o.lower) / o.upper)
    assert.same({ lower = o.lower, upper = o.upper }, o.bracket)
    assert.equal(6, o.rownorm) -- (3 + 4 + 5) / 2
    assert.equal(6 / o.upper, o.rownorm_share.lower)
    assert.same({ 4, 2 }, o.potential:shape())
    assert.same({ 3, 2 }, o.flow.centres:shape())
    assert.same({ 1, 2, 0, 3 }, o.flow.clusters:to_table())
    assert.matches("^T%(G%) in %[6%.766.*RowNorm keeps 88%.67", tostring(o))
    local gain = (g * o.potential):sum() / pg.geometry.diameter(o.potential).value
    assert(math.abs(gain - o.lower) < 1e-6)
  end)

  it("is checked from the certificates alone", function()
    local o = assert(pg.geometry.oracle(g))
    local v = assert(pg.geometry.check_oracle(g, o))
    assert(v.ok and v.lower_holds and v.upper_holds and v.diameter <= 1 and v.problem == nil)
    assert(v.lower >= o.lower and v.upper <= o.upper)
    o.lower = 7
    v = assert(pg.geometry.check_oracle(g, o))
    assert.same({ false, false, true }, { v.ok, v.lower_holds, v.upper_holds })
    assert.matches("lower bound: 7 is claimed, the potential proves 6%.766.*%(0%.23. less%)",
      tostring(v))
    o.lower = 6
    o.flow.weights = o.flow.weights * 0.9
    v = assert(pg.geometry.check_oracle(g, o))
    assert.same({ true, false }, { v.lower_holds, v.upper_holds })
    assert.matches("upper bound: .* out of balance by .*, row", v.problem)
  end)

  it("takes its options, and refuses what it cannot use", function()
    local rough = assert(pg.geometry.oracle(g, { gap = 0.5, seconds = 5 }))
    assert(rough.gap <= 0.5 and rough.iterations == 1)
    assert.has_error(function() pg.geometry.oracle(g, { gaps = 1 }) end)
    for key, values in pairs { gap = { 0, -1, 2, 0 / 0, 1 / 0, "1" },
      seconds = { 0, -1, 0 / 0, "1" } } do
      for _, value in ipairs(values) do
        local ok, e = pcall(pg.geometry.oracle, g, { [key] = value })
        assert(not ok and tostring(e):find("oracle." .. key, 1, true), tostring(e))
      end
    end
    assert.has_error(function() pg.geometry.oracle {} end)
    local pair = assert(pg.geometry.oracle(core.tensor(ctx, { { 1, 2 }, { 3, 1 } })))
    local other = core.zeros(ctx, 3, 2)
    assert.has_error(function() pg.geometry.check_oracle(other, rough) end)
    assert.has_error(function() pg.geometry.check_oracle(g, { lower = 0 }) end)
    for _, value in ipairs { 0 / 0, 1 / 0, -1 / 0 } do
      local bad = core.tensor(ctx, { { 1, 2 }, { value, 1 } })
      for _, f in ipairs { pg.geometry.oracle, pg.geometry.check_oracle } do
        local ok, text, name = f(bad, f == pg.geometry.check_oracle and pair or nil)
        assert.same({ nil, "ENONFINITE" }, { ok, name })
        assert.matches("row 1, column 0", text)
      end
    end
  end)
end)

describe("the oracle of a run", function()
  local lua = require "lua_support"

  it("is a diagnostic of the head's gradient and increment", function()
    local out = support.folder() .. "/run"
    local run = assert(pg.open(lua.recipe(pg, lua.data(), { updates = 2, hooks = {
      pg.every(1, pg.diagnostics.oracle { gap = 1e-2, seconds = 60 }) } }), { out = out,
      threads = 1 }))
    local seen = {}
    for update in run:updates() do
      local g, s = run.head.gradient, run.head.increment
      local o = pg.geometry.oracle(g, { gap = 1e-3 })
      seen[update] = { o, -(g * s):sum() / math.max(pg.geometry.diameter(s).value, 1e-30) }
    end
    run:close()
    for update, line in ipairs((lua.metrics(out))) do
      if seen[update] and line["geometry/oracle"] then
        local o, gain = table.unpack(seen[update])
        local interval = line["geometry/oracle"]
        assert(interval[1] <= o.upper and interval[2] >= o.lower)
        assert(1 - interval[1] / interval[2] <= 1e-2)
        local share = line["geometry/oracle_share"]
        assert(share[1] <= o.rownorm / o.lower and share[2] >= o.rownorm / o.upper)
        assert(share[1] > 0.7 and share[2] <= 1)
        local mine = line["geometry/oracle_increment_share"]
        assert(mine == nil or mine[1] <= gain / o.lower * (1 + 1e-6) + 1e-9)
        seen[update] = nil
      end
    end
    assert.same({}, seen)
    assert.has_error(function() pg.diagnostics.oracle { gap = 0 } end)
    support.clean()
  end)
end)
