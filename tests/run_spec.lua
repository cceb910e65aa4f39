-- Runs: the loop, the merged metrics line, what hooks can do, and the files of a run directory.
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

local function train(run)
  for _ in run:updates() do end -- luacheck: ignore 542
end

-- Names of a JSON object in the order in which they are written.
local function keys_in_order(line)
  local names = {}
  for name in line:gmatch('"([^"]+)": ') do names[#names + 1] = name end
  return names
end

-- A strict JSON parser that accepts exactly RFC 8259 objects of numbers, strings, arrays: used to
-- see that every line parses whatever the locale.
local function strict(text)
  local function space(i) return text:match("^[ \t\r\n]*()", i) end
  local value
  local function text_at(i) return text:match('^"[^"\\%c]*"()', i) end
  function value(i)
    i = space(i)
    local c = text:sub(i, i)
    if c == "{" or c == "[" then
      local close = c == "{" and "}" or "]"
      i = space(i + 1)
      if text:sub(i, i) == close then return i + 1 end
      while true do
        if c == "{" then
          i = assert(text_at(space(i)), "key")
          i = assert(text:match("^:()", space(i)), "colon")
        end
        i = space(value(i))
        if text:sub(i, i) == close then return i + 1 end
        i = assert(text:match("^,()", i), "comma at " .. i)
      end
    end
    return text_at(i) or text:match("^true()", i) or text:match("^false()", i)
      or text:match("^null()", i) or text:match("^%-?[1-9]%d*%.?%d*[eE]?[+-]?%d*()", i)
      or text:match("^%-?0%.?%d*[eE]?[+-]?%d*()", i) or error("value at " .. i)
  end
  return space(value(1)) == #text + 1
end

setup(function() data = support.data() end)
teardown(support.clean)

describe("a run", function()
  it("yields completed updates and ends with a checkpoint and a summary", function()
    local run, out = open { updates = 6 }
    local seen = {}
    for update in run:updates() do
      assert.equal(update, run.update)
      assert.equal(update * 4 * 8, run.tokens)
      seen[#seen + 1] = update
    end
    assert.same({ 1, 2, 3, 4, 5, 6 }, seen)
    assert.equal("finished", run.status)
    run:close()
    assert.is_true(core.fs.exists(out .. "/checkpoints/00000006/model.safetensors"))
    local summary = support.json(out .. "/summary.json")
    assert.equal(0, summary.exit_code)
    assert.equal(6, summary.final_update)
    assert.equal(192, summary.final_tokens)
  end)

  it("reports every n updates and at the last, in the published order", function()
    local run, out = open { updates = 10, hooks = {
      pg.every(4, pg.diagnostics.head_diameter()),
      pg.every(5, pg.diagnostics.validation { tokens = 64, hilbert_panel = 40 }) } }
    train(run)
    run:close()
    local lines, by_update = support.metrics(out)
    assert.equal(4, #lines)
    for _, update in ipairs { 4, 8, 10 } do assert.is_number(by_update[update]["train/loss"]) end
    assert.is_nil(by_update[5]["train/loss"])
    assert.equal(64, by_update[5]["validation/tokens"])
    assert.equal(40, by_update[5]["validation/hilbert_step/tokens"])
    assert.matches("^%x+$", by_update[5]["validation/hilbert_step/panel"])
    local last
    for line in support.read(out .. "/metrics.jsonl"):gmatch("[^\n]+") do last = line end
    assert.same({ "progress/update", "progress/tokens", "progress/tpp", "progress/epoch",
      "optimizer/schedule_scale",
      "optimizer/lr_backbone", "optimizer/peak_lr_backbone", "optimizer/lr_input_embedding",
      "optimizer/peak_lr_input_embedding", "optimizer/lr_lm_head", "optimizer/peak_lr_lm_head",
      "diagnostics/lm_head_step/diameter_exact", "diagnostics/lm_head_step/diameter_tokens",
      "train/loss", "train/perplexity", "train/grad_norm", "train/grad_norm_max",
      "train/clipped_fraction", "train/would_clip_fraction", "performance/tokens_per_second",
      "performance/seconds_per_update", "performance/data_wait_seconds",
      "performance/elapsed_seconds", "memory/peak_allocated_gib", "memory/peak_reserved_gib",
      "validation/loss", "validation/perplexity", "validation/tokens", "validation/seconds",
      "events/evaluation", "validation/hilbert_step/rms", "validation/hilbert_step/tokens",
      "validation/hilbert_step/panel", "events/checkpoint", "data/batch_hash" },
      keys_in_order(last))
  end)

  it("has exactly zero increments at scale 0, while slots advance", function()
    local run = open { updates = 4, schedule = pg.schedule.warmup_cosine { warmup = 0.5 },
      hooks = { pg.every(1, pg.diagnostics.head_diameter()),
        pg.every(1, pg.diagnostics.validation { tokens = 16, hilbert_panel = 16 }) } }
    local before = run.head.value:clone()
    for update in run:updates() do
      if update == 1 then
        assert.equal(0, run.head.increment:abs():max())
        assert.equal(0, (run.head.value - before):abs():max())
        assert.equal(1, run.head.updates)
        local _, seen = next(run.head.slots)
        assert.is_true(seen:abs():max() > 0)
      end
    end
    run:close()
    local _, by_update = support.metrics(run.out)
    assert.equal(0, by_update[1]["diagnostics/lm_head_step/diameter_exact"])
    assert.is_nil(by_update[1]["diagnostics/lm_head_step/diameter_tokens"])
    assert.equal(0, by_update[1]["validation/hilbert_step/rms"])
    assert.is_true(by_update[2]["diagnostics/lm_head_step/diameter_exact"] > 0)
    assert.is_true(by_update[2]["validation/hilbert_step/rms"] > 0)
  end)

  it("logs what hooks and the loop's body give, as valid JSON", function()
    local run, out = open { updates = 4, log = { every = 2 }, hooks = { function(r)
      r:log("mine/nan", 0 / 0)
      r:log("mine/minus", -math.huge)
      r:log("mine/half", 0.5)
      r:log("mine/pair", { 1, 2 })
      r:log("mine/text", "ü")
      r:log("mine/flag", true)
    end } }
    for update in run:updates() do run:log("body/update", update) end
    run:close()
    for line in support.read(out .. "/metrics.jsonl"):gmatch("[^\n]+") do
      assert.is_true(strict(line), line)
    end
    local _, by_update = support.metrics(out)
    local v = by_update[2]
    assert.equal(core.json.null, v["mine/nan"])
    assert.same({ ["mine/nan"] = true, ["mine/minus"] = true },
      { [v.nonfinite[1]] = true, [v.nonfinite[2]] = true })
    assert.equal(0.5, v["mine/half"])
    assert.same({ 1, 2 }, v["mine/pair"])
    assert.equal("ü", v["mine/text"])
    assert.equal(2, v["body/update"])
  end)

  it("refuses bad names and values of metrics", function()
    local run = open()
    local function bad(pattern, ...)
      local arguments = table.pack(...)
      assert.error_matches(function() run:log(table.unpack(arguments, 1, arguments.n)) end,
        pattern)
    end
    bad("run:log name = nil", nil, 1)
    bad("the run does not write itself", "progress/update", 1)
    bad("value = nil", "x", nil)
    bad("value = a function", "x", print)
    bad("element = nan", "x", { 0 / 0 })
    bad("UTF%-8", "x", "\255")
    run:close()
  end)

  it("leaves weights, losses and slots bit-equal with and without diagnostics", function()
    local function losses(hooks)
      local run = open { updates = 8, hooks = hooks }
      local list = {}
      for _ in run:updates() do list[#list + 1] = run.loss end
      local weights = run.head.value:to_table()
      run:close()
      return list, weights
    end
    local plain, plain_weights = losses {}
    local watched, watched_weights = losses { pg.every(1, pg.diagnostics.head_diameter()),
      pg.every(1, pg.diagnostics.head_geometry { separation = true }),
      pg.every(2, pg.diagnostics.validation { tokens = 32, hilbert_panel = 16 }) }
    assert.same(plain, watched)
    assert.same(plain_weights, watched_weights)
  end)

  it("measures the shape of the head's increment when asked", function()
    local found = {}
    local run, out = open { updates = 3, hooks = {
      pg.every(1, pg.diagnostics.head_diameter { bracket = true }),
      pg.at({ 2 }, pg.diagnostics.head_geometry { separation = true }),
      pg.at({ 3 }, pg.diagnostics.head_geometry { spectrum = false }),
      pg.at({ 2 }, function(r)
        local s, g = r.head.increment, pg.geometry
        found = { common_mode = g.common_mode(s).value, stable_rank = g.spectrum(s).stable_rank,
          spectral_norm = g.spectrum(s).value, norm = g.spectrum(s).norm,
          effective_rank = g.spectrum(s).effective_rank, separation = g.separation(s).value,
          rho = g.separation(s).rho, diameter_exact = g.diameter(s).value,
          diameter_lower = g.diameter(s).bracket.lower,
          diameter_upper = g.diameter(s).bracket.upper }
      end) } }
    train(run)
    run:close()
    local _, by_update = support.metrics(out)
    for name, value in pairs(found) do
      assert.equal(value, by_update[2]["diagnostics/lm_head_step/" .. name], name)
    end
    assert(found.diameter_lower <= found.diameter_exact
      and found.diameter_exact <= found.diameter_upper)
    assert.is_number(by_update[3]["diagnostics/lm_head_step/common_mode"])
    assert.is_nil(by_update[3]["diagnostics/lm_head_step/stable_rank"])
    assert.is_nil(by_update[3]["diagnostics/lm_head_step/rho"])
    assert.error_matches(function() pg.diagnostics.head_geometry { rho = true } end, "rho")
    assert.error_matches(function() pg.diagnostics.head_geometry { spectrum = 1 } end,
      "spectrum = 1")
  end)

  it("stops when a hook asks, reports the interval and saves", function()
    local run, out = open { updates = 12, hooks = { function(r)
      if r.update == 6 then r:stop("enough") end
    end } }
    train(run)
    assert.equal(6, run.update)
    assert.equal("finished", run.status)
    run:close()
    assert.equal("enough", support.json(out .. "/summary.json").reason)
    local _, by_update = support.metrics(out)
    assert.is_number(by_update[6]["train/loss"])
    assert.is_true(core.fs.exists(out .. "/checkpoints/00000006"))
  end)

  it("ends at max_updates with the schedule of the whole plan", function()
    local run, out = open { updates = 12, max_updates = 5,
      hooks = { pg.every(4, pg.diagnostics.head_diameter()) } }
    local scales = {}
    for _ in run:updates() do scales[#scales + 1] = run.scale end
    local expected = run.schedule:values(12)
    for i = 1, 5 do assert.equal(expected[i], scales[i]) end
    run:close()
    local _, by_update = support.metrics(out)
    assert.is_number(by_update[5]["diagnostics/lm_head_step/diameter_exact"])
  end)

  it("runs measurements before the first update on request", function()
    local run, out = open { updates = 4, hooks = { pg.every(4, pg.diagnostics.validation {
      tokens = 32, hilbert_panel = 16 }, { before_first = true }) } }
    train(run)
    run:close()
    local lines = support.metrics(out)
    assert.equal(0, lines[1]["progress/update"])
    -- Untrained weights predict almost uniformly: log 97 = 4.575.
    assert.is_true(math.abs(lines[1]["validation/loss"] - math.log(97)) < 0.05)
    assert.is_nil(lines[1]["validation/hilbert_step/rms"])
  end)

  it("begins a new epoch when the data ends and says so", function()
    local folder = support.folder() .. "/data"
    assert(core.fs.make(folder))
    support.shard(folder .. "/a_train_000000.bin", 3 * 32 + 1, function(i) return i % 7 end)
    local run, out = open { updates = 10, data = { path = folder }, model = { vocab = 97 } }
    train(run)
    run:close()
    local _, by_update = support.metrics(out)
    assert.equal(1, by_update[4]["events/epoch"])
    assert.equal(3, by_update[10]["progress/epoch"])
  end)

  it("edits weights, saves tensors, finds parameters", function()
    local run, out = open { updates = 2 }
    local name = "model.layers.0.mlp.up_proj.weight"
    for _ in run:updates() do
      run:edit(name, function(w) w:fill_(0.25) end)
      assert.equal(0.25, run:parameter(name).value:max())
    end
    run:edit(run.head, function(w) w:zero_() end)
    assert.equal(0, run.head.value:abs():max())
    local path = run:save("tensors/head", run.head.increment)
    assert.equal(out .. "/tensors/head.safetensors", path)
    assert.error_matches(function() run:save("../x", run.head.value) end, "not allowed")
    assert.error_matches(function() run:parameter("lm_head.wieght") end,
      "did you mean 'lm_head.weight'")
    local loaded = assert(core.load_tensor(run.context, path, "tensor"))
    assert.same(run.head.increment:to_table(), loaded:to_table())
    run:close()
  end)

  it("takes functions of the update for any numeric hyperparameter and per-entry schedules",
    function()
      local asked = {}
      local run = open { updates = 4, optimizers = {
        { role = "embedding", pg.optim.sgd { lr = function(t, total)
          asked[t] = total
          return 0.1 * (t + 1)
        end }, schedule = pg.schedule.constant() },
        { role = "backbone", pg.optim.muon { lr = 8e-3, weight_decay_scale = "independent" } },
        { role = "head", pg.optim.frozen() },
      }, hooks = { function(r)
        assert(r.head.gradient == nil, "a frozen parameter has no gradient")
      end } }
      train(run)
      run:close()
      assert.equal(4, asked[3])
      local _, by_update = support.metrics(run.out)
      assert.is_true(math.abs(by_update[4]["optimizer/lr_input_embedding"] - 0.4) < 1e-15)
      assert.equal(0, by_update[4]["optimizer/lr_lm_head"])
      local rows = support.json(run.out .. "/config.json").optimizers
      assert.equal("constant { scale = 1, warmup = 0 }", rows[1].schedule)
      assert.equal("independent", rows[2].weight_decay_scale)
      -- Out of range at some update: located at the function, before anything is written.
      local out = support.folder() .. "/run"
      local ok, e = pcall(pg.open, support.recipe(pg, data, { optimizers = {
        { role = { "embedding", "backbone", "head" },
          pg.optim.sgd { lr = function(t) return 1 - t end } } } }), { out = out })
      assert.is_false(ok)
      assert.matches("run_spec.lua:%d+: pg.optim.sgd.lr at update 11 = %-10 is not allowed", e)
      assert.is_false(core.fs.exists(out))
    end)

  it("changes an optimizer from the next update on", function()
    local run = open { updates = 6 }
    for update in run:updates() do
      if update == 2 then run:set_optimizer("head", pg.optim.sgd { lr = 0 }) end
      if update > 2 then
        assert.equal("sgd", run.head.optimizer)
        assert.equal(0, run.head.increment:abs():max())
        assert.equal(update - 2, run.head.updates)
      end
    end
    assert.error_matches(function() run:set_optimizer("heda", pg.optim.frozen()) end,
      "did you mean 'head'")
    assert.error_matches(function()
      run:set_optimizer("head", pg.optim.sgd { lr = function() return 1 end })
    end, "lr of sgd is a function, which a checkpoint cannot hold")
    run:close()
  end)

  it("leaves a loop with break in a state that can go on", function()
    local run, out = open { updates = 6 }
    for update in run:updates() do
      if update == 3 then break end
    end
    assert.equal("running", run.status)
    for update in run:updates() do
      if update == 4 then break end
    end
    assert.equal(4, run.update)
    run:close()
    assert.equal(75, support.json(out .. "/summary.json").exit_code)
    assert.is_true(core.fs.exists(out .. "/checkpoints/00000004"))
    -- A script made this run, so a resume needs its recipe.
    local value, message = pg.resume(out, { threads = 1 })
    assert.is_nil(value)
    assert.matches("was made by a script", message)
    local resumed = assert(pg.resume(out, { threads = 1,
      recipe = support.recipe(pg, data, { updates = 6 }) }))
    assert.equal(4, resumed.update)
    resumed:close()
  end)

  it("stops at a norm that is not finite, names the parameter, applies nothing", function()
    local run, out = open { updates = 6, hooks = { pg.checkpoint { every = 2 }, function(r)
      if r.update == 3 then r:edit("lm_head.weight", function(w) w:set(1, 1, 0 / 0) end) end
    end } }
    local ok, e = pcall(train, run)
    assert.is_false(ok)
    assert.matches("^ENONFINITE: ", tostring(e))
    assert.equal(3, run.update)
    run:close()
    local summary = support.json(out .. "/summary.json")
    assert.equal(1, summary.exit_code)
    assert.equal(3, summary.update)
    assert.equal("checkpoints/00000002", summary.checkpoint)
    assert.is_false(core.fs.exists(out .. "/checkpoints/00000003"))
  end)

  it("frees every tensor when it is closed", function()
    local run = open { updates = 2, hooks = { pg.every(1, pg.diagnostics.validation {
      tokens = 32, hilbert_panel = 16 }) } }
    train(run)
    local context = run.context
    run:close()
    support.collect()
    assert.has_error(function() context:live_tensors() end) -- closed with the run
    assert.error_matches(function() run:log("x", 1) end, "the run is closed")
  end)
end)

describe("the plan", function()
  local plan = require("perigee.open").plan

  it("has the published lengths", function()
    local published = {
      { 185680896, 7083, 708, 3713531904 }, { 379184640, 14464, 1446, 7583301632 },
      { 639797248, 24406, 2440, 12795772928 },
    }
    for i, name in ipairs { "190m", "380M", "6-40m" } do
      local weights, steps, warmup, tokens = table.unpack(published[i])
      assert.equal(weights, core.model_config({ preset = name }).weights)
      local spec = { batch = { sequences = 256 }, tokens_per_parameter = 20 }
      local total, last, per_update = plan(spec, weights, 2048)
      assert.equal(steps, total)
      assert.equal(steps, last)
      assert.equal(tokens, total * per_update)
      assert.equal(warmup, core.schedule_warmup(0.1, total))
    end
  end)

  it("is cut by max_updates without changing the schedule", function()
    local spec = { batch = { sequences = 16 }, tokens_per_parameter = 1, max_updates = 3 }
    local total, last, tokens = plan(spec, 288, 2)
    assert.same({ 9, 3, 32 }, { total, last, tokens })
    assert.equal(4, core.schedule_warmup(0.5, total))
    assert.equal(9, select(2, plan(spec, 288, 2, 100)))
  end)
end)

describe("a run directory", function()
  it("keeps the recipe with its files, and no absolute paths in config.json", function()
    local folder = support.folder()
    support.write(folder .. "/sizes.lua", "return { width = 16 }")
    support.write(folder .. "/r.lua", ([[
local pg = require "perigee"
local p = pg.params { data = %q, updates = 3 }
local sizes = require "sizes"
local rate = dofile(%q)
return pg.recipe { name = "kept", model = { layers = 1, width = sizes.width, heads = 2,
  head_dim = 8, context = 8 }, data = { path = p.data }, batch = { sequences = 4 },
  updates = p.updates, optimizers = { { role = { "embedding", "backbone", "head" },
  pg.optim.sgd { lr = function() return rate end } } } }]]):format(data, folder .. "/rate.lua"))
    support.write(folder .. "/rate.lua", "return 0.1")
    local run = assert(pg.open(folder .. "/r.lua", { out = folder .. "/run",
      set = { updates = 2 }, threads = 1 }))
    train(run)
    run:close()
    assert.equal(support.read(folder .. "/r.lua"), support.read(folder .. "/run/recipe.lua"))
    assert.equal("return { width = 16 }", support.read(folder .. "/run/recipe/1-sizes.lua"))
    local text = support.read(folder .. "/run/config.json")
    assert.is_nil(text:find(folder, 1, true))
    assert.is_nil(text:find('"/'))
    local config = support.json(folder .. "/run/config.json")
    assert.equal(2, config.params.updates)
    assert.equal(97, config.model.vocab)
    assert.equal("dataset.json", config.data.vocabulary_from)
    assert.matches("^%x+$", config.data.digest)
    assert.equal(data, support.json(folder .. "/run/state.json").paths.data)
    -- A resume reads the copies: the originals may be gone.
    for _, name in ipairs { "r.lua", "sizes.lua", "rate.lua" } do
      core.fs.remove(folder .. "/" .. name)
    end
    local resumed = assert(pg.resume(folder .. "/run", { threads = 1, max_updates = 2 }))
    assert.equal(2, resumed.update)
    resumed:close()
  end)

  it("is not made when something is refused", function()
    local function refused(pattern, changes, options)
      options = options or {}
      options.out = support.folder() .. "/sub/run"
      local ok, value, message = pcall(pg.open, support.recipe(pg, data, changes), options)
      local text = ok and message or value
      assert.is_true(not ok or value == nil)
      assert.matches(pattern, text)
      assert.is_false(core.fs.exists(options.out))
    end
    refused("data.path = \"/nowhere\" is not a folder", { data = { path = "/nowhere" } })
    refused("no_such", { data = { path = data, train = "no_such_*.bin" } })
    refused("model.head_dim is 7", { model = { head_dim = 7 } })
    refused("EDATA: validation tokens = 1000000 needs", { hooks = {
      pg.every(1, pg.diagnostics.validation { tokens = 1000000 }) } })
    refused("9000", { hooks = { pg.every(1, pg.diagnostics.validation { tokens = 16,
      hilbert_panel = 9000 }) } })
    refused("holds", { batch = { sequences = 1000, micro = 1000 } })
    refused("device \"cuda\" is not available", { device = "cuda:99" })
    refused("missing.safetensors", { model = { init = "missing.safetensors" } })
    local thin = support.recipe(pg, data):with { tokens_per_parameter = 1e-3 }
    local out = support.folder() .. "/run"
    local ok, e = pcall(pg.open, thin, { out = out })
    assert.is_false(ok)
    assert.matches("less than one update: 7 tokens, expected at least the 32", e)
    assert.is_false(core.fs.exists(out))
  end)

  it("numbers itself, and refuses one that exists", function()
    local directory = require "perigee.directory"
    local folder = support.folder()
    local ok, e = pcall(directory.reserve, folder, "x")
    assert.is_false(ok)
    assert.matches("EEXIST: %-%-out .* exists already", tostring(e))
    local value, message, name = pg.open(support.recipe(pg, data), { out = folder })
    assert.is_nil(value)
    assert.equal("EEXIST", name)
    assert.matches("^EEXIST", message)
  end)
end)

describe("compute in bf16", function()
  it("is close to fp32, and recorded", function()
    local exact = open { updates = 3 }
    local run, out = open({ updates = 3 }, { compute = "bf16" })
    train(exact)
    train(run)
    -- Operands rounded to 2^-9 relative; the loss of a small model moves by much less.
    assert.is_true(math.abs(run.loss / exact.loss - 1) < 6e-4)
    assert.is_true(run.loss ~= exact.loss)
    exact:close()
    run:close()
    assert.equal("bf16", support.json(out .. "/config.json").compute.precision)
  end)

  it("sees edited weights at once", function()
    local run = open({}, { compute = "bf16" })
    -- A head of zeros makes all tokens equally likely, also when the editing function raised.
    local ok, message = pcall(run.edit, run, "lm_head.weight", function(w)
      w:fill_(0)
      error("stop here")
    end)
    assert.is_false(ok)
    assert.matches("stop here", message)
    assert.is_true(math.abs(run:validate { tokens = 48 }.loss - math.log(97)) < 1e-6)
    run:close()
  end)

  it("may come from the recipe, and goes on in a resume", function()
    local rec = support.recipe(pg, data, { compute = "bf16", updates = 6 })
    local out, whole = support.folder() .. "/run", support.folder() .. "/run"
    local function weights(path)
      return core.fs.sha256(path .. "/checkpoints/00000006/model.safetensors")
    end
    local first = assert(pg.open(rec, { out = whole, threads = 1 }))
    train(first)
    first:close()
    local part = assert(pg.open(rec, { out = out, threads = 1 }))
    for update in part:updates() do if update == 2 then part:stop("enough") end end
    part:close()
    local rest = assert(pg.resume(out, { recipe = rec, threads = 1 }))
    train(rest)
    rest:close()
    assert.equal(assert(weights(whole)), assert(weights(out)))
    local marker
    for _, line in ipairs((support.metrics(out))) do
      marker = line["session/compute"] or marker
    end
    assert.equal("bf16", marker)
  end)
end)
