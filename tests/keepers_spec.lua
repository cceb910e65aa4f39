-- Hooks that keep tensors of their own: pg.ema and pg.shadow. What they hold, that they change
-- nothing of the run, and that a resume continues them with the same bits.
local pg = require "perigee"
local support = require "lua_support"
local core = support.core

local data

local function open(changes, options)
  options = options or {}
  options.out = options.out or (support.folder() .. "/run")
  options.threads = 1
  return assert(pg.open(support.recipe(pg, data, changes), options)), options.out
end

local function train(run, update)
  for u in run:updates() do
    if u == update then break end
  end
end

local function same(a, b, what) assert.equal(0, a:sub(b):abs():max(), what) end

local function same_files(a, b, names)
  for _, name in ipairs(names) do
    assert.is_true(support.read(a .. name) == support.read(b .. name), name .. " differs")
  end
end

local checkpoint = "/checkpoints/00000008/"

setup(function() data = support.data() end)
teardown(support.clean)

describe("pg.ema", function()
  it("averages the weights after every update", function()
    local ema = pg.ema { decay = 0.75 }
    local run <close> = open { hooks = { ema }, updates = 5 }
    local want = {}
    for i, p in ipairs(run.parameters) do want[i] = p.value:clone() end
    for _ in run:updates() do
      for i, p in ipairs(run.parameters) do want[i]:lerp_(p.value, 0.25) end
    end
    local kept = run:kept "ema"
    for i, p in ipairs(run.parameters) do same(want[i], kept[p.name], p.name) end
    assert.is_true(want[1]:sub(run.parameters[1].value):abs():max() > 0)
  end)

  it("begins with the weights of an update", function()
    local run <close> = open { hooks = { pg.ema { decay = 0.5, from = 3, name = "late" } },
      updates = 4 }
    local third
    for update in run:updates() do
      if update == 3 then third = run.head.value:clone() end
    end
    same(third:lerp_(run.head.value, 0.5), run:kept("late")[run.head.name])
  end)

  it("is validated by itself, and nothing of the run changes", function()
    local function hooks(with)
      local ema = pg.ema { decay = 0.9 }
      local list = { pg.every(4, pg.diagnostics.validation { tokens = 48 }) }
      if with then
        table.insert(list, 1, ema)
        table.insert(list, pg.every(4, ema:validation { tokens = 48 }))
      end
      return list
    end
    for _, compute in ipairs { "fp32", "bf16" } do
      local plain, out = open { updates = 8, hooks = hooks(false), compute = compute }
      train(plain)
      plain:close()
      local run, other = open { updates = 8, hooks = hooks(true), compute = compute }
      train(run)
      local kept = run:kept "ema"
      -- The averaged weights as the weights of a run: the loss that was logged.
      for _, p in ipairs(run.parameters) do
        run:edit(p, function(value) value:copy_(kept[p.name]) end)
      end
      local expected = run:validate { tokens = 48 }
      run:close()
      local _, lines = support.metrics(other)
      assert.equal(expected.loss, lines[8]["validation/ema_loss"])
      assert.equal(math.exp(expected.loss), lines[8]["validation/ema_perplexity"])
      assert.is_true(lines[8]["validation/ema_loss"] ~= lines[8]["validation/loss"])
      assert.equal(48, lines[8]["validation/ema_tokens"])
      same_files(out .. checkpoint, other .. checkpoint,
        { "model.safetensors", "optimizer.safetensors", "increment.safetensors" })
    end
  end)

  it("puts the weights back when its validation fails", function()
    local ema = pg.ema { decay = 0.9 }
    local run <close> = open { hooks = { ema }, updates = 2 }
    run:step()
    local before = run.head.value:clone()
    assert.error_matches(function() ema:during(run, function() error("stop", 0) end) end, "stop")
    same(before, run.head.value)
  end)

  it("refuses what it cannot do", function()
    assert.error_matches(function() pg.ema { decay = 1 } end, "decay")
    assert.error_matches(function() pg.ema { decay = 0.5, form = 1 } end, "from")
    assert.error_matches(function() pg.ema { decay = 0.5, name = "a.b" } end, "letters")
    assert.error_matches(function()
      open { hooks = { pg.ema { decay = 0.5 }, pg.ema { decay = 0.9 } }, updates = 1 }:step()
    end, "two of them keep tensors as")
  end)
end)

