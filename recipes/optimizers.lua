-- Every head optimizer on one backbone, with equal tuning budgets, and what its updates are like:
-- does a larger share of the exact steepest descent under the row diameter train better?
-- The exact optimum is within reach for a small vocabulary only:
--   perigee data prepare --text data/kjv.txt --out data/kjv300 --vocab-size 300
--   perigee sweep recipes/optimizers.lua             three rates each on a tuning seed, then the
--                                                    best rate of each on seeds 0, 1 and 2
--   perigee train recipes/optimizers.lua --set head=muon --set factor=0.3
local pg = require "perigee"

local names = { "rownorm", "adamw", "muon", "exact", "greedy_radial", "equidistant", "lausu",
  "moga", "scion", "modula", "normuon", "rmnp", "scale", "sinkgd", "lion", "signsgd", "sgd",
  "shampoo", "soap", "kfac" }
local p = pg.params {
  head    = pg.choice(names),
  factor  = 1.0, -- of the rate below
  seed    = 0,
  updates = 150,
  data    = "data/kjv300",
  oracle  = 3.0, -- seconds
  validation = 65536,
}

local d = 64
-- Rates from which `factor` is tuned, near the best of a trial of 40 updates. `row` is the norm of
-- a row of RowNorm's increment; where rows follow from the gradient the rate stands by itself.
local row = 0.08
local entry = row / math.sqrt(d) -- of optimizers whose increments have entries of one size
local o = pg.optim
local optimizer = {
  rownorm = function(f) return o.rownorm { lr = f * row } end,
  adamw   = function(f) return o.adamw { lr = f * 4e-3 * 512 / d, weight_decay = 0.1 } end,
  muon    = function(f) return o.muon { lr = f * row, weight_decay = 0 } end,
  exact   = function(f) return o.exact { lr = f * row, gap = 0.05, iterations = 50 } end,
  greedy_radial = function(f) return o.greedy_radial { lr = f * row } end,
  equidistant   = function(f) return o.equidistant { lr = f * row } end,
  lausu   = function(f) return o.lausu { lr = f * row, center = true } end,
  moga    = function(f) return o.moga { lr = f * row, base = 1, fan_in = false,
                                        weight_decay = 0 } end,
  scion   = function(f) return o.scion { lr = f * row, map = "row", radius = math.sqrt(d),
                                         weight_decay = 0 } end,
  modula  = function(f) return o.modula { lr = f * row } end,
  normuon = function(f) return o.normuon { lr = f * row } end,
  rmnp    = function(f) return o.rmnp { lr = f * row / 2 } end,
  scale   = function(f) return o.scale { lr = f * entry, beta = 0.9 } end,
  sinkgd  = function(f) return o.sinkgd { lr = f * entry } end,
  lion    = function(f) return o.lion { lr = f * 2 * entry } end,
  signsgd = function(f) return o.signsgd { lr = f * 2 * entry, beta = 0.95 } end,
  sgd     = function(f) return o.sgd { lr = f * 1.0, momentum = 0.9 } end,
  shampoo = function(f) return o.shampoo { lr = f * 3 * row, one_sided = true,
                                           weight_decay = 0 } end,
  soap    = function(f) return o.soap { lr = f * 2 * entry, one_sided = true,
                                        weight_decay = 0 } end,
  kfac    = function(f) return o.kfac { lr = f * 6.0 } end,
}

return pg.recipe {
  name  = "optimizers",
  seed  = p.seed,
  model = { layers = 2, width = d, heads = 2, head_dim = 32, context = 128 },
  data  = pg.data.shards { path = p.data },
  batch = { sequences = 32, micro = 8 },
  updates  = p.updates,
  schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
  log      = { every = 10 },
  optimizers = {
    { role = "embedding", o.adamw { lr = 4e-3, weight_decay = 0.1 } },
    { role = "backbone",  o.muon { lr = 8e-3, weight_decay = 0.1 } },
    { role = "head",      optimizer[p.head](p.factor) },
  },
  hooks = {
    pg.every(50, pg.diagnostics.head_diameter()),
    pg.every(50, pg.diagnostics.validation { tokens = p.validation,
                   hilbert_panel = math.min(2048, p.validation) }),
    -- geometry/oracle_increment_share is the share of T(G) that the increment keeps.
    pg.every(50, pg.diagnostics.oracle { gap = 0.02, seconds = p.oracle }),
  },
  sweep = { grid = { head = names, factor = { 0.3, 1, 3 } },
            tuning = { by = "head", seeds = { 10 }, report = { 0, 1, 2 } } },
}
