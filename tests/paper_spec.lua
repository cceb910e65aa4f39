-- recipes/paper.lua against the published numbers, run by run, without any of its memory; and the
-- published data, of which names and sizes are known: files of holes have the paper's digest.
local console = require "perigee.console"
local core = require "perigee.core"
local pg = require "perigee"
local session = require "perigee.session"
local support = require "lua_support"

local path = support.root .. "/recipes/paper.lua"
local digest = "87edf1844351c445e687ea865215b5fecff3a8b8052dff5b7263ea30712376f4"

-- A shard of `count` zeros that takes a page of the disk.
local function holes(name, count)
  local file = assert(io.open(name, "wb"))
  file:write(string.pack("<i4i4i4", 20240520, 1, count), ("\0"):rep(1024 - 12))
  file:seek("set", 1024 + 2 * count - 1)
  file:write "\0"
  file:close()
end

local function published(shards)
  local folder = support.folder() .. "/fineweb"
  assert(core.fs.make(folder))
  for i = 1, shards do
    holes(("%s/fineweb_train_%06d.bin"):format(folder, i), 100000000)
  end
  holes(folder .. "/fineweb_val_000000.bin", 100000000)
  return folder
end

local data
setup(function() data = published(890) end)
teardown(support.clean)

-- SPEC §1 and §3, REFERENCE A2. Peak rates: of the head by recipe.
local sizes = {
  ["190m"] = { width = 512, heads = 8, parameters = 185680896, updates = 7083, warmup = 708,
    micro = 32, tokens = 3713531904, target = 3713617920, adamw = 4e-3, rownorm = 3.2e-3,
    -- SPEC: scale of update index t.
    scale = { [0] = 0, [1] = 0.0014124293785310734, [354] = 0.5, [707] = 0.998587570621469,
      [708] = 1, [709] = 0.9999999453414462, [3541] = 0.628117410419696, [3895] = 0.55,
      [7081] = 0.10000005465855379, [7082] = 0.1 } },
  ["380m"] = { width = 768, heads = 12, parameters = 379184640, updates = 14464, warmup = 1446,
    micro = 16, tokens = 7583301632, target = 7583692800, adamw = 2.6666666666666666e-3,
    rownorm = 2.1333333333333333e-3,
    scale = { [7232] = 0.6280703753021374, [14462] = 0.10000001310570693 } },
  ["640m"] = { width = 1024, heads = 16, parameters = 639797248, updates = 24406, warmup = 2440,
    micro = 8, tokens = 12795772928, target = 12795944960, adamw = 2e-3, rownorm = 1.6e-3,
    scale = { [12203] = 0.628092380460081, [24404] = 0.10000000460277607 } },
}

-- What a run would be, and what the recipe gave to pg.diagnostics.validation.
local function plan(set)
  set.data = set.data or data
  local validation = pg.diagnostics.validation
  local given
  rawset(pg.diagnostics, "validation", function(options)
    given = options
    return validation(options)
  end)
  local ok, problem, run = pcall(session.plan, path, { set = set, threads = 1, device = "cpu",
    quiet = true })
  rawset(pg.diagnostics, "validation", validation)
  if not ok then error(problem, 0) end
  return run, given
end

local function by_role(run)
  local found = {}
  for _, entry in ipairs(run.spec.entries) do
    for _, parameter in ipairs(entry.parameters) do
      local role = parameter.role
      assert(found[role] == nil or found[role] == entry.optimizer, role)
      found[role] = entry.optimizer
    end
  end
  return found
end

local paper_adamw = { betas = { 0.9, 0.999 }, eps = 1e-10, weight_decay = 0.1 }

local function check_optimizer(optimizer, name, lr, rest)
  assert.equal(name, optimizer.name)
  assert.equal(lr, optimizer.hypers.lr)
  for key, value in pairs(rest) do assert.same(value, optimizer.hypers[key], key) end
end

-- Update, validation and diameter points of a run, from its hooks.
local function points(hook, last)
  local count = 0
  for update = 1, last do
    if hook.occasion:due(update, last) then count = count + 1 end
  end
  return count
end

