-- Heads of tests of cause in recipes (model.head), the gradient bottleneck, and what else reads a
-- head: training, checkpoints, resumes, estimates, diagnostics, refusals.
local pg = require "perigee"
local support = require "lua_support"
local runs = require "perigee.run"
local core = support.core

local data

local kinds = {
  factors = { rank = 6 }, extra = { extra = 9 }, subspace = { backward_rank = 5 },
  projected = { residual = false },
  all = { rank = 6, extra = 3, backward_rank = 4, backward_seed = 2, residual = false },
}
local names = { "factors", "extra", "subspace", "projected", "all" }

local function recipe(head, changes)
  local all = { model = { head = head }, updates = 6, log = { every = 1 }, hooks = {
    pg.every(2, pg.diagnostics.head_diameter()),
    pg.every(3, pg.diagnostics.validation { tokens = 64, hilbert_panel = 64 }),
    pg.every(3, pg.diagnostics.bottleneck { panel = 64 }) } }
  for key, value in pairs(changes or {}) do all[key] = value end
  return support.recipe(pg, data, all)
end

local function open(rec, options)
  local all = { out = support.folder() .. "/run", device = "cpu", threads = 1 }
  for key, value in pairs(options or {}) do all[key] = value end
  return assert(pg.open(rec, all))
end

local function finish(run)
  for _ in run:updates() do end -- luacheck: ignore 542
end

local function weights_of(run)
  local list = {}
  for i, parameter in ipairs(run.parameters) do list[i] = parameter.value:to_table() end
  return list
end

setup(function() data = support.data() end)
teardown(support.clean)

