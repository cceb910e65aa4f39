-- The golden trajectory as a recipe, with faults to inject on one rank; used by mpi_spec.lua.
local pg = require "perigee"
local core = require "perigee.core"
local p = pg.params {
  golden = "tests/golden/trajectory", data = "", head = pg.choice { "adamw", "rownorm" },
  sequences = 8, micro = 2, updates = 40, last = 40, shard = true, timeout = 60.0,
  layers = 2, width = 32,
  fault = pg.choice { "none", "nan", "overflow", "hook", "exit", "vanish", "kill", "hang", "data",
    "end", "stop", "signal", "optimizer", "slots", "alone", "set", "optimizer_of_one", "edit" },
  rank = 1, at = 3, every = 40, own = false, switched = false, init = "",
}

local head = {
  adamw = pg.optim.adamw { lr = 4e-3, betas = { 0.9, 0.999 }, eps = 1e-10, weight_decay = 0.1 },
  rownorm = pg.optim.rownorm { lr = 3.2e-3, beta = 0.95, eps = 1e-8 },
}

local faults = {
  -- Unknown to the run, which would compare what run:edit changed with the other ranks.
  nan = function(run) run.head.value:fill_(0 / 0) end,
  -- Logits beyond the largest number, from weights that are finite.
  overflow = function(run) run.head.value:fill_(3e38) end,
  hook = function() error("this hook is broken", 0) end,
  exit = function() os.exit(0) end,
  -- The process is gone without a word from Lua: the C function that os.exit stands before.
  vanish = function()
    for i = 1, math.huge do
      local name, value = debug.getupvalue(os.exit, i)
      if name == nil then error("there is no C function behind os.exit") end
      if type(value) == "function" and debug.getinfo(value, "S").what == "C" then value(7) end
    end
  end,
  kill = function() os.execute("kill -KILL $PPID") end,
  hang = function() core.sleep(10) end,
  ["end"] = function()
    for n = 1, 3 do
      assert(io.open(("%s/fineweb_train_%06d.bin"):format(p.data, n), "w")):close()
    end
  end,
  alone = function(run) print(run.head.slots) end,
  stop = function(run) run:stop("enough") end,
  set = function(run) run:set("head", { lr = 1 }) end,
  optimizer_of_one = function(run) run:set_optimizer("head", pg.optim.adamw { lr = 1 }) end,
  edit = function(run) run:edit(run.head, function(w) w:mul_(2) end) end,
  signal = function() os.execute("kill -TERM $PPID") end,
}

local function here(run) return run.rank == p.rank end

-- Norms of all slots, which are as large on every rank as on one.
local function weigh_slots(run)
  for _, name in ipairs { run.head.name, "model.embed_tokens.weight",
    "model.layers.1.mlp.down_proj.weight" } do
    for slot, tensor in pairs(run:parameter(name).slots) do
      run:log(("slots/%s/%s"):format(name, slot), tensor:norm())
    end
  end
end

-- A Lua optimizer works on whole matrices: each rank updates those that it owns.
local my_muon = pg.optim.define {
  name = "my_momentum", slots = { momentum = "matrix" }, defaults = { lr = 1e-2, weight_decay = 0 },
  increment = function(w, h)
    if p.fault == "optimizer" and core.launch().rank == p.rank and w.updates == p.at then
      error("this optimizer is broken", 0)
    end
    w.slots.momentum:lerp_(w.gradient, 0.1)
    return w.slots.momentum:mul(-h.lr)
  end,
}

return pg.recipe {
  name = "golden", seed = 3, shard_optimizer = p.shard, rank_timeout = p.timeout,
  model = { layers = p.layers, width = p.width, heads = 2, head_dim = 16, mlp = 128, vocab = 97,
    context = 16,
    init = not p.switched and (p.init ~= "" and p.init or p.golden .. "/init.safetensors") or nil,
    head = p.switched and { rank = 12, extra = 5, backward_rank = 7, residual = false } or nil },
  data = pg.data.shards { path = p.data ~= "" and p.data or p.golden },
  batch = { sequences = p.sequences, micro = p.micro > 0 and p.micro or nil },
  updates = p.updates, max_updates = p.last, log = { every = 1 },
  schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
  optimizers = {
    { role = "embedding", pg.optim.adamw { lr = 4e-3, eps = 1e-10, weight_decay = 0.1 } },
    { role = "backbone", (p.own or p.fault == "optimizer") and my_muon {}
      or pg.optim.muon { lr = 8e-3, weight_decay = 0.1 } },
    { role = "head", head[p.head] },
  },
  hooks = {
    pg.every(1, function(run)
      local fault = faults[p.fault]
      if fault and here(run) and run.update == p.at then fault(run) end
    end, { before_first = p.at == 0 }),
    pg.every(1, pg.diagnostics.head_diameter()),
    pg.every(10, function(run) if p.fault == "slots" then weigh_slots(run) end end),
    pg.every(10, pg.diagnostics.validation { tokens = 384,
      hilbert_panel = { tokens = 200, ranks = 2, micro = 2 } }),
    pg.every(20, function(run) print(("printed at %d"):format(run.update)) end),
    pg.checkpoint { every = p.every, keep = "all" },
  },
}
