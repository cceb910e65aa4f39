-- What host_embed runs: a training inside somebody else's lua_State. arg[1]: data folder; arg[2]:
-- run directory.
local pg = require "perigee"

local run = assert(pg.open(pg.recipe {
  name = "embedded",
  model = { layers = 1, width = 32, heads = 2, head_dim = 16, context = 16 },
  data = pg.data.shards { path = arg[1] },
  batch = { sequences = 8 }, updates = 10,
  optimizers = {
    { role = "embedding", pg.optim.adamw { lr = 4e-3 } },
    { role = "backbone", pg.optim.muon { lr = 8e-3 } },
    { role = "head", pg.optim.rownorm { lr = 1e-2 } },
  },
}, { out = arg[2], quiet = true }))
local first
for _ in run:updates() do first = first or run.loss end
assert(run.loss < first, "the loss did not fall")
print(("embedded: loss %.4f -> %.4f in %d updates"):format(first, run.loss, run.update))
run:close()