describe("a run of the paper", function()
  local diameters = { ["190m"] = 709, ["380m"] = 1447, ["640m"] = 2441 }
  local validations = { ["190m"] = 15, ["380m"] = 29, ["640m"] = 49 }

  for _, model in ipairs { "190m", "380m", "640m" } do
    for _, head in ipairs { "adamw", "rownorm" } do
      for seed = 0, 2 do
        it(("%s %s %d has the published numbers"):format(model, head, seed), function()
          local expected = sizes[model]
          local run, validation = plan { model = model, head = head, seed = seed }
          local spec, c = run.spec, run.model_config
          assert.equal(digest, run.data_digest)
          assert.same({ init = seed, data = seed }, spec.seed)
          assert.same({ 32, expected.width, expected.heads, 64, 4 * expected.width, 50257, 2048 },
            { c.layers, c.width, c.heads, c.head_dim, c.mlp, c.vocab, c.context })
          assert.same({ 1e-6, 1e4, 1, 0.02 },
            { c.norm_eps, c.rope_base, c.logit_scale, c.init_std.head or c.init_std })
          assert.equal(expected.parameters, c.weights)
          assert.equal(expected.updates, run.total)
          assert.equal(expected.updates, run.last)
          assert.equal(524288, run.tokens_per_update)
          assert.equal(expected.tokens, run.total * run.tokens_per_update)
          assert.equal(expected.target, 20 * c.weights)
          assert.equal(expected.micro, spec.batch.micro)
          assert.equal(1.0, spec.clip)
          assert.equal("bf16", run.compute)
          assert.equal(expected.warmup, core.schedule_warmup(spec.schedule.options.warmup,
            run.total))
          for t, scale in pairs(expected.scale) do
            assert.is_true(math.abs(spec.schedule:scale(t, run.total) - scale) <= 1e-15, t)
          end
          assert.equal(169100, run.updates_per_epoch) -- 890 shards of 190
          local optimizers = by_role(run)
          check_optimizer(optimizers.embedding, "adamw", 4e-3, paper_adamw)
          check_optimizer(optimizers.backbone, "muon", 8e-3, { momentum = 0.95, nesterov = true,
            steps = 5, eps = 1e-5, weight_decay = 0.1, precision = "fp32",
            coefficients = "quintic", scale = "spectral", average = "sum" })
          check_optimizer(optimizers.head, head, expected[head], head == "adamw" and paper_adamw
            or { beta = 0.95, eps = 1e-8, weight_decay = 0, project = "none" })
          assert.equal(10, spec.log.every)
          assert.equal(diameters[model], points(spec.hooks[1], run.last))
          assert.equal(validations[model], points(spec.hooks[2], run.last))
          assert.equal(5242880, validation.tokens)
          assert.same({ tokens = 8192, ranks = 8, micro = expected.micro },
            validation.hilbert_panel)
          -- As many on one process as on the paper's eight: whole groups either way.
          assert.equal(0, validation.tokens % (expected.micro * 2048 * 8))
          assert.equal(0, run.ctx:bytes())
          run:release()
        end)
      end
    end
  end
end)

describe("perigee sweep recipes/paper.lua", function()
  it("plans the 18 runs, with the time that a rate makes of their arithmetic", function()
    local code, out, err = support.perigee { "sweep", path, "--set", "data=" .. data, "--dry-run",
      "--device", "cpu", "--rate", "4e14" }
    assert.equal(0, code, err)
    local runs = 0
    for _ in out:gmatch "model=%d+m,seed=%d" do runs = runs + 1 end
    assert.equal(18, runs)
    -- Three seeds of two heads; 6 (P - embedding) + 12 L heads head_dim T / 2 FLOP a token.
    local tokens, seconds = 0, 0
    for _, size in pairs(sizes) do
      tokens = tokens + 6 * size.tokens
      seconds = seconds + 6 * size.tokens / 4e14 * (6 * (size.parameters - 50257 * size.width)
        + 12 * 32 * size.width * 2048 / 2)
    end
    assert.matches("18 runs%s+" .. console.grouped(tokens):gsub("%p", "%%%0") .. "%s+"
      .. console.duration(seconds), out)
  end)
end)

