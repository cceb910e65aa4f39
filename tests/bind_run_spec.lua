-- Models and runs from Lua: configuration, the golden trajectory, checkpoints, misuse.
local support = require "bind_support"
local core = support.core

local golden = assert(core.json.decode(assert(core.fs.read("tests/golden/trajectory/expected.json"))))
local close = function(got, want, relative)
  assert.is_true(math.abs(got - want) <= relative * math.abs(want),
    ("got %.17g, want %.17g"):format(got, want))
end

describe("a model configuration", function()
  local sizes = { layers = 2, width = 64, heads = 2, vocab = 11, context = 8 }

  it("is completed and counted", function()
    local c = core.model_config(sizes)
    assert.are.same({
      layers = 2, width = 64, heads = 2, head_dim = 64, mlp = 256, vocab = 11, context = 8,
      norm_eps = 1e-6, rope_base = 1e4, logit_scale = 1.0,
      init_std = { embedding = 0.02, backbone = 0.02, head = 0.02 },
      weights = 2 * (4 * 64 * 128 + 3 * 64 * 256) + 2 * 11 * 64,
    }, c)
    assert.are.same(c, core.model_config(c))
    assert.are.equal(185680896, core.model_config { preset = "190m" }.weights)
    assert.are.equal(0.5, core.model_config { preset = "190M", init_std = 0.5 }.init_std.head)
    local std = core.model_config { preset = "380m", init_std = { head = 0 } }.init_std
    assert.are.same({ embedding = 0.02, backbone = 0.02, head = 0.0 }, std)
  end)

  it("refuses what cannot be", function()
    local function with(key, value)
      local c = {}
      for k, v in pairs(sizes) do c[k] = v end
      c[key] = value
      return function() return core.model_config(c) end
    end
    assert.error_matches(with("head_dim", 7), "head_dim.*7.*even")
    assert.error_matches(with("vocab", 1), "vocab.*1")
    assert.error_matches(with("vocab", nil), "vocab")
    assert.error_matches(with("width", -3), "model.width: an integer of at least 0 expected, got number %-3")
    assert.error_matches(with("width", "64"), 'got string "64"')
    assert.error_matches(with("layer", 3), "unknown key 'layer'")
    assert.error_matches(with("init_std", { haed = 1 }), "model.init_std: unknown key 'haed'")
    assert.error_matches(with("weights", 5), "weights is 5 but these sizes have")
    assert.error_matches(with("preset", "1b"), "model.preset:.*1b")
    assert.error_matches(function() core.model_config "190m" end, "model: a table expected")
  end)
end)

