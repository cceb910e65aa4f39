-- The golden model with every diagnostic, on any number of ranks and any device; used by
-- mpi_diagnostics_spec.lua and diagnostics_device_spec.lua.
local pg = require "perigee"
local p = pg.params {
  golden = "tests/golden/trajectory", micro = 2, shard = true, last = 6,
  only = pg.choice { "all", "bottleneck", "first_order", "functional", "head_diameter",
    "head_geometry", "logits", "noise_scale", "oracle", "validation", "weights" },
}

-- The same positions for any number of ranks.
local panel = { tokens = 200, ranks = 2, micro = 2 }
local d = pg.diagnostics
local hooks = {}
for name, diagnostic in pairs {
  bottleneck = d.bottleneck { panel = panel },
  first_order = d.first_order { predict = true },
  functional = d.functional { panel = panel, backward = true },
  head_diameter = d.head_diameter { bracket = true },
  head_geometry = d.head_geometry { separation = true },
  logits = d.logits { panel = panel, attention = true, rank = true },
  noise_scale = d.noise_scale(),
  oracle = d.oracle { gap = 1e-4, seconds = 10 },
  validation = d.validation { tokens = 384, hilbert_panel = panel },
  weights = d.weights { norms = true },
} do
  if p.only == "all" or p.only == name then hooks[#hooks + 1] = { name, diagnostic } end
end
table.sort(hooks, function(a, b) return a[1] < b[1] end)
for i, entry in ipairs(hooks) do hooks[i] = pg.every(3, entry[2]) end
if p.only == "all" then
  hooks[#hooks + 1] = pg.at({ p.last }, d.functional { panel = panel, of = "start" })
end

return pg.recipe {
  name = "diagnostics", seed = 3, shard_optimizer = p.shard, increments = "all",
  model = { layers = 2, width = 32, heads = 2, head_dim = 16, mlp = 128, vocab = 97, context = 16,
    init = p.golden .. "/init.safetensors" },
  data = pg.data.shards { path = p.golden },
  batch = { sequences = 8, micro = p.micro },
  updates = 20, max_updates = p.last, log = { every = 1 },
  schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
  optimizers = {
    { role = "embedding", pg.optim.adamw { lr = 4e-3, eps = 1e-10, weight_decay = 0.1 } },
    { role = "backbone", pg.optim.muon { lr = 8e-3, weight_decay = 0.1 } },
    { role = "head", pg.optim.rownorm { lr = 3.2e-3, beta = 0.95, eps = 1e-8 } },
  },
  hooks = hooks,
}
