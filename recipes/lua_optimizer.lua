-- A head optimizer written in Lua: RowNorm, on equal terms with the one in C. Its weights are bit
-- for bit those of pg.optim.rownorm on a CPU.
--   perigee train recipes/lua_optimizer.lua --set data=FOLDER
local pg = require "perigee"
local p  = pg.params { data = "data/kjv", seed = 0, updates = 20 }

local my_rownorm = pg.optim.define {
  name = "my_rownorm", slots = { momentum = "matrix" },
  defaults = { lr = 1e-3, beta = 0.95, eps = 1e-8, weight_decay = 0 },
  -- w.updates counts this parameter's own updates from 1; h.lr is already scheduled.
  increment = function(w, h)
    local m = w.slots.momentum
    m:lerp_(w.gradient, 1 - h.beta)
    return m:div_rows(m:row_norms() + h.eps * (1 - h.beta ^ w.updates)):mul(-h.lr)
  end,
}

return pg.recipe {
  name  = "lua_optimizer",
  seed  = p.seed,
  model = { layers = 1, width = 32, heads = 2, head_dim = 16, context = 16 },
  data  = pg.data.shards { path = p.data },
  batch = { sequences = 8, micro = 4 },
  updates  = p.updates,
  schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
  log      = { every = 5 },
  optimizers = {
    { role = "embedding", pg.optim.adamw { lr = 4e-3, eps = 1e-10, weight_decay = 0.1 } },
    -- Any numeric hyperparameter may be a function of the update: a momentum warmup.
    { role = "backbone",  pg.optim.muon  { lr = 8e-3, weight_decay = 0.1, momentum =
                            function(update) return math.min(0.95, 0.85 + update / 100) end } },
    { role = "head",      my_rownorm { lr = 3.2e-3 } },
  },
  hooks = {
    pg.every(5, pg.diagnostics.head_diameter()),
    pg.checkpoint { every = 5, keep = 3 },
  },
}
