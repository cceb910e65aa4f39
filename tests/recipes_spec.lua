-- The recipes of recipes/ train; paper_spec.lua has the paper's.
local pg = require "perigee"
local support = require "lua_support"

local data

setup(function()
  data = support.data()
  support.shard(data .. "/long_train_000009.bin", 9000, function(i) return (i * i + 3 * i) % 97 end)
end)
teardown(support.clean)

describe("recipes", function()
  -- What makes each short. The data of the tests have 97 tokens.
  local short = {
    small = { width = 64, updates = 2, validation = 256 },
    bottleneck = { cause = "backward", layers = 1, width = 12, updates = 2, validation = 256 },
    width = { width = 64, updates = 2, validation = 256 },
    optimizers = { head = "rownorm", updates = 2, validation = 256, oracle = 0.5 },
  }
  for name, set in pairs(short) do
    it(name .. " trains", function()
      set.data = data
      local out = support.folder() .. "/run"
      local run = assert(pg.open(("recipes/%s.lua"):format(name),
        { set = set, out = out, threads = 1 }))
      for _ in run:updates() do end -- luacheck: ignore 542
      run:close()
      assert.equal("finished", run.status)
      assert.equal("number", type(support.json(out .. "/summary.json").final_validation_loss))
    end)
  end

  it("bottleneck changes one thing at a time", function()
    local seen = {}
    for _, cause in ipairs { "none", "factorised", "backward", "residual", "classes" } do
      local spec = assert(pg.load("recipes/bottleneck.lua", { cause = cause, data = data })):spec()
      seen[cause] = spec.model.head
    end
    assert.same({ none = {}, factorised = { rank = 48 }, backward = { backward_rank = 48,
      backward_seed = 0 }, residual = { residual = false }, classes = { extra = 4096 } }, seen)
  end)

  it("optimizers takes every one that suits a head, at equal budgets", function()
    local spec = assert(pg.load("recipes/optimizers.lua", { data = data })):spec()
    local listed = {}
    for _, name in ipairs(spec.sweep.grid.head) do
      listed[name] = true
      local run <close> = assert(pg.open("recipes/optimizers.lua", { threads = 1,
        set = { head = name, updates = 2, validation = 256, oracle = 0.5, data = data },
        out = support.folder() .. "/run" }))
      for _ in run:updates() do end -- luacheck: ignore 542
      assert.equal("finished", run.status)
    end
    local ok, message = pcall(function() return pg.optim.no_such end)
    assert.is_false(ok)
    -- shampoo needs V x V at this size, exact solves the oracle at every update.
    local left = { frozen = true, define = true, shampoo = true, exact = true }
    for name in message:match("known: (.*)%)"):gmatch "%w[%w_]*" do
      assert(listed[name] or left[name], name .. " is missing in recipes/optimizers.lua")
    end
  end)
end)
