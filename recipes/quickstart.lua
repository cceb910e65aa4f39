-- A small transformer on the text that tools/quickstart prepares, with either head optimizer:
--   perigee train recipes/quickstart.lua --set head=adamw
local pg = require "perigee"
local p  = pg.params { head = pg.choice { "rownorm", "adamw" }, seed = 0, updates = 300,
                       data = "data/kjv", validation = 65536 }

local d = 128
local head_optimizer = {
  -- The paper's peak learning rates, scaled from width 512.
  adamw   = pg.optim.adamw   { lr = 4e-3 * 512 / d, betas = { 0.9, 0.999 }, eps = 1e-10,
                               weight_decay = 0.1 },
  rownorm = pg.optim.rownorm { lr = 3.2e-3 * 512 / d, beta = 0.95, eps = 1e-8 },
}

return pg.recipe {
  name  = "quickstart",
  seed  = p.seed,
  model = { layers = 4, width = d, heads = 2, context = 128 },
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
    pg.every(10,  pg.diagnostics.head_diameter()),
    pg.every(100, pg.diagnostics.validation {
              tokens = p.validation, hilbert_panel = math.min(2048, p.validation) }),
    pg.every(50,  function(run)
      run:log("head/row_norm_max", run.head.increment:row_norms():max())
    end),
    pg.checkpoint { every = 100, keep = 3 },
  },
}
