-- What a run says it will need is what it takes; what cannot fit is refused before anything is
-- allocated; a dry run allocates nothing.
local pg = require "perigee"
local support = require "lua_support"
local runs = require "perigee.run"
local session = require "perigee.session"
local core = support.core

local data
local heads = {
  adamw = function() return pg.optim.adamw { lr = 4e-3 } end,
  rownorm = function() return pg.optim.rownorm { lr = 3e-3 } end,
}

local function recipe(head, changes)
  local all = {
    model = { layers = 4, width = 64, heads = 2, head_dim = 32, context = 32 },
    batch = { sequences = 8, micro = 8 }, updates = 3,
    optimizers = {
      { role = "embedding", pg.optim.adamw { lr = 4e-3 } },
      { role = "backbone", pg.optim.muon { lr = 8e-3 } },
      { role = "head", heads[head]() },
    },
    hooks = { pg.every(2, pg.diagnostics.head_diameter()),
      pg.every(3, pg.diagnostics.validation { tokens = 256, hilbert_panel = 64 }) },
  }
  for key, value in pairs(changes or {}) do all[key] = value end
  return support.recipe(pg, data, all)
end

local function average()
  local ema = pg.ema { decay = 0.9 }
  return { ema, pg.every(3, ema:validation { tokens = 256 }) }
end

setup(function() data = support.data() end)
teardown(support.clean)

