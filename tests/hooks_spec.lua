-- Hooks: when they run, in which order, and what happens when they fail (CASES 20 and 21).
local pg = require "perigee"
local support = require "lua_support"

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

-- Train with these hooks; returns success, the error and the run directory.
local function attempt(hooks, changes)
  changes = changes or {}
  changes.hooks = hooks
  local run, out = open(changes)
  local ok, e = pcall(train, run)
  return ok, e, out, run
end

describe("occasions", function()
  it("every(n) fires when n divides and at the last update", function()
    local fired = {}
    local hook = pg.every(10, print)
    for u = 0, 23 do
      if hook:due(u, 23) then fired[#fired + 1] = u end
    end
    assert.same({ 10, 20, 23 }, fired) -- the published diameter points
    assert.is_true(pg.every(10, print, { before_first = true }):due(0, 23))
  end)

  it("at{…} fires exactly there, logspaced(k) k times per factor of ten", function()
    local hook = pg.at({ 0, 3 }, print)
    local fired = {}
    for u = 0, 5 do
      if hook:due(u, 5) then fired[#fired + 1] = u end
    end
    assert.same({ 0, 3 }, fired)
    assert.is_true((pg.at { 3 })(print):due(3, 9))
    hook = pg.logspaced(3, print)
    fired = {}
    for u = 0, 120 do
      if hook:due(u, 120) then fired[#fired + 1] = u end
    end
    assert.same({ 1, 2, 5, 10, 22, 46, 100, 120 }, fired)
  end)

  it("refuse what is not an update number or an action", function()
    assert.error_matches(function() pg.every(0, print) end, "pg.every n = 0 is not allowed")
    assert.error_matches(function() pg.every(2, 3) end, "expected a function%(run%)")
    assert.error_matches(function() pg.at({ -1 }, print) end, "pg.at%[1%] = %-1")
    assert.error_matches(function() pg.checkpoint {} end, "expected every = n or at")
    assert.error_matches(function() pg.checkpoint { every = 2, kep = 1 } end,
      "did you mean 'keep'")
    assert.error_matches(function() pg.checkpoint { every = 2, keep = "some" } end, '"all"')
  end)

  it("of checkpoints pin what must stay", function()
    local hook = pg.checkpoint { every = 10, at = { 15 }, keep = 2 }
    assert.is_true(hook:due(15, 40))
    assert.is_true(hook:pins(15))
    assert.is_false(hook:pins(10))
    assert.is_true(pg.checkpoint({ every = 10, keep = "all" }):pins(10))
  end)
end)

describe("hooks of a run", function()
  setup(function() data = support.data() end)
  teardown(support.clean)

  it("run in list order after the update and see the new weights", function()
    local order = {}
    local before
    local run = open { updates = 3, hooks = {
      function(r) order[#order + 1] = "a" .. r.update end,
      pg.every(2, function(r) order[#order + 1] = "b" .. r.update end),
      function(r)
        local now = r.head.value:clone()
        -- The head's weights moved by exactly its increment (no decay).
        if before and r.update > 1 then
          local difference = (now - before - r.head.increment):abs():max()
          -- One fp32 rounding of values of size 0.1.
          assert(difference <= 0.1 * 2 ^ -23, difference)
        end
        before = now
      end,
    } }
    train(run)
    assert.same({ "a1", "a2", "b2", "a3", "b3" }, order)
    run:close()
  end)

  it("stop the run with a located message for error objects of any kind", function()
    local nasty = setmetatable({}, { __tostring = function() error("again") end })
    local odd = setmetatable({}, { __tostring = function() return {} end })
    local cases = {
      { function() error("boom") end, "hooks_spec.lua:%d+: boom %(hook pg.every%(2%), update 2%)" },
      { function() error({ code = 3 }) end, "hooks_spec.lua:%d+: an error object of type table" },
      { function() error(nil) end, "hooks_spec.lua:%d+: nil was raised" },
      { function() error(nasty) end, "hooks_spec.lua:%d+: an error object .* __tostring fails" },
      { function() error(odd) end, "hooks_spec.lua:%d+: an error object" },
      { function() local x = nil; return x.y end, "hooks_spec.lua:%d+: attempt to index" },
      { function() coroutine.yield() end, "hooks_spec.lua:%d+: a hook may not yield" },
    }
    for _, case in ipairs(cases) do
      local ok, e, out, run = attempt({ pg.every(2, case[1]) })
      assert.is_false(ok)
      local text = tostring(e)
      assert.matches(case[2], text)
      assert.is_nil(text:find("\n"))
      local summary = support.json(out .. "/summary.json")
      assert.equal(1, summary.exit_code)
      assert.equal("failed", summary.status)
      assert.equal(2, summary.update)
      assert.is_nil(summary.final_update)
      -- What was trained was saved, and can be saved again.
      assert.equal("checkpoints/00000002", summary.checkpoint)
      assert.matches("00000002$", run:checkpoint())
      run:close()
    end
  end)

  it("cannot end the process before the run, even where the error is caught", function()
    local text = "hooks_spec.lua:%d+: os.exit was called before the run ended: expected run:stop"
    for _, hook in ipairs { function() os.exit(0) end, function() pcall(os.exit, 7, true) end } do
      local ok, e, out, run = attempt({ pg.every(2, hook) })
      assert.is_false(ok)
      assert.matches(text, tostring(e))
      local summary = support.json(out .. "/summary.json")
      assert.equal(1, summary.exit_code)
      assert.equal("failed", summary.status)
      assert.matches(text, summary.reason)
      assert.equal("checkpoints/00000002", summary.checkpoint)
      run:close()
    end
    local leave = pg.optim.define { name = "leave", increment = function(w, h)
      if w.updates == 3 then os.exit() end
      return w.gradient:clone():mul_(-h.lr)
    end }
    local run, out = open { optimizers = {
      { role = { "embedding", "backbone" }, pg.optim.sgd { lr = 0.01 } },
      { role = "head", leave { lr = 0.01 } } } }
    local ok, e = pcall(train, run)
    assert.is_false(ok)
    assert.matches(text, tostring(e))
    assert.equal("failed", support.json(out .. "/summary.json").status)
    run:close()
  end)

  it("cannot advance the run, from a hook, a loop or an optimizer", function()
    local ok, e, _, run = attempt({ function(r) r:step() end })
    assert.is_false(ok)
    assert.matches("inside an update", tostring(e))
    run:close()
    ok, e, _, run = attempt({ function(r)
      for _ in r:updates() do break end -- luacheck: ignore 512
    end })
    assert.is_false(ok)
    assert.matches("inside an update", tostring(e))
    run:close()
    local target
    local bad = pg.optim.define { name = "reenter", increment = function(w, h)
      if target then target:step() end
      return w.gradient:clone():mul_(-h.lr)
    end }
    local list = { { role = { "embedding", "backbone" }, pg.optim.sgd { lr = 0.01 } },
      { role = "head", bad { lr = 0.01 } } }
    local r, out = open { optimizers = list }
    target = r
    ok, e = pcall(train, r)
    assert.is_false(ok)
    assert.matches("inside an update", tostring(e))
    assert.equal(0, r.update)
    assert.equal(1, support.json(out .. "/summary.json").exit_code)
    r:close()
  end)

  it("can end the run with stop, not with close", function()
    local ok, e, _, run = attempt({ function(r) r:close() end })
    assert.is_false(ok)
    assert.matches("a hook may end it with run:stop", tostring(e))
    run:close()
  end)

  it("can ask for a checkpoint, which is saved when the update is complete", function()
    local ok, e, out, run = attempt({ function(r)
      if r.update == 3 then
        assert(r:checkpoint() == r.out .. "/checkpoints/00000003")
        assert(not io.open(r.out .. "/checkpoints/00000003/state.json"))
      end
    end })
    assert.is_true(ok, e)
    run:close()
    assert.is_true(support.core.fs.exists(out .. "/checkpoints/00000003/state.json"))
    local _, by_update = support.metrics(out)
    assert.equal(1, by_update[3]["events/checkpoint"])
  end)

  it("may run inside a coroutine of the script", function()
    local seen = {}
    local run = open { updates = 3, hooks = { function(r) seen[#seen + 1] = r.update end } }
    local co = coroutine.wrap(function()
      for update in run:updates() do coroutine.yield(update) end
      return "done"
    end)
    assert.equal(1, co())
    assert.equal(2, co())
    assert.equal(3, co())
    assert.equal("done", co())
    assert.same({ 1, 2, 3 }, seen)
    run:close()
  end)

  it("leave no memory behind after they fail", function()
    local function fail_once()
      local _, _, _, run = attempt({ function(r)
        r.state.keep = r.head.value:to_table()[1]
        error(setmetatable({ r }, {}))
      end })
      run:close()
    end
    for _ = 1, 3 do fail_once() end
    support.collect()
    local before = collectgarbage("count")
    for _ = 1, 10 do fail_once() end
    support.collect()
    -- Ten runs with their models: a leak of one would be far above 64 KiB.
    assert.is_true(collectgarbage("count") - before < 64)
  end)

  it("keep what run.state can hold and name the rest when a checkpoint is due", function()
    local ok, e, out, run = attempt({ function(r) r.state.f = { g = print } end,
      pg.checkpoint { every = 2 } })
    assert.is_false(ok)
    assert.matches("run.state.f.g is a function", tostring(e))
    assert.equal(1, support.json(out .. "/summary.json").exit_code)
    run.state = {}
    assert.matches("00000002$", run:checkpoint())
    run:close()
    assert.error_matches(function() run.state = 3 end, "run.state = 3")
    assert.error_matches(function() run.stat = 3 end, "run.stat cannot be set")
    assert.error_matches(function() return run.lss end, "did you mean 'loss'")
  end)
end)
