-- Learning-rate schedules: SPEC §3 and the acceptance numbers of REFERENCE A2.
local pg = require "perigee"

-- fp64 on both sides; the reference numbers have 16 digits.
local function near(expected, actual)
  assert(math.abs(expected - actual) <= 4e-15 * math.max(1, math.abs(expected)),
    ("expected %.17g, got %.17g"):format(expected, actual))
end

describe("pg.schedule", function()
  it("warmup_cosine gives the published scales", function()
    local paper = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 }
    local function at(total, points)
      for t, expected in pairs(points) do near(expected, paper:scale(t, total)) end
    end
    at(7083, { [0] = 0, [1] = 0.0014124293785310734, [354] = 0.5, [707] = 0.998587570621469,
      [708] = 1, [709] = 0.9999999453414462, [3541] = 0.628117410419696, [3895] = 0.55,
      [7081] = 0.10000005465855379, [7082] = 0.1 })
    at(14464, { [7232] = 0.6280703753021374, [14462] = 0.10000001310570693 })
    at(24406, { [12203] = 0.628092380460081, [24404] = 0.10000000460277607 })
  end)

  it("warmup_cosine runs to zero with floor 0", function()
    local s = pg.schedule.warmup_cosine { warmup = 0.5, floor = 0 }
    local expected = { 0, .25, .5, .75, 1, .8535533905932737, .5, .14644660940672627, 0 }
    for i, scale in ipairs(s:values(9)) do near(expected[i], scale) end
  end)

  it("truncates the warmup without an epsilon: 0.29 of 100 is 28", function()
    local s = pg.schedule.warmup_cosine { warmup = 0.29, floor = 0.1 }
    near(27 / 28, s:scale(27, 100))
    near(1, s:scale(28, 100))
  end)

  it("is finite at every edge of warmup and length, or refused", function()
    for _, total in ipairs { 1, 2, 10 } do
      for _, warmup in ipairs { 0, 1, total - 1, total, total + 1 } do
        local ok, s = pcall(pg.schedule.warmup_cosine, { warmup = warmup / total, floor = 0.1 })
        if warmup >= total then
          assert.is_false(ok)
          assert.matches("warmup = .* is not allowed: expected a number >= 0 and < 1", s)
        else
          for t, scale in ipairs(s:values(total)) do
            assert(scale == scale and scale >= 0 and scale <= 1, ("%d of %d"):format(t, total))
          end
          -- One decay update runs at the floor.
          if total - warmup == 1 then near(0.1, s:scale(total - 1, total)) end
        end
      end
    end
  end)

  it("constant, linear, wsd and cooldown have the stated shapes", function()
    assert.same({ 1, 1, 1 }, pg.schedule.constant():values(3))
    local linear = pg.schedule.linear { warmup = 0.2, floor = 0.25 }:values(10)
    near(0, linear[1])
    near(0.5, linear[2])
    near(1, linear[3])
    near(0.25, linear[10])
    near(1 - 0.75 * 1 / 7, linear[4])
    local wsd = pg.schedule.wsd { warmup = 0.2, decay = 0.3, floor = 0 }:values(10)
    for i = 3, 7 do near(1, wsd[i]) end
    near(1, wsd[8])
    near(2 / 3, wsd[9])
    near(1 / 3, wsd[10]) -- the floor is where the update after the last would be
    local cooldown = pg.schedule.cooldown { from = 100, length = 5, shape = "sqrt" }
    near(1, cooldown:scale(99, 105))
    near(1, cooldown:scale(100, 105))
    near(1 - math.sqrt(2 / 5), cooldown:scale(102, 105))
    near(1 - math.sqrt(4 / 5), cooldown:scale(104, 105))
    near(0, cooldown:scale(200, 300))
  end)

  it("dump lists every update with its scale", function()
    local text = pg.schedule.linear { floor = 0 }:dump(3)
    assert.equal("update\tscale\n0\t1\n1\t0.5\n2\t0\n", text)
    local rec = pg.recipe {
      model = { layers = 1, width = 8, heads = 1, context = 8 }, data = { path = "x" },
      batch = { sequences = 1 }, updates = 4, schedule = pg.schedule.linear {},
      optimizers = { { role = { "embedding", "backbone", "head" }, pg.optim.sgd { lr = 1 } } },
    }
    -- The recipe's own schedule knows its length: a heading and four updates.
    assert.equal(5, select(2, rec.schedule:dump():gsub("\n", "")))
  end)

  it("refuses a function's bad scale and names where the function is", function()
    local pgs = require "perigee.schedule"
    local s = pgs.from(function() return 0 / 0 end)
    local ok, message = pcall(s.scale, s, 3, 10)
    assert.is_false(ok)
    assert.matches("schedule_spec.lua:%d+: the schedule gave .*nan at update 3 of 10", message)
    s = pgs.from(function() return "1" end)
    assert.error_matches(function() s:scale(0, 1) end, 'gave "1"')
    s = pgs.from(function() return -1 end)
    assert.error_matches(function() s:scale(0, 1) end, "gave %-1")
  end)

  it("suggests names and keys", function()
    assert.error_matches(function() return pg.schedule.warmup_cosin end,
      "did you mean 'warmup_cosine'")
    assert.error_matches(function() pg.schedule.wsd { warmpu = 0.1 } end,
      "unknown key 'warmpu'; did you mean 'warmup'")
    assert.error_matches(function() pg.schedule.wsd { warmup = 0.7, decay = 0.5 } end,
      "at most 1")
  end)
end)
