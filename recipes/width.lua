-- Loss against the head's learning rate at several widths: where the best rate lies as the model
-- grows, for a head that is measured in its own geometry and for AdamW.
--   perigee sweep recipes/width.lua && perigee report runs/width-sweep
local pg = require "perigee"
local p  = pg.params { width = pg.choice { 64, 128, 256 }, head = pg.choice { "rownorm", "adamw" },
                       lr = 1e-2, seed = 0, updates = 200, data = "data/kjv", validation = 65536 }

local head_optimizer = {
  adamw   = pg.optim.adamw   { lr = p.lr, betas = { 0.9, 0.999 }, eps = 1e-10, weight_decay = 0.1 },
  rownorm = pg.optim.rownorm { lr = p.lr, beta = 0.95, eps = 1e-8 },
}

local rates = { 2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2 }

return pg.recipe {
  name  = "width",
  seed  = p.seed,
  model = { layers = 2, width = p.width, heads = p.width // 64, context = 128 },
  data  = pg.data.shards { path = p.data },
  batch = { sequences = 32, micro = 8 },
  updates  = p.updates,
  schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
  optimizers = {
    { role = "embedding", pg.optim.adamw { lr = 4e-3, weight_decay = 0.1 } },
    { role = "backbone",  pg.optim.muon  { lr = 8e-3, weight_decay = 0.1 } },
    { role = "head",      head_optimizer[p.head] },
  },
  hooks = {
    pg.every(10, pg.diagnostics.head_diameter()),
    pg.every(50, pg.diagnostics.validation {
              tokens = p.validation, hilbert_panel = math.min(2048, p.validation) }),
    pg.checkpoint { every = 100, keep = 1 },
  },
  sweep = { grid = { width = { 64, 128, 256 }, head = { "adamw", "rownorm" }, lr = rates,
                     seed = { 0 } } },
}
