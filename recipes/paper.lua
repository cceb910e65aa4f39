-- The 18 runs of "Toward a First-Principles Update Geometry for the Language-Model Head"
-- (arXiv 2608.22253), appendix B: three sizes, two head recipes, seeds 0, 1 and 2.
--   perigee sweep recipes/paper.lua --gpus-per-run 8
--   mpirun -np 8 perigee train recipes/paper.lua --set model=380m --set head=adamw --set seed=1
-- With --dry-run both only show the plan, also where there is no GPU; sweep's --rate gives times.
-- `data` is the FineWeb100B release in GPT-2 tokens as llm.c stores it, 890 files such as
-- fineweb_train_000001.bin and fineweb_val_000000.bin: `perigee data check DIR --paper`.
local pg = require "perigee"
local p  = pg.params {
  model    = pg.choice { "190m", "380m", "640m" },
  head     = pg.choice { "adamw", "rownorm" },
  -- "adamw" is the comparison that the released program keeps: AdamW on all matrices.
  backbone = pg.choice { "muon", "adamw" },
  seed     = 0,
  data     = "data/fineweb",
  micro    = 0, -- sequences of a micro-batch; 0: the paper's
}

-- Table 1: sequences of a micro-batch on each of 8 GPUs. Table 2: peak learning rates of the head;
-- both are those of width 512 times 512/width. backbone_adamw: peak rates of blocks, embedding and
-- head when AdamW trains the blocks too, from the released program, which has no 640m.
local size = ({
  ["190m"] = { micro = 32, adamw = 4e-3, rownorm = 3.2e-3,
               backbone_adamw = { backbone = 2e-3, embedding = 2e-3, head = 2e-3 } },
  ["380m"] = { micro = 16, adamw = 2.6666666666666666e-3, rownorm = 2.1333333333333333e-3,
               backbone_adamw = { backbone = 1.3333333333333333e-3, embedding = 2e-3,
                                  head = 1.3333333333333333e-3 } },
  ["640m"] = { micro = 8,  adamw = 2e-3, rownorm = 1.6e-3 },
})[p.model]

if p.backbone == "adamw" and (not size.backbone_adamw or p.head ~= "adamw") then
  error(("backbone = adamw with model = %s, head = %s: the paper has it for 190m and 380m with the "
    .. "adamw head only"):format(p.model, p.head))
end

-- "Optimizer recipes": what AdamW has wherever it is used.
local function adamw(lr)
  return pg.optim.adamw { lr = lr, betas = { 0.9, 0.999 }, eps = 1e-10, weight_decay = 0.1 }
end

local rate = p.backbone == "adamw" and size.backbone_adamw
  or { backbone = 8e-3, embedding = 4e-3, head = size[p.head] }

local backbone = {
  adamw = adamw,
  muon  = function(lr)
    return pg.optim.muon { lr = lr, momentum = 0.95, nesterov = true, steps = 5, eps = 1e-5,
                           weight_decay = 0.1 }
  end,
}
local head = {
  adamw   = adamw,
  rownorm = function(lr)
    return pg.optim.rownorm { lr = lr, beta = 0.95, eps = 1e-8, weight_decay = 0 }
  end,
}

return pg.recipe {
  name  = "paper-" .. p.model,
  seed  = p.seed,
  -- 32 blocks, MLP 4d, heads of 64, N(0, 0.02²), context 2048; GPT-2's vocabulary, which the
  -- published shards do not state.
  model = pg.model(p.model, { vocab = 50257 }),
  data  = pg.data.shards { path = p.data },
  batch = { sequences = 256, micro = p.micro > 0 and p.micro or size.micro },
  tokens_per_parameter = 20,
  schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
  clip     = 1.0,
  compute  = "bf16",
  log      = { every = 10 },
  optimizers = {
    { role = "embedding", adamw(rate.embedding) },
    { role = "backbone",  backbone[p.backbone](rate.backbone) },
    { role = "head",      head[p.head](rate.head) },
  },
  hooks = {
    pg.every(10,  pg.diagnostics.head_diameter()),
    -- The panel is that of 8 GPUs on any number: the first 1024 positions of each one's part.
    pg.every(500, pg.diagnostics.validation { tokens = 5242880,
                    hilbert_panel = { tokens = 8192, ranks = 8, micro = size.micro } }),
    -- Not of the paper, which saves at the end: what a resume needs.
    pg.checkpoint { every = 500, keep = 1 },
  },
  sweep = { grid = { model = { "190m", "380m", "640m" }, head = { "adamw", "rownorm" },
                     seed = { 0, 1, 2 } } },
}
