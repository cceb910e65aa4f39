-- What does the head's gradient bottleneck cause? Paired runs that change one thing each: nothing;
-- a factorised head of half the rank (forward and backward); only what the blocks are told reduced
-- to half the rank; the head's own gradient without what no block is told of; as many classes more
-- as there are tokens, which are never a target. After Murugan (2026), in the sizes of its larger
-- model.
--   perigee sweep recipes/bottleneck.lua
local pg = require "perigee"
local p  = pg.params {
  cause = pg.choice { "none", "factorised", "backward", "residual", "classes" },
  seed = 0, updates = 300, width = 96, layers = 6, data = "data/kjv", validation = 65536,
  classes = 4096,
}

local change = {
  none       = {},
  factorised = { rank = p.width // 2 },
  backward   = { backward_rank = p.width // 2, backward_seed = p.seed },
  residual   = { residual = false },
  classes    = { extra = p.classes },
}

return pg.recipe {
  name  = "bottleneck",
  seed  = p.seed,
  model = { layers = p.layers, width = p.width, heads = 3, head_dim = p.width // 3 // 2 * 2,
            context = 128, head = change[p.cause] },
  data  = pg.data.shards { path = p.data },
  batch = { sequences = 32, micro = 8 },
  updates  = p.updates,
  schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
  optimizers = {
    { role = "embedding", pg.optim.adamw { lr = 4e-3, weight_decay = 0.1 } },
    { role = "backbone",  pg.optim.muon  { lr = 8e-3, weight_decay = 0.1 } },
    { role = "head",      pg.optim.adamw { lr = 4e-3, weight_decay = 0.1 } },
  },
  hooks = {
    pg.every(50, pg.diagnostics.validation {
              tokens = p.validation, hilbert_panel = math.min(2048, p.validation) }),
    pg.every(50, pg.diagnostics.bottleneck { panel = math.min(1024, p.validation) }),
    pg.checkpoint { every = 150, keep = 1 },
  },
  sweep = { grid = { cause = { "none", "factorised", "backward", "residual", "classes" },
                     seed = { 0, 1, 2, 3, 4 } } },
}