describe("pg.shadow", function()
  local lua_sgd = pg.optim.define { name = "shadowed", slots = { count = "scalar", sum = "column" },
    defaults = { lr = 1 },
    increment = function(w, h)
      w.slots.count:fill_(w.updates)
      w.slots.sum:add_(w.gradient:column_sums())
      return w.gradient:mul(-h.lr)
    end }

  it("makes the increments of the optimizer on this run's gradients, and changes nothing",
    function()
      local plain, out = open { updates = 8 }
      train(plain)
      plain:close()
      local heard = {}
      local run, other = open { updates = 8, hooks = {
        pg.shadow { role = "head", pg.optim.sgd { momentum = 0.5,
          lr = function(t) return 2 ^ -t end } },
        pg.shadow { match = { "up_proj", "lm_head" }, lua_sgd { lr = 0.5 } },
        function(r)
          heard[r.update] = r:kept("sgd")[r.head.name]
          local sum = heard.sum or r.head.gradient:mul(0)
          heard.sum = sum:mul(0.5):add(r.head.gradient)
          -- scale and rate are exact in fp64 and rounded once
          same(heard.sum:mul(-(r.scale * 2.0 ^ -(r.update - 1))), heard[r.update])
          same(r.head.gradient:mul(-(r.scale * 0.5)), r:kept("shadowed")[r.head.name])
        end } }
      train(run)
      assert.is_true(heard[8]:abs():max() > 0)
      local names = 0
      for _ in pairs(run:kept "shadowed") do names = names + 1 end
      assert.equal(2, names)
      assert.error_matches(function() run:kept "none" end, "known: sgd, shadowed")
      run:close()
      same_files(out .. checkpoint, other .. checkpoint,
        { "model.safetensors", "optimizer.safetensors", "increment.safetensors" })
    end)

  it("equals the run that trains with it, on that run's gradients", function()
    local run <close> = open { updates = 6, hooks = {
      pg.shadow { role = "head", pg.optim.rownorm { lr = 3e-3 } } } }
    for _ in run:updates() do
      same(run.head.increment, run:kept("rownorm")[run.head.name])
    end
  end)

  it("refuses what it cannot do", function()
    assert.error_matches(function() pg.shadow { role = "head" } end, "an optimizer")
    assert.error_matches(function() pg.shadow { pg.optim.lion() } end, "selects nothing")
    assert.error_matches(function() pg.shadow { role = "head", pg.optim.frozen() } end, "optimizer")
    local none = { pg.shadow { match = "nowhere", pg.optim.lion() } }
    assert.error_matches(function() open { hooks = none, updates = 1 } end, "no parameter")
  end)
end)

