-- Options that every optimizer takes: cautious decay, the clip of single parameters, and the scale
-- of weight decay, through changes of optimizers as well.
local pg = require "perigee"
local support = require "lua_support"

local data

local function open(optimizers, changes)
  changes = changes or {}
  changes.optimizers = optimizers
  changes.schedule = changes.schedule or pg.schedule.constant()
  return assert(pg.open(support.recipe(pg, data, changes),
    { out = support.folder() .. "/run", threads = 1 }))
end

-- The same numbers, of two contexts.
local function same(a, b, what)
  assert.same(a:to_table(), b:to_table(), what)
end

-- A copy of b where the run is.
local function beside(run, b) return pg.core.tensor(run.context, b:to_table()) end

local function all(optimizer)
  return { { role = { "embedding", "backbone", "head" }, optimizer } }
end

setup(function() data = support.data() end)
teardown(support.clean)

describe("every optimizer", function()
  local lua_sgd = pg.optim.define { name = "lua_sgd", defaults = { lr = 1 },
    increment = function(w, h) return w.gradient:mul(-h.lr) end }

  it("decays with `cautious` only weights that it moves towards zero", function()
    local makers = {
      function(o) return pg.optim.sgd(o) end, -- applies in its kernel
      function(o) return lua_sgd(o) end,      -- is applied by the run
    }
    for _, make in ipairs(makers) do
      local run <close> = open(all(make { lr = 0.5, weight_decay = 0.5, cautious = true }),
        { increments = "all", updates = 2 })
      local before = {}
      for i, p in ipairs(run.parameters) do before[i] = p.value:clone() end
      run:step()
      local decayed, kept = 0, 0
      for i, p in ipairs(run.parameters) do
        -- fp32 arithmetic with exact constants: keep = 1 - 0.5 * 0.5
        local towards = p.increment:mul(before[i]):lt(0)
        local want = before[i]:mul(towards:mul(-0.25):add(1)):add(p.increment)
        assert.equal(0, want:sub(p.value):abs():max(), p.name)
        local share = towards:sum()
        decayed, kept = decayed + share, kept + p.value:elements() - share
      end
      assert.is_true(decayed > 100 and kept > 100)
    end
  end)

  it("clips with `clip` the gradient of each parameter, after the clip of all", function()
    for _, whole in ipairs { false, 0.5 } do
      local run <close> = open({
        { role = { "embedding", "backbone" }, pg.optim.sgd { lr = 1 } },
        { role = "head", pg.optim.sgd { lr = 1, clip = 1e-3 } },
      }, { clip = whole, increments = "all", updates = 2 })
      local plain <close> = open(all(pg.optim.sgd { lr = 1 }),
        { clip = whole, increments = "all", updates = 2 })
      run:step()
      plain:step()
      for i, p in ipairs(run.parameters) do
        local want = beside(run, plain.parameters[i].increment)
        if p.role == "head" then
          -- One factor, rounded, and a product.
          local norm = want:norm()
          assert.is_true(norm > 1e-2)
          want = want:mul(1e-3 / (norm + 1e-6))
          assert.is_true(math.abs(p.increment:norm() / 1e-3 * (norm + 1e-6) / norm - 1) < 1e-6)
          assert.is_true(want:sub(p.increment):abs():max() <= 4 * 2 ^ -24 * want:abs():max())
        else
          assert.equal(0, want:sub(p.increment):abs():max(), p.name)
        end
      end
    end
  end)

  it("does nothing with `clip` where the norm is below it", function()
    local a <close> = open(all(pg.optim.sgd { lr = 0.1, clip = 1e3 }), { updates = 2 })
    local b <close> = open(all(pg.optim.sgd { lr = 0.1 }), { updates = 2 })
    a:step()
    b:step()
    for i, p in ipairs(a.parameters) do
      same(p.value, b.parameters[i].value, p.name)
    end
  end)

  it("refuses what these options cannot be", function()
    assert.error_matches(function() pg.optim.sgd { lr = 1, cautious = 1 } end, "cautious")
    assert.error_matches(function() pg.optim.sgd { lr = 1, clip = 0 } end, "clip")
    assert.error_matches(function() pg.optim.define { name = "taken", defaults = { clip = 1 },
      increment = function(w) return w.gradient end } end, "no option of every optimizer")
  end)

  it("keeps them when hyperparameters change, and the decay's scale when the optimizer does",
    function()
      local run <close> = open({
        { role = { "embedding", "backbone" }, pg.optim.sgd { lr = 0.1 } },
        { role = "head", weight_decay_scale = "independent",
          pg.optim.sgd { lr = 0.25, weight_decay = 0.5, cautious = true, clip = 0.1 } },
      }, { updates = 6, increments = "all" })
      local function decay()
        local before = run.head.value:clone()
        run:step()
        local rest = run.head.value:sub(run.head.increment)
        return rest:norm() / before:norm()
      end
      run:set("head", { lr = 0 }) -- no step: nothing moves towards zero
      assert.equal(1, decay())
      -- Nothing stated: the entry's scale, not lr * decay = 0.
      run:set_optimizer("head", pg.optim.sgd { lr = 0, weight_decay = 0.5 })
      assert.equal(0.5, decay())
      run:set_optimizer("head",
        pg.optim.sgd { lr = 0, weight_decay = 0.5, weight_decay_scale = "lr" })
      assert.equal(1, decay())
    end)
end)
