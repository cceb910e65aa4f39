-- Uses every part of perigee.core once; run by tests/host/lua_memory.c with memory that runs out.
local folder = ...
local core = require "perigee.core"
local golden = "tests/golden/trajectory"
local ctx = assert(core.context { threads = 1 })
local sizes = { layers = 1, width = 8, heads = 2, head_dim = 4, mlp = 16, vocab = 97, context = 16 }
local settings = { data = golden, sequences = 2, micro = 2 }
local everything = { core.optimizer "adamw" }
for i = 1, #core.model_parameters(sizes) do everything[i + 1] = i end
assert(core.estimate(ctx, sizes, "fp32", settings, { everything }, true))
assert(core.run_data(ctx, sizes, settings))
local model = assert(core.model(ctx, sizes))
assert(model:init(1))
local run = assert(core.run(model, settings))
run:assign {
  optimizer = core.define_optimizer {
    name = "x", slots = { a = "matrix", b = "row" }, defaults = { lr = 1e-3, p = { 1, 2 }, f = true },
    increment = function(w, h)
      local a = w.slots.a
      a:lerp_(w.gradient, 0.1)
      return a:div_rows(a:row_norms() + 1e-8):mul(-h.lr)
    end,
  },
  hypers = { lr = 0.1 }, parameters = model:parameters(),
}
assert(run:step())
run:hilbert(assert(core.panel(ctx, { data = golden, time = 16, vocab = 97, tokens = 20 })), nil, true)
assert(run:validate { tokens = 32 })
local t = core.tensor(ctx, { { 1, 2 }, { 3, 4 } })
local _ = ((t + 1) * t:t() - 2 / t):matmul(t):sum(1):to_table()
t[2] = 5
t:set(1, 1, 3)
t:argmax()
t:argmax(1)
core.sort(t, 1, true)
core.gather_rows(t, { -1, 1 })
core.fill_random(t, true, 1, 2, 3, 0, 1)
local _ = t[{ {}, { 1, 2 } }]:t():reshape(4):float():expand(2, 4):contiguous()
t[{ 1, { 1, 2 } }] = t:new_zeros(2)
assert(core.save_npy(t, folder .. "/t.npy"))
assert(core.load_npy(ctx, folder .. "/t.npy"))
assert(core.save_tensor(t, folder .. "/t"))
core.diameter(t)
core.json.decode(core.json.encode({ a = { 1, 2, { b = "x" } }, c = core.json.null, d = {} }, 2))
core.shards(ctx, golden, "*.bin")
core.fs.list(golden)
core.fs.read(golden .. "/expected.json")
core.fs.real(golden)
core.optimizers()
core.host()
core.optimizer "muon":check { lr = 1 }
core.generate(model, { 1, 2, 3 }, { temperature = 1 })
assert(run:save(folder .. "/c", { host_state = '{"a":1}' }))
assert(run:load(folder .. "/c"))
assert(core.save_tensors(ctx, folder .. "/t", { { "a", t } }, { k = "v" }))
core.load_tensor(ctx, folder .. "/t", "a")
core.tensors(ctx, folder .. "/t")
local metrics = core.metrics(ctx, folder .. "/m")
metrics:write { { "a", 1 }, { "b", { 1, 2 } } }
metrics:close()
core.fs.write(folder .. "/text", ("some words "):rep(200))
core.fs.remove(folder .. "/data")
assert(core.prepare(ctx, { texts = { folder .. "/text" }, out = folder .. "/data", vocab = 260,
  progress = function(what) return what .. "!" end }))
local tok = assert(core.tokenizer(ctx, folder .. "/data"))
tok:decode(tok:encode "some words")
pcall(core.json.encode, { 1, { a = print } })
pcall(core.json.decode, "[1,")
pcall(core.context, { x = 1 })
pcall(core.tensor, ctx, { { 1 }, 2 })
collectgarbage()