describe("a dry run", function()
  local function dry(...)
    return support.perigee { "train", path, "--set", "data=" .. data, "--dry-run", "--device",
      "cpu", ... }
  end

  it("says what the run takes at a given rate", function()
    -- 3713531904 tokens of 6 (185680896 - 50257 * 512) + 12 * 32 * 512 * 1024 = 1.161e9 FLOP.
    local code, out, err = dry("--rate", "4e14")
    assert.equal(0, code, err)
    assert.matches("training takes 4.31e+18 FLOP: 3,713,531,904 tokens of 1.161e+09,", out, 1,
      true)
    assert.matches("\ntime: 2h59m at the given rate (4e+14 FLOP/s), without validation", out, 1,
      true)
    code, out = dry()
    assert.equal(0, code)
    assert.matches("training takes 4.31e+18 FLOP", out, 1, true)
    assert.not_matches("time:", out)
  end)

  it("measures the rate when asked to, and says so", function()
    local code, out, err = dry("--rate", "measured")
    assert.equal(0, code, err)
    local time, rate = out:match "\ntime: (%w+) at least, at the peak measured on cpu %(([%d.e+]+)"
    local seconds, unit = 0, { d = 86400, h = 3600, m = 60, s = 1 }
    for count, name in time:gmatch "(%d+)(%a)" do seconds = seconds + count * unit[name] end
    -- Three digits of the rate; two units of the time, the second cut off: at most 1 in 24.
    assert.is_true(math.abs(seconds * tonumber(rate) / 4.312e18 - 1) <= 0.005 + 1 / 24, time)
  end)

  it("refuses other rates", function()
    for _, rate in ipairs { "fast", "0", "-1", "inf", "nan" } do
      local code, _, err = dry("--rate", rate)
      assert.equal(2, code)
      assert.matches("--rate " .. rate .. " is not allowed: expected FLOP per second above 0, or "
        .. "'measured'", err, 1, true)
    end
    local code, _, err = support.perigee { "train", path, "--rate", "1e9" }
    assert.equal(2, code)
    assert.matches("expected with --dry-run", err, 1, true)
  end)
end)

describe("what the released program has beside them", function()
  it("is AdamW on every matrix, 190m and 380m", function()
    for model, rates in pairs { ["190m"] = { 2e-3, 2e-3, 2e-3 },
      ["380m"] = { 1.3333333333333333e-3, 2e-3, 1.3333333333333333e-3 } } do
      local run = plan { model = model, head = "adamw", backbone = "adamw" }
      local optimizers = by_role(run)
      for i, role in ipairs { "backbone", "embedding", "head" } do
        check_optimizer(optimizers[role], "adamw", rates[i], paper_adamw)
      end
      run:release()
    end
  end)

  it("is refused where it has no published numbers, with what is allowed", function()
    local function refused(pattern, set)
      set.data = data
      local ok, found, message = pcall(pg.load, path, set)
      assert.is_true(not ok or found == nil)
      assert.matches(pattern, tostring(ok and message or found))
    end
    local only = "the paper has it for 190m and 380m with the adamw head only"
    refused(only, { model = "640m", head = "adamw", backbone = "adamw" })
    refused(only, { head = "rownorm", backbone = "adamw" })
    refused('model = "1b" is not allowed: expected "190m" or "380m" or "640m"', { model = "1b" })
    refused('head = "muon" is not allowed', { head = "muon" })
    refused("seed = %-1 is not allowed", { seed = -1 })
  end)

  it("is refused without the data that one batch or the validation takes", function()
    local folder = support.folder()
    holes(folder .. "/a_train_000001.bin", 524288) -- a sequence reads one token more than it has
    holes(folder .. "/a_val_000000.bin", 5242881)
    local function fails(pattern)
      local ok, e = pcall(plan, { data = folder })
      assert.is_false(ok)
      assert.matches(pattern, tostring(e))
    end
    fails("holds 255 sequences of 2048 tokens, one optimizer batch needs 256")
    holes(folder .. "/a_train_000001.bin", 524289)
    local run = plan { data = folder }
    run:release()
    holes(folder .. "/a_val_000000.bin", 5242880)
    fails("validation tokens = 5242880 needs 80 batches of 32 x 2048 tokens")
  end)
end)

