-- Lifetimes: closing and collecting contexts, models, runs and tensors in any order.
local support = require "bind_support"
local core = support.core

local tiny = { layers = 1, width = 8, heads = 2, head_dim = 4, mlp = 16, vocab = 11, context = 8 }

describe("objects", function()
  local ctx

  before_each(function() ctx = support.context() end)
  after_each(function()
    support.finish(ctx)
    support.clean()
  end)

  it("say what they are", function()
    local t = core.zeros(ctx, 2, 3)
    local model = core.model(ctx, tiny)
    assert.matches("^context", tostring(ctx))
    assert.matches("^model", tostring(model))
    assert.are.equal("tensor F32 [2, 3]", tostring(t))
    assert.matches("^parameter lm_head.weight %[11, 8%]", tostring(model:find "lm_head.weight"))
    model:close()
    assert.matches("closed", tostring(model))
  end)

  it("can be closed twice and raise when used afterwards", function()
    local t = core.zeros(ctx, 2)
    t:close()
    t:close()
    assert.has_error(function() t:sum() end, "this tensor is closed")
    assert.are.equal("tensor (closed)", tostring(t))
    local model = core.model(ctx, tiny)
    model:close()
    model:close()
    assert.error_matches(function() model:config() end, "this model is closed")
  end)

  it("close at the end of a scope", function()
    local kept
    do
      local t <close> = core.zeros(ctx, 100)
      kept = t
      assert.are.equal(1, ctx:live_tensors())
    end
    assert.are.equal(0, ctx:live_tensors())
    assert.error_matches(function() return kept:sum() end, "closed")
  end)

  it("refuse the use of what belongs to a closed parent", function()
    local own = support.context()
    local t, model = core.zeros(own, 2, 2), core.model(own, tiny)
    local p = model:parameters()[1]
    local value = p.value
    own:close()
    assert.error_matches(function() t:sum() end, "this tensor cannot be used: its context is closed")
    assert.error_matches(function() model:config() end, "its context is closed")
    assert.error_matches(function() return p.rows end, "its context is closed")
    assert.error_matches(function() value:sum() end, "its context is closed")
    assert.error_matches(function() core.zeros(own, 1) end, "this context is closed")
  end)

  it("refuse views of a closed model", function()
    local model = core.model(ctx, tiny)
    local value = model:parameters()[1].value
    model:close()
    assert.error_matches(function() value:sum() end, "this tensor cannot be used: its model is closed")
  end)

  it("keep what they need while children live", function()
    local value
    do
      local own = support.context()
      local model = core.model(own, tiny)
      model:init(1)
      value = model:find "lm_head.weight".value
    end
    support.collect()
    assert.is_true(value:norm() > 0)
    local p = core.model(ctx, tiny):parameters()[3]
    support.collect()
    assert.are.equal("backbone", p.role)
    assert.are.equal(8, #p.value)
  end)

  it("free a closed model although its parameter objects are held", function()
    local model = core.model(ctx, tiny)
    local list = model:parameters()
    local p = list[2]
    assert.is_true(ctx:live_tensors() > 0)
    model:close()
    assert.are.equal(0, ctx:live_tensors())
    assert.error_matches(function() return p.name end, "this parameter cannot be used: its model is closed")
    assert.are.equal(9, #list)
  end)

  it("answer with the same parameter objects each time", function()
    local model = core.model(ctx, tiny)
    local list = model:parameters()
    assert.are.equal(list, model:parameters())
    assert.are.equal(list[1], model:find(list[1].name))
    assert.is_nil(model:find "no.such.weight")
  end)

  it("free memory although Lua sees only small userdata", function()
    local peak = 0
    for i = 1, 20000 do
      local t = core.zeros(ctx, 64, 64) -- 16 KiB each, 320 MiB in all
      if i % 100 == 0 then peak = math.max(peak, ctx:bytes()) end
      assert(t)
    end
    assert.is_true(peak < 64 * 2 ^ 20, "peak " .. peak)
    for i = 1, 100000 do
      core.zeros(ctx, 1)
      if i % 1000 == 0 then peak = math.max(peak, ctx:live_tensors()) end
    end
    assert.is_true(ctx:live_tensors() < 60000)
  end)

  it("survive the end of the state in every order", function()
    -- Lua calls finalisers in the reverse order of creation; a script that keeps everything alive
    -- to the end, in different orders, must end cleanly.
    local output, how, code = support.process [[
      local support = require "bind_support"
      local core = support.core
      held = {}
      for order = 1, 4 do
        local ctx = support.context()
        local model = support.golden_model(ctx)
        local run = support.golden_run(model)
        support.assign_golden(run, model, "rownorm")
        assert(run:step())
        local head = model:find "lm_head.weight"
        held[#held + 1] = { head.gradient, head.increment:row_norms(), head.slots.momentum,
          model:parameters(), order % 2 == 0 and ctx, order > 2 and model, run }
        if order == 1 then ctx:close() end
        if order == 2 then model:close() end
        if order == 3 then run:close() end
      end
      setmetatable({}, { __gc = function() held[2][1]:close() end })
      print "reached"
    ]]
    assert.are.equal("reached\n", output)
    assert.are.same({ "exit", 0 }, { how, code })
  end)

  it("are not fooled by finalisers that close what is in use", function()
    local a, b = core.tensor(ctx, { 1, 2 }), core.tensor(ctx, { 3, 4 })
    for _ = 1, 200 do
      setmetatable({}, { __gc = function() a:close() end })
      local ok, result = pcall(function() return a + b end)
      if not ok then assert.matches("closed", result) end
      a:close()
      a = core.tensor(ctx, { 1, 2 })
    end
  end)

  it("check the userdata given to a metamethod", function()
    local gc = getmetatable(core.zeros(ctx, 1)).__gc
    assert.has_error(function() gc(ctx) end)
    assert.has_error(function() gc(io.stdout) end)
    assert.has_error(function() gc(nil) end)
    assert.has_error(function() getmetatable(ctx).__gc(core.zeros(ctx, 1)) end)
  end)

  it("count devices, threads and bytes", function()
    assert.are.equal("cpu", ctx:device())
    assert.are.equal(1, ctx:threads())
    local before = ctx:bytes()
    local t = core.zeros(ctx, 1000)
    assert.is_true(ctx:bytes() >= before + 4000)
    assert.is_true(ctx:peak_bytes() >= ctx:bytes())
    t:close()
    assert.are.equal(before, ctx:bytes())
    assert.matches("^%a", ctx:cpu_level())
    ctx:cancel()
    assert.is_true(ctx:cancelled())
    ctx:resume()
    assert.is_false(ctx:cancelled())
  end)

  it("refuse unknown devices and options", function()
    local none, message, name = core.context { device = "abacus" }
    assert.is_nil(none)
    assert.matches("^EDEVICE: ", message)
    assert.are.equal("EDEVICE", name)
    assert.error_matches(function() core.context { devise = "cpu" } end,
      "context: unknown key 'devise'; the keys are device, device_index, threads")
    assert.error_matches(function() core.context { threads = "2" } end,
      "context.threads: an integer from 0 .* expected, got string \"2\"")
    assert.error_matches(function() core.context { threads = 1.5 } end, "got number 1.5")
  end)
end)
