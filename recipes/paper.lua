-- The runs of "Toward a First-Principles Update Geometry for the Language-Model Head" (2026):
--   perigee sweep recipes/paper.lua --set data=FOLDER              all 18
--   perigee train recipes/paper.lua --set model=380m --set seed=1  one of them
-- The data are 890 + 1 shards of FineWeb with GPT-2's tokens; `perigee data check FOLDER` says
-- whether they are the paper's. Micro-batches are those of the published runs on eight GPUs; with
-- --set micro=N results are the same but for rounding.
local pg = require "perigee"
local p  = pg.params {
  model = pg.choice { "190m", "380m", "640m" }, head = pg.choice { "adamw", "rownorm" },
  backbone = pg.choice { "muon", "adamw" }, seed = 0, data = "data/fineweb", micro = 0,
}

local width = ({ ["190m"] = 512, ["380m"] = 768, ["640m"] = 1024 })[p.model]
local micro = ({ ["190m"] = 32,  ["380m"] = 16,  ["640m"] = 8 })[p.model]

-- The comparison runs with AdamW everywhere: no 640m, no RowNorm head.
if p.backbone == "adamw" and (p.model == "640m" or p.head == "rownorm") then
  error(("backbone = adamw with model = %s, head = %s: the paper has it for 190m and 380m with the "
    .. "adamw head only"):format(p.model, p.head))
end

local function adamw(lr)
  return pg.optim.adamw { lr = lr, betas = { 0.9, 0.999 }, eps = 1e-10, weight_decay = 0.1 }
end

-- Peak rates at width 512; those of the head, and of an AdamW backbone, fall as 1/width.
local scale = 512 / width
local heads = {
  adamw   = adamw((p.backbone == "adamw" and 2e-3 or 4e-3) * scale),
  rownorm = pg.optim.rownorm { lr = 3.2e-3 * scale, beta = 0.95, eps = 1e-8, weight_decay = 0 },
}
local backbones = {
  muon  = pg.optim.muon { lr = 8e-3, momentum = 0.95, nesterov = true, steps = 5, eps = 1e-5,
                          weight_decay = 0.1 },
  adamw = adamw(2e-3 * scale),
}

return pg.recipe {
  name  = "paper-" .. p.model,
  seed  = p.seed,
  model = { preset = p.model },
  data  = pg.data.shards { path = p.data },
  batch = { sequences = 256, micro = p.micro > 0 and p.micro or micro },
  tokens_per_parameter = 20,
  schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
  clip     = 1.0,
  log      = { every = 10 },
  optimizers = {
    { role = "embedding", adamw(p.backbone == "adamw" and 2e-3 or 4e-3) },
    { role = "backbone",  backbones[p.backbone] },
    { role = "head",      heads[p.head] },
  },
  hooks = {
    pg.every(10,  pg.diagnostics.head_diameter()),
    -- The panel of the published runs, which had eight ranks.
    pg.every(500, pg.diagnostics.validation { tokens = 5242880,
                    hilbert_panel = { tokens = 8192, ranks = 8, micro = micro } }),
    pg.checkpoint { every = 500, keep = 2 },
  },
  sweep = { grid = { model = { "190m", "380m", "640m" }, head = { "adamw", "rownorm" },
                     seed = { 0, 1, 2 } } },
}
