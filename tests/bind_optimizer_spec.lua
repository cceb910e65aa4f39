-- Optimizers from Lua: descriptions, hyperparameters, and those defined by a Lua function.
local support = require "bind_support"
local core = support.core

-- DESIGN's RowNorm, as a recipe would write it.
local function lua_rownorm(increment)
  return core.define_optimizer {
    name = "my_rownorm", slots = { momentum = "matrix" },
    defaults = { lr = 1e-3, beta = 0.95, eps = 1e-8, weight_decay = 0 },
    increment = increment or function(w, h)
      local m = w.slots.momentum
      m:lerp_(w.gradient, 1 - h.beta)
      return m:div_rows(m:row_norms() + h.eps * (1 - h.beta ^ w.updates)):mul(-h.lr)
    end,
  }
end

local hypers = { lr = 3.2e-3, beta = 0.95, eps = 1e-8 }

describe("optimizers", function()
  it("are described", function()
    local by_name = {}
    for _, o in ipairs(core.optimizers()) do by_name[o.name] = o end
    for _, name in ipairs { "adamw", "muon", "rownorm", "sgd", "lion", "signsgd", "scale", "rmnp",
      "sinkgd", "moga", "scion", "modula", "normuon", "lausu", "frozen" } do
      assert.is_table(by_name[name], name)
      assert.are.same(by_name[name], core.optimizer(name):describe())
    end
    local betas
    for _, h in ipairs(by_name.adamw.hypers) do if h.name == "betas" then betas = h end end
    assert.are.equal("pair", betas.kind)
    assert.are.same({ 0.9, 0.999 }, betas.default)
    assert.are.same({ 0, 1 }, { betas.min, betas.max })
    assert.is_true(betas.open_max)
    assert.are.same({ { name = "momentum", shape = "matrix", dtype = "F32" } }, by_name.rownorm.slots)
    assert.is_true(by_name.frozen.frozen)
    assert.error_matches(function() core.optimizer "adam" end,
      "no optimizer 'adam'; there are adamw, muon")
  end)

  it("check hyperparameters and fill in the others", function()
    local rownorm = core.optimizer "rownorm"
    local full = rownorm:check { lr = 1 }
    assert.are.same({ lr = 1, beta = 0.95, eps = 1e-8, weight_decay = 0, project = "none",
      diameter_budget = 0, axis = "rows" }, full)
    assert.error_matches(function() rownorm:check { lr = 1, project = "inner" } end,
      'rownorm.project: one of "none", "outer", "both" expected, got string "inner"')
    assert.error_matches(function() rownorm:check { lr = 1, beta = 1 } end, "beta")
    assert.error_matches(function() rownorm:check { lr = 1, beta = true } end, "a number expected, got true")
    assert.error_matches(function() core.optimizer "muon":check { steps = 1.5 } end,
      "muon.steps: an integer expected, got number 1.5")
    assert.error_matches(function() core.optimizer "muon":check { nesterov = 1 } end,
      "muon.nesterov: true or false expected")
  end)

  it("can be defined, with names in a fixed order", function()
    local o = core.define_optimizer {
      name = "two", slots = { v = "row", a = "scalar", m = "matrix" },
      defaults = { lr = 0.1, pair = { 1, 2 }, flag = true, beta = 0.5 },
      increment = function() end,
    }
    local d = o:describe()
    local slots, names = {}, {}
    for i, s in ipairs(d.slots) do slots[i] = s.name .. ":" .. s.shape end
    for i, h in ipairs(d.hypers) do names[i] = h.name .. ":" .. h.kind end
    assert.are.same({ "a:scalar", "m:matrix", "v:row" }, slots)
    assert.are.same({ "beta:number", "flag:boolean", "lr:number", "pair:pair",
      "weight_decay:number" }, names)
    assert.are.same({ lr = 0.5, pair = { 3, 4 }, flag = false, beta = 0.5, weight_decay = 0 },
      o:check { lr = 0.5, pair = { 3, 4 }, flag = false })
    assert.error_matches(function() o:check { lr = -1 } end, "lr")
  end)

  it("cannot be defined wrongly", function()
    local function define(changes)
      local t = { name = "x", defaults = { lr = 1 }, increment = function() end }
      for k, v in pairs(changes) do t[k] = v end
      return function() return core.define_optimizer(t) end
    end
    assert.error_matches(define { increment = 1 }, "increment: a function expected, got number 1")
    assert.error_matches(define { defaults = {} }, "defaults.lr is required")
    assert.error_matches(define { defaults = { lr = "1" } }, "defaults.lr: a number, a boolean or a pair")
    assert.error_matches(define { defaults = { lr = 1 / 0 } }, "finite")
    assert.error_matches(define { defaults = { lr = 1, 2 } }, "names must be strings, got number 1")
    assert.error_matches(define { slots = { m = "square" } }, "slots.m: matrix, row, .* got string \"square\"")
    assert.error_matches(define { slots = 3 }, "slots: a table")
    assert.error_matches(define { steps = 3 }, "unknown key 'steps'")
    local many, values = {}, { lr = 1 }
    for i = 1, 9 do many["s" .. i] = "row" end
    for i = 1, 16 do values["h" .. i] = 1 end
    assert.error_matches(define { slots = many }, "at most 8 slots")
    assert.error_matches(define { defaults = values }, "more than 16 values")
  end)
end)