describe("a model", function()
  local ctx
  before_each(function() ctx = support.context() end)
  after_each(function()
    support.finish(ctx)
    support.clean()
  end)

  it("shows its parameters", function()
    local model = support.golden_model(ctx)
    local list = model:parameters()
    assert.are.equal(2 + 2 * 7, #list)
    local first, head = list[1], model:find "lm_head.weight"
    assert.are.same({ "embedding", 97, 32, 0 }, { first.role, first.rows, first.columns, first.updates })
    assert.are.equal("head", head.role)
    assert.is_nil(head.layer)
    assert.are.equal(2, model:find "model.layers.1.self_attn.q_proj.weight".layer)
    assert.is_nil(head.gradient)
    assert.is_nil(head.increment)
    assert.is_nil(head.optimizer)
    assert.are.same({}, head.slots)
    assert.are.same({ 97, 32 }, head.value:shape())
    assert.error_matches(function() return head.colour end, "no field 'colour'.*slots")
    assert.error_matches(function() return head[1] end, "string expected")
  end)

  it("is drawn, copied, saved and loaded", function()
    local a = support.golden_model(ctx)
    local b = assert(core.model(ctx, a:config()))
    assert.is_true(a:init(7))
    assert.is_true(b:copy(a))
    local weight = a:find "lm_head.weight".value
    assert.is_true(support.same_bits(weight, b:find "lm_head.weight".value))
    close(weight:norm() / math.sqrt(97 * 32), 0.02, 0.05)
    local file = support.folder() .. "/model.safetensors"
    assert.is_true(b:save(file))
    assert.is_true(a:init(8))
    assert.is_false(support.same_bits(weight, b:find "lm_head.weight".value))
    assert.is_true(a:load(file))
    assert.is_true(support.same_bits(weight, b:find "lm_head.weight".value))
    assert.are.equal("ENOENT", select(3, a:load(file .. "x")))
    assert.error_matches(function() a:init "seed" end, "seed: an integer")
    local other = core.model(ctx, { layers = 0, width = 8, heads = 1, vocab = 5, context = 4 })
    assert.has_error(function() other:copy(a) end)
  end)

  it("continues a text, reproducibly", function()
    local model = support.golden_model(ctx)
    local first = core.generate(model, { 1, 2, 3 }, { temperature = 0 })
    assert.are.equal(first, core.generate(model, { 1, 2, 3 }, { temperature = 0, seed = 9 }))
    local drawn = core.generate(model, { 1, 2, 3 }, { temperature = 1, seed = 9, index = 4 })
    assert.are.equal(drawn, core.generate(model, { 1, 2, 3 }, { seed = 9, index = 4 }))
    local long = {}
    for i = 1, 50 do long[i] = i end
    local tail = { table.unpack(long, 35, 50) }
    assert.are.equal(core.generate(model, tail, { temperature = 0 }),
      core.generate(model, long, { temperature = 0 }))
    assert.error_matches(function() core.generate(model, { 97 }) end, "id from 0 to 96, got number 97")
    assert.error_matches(function() core.generate(model, {}) end, "at least one token")
    assert.error_matches(function() core.generate(model, { 1 }, { temperature = -1 }) end, "temperature")
    assert.error_matches(function() core.generate(model, { 1 }, { topk = 1 }) end, "unknown key 'topk'")
  end)
end)

describe("a run", function()
  local ctx, model, run
  before_each(function()
    ctx = support.context()
    model = support.golden_model(ctx)
  end)
  after_each(function()
    model, run = nil, nil
    support.finish(ctx)
    support.clean()
  end)

  -- Tolerances of SPEC section 7 for fp32.
  for _, head in ipairs { "adamw", "rownorm" } do
    it("reproduces the golden trajectory with the " .. head .. " head", function()
      run = support.golden_run(model)
      local indices = support.assign_golden(run, model, head)
      local panel = assert(support.golden_panel(ctx, 200))
      local warmup = assert(core.schedule_warmup(0.1, 40))
      for update, want in ipairs(golden.runs[head]) do
        local scale = core.warmup_cosine(update - 1, 40, warmup, 0.1)
        for _, index in ipairs(indices) do run:set(index, { scale = scale }) end
        local step = assert(run:step())
        assert.are.equal(update, step.update)
        close(step.loss, want.loss, 1e-6)
        close(step.norm, want.grad_norm, 5e-6)
        local d = core.diameter(model:find "lm_head.weight".increment)
        if update == 1 then
          assert.are.equal(0, d.value)
          assert.is_nil(d.rows)
        else
          close(d.value, want.head_step_diameter, 5e-6)
          assert.are.same(want.diameter_pair, { d.rows[1] - 1, d.rows[2] - 1 })
        end
        if want.validation_loss then
          local validation = assert(run:validate { tokens = 3 * 8 * 16 })
          close(validation.loss, want.validation_loss, 1e-6)
        end
        if want.hilbert_rms then close(run:hilbert(panel), want.hilbert_rms, 5e-6) end
      end
      assert.are.equal(40, run:updates())
      assert.are.equal(40 * 8 * 16, run:tokens())
      assert.are.equal(40, model:find "lm_head.weight".updates)
    end)
  end

  it("tells what a step did", function()
    run = support.golden_run(model)
    support.assign_golden(run, model, "adamw")
    local step = assert(run:step())
    assert.matches("^%x+$", step.batch_hash)
    assert.are.equal(16, #step.batch_hash)
    assert.are.equal(8 * 16, step.tokens)
    assert.is_true(step.seconds > 0 and step.wait_seconds >= 0)
    close(step.factor, math.min(1, 1 / (step.norm + 1e-6)), 1e-6)
    local head = model:find "lm_head.weight"
    assert.are.equal("adamw", head.optimizer)
    assert.are.same({ 97, 32 }, head.gradient:shape())
    assert.are.same({ 97, 32 }, head.slots.v:shape())
    assert.is_nil(model:parameters()[1].increment)
    local position = run:loader()
    assert.are.equal(3, position.shards)
    assert.are.equal(1, position.batches)
  end)

  it("counts the same batches however they are split", function()
    local hashes = {}
    for i, micro in ipairs { 1, 2, 8 } do
      run = support.golden_run(model, { micro = micro })
      support.assign_golden(run, model, "adamw")
      hashes[i] = run:step().batch_hash .. run:step().batch_hash
      run:close()
    end
    assert.are.same({ hashes[1], hashes[1] }, { hashes[2], hashes[3] })
  end)

  it("keeps all increments when asked to", function()
    run = support.golden_run(model, { keep_increments = "all" })
    support.assign_golden(run, model, "rownorm")
    assert(run:step())
    for _, p in ipairs(model:parameters()) do assert.are.same(p.value:shape(), p.increment:shape()) end
    assert.error_matches(function() support.golden_run(model, { keep_increments = "some" }) end,
      'keep_increments: "head" or "all" expected, got "some"')
  end)

  it("freezes parameters", function()
    run = support.golden_run(model)
    support.assign_golden(run, model, "adamw")
    run:assign { optimizer = core.optimizer "frozen", parameters = support.by_role(model, "backbone") }
    local p = support.by_role(model, "backbone")[1]
    local before = p.value:clone()
    assert(run:step())
    assert(run:step())
    assert.is_true(support.same_bits(before, p.value))
    assert.is_nil(p.gradient)
    assert.are.equal("frozen", p.optimizer)
  end)

  it("saves and continues bit for bit", function()
    local folder = support.folder()
    run = support.golden_run(model)
    support.assign_golden(run, model, "rownorm")
    for _ = 1, 3 do assert(run:step()) end
    assert.is_true(run:save(folder .. "/c", { host_state = '{"x": [1, 2.5]}' }))
    local losses = {}
    for i = 1, 3 do losses[i] = run:step().loss end
    local final = model:find "lm_head.weight".value:clone()
    run:close()

    local second = support.golden_model(ctx)
    run = support.golden_run(second)
    support.assign_golden(run, second, "rownorm")
    local state = assert(run:load(folder .. "/c"))
    assert.are.same({ x = { 1, 2.5 } }, core.json.decode(state))
    assert.are.equal(3, run:updates())
    for i = 1, 3 do assert.are.equal(losses[i], run:step().loss) end
    assert.is_true(support.same_bits(final, second:find "lm_head.weight".value))

    assert.is_true(core.checkpoint_verify(ctx, folder .. "/c", true))
    assert.are.same(second:config(), core.checkpoint_config(ctx, folder .. "/c"))
    assert.are.equal("ENOENT", select(3, run:load(folder .. "/d")))
    assert.error_matches(function() run:load(folder .. "/c", { slots = { head = "drop" } }) end,
      '"keep" or "reset" expected, got "drop"')
    assert.is_string(run:load(folder .. "/c", { slots = { head = "reset" }, restart_data = true }))
    assert.are.equal(0, second:find "lm_head.weight".updates)
    assert.are.equal(0, second:find "lm_head.weight".slots.momentum:abs():max())
    assert.are.equal(3, second:parameters()[1].updates)
    assert.are.equal(6, run:loader().batches) -- where it was
  end)

  it("validates and measures without changing anything", function()
    run = support.golden_run(model)
    support.assign_golden(run, model, "adamw")
    assert(run:step())
    local weight, position = model:find "lm_head.weight".value:clone(), run:loader()
    local a = assert(run:validate { tokens = 100 })
    assert.are.same({ 64, 1 }, { a.tokens, a.batches })
    local panel = assert(support.golden_panel(ctx, 50, { ranks = 2, micro = 1 }))
    assert.are.equal(50, panel:tokens())
    assert.matches("^%x+$", panel:hash())
    local step_matrix = core.zeros(ctx, 97, 32):fill_(0)
    step_matrix[5]:fill_(0.5)
    local rms, ranges = run:hilbert(panel, step_matrix, true)
    assert.are.equal(50, #ranges)
    local sum = 0
    for _, r in ipairs(ranges) do sum = sum + r * r end
    close(rms, math.sqrt(sum / 50), 1e-12)
    assert.are.equal(a.loss, run:validate { tokens = 100 }.loss)
    assert.is_true(support.same_bits(weight, model:find "lm_head.weight".value))
    assert.are.same(position.batches, run:loader().batches)
    -- the same without a run
    local options = { data = support.golden, micro = 4, tokens = 100 }
    assert.are.equal(a.loss, core.model_validate(model, options).loss)
    close(core.hilbert(model, panel, step_matrix), rms, 1e-6)
    local _, message, name = run:validate { tokens = 10 ^ 9 // 1 | 0 }
    assert.are.equal("EDATA", name)
    assert.matches("the split has", message)
    assert.are.equal("EDATA", select(3, support.golden_panel(ctx, 10 ^ 9 // 1 | 0)))
  end)

  it("refuses what it cannot do", function()
    assert.error_matches(function() core.run(model, { sequences = 8 }) end, "run.data is required")
    assert.error_matches(function() core.run(model, { data = "x", sequences = 8, mirco = 1 }) end,
      "unknown key 'mirco'")
    assert.error_matches(function() support.golden_run(model, { micro = 3 }) end, "multiple")
    assert.error_matches(function() support.golden_run(model, { clip = 0 }) end, "clip")
    assert.are.equal("ENOENT", select(3, core.run(model, { data = "/nowhere", sequences = 8 })))
    run = support.golden_run(model)
    assert.error_matches(function() support.golden_run(model) end, "has a run already")
    assert.error_matches(function() run:check() end, "lm_head.weight")
    assert.error_matches(function() run:step() end, "no optimizer updates")
    assert.error_matches(function() run:set(1, { scale = 1 }) end, "no assignment 1")
    local adamw = core.optimizer "adamw"
    local head = support.by_role(model, "head")
    assert.error_matches(function() run:assign { optimizer = "adamw", parameters = head } end,
      'assign.optimizer: an optimizer expected, got string "adamw"')
    assert.error_matches(function()
      run:assign { optimizer = adamw, hypers = { lr = -1 }, parameters = head }
    end, "lr.*%-1")
    assert.error_matches(function()
      run:assign { optimizer = adamw, hypers = { lr = "1" }, parameters = head }
    end, 'adamw.lr: a number expected, got string "1"')
    assert.error_matches(function()
      run:assign { optimizer = adamw, hypers = { beta = 1 }, parameters = head }
    end, "adamw has no hyperparameter 'beta'; it has: lr, betas")
    assert.error_matches(function() run:assign { optimizer = adamw, parameters = { "x" } } end,
      "entry 1 must be a parameter")
    local index = run:assign { optimizer = adamw, parameters = head }
    assert.error_matches(function() run:set(index, { scale = 0 / 0 }) end, "finite")
    assert.error_matches(function() run:set(index, { hypers = { betas = { 1, 2, 3 } } }) end, "{a, b}")
    assert.error_matches(function() run:set(index, { hypers = { betas = { 0.9, 1.5 } } }) end, "betas")
    assert.error_matches(function() run:hilbert(support.golden_panel(ctx, 10)) end,
      "before the first update")
    local foreign = support.golden_model(ctx)
    assert.error_matches(function()
      run:assign { optimizer = adamw, parameters = support.by_role(foreign, "head") }
    end, "belongs to another model")
  end)

  it("stops with a name when a weight is not finite", function()
    run = support.golden_run(model)
    support.assign_golden(run, model, "adamw")
    assert(run:step())
    local weight = model:find "lm_head.weight".value
    local kept = weight:clone()
    weight:set(3, 1, 0 / 0)
    local none, message, name = run:step()
    assert.is_nil(none)
    assert.matches("^ENONFINITE: ", message)
    assert.are.equal("ENONFINITE", name)
    assert.are.equal(1, run:updates())
    weight:copy_(kept)
    assert.are.equal(2, run:step().update)
  end)

  it("can be cancelled and goes on", function()
    run = support.golden_run(model)
    support.assign_golden(run, model, "adamw")
    ctx:cancel()
    assert.are.equal("ECANCELED", select(3, run:step()))
    assert.are.equal("ECANCELED", select(3, run:validate { tokens = 100 }))
    ctx:resume()
    assert.are.equal(1, run:step().update)
  end)

  it("can be closed while views of it are held", function()
    run = support.golden_run(model)
    support.assign_golden(run, model, "adamw")
    assert(run:step())
    local head = model:find "lm_head.weight"
    local gradient, copy = head.gradient, head.gradient:clone()
    run:close()
    assert.error_matches(function() gradient:sum() end, "its run is closed")
    assert.error_matches(function() run:step() end, "this run is closed")
    assert.is_nil(head.gradient)
    assert.are.same({}, head.slots)
    assert.is_true(copy:norm() > 0)
    run = support.golden_run(model)
    support.assign_golden(run, model, "rownorm")
    assert(run:step())
    model:close()
    assert.error_matches(function() run:step() end, "its model is closed")
  end)

  it("makes way for another when it is garbage", function()
    run = support.golden_run(model)
    run = nil -- luacheck: ignore
    run = support.golden_run(model)
    assert.is_truthy(run)
  end)
end)
