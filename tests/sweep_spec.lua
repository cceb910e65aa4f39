-- Sweeps: grids, restart, failures, pairing, tuning and halving, on the smallest recipe there is.
local pg = require "perigee"
local grid = require "perigee.sweep.grid"
local look = require "perigee.sweep.look"
local support = require "lua_support"
local sweeps = require "sweep_support"
local core, text = support.core, sweeps.text
local run, names, program = sweeps.run, sweeps.names, sweeps.program
local started = sweeps.started
local data, recipe

setup(function()
  sweeps.prepare()
  data, recipe = sweeps.data, sweeps.recipe
end)
teardown(support.clean)

describe("a grid", function()
  local function keys(spec)
    local list = {}
    for i, point in ipairs(grid.points(spec)) do list[i] = grid.key(point) end
    return table.concat(list, "; ")
  end

  it("crosses its axes, seeds fastest", function()
    assert.equal('a=1 seed=0; a=1 seed=1; a=2 seed=0; a=2 seed=1',
      keys { grid = { seed = { 0, 1 }, a = { 1, 2 } } })
    assert.equal('a=1 seed=0; a=2 seed=0; a=1 seed=1; a=2 seed=1',
      keys { grid = { seed = { 0, 1 }, a = { 1, 2 } }, order = { "seed", "a" } })
  end)
  it("gives each value a grid of its own", function()
    assert.equal('head="adamw" lr=1 seed=0; head="adamw" lr=2 seed=0; head="rownorm" lr=3 seed=0',
      keys { grid = { head = { adamw = { lr = { 1, 2 } }, rownorm = { lr = { 3 } } },
        seed = { 0 } } })
  end)
  it("takes single runs and a filter", function()
    assert.equal("a=2; b=7", keys { grid = { a = { 1, 2 } }, runs = { { b = 7 } },
      filter = function(p) return p.a ~= 1 end })
  end)
  it("draws random axes, the same for the same seed", function()
    local spec = { grid = { lr = pg.loguniform(1e-4, 1e-2), x = pg.uniform(-1, 1) }, samples = 50,
      sample_seed = 3 }
    local points, again = grid.points(spec), grid.points(spec)
    local low = 0
    for i, point in ipairs(points) do
      assert.equal(point.lr, again[i].lr)
      assert.is_true(point.lr >= 1e-4 and point.lr < 1e-2 and point.x >= -1 and point.x < 1)
      if point.lr < 1e-3 then low = low + 1 end
    end
    -- Half of the draws lie below the geometric mean: 25 of 50 with deviation 3.5.
    assert.is_true(low > 10 and low < 40)
    spec.sample_seed = 4
    assert.not_equal(points[1].lr, grid.points(spec)[1].lr)
  end)
  it("refuses what makes no sense, in a line", function()
    local function refused(spec, pattern)
      local ok, e = pcall(grid.points, spec)
      assert.is_false(ok)
      assert.matches(pattern, e)
    end
    refused({ grid = { a = { 1, 1 } } }, "a=1 is there twice")
    refused({ grid = {} }, "there is no run")
    refused({ grid = { a = {} } }, "sweep.grid.a")
    refused({ grid = { a = 3 } }, "sweep.grid.a")
    refused({ grid = { a = { { } } } }, "numbers, strings and booleans")
    refused({ grid = { a = { b = 1 } } }, "a grid")
    refused({ grid = { a = { x = { b = { 1 } } }, b = { 1 } } }, "two axes")
    refused({ grid = { a = pg.uniform(0, 1) } }, "samples")
    refused({ grid = { a = { 1 } }, samples = 2 }, "without a random axis")
    refused({ grid = { a = { 1 } }, filter = function() return false end }, "there is no run")
    assert.has_error(function() pg.loguniform(0, 1) end)
    assert.has_error(function() pg.uniform(2, 1) end)
  end)
end)