describe("an estimate", function()
  for _, case in ipairs {
    { "adamw", {} }, { "rownorm", { recompute = "block" } },
    { "adamw", { compute = "bf16", increments = "all" } },
    { "rownorm", { compute = "bf16", recompute = "block" } },
    { "adamw", { hooks = average() } },
    { "rownorm", { hooks = { pg.shadow { role = "head", pg.optim.adamw() },
      pg.shadow { role = "backbone", pg.optim.adamw(), name = "blocks" } } } },
  } do
    local head, changes = table.unpack(case)
    local what = {}
    for key, value in pairs(changes) do
      what[#what + 1] = key .. (type(value) == "string" and " = " .. value or "")
    end
    table.sort(what)
    it(("bounds the peak closely: %s %s"):format(head, table.concat(what, ", ")), function()
      local run = assert(pg.open(recipe(head, changes), { out = support.folder() .. "/x",
        device = "cpu", threads = 1 }))
      local need, ctx = runs.inner(run).need, run.context
      for _ in run:updates() do end -- luacheck: ignore 542
      local peak = ctx:peak_bytes()
      run:close()
      assert.is_true(peak <= need.total, ("%d of %d"):format(peak, need.total))
      -- Optimizers and the diameter take turns, and the smaller need is not there meanwhile.
      assert.is_true(peak >= 0.9 * (need.total - need.workspace),
        ("%d of %d"):format(peak, need.total))
    end)
  end

  it("tells what recompute saves", function()
    local all = {}
    for i, recompute in ipairs { "none", "block" } do
      local _, run = session.plan(recipe("adamw", { recompute = recompute }), { threads = 1 })
      all[i] = run.need
      run:release()
    end
    local n, d, inner, mlp, nh = 8 * 32, 64, 64, 256, 2
    local block = n * (4 * (d + 6 * inner + 3 * mlp) + 4 * (2 + 3 * nh))
    assert.equal(3 * block, all[1].activations - all[2].activations)
    assert.equal(all[1].total - all[2].total, all[1].activations - all[2].activations)
  end)
end)

describe("a dry run", function()
  it("allocates nothing and checks what training would", function()
    local _, run = session.plan(recipe("rownorm"), { threads = 1 })
    assert.equal(0, run.ctx:bytes())
    assert.equal(0, run.ctx:peak_bytes())
    assert.equal(0, run.ctx:live_tensors())
    assert.equal(11 + 7, run.updates_per_epoch) -- 93 and 62 sequences of 32, 8 at a time
    run:release()
    local folder = support.folder()
    local function refused(text, changes)
      local ok, e = pcall(session.plan, recipe("rownorm", changes), { threads = 1 })
      assert(not ok)
      assert.matches(text, tostring(e), 1, true)
    end
    refused("too small", { batch = { sequences = 4096, micro = 1 } })
    refused("no entry updates lm_head.weight", { optimizers = {
      { role = { "embedding", "backbone" }, pg.optim.adamw() } } })
    refused("validation tokens", { hooks = {
      pg.every(1, pg.diagnostics.validation { tokens = 10 ^ 7 // 1 | 0 }) } })
    assert.same({}, core.fs.list(folder))
  end)
end)

-- A recipe file, so that the program can read it.
local function recipe_file(width, layers)
  local folder = support.folder()
  return support.write(folder .. "/recipe.lua", ([[
    local pg = require "perigee"
    local p = pg.params { micro = 8 }
    return pg.recipe {
      name = "large", model = { layers = %d, width = %d, heads = 2, head_dim = 32, context = 32 },
      data = pg.data.shards { path = %q }, batch = { sequences = 8, micro = p.micro }, updates = 2,
      optimizers = {
        { role = { "embedding", "head" }, pg.optim.adamw { lr = 4e-3 } },
        { role = "backbone", pg.optim.muon { lr = 8e-3 } },
      },
      hooks = { pg.every(2, pg.diagnostics.head_diameter()) },
    }]]):format(layers, width, data)), folder
end

-- The memory table of a dry run: name -> text, of the first rank.
local function memory_of(text)
  local titles, values = text:match("memory at the peak, MiB:\n([^\n]+)\n([^\n]+)")
  assert(titles, text)
  local found, words = {}, {}
  for word in values:gmatch("%S+") do words[#words + 1] = word end
  for title in titles:gmatch("%S+") do found[title] = table.remove(words, 1) end
  return found
end

describe("a plan for a GPU", function()
  it("needs none", function()
    local path, folder = recipe_file(64, 2)
    local code, out, err = support.shell(("cd %s && CUDA_VISIBLE_DEVICES= %s train %s --dry-run "
      .. "--device cuda"):format(support.quote(folder), support.quote(support.program),
      support.quote(path)))
    assert.equal(0, code, err)
    local need = memory_of(out)
    assert(tonumber(need.total) > 0 and tonumber(need.copies) > 0, out) -- bf16, as on a GPU
    assert.equal("?", need.fits)
    assert.matches("cuda %(not here%)", out)
    assert.matches("planned without the device: .*EDEVICE", out)
    code, out, err = support.shell(("cd %s && CUDA_VISIBLE_DEVICES= %s train %s --device cuda")
      :format(support.quote(folder), support.quote(support.program), support.quote(path)))
    assert.equal(1, code)
    assert.equal("", out)
    assert(support.one_line(err, "EDEVICE"), err)
  end)
end)

describe("a model that does not fit", function()
  it("has a plan, and is refused in one line before anything is made", function()
    local path, folder = recipe_file(65536, 4000)
    local code, out, err = support.perigee({ "train", path, "--dry-run", "--device", "cpu" },
      folder)
    assert.equal(0, code, err)
    local need = memory_of(out)
    -- 4000 (2 * 4 * 64 * 65536 / 2 + 3 * 4 * 65536^2) weights in MiB of fp32, and the ends' 2 * 97
    -- rows, which are stored as 128 each.
    local weights = 4000 * (4 * 64 * 65536 + 12 * 65536 ^ 2) + 2 * 128 * 65536
    assert.equal(("%.1f"):format(4 * weights / 2 ^ 20), need.weights)
    assert.equal("no", need.fits)
    assert.matches("nothing was allocated", out)
    code, out, err = support.perigee({ "train", path, "--device", "cpu", "--out", "x" }, folder)
    assert.equal(1, code)
    assert.equal("", out)
    assert(support.one_line(err, 'ENOMEM: the run needs ', ' GiB on device "cpu", ', "are free: ",
      "batch.micro = 1 needs ", 'recompute = "block" needs ', "all together need "))
    -- The copies of so many weights take more than the activations of so few positions save.
    assert.is_nil(err:find("bf16", 1, true))
    assert.same({ "recipe.lua" }, core.fs.list(folder))
    -- What is done already is not proposed.
    code, out, err = support.perigee({ "train", path, "--device", "cpu", "--recompute", "block",
      "--set", "micro=1" }, folder)
    assert.equal("", out)
    assert.equal(1, code)
    assert(support.one_line(err, "are free: expected a smaller model"))
  end)
end)

local emulated_it = support.emulated_it(it, pending)

describe("a device", function()
  emulated_it("trains with as much memory as was estimated, and refuses with less", function()
    local path, folder = recipe_file(32, 2)
    local function perigee(memory, words)
      return support.shell(("cd %s && CUDAEMU_MEMORY=%s OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive "
        .. "%s train %s --device cuda %s"):format(folder, memory,
        support.emulated(), path, words))
    end
    local code, out, err = perigee("2g", "--dry-run --recompute block")
    assert.equal(0, code, err)
    local need = memory_of(out)
    assert.equal("2048.0", need.free)
    local bytes = math.ceil((tonumber(need.total) + 0.05) * 2 ^ 20)
    code, out, err = perigee(bytes, "--recompute block --quiet --out done")
    assert.equal(0, code, err .. out)
    code, out, err = perigee(bytes - (1 << 17), "--recompute block --compute fp32 --out less")
    assert.equal(1, code)
    assert.equal("", out)
    assert(support.one_line(err, "ENOMEM: the run needs ", ' MiB on device "cuda", ',
      " MiB are free: batch.micro = ", 'compute = "bf16" needs ' .. need.total))
    assert.is_nil(err:find("recompute", 1, true))
    local names = core.fs.list(folder)
    table.sort(names)
    assert.same({ "done", "recipe.lua" }, names)
  end)
end)
