-- Continuations: N + N updates equal 2N bit for bit, with everything that a recipe may hold in
-- play; stops with pending measurements; changed recipes; forks.
local pg = require "perigee"
local support = require "lua_support"
local core = support.core

local data

local function train(run)
  for _ in run:updates() do end -- luacheck: ignore 542
  run:close()
end

-- A recipe file with an optimizer for the head, a Lua optimizer among them, run.state, random
-- numbers and a changed optimizer.
local text = [[
local pg = require "perigee"
local p = pg.params { data = "", head = "rownorm", updates = 16, micro = 2, extra = 0 }
local mine = pg.optim.define {
  name = "mine", slots = { momentum = "matrix", scale = "row" },
  defaults = { lr = 1e-3, beta = 0.9 },
  increment = function(w, h)
    local m = w.slots.momentum
    m:lerp_(w.gradient, 1 - h.beta)
    w.slots.scale:fill_(w.updates)
    return m:mul(-h.lr)
  end,
}
local heads = {
  rownorm = function() return pg.optim.rownorm { lr = 3e-3, weight_decay = 0.1 } end,
  projected = function() return pg.optim.rownorm { lr = 3e-3, project = "both" } end,
  adamw = function() return pg.optim.adamw { lr = 4e-3 } end,
  muon = function()
    return pg.optim.muon { lr = 4e-3, momentum = function(t) return 0.9 + t / 1000 end }
  end,
  sgd = function() return pg.optim.sgd { lr = 0.1, momentum = 0.9 } end,
  lion = function() return pg.optim.lion() end,
  signsgd = function() return pg.optim.signsgd { lr = 1e-3, beta = 0.9 } end,
  scale = function() return pg.optim.scale { beta = 0.9 } end,
  rmnp = function() return pg.optim.rmnp() end,
  sinkgd = function() return pg.optim.sinkgd() end,
  moga = function() return pg.optim.moga { base = 1, fan_in = false } end,
  scion = function() return pg.optim.scion { map = "row", radius = 10 } end,
  modula = function() return pg.optim.modula { lr = 1e-2 } end,
  normuon = function() return pg.optim.normuon() end,
  lausu = function() return pg.optim.lausu { lr = 1e-2, map = "hybrid", center = true } end,
  nuclear = function() return pg.optim.muon { lr = 1e-3, scale = "nuclear", average = "mean" } end,
  equidistant = function() return pg.optim.equidistant { lr = 3e-3, adaptive = true } end,
  exact = function() return pg.optim.exact { lr = 3e-3, gap = 0.02 } end,
  greedy = function() return pg.optim.greedy_radial { lr = 3e-3, cautious = true } end,
  budget = function()
    return pg.optim.rownorm { lr = 3e-3, diameter_budget = 6e-3, weight_decay = 1, clip = 0.01 }
  end,
  shampoo = function() return pg.optim.shampoo { every = 3 } end,
  soap = function() return pg.optim.soap { every = 3, one_sided = true } end,
  kfac = function() return pg.optim.kfac { lr = 0.1, every = 3 } end,
  frozen = function() return pg.optim.frozen() end,
  mine = function() return mine { lr = 0.1 } end,
}
local hooks = {
  function(run)
    run.state.sum = (run.state.sum or 0) + run.loss
    run.state.list = run.state.list or {}
    table.insert(run.state.list, run.batch_hash)
    run:log("mine/random", pg.random())
    run:log("mine/math", math.random(1000000))
    run:log("mine/sum", run.state.sum)
    run:log("mine/hashes", table.concat(run.state.list, " "))
  end,
  pg.every(3, function(run)
    if run.update == 3 then
      run:set_optimizer({ match = "up_proj" }, pg.optim.sgd { lr = 0.05, momentum = 0.5 })
      run:set_optimizer("embedding", mine { lr = 0.2 })
    end
  end),
  pg.checkpoint { every = 5, keep = "all" },
}
if p.head ~= "frozen" then table.insert(hooks, 1, pg.every(4, pg.diagnostics.head_diameter())) end
table.insert(hooks, pg.every(6, pg.diagnostics.validation { tokens = 48, hilbert_panel = 30 }))
return pg.recipe {
  name = "resumed", seed = { init = 3, data = 4 },
  model = { layers = 1, width = 16, heads = 2, head_dim = 8, context = 8 },
  data = pg.data.shards { path = p.data },
  batch = { sequences = 4, micro = p.micro }, updates = p.updates,
  log = { every = 4 }, schedule = pg.schedule.warmup_cosine { warmup = 0.2, floor = 0.1 },
  optimizers = {
    { role = "embedding", pg.optim.adamw { lr = 4e-3, weight_decay = 0.1 } },
    { role = "backbone", pg.optim.muon { lr = 8e-3 } },
    { role = "head", heads[p.head](), schedule = pg.schedule.linear { floor = 0.5 } },
  },
  hooks = hooks,
}
]]