describe("a sweep", function()
  it("trains every point, says that they are paired, and skips them the next time", function()
    local out = support.folder() .. "/s"
    local options = { grid = { head = { "adamw", "rownorm" }, seed = { 0, 1 } }, out = out,
      jobs = 2 }
    local result = run(options)
    assert.equal("head=adamw,seed=0 finished; head=adamw,seed=1 finished; "
      .. "head=rownorm,seed=0 finished; head=rownorm,seed=1 finished", names(result))
    assert.is_true(result.complete)
    assert.same({ { parameter = "head", groups = 2, unlike = {},
      equal = { initial_weights = 2, first_batch = 2, compute_path = 2 } } }, result.pairing)
    local record = support.json(out .. "/sweep.json")
    assert.same({ "head", "seed" }, record.studied)
    assert.equal(4, #record.runs)
    assert.same({ head = "rownorm", seed = 1 }, record.runs[4].params)
    local metrics = support.read(out .. "/head=adamw,seed=0/metrics.jsonl")
    assert.is_true(run(options).complete)
    assert.equal(metrics, support.read(out .. "/head=adamw,seed=0/metrics.jsonl"))
    -- Another grid adds its runs and keeps the others in the record.
    assert.is_true(run({ grid = { head = { "adamw" }, seed = { 2 } }, out = out }).complete)
    assert.equal(5, #support.json(out .. "/sweep.json").runs)
  end)

  it("says when runs are not paired", function()
    local result = run { runs = { { head = "adamw" }, { head = "rownorm", seed = 0 } },
      out = support.folder() .. "/s" }
    assert.same({}, result.pairing) -- no group: the points have other axes
    result = run { grid = { updates = { 2, 3 }, seed = { 0 } }, out = support.folder() .. "/s" }
    assert.equal(1, result.pairing[1].equal.initial_weights)
  end)

  it("goes on with what a kill has left", function()
    local out = support.folder() .. "/s"
    local options = { grid = { head = { "adamw", "rownorm" } }, out = out, set = { updates = 6 } }
    -- As a kill leaves them: one run without a summary after its first checkpoint, one just made.
    local child = assert(pg.open(recipe, { set = { updates = 6, head = "adamw" }, threads = 1,
      out = out .. "/head=adamw" }))
    for update in child:updates() do if update == 3 then break end end
    child:close()
    os.remove(out .. "/head=adamw/summary.json")
    assert(core.fs.make(out .. "/head=rownorm"))
    assert.equal("interrupted", look.at(out .. "/head=adamw").status)
    local result = run(options)
    assert.equal("head=adamw finished; head=rownorm finished", names(result))
    local lines = support.metrics(out .. "/head=adamw")
    local resumed = 0
    for _, line in ipairs(lines) do
      if line.session then resumed = resumed + 1 end
    end
    assert.equal(1, resumed)
  end)

  it("lists failures with their reason and tries them again", function()
    local out = support.folder() .. "/s"
    local options = { grid = { fail = { 0, 3 } }, out = out }
    local result = run(options)
    assert.equal("fail=0 finished; fail=3 failed", names(result))
    assert.is_false(result.complete)
    assert.matches("the hook gives up", result.runs[2].reason)
    local code, printed = program("sweep", recipe, "--grid", "fail=0,3", "--out", out, "--threads",
      "1")
    assert.equal(1, code)
    assert.matches("failed: fail=3: .*the hook gives up", printed)
    assert.matches("1 of 2 runs finished", printed)
  end)

  it("does not repeat what was not finite", function()
    local out = support.folder() .. "/s"
    local options = { grid = { lr = { 1e-2, 3e38 } }, set = { updates = 6 }, out = out }
    local result = run(options)
    assert.equal("finished", result.runs[1].status)
    assert.equal("failed", result.runs[2].status)
    assert.matches("finite", result.runs[2].reason)
    local before = support.read(out .. "/lr=3e+38/metrics.jsonl")
    assert.matches("finite", run(options).runs[2].reason)
    assert.equal(before, support.read(out .. "/lr=3e+38/metrics.jsonl"))
  end)

  it("refuses a changed recipe with the difference, and what is not its run", function()
    local out, folder = support.folder() .. "/s", support.folder()
    local own = support.write(folder .. "/little.lua", text:format(data))
    local options = { recipe = own, grid = { seed = { 0 } }, out = out }
    assert.is_true(run(options).complete)
    support.write(own, (text:format(data):gsub("muon { lr = 1e%-2 }", "muon { lr = 2e-2 }")))
    local result, message, name = pg.sweep(options)
    assert.is_nil(result)
    assert.equal("ESTATE", name)
    assert.matches("begun with another recipe", message)
    assert.matches("\n%-[^\n]*muon { lr = 1e%-2 }", message)
    assert.matches("\n%+[^\n]*muon { lr = 2e%-2 }", message)
    support.write(own, text:format(data))
    support.write(out .. "/seed=0/state.json", "{")
    result, message = pg.sweep(options)
    assert.is_nil(result)
    assert.matches("state.json", message)
    assert.matches("move it away", message)
    assert.is_nil(message:find "\n")
  end)

  it("keeps what it has not written", function()
    local out = support.folder() .. "/s"
    assert(core.fs.make(out .. "/seed=0"))
    support.write(out .. "/seed=0/notes.txt", "mine")
    local result, message = pg.sweep { recipe = recipe, grid = { seed = { 0 } }, out = out }
    assert.is_nil(result)
    assert.matches("seed=0/state.json is not that of a run", message)
    assert.equal("mine", support.read(out .. "/seed=0/notes.txt"))
    os.remove(out .. "/seed=0/notes.txt")
    support.write(out .. "/seed=0/config.json", "{}") -- as a kill may leave it
    assert.is_true(run({ grid = { seed = { 0 } }, out = out }).complete)
  end)

  it("works alone in its folder", function()
    local out = support.folder() .. "/s"
    assert(core.fs.make(out))
    local lock = assert(core.fs.lock(out))
    local code, printed = program("sweep", recipe, "--grid", "seed=0", "--out", out)
    core.fs.unlock(lock)
    assert.equal(1, code)
    assert.matches("another sweep works in", printed)
  end)

  it("checks all runs before any starts", function()
    local out = support.folder() .. "/s"
    local function refused(code, pattern, ...)
      local got, printed = program("sweep", recipe, "--out", out, ...)
      assert.equal(code, got)
      assert.matches(pattern, printed)
      assert.equal(1, select(2, printed:gsub("\n", "")))
      assert.is_nil(core.fs.kind(out))
    end
    refused(2, "no parameter 'sede'; did you mean 'seed'", "--grid", "sede=0,1")
    refused(2, "head = \"sgd\" is not allowed", "--grid", "head=adamw,sgd")
    refused(1, "seed=\"0\" and seed=\"00\"", "--grid", "seed=00,0")
    refused(2, "on the grid as well", "--grid", "seed=0", "--set", "seed=1")
    refused(2, "given twice", "--grid", "seed=0", "--grid", "seed=1")
    refused(2, "between the commas", "--grid", "seed=0,,1")
    refused(2, "updates", "--grid", "updates=1,x")
    refused(2, "a < b", "--grid", "lr=uniform:2:1", "--samples", "2")
  end)

  it("refuses random axes without end, on the command line as usage", function()
    for _, axis in ipairs { "uniform:0:1e999", "uniform:-1.7e308:1.7e308", "uniform:nan:1",
      "loguniform:0:1" } do
      local code, said = program("sweep", recipe, "--samples", "2", "--grid", "lr=" .. axis)
      assert.equal(2, code)
      assert.is_truthy(said:find("with finite numbers a < b", 1, true), said)
    end
  end)

  it("refuses more draws than folders can be made", function()
    local code, said = program("sweep", recipe, "--samples", "100000000000", "--grid",
      "lr=uniform:0:1")
    assert.equal(2, code)
    assert.is_truthy(said:find("expected a whole number >= 1 and <= 100000", 1, true), said)
    local ok, e = pcall(pg.sweep, { recipe = recipe, samples = 1e11 // 1 | 0,
      grid = { lr = pg.uniform(0, 1) } })
    assert.is_false(ok)
    assert.matches("sweep.samples = 100000000000 is not allowed", e)
  end)

  it("goes on beside an edited sweep.json", function()
    local out = support.folder() .. "/sweep"
    assert.is_true(run { grid = { seed = { 0 } }, out = out }.complete)
    for _, runs in ipairs { "[1,2]", "[null]", '["x",{}]', "{}", "7", '[{"name":{}}]' } do
      support.write(out .. "/sweep.json", '{"runs":' .. runs .. "}")
      assert.equal("seed=0 finished", names(run { grid = { seed = { 0 } }, out = out }))
      assert.equal("seed=0", support.json(out .. "/sweep.json").runs[1].name)
    end
  end)

  it("prints its plan without writing", function()
    local out = support.folder() .. "/s"
    local code, printed = program("sweep", recipe, "--out", out, "--dry-run", "--rate", "1e9")
    assert.equal(0, code)
    assert.matches("head=adamw +[%d,]+ +4 +64 ", printed) -- 4 updates of 2 sequences of 8 tokens
    assert.matches("head=rownorm", printed)
    assert.matches("2 runs +128", printed)
    assert.is_nil(core.fs.kind(out))
  end)

  it("forks a trunk", function()
    local out = support.folder()
    local trunk = assert(pg.open(recipe, { out = out .. "/trunk", threads = 1 }))
    for _ in trunk:updates() do end -- luacheck: ignore 542
    trunk:close()
    local result = run { grid = { head = { "rownorm" }, lr = { 1e-2, 2e-2 } }, out = out .. "/s",
      set = { trunk = out .. "/trunk", updates = 6 } }
    assert.is_true(result.complete)
    assert.equal(4, support.json(result.runs[1].dir .. "/config.json").fork.update)
  end)

  it("stops all runs with checkpoints on SIGINT, and takes them along when it is killed", function()
    for _, signal in ipairs { "INT", "KILL" } do
      local out = support.folder() .. "/s"
      local sweep = assert(core.spawn { args = { support.program, "sweep", recipe, "--out", out,
        "--jobs", "2", "--set", "updates=100000", "--set", "wait=0.02" },
        env = core.environment(), output = support.folder() .. "/log" })
      started(out, "head=adamw")
      started(out, "head=rownorm")
      os.execute(("kill -%s %d"):format(signal, sweep:pid()))
      local code, by
      for _ = 1, 400 do
        code, by = sweep:poll()
        if code then break end
        core.sleep(0.05)
      end
      if signal == "INT" then assert.equal(75, code) else assert.equal(9, by) end
      for _, name in ipairs { "head=adamw", "head=rownorm" } do
        local dir = out .. "/" .. name
        for _ = 1, 400 do -- orphans take their time
          if look.at(dir).status == "stopped" then break end
          core.sleep(0.05)
        end
        assert.equal("stopped", look.at(dir).status)
        assert.equal("directory", core.fs.kind(("%s/checkpoints/%08d"):format(dir,
          look.at(dir).update)))
      end
    end
  end)
end)

describe("a sweep of stages", function()
  it("tunes on seeds of its own and reports others", function()
    local out = support.folder() .. "/s"
    local result = run { out = out, grid = { head = { adamw = { lr = { 1e-3, 1e-2 } },
      rownorm = { lr = { 1e-3, 1e-2 } } } }, tuning = { by = "head", seeds = { 7 },
      report = { 0, 1 } } }
    assert.is_true(result.complete)
    assert.equal(4 + 2 * 2, #result.runs)
    local by_name = {}
    for _, r in ipairs(result.runs) do by_name[r.name] = r end
    for i, method in ipairs { "adamw", "rownorm" } do
      local low = by_name[("head=%s,lr=0.001,seed=7"):format(method)].loss
      local high = by_name[("head=%s,lr=0.01,seed=7"):format(method)].loss
      local lr = low < high and "0.001" or "0.01"
      assert.matches("lr=" .. lr, result.tuned[i].choice)
      assert.equal(2, result.tuned[i].runs)
      for seed = 0, 1 do
        assert.equal("finished", by_name[("head=%s,lr=%s,seed=%d"):format(method, lr, seed)].status)
      end
    end
    local stages = {}
    for _, r in ipairs(support.json(out .. "/sweep.json").runs) do
      stages[r.stage] = (stages[r.stage] or 0) + 1
    end
    assert.same({ tuning = 4, report = 4 }, stages)
  end)
  it("tunes by no value that was not finite, nor an earlier one", function()
    local out = support.folder() .. "/s"
    local options = { out = out, grid = { head = { "adamw" }, lr = { 1e-3, 1e-2 } },
      tuning = { by = "head", seeds = { 7 }, report = { 0 } } }
    assert.is_true(run(options).complete)
    local dir = out .. "/head=adamw,lr=0.001,seed=7"
    local summary = support.read(dir .. "/summary.json")
    support.write(dir .. "/summary.json", (summary:gsub('("final_validation_loss": ?)[^,}]+',
      "%1null")))
    local metrics = support.read(dir .. "/metrics.jsonl")
    support.write(dir .. "/metrics.jsonl", metrics
      .. '{"progress/update":4,"nonfinite":["validation/loss"]}\n')
    assert.is_nil(look.at(dir).loss)
    assert.matches("lr=0.01", run(options).tuned[1].choice)
    support.write(dir .. "/metrics.jsonl", metrics .. '{"validation/loss":-1}\n')
    assert.matches("lr=0.001", run(options).tuned[1].choice)
  end)
  it("insists on equal budgets and separate seeds", function()
    local function refused(options, pattern)
      options.recipe, options.out = recipe, support.folder() .. "/s"
      local ok, e = pcall(pg.sweep, options)
      assert.is_false(ok)
      assert.matches(pattern, e)
    end
    refused({ grid = { head = { adamw = { lr = { 1e-3, 1e-2 } }, rownorm = { lr = { 1e-3 } } } },
      tuning = { by = "head", seeds = { 7 }, report = { 0 } } }, "expected equal budgets")
    refused({ grid = { head = { "adamw", "rownorm" } },
      tuning = { by = "head", seeds = { 0 }, report = { 0 } } }, "a tuning seed and a reported one")
    refused({ grid = { head = { "adamw" }, seed = { 0 } },
      tuning = { by = "head", seeds = { 1 }, report = { 0 } } }, "not on the grid")
    refused({ grid = { head = { "adamw" } },
      tuning = { by = "lr", seeds = { 1 }, report = { 0 } } }, "not on the grid")
  end)
  it("halves", function()
    local result = run { out = support.folder() .. "/s", set = { updates = 8 },
      grid = { lr = { 1e-4, 1e-3, 1e-2, 3e-2 } }, halving = { budgets = { 2, 4, 8 }, keep = 0.5 } }
    local at = {}
    for _, r in ipairs(result.runs) do at[r.update] = (at[r.update] or 0) + 1 end
    assert.same({ [2] = 2, [4] = 1, [8] = 1 }, at)
    -- What a stage has left goes on: in the next call of a longer sweep, to the end.
    local out = support.folder() .. "/s"
    local options = { out = out, set = { updates = 8 }, grid = { lr = { 1e-3, 1e-2 } },
      halving = { budgets = { 2 }, keep = 1 } }
    result = run(options)
    assert.same({ 2, "paused" }, { result.runs[1].update, result.runs[1].status })
    options.halving = { budgets = { 2, 8 }, keep = 1 }
    result = run(options)
    assert.same({ 8, 8 }, { result.runs[1].update, result.runs[2].update })
    -- By a function over the reports, which have the summaries.
    result = run { out = support.folder() .. "/s", set = { updates = 8 },
      grid = { lr = { 1e-4, 1e-3, 1e-2 } }, halving = { budgets = { 2, 8 },
      keep = function(reports, stage)
        assert.equal(1, stage)
        assert.equal(2, reports[3].summary.update)
        return { "lr=0.001" }
      end } }
    assert.same({ 2, 8, 2 }, { result.runs[1].update, result.runs[2].update,
      result.runs[3].update })
  end)
end)
