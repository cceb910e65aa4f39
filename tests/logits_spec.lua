-- The size of weights, updates and logits: pg.geometry.weight, logits, attention, log_rank, and
-- their diagnostics, against plain loops in fp64.
local pg = require "perigee"
local support = require "lua_support"
local core = support.core

local function near(expected, got, relative)
  assert(math.abs(got - expected) <= relative * math.abs(expected),
    ("%.17g, expected %.17g"):format(got, expected))
end

local data

-- A run of the small recipe that has made `updates` updates.
local function trained(updates, changes)
  local run = assert(pg.open(support.recipe(pg, data, changes),
    { out = support.folder() .. "/run", threads = 1 }))
  for _ = 1, updates do run:step() end
  return run
end

-- ||x||_F, the largest |x_ij|, norms of rows and of columns, the mean row, of a nested table.
local function sizes(x)
  local s = { square = 0.0, largest = 0.0, rows = {}, columns = {}, mean = {} }
  for j = 1, #x[1] do s.columns[j], s.mean[j] = 0.0, 0.0 end
  for i, row in ipairs(x) do
    local square = 0.0
    for j, v in ipairs(row) do
      square = square + v * v
      s.largest = math.max(s.largest, math.abs(v))
      s.columns[j], s.mean[j] = s.columns[j] + v * v, s.mean[j] + v / #x
    end
    s.rows[i], s.square = math.sqrt(square), s.square + square
  end
  s.norm = math.sqrt(s.square)
  return s
end

local function length(list)
  local square = 0.0
  for _, x in ipairs(list) do square = square + x * x end
  return math.sqrt(square)
end