local folder, recipe

local function open(name, options)
  options.out = folder .. "/" .. name
  options.threads = 1
  options.set = options.set or {}
  options.set.data = data
  return assert(pg.open(recipe, options))
end

local tensor_files = { "model.safetensors", "optimizer.safetensors", "increment.safetensors" }

-- Train up to `update` and leave the run there, as a signal would: no report, a checkpoint.
local function train_to(update, run)
  for u in run:updates() do
    if u == update then break end
  end
  run:close()
end

-- Same bits of weights, slots and increments.
local function same_checkpoint(a, b, update)
  local name = ("/checkpoints/%08d/"):format(update)
  for _, file in ipairs(tensor_files) do
    local one, two = folder .. "/" .. a .. name .. file, folder .. "/" .. b .. name .. file
    assert.equal(core.fs.exists(one), core.fs.exists(two))
    if core.fs.exists(one) then assert.equal(core.fs.sha256(one), core.fs.sha256(two), file) end
  end
end

-- Fields that say how fast it went are left out.
local function comparable(line)
  local out = {}
  for name, value in pairs(line) do
    if not name:match("^performance/") and not name:match("^memory/")
      and name ~= "validation/seconds" then
      out[name] = value
    end
  end
  return out
end

local function same_metrics(a, b, from)
  local _, one = support.metrics(folder .. "/" .. a)
  local _, two = support.metrics(folder .. "/" .. b)
  for update, line in pairs(one) do
    if update >= (from or 0) then assert.same(comparable(line), comparable(two[update] or {})) end
  end
end

setup(function() data = support.data() end)
teardown(support.clean)

before_each(function()
  folder = support.folder()
  recipe = support.write(folder .. "/recipe.lua", text)
end)

