-- Recipes: checks with names, values and places; derivation; reading and archiving of files.
local pg = require "perigee"
local support = require "lua_support"
local keys = require "perigee.keys"
local open = require "perigee.open"
local routing = require "perigee.routing"
local sources = require "perigee.sources"

-- A valid recipe table with changes: a key set to `none` is removed.
local none = {}
local function raw(changes)
  local t = {
    model = { layers = 2, width = 32, heads = 2, context = 16 },
    data = pg.data.shards { path = "data/x" },
    batch = { sequences = 8, micro = 4 }, updates = 10,
    optimizers = {
      { role = { "embedding", "head" }, pg.optim.adamw { lr = 1 } },
      { role = "backbone", pg.optim.muon { lr = 1 } },
    },
  }
  for k, v in pairs(changes or {}) do
    if v == none then t[k] = nil else t[k] = v end
  end
  return t
end

local function refused(pattern, changes)
  local ok, e = pcall(function()
    local made = pg.recipe(raw(changes))
    return made
  end)
  assert.is_false(ok, "accepted: " .. pattern)
  assert.matches("recipe_spec.lua:%d+: ", e)
  assert.matches(pattern, e)
end

describe("pg.recipe", function()
  it("names unknown keys at every level and suggests the nearest", function()
    refused("recipe: unknown key 'bacth'; did you mean 'batch'", { bacth = {} })
    refused("model: unknown key 'widht'; did you mean 'width'",
      { model = { layers = 1, widht = 3, heads = 1, context = 4 } })
    refused("batch: unknown key 'micor'; did you mean 'micro'",
      { batch = { sequences = 8, micor = 4 } })
    refused("log: unknown key 'evrey'; did you mean 'every'", { log = { evrey = 4 } })
    refused("seed: unknown key 'dta'; did you mean 'data'", { seed = { dta = 1 } })
    refused("optimizers%[1%]: unknown key 'rol'; did you mean 'role'",
      { optimizers = { { rol = "head", pg.optim.sgd { lr = 1 } } } })
    refused("model.init_std: unknown key 'haed'; did you mean 'head'",
      { model = { layers = 1, width = 8, heads = 1, context = 4, init_std = { haed = 0 } } })
    assert.error_matches(function() pg.data.shards { pth = "x" } end, "did you mean 'path'")
    assert.error_matches(function() pg.optim.adamw { bets = { 0.9, 0.99 } } end,
      "pg.optim.adamw: unknown key 'bets'; did you mean 'betas'")
    assert.error_matches(function() return pg.optim.adamx end, "did you mean 'adamw'")
    assert.error_matches(function() return pg.recpe end, "did you mean 'recipe'")
    assert.error_matches(function() return pg.data.shard end, "did you mean 'shards'")
  end)

  it("states the value and the allowed range", function()
    refused("updates = 0 is not allowed: expected a whole number >= 1", { updates = 0 })
    refused("updates = 1.5 is not allowed", { updates = 1.5 })
    refused('clip = "x" is not allowed: .*false', { clip = "x" })
    refused("clip = 0 is not allowed", { clip = 0 })
    refused("clip = nan is not allowed", { clip = 0 / 0 * -1 })
    refused('recompute = "attention" is not allowed: expected "none" or "block"',
      { recompute = "attention" })
    refused("micro = 3 is not allowed: expected a divisor of batch.sequences = 8",
      { batch = { sequences = 8, micro = 3 } })
    refused("seed = %-1 is not allowed", { seed = -1 })
    refused("model.layers is missing", { model = { width = 8, heads = 1, context = 4 } })
    refused("model is missing", { model = none })
    refused("data is missing", { data = none })
    refused("optimizers is missing", { optimizers = none })
    refused("either updates = n or tokens_per_parameter", { updates = none })
    refused("not both", { tokens_per_parameter = 20 })
    refused('compute = "fp16" is not allowed', { compute = "fp16" })
    refused('name = "a/b" is not allowed', { name = "a/b" })
    refused("hooks%[1%] = 3 is not allowed", { hooks = { 3 } })
    refused("hooks%[1%] = pg.every%(3%) has no action", { hooks = { pg.every(3) } })
    refused("schedule = 3 is not allowed", { schedule = 3 })
    refused("optimizers%[1%] is an optimizer without a selection",
      { optimizers = { pg.optim.sgd { lr = 1 } } })
    refused('optimizers%[1%].role = "heads" is not allowed: .*did you mean \'head\'',
      { optimizers = { { role = "heads", pg.optim.sgd { lr = 1 } } } })
    refused("is not a Lua pattern", { optimizers = { { match = "%", pg.optim.sgd { lr = 1 } } } })
    refused('fork.slots = "drop" is not allowed', { fork = { "runs/x", slots = "drop" } })
  end)

  it("checks hyperparameters against the descriptor", function()
    local function bad(pattern, f) assert.error_matches(f, pattern) end
    local ok, e = pcall(function() pg.optim.adamw { lr = -1 } end)
    assert.is_false(ok)
    assert.matches("^tests/recipe_spec.lua:%d+: pg.optim.adamw.lr = %-1 is not allowed: expected "
      .. "a number >= 0$", e)
    bad("pg.optim.sgd.lr is missing: expected a number >= 0", function() pg.optim.sgd {} end)
    bad("adamw.betas = 0.9 is not allowed: expected two numbers", function()
      pg.optim.adamw { lr = 1, betas = 0.9 } end)
    bad("adamw.betas%[2%] = 1 is not allowed", function()
      pg.optim.adamw { lr = 1, betas = { 0.9, 1 } } end)
    bad("muon.nesterov = 1 is not allowed: expected true or false", function()
      pg.optim.muon { lr = 1, nesterov = 1 } end)
    bad("muon.steps = 2.5 is not allowed: expected a whole number", function()
      pg.optim.muon { lr = 1, steps = 2.5 } end)
    bad('rownorm.project = "all" is not allowed: expected "none" or "outer" or "both"', function()
      pg.optim.rownorm { lr = 1, project = "all" } end)
    bad("weight_decay_scale", function() pg.optim.sgd { lr = 1, weight_decay_scale = "none" } end)
    bad("only numbers may be functions", function() pg.optim.muon { lr = 1, nesterov = print } end)
  end)

  it("refuses tables that contain themselves or are very deep", function()
    local loop = raw()
    loop.log = loop
    local ok, e = pcall(pg.recipe, loop)
    assert.is_false(ok)
    assert.matches("recipe contains itself %(at recipe.log%)", e)
    local deep = {}
    local at = deep
    for _ = 1, 100000 do
      at.x = {}
      at = at.x
    end
    ok, e = pcall(pg.recipe, raw { seed = deep })
    assert.is_false(ok)
    assert.matches("nested deeper than 32", e)
    ok, e = pcall(pg.recipe, deep)
    assert.is_false(ok)
    assert.matches("nested deeper", e)
    assert.error_matches(function() pg.recipe(raw()):with { model = deep } end, "nested deeper")
    assert.error_matches(function() pg.optim.adamw(deep) end, "unknown key 'x'")
    assert.error_matches(function() pg.params(deep) end, "pg.params.x = a table")
  end)

  it("derives variants: tables merge, arrays and objects replace", function()
    local base = pg.recipe(raw())
    local variant = base:with { model = { width = 64 }, batch = { sequences = 16 },
      optimizers = { { role = { "embedding", "backbone", "head" }, pg.optim.sgd { lr = 1 } } } }
    local spec = variant:spec()
    assert.equal(64, spec.model.width)
    assert.equal(2, spec.model.layers)
    assert.equal(4, spec.batch.micro)
    assert.equal(1, #spec.entries)
    assert.equal(32, base:spec().model.width)
    assert.equal(2, #base:spec().entries)
    -- One of two keys that exclude each other displaces the other.
    assert.is_nil(base:with({ tokens_per_parameter = 1 }):spec().updates)
    assert.error_matches(function() base:with { updats = 3 } end, "did you mean 'updates'")
    assert.error_matches(function() base:with { updates = 0 } end, "^updates = 0 is not allowed")
  end)

  it("measures edit distance with transpositions", function()
    assert.equal(0, keys.distance("abc", "abc"))
    assert.equal(3, keys.distance("", "abc"))
    assert.equal(1, keys.distance("ab", "ba"))
    assert.equal(3, keys.distance("kitten", "sitting"))
  end)
end)

describe("routing", function()
  local parameters = {
    { name = "model.embed_tokens.weight", role = "embedding", rows = 97, columns = 8 },
    { name = "model.layers.0.mlp.up_proj.weight", role = "backbone", rows = 32, columns = 8 },
    { name = "model.layers.1.mlp.up_proj.weight", role = "backbone", rows = 32, columns = 8 },
    { name = "lm_head.weight", role = "head", rows = 97, columns = 8 },
  }
  local function route(list) return routing.route(routing.entries(list), parameters) end
  local sgd = pg.optim.sgd { lr = 1 }

  it("selects by role, pattern, list, predicate and except", function()
    local entries = route {
      { match = { "embed", "lm_head" }, sgd },
      { match = function(p) return p.rows == 32 end, except = "layers%.1", sgd },
      { match = "layers%.1", sgd },
    }
    assert.equal(2, #entries[1].parameters)
    assert.equal("model.layers.0.mlp.up_proj.weight", entries[2].parameters[1].name)
    assert.equal(1, #entries[2].parameters)
    assert.equal(1, #entries[3].parameters)
  end)

  it("lists the parameters of an overlap and of an omission", function()
    assert.error_matches(function()
      route { { role = "backbone", sgd }, { match = "layers%.1", sgd },
        { role = { "embedding", "head" }, sgd } }
    end, "overlap: model.layers.1.mlp.up_proj.weight; expected every parameter exactly once")
    assert.error_matches(function() route { { role = "backbone", sgd } } end,
      "no entry updates model.embed_tokens.weight, lm_head.weight")
    assert.error_matches(function()
      route { { role = { "embedding", "backbone", "head" }, sgd }, { match = "nothing", sgd } }
    end, "optimizers%[2%] %(match = nothing%) matches no parameter")
  end)

  it("shows parameter, shape, optimizer, peak lr, factor and decay", function()
    local entries = route { { role = { "embedding", "head" }, pg.optim.frozen() },
      { role = "backbone", pg.optim.muon { lr = 8e-3, weight_decay = 0.1 } } }
    local schedule = pg.schedule.constant()
    local text = routing.table_text(routing.rows(entries, schedule, 10))
    assert.matches("model.layers.%*.mlp.up_proj.weight %(2%)%s+32 x 8%s+muon%s+0.008%s+2%s+0.1",
      text)
    assert.matches("lm_head.weight%s+97 x 8%s+frozen%s+%-%s+%-%s+%-", text)
  end)
end)

describe("recipe files", function()
  after_each(support.clean)

  it("are read with the files that they load", function()
    local folder = support.folder()
    support.write(folder .. "/sizes.lua", "return { width = 24 }")
    support.write(folder .. "/more.lua", "return 7")
    support.write(folder .. "/recipe.lua", ([[
local pg = require "perigee"
local sizes = require "sizes"
local n = dofile(%q)
return pg.recipe { model = { layers = 0, width = sizes.width, heads = 1, context = 4 },
  data = { path = "d" }, batch = { sequences = 1 }, updates = n,
  optimizers = { { role = { "embedding", "head" }, pg.optim.sgd { lr = 1 } } } }
]]):format(folder .. "/more.lua"))
    local rec, reading = open.read(folder .. "/recipe.lua")
    assert.equal(24, rec:spec().model.width)
    assert.equal(7, rec:spec().updates)
    assert.equal(2, #reading.files)
    assert.equal("module", reading.files[1].kind)
    assert.equal("return 7", reading.files[2].text)
    -- An archived copy is used instead of the disk.
    local archive = { ["module:sizes"] = { path = "sizes.lua", text = "return { width = 8 }" } }
    assert.equal(8, open.read(folder .. "/recipe.lua", nil, archive):spec().model.width)
    assert.equal(24, open.read(folder .. "/recipe.lua"):spec().model.width)
    assert.is_nil(package.loaded["sizes"] and nil)
  end)

  it("give file and line also when the chunk ends in a tail call", function()
    local path = support.write(support.folder() .. "/r.lua",
      'local pg = require "perigee"\n\nreturn pg.recipe {\n  updats = 3,\n}\n')
    local ok, e = pcall(open.read, path)
    assert.is_false(ok)
    assert.matches("r.lua:3: recipe: unknown key 'updats'; did you mean 'updates'", e)
  end)

  it("must return a recipe and must exist", function()
    local folder = support.folder()
    local function failure(text)
      local ok, e = pcall(open.read, support.write(folder .. "/r.lua", text))
      assert.is_false(ok)
      return tostring(e)
    end
    assert.matches("returned nil: expected `return pg.recipe", failure("local x = 1"))
    assert.matches("returned a table: expected", failure("return {}"))
    assert.matches("r.lua:1: .*expected", failure("return return"))
    assert.matches("r.lua:2: boom", failure("\nerror 'boom'"))
    assert.matches("attempt to load", failure("\27Lua"))
    local ok, e = pcall(open.read, folder .. "/absent.lua")
    assert.is_false(ok)
    assert.matches("absent.lua", tostring(e))
    -- 10^5 levels of nesting in the source, and a chunk that recurses for ever.
    assert.matches("r.lua: .*overflow", failure("return " .. ("{"):rep(100000)))
    assert.matches("stack overflow", failure("local function f() return 1 + f() end return f()"))
  end)

  it("draw the same random numbers on every reading", function()
    local folder = support.folder()
    support.write(folder .. "/r.lua", [[
local pg = require "perigee"
return pg.recipe { model = { layers = 0, width = math.random(8, 1000), heads = 1, context = 4 },
  data = { path = "d" }, batch = { sequences = 1 }, updates = 1 + pg.random(1000),
  optimizers = { { role = { "embedding", "head" }, pg.optim.sgd { lr = 1 } } } }]])
    local a, b = open.read(folder .. "/r.lua"):spec(), open.read(folder .. "/r.lua"):spec()
    assert.equal(a.model.width, b.model.width)
    assert.equal(a.updates, b.updates)
  end)

  it("keep the source as the identity together with the parameters", function()
    local path = support.write(support.folder() .. "/r.lua", "-- a")
    local reading = { path = path, text = "-- a", files = {} }
    local function hash() return "h" end
    local one = sources.identity(reading, { a = 1 }, hash)
    assert.equal(one, sources.identity(reading, { a = 1 }, hash))
    assert.not_equal(one, sources.identity(reading, { a = 2 }, hash))
  end)
end)