describe("an optimizer in Lua", function()
  local ctx, model, run
  before_each(function()
    ctx = support.context()
    model = support.golden_model(ctx)
    run = support.golden_run(model)
  end)
  after_each(function()
    model, run = nil, nil
    support.finish(ctx)
    support.clean()
  end)

  it("gives the bits of the one in C", function()
    support.assign_golden(run, model, "rownorm")
    local weights, increments = {}, {}
    local head = model:find "lm_head.weight"
    for i = 1, 8 do
      assert(run:step())
      weights[i], increments[i] = head.value:clone(), head.increment:clone()
    end
    run:close()
    local second = support.golden_model(ctx)
    run = support.golden_run(second)
    support.assign_golden(run, second, lua_rownorm(), hypers)
    head = second:find "lm_head.weight"
    for i = 1, 8 do
      assert(run:step())
      assert.is_true(support.same_bits(increments[i], head.increment), "increment " .. i)
      assert.is_true(support.same_bits(weights[i], head.value), "weights " .. i)
    end
    assert.are.equal("my_rownorm", head.optimizer)
  end)

  it("sees its parameter, slots and scheduled hyperparameters", function()
    local seen = {}
    local o = core.define_optimizer {
      name = "look", slots = { row = "row", one = "scalar", square = "columns_square" },
      defaults = { lr = 1, flag = true, pair = { 1, 2 } },
      increment = function(w, h)
        seen[#seen + 1] = { w = w, h = h, shapes = { w.slots.row:shape(), w.slots.one:shape(),
          w.slots.square:shape() }, gradient = w.gradient:norm(), count = w.slots.one:add_(1):item() }
        return w.gradient:mul(0)
      end,
    }
    local indices = support.assign_golden(run, model, o, { lr = 0.5, flag = false, pair = { 3, 4 } })
    run:set(indices[3], { scale = 0.25, hypers = { pair = { 5, 6 } } })
    assert(run:step())
    assert(run:step())
    assert.are.equal(2, #seen)
    local w, h = seen[2].w, seen[2].h
    assert.are.same({ 2, "lm_head.weight", "head", 97, 32 },
      { w.updates, w.name, w.role, w.rows, w.columns })
    assert.are.equal(model:find "lm_head.weight", w.parameter)
    assert.are.same({ lr = 0.125, flag = false, pair = { 5, 6 }, weight_decay = 0 }, h)
    assert.are.same({ { 97 }, {}, { 32, 32 } }, seen[2].shapes)
    assert.are.same({ 1, 2 }, { seen[1].count, seen[2].count })
    assert.is_true(seen[1].gradient > 0)
    -- what it was given stays valid, and the increment took effect
    assert.is_true(w.gradient:norm() > 0)
    assert.are.equal(0, model:find "lm_head.weight".increment:norm())
  end)

  it("sees the memory it is called with, in a trial the trial's", function()
    local seen = {}
    local o = core.define_optimizer {
      name = "sum", slots = { sum = "matrix", calls = "scalar" }, defaults = { lr = 1 },
      increment = function(w, h)
        local calls = w.slots.calls:add_(1):item()
        seen[#seen + 1] = { w = w, calls = calls, turned = w.slots.sum:t(), updates = w.updates }
        return w.slots.sum:add_(w.gradient):mul(-h.lr)
      end,
    }
    support.assign_golden(run, model, o, { lr = 0.5 })
    assert(run:step())
    local head = model:find "lm_head.weight"
    local sum, value = head.slots.sum:clone(), head.value:clone()
    local trial = run:trial(head, { optimizer = o, hypers = { lr = 2 }, inherit = true })
    assert(run:gradients())
    assert(trial:increment(1))
    assert(trial:increment(1))
    -- the run's own slots and weights are as they were
    assert.is_true(support.same_bits(sum, head.slots.sum))
    assert.are.equal(1, head.slots.calls:item())
    assert.is_true(support.same_bits(value, head.value))
    assert.are.same({ 1, 2, 3 }, { seen[1].calls, seen[2].calls, seen[3].calls })
    assert.are.same({ 1, 2, 3 }, { seen[1].updates, seen[2].updates, seen[3].updates })
    local expected = sum:add(head.gradient):add(head.gradient):mul(-2)
    assert.is_true(support.same_bits(expected, trial:value()))
    -- tensors of the run stay, those of the trial end with the call
    assert.are.equal(head, seen[2].w.parameter)
    assert.is_true(seen[1].w.slots.sum:norm() > 0)
    assert.is_true(seen[3].w.gradient:norm() > 0)
    for _, lent in ipairs { seen[3].w.slots.sum, seen[3].turned } do
      assert.error_matches(function() lent:norm() end, "lent for one call of an optimizer")
      lent:close()
    end
    trial:close()
  end)

  it("updates several parameters, from strided and shared results", function()
    local calls = 0
    local sgd = core.define_optimizer {
      name = "my_sgd", defaults = { lr = 0.1 },
      increment = function(w, h)
        calls = calls + 1
        return (w.gradient:t() * -h.lr):t()
      end,
    }
    local o = core.optimizer "sgd"
    run:assign { optimizer = o, hypers = { lr = 0.1 }, parameters = model:parameters() }
    assert(run:step())
    local expected = {}
    for i, p in ipairs(model:parameters()) do expected[i] = p.value:clone() end
    run:close()
    local second = support.golden_model(ctx)
    run = support.golden_run(second)
    run:assign { optimizer = sgd, hypers = { lr = 0.1 }, parameters = second:parameters() }
    assert(run:step())
    assert.are.equal(#expected, calls)
    for i, p in ipairs(second:parameters()) do
      assert.is_true(support.same_bits(expected[i], p.value), p.name)
    end
  end)

  it("has its result checked", function()
    local result
    local o = lua_rownorm(function() return result end)
    support.assign_golden(run, model, o, hypers)
    local closed = core.zeros(ctx, 97, 32)
    closed:close()
    local other = support.context()
    local foreign = core.zeros(other, 97, 32)
    for value, message in pairs {
      [3] = "optimizer 'my_rownorm': increment returned number 3, a tensor %[97, 32%] is expected",
      [core.zeros(ctx, 32, 97)] = "returned a tensor F32 %[32, 97%], F32 %[97, 32%] is expected",
      [closed] = "closed", [foreign] = "another context",
    } do
      result = value
      assert.error_matches(function() run:step() end, message)
      run:close()
      model = support.golden_model(ctx)
      run = support.golden_run(model)
      support.assign_golden(run, model, o, hypers)
    end
    result = nil
    assert.error_matches(function() run:step() end, "increment returned nil")
    foreign:close()
    support.finish(other)
  end)

  it("raises the error object it raised, whatever that is", function()
    local object
    local o = lua_rownorm(function() error(object) end)
    for _, value in ipairs { "text", 42, setmetatable({}, { __tostring = function() error "no" end }),
      print, false } do
      object = value
      support.assign_golden(run, model, o, hypers)
      local ok, err = pcall(run.step, run)
      assert.is_false(ok)
      if value == "text" then
        assert.matches("bind_optimizer_spec.lua:%d+: text$", err)
      else
        assert.are.equal(value, err)
      end
      run:close()
      model = support.golden_model(ctx)
      run = support.golden_run(model)
    end
    object = nil
    support.assign_golden(run, model, o, hypers)
    assert.are.same({ false }, { pcall(run.step, run) })
  end)

  it("leaves a run that says so when it failed halfway, and loads a checkpoint again", function()
    local fail = false
    local o = core.define_optimizer {
      name = "moody", slots = { m = "matrix" }, defaults = { lr = 0.1 },
      increment = function(w, h)
        if fail then error "mood" end
        return w.slots.m:lerp_(w.gradient, 0.5):mul(-h.lr)
      end,
    }
    support.assign_golden(run, model, o, {})
    local file = support.folder() .. "/c"
    assert(run:step())
    assert.is_true(run:save(file))
    local loss = run:step().loss
    fail = true
    assert.error_matches(function() run:step() end, "mood")
    fail = false
    assert(run:load(file))
    assert.are.equal(1, run:updates())
    assert.are.equal(loss, run:step().loss)
  end)

  it("cannot step, change, save or leave the run from inside", function()
    local messages = {}
    local function try(f, ...)
      local _, message = pcall(f, ...)
      messages[#messages + 1] = message
    end
    local o = lua_rownorm(function(w)
      try(run.step, run)
      try(run.assign, run, {})
      try(run.set, run, 1, {})
      try(run.save, run, "/tmp/never")
      try(run.load, run, "/tmp/never")
      try(run.validate, run, { tokens = 1 })
      try(coroutine.yield)
      assert.are.equal(0, run:updates())
      return w.gradient:mul(0)
    end)
    support.assign_golden(run, model, o, hypers)
    local co = coroutine.create(function() return run:step() end)
    local ok, step = coroutine.resume(co)
    assert.is_true(ok, step)
    assert.are.equal("dead", coroutine.status(co))
    assert.are.equal(1, step.update)
    assert.are.equal(7, #messages)
    for i = 1, 6 do assert.matches("cannot be called from inside run:step", messages[i]) end
    assert.matches("yield across", messages[7])
  end)

  it("may close its run, its model and its context: they end after the step", function()
    local own = support.context()
    local own_model = support.golden_model(own)
    local own_run = support.golden_run(own_model)
    local o = lua_rownorm(function(w)
      local zero = w.gradient:mul(0)
      own_run:close()
      own_model:close()
      collectgarbage()
      return zero
    end)
    support.assign_golden(own_run, own_model, o, hypers)
    assert.are.equal(1, own_run:step().update)
    assert.error_matches(function() own_run:step() end, "this run is closed")
    support.finish(own)

    own = support.context()
    own_model = support.golden_model(own)
    own_run = support.golden_run(own_model)
    o = lua_rownorm(function() own:close() end)
    support.assign_golden(own_run, own_model, o, hypers)
    assert.error_matches(function() own_run:step() end, "increment returned nil")
    assert.error_matches(function() own_run:step() end, "its context is closed")
  end)

  it("can step another run meanwhile", function()
    local other_model = support.golden_model(ctx)
    local other = support.golden_run(other_model)
    local inner = 0
    local counting = lua_rownorm(function(w)
      inner = inner + 1
      return w.gradient:mul(0)
    end)
    support.assign_golden(other, other_model, counting, hypers)
    local o = lua_rownorm(function(w)
      assert(other:step())
      return w.gradient:mul(0)
    end)
    support.assign_golden(run, model, o, hypers)
    assert(run:step())
    assert(run:step())
    assert.are.same({ 2, 2 }, { inner, other:updates() })
  end)

  it("is collected with its run although it refers to it", function()
    local weak = setmetatable({}, { __mode = "v" })
    do
      local r, m = run, model
      local o = lua_rownorm(function(w) return r and m and w.gradient:mul(0) end)
      support.assign_golden(r, m, o, hypers)
      assert(r:step())
      weak[1], weak[2], weak[3] = r, m, o
    end
    run, model = nil, nil
    support.collect()
    assert.are.same({}, weak)
  end)

  it("keeps memory flat over many updates", function()
    support.assign_golden(run, model, lua_rownorm(), hypers)
    assert(run:step())
    support.collect()
    local start = ctx:bytes()
    for _ = 1, 60 do assert(run:step()) end
    support.collect()
    assert.are.equal(start, ctx:bytes())
  end)
end)