describe("a head of a test of cause", function()
  for _, name in ipairs(names) do
    local head = kinds[name]
    it(("trains, saves and resumes exactly: %s"):format(name), function()
      local whole <close> = open(recipe(head))
      finish(whole)
      local lines = support.metrics(whole.out)
      local last = lines[#lines]
      assert(last["diagnostics/lm_head_step/diameter_exact"] > 0)
      assert(last["validation/hilbert_step/rms"] > 0)
      local rank = head.rank or 16
      if head.backward_rank then rank = math.min(rank, head.backward_rank) end
      local kept = last["geometry/lm_head/kept_rms"]
      local baseline = last["geometry/lm_head/kept_baseline"]
      assert.near(math.sqrt(rank / (97 + (head.extra or 0))), baseline, 1e-12)
      assert(kept > 0 and kept <= 1 + 1e-5)
      local part = open(recipe(head, { max_updates = 3 }))
      finish(part)
      local out = part.out
      part:close()
      local rest <close> = assert(pg.resume(out, { max_updates = 6, threads = 1,
        recipe = recipe(head), allow_changed_recipe = true }))
      finish(rest)
      assert.same(weights_of(whole), weights_of(rest))
      -- and what the checkpoint says of the head is what was asked for
      local saved = assert(core.checkpoint_config(whole.context, whole.last_checkpoint)).head
      for key, value in pairs(head) do assert.equal(value, saved[key]) end
      local code, text, err = support.perigee { "eval", whole.last_checkpoint, "--json" }
      assert.equal(0, code, err)
      local row = support.core.json.decode(text)
      assert.equal(last["diagnostics/lm_head_step/diameter_exact"],
        row["diagnostics/lm_head_step/diameter_exact"])
    end)

    it(("fits its estimate, in bf16 and with recompute too: %s"):format(name), function()
      for _, changes in ipairs { {}, { compute = "bf16", recompute = "block" } } do
        changes.model = { layers = 2, width = 64, heads = 2, head_dim = 32, context = 32,
          head = head }
        changes.batch, changes.updates = { sequences = 8, micro = 8 }, 3
        local run = open(recipe(head, changes))
        local need, ctx = runs.inner(run).need, run.context
        finish(run)
        local peak = ctx:peak_bytes()
        run:close()
        assert.is_true(peak <= need.total, ("%d of %d"):format(peak, need.total))
      end
    end)
  end

  it("has the same bits with a whole subspace, no extra classes and its residual", function()
    local plain <close> = open(recipe(nil))
    local same <close> = open(recipe { backward_rank = 16, extra = 0, residual = true })
    finish(plain)
    finish(same)
    assert.same(weights_of(plain), weights_of(same))
  end)

  it("has the increment of its product", function()
    local run <close> = open(recipe(kinds.factors))
    for _ = 1, 3 do run:step() end
    local b, a = run.parameters[#run.parameters - 1], run.parameters[#run.parameters]
    assert.equal("lm_head.right.weight", b.name)
    assert.equal(a.name, run.head.name)
    local before = (a.value - a.increment):matmul(b.value - b.increment)
    -- rownorm has no decay: the weights before are exact to a rounding, and entries are near 0.02
    assert(run:head_increment():allclose(a.value:matmul(b.value) - before, 0, 1e-8))
  end)

  it("is refused where it is nonsense", function()
    for text, head in pairs {
      ["model.head.rank = 0"] = { rank = 0 }, ["unknown key 'rnk'"] = { rnk = 1 },
      ["model.head.residual = 1"] = { residual = 1 },
      ["model.head.extra = -1"] = { extra = -1 },
    } do
      assert.error_matches(function() recipe(head) end, text, 1, true)
    end
    for text, case in pairs {
      ["model.head.rank is 17; allowed: 0 to 16"] = { { rank = 17 } },
      ["without model.head.backward_rank"] = { { backward_seed = 3 } },
      ["is frozen and has no gradient to project"] = { { residual = false }, { optimizers = {
        { role = { "embedding", "backbone" }, pg.optim.adamw {} },
        { role = "head", pg.optim.frozen() } } } },
      ["nothing below the head is trained"] = { { backward_rank = 3 }, { optimizers = {
        { role = { "embedding", "backbone" }, pg.optim.frozen() },
        { role = "head", pg.optim.adamw {} } } } },
    } do
      local ok, e = pcall(pg.open, recipe(case[1], case[2]), { out = support.folder() .. "/x" })
      assert.is_false(ok)
      assert(tostring(e):find(text, 1, true), tostring(e))
    end
  end)

  it("does not continue another one", function()
    local run = open(recipe(kinds.subspace, { max_updates = 2 }))
    finish(run)
    local out = run.out
    run:close()
    for text, head in pairs { ["backward_rank 5"] = { backward_rank = 4 },
      ["0 extra classes"] = { extra = 2 } } do
      local resumed, message = pg.resume(out, { recipe = recipe(head),
        allow_changed_recipe = true, threads = 1 })
      assert.is_nil(resumed)
      assert(message:find(text, 1, true), message)
    end
  end)
end)

describe("the gradient bottleneck", function()
  it("is measured at a panel, changes nothing and says what it is", function()
    local run <close> = open(recipe(nil))
    for _ = 1, 4 do run:step() end
    local before, position = weights_of(run), runs.inner(run).core:loader()
    local b = assert(pg.geometry.bottleneck(pg.panel(50), { run = run, positions = true }))
    assert.same(before, weights_of(run))
    assert.same(position, runs.inner(run).core:loader())
    assert.equal(16, b.rank)
    assert.equal(97, b.classes)
    assert.near(math.sqrt(16 / 97), b.baseline, 1e-12)
    assert(b.value == b.rms and b.mean <= b.rms and b.p10 <= b.median and b.median <= b.p90)
    assert(b.condition >= 1 and b.tokens == 50 and b.without_gradient == 0 and #b.deciles == 10)
    local losses = assert(core.panel_losses(runs.inner(run).model, run:panel(50)))
    for i, loss in ipairs(losses) do assert.near(loss, b.positions.loss[i], 4e-6) end
    for i = 2, 10 do assert(b.deciles[i - 1].loss <= b.deciles[i].loss) end
    assert.matches("a random subspace of 16 among 97", tostring(b))
    local share = assert(pg.geometry.column_share(run.head, run.head.gradient))
    assert(share.value > 0 and share.value < 1)
    assert.near(1, share.value ^ 2 + share.residual ^ 2, 1e-12)
    assert.near(1, pg.geometry.column_share(run.head, run.head).value, 1e-5)
  end)

  it("is refused where there is none", function()
    local run <close> = open(recipe(nil, { model = { width = 128, head = { extra = 0 } } }))
    assert.error_matches(function() pg.geometry.bottleneck(8, { run = run }) end, "no bottleneck")
    assert.error_matches(function() pg.geometry.bottleneck(8, { panl = 1 }) end, "'panl'")
    assert.error_matches(function() pg.diagnostics.bottleneck {} end, "panel")
  end)
end)
