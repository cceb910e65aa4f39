-- Every head optimizer on one backbone, at equal tuning budgets: five rates each on a tuning seed,
-- then the best rate on three others. Each run reports how much of the exact steepest descent its
-- updates keep, T(G), their diameter and their Hilbert RMS: does a larger share train better?
--   perigee sweep recipes/optimizers.lua && perigee report runs/optimizers-sweep
local pg = require "perigee"

-- A rate in the middle of each one's range at this size; the sweep takes multiples of it.
local rates = {
  adamw = 4e-3, rownorm = 1e-2, sgd = 1, lion = 1e-3, signsgd = 1e-3, scale = 1e-2, rmnp = 1e-2,
  sinkgd = 1e-3, moga = 1e-2, muon = 1e-2, scion = 1e-3, modula = 1e-2, normuon = 1e-2,
  lausu = 1e-2, equidistant = 1e-2, greedy_radial = 1e-2, soap = 3e-3, kfac = 1e-2,
}
local names = {}
for name in pairs(rates) do names[#names + 1] = name end
table.sort(names)

local p  = pg.params { head = pg.choice(names), factor = 1.0, seed = 0, updates = 200,
                       data = "data/kjv", validation = 65536, oracle = 5.0 }

return pg.recipe {
  name  = "optimizers",
  seed  = p.seed,
  model = { layers = 2, width = 64, heads = 1, context = 128 },
  data  = pg.data.shards { path = p.data },
  batch = { sequences = 32, micro = 8 },
  updates  = p.updates,
  schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
  optimizers = {
    { role = "embedding", pg.optim.adamw { lr = 4e-3, weight_decay = 0.1 } },
    { role = "backbone",  pg.optim.muon  { lr = 8e-3, weight_decay = 0.1 } },
    { role = "head",      pg.optim[p.head] { lr = p.factor * rates[p.head] } },
  },
  hooks = {
    pg.every(10, pg.diagnostics.head_diameter()),
    pg.every(50, pg.diagnostics.validation {
              tokens = p.validation, hilbert_panel = math.min(2048, p.validation) }),
    pg.every(100, pg.diagnostics.oracle { seconds = p.oracle }),
    pg.checkpoint { every = 100, keep = 1 },
  },
  sweep = { grid = { head = names, factor = { 0.1, 0.3, 1.0, 3.0, 10.0 } },
            tuning = { by = "head", seeds = { 100 }, report = { 0, 1, 2 } } },
}
