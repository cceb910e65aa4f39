-- The folder of a sweep: who works in it, what it holds, and what was changed there.
local pg = require "perigee"
local look = require "perigee.sweep.look"
local support = require "lua_support"
local sweeps = require "sweep_support"
local core, text = support.core, sweeps.text
local run, names, program = sweeps.run, sweeps.names, sweeps.program
local spawn, ended, started = sweeps.spawn, sweeps.ended, sweeps.started
local data, recipe

setup(function()
  sweeps.prepare()
  data, recipe = sweeps.data, sweeps.recipe
end)
teardown(support.clean)

describe("the folder of a sweep", function()
  local slow = { "--jobs", "2", "--set", "updates=100000", "--set", "wait=0.02" }

  it("is left after an error when all runs have saved", function()
    local out = support.folder() .. "/s"
    -- Two that go on, and one that ends, whose end cannot be noted.
    local sweep, log = spawn("--out", out, "--grid", "fail=3,0,100000", "--jobs", "3", "--set",
      "updates=100000", "--set", "wait=0.05")
    for _, name in ipairs { "fail=0", "fail=100000" } do started(out, name) end
    os.remove(out .. "/sweep.json")
    assert(core.fs.make(out .. "/sweep.json/x"))
    assert.equal(1, (ended(sweep)))
    assert.matches("sweep.json", support.read(log))
    assert.matches("an error: all runs save a checkpoint and stop", support.read(log))
    for _, name in ipairs { "fail=0", "fail=100000" } do
      assert.equal("stopped", look.at(out .. "/" .. name).status)
      core.fs.unlock(assert(core.fs.lock(out .. "/" .. name)))
    end
    core.fs.unlock(assert(core.fs.lock(out .. "/logs")))
  end)

  it("is not used while runs of a killed sweep save", function()
    local out = support.folder() .. "/s"
    local first = spawn("--out", out, table.unpack(slow))
    started(out, "head=adamw")
    started(out, "head=rownorm")
    first:kill "SIGKILL"
    ended(first)
    local second, log = spawn("--out", out, table.unpack(slow))
    for _, name in ipairs { "head=adamw", "head=rownorm" } do
      local sessions = 1
      for _ = 1, 600 do
        for _, line in ipairs(support.metrics(out .. "/" .. name)) do
          sessions = line.session or sessions
        end
        if sessions > 1 then break end
        core.sleep(0.05)
      end
      assert.equal(2, sessions)
    end
    second:kill "SIGTERM"
    assert.equal(75, (ended(second)))
    assert.is_nil(support.read(log):find "failed")
  end)

  it("takes one sweep at a time", function()
    local out = support.folder() .. "/s"
    local first = spawn("--out", out, table.unpack(slow))
    started(out, "head=adamw")
    local code, printed = program("sweep", recipe, "--out", out, table.unpack(slow))
    assert.equal(1, code)
    assert.is_true(support.one_line(printed, "another sweep works in " .. out))
    first:kill "SIGTERM"
    assert.equal(75, (ended(first)))
  end)

  it("holds what makes the plan again", function()
    local out = support.folder() .. "/s"
    local given = { grid = { head = { adamw = { lr = { 1e-3, 1e-2 } }, rownorm = { lr =
      pg.loguniform(1e-3, 1e-2) } }, seed = { 0, 1 } }, samples = 1, sample_seed = 5,
      runs = { { head = "adamw", seed = 7, lr = 0.5 } }, set = { updates = 2 } }
    local options = { out = out }
    for key, value in pairs(given) do options[key] = value end
    local before = run(options)
    local made = support.json(out .. "/sweep.json").plans
    assert.equal(1, #made)
    made = made[1]
    -- As a reader would.
    local ends = made.grid.head.rownorm.lr.loguniform
    made.grid.head.rownorm.lr = pg.loguniform(ends[1], ends[2])
    local after = support.folder() .. "/again"
    local again = run { recipe = out .. "/recipe.lua", out = after, grid = made.grid,
      samples = made.samples, sample_seed = made.sample_seed, runs = made.runs, set = made.set,
      filter = function() return true end }
    assert.equal(names(before), names(again))
    assert.equal(support.read(recipe), support.read(out .. "/recipe.lua"))
    -- Another plan in the same folder does not replace it; the same one is there once.
    assert.is_true(run({ out = out, grid = { seed = { 3 } }, set = { updates = 2 } }).complete)
    assert.is_true(run({ out = out, grid = { seed = { 3 } }, set = { updates = 2 } }).complete)
    local plans = support.json(out .. "/sweep.json").plans
    assert.equal(2, #plans)
    assert.same({ seed = { 3 } }, plans[2].grid)
    assert.equal("a function", support.json(after .. "/sweep.json").plans[1].filter)
  end)

  it("has runs of one recipe, with its files and parameters", function()
    local folder = support.folder()
    local own, out = folder .. "/own.lua", folder .. "/s"
    support.write(folder .. "/rates.lua", "return { head = 1e-2 }\n")
    support.write(own, (text:format(data):gsub('local pg = require "perigee"',
      '%0\nlocal rates = require "rates" -- luacheck: ignore')))
    local function refused(options, ...)
      options.recipe, options.out, options.threads = own, out, 1
      local result, message, name = pg.sweep(options)
      assert.is_nil(result)
      assert.equal("ESTATE", name)
      for _, part in ipairs { ... } do
        assert.is_truthy(message:find(part, 1, true), message)
      end
    end
    assert.is_true(run({ recipe = own, out = out, grid = { seed = { 0 } } }).complete)
    -- Parameters of all runs.
    refused({ grid = { seed = { 0 } }, set = { updates = 6 } },
      "s/seed=0 was begun with other parameters", "\n-updates = 4\n+updates = 6")
    -- A file that it loads; also where no run of the first grid is asked for.
    support.write(folder .. "/rates.lua", "return { head = 2e-2 }\n")
    refused({ grid = { seed = { 0 } } }, "s/seed=0 was begun with another recipe",
      "\n-return { head = 1e-2 }", "\n+return { head = 2e-2 }")
    refused({ grid = { seed = { 1 } } }, "s/seed=0 was begun with another recipe",
      "\n-return { head = 1e-2 }")
    assert.is_nil(core.fs.kind(out .. "/seed=1"))
  end)

  it("starts no run of a recipe that has changed meanwhile", function()
    local folder = support.folder()
    local own, out = folder .. "/own.lua", folder .. "/s"
    support.write(own, (text:format(data):gsub("if p.wait > 0", function(found)
      return ('if run.update == 1 then io.open(%q, "a"):write("-- later\\n"):close() end\n'):format(
        own) .. found
    end)))
    local result, message = pg.sweep { recipe = own, out = out, threads = 1, grid = { seed = { 0,
      1 } } }
    assert.is_nil(result)
    assert.matches("own.lua has changed since the sweep began", message)
  end)
end)
