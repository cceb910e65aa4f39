-- Hooks that clients of a live run add: a resume has them again where their code is known.
local pg = require "perigee"
local support = require "lua_support"
local clients = require "attach_client"
local runs = require "perigee.run"
local core = support.core

local data, folder
setup(function() data, folder = support.data(), support.folder() end)
teardown(support.clean)

local counter = 0
local function open()
  counter = counter + 1
  local out = ("%s/run%d"):format(folder, counter)
  return assert(pg.open(support.recipe(pg, data), { out = out, threads = 1, attach = true })), out
end

local function resume(out)
  return assert(pg.resume(out, { threads = 1, recipe = support.recipe(pg, data) }))
end

-- One command between two updates.
local function give(run, client, code)
  client:ask(code)
  runs.inner(run).attached:pump()
  local result = client:answer()
  assert.is_true(result.ok, result.text)
end

describe("hooks of clients", function()
  -- The weights at the end of a run that got the hook after 3 updates, was stopped after `stop`
  -- ones and resumed.
  local function final(stop, code)
    local run, out = open()
    for _ = 1, 3 do run:step() end
    give(run, clients.connect(out), code)
    if stop then
      while run.update < stop do run:step() end
      run:close()
      run = resume(out)
    end
    for _ in run:updates() do end -- luacheck: ignore 542
    run:close()
    return core.fs.sha256(out .. "/checkpoints/00000012/model.safetensors"),
      select(2, support.metrics(out))
  end

  it("that change weights give the same run with a resume in between", function()
    local code = "hook(pg.every(3, function(r) r:edit('lm_head.weight', "
      .. "function(w) w:mul_(0.9) end) r:log('mine/head', r.update) end))"
    local whole = final(nil, code)
    assert.not_equal(final(nil, "run.update"), whole)
    assert.equal(whole, (final(5, code)))
    local again, lines = final(8, code)
    assert.equal(whole, again)
    for update = 4, 12 do
      local line = lines[update] or {}
      assert.equal(update % 3 == 0 and update or nil, line["mine/head"])
    end
  end)

  it("are refused in a line when they are none", function()
    local run, out = open()
    run:step()
    local client = clients.connect(out)
    for code, part in pairs { ["hook()"] = "expected a function(run)", ["hook(7)"] = "hooks[1] = 7",
      ["unhook('x')"] = 'unhook = "x" is not allowed', ["unhook(0)"] = "unhook = 0 is not allowed",
      ["unhook()"] = "unhook = nil is not allowed", ["unhook(99)"] = "99 is not a hook" } do
      client:ask(code)
      runs.inner(run).attached:pump()
      local result = client:answer()
      assert.is_false(result.ok, code)
      assert.is_truthy(result.text:find(part, 1, true), result.text)
    end
    local sent, problem = client.channel:send { id = 99, run = "return '\xff'" }
    assert.is_nil(sent)
    assert.is_truthy(problem:find("UTF-8", 1, true), problem)
    local place = support.read(out .. "/attach.json")
    support.write(out .. "/attach.json", (place:gsub('("hostname": ?)"[^"]*"', "%1null")))
    local done, _, err = support.perigee { "attach", out, "-e", "1" }
    assert.equal(1, done)
    assert(support.one_line(err, "has no attach.json"))
    run:close()
  end)

  it("come back where their code needs nothing of the client", function()
    local run, out = open()
    local client = clients.connect(out)
    for _, text in ipairs {
      "hook(function(r) r:log('mine/a', 'head n', 1) end)", "n = 0",
      "hook(function(r) n = n + 1 r:log('mine/n', n) end)",
      "local k = 2 return hook(function(r) r:log('mine/k', k) end)",
      "hook(pg.every(2, pg.diagnostics.head_geometry { separation = true }))",
      "return hook(function(r) r:log('mine/gone', 1) end)", "unhook(5)",
      "hook(function() print(inc:norm()) end)",
      "hook(pg.at({ 10 }, function(run) run:log('mine/tokens', run.tokens) end))",
    } do
      give(run, client, text)
    end
    local changes = {}
    for _, line in ipairs(clients.lines(out)) do
      if line["attach/changes"] then changes[#changes + 1] = line["attach/changes"][1] end
    end
    assert.same({ "hook 1: every update",
      "hook 2: every update (a resume does not have it: it uses the client's 'n')",
      "hook 3: every update (a resume does not have it: the command was more than one call of "
        .. "hook(…))", "hook 4: pg.every(2)", "hook 5: every update", "hook 5 removed",
      "hook 6: every update (a resume does not have it: it uses the client's 'inc')",
      "hook 7: pg.at{10}" }, changes)
    for _ = 1, 4 do run:step() end
    run:close()
    for _ = 1, 2 do -- what came back is kept again
      run = resume(out)
      for _ = 1, 4 do run:step() end
      run:close()
    end
    local markers, all = support.metrics(out)
    local said = {}
    for _, line in ipairs(markers) do
      if line.session then said[#said + 1] = line["session/hooks"] end
    end
    assert.same({ "hook 1: every update", "hook 2: every update (left out: its code is not known)",
      "hook 3: every update (left out: its code is not known)", "hook 4: pg.every(2)",
      "hook 6: every update (left out: its code is not known)", "hook 7: pg.at{10}" }, said[1])
    assert.same({ "hook 1: every update", "hook 2: pg.every(2)", "hook 3: pg.at{10}" }, said[2])
    assert.same({ "head n", 4 }, { all[4]["mine/a"], all[4]["mine/n"] })
    for update = 5, 12 do
      local line = all[update]
      assert.same({ "head n" }, { line["mine/a"], line["mine/n"], line["mine/k"],
        line["mine/gone"] })
      assert.equal(update % 2 == 0,
        line["diagnostics/lm_head_step/separation"] ~= nil)
    end
    assert.is_number(all[10]["mine/tokens"])
  end)
end)