describe("a resume", function()
  for _, head in ipairs { "rownorm", "projected", "adamw", "muon", "sgd", "equidistant", "greedy",
    "exact", "budget", "shampoo", "soap", "kfac", "lion", "signsgd",
    "scale", "rmnp", "sinkgd", "moga", "scion", "modula", "normuon", "lausu", "nuclear",
    "frozen", "mine" } do
    it("continues exactly with " .. head .. " on the head", function()
      train(open("whole", { set = { head = head } }))
      -- 7 is within a report's interval and after the optimizers were changed.
      train_to(7, open("parts", { set = { head = head } }))
      train(assert(pg.resume(folder .. "/parts", { threads = 1 })))
      same_checkpoint("whole", "parts", 16)
      same_metrics("whole", "parts", 8)
      local lines = support.metrics(folder .. "/parts")
      local marker
      for _, line in ipairs(lines) do marker = line.session and line or marker end
      assert.equal(2, marker.session)
      assert.equal(7, marker["session/from_update"])
    end)
  end

  it("replays no data at 5, 10 and 15, with reads in flight", function()
    train(open("whole", {}))
    for _, stop in ipairs { 5, 10, 15 } do
      local name = "at" .. stop
      train_to(stop, open(name, {}))
      train(assert(pg.resume(folder .. "/" .. name, { threads = 1 })))
      same_checkpoint("whole", name, 16)
      local _, one = support.metrics(folder .. "/whole")
      local _, two = support.metrics(folder .. "/" .. name)
      assert.equal(one[16]["mine/hashes"], two[16]["mine/hashes"])
    end
  end)

  it("takes another micro-batch size: same token hashes, equality to rounding", function()
    train(open("whole", { set = { head = "adamw" } }))
    train_to(7, open("parts", { set = { head = "adamw" } }))
    train(assert(pg.resume(folder .. "/parts", { threads = 1, micro = 1 })))
    local _, one = support.metrics(folder .. "/whole")
    local _, two = support.metrics(folder .. "/parts")
    assert.equal(one[16]["mine/hashes"], two[16]["mine/hashes"])
    -- fp32 sums in another order over nine updates; SPEC §7 measured 1.3e-7 over forty.
    local a, b = one[16]["train/loss"], two[16]["train/loss"]
    assert.is_true(math.abs(a - b) <= 1e-6 * a)
    assert.has_error(function()
      pg.resume(folder .. "/parts", { threads = 1, micro = 3 })
    end)
  end)

  it("takes another recompute: the same bits, and goes on as it was started", function()
    support.write(recipe, (text:gsub("layers = 1", "layers = 3")))
    train(open("whole", {}))
    train_to(7, open("parts", { recompute = "block" }))
    assert.equal("block", support.json(folder .. "/parts/config.json").compute.recompute)
    train_to(12, assert(pg.resume(folder .. "/parts", { threads = 1, recompute = "none" })))
    train(assert(pg.resume(folder .. "/parts", { threads = 1 })))
    same_checkpoint("whole", "parts", 16)
    same_metrics("whole", "parts", 8)
    local said, lines = {}, support.metrics(folder .. "/parts")
    for _, line in ipairs(lines) do said[#said + 1] = line["session/recompute"] end
    assert.same({ "none", "block" }, said)
    -- What is kept is most of what this run allocates.
    local peak = lines[#lines]["memory/peak_allocated_gib"]
    local _, whole = support.metrics(folder .. "/whole")
    assert.is_true(peak < whole[16]["memory/peak_allocated_gib"])
    assert.has_error(function()
      pg.resume(folder .. "/parts", { threads = 1, recompute = "blocks" })
    end)
  end)

  it("uses the latest undamaged checkpoint and says which it skipped", function()
    train(open("whole", {}))
    train_to(12, open("parts", {}))
    local path = folder .. "/parts/checkpoints/00000012/model.safetensors"
    local bytes = support.read(path)
    support.write(path, bytes:sub(1, -2) .. string.char(bytes:byte(-1) ~ 1))
    local code, _, err = support.perigee({ "resume", folder .. "/parts" })
    assert.equal(0, code, err)
    assert.matches("skipped .*00000012: ", err)
    same_checkpoint("whole", "parts", 16)
    local lines = support.metrics(folder .. "/parts")
    local from
    for _, line in ipairs(lines) do from = line["session/from_update"] or from end
    assert.equal(10, from)
  end)

  it("sets aside what has a checkpoint's name and is none", function()
    train(open("whole", {}))
    local cases = {
      ["no manifest"] = function(path) core.fs.remove(path .. "/manifest.json") end,
      ["torn"] = function(path) support.write(path .. "/state.json", "{") end,
      ["a file"] = function(path) core.fs.remove(path) support.write(path, "not a folder") end,
      ["a dangling link"] = function(path)
        core.fs.remove(path)
        assert(os.execute(("ln -s /nowhere %s"):format(support.quote(path))))
      end,
    }
    for what, damage in pairs(cases) do
      local name = what:gsub(" ", "_")
      train_to(12, open(name, {}))
      local kept = folder .. "/" .. name .. "/checkpoints/"
      -- One in the way of the next saves, one older than the checkpoint that serves, and the name
      -- that setting it aside would take first.
      damage(kept .. "00000012")
      damage(kept .. "00000005")
      core.fs.make(kept .. "00000012.invalid-1")
      local before = core.fs.sha256(kept .. "00000010/manifest.json")
      local code, _, err = support.perigee { "resume", folder .. "/" .. name, "--max-updates",
        "12" }
      assert.equal(0, code, what .. err)
      assert.matches("skipped [^\n]*00000012: [^\n]+; set aside as 00000012.invalid%-2\n", err)
      assert.matches("skipped [^\n]*00000005: [^\n]+; set aside as 00000005.invalid%-1\n", err)
      assert.same({ "00000005.invalid-1", "00000010", "00000012", "00000012.invalid-1",
        "00000012.invalid-2" }, core.fs.list(kept), what)
      assert.equal(before, core.fs.sha256(kept .. "00000010/manifest.json"))
      train(assert(pg.resume(folder .. "/" .. name, { threads = 1 })))
      same_checkpoint("whole", name, 16)
    end
  end)

  it("saves where something else took a checkpoint's name meanwhile", function()
    local run = open("parts", {})
    local kept = folder .. "/parts/checkpoints/"
    for update in run:updates() do
      if update == 1 then
        core.fs.make(kept .. "00000002/notes")
        assert(os.execute(("ln -s /nowhere %s"):format(support.quote(kept .. "00000005"))))
        run:checkpoint()
      elseif update == 2 then
        run:checkpoint()
      elseif update == 3 then -- a link to a checkpoint: the checkpoint itself is not touched
        assert(os.execute(("ln -s 00000001 %s"):format(support.quote(kept .. "00000003"))))
        run:checkpoint()
      end
    end
    run:close()
    local ctx <close> = assert(core.context { device = "cpu", threads = 1 })
    for _, update in ipairs { 1, 2, 3, 5 } do
      assert(core.checkpoint_verify(ctx, ("%s%08d"):format(kept, update), true))
    end
    assert.is_true(core.fs.exists(kept .. "00000002.invalid-1/notes"))
    assert.equal(core.fs.real(kept .. "00000001"), core.fs.real(kept .. "00000003.invalid-1"))
  end)

  it("is refused at once when checkpoints/ is no folder", function()
    train_to(4, open("parts", {}))
    core.fs.remove(folder .. "/parts/checkpoints")
    for _, make in ipairs { "ln -s /nowhere", "touch" } do
      local path = folder .. "/parts/checkpoints"
      assert(os.execute(("%s %s"):format(make, support.quote(path))))
      local value, message, name = pg.resume(folder .. "/parts", { threads = 1 })
      assert.is_nil(value)
      assert.equal("ENOENT", name)
      assert.matches("checkpoints is not a folder", message)
      core.fs.remove(path)
    end
  end)

  it("starts over in the same directory when there is no valid checkpoint", function()
    train(open("whole", {}))
    train_to(4, open("parts", {}))
    core.fs.remove(folder .. "/parts/checkpoints")
    assert(core.fs.append(folder .. "/parts/metrics.jsonl", '{"progress/update": 5, "torn'))
    train(assert(pg.resume(folder .. "/parts", { threads = 1 })))
    same_checkpoint("whole", "parts", 16)
    same_metrics("whole", "parts")
  end)

  it("refuses a changed recipe unless told otherwise, and keeps both", function()
    train_to(7, open("parts", {}))
    local own = folder .. "/parts/recipe.lua"
    support.write(own, support.read(own) .. "-- changed\n")
    local value, message, name = pg.resume(folder .. "/parts", { threads = 1 })
    assert.is_nil(value)
    assert.equal("ESTATE", name)
    assert.matches("recipe is not the one .* %-%-allow%-changed%-recipe", message)
    value, message = pg.resume(folder .. "/parts", { threads = 1, set = { extra = 1 } })
    assert.is_nil(value)
    assert.matches("allow%-changed%-recipe", message)
    train(assert(pg.resume(folder .. "/parts", { threads = 1, allow_changed_recipe = true,
      set = { updates = 18 } })))
    assert.is_true(core.fs.exists(folder .. "/parts/checkpoints/00000018"))
    assert.is_true(core.fs.exists(folder .. "/parts/recipe.session-1.lua"))
    -- The run has become the changed one.
    local again = assert(pg.resume(folder .. "/parts", { threads = 1 }))
    assert.equal(18, again.update)
    again:close()
  end)

  it("does not continue on other data", function()
    local other = support.data(support.folder() .. "/d")
    recipe = support.write(folder .. "/recipe.lua", (text:gsub('data = ""', 'data = "x"')))
    train(assert(pg.open(recipe, { out = folder .. "/parts", threads = 1, max_updates = 4,
      set = { data = other } })))
    support.shard(other .. "/text_train_000003.bin", 500, function(i) return i % 97 end)
    local value, message = pg.resume(folder .. "/parts", { threads = 1 })
    assert.is_nil(value)
    assert.matches("EDATA: the data in .* has digest", message)
  end)

  it("does not continue on tokens that have changed in place", function()
    local other = support.data(support.folder() .. "/d")
    recipe = support.write(folder .. "/recipe.lua", (text:gsub('data = ""', 'data = "x"')))
    train(assert(pg.open(recipe, { out = folder .. "/parts", threads = 1, max_updates = 4,
      set = { data = other } })))
    local shard = other .. "/text_train_000001.bin"
    local whole = support.read(shard)
    -- The last token.
    support.write(shard, whole:sub(1, -3) .. string.char(whole:byte(-2) ~ 1) .. whole:sub(-1))
    local value, message = pg.resume(folder .. "/parts", { threads = 1 })
    assert.is_nil(value)
    assert.matches("EDATA: the tokens in .* have changed", message)
    support.write(shard, whole)
    assert(pg.resume(folder .. "/parts", { threads = 1 })):close()
  end)

  it("is refused for what is not a run directory", function()
    local value, message = pg.resume(folder, {})
    assert.is_nil(value)
    assert.matches("is not a run directory", message)
    value, message = pg.resume(folder .. "/nothing", {})
    assert.is_nil(value)
    assert.matches("is not a folder", message)
  end)

  it("makes up for hooks that a failure left out", function()
    train(open("whole", {}))
    local flag = folder .. "/fail"
    support.write(flag, "")
    recipe = support.write(folder .. "/recipe.lua", (text:gsub("local hooks = {", ([[
local hooks = {
  pg.every(8, function(run)
    if io.open(%q) and run.update == 8 then error("not now") end
    run:log("mine/after", run.update)
  end),]]):format(flag):gsub("%%", "%%%%"), 1)))
    local run = open("parts", {})
    local ok, e = pcall(function() for _ in run:updates() do end end) -- luacheck: ignore 542
    assert.is_false(ok)
    assert.matches("recipe.lua:%d+: not now", tostring(e))
    run:close()
    core.fs.remove(flag)
    train(assert(pg.resume(folder .. "/parts", { threads = 1 })))
    same_checkpoint("whole", "parts", 16)
    local _, one = support.metrics(folder .. "/whole")
    local _, two = support.metrics(folder .. "/parts")
    assert.equal(8, two[8]["mine/after"])
    assert.equal(one[8]["train/loss"], two[8]["train/loss"])
    assert.equal(one[8]["diagnostics/lm_head_step/diameter_exact"],
      two[8]["diagnostics/lm_head_step/diameter_exact"])
    assert.equal(one[12]["mine/random"], two[12]["mine/random"])
    assert.equal(one[16]["mine/sum"], two[16]["mine/sum"])
  end)
end)

describe("a fork", function()
  it("with everything kept equals the trunk bit for bit", function()
    train(open("trunk", {}))
    local at = folder .. "/trunk/checkpoints/00000005"
    local code, _, err = support.perigee { "fork", at, recipe, "--out", folder .. "/branch",
      "--set", "data=" .. data, "--quiet" }
    assert.equal(0, code, err)
    same_checkpoint("trunk", "branch", 16)
    same_metrics("branch", "trunk")
    local fork = support.json(folder .. "/branch/config.json").fork
    assert.equal("trunk", fork.run)
    assert.equal("00000005", fork.checkpoint)
    assert.equal(core.fs.sha256(at .. "/manifest.json"), fork.manifest_sha256)
    assert.equal(5, fork.update)
  end)

  it("resets slots per role, restarts data, changes optimizers and schedules", function()
    train(open("trunk", {}))
    local fork = ([[
  hooks = { function(run)
    if run.update == 6 then
      assert(run.head.optimizer == "adamw" and run.head.updates == 1)
      assert(run.embedding.updates == 3) -- its optimizer changed at update 3
    end
  end },
  fork = { %q, slots = { head = "reset" }, data = "restart" },]])
      :format(folder .. "/trunk/checkpoints/00000005")
    local branch = support.write(folder .. "/branch.lua", (text
      :gsub("hooks = hooks,", function() return fork end)
      :gsub("pg.schedule.warmup_cosine { warmup = 0.2, floor = 0.1 }",
        "pg.schedule.cooldown { from = 5, length = 5 }")))
    local run = assert(pg.open(branch, { out = folder .. "/branch", threads = 1,
      set = { data = data, head = "adamw", updates = 10 } }))
    local first
    for update in run:updates() do
      first = first or { update, run.scale, run.batch_hash }
    end
    run:close()
    assert.equal(6, first[1])
    assert.equal(1, first[2])
    -- The data order began again: the trunk's first batch.
    local _, lines = support.metrics(folder .. "/trunk")
    assert.equal(lines[4]["mine/hashes"]:match("^%x+"), first[3])
    assert.is_true(core.fs.exists(folder .. "/branch/checkpoints/00000010"))
  end)

  it("is refused when optimizers, sizes or lengths do not fit, and leaves nothing", function()
    train(open("trunk", {}))
    local trunk = folder .. "/trunk"
    local function refused(pattern, ...)
      local code, _, err = support.perigee { "fork", trunk, recipe, "--out", folder .. "/branch",
        "--set", "data=" .. data, ... }
      assert.equal(1, code, err)
      assert.matches(pattern, err)
      assert.is_true(support.one_line(err))
      assert.is_false(core.fs.exists(folder .. "/branch"))
    end
    refused("updates > 16", "--set", "updates=16")
    refused("lm_head.weight", "--set", "updates=20", "--set", "head=adamw")
    local small = support.write(folder .. "/small.lua", (text:gsub("width = 16", "width = 24")))
    local code, _, err = support.perigee { "fork", trunk, small, "--out", folder .. "/branch",
      "--set", "data=" .. data, "--set", "updates=20" }
    assert.equal(1, code)
    assert.matches("model.width = 24 in the recipe, 16 in", err)
  end)
end)
