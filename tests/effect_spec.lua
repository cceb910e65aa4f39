-- The paper's effect on real text: with the same initial weights and data order, the last increment
-- of an AdamW head has at least five times the row diameter of RowNorm's, and RowNorm's never
-- exceeds twice its learning rate. (The published runs end at factors of 45 to 60, after 7000
-- updates and more; the factor grows with training.)
local pg = require "perigee"
local support = require "lua_support"
local core = support.core

local folder
teardown(support.clean)

-- A piece of the King James Bible, from Debian's package.
local function prepare()
  folder = support.folder()
  local code = support.shell("bible -f 'gen1:1-deu34:12' </dev/null | sed -E 's/^[^ ]+ //' >"
    .. folder .. "/text.txt")
  if code ~= 0 or core.fs.size(folder .. "/text.txt") < 100000 then return false end
  local ctx <close> = assert(core.context {})
  assert(core.prepare(ctx, { texts = { folder .. "/text.txt" }, out = folder .. "/data",
    vocab = 1024, val_fraction = 0.1 }))
  return true
end

local function train(head)
  local d = 64
  local heads = {
    adamw = pg.optim.adamw { lr = 4e-3 * 512 / d, betas = { 0.9, 0.999 }, eps = 1e-10,
      weight_decay = 0.1 },
    rownorm = pg.optim.rownorm { lr = 3.2e-3 * 512 / d, beta = 0.95, eps = 1e-8 },
  }
  local diameters, rates = {}, {}
  local run = assert(pg.open(pg.recipe {
    name = "effect", seed = 0,
    model = { layers = 2, width = d, heads = 1, context = 64 },
    data = pg.data.shards { path = folder .. "/data" },
    batch = { sequences = 16 }, updates = 120,
    schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
    optimizers = {
      { role = "embedding", pg.optim.adamw { lr = 4e-3, eps = 1e-10, weight_decay = 0.1 } },
      { role = "backbone", pg.optim.muon { lr = 8e-3, weight_decay = 0.1 } },
      { role = "head", heads[head] },
    },
    hooks = { pg.every(1, function(run)
      local d_exact = core.diameter(run.head.increment)
      diameters[run.update], rates[run.update] = d_exact.value, run.scale * 3.2e-3 * 512 / d
    end) },
  }, { out = folder .. "/" .. head, quiet = true }))
  local first_hash, losses = nil, {}
  for update in run:updates() do
    first_hash = first_hash or run.batch_hash
    losses[update] = run.loss
  end
  run:close()
  return diameters, rates, first_hash, losses
end

describe("the paper's effect on real text", function()
  it("shows in the row diameter of the last increment", function()
    if not prepare() then
      pending("Debian's bible-kjv is not installed")
      return
    end
    local adamw, _, tokens_a, losses_a = train "adamw"
    local rownorm, rates, tokens_b, losses_b = train "rownorm"
    assert.are.equal(120, #adamw)
    assert.are.equal(120, #rownorm)
    assert.are.equal(tokens_a, tokens_b)
    assert.are.equal(losses_a[1], losses_b[1])
    -- Both learn: far below the ln 1024 = 6.93 of a uniform guess.
    assert.is_true(losses_a[120] < 5.5 and losses_b[120] < 5.5)
    print(("# diameter of the last increment: adamw %.4g, rownorm %.4g, ratio %.1f"):format(
      adamw[120], rownorm[120], adamw[120] / rownorm[120]))
    assert.is_true(adamw[120] >= 5 * rownorm[120])
    for update, rate in ipairs(rates) do
      -- Each row has length lr to within fp32 rounding of d squares, a root and two products.
      assert.is_true(rownorm[update] <= 2 * rate * (1 + 1e-6),
        ("update %d: D = %.9g, 2 lr = %.9g"):format(update, rownorm[update], 2 * rate))
    end
  end)
end)
