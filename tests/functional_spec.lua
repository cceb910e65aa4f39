-- pg.panel and the functional size of a change of the head, in a run, by hand and from hooks.
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

describe("a panel", function()
  setup(function() data = support.data() end)
  teardown(support.clean)

  it("is one object for the recipe, the run and what measures", function()
    local panel = pg.panel { tokens = 40, ranks = 2, micro = 1 }
    assert.equal("panel of 40 positions", tostring(panel))
    assert.error_matches(function() panel:hash() end, "once it has been read")
    local run <close> = trained(2, { hooks = { pg.every(2, pg.diagnostics.validation {
      tokens = 64, hilbert_panel = panel }) } })
    local hash = panel:hash()
    assert.matches("^%x+$", hash)
    assert.equal(("panel %s of 40 positions"):format(hash), tostring(panel))
    local read = run:panel(panel)
    assert.equal(hash, read:hash())
    assert.equal(tostring(read), tostring(panel))
    assert.same(read:lengths(), panel:lengths())
    assert.equal(hash, run:panel({ tokens = 40, ranks = 2, micro = 1 }):hash())
    assert.equal(run:hilbert(panel), run:hilbert(read))
    local out = run.out
    run:close()
    local _, by_update = support.metrics(out)
    assert.equal(hash, by_update[2]["validation/hilbert_step/panel"])
  end)

  it("can be spread over the stream", function()
    local run <close> = trained(0)
    local spread, first = run:panel { tokens = 32, spread = true }, run:panel(32)
    assert.not_equal(spread:hash(), first:hash())
    local all = {} -- 187 sequences of 8 in the split: numbers 0, 46, 93, 140
    local source = support.read(data .. "/text_val_000000.bin")
    for k = 0, 3 do
      all[#all + 1] = string.unpack("<I2", source, 1025 + 2 * 8 * (187 * k // 4))
    end
    for k = 0, 3 do assert.same({ all[k + 1] }, (spread:context(8 * k + 1, 1))) end
    assert.equal("panel of 32 positions, spread", tostring(pg.panel { tokens = 32, spread = true }))
  end)

  it("is refused with the place of the mistake", function()
    assert.error_matches(function() pg.panel { token = 3 } end, "did you mean 'tokens'")
    assert.error_matches(function() pg.panel { tokens = 0 } end, "pg.panel.tokens = 0")
    assert.error_matches(function() pg.panel "x" end, "pg.panel{…}")
    assert.error_matches(function() pg.panel { tokens = 3, spread = 1 } end, "spread = 1")
    assert.error_matches(function() return pg.panel(3).size end, "a panel has no 'size'")
  end)
end)

describe("pg.geometry.hilbert", function()
  setup(function() data = support.data() end)
  teardown(support.clean)

  it("agrees with run:hilbert and says more", function()
    local run <close> = trained(3)
    local panel = run:panel(50)
    local h = assert(pg.geometry.hilbert(run.head.increment, panel,
      { backward = true, positions = true, worst = 2 }))
    local rms, ranges = run:hilbert(panel, nil, true)
    near(rms, h.value, 1e-6)
    assert.equal(h.value, h.rms)
    assert.equal(50, h.tokens)
    assert.equal(panel:hash(), h.panel)
    near(run:diameter(run.head.increment).value, h.diameter, 0)
    near(h.rms / (h.diameter * 4), h.utilisation, 1e-12)
    local top = math.max(table.unpack(ranges))
    near(top, h.max, 1e-6)
    assert.equal(2, #h.worst)
    near(top, h.worst[1].range, 1e-6)
    assert.equal(h.positions.high[h.worst[1].position], h.worst[1].high)
    for i = 1, 50 do
      local p = h.positions
      assert(math.abs(p.loss_change[i]) <= p.range[i] and p.tv[i] <= p.range[i] / 4)
      assert(p.backward[i] <= math.min(p.bound_before[i], p.bound_after[i]) * (1 + 1e-5))
      near(ranges[i], p.range[i], 1e-6)
    end
    assert(h.loss_used > 0 and h.loss_used <= 1 and h.backward_used > 0 and h.backward_used <= 1)
    assert(h.kl.mean > 0 and h.fisher_rao.max >= h.fisher_rao.mean and h.seconds > 0)
    assert.matches("Hilbert RMS", tostring(h))
    assert.matches("utilisation", tostring(h))
    -- Any description of the panel, and the run by name or because it is the only one.
    assert.equal(h.rms, pg.geometry.hilbert(run.head.increment, 50).rms)
    assert.equal(h.rms, pg.geometry.hilbert(run.head.increment, pg.panel(50), { run = run }).rms)
    assert(pg.geometry.hilbert(run.head, pg.panel(50)).rms > h.rms)
  end)

  it("measures the change of a loss that a change of weights makes", function()
    local run <close> = trained(3)
    local panel = run:panel(40)
    local s = run.head.increment
    local model = run.head -- p and q by the losses of the weights before and after
    local after = assert(core.panel_losses(require("perigee.run").inner(run).model, panel))
    run:edit(model, function(w) w:sub_(s) end)
    local before = assert(core.panel_losses(require("perigee.run").inner(run).model, panel))
    local ahead = assert(pg.geometry.hilbert(s, panel, { before = true, positions = true }))
    run:edit(model, function(w) w:add_(s) end)
    local h = assert(pg.geometry.hilbert(s, panel, { positions = true }))
    for i = 1, 40 do
      -- losses near 5 in fp32
      assert(math.abs(after[i] - before[i] - h.positions.loss_change[i]) < 4e-6)
      assert(math.abs(before[i] - h.positions.loss[i]) < 4e-6)
      assert(math.abs(h.positions.loss_change[i] - ahead.positions.loss_change[i]) < 1e-6)
    end
  end)

  it("refuses what it cannot measure", function()
    local run <close> = trained(1)
    local s = run.head.increment
    assert.error_matches(function() pg.geometry.hilbert(s, 8, { befor = true }) end, "'before'")
    assert.error_matches(function() pg.geometry.hilbert(s, 8, { run = 3 }) end, "expected a run")
    assert.error_matches(function() pg.geometry.hilbert(4, 8) end, "a tensor or a parameter")
    assert.error_matches(function() pg.geometry.hilbert(run.embedding.value:rows(1, 3), 8) end,
      "like the head")
    local bad = s:clone()
    bad:set(5, 7, 0 / 0)
    local ok, text, name = pg.geometry.hilbert(bad, 8)
    assert.same({ nil, "ENONFINITE" }, { ok, name })
    assert.matches("row 4, column 6", text)
    local other <close> = trained(0)
    assert.error_matches(function() pg.geometry.hilbert(s, 8) end, "run = …")
    assert(other)
  end)

  it("compares a run with its start, and with a checkpoint", function()
    local run <close> = trained(4, { hooks = { pg.checkpoint { at = { 2 } } } })
    local panel = run:panel(60)
    local h = assert(pg.geometry.between("start", run, panel, { backward = true }))
    assert(h.rms > 0 and h.loss_used <= 1 and h.backward_used <= 1 and h.diameter > 0)
    local since = assert(pg.geometry.between(run.out .. "/checkpoints/00000002", run, panel))
    assert(since.rms > 0 and since.rms < h.rms)
    local other <close> = trained(0)
    assert.error_matches(function() pg.geometry.between(other, run, panel) end, "one context")
    assert.same({ nil, "ENOENT" }, (function(...) return { (...), (select(3, ...)) } end)(
      pg.geometry.between("/nowhere", run, panel)))
    assert.error_matches(function() pg.geometry.between(3, run, panel) end, '"start"')
  end)
end)

describe("the diagnostics of an update", function()
  setup(function() data = support.data() end)
  teardown(support.clean)

  local function all()
    return {
      pg.every(1, pg.diagnostics.head_diameter()),
      pg.every(1, pg.diagnostics.validation { tokens = 64, hilbert_panel = 24 },
        { before_first = true }),
      pg.every(1, pg.diagnostics.functional { panel = { tokens = 40, spread = true },
        backward = true }),
      pg.every(2, pg.diagnostics.functional { panel = 24, of = "start" }),
      pg.every(1, pg.diagnostics.first_order { predict = true }),
      pg.every(1, pg.diagnostics.noise_scale()),
      pg.checkpoint { every = 3, keep = "all" },
    }
  end

  -- Six updates; returns the run directory.
  local function run_with(hooks)
    local out = support.folder() .. "/run"
    local run = assert(pg.open(support.recipe(pg, data, { updates = 6, increments = "all",
      log = { every = 1 }, hooks = hooks }), { out = out, threads = 1 }))
    for _ in run:updates() do pg.random() end
    run:close()
    return out
  end

  it("change no bit of a run", function()
    local measured = run_with(all())
    local plain = run_with { pg.checkpoint { every = 3, keep = "all" } }
    for _, update in ipairs { 3, 6 } do
      local a = ("%s/checkpoints/%08d/"):format(measured, update)
      local b = ("%s/checkpoints/%08d/"):format(plain, update)
      for _, file in ipairs { "model", "optimizer", "increment" } do
        assert(support.read(a .. file .. ".safetensors") == support.read(b .. file
          .. ".safetensors"), file)
      end
      local x, y = support.json(a .. "state.json"), support.json(b .. "state.json")
      -- Counters, data position, random states: all but time, folder and measured values.
      assert(x.host.random and x.host.state)
      for _, state in ipairs { x, y } do
        for _, key in ipairs { "elapsed_seconds", "final", "recipe", "paths" } do
          state.host[key] = nil
        end
      end
      assert.same(y, x)
    end
    local _, with = support.metrics(measured)
    local _, without = support.metrics(plain)
    for update = 1, 6 do
      for _, name in ipairs { "train/loss", "train/grad_norm", "data/batch_hash" } do
        assert.equal(without[update][name], with[update][name])
      end
    end
  end)

  it("log what they measure", function()
    local _, lines = support.metrics(run_with(all()))
    local line = lines[6]
    near(line["diagnostics/lm_head_step/diameter_exact"], line["functional/step/diameter"], 0)
    near(line["functional/step/hilbert_rms"]
      / (line["functional/step/diameter"] * math.sqrt(16)), line["functional/step/utilisation"],
      1e-12)
    assert(line["functional/step/backward_used"] <= 1 and line["functional/step/seconds"] > 0)
    assert.equal(2, #line["functional/step/extreme_tokens"])
    assert.equal(40, line["functional/step/tokens"])
    assert(line["functional/start/hilbert_rms"] > line["functional/step/hilbert_rms"])
    assert.equal(24, line["functional/start/tokens"])
    near(line["first_order/gain"] / line["first_order/oracle"], line["first_order/ratio"], 1e-12)
    assert(line["first_order/gain"] > 0 and line["first_order/cosine_rownorm"] > 0)
    assert(line["first_order/common"] < 1e-5)
    near(line["first_order/actual"] / line["first_order/predicted"],
      line["first_order/actual_to_predicted"], 1e-12)
    assert.equal(2, line["noise/small"])
    near((4 * line["noise/large_square"] - 2 * line["noise/small_square"]) / 2,
      line["noise/gradient_square"], 1e-9)
    near(line["train/grad_norm"] ^ 2, line["noise/large_square"], 1e-9)
    -- Scale 0 at the first update: nothing moved, and what is 0/0 is left out.
    assert.equal(0, lines[1]["functional/step/hilbert_rms"])
    assert.equal(0, lines[1]["first_order/gain"])
    assert.is_nil(lines[1]["first_order/ratio"])
    assert.is_nil(lines[1]["functional/step/extreme_tokens"])
  end)

  it("log what was selected", function()
    local _, lines = support.metrics(run_with {
      pg.every(6, pg.diagnostics.functional { panel = 16, metrics = { "kl", "tv" } }),
      pg.every(6, pg.diagnostics.first_order { metrics = { "gain" } }),
    })
    local names = {}
    for name in pairs(lines[6]) do
      if name:match("^functional/") or name:match("^first_order/") then names[#names + 1] = name end
    end
    table.sort(names)
    assert.same({ "first_order/gain", "functional/step/kl", "functional/step/tv" }, names)
  end)

  it("refuse what cannot work before the run begins", function()
    local function opened(changes)
      local ok, text = pcall(function()
        local _ <close> = assert(pg.open(support.recipe(pg, data, changes),
          { out = support.folder() .. "/run", threads = 1 }))
      end)
      assert(not ok)
      return tostring(text)
    end
    assert.matches('increments = "all"', opened { hooks = {
      pg.every(1, pg.diagnostics.first_order { predict = true }) } })
    assert.matches("one micro%-batch", opened { batch = { sequences = 4, micro = 4 }, hooks = {
      pg.every(1, pg.diagnostics.noise_scale()) } })
    assert.matches("9000", opened { hooks = {
      pg.every(1, pg.diagnostics.functional { panel = 9000 }) } })
    assert.error_matches(function()
      pg.diagnostics.functional { panel = 3, metrics = { "kk" } }
    end, "hilbert_rms")
    assert.error_matches(function() pg.diagnostics.functional {} end, "panel")
  end)

  it("can be called by hand", function()
    local run <close> = trained(3)
    local f = pg.diagnostics.first_order()(run)
    local s, g = run.head.increment, run.head.gradient
    near(-(g * s):sum(), f.gain, 1e-5)
    assert.matches("RowNorm", tostring(f))
    -- RowNorm's own increment without its momentum: the cosine is that of the momentum.
    local unit = g:div_rows(g:row_norms())
    near(1, pg.geometry.first_order(g, unit:mul(-1e-3)).cosine_rownorm, 1e-5)
    assert.equal(f.gain, f.value)
  end)
end)