-- REFERENCE A1, Refusals: each with its value and what is allowed.
describe("what the released program refuses", function()
  local base
  setup(function() base = assert(pg.load(path, { data = data })) end)

  local function with(changes)
    local _, run = session.plan(base:with(changes), { threads = 1, device = "cpu", quiet = true })
    run:release()
  end
  local function validation(options) return pg.diagnostics.validation(options) end

  for _, case in ipairs {
    { "batch.sequences = 0 is not allowed", with, { batch = { sequences = 0 } } },
    { "batch.micro = 24 is not allowed: expected a divisor of batch.sequences = 256", with,
      { batch = { micro = 24 } } },
    { "tokens_per_parameter = 0 is not allowed", with, { tokens_per_parameter = 0 } },
    { "185680 tokens, expected at least the 524288 of one update", with,
      { tokens_per_parameter = 1e-3 } },
    { "max_updates = 0 is not allowed", with, { max_updates = 0 } },
    { "warmup = 1 is not allowed", pg.schedule.warmup_cosine, { warmup = 1 } },
    { "warmup = -0.1 is not allowed", pg.schedule.warmup_cosine, { warmup = -0.1 } },
    { "floor = 1.1 is not allowed", pg.schedule.warmup_cosine, { floor = 1.1 } },
    { "clip = 0 is not allowed", with, { clip = 0 } },
    { "clip = inf is not allowed", with, { clip = math.huge } },
    { "log.every = 0 is not allowed", with, { log = { every = 0 } } },
    { "validation tokens = 0 is not allowed", validation, { tokens = 0 } },
    { "hilbert_panel.tokens = -1 is not allowed", validation,
      { tokens = 65536, hilbert_panel = -1 } },
    { "the panel asks for 200000000 tokens; the validation split supplies 99614720", with,
      { hooks = { pg.every(1, validation { tokens = 65536, hilbert_panel = {
        tokens = 200000000, ranks = 8, micro = 32 } }) } } },
    { "model.width = 0 is not allowed", with, { model = { width = 0 } } },
    { "model.head_dim is 63; it must be even", with, { model = { head_dim = 63 } } },
    { "model.init_std = inf is not allowed", with, { model = { init_std = math.huge } } },
    { 'no model preset is called "1b"; there are 190m, 380m, 640m', with,
      { model = { preset = "1b" } } },
    { "unknown key 'beta'; did you mean 'betas'", pg.optim.adamw, { lr = 1, beta = 0.9 } },
    { "pg.optim.rownorm.lr is missing", pg.optim.rownorm, { beta = 0.9 } },
    { "betas = a table is not allowed: expected two numbers", pg.optim.adamw,
      { lr = 1, betas = { 0.9, 0.99, 0.999 } } },
    { "betas[2] = 1 is not allowed", pg.optim.adamw, { lr = 1, betas = { 0.9, 1 } } },
    { "eps = 0 is not allowed", pg.optim.adamw, { lr = 1, eps = 0 } },
    { "lr = -1 is not allowed", pg.optim.adamw, { lr = -1 } },
    { "nesterov = 1 is not allowed: expected true or false", pg.optim.muon,
      { lr = 1, nesterov = 1 } },
    { "steps = -1 is not allowed", pg.optim.muon, { lr = 1, steps = -1 } },
    { 'data.path = "/nowhere" is not a folder', with, { data = { path = "/nowhere" } } },
  } do
    local message, call, changes = table.unpack(case)
    it(message, function()
      local ok, e = pcall(call, changes)
      assert.is_false(ok)
      assert.matches(message, tostring(e), 1, true)
    end)
  end
end)

describe("perigee data check --paper", function()
  it("knows the published shards by their names and sizes", function()
    local code, out, err = support.perigee { "data", "check", data, "--paper", "--headers" }
    assert.equal(0, code, err)
    assert.matches("train: 890 shards, 89,000,000,000 tokens\n", out, 1, true)
    assert.matches("val: 1 shards, 100,000,000 tokens\n", out, 1, true)
    assert.matches("vocabulary: 50257 (the paper's)\n", out, 1, true)
    assert.matches("digest: " .. digest .. " (names and sizes of the paper's shards)\n", out, 1,
      true)
    assert.matches("updates per epoch: 169100 (256 sequences of 2048 tokens)", out, 1, true)
  end)

  it("names the first shard that is another", function()
    local function refused(text, folder)
      local code, _, err = support.perigee { "data", "check", folder, "--paper" }
      assert.equal(1, code)
      assert.is_true(support.one_line(err, "is not the paper's data", text))
    end
    local folder = published(2)
    refused("train: 2 shards, the paper's has 890: fineweb_train_000003.bin is missing", folder)
    holes(folder .. "/fineweb_train_000002.bin", 99999999)
    refused("train: fineweb_train_000002.bin has 99999999 tokens, the paper's has 100000000",
      folder)
    holes(folder .. "/edu_train_000001.bin", 100000000)
    refused("train: shard 1 is edu_train_000001.bin, the paper's is fineweb_train_000001.bin",
      folder)
    holes(data .. "/fineweb_val_000001.bin", 100)
    finally(function() os.remove(data .. "/fineweb_val_000001.bin") end)
    refused("val: 2 shards, the paper's has 1: fineweb_val_000001.bin is not of it", data)
  end)
end)