describe("a resume", function()
  local text = [[
local pg = require "perigee"
local p = pg.params { data = "" }
local mine = pg.optim.define { name = "mine", slots = { count = "scalar", m = "matrix" },
  defaults = { lr = 1 },
  increment = function(w, h)
    w.slots.count:fill_(w.updates)
    w.slots.m:lerp_(w.gradient, 0.5)
    return w.slots.m:mul(-h.lr)
  end }
local ema = pg.ema { decay = 0.9 }
return pg.recipe {
  name = "kept", seed = 1,
  model = { layers = 1, width = 16, heads = 2, head_dim = 8, context = 8 },
  data = pg.data.shards { path = p.data },
  batch = { sequences = 4, micro = 2 }, updates = 8,
  schedule = pg.schedule.warmup_cosine { warmup = 0.2, floor = 0.1 },
  optimizers = { { role = { "embedding", "backbone", "head" }, pg.optim.adamw { lr = 4e-3 } } },
  hooks = { ema, pg.every(3, ema:validation { tokens = 48 }),
    pg.shadow { role = "head", mine { lr = 1 } }, pg.shadow { match = "proj", pg.optim.muon() } },
}
]]

  it("continues averages and shadows with the same bits", function()
    local folder = support.folder()
    local recipe = support.write(folder .. "/recipe.lua", text)
    local options = { set = { data = data }, threads = 1 }
    options.out = folder .. "/whole"
    local whole = assert(pg.open(recipe, options))
    train(whole)
    whole:close()
    options.out = folder .. "/parts"
    local parts = assert(pg.open(recipe, options))
    train(parts, 5)
    parts:close()
    local again = assert(pg.resume(folder .. "/parts", { threads = 1 }))
    assert.equal(5, again.update)
    train(again)
    again:close()
    same_files(folder .. "/whole" .. checkpoint, folder .. "/parts" .. checkpoint,
      { "model.safetensors", "optimizer.safetensors", "host.safetensors" })
    local _, a = support.metrics(folder .. "/whole")
    local _, b = support.metrics(folder .. "/parts")
    assert.is_number(a[8]["validation/ema_loss"])
    for _, update in ipairs { 6, 8 } do
      assert.equal(a[update]["validation/ema_loss"], b[update]["validation/ema_loss"])
    end
    -- The manifest covers them.
    local ctx <close> = assert(core.context { threads = 1 })
    local path = folder .. "/parts" .. checkpoint:sub(1, -2)
    assert(core.checkpoint_verify(ctx, path, true))
    support.write(path .. "/host.safetensors", "torn")
    assert.is_nil((core.checkpoint_verify(ctx, path, true)))
  end)
end)

describe("a fork", function()
  -- Eight updates in one run, and in two: the second a fork of the first's fifth.
  local function parts(slots, shadow, parent_shadow)
    local function hooks(optimizer)
      return { pg.ema { decay = 0.9 }, pg.shadow { role = { "embedding", "head" }, name = "other",
        optimizer or pg.optim.adamw { lr = 1e-3 } }, pg.checkpoint { every = 5, keep = "all" } }
    end
    local first, out = open { updates = 8, hooks = hooks(parent_shadow) }
    train(first, 5)
    local at_fork = {}
    for _, p in ipairs(first.parameters) do at_fork[p.name] = p.value:to_table() end
    train(first)
    local whole = {}
    for _, name in ipairs { "ema", "other" } do
      whole[name] = {}
      for parameter, t in pairs(first:kept(name)) do whole[name][parameter] = t:to_table() end
    end
    first:close()
    local second = open { updates = 8, hooks = hooks(shadow),
      fork = { out .. "/checkpoints/00000005", slots = slots } }
    return second, whole, at_fork
  end

  it("carries averages and shadows of kept roles on with the same bits", function()
    local run <close>, whole = parts "keep"
    train(run)
    for _, name in ipairs { "ema", "other" } do
      local kept, some = run:kept(name), false
      for parameter, tensor in pairs(whole[name]) do
        assert.are.same(tensor, kept[parameter]:to_table(), parameter)
        some = true
      end
      assert.is_true(some)
    end
  end)

  it("starts those of reset roles anew", function()
    local run <close>, _, at_fork = parts { head = "reset" }
    local kept, reset = run:kept "ema", 0
    for _, p in ipairs(run.parameters) do
      local apart = kept[p.name]:sub(pg.tensor(at_fork[p.name], run)):abs():max()
      if p.role == "head" then
        assert.equal(0, apart)
        reset = reset + 1
      else
        assert.is_true(apart > 0, p.name)
      end
    end
    assert.equal(1, reset)
  end)

  it("refuses another optimizer's slots, unless its roles are reset", function()
    local lion = pg.optim.lion { lr = 1e-4 }
    assert.error_matches(function() parts("keep", lion) end, "expected another name")
    local run <close> = parts("reset", lion)
    train(run)
    assert.is_true(run:kept("other")[run.head.name]:norm() > 0)
  end)
end)
