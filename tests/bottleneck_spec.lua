-- Runs of recipes/bottleneck.lua with one seed are paired: what a cause leaves alone starts with
-- the same bits, and reads the same tokens.
local pg = require "perigee"
local support = require "lua_support"

local causes = { "none", "factorised", "backward", "residual", "classes" }
local data

setup(function()
  data = support.data()
  support.shard(data .. "/long_train_000009.bin", 3 * 4096 + 1, function(i)
    return (i * i + 3 * i) % 97
  end)
  support.shard(data .. "/text_val_000000.bin", 1025, function(i) return (5 * i + i * i) % 97 end)
end)
teardown(support.clean)

local function same(a, b, what)
  for i, row in ipairs(a) do
    for j, x in ipairs(row) do
      if x ~= b[i][j] then
        error(("%s [%d][%d]: %.9g and %.9g"):format(what, i, j, x, b[i][j]))
      end
    end
  end
end

-- Initial weights by name, hashes of the batches, and the losses of three updates.
local function watch(cause, seed)
  local run = assert(pg.open(support.root .. "/recipes/bottleneck.lua", { threads = 1,
    out = support.folder() .. "/run", max_updates = 3, set = { cause = cause, seed = seed,
      layers = 1, width = 12, classes = 50, validation = 1024, data = data } }))
  local seen = { weights = {}, batches = {}, losses = {} }
  for _, parameter in ipairs(run.parameters) do
    seen.weights[parameter.name] = parameter.value:to_table()
  end
  for update in run:updates() do
    seen.batches[update], seen.losses[update] = run.batch_hash, run.loss
  end
  run:close()
  return seen
end

describe("recipes/bottleneck.lua", function()
  it("pairs the runs of a seed", function()
    local base = watch("none", 3)
    for _, cause in ipairs(causes) do
      local run = watch(cause, 3)
      assert.same(base.batches, run.batches)
      local shared = 0
      for name, weights in pairs(base.weights) do
        if run.weights[name] then
          same(weights, run.weights[name], cause .. " " .. name) -- of `classes` the first 97 rows
          shared = shared + 1
        end
      end
      assert.equal(cause == "factorised" and 8 or 9, shared)
      -- The first update has a rate of 0: losses part after the second, which is the first to move.
      local alike = cause ~= "factorised" and cause ~= "classes"
      assert.equal(alike, base.losses[1] == run.losses[1])
      assert.equal(alike, base.losses[2] == run.losses[2])
      assert.equal(cause == "none", base.losses[3] == run.losses[3], cause)
    end
  end)

  it("has other weights and another order of batches with another seed", function()
    local a, b = watch("none", 0), watch("none", 1)
    assert.not_equal(a.batches[1], b.batches[1])
    assert.not_equal(a.weights["lm_head.weight"][1][1], b.weights["lm_head.weight"][1][1])
  end)
end)
