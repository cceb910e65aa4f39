-- Which attention a run takes, where it is said, and PG_ATTENTION. A device without a choice says
-- nothing; the emulated one has the plain kernel only. Tests that need it are tagged #cuda.
local support = require "lua_support"
local core = support.core

describe("attention", function()
  after_each(support.clean)

  it("is not a choice on a CPU", function()
    local ctx <close> = assert(core.context { device = "cpu", threads = 1 })
    local shape = { compute = "bf16", batch = 2, time = 8, heads = 2, head_dim = 4 }
    assert.equal("", ctx:attention(shape))
    for key, value in pairs { batch = 0, time = 1.5, heads = "2", compute = "fp16" } do
      local bad = {}
      for name in pairs(shape) do bad[name] = shape[name] end
      bad[key] = value
      assert.error_matches(function() ctx:attention(bad) end, key)
    end
    shape.heads = nil
    assert.error_matches(function() ctx:attention(shape) end, "attention.heads is required")
    local _, out = support.perigee { "doctor" }
    assert.equal(ctx:device() == "cpu", not out:find("\nattention", 1, true))
  end)

  local program = support.emulated()
  local recipe = support.root .. "/tests/mpi_recipe.lua"
  local function train(environment, compute)
    local out = support.folder() .. "/run"
    local code, _, err = support.shell(("%s OMP_NUM_THREADS=1 %s train %s --quiet --out %s "
      .. "--compute %s --device cuda --max-updates 1"):format(environment,
      support.quote(program), support.quote(recipe), support.quote(out), compute))
    return code, err, out
  end
  local cudnn = program and program:gsub("[^/]*$", "") .. "lib/perigee/perigee_cudnn.so"
  local emulated_it = support.emulated_it(function(name, f)
    it(name, function()
      if cudnn and core.fs.kind(cudnn) == "file" then return pending("this build has cuDNN") end
      f()
    end)
  end, pending)

  emulated_it("is in config.json with the device", function()
    for environment, why in pairs { [""] = "this build has no cuDNN plugin",
      ["PG_ATTENTION=plain"] = "PG_ATTENTION=plain" } do
      local code, err, out = train(environment, "bf16")
      assert.equal(0, code, err)
      local host = support.json(out .. "/config.json").host
      assert.equal("cuda", host.device)
      assert.is_truthy(host.attention:find("plain kernel: " .. why, 1, true), host.attention)
    end
  end)

  emulated_it("asked for and impossible is one line", function()
    for environment, why in pairs { ["PG_ATTENTION=cudnn"] = "cannot be met",
      ["PG_ATTENTION=fast"] = 'must be "plain" or "cudnn"' } do
      local code, err = train(environment, "bf16")
      assert.equal(1, code)
      assert.is_truthy(err:find(why, 1, true), err)
      assert.is_nil(err:find("\n.", 1), err)
    end
  end)

  emulated_it("that the device cannot compute is refused before anything is made", function()
    local folder = support.folder()
    local text = ([[
local pg = require "perigee"
local p = pg.params { dim = 256 }
return pg.recipe {
  name = "wide", model = { layers = 1, width = 16, heads = 1, head_dim = p.dim, context = 8 },
  data = pg.data.shards { path = %q }, batch = { sequences = 2, micro = 2 }, updates = 1,
  optimizers = { { match = ".", pg.optim.sgd { lr = 1e-3 } } },
}]]):format(support.data(folder .. "/data"))
    support.write(folder .. "/r.lua", text)
    local function perigee(environment, dim, rest)
      return support.shell(("cd %s && %s OMP_NUM_THREADS=1 %s train r.lua --device cuda --out run "
        .. "--set dim=%d %s"):format(folder, environment, support.quote(program), dim, rest))
    end
    for _, case in ipairs { { "", 258, "head_dim is 258; attention goes up to 256" },
      { "CUDAEMU_SHARED=99k", 256, "head_dim 256 needs" } } do
      for _, rest in ipairs { "--dry-run", "--quiet", "--compute fp32 --dry-run" } do
        local code, _, err = perigee(case[1], case[2], rest)
        assert.equal(1, code)
        assert.is_true(support.one_line(err, "r.lua:", case[3]))
        assert.is_false(core.fs.exists(folder .. "/run"))
      end
    end
    local code, _, err = perigee("", 256, "--quiet")
    assert.equal(0, code, err)
  end)

  emulated_it("is said by doctor", function()
    local _, out = support.shell(support.quote(program) .. " doctor")
    assert.matches("\nattention +plain kernel: this build has no cuDNN plugin", out)
    _, out = support.shell("PG_ATTENTION=cudnn " .. support.quote(program) .. " doctor")
    assert.matches("\nattention +PG_ATTENTION=cudnn cannot be met: ", out)
  end)
end)
