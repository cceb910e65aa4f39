-- The paper's experiment at CPU size: three widths, two head optimizers, three seeds, on the text
-- of the quickstart; the head's rates fall as 1/width, as the paper's do.
--   perigee sweep recipes/small.lua && perigee report runs/small-sweep
local pg = require "perigee"
local p  = pg.params { width = pg.choice { 64, 128, 256 }, head = pg.choice { "rownorm", "adamw" },
                       seed = 0, updates = 300, data = "data/kjv", validation = 65536 }

local head_optimizer = {
  adamw   = pg.optim.adamw   { lr = 4e-3 * 512 / p.width, betas = { 0.9, 0.999 }, eps = 1e-10,
                               weight_decay = 0.1 },
  rownorm = pg.optim.rownorm { lr = 3.2e-3 * 512 / p.width, beta = 0.95, eps = 1e-8 },
}

return pg.recipe {
  name  = "small",
  seed  = p.seed,
  model = { layers = 4, width = p.width, heads = p.width // 64, context = 128 },
  data  = pg.data.shards { path = p.data },
  batch = { sequences = 32, micro = 8 },
  updates  = p.updates,
  schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
  clip     = 1.0,
  log      = { every = 10 },
  optimizers = {
    { role = "embedding", pg.optim.adamw { lr = 4e-3, betas = { 0.9, 0.999 }, eps = 1e-10,
                                           weight_decay = 0.1 } },
    { role = "backbone",  pg.optim.muon  { lr = 8e-3, momentum = 0.95, nesterov = true,
                                           weight_decay = 0.1 } },
    { role = "head",      head_optimizer[p.head] },
  },
  hooks = {
    pg.every(10, pg.diagnostics.head_diameter()),
    pg.every(50, pg.diagnostics.validation {
              tokens = p.validation, hilbert_panel = math.min(2048, p.validation) }),
    pg.checkpoint { every = 100, keep = 1 },
  },
  sweep = { grid = { width = { 64, 128, 256 }, head = { "adamw", "rownorm" },
                     seed = { 0, 1, 2 } } },
}
