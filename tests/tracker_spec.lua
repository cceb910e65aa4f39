-- train/* and performance/*: the acceptance numbers of REFERENCE A2, order of fields, packing.
local tracker = require "perigee.tracker"
local pack = require "perigee.pack"
local random = require "perigee.random"
local core = require "perigee.core"

local function values(fields)
  local t = {}
  for _, field in ipairs(fields) do t[field[1]] = field[2] end
  return t
end

describe("the tracker", function()
  local function two_updates(clipping)
    local t = tracker.new { tokens_per_update = 200, max_norm = 1, clipping = clipping }
    t:add { loss = 2, norm = .5, seconds = 1, wait_seconds = 0.25 }
    t:add { loss = 4, norm = 2, seconds = 3, wait_seconds = 0.5 }
    return t
  end

  it("averages losses and norms over the interval", function()
    local v = values(two_updates(true):fields())
    assert.equal(3, v["train/loss"])
    assert.equal(math.exp(3), v["train/perplexity"])
    assert.equal(1.25, v["train/grad_norm"])
    assert.equal(2, v["train/grad_norm_max"])
    assert.equal(.5, v["train/clipped_fraction"])
    assert.equal(.5, v["train/would_clip_fraction"])
    assert.equal(100, v["performance/tokens_per_second"])
    assert.equal(2, v["performance/seconds_per_update"])
    assert.equal(0.75, v["performance/data_wait_seconds"])
  end)

  it("counts no clipping when it is off", function()
    local v = values(two_updates(false):fields())
    assert.equal(0, v["train/clipped_fraction"])
    assert.equal(.5, v["train/would_clip_fraction"])
  end)

  it("saves and restores its sums, and reports nothing when empty", function()
    local saved = two_updates(true):save()
    local t = tracker.new { tokens_per_update = 200, max_norm = 1, clipping = true }
    assert.is_nil(t:fields())
    t:load(core.json.decode(core.json.encode(saved)))
    assert.same(two_updates(true):fields(), t:fields())
    t:reset()
    assert.is_nil(t:fields())
  end)

  it("orders fields as the published program does", function()
    local ordered = tracker.ordered {
      { "mine/x", 1 }, { "events/checkpoint", 1 }, { "validation/hilbert_step/rms", 1 },
      { "train/loss", 1 }, { "validation/loss", 1 }, { "events/evaluation", 1 },
      { "performance/checkpoint_seconds", 1 }, { "performance/tokens_per_second", 1 },
      { "memory/peak_allocated_gib", 1 }, { "diagnostics/lm_head_step/diameter_exact", 1 },
      { "optimizer/schedule_scale", 1 }, { "progress/update", 1 }, { "mine/x", 2 },
    }
    local names = {}
    for i, entry in ipairs(ordered) do names[i] = entry[1] end
    assert.same({ "progress/update", "optimizer/schedule_scale",
      "diagnostics/lm_head_step/diameter_exact", "train/loss", "performance/tokens_per_second",
      "memory/peak_allocated_gib", "validation/loss", "events/evaluation",
      "validation/hilbert_step/rms", "events/checkpoint", "performance/checkpoint_seconds",
      "mine/x" }, names)
    assert.equal(2, ordered[#ordered][2])
  end)
end)

describe("run.state", function()
  local function round(value)
    return pack.decode(core.json.decode(core.json.encode(pack.encode(value))))
  end

  it("survives JSON exactly", function()
    local value = { 1, 2.5, "x", true, { a = { b = 1 << 62 } }, [10] = "sparse", [-3] = 0.1,
      [1.5] = "float key", ["\255\0"] = "bytes", [true] = false, e = {}, f = 3.0,
      inf = math.huge, ninf = -math.huge, tiny = 5e-324, min = math.mininteger }
    local copy = round(value)
    assert.same(value, copy)
    assert.equal("float", math.type(copy.f))
    assert.equal("integer", math.type(copy[1]))
    local nan = round({ x = 0 / 0 }).x
    assert.is_true(nan ~= nan)
    assert.same({}, round({}))
    assert.same({ number = "inf", bytes = "00" }, round({ number = "inf", bytes = "00" }))
  end)

  it("names the path of what it cannot hold", function()
    local function bad(value, pattern)
      assert.error_matches(function() pack.encode(value) end, pattern)
    end
    bad({ a = { b = { print } } }, "run.state.a.b%[1%] is a function")
    bad({ io.stdout }, "run.state%[1%] is a userdata")
    bad({ x = setmetatable({}, {}) }, "run.state.x is a table with a metatable")
    bad({ [{}] = 1 }, "run.state has a key that is a table")
    local loop = { a = {} }
    loop.a.b = loop
    bad(loop, "run.state.a.b contains itself")
    local deep = {}
    local at = deep
    for _ = 1, 100000 do
      at.x = {}
      at = at.x
    end
    bad(deep, "nested deeper than")
    local shared = { 1 }
    assert.same({ shared, shared }, round({ shared, shared }))
  end)
end)

describe("random numbers", function()
  after_each(function() random.release() end)

  it("continue exactly from a saved state", function()
    local g = random.new(7, "random")
    for _ = 1, 5 do g:draw() end
    g:normal()
    local saved = core.json.decode(core.json.encode(g:save()))
    local expected = { g:draw(), g:draw(10), g:draw(-3, 3), g:normal(1, 2) }
    local h = random.new(0, "random")
    h:load(saved)
    assert.same(expected, { h:draw(), h:draw(10), h:draw(-3, 3), h:normal(1, 2) })
  end)

  it("replace math.random with a seeded one and give it back", function()
    local own = math.random
    local pair = random.pair(3)
    random.activate(pair)
    local first = { math.random(), math.random(5), math.random(2, 4), math.random(0) }
    random.activate(random.pair(3))
    assert.same(first, { math.random(), math.random(5), math.random(2, 4), math.random(0) })
    math.randomseed(11)
    local a = math.random()
    math.randomseed(11)
    assert.equal(a, math.random())
    math.randomseed(1.5)
    assert.not_equal(a, math.random())
    assert.has_error(function() math.random(3, 1) end)
    random.release()
    assert.equal(own, math.random)
  end)

  it("are uniform and normal", function()
    local g = random.new(1, "math")
    local sum, squares, counts = 0, 0, { 0, 0, 0, 0 }
    for _ = 1, 4000 do
      local z = g:normal()
      sum, squares = sum + z, squares + z * z
      local k = g:draw(4)
      counts[k] = counts[k] + 1
    end
    -- Six standard errors: 6/sqrt(4000), 6 sqrt(2/4000), 6 sqrt(4000 * 3/16).
    assert.is_true(math.abs(sum / 4000) < 0.095)
    assert.is_true(math.abs(squares / 4000 - 1) < 0.135)
    for k = 1, 4 do assert.is_true(math.abs(counts[k] - 1000) < 165) end
  end)
end)