local function noise(rows, columns, seed)
  local random, t = seed, {}
  for i = 1, rows do
    t[i] = {}
    for j = 1, columns do
      random = (random * 1103515245 + 12345) % 2147483648
      t[i][j] = (random // 65536 % 2001 - 1000) / 1024 -- exact in fp32
    end
  end
  return t
end

-- sigma_1 by power iteration.
local function spectral(x)
  local v, top = {}, 0
  for j = 1, #x[1] do v[j] = 1 / j end
  for _ = 1, 3000 do
    local y, w = {}, {}
    for j = 1, #v do w[j] = 0.0 end
    for i, row in ipairs(x) do
      y[i] = 0.0
      for j, a in ipairs(row) do y[i] = y[i] + a * v[j] end
      for j, a in ipairs(row) do w[j] = w[j] + a * y[i] end
    end
    top = length(w)
    for j = 1, #v do v[j] = w[j] / top end
  end
  return math.sqrt(top)
end

describe("pg.geometry.weight", function()
  it("is what the definitions say, on odd sizes", function()
    local ctx <close> = assert(pg.core.context { threads = 1 })
    for _, shape in ipairs { { 1, 1 }, { 7, 3 }, { 3, 7 }, { 131, 17 }, { 1031, 1021 } } do
      local rows, columns = shape[1], shape[2]
      local x, y = noise(rows, columns, rows), noise(rows, columns, 5 * rows)
      local t, u = core.tensor(ctx, x), core.tensor(ctx, y)
      local a, b = sizes(x), sizes(y)
      local norms = rows < 1000
      local w = assert(pg.geometry.weight(t, { update = u, norms = norms }))
      near(a.norm, w.value, 1e-12)
      near(a.norm / math.sqrt(rows * columns), w.rms, 1e-12)
      near(math.min(table.unpack(a.rows)) / math.sqrt(columns), w.row_rms_min, 1e-12)
      near(math.max(table.unpack(a.rows)) / math.sqrt(columns), w.row_rms_max, 1e-12)
      near(math.max(table.unpack(a.rows)) * math.sqrt(columns), w.rms_to_inf, 1e-12)
      near(math.sqrt(math.max(table.unpack(a.columns)) / rows), w.l1_to_rms, 1e-12)
      assert.equal(a.largest, w.largest)
      near(length(a.mean), w.mean_row, 1e-9) -- sums of both signs
      near(b.norm / a.norm, w.update_ratio, 1e-12)
      local product = 0.0
      for i = 1, rows do for j = 1, columns do product = product + x[i][j] * y[i][j] end end
      assert(math.abs(product / (a.norm * b.norm) - w.update_cosine) < 1e-12)
      near(b.norm, w.update.norm, 1e-12)
      if norms then
        near(spectral(x) * math.sqrt(columns / rows), w.rms_to_rms, 1e-6)
        near(spectral(y) * math.sqrt(columns / rows), w.update.rms_to_rms, 1e-6)
      else
        assert.is_nil(w.rms_to_rms)
      end
      assert(w.seconds > 0)
      assert.matches("update/weight", tostring(w))
    end
  end)

  it("refuses what it cannot measure, with the place", function()
    local ctx <close> = assert(pg.core.context { threads = 1 })
    local x = noise(5, 3, 1)
    x[4][2] = 0 / 0
    local bad, good = core.tensor(ctx, x), core.tensor(ctx, noise(5, 3, 2))
    local ok, text, name = pg.geometry.weight(bad, { name = "w" })
    assert.same({ nil, "ENONFINITE" }, { ok, name })
    assert.matches("row 3, column 1", text)
    assert.equal("ENONFINITE", (select(3, pg.geometry.weight(good, { update = bad }))))
    assert.error_matches(function()
      pg.geometry.weight(good, { update = core.tensor(ctx, noise(3, 5, 2)) })
    end, "5, 3")
    assert.error_matches(function() pg.geometry.weight(good, { norm = true }) end, "'norms'")
    assert.error_matches(function() pg.geometry.weight(3) end, "a tensor or a parameter")
    local zero = pg.geometry.weight(core.zeros(ctx, 2, 2), { update = core.zeros(ctx, 2, 2) })
    assert.equal(0, zero.value)
    assert.is_nil(zero.update_ratio)
  end)
end)

describe("what is measured of weights and logits", function()
  setup(function() data = support.data() end)
  teardown(support.clean)

  local function all()
    return {
      pg.every(1, pg.diagnostics.weights { norms = true }, { before_first = true }),
      pg.every(1, pg.diagnostics.logits { panel = { tokens = 40, spread = true }, attention = true,
        rank = true }, { before_first = true }),
      pg.checkpoint { every = 2, keep = "all" },
    }
  end

  -- Four updates; returns the run directory.
  local function run_with(hooks, changes)
    local out = support.folder() .. "/run"
    local recipe = support.recipe(pg, data, { updates = 4, increments = "all",
      log = { every = 1 }, hooks = hooks })
    local run = assert(pg.open(changes and recipe:with(changes) or recipe,
      { out = out, threads = 1 }))
    for _ in run:updates() do pg.random() end
    run:close()
    return out
  end

  it("changes no bit of a run", function()
    local measured = run_with(all())
    local plain = run_with { pg.checkpoint { every = 2, keep = "all" } }
    for _, update in ipairs { 2, 4 } do
      local a = ("%s/checkpoints/%08d/"):format(measured, update)
      local b = ("%s/checkpoints/%08d/"):format(plain, update)
      for _, file in ipairs { "model", "optimizer", "increment" } do
        assert(support.read(a .. file .. ".safetensors") == support.read(b .. file
          .. ".safetensors"), file)
      end
      local x, y = support.json(a .. "state.json"), support.json(b .. "state.json")
      for _, state in ipairs { x, y } do
        for _, key in ipairs { "elapsed_seconds", "final", "recipe", "paths" } do
          state.host[key] = nil
        end
      end
      assert.same(y, x)
    end
    local _, with = support.metrics(measured)
    local _, without = support.metrics(plain)
    for update = 1, 4 do
      for _, name in ipairs { "train/loss", "train/grad_norm", "data/batch_hash" } do
        assert.equal(without[update][name], with[update][name])
      end
    end
  end)

  it("is logged", function()
    local _, lines = support.metrics(run_with(all()))
    local first, line = lines[0], lines[4]
    local names = {}
    for name in pairs(line["weights/rms"]) do names[#names + 1] = name end
    assert.equal(9, #names)
    for _, name in ipairs(names) do
      assert(line["weights/row_rms_min"][name] <= line["weights/rms"][name])
      assert(line["weights/row_rms_max"][name] >= line["weights/rms"][name])
      near(line["weights/update_rms"][name] / line["weights/rms"][name],
        line["weights/update_ratio"][name], 1e-12)
      assert(math.abs(line["weights/update_cosine"][name]) <= 1)
    end
    assert.is_nil(line["weights/rms_to_rms"]["embedding.weight"])
    assert(line["weights/rms_to_rms"]["lm_head.weight"] > 0)
    assert(line["weights/update_rms_to_rms"]["lm_head.weight"] > 0)
    assert(line["weights/seconds"] > 0 and line["weights/lm_head/diameter"] > 0)
    assert.is_nil(first["weights/update_ratio"])
    assert.equal(0, first["weights/lm_head/mean_row_drift"])
    assert(line["logits/rms"] >= line["logits/centered_rms"])
    assert(line["logits/max_abs"] >= line["logits/rms"])
    assert(line["logits/logsumexp_max"] >= line["logits/logsumexp_mean"])
    assert(line["logits/prob_max_mean"] > 0 and line["logits/prob_max_mean"] < 1)
    assert.equal(40, line["logits/tokens"])
    assert.equal(1, #line["logits/attention"])
    near(math.max(table.unpack(line["logits/attention"][1])), line["logits/attention_max"], 0)
    assert(line["logits/attention_max"] <= math.sqrt(8) * (1 + 1e-5))
    assert.equal(17, line["logits/log_rank_bound"])
    assert.equal(17, line["logits/log_rank"])
    assert(line["logits/log_rank_effective"] <= 17 and line["logits/log_rank_stable"] >= 1)
  end)

  it("takes a head of two factors, a selection, and only the increments that are kept", function()
    local _, lines = support.metrics(run_with({
      pg.every(2, pg.diagnostics.weights { metrics = { "update_ratio", "mean_row_drift" } }),
      pg.every(2, pg.diagnostics.logits { panel = 24, rank = true,
        metrics = { "log_rank_bound" } }),
    }, { increments = "head", model = { head = { rank = 5 } } }))
    local logged = {}
    for name in pairs(lines[2]) do
      if name:match "^weights/" or name:match "^logits/" then logged[#logged + 1] = name end
    end
    table.sort(logged)
    assert.same({ "logits/log_rank_bound", "weights/lm_head/mean_row_drift",
      "weights/update_ratio" }, logged)
    assert.equal(6, lines[2]["logits/log_rank_bound"])
    assert(lines[2]["weights/lm_head/mean_row_drift"] > 0)
  end)

  it("can be asked for by hand", function()
    local run <close> = trained(3)
    local panel = run:panel(37)
    local z = assert(pg.geometry.logits(panel, { run = run }))
    assert.equal(z.rms, z.value)
    assert.equal(37, z.tokens)
    assert.equal(panel:hash(), z.panel)
    assert.matches("logsumexp_mean", tostring(z))
    assert.equal(z.rms, pg.geometry.logits(37).rms)
    local a = assert(pg.geometry.attention(panel, { run = run }))
    assert.equal(a.value, a.heads[a.layer][a.head])
    assert.matches("largest attention logit", tostring(a))
    local r = assert(pg.geometry.log_rank(panel, { run = run }))
    assert.equal(17, #r.values)
    assert.matches("rank 17 of at most 17", tostring(r))
    local w = pg.geometry.weight(run.head, { update = run.head.increment })
    near(w.update_ratio, pg.diagnostics.weights()(run).update_ratio[run.head.name], 0)
    assert.equal(run:diameter(run.head.value).value, pg.diagnostics.weights()(run).diameter)
  end)

  it("knows how far the mean row has come", function()
    local run <close> = trained(0)
    run:set_optimizer("head", pg.optim.adamw { lr = 0.1 })
    local before = sizes(run.head.value:to_table())
    for _ = 1, 3 do run:step() end
    local after = sizes(run.head.value:to_table())
    local step = {}
    for j, x in ipairs(after.mean) do step[j] = x - before.mean[j] end
    local found = pg.diagnostics.weights()(run)
    near(length(after.mean), found.mean_row, 1e-9)
    near(length(step), found.mean_row_drift, 1e-9)
  end)

  it("is refused where it cannot be, with the place", function()
    local run <close> = trained(1)
    assert.error_matches(function() pg.diagnostics.logits { panel = 3, ranks = true } end, "'rank'")
    assert.error_matches(function() pg.diagnostics.logits {} end, "panel")
    assert.error_matches(function()
      pg.diagnostics.weights { metrics = { "x" } }
    end, "update_ratio")
    assert.error_matches(function() pg.geometry.log_rank(3, { runs = run }) end, "'run'")
    run:edit("lm_head.weight", function(w) w:set(6, 3, 1 / 0) end)
    for _, name in ipairs { "logits", "log_rank" } do
      local ok, text, code = pg.geometry[name](8, { run = run })
      assert.same({ nil, "ENONFINITE" }, { ok, code })
      assert.matches("position 0 at token 5", text)
    end
    local _, text = pg.geometry.weight(run.head, { name = "lm_head.weight" })
    assert.matches("lm_head.weight: row 5, column 2", text)
    run:edit("lm_head.weight", function(w) w:set(6, 3, 0) end)
    run:edit(run.parameters[2].name, function(w) w:set(1, 1, 0 / 0) end)
    local _, where = pg.geometry.attention(8, { run = run })
    assert.matches("block 0, head 0", where)
    run:edit(run.parameters[2].name, function(w) w:set(1, 1, 0) end) -- or it could not be saved
  end)
end)
