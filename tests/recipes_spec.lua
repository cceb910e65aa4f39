-- The recipes of recipes/: each trains with its defaults, and the paper's are what SPEC says.
local pg = require "perigee"
local support = require "lua_support"
local sweep = require "perigee.sweep"
local core = support.core

local data

setup(function()
  data = support.data()
  support.shard(data .. "/long_train_000009.bin", 9000, function(i) return (i * i + 3 * i) % 97 end)
end)
teardown(support.clean)

-- A shard of `count` zero tokens that takes no room on the disk.
local function hollow(path, count)
  local file = assert(io.open(path, "wb"))
  file:write(string.pack("<i4i4i4", 20240520, 1, count))
  file:seek("set", 1024 + 2 * count - 2)
  file:write "\0\0"
  file:close()
end

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

describe("the paper's recipe", function()
  -- SPEC section 1.
  local published = {
    ["190m"] = { 185680896, 7083, 3713531904, 4e-3, 3.2e-3 },
    ["380m"] = { 379184640, 14464, 7583301632, 2.6666666666666666e-3, 2.1333333333333333e-3 },
    ["640m"] = { 639797248, 24406, 12795772928, 2e-3, 1.6e-3 },
  }
  local folder

  setup(function()
    folder = support.folder()
    hollow(folder .. "/fineweb_train_000001.bin", 100000000)
    hollow(folder .. "/fineweb_val_000000.bin", 100000000)
  end)

  it("plans the 18 runs with the published sizes", function()
    local plan = sweep.plan { recipe = "recipes/paper.lua", set = { data = folder }, threads = 1 }
    assert.equal(18, #plan.runs)
    local seen = {}
    for _, run in ipairs(plan.runs) do
      local p, q = run.plan, published[run.point.model]
      assert.same({ q[1], q[2], q[3] }, { p.weights, p.last, p.tokens })
      assert.same({ init = run.point.seed, data = run.point.seed }, p.seed)
      seen[run.point.model .. run.point.head .. run.point.seed] = true
    end
    local count = 0
    for _ in pairs(seen) do count = count + 1 end
    assert.equal(18, count)
  end)

  it("has the published rates", function()
    for model, q in pairs(published) do
      for i, head in ipairs { "adamw", "rownorm" } do
        local spec = assert(pg.load("recipes/paper.lua", { model = model, head = head })):spec()
        local lr = {} -- of embedding, backbone, head
        for k, entry in ipairs(spec.entries) do lr[k] = entry.optimizer:values(0, 1).lr end
        assert.same({ 4e-3, 8e-3 }, { lr[1], lr[2] })
        -- The published digits are those of a double: one rounding of 512/width apart.
        assert.is_true(math.abs(lr[3] - q[3 + i]) <= 2.0 ^ -52 * q[3 + i])
        assert.equal(256, spec.batch.sequences)
      end
    end
    local spec = assert(pg.load("recipes/paper.lua", { model = "380m", backbone = "adamw" })):spec()
    for k, entry in ipairs(spec.entries) do
      assert.equal("adamw", entry.optimizer.name)
      assert.equal(k == 1 and 2e-3 or 2e-3 * (512 / 768), entry.optimizer:values(0, 1).lr)
    end
  end)

  it("refuses what the paper does not have", function()
    for _, set in ipairs { { backbone = "adamw", head = "rownorm" },
      { backbone = "adamw", model = "640m", head = "adamw" } } do
      local ok, recipe, message = pcall(pg.load, "recipes/paper.lua", set)
      assert.matches("the paper has it for 190m and 380m with the adamw head only",
        ok and message or recipe)
    end
  end)

  it("knows the published data by their digest", function()
    -- 891 files of 200,001,024 bytes that take 3.6 MB of disk.
    for i = 2, 890 do hollow(("%s/fineweb_train_%06d.bin"):format(folder, i), 100000000) end
    local ctx <close> = assert(core.context { device = "cpu" })
    assert.equal("87edf1844351c445e687ea865215b5fecff3a8b8052dff5b7263ea30712376f4",
      core.digest(ctx, folder))
  end)
end)
