-- The golden model on any device, with a mark after the hooks of every update in the trace of the
-- emulated one; used by device_spec.lua.
local pg = require "perigee"
local p = pg.params {
  golden = "tests/golden/trajectory", head = pg.choice { "adamw", "rownorm", "lua" },
  micro = 2, updates = 5, diagnostics = true, trace = "",
}

-- RowNorm, by the tensors' operations.
local lua_rownorm = pg.optim.define {
  name = "lua_rownorm", slots = { momentum = "matrix" },
  defaults = { lr = 3.2e-3, beta = 0.95, eps = 1e-8, weight_decay = 0 },
  increment = function(w, h)
    local m = w.slots.momentum
    m:lerp_(w.gradient, 1 - h.beta)
    return m:div_rows(m:row_norms() + h.eps * (1 - h.beta ^ w.updates)):mul(-h.lr)
  end,
}

local head = {
  adamw = pg.optim.adamw { lr = 4e-3, betas = { 0.9, 0.999 }, eps = 1e-10, weight_decay = 0.1 },
  rownorm = pg.optim.rownorm { lr = 3.2e-3, beta = 0.95, eps = 1e-8 },
  lua = lua_rownorm {},
}

local hooks = {}
if p.diagnostics then
  hooks[#hooks + 1] = pg.every(1, pg.diagnostics.head_diameter())
  hooks[#hooks + 1] = pg.every(1, pg.diagnostics.validation { tokens = 384, hilbert_panel = 200 })
end
hooks[#hooks + 1] = pg.every(1, function(run)
  if p.trace == "" then return end
  local file <close> = assert(io.open(p.trace, "a"))
  file:write(("update %d\n"):format(run.update))
end)

return pg.recipe {
  name = "device", seed = 3,
  model = { layers = 2, width = 32, heads = 2, head_dim = 16, mlp = 128, vocab = 97, context = 16,
    init = p.golden .. "/init.safetensors" },
  data = pg.data.shards { path = p.golden },
  batch = { sequences = 8, micro = p.micro },
  -- Row norms for TensorBoard are a measurement, and wait for the device.
  updates = p.updates, log = { every = 1, tensorboard = p.diagnostics },
  schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
  optimizers = {
    { role = "embedding", pg.optim.adamw { lr = 4e-3, eps = 1e-10, weight_decay = 0.1 } },
    { role = "backbone", pg.optim.muon { lr = 8e-3, weight_decay = 0.1 } },
    { role = "head", head[p.head] },
  },
  hooks = hooks,
}
