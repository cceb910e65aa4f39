-- Seconds on any machine: what the tests and a first look need.
--   perigee train recipes/tiny.lua --set data=FOLDER
local pg = require "perigee"
local p  = pg.params {
  data = "data/kjv", head = pg.choice { "rownorm", "adamw" }, seed = 0, updates = 20,
  checkpoint_every = 5, tokens = 256,
}

local head_optimizer = {
  adamw   = pg.optim.adamw   { lr = 4e-3, betas = { 0.9, 0.999 }, eps = 1e-10, weight_decay = 0.1 },
  rownorm = pg.optim.rownorm { lr = 3.2e-3, beta = 0.95, eps = 1e-8 },
}

return pg.recipe {
  name  = "tiny",
  seed  = p.seed,
  model = { layers = 1, width = 32, heads = 2, head_dim = 16, context = 16 },
  data  = pg.data.shards { path = p.data },
  batch = { sequences = 8, micro = 4 },
  updates  = p.updates,
  schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
  log      = { every = 5 },
  optimizers = {
    { role = "embedding", pg.optim.adamw { lr = 4e-3, eps = 1e-10, weight_decay = 0.1 } },
    { role = "backbone",  pg.optim.muon  { lr = 8e-3, weight_decay = 0.1 } },
    { role = "head",      head_optimizer[p.head] },
  },
  hooks = {
    pg.every(5, pg.diagnostics.head_diameter()),
    pg.every(10, pg.diagnostics.validation { tokens = p.tokens, hilbert_panel = p.tokens }),
    pg.checkpoint { every = p.checkpoint_every, keep = 3 },
  },
}
