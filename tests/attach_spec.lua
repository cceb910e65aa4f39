-- perigee attach: clients of a live run. Most tests are client and run in one process: the run
-- answers in step(), at its safe point between updates.
local pg = require "perigee"
local support = require "lua_support"
local clients = require "attach_client"
local runs = require "perigee.run"
local core = support.core

local data
local folder

setup(function()
  data = support.data()
  folder = support.folder()
end)
teardown(support.clean)

local counter = 0
local function open(changes, options)
  counter = counter + 1
  local all = { out = ("%s/run%d"):format(folder, counter), threads = 1, attach = true }
  for key, value in pairs(options or {}) do all[key] = value end
  return assert(pg.open(support.recipe(pg, data, changes), all)), all.out
end

local connect = clients.connect

-- One command and one update.
local function exchange(run, client, code)
  client:ask(code)
  run:step()
  return assert(client:answer(), "no answer")
end

local attach_lines = clients.lines

describe("a live run", function()
  it("says where it listens, to its user alone, and cleans up", function()
    local run, out = open()
    local place = support.json(out .. "/attach.json")
    local text = select(2, support.shell(("stat -c '%%a %%U' %s %s; id -un"):format(place.socket,
      place.socket:match("^(.*)/"))))
    local user = text:match("(%S+)\n$")
    assert.equal(("600 %s\n700 %s\n%s\n"):format(user, user, user), text)
    assert.equal(core.host().pid, place.pid)
    assert.equal(core.host().hostname, place.hostname)
    run:close()
    assert.is_false(core.fs.exists(place.socket))
    assert.is_false(core.fs.exists(out .. "/attach.json"))
    local silent, where = open(nil, { attach = false })
    assert.is_false(core.fs.exists(where .. "/attach.json"))
    silent:close()
  end)

  it("serves two clients with their own variables between updates", function()
    local run <close>, out = open()
    local first, second = connect(out), connect(out)
    first:ask "x = run.update return x"
    second:ask "x, run.update"
    run:step()
    assert.equal("0\n", first:answer().text)
    assert.equal("nil\t0\n", second:answer().text)
    assert.equal(1, first.hello.client)
    assert.equal(2, second.hello.client)
    assert.equal(12, first.hello.last)
    first:ask "print('seen') io.write('a', 1, '\\n')"
    second:ask "inc:diameter().value == run:diameter(run.head.increment).value"
    run:step()
    assert.equal("", first:answer().text)
    assert.equal("seen\na1\n", first.output)
    assert.equal("true\n", second:answer().text)
    first.channel:send { id = 9, complete = "run:valid" }
    run:step()
    first:answer()
    assert.equal("at", first.completed.insert)
    -- Leaving is no event for the run.
    first.channel:close()
    assert.equal("1\n", exchange(run, second, "1").text)
    run:close()
    second:answer()
    assert.matches("the run has ended", second.over)
  end)

  it("goes on when a command fails, loops, floods, steps or is nonsense", function()
    local run <close>, out = open()
    local client = connect(out)
    local r = exchange(run, client, "error('no')")
    assert.is_false(r.ok)
    assert.equal("stdin:1: no\n", r.text)
    exchange(run, client, "limit(0.3)")
    local started = core.clock()
    r = exchange(run, client, "while true do pcall(function() while true do end end) end")
    assert.equal("time limit", r.reason)
    assert.matches("cut off after 0.3 s", r.text)
    r = exchange(run, client, "pg.core.sleep(60)")
    assert.equal("time limit", r.reason)
    -- In the core, which polls the flag of the context.
    r = exchange(run, client, "for i = 1, 1e9 do run:validate { tokens = 1000 } end")
    assert.equal("time limit", r.reason)
    assert.is_true(core.clock() - started < 20)
    r = exchange(run, client, "run:step()")
    assert.matches("may not advance it", r.text)
    r = exchange(run, client, "run:close()")
    assert.matches("inside an update", r.text)
    r = exchange(run, client, "setmetatable({}, { __tostring = function() while true do end end })")
    assert.matches("cannot be shown: time limit", r.text)
    r = exchange(run, client, "for i = ")
    assert.is_false(r.ok)
    -- The keys and the values of a table that a tab completes are code as well.
    client:ask("slow = setmetatable({}, { __names = function() return { 'a' } end, "
      .. "__index = function() while true do end end })")
    client.channel:send { id = 90, complete = "slow.a." }
    client.channel:send { id = 91, complete = "run:st" }
    local before = core.clock()
    local at = run.update
    runs.inner(run).attached:pump()
    client:answer()
    assert.is_true(core.clock() - before < 5)
    assert.equal(91, client.completed.id)
    assert.equal(at, run.update)
    -- A flood that nobody reads.
    local flood = connect(out)
    exchange(run, flood, "limit(0.3)")
    flood:ask "while true do print(('x'):rep(1000)) end"
    run:step()
    assert.equal("2\n", exchange(run, client, "1 + 1").text)
    assert.equal("cut off after 0.3 s (time limit)", attach_lines(out)[12]["attach/error"])
    assert.equal(12, run.update)
    local socket = assert(core.socket.connect(support.json(out .. "/attach.json").socket))
    socket:send "this is no JSON\n"
    assert.is_nil(run:step())
    assert.equal("finished", run.status)
  end)

  it("is not ended by os.exit and waits for no input", function()
    local run <close>, out = open()
    local client = connect(out)
    for code, part in pairs { ["os.exit()"] = "Ctrl%-D leaves", ["io.read()"] = "no input",
      ["for _ in io.lines() do end"] = "no input", ["io.stdin:read('a')"] = "no input",
      ["io.input():read('a')"] = "no input" } do
      client:ask(code)
      runs.inner(run).attached:pump()
      local r = client:answer()
      assert.is_false(r.ok, code)
      assert.matches(part, r.text)
    end
    local file = support.write(folder .. "/two-lines", "one\ntwo\n")
    assert.equal("number\n", exchange(run, client, "type(os.time())").text)
    assert.equal("one\n", exchange(run, client, ("io.lines(%q)()"):format(file)).text)
  end)

  it("sends long results, refuses longer ones and takes commands in pieces", function()
    local run <close>, out = open { updates = 40 }
    local client = connect(out)
    -- pump() for the run, answer() for the client, until the answer is whole.
    local function whole(code)
      client:ask(code)
      for _ = 1, 4000 do
        client.channel:flush()
        runs.inner(run).attached:pump()
        local r = client:answer()
        if r then return r end
      end
    end
    assert.equal(6 << 20, #whole("setmetatable({}, { __tostring = function() "
      .. "return ('y'):rep((6 << 20) - 1) end })").text)
    local r = whole("setmetatable({}, { __tostring = function() return ('y'):rep(9 << 20) end })")
    assert.is_false(r.ok)
    assert.matches("the message has %d+ bytes, at most 8388608", r.text)
    r = whole("return #'" .. ("z"):rep(1 << 20) .. "'")
    assert.equal((1 << 20) .. "\n", r.text)
    local sent, problem = client.channel:send { id = 1, run = ("z"):rep(9 << 20) }
    assert.is_nil(sent)
    assert.matches("at most 8388608 are sent", problem)
    assert.equal("2\n", whole("1 + 1").text)
  end)

  it("removes sockets that nobody has, also of its own number", function()
    local first <close>, out = open()
    local path = support.json(out .. "/attach.json").socket
    local stale = path:gsub("%d+%.sock$", "900001.sock")
    assert(os.execute(("python3 -c 'import socket, sys; socket.socket(socket.AF_UNIX).bind("
      .. "sys.argv[1])' %s"):format(stale)))
    assert.is_true(core.fs.exists(stale))
    local second <close>, _ = open()
    assert.is_false(core.fs.exists(stale))
    assert.is_true(core.fs.exists(path))
    local client = connect(out)
    assert.equal("1\n", exchange(first, client, "1").text)
    assert.equal(1, client.hello.client) -- nobody knocked before
    assert.equal("running", second.status)
  end)

  it("notices a client that dies in the middle of a command", function()
    local run <close>, out = open()
    local place = support.json(out .. "/attach.json")
    -- A process that sends one command and is gone half a second later.
    local script = support.write(folder .. "/die.lua", ([[
      package.cpath = %q
      local core = require "perigee.core"
      local s = assert(core.socket.connect(%q))
      s:send '{"id": 1, "run": "pg.core.sleep(100)"}\n'
      core.sleep(0.5)]]):format(support.build .. "/lib/?.so", place.socket))
    assert(os.execute(("lua5.4 %s &"):format(script)))
    local started = core.clock()
    while #attach_lines(out) == 0 and core.clock() - started < 30 do
      run:step()
      core.sleep(0.05)
      if run.status ~= "running" then break end
    end
    local line = attach_lines(out)[1]
    if line then
      assert.equal("client gone", line["attach/error"])
      assert.is_true(core.clock() - started < 8) -- the limit is 10 s
    else
      assert.equal("finished", run.status) -- it came too late
    end
  end)
end)

describe("changes by clients", function()
  -- The weights at the end of a run whose head got another rate and decay after 3 updates, which
  -- is stopped and resumed after `stop` updates.
  local function final(stop, code)
    local recipe = support.recipe(pg, data)
    local run, out = open()
    for _ = 1, 3 do run:step() end
    local client = connect(out)
    client:ask(code)
    local at = run.update
    if stop then
      runs.inner(run).attached:pump()
      assert.is_true(client:answer().ok)
      while run.update < stop do run:step() end
      run:close()
      assert.equal("stopped", run.status)
      run = assert(pg.resume(out, { threads = 1, recipe = recipe }))
    end
    for _ in run:updates() do end -- luacheck: ignore 542
    run:close()
    local lines = attach_lines(out)
    assert.equal(at, lines[1]["attach/update"])
    assert.equal(code, lines[1]["attach/command"])
    local hash = core.fs.sha256(out .. "/checkpoints/00000012/model.safetensors")
    return hash, lines[1]["attach/changes"], select(2, support.metrics(out))
  end

  it("are recorded, and a resume continues with them bit for bit", function()
    local code = "set('head', { lr = 1e-3, weight_decay = 0.5 })"
    local whole, changes, metrics = final(nil, code)
    assert.same({ "lm_head.weight: lr = 0.001, weight_decay = 0.5" }, changes)
    assert.equal(1e-3, metrics[4]["optimizer/peak_lr_lm_head"])
    assert.equal(whole, (final(3, code))) -- at the very update of the change
    assert.equal(whole, (final(5, code)))
    local plain = final(nil, "run.update")
    assert.not_equal(plain, whole)
    -- Slots stay: with the same values the run is the same.
    assert.equal(plain, (final(nil, "set('head', { lr = 3e-3 })")))
    local other = final(nil, "run:set_optimizer('head', pg.optim.adamw { lr = 1e-3 })")
    assert.equal(other, (final(4, "run:set_optimizer('head', pg.optim.adamw { lr = 1e-3 })")))
    assert.not_equal(plain, other)
  end)

  it("are refused when they cannot be kept", function()
    local run <close>, out = open()
    local client = connect(out)
    for code, part in pairs {
      ["set('head', { lr = function() return 1 end })"] = "which a checkpoint cannot hold",
      ["set('head', { betas = { 0.9, 0.9 } })"] = "unknown key 'betas'",
      ["set('head', { lr = -1 })"] = "expected a number >= 0", ["set('haed', { lr = 1 })"] = "role",
      ["set('head', {})"] = "at least one", ["limit(0)"] = "> 0", ["unhook(7)"] = "not a hook",
      ["hook(3)"] = "a function", ["hook(pg.checkpoint { every = 1 })"] = "checkpoint%(%)",
    } do
      client:ask(code)
      runs.inner(run).attached:pump()
      local r = client:answer()
      assert.is_false(r.ok, code)
      assert.matches(part, r.text)
    end
    assert.equal(0, #runs.inner(run).changes)
  end)

  it("are kept as they were given", function()
    local run <close>, _ = open()
    local given = { betas = { 0.8, 0.9 } }
    run:set_optimizer("head", pg.optim.adamw { lr = 1e-3 })
    run:set("head", given)
    given.betas[1], given.lr = 7, 7
    assert.same({ betas = { 0.8, 0.9 } }, runs.inner(run).changes[2].set)
    run:step()
    assert.equal("running", run.status)
  end)

  it("leave a hook alone that a signal to the run interrupts", function()
    local run, out = open(nil, { signals = true })
    local client = connect(out)
    core.signals.install()
    exchange(run, client, ("hook(function() os.execute('kill -TERM %d') while true do end end)")
      :format(core.host().pid))
    run:step()
    client:answer()
    core.signals.uninstall()
    core.signals.clear()
    assert.equal("stopped", run.status)
    assert.equal("SIGTERM", run.reason)
    assert.equal("", client.output)
    for _, line in ipairs(attach_lines(out)) do assert.is_nil(line["attach/hook"]) end
    run:close()
  end)

  it("save, and stop as planned", function()
    local run, out = open()
    local client = connect(out)
    run:step()
    local r = exchange(run, client, "checkpoint()")
    assert.equal(out .. "/checkpoints/00000001\n", r.text)
    assert.is_true(core.fs.exists(out .. "/checkpoints/00000001/manifest.json"))
    client:ask "run:stop('seen enough')"
    assert.is_nil(run:step())
    assert.equal("finished", run.status)
    assert.equal("seen enough", run.reason)
    run:close()
    assert.equal(2, support.json(out .. "/summary.json").update)
  end)

  it("add and remove hooks; those that fail or hang are removed", function()
    local run <close>, out = open { updates = 30 }
    local client = connect(out)
    assert.equal("1\n", exchange(run, client, "n = 0 return hook(pg.every(2, function(run) "
      .. "n = n + 1 run:log('mine/n', n) end))").text)
    for _ = 1, 6 do run:step() end -- 7 updates: it ran after 2, 4 and 6
    assert.equal("3\n", exchange(run, client, "n").text)
    exchange(run, client, "unhook(1)")
    assert.matches("not a hook", exchange(run, client, "unhook(1)").text)
    assert.equal("4\n", exchange(run, client, "n").text)
    local _, lines = support.metrics(out)
    assert.equal(1, lines[2]["mine/n"])
    exchange(run, client, "hook(function() error('never') end)")
    client:answer()
    assert.matches("hook 2 was removed: stdin:1: never", client.output)
    exchange(run, client, "limit(0.2)")
    exchange(run, client, "hook(function() while true do end end)")
    client:answer()
    assert.matches("hook 3 was removed: time limit", client.output)
    exchange(run, client, "hook(pg.every(1, pg.diagnostics.head_diameter()))")
    run:step()
    run:step()
    lines = select(2, support.metrics(out))
    assert.is_number(lines[run.update - 1]["diagnostics/lm_head_step/diameter_exact"])
  end)
end)

describe("a program that is attached to", function()
  local tiny = support.root .. "/recipes/tiny.lua"

  -- perigee train in the background; returns the run directory and its process id.
  local function train(name, launcher)
    local out = folder .. "/" .. name
    assert(os.execute(("cd %s; export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive "
      .. "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; %s %s train %s --set data=%s "
      .. "--set updates=100000 --set checkpoint_every=100000 --quiet --out %s >%s.log 2>&1 & "
      .. "echo $! >%s.pid"):format(folder, launcher or "", support.program, tiny, data, out, out,
      out)))
    for _ = 1, 600 do
      if core.fs.exists(out .. "/attach.json") then break end
      core.sleep(0.05)
    end
    return out, support.read(out .. ".pid"):match("%d+")
  end

  local function attach(out, ...)
    local words = { "attach", out }
    for _, code in ipairs { ... } do table.move({ "-e", code }, 1, 2, #words + 1, words) end
    return support.perigee(words)
  end

  -- Wait until the process is gone and its summary is written.
  local function ended(out)
    for _ = 1, 600 do
      if core.fs.exists(out .. "/summary.json") then
        return support.json(out .. "/summary.json")
      end
      core.sleep(0.05)
    end
  end

  it("talks in a terminal, where Ctrl-C ends a command and pausing ends with the client",
    function()
      local out, pid = train "terminal"
      local code, shown, err = support.terminal({ "< attached to", "> 6 * 7", "< 42",
        "+ run:validat", "^I", ". 1200", "> ion_tokens(512)", "< 512", "> while true do end",
        ". 800", "^C", "< interrupted", "> pause()", "< paused at update",
        "> u = run.update pg.core.sleep(0.5) print('same', run.update == u)", "< same\ttrue",
        "> continue()", "< goes on", "> pause()", "< paused at update", "^D" },
        { "attach", out })
      assert.equal(0, code, shown .. err)
      local status, before = attach(out, "run.update")
      assert.equal(0, status)
      local _, after = attach(out, "run.update")
      assert.is_true(tonumber(after) > tonumber(before))
      -- Two at once, one of them in JSON.
      local _, text = support.shell(("%s attach %s --json -e 'run.update > 0' -e 'print(1)' & "
        .. "%s attach %s -e 'pg.core.sleep(0.3)'; wait"):format(support.program, out,
        support.program, out))
      assert.equal('{"ok": true, "values": [true]}\n{"ok": true, "values": []}\n', text)
      assert.equal(1, (attach(out, "error('x')")))
      -- More than one message holds: cut anywhere but within characters.
      local long = select(2, attach(out, "print(('ä€'):rep(1 << 21))"))
      assert.is_true(long == ("ä€"):rep(1 << 21) .. "\n", #long)
      attach(out, "run:stop()")
      assert.equal(0, ended(out).exit_code)
      for _ = 1, 200 do
        if not core.fs.exists("/proc/" .. pid) then break end
        core.sleep(0.05)
      end
      assert.is_false(core.fs.exists(out .. "/attach.json"))
    end)

  it("saves and exits with 75 at SIGTERM, also while it is paused and busy", function()
    local out, pid = train "sigterm"
    assert.equal(0, (attach(out, "pause { stay = true }")))
    local _, text = attach(out, "run.update")
    local update = tonumber(text)
    assert(os.execute("kill -TERM " .. pid))
    local summary = ended(out)
    assert.equal(75, summary.exit_code)
    assert.equal(update, summary.update)
    assert.equal(("checkpoints/%08d"):format(update), summary.checkpoint)
  end)

  it("leaves an attach.json that is recognised when it is killed", function()
    local out, pid = train "killed"
    attach(out, "checkpoint()")
    assert(os.execute("kill -KILL " .. pid))
    core.sleep(0.3)
    local code, _, err = attach(out, "1")
    assert.equal(1, code)
    assert.is_true(support.one_line(err, "nobody answers", pid), err)
    code, _, err = support.perigee { "resume", out, "--quiet", "--max-updates", "1" }
    assert.equal(0, code, err)
    code, _, err = attach(out, "1")
    assert.equal(1, code)
    assert.is_true(support.one_line(err, "no attach.json"), err)
  end)

  it("may have several ranks, which follow the clients of the first one #mpi", function()
    if support.shell("command -v mpirun") ~= 0
      or core.fs.kind(support.build .. "/lib/perigee/perigee_mpi.so") ~= "file" then
      return pending "there is no mpirun, or this build has no perigee_mpi.so"
    end
    local launcher = "timeout 100 mpirun --bind-to none --oversubscribe -n 2"
    local out = train("ranks", launcher)
    local function ask(...)
      local code, text, err = attach(out, ...)
      assert.equal(0, code, err)
      return text
    end
    ask("hilbert(64)", "inc:diameter()", "run.world == 2 or error()")
    for _, text in ipairs { "run:validate { tokens = 64 }", "run:hilbert(run:panel(64))",
      "what_if(pg.optim.adamw {})", "run:edit('lm_head.weight', function() end)",
      "hook(function() end)" } do
      local code, _, err = attach(out, text)
      assert.equal(1, code)
      assert.is_true(support.one_line(err, "rank"), err)
    end
    -- One client stays: what it asks for is followed at once, and again while training waits.
    local paused = tonumber(ask("pause { stay = true }"):match("paused at update (%d+)"))
    core.sleep(2.5) -- longer than a beat
    assert.equal(paused, tonumber(ask "run.update"))
    local path = ask("checkpoint()"):match("%S+")
    assert.equal(("%s/checkpoints/%08d"):format(out, paused), path)
    assert.matches(("from update %d on"):format(paused + 1), ask("set('head', { lr = 1e-4 })"))
    ask("run:set_optimizer('embedding', pg.optim.sgd { lr = 1e-3 })")
    -- Known to rank 0 alone.
    ask("run:set_optimizer('head', pg.optim.define { name = 'mine', slots = {}, defaults = "
      .. "{ lr = 1 }, increment = function(w, h) return w.gradient * -h.lr end } {})")
    assert.equal(paused, tonumber(ask "run.update"))
    assert.is_true(core.fs.exists(path .. "/manifest.json"))
    ask "continue()"
    for _ = 1, 600 do
      if tonumber(ask "run.update") > paused then break end
      core.sleep(0.02)
    end
    assert.same({ "rownorm", "sgd" }, { ask("run.head.optimizer"):match("%a+"),
      ask("run.embedding.optimizer"):match("%a+") })
    ask "run:stop('enough')"
    local summary = ended(out)
    assert.equal("enough", summary.reason)
    local failed
    for _, line in ipairs(attach_lines(out)) do
      if (line["attach/error"] or ""):find("'mine' is not defined on all ranks") then
        failed = line
      end
    end
    assert.is_table(failed)
    -- A resume from there has the same changes.
    local host = support.json(("%s/checkpoints/%08d/state.json"):format(out, summary.update)).host
    assert.same({ { paused, 1e-4 }, { paused, "sgd" } }, {
      { host.optimizer_changes[1].update, host.optimizer_changes[1].set.lr },
      { host.optimizer_changes[2].update, host.optimizer_changes[2].optimizer.name } })
  end)

  it("trains without a socket where there is no place for one", function()
    local deep = support.folder() .. "/" .. ("x"):rep(120)
    assert(core.fs.make(deep))
    local out = folder .. "/deep"
    local code, _, err = support.shell(("XDG_RUNTIME_DIR=%s %s train %s --set data=%s --set "
      .. "updates=2 --out %s"):format(deep, support.program, tiny, data, out))
    assert.equal(0, code, err)
    assert.matches("no clients can attach: EIO: the socket's path has %d+ bytes", err)
  end)
end)

describe("sockets", function()
  it("refuse other users, and folders that others may enter", function()
    local shared = support.folder()
    assert(os.execute("chmod 755 " .. shared))
    local socket, message = core.socket.listen(shared, "s")
    assert.is_nil(socket)
    assert.matches("mode 0700", message)
    if select(2, support.shell "id -u") ~= "0\n" or not os.execute "command -v setpriv >/dev/null"
    then
      return
    end
    local own = shared .. "/own"
    local listener, path = core.socket.listen(own, "s")
    assert(os.execute(("chmod 755 %s; chmod 666 %s; cp %s/lib/perigee/core.so %s/core.so; "
      .. "chmod 644 %s/core.so"):format(own, path, support.build, shared, shared)))
    local script = support.write(shared .. "/knock.lua", ([[
      package.cpath = %q
      local core = package.loadlib(%q, "luaopen_perigee_core")()
      local s, message = core.socket.connect(%q)
      io.write(message)]]):format("", shared .. "/core.so", path))
    assert(os.execute("chmod 644 " .. script))
    local _, text, err = support.shell(("setpriv --reuid=65534 --regid=65534 --clear-groups "
      .. "lua5.4 %s"):format(script))
    assert.equal("EIO: the socket belongs to another user", text, err)
    local client, why = listener:accept()
    assert.is_nil(client)
    assert.equal("another user was refused", why)
    listener:close()
  end)

  it("cost a run without clients a microsecond or two an update", function()
    local run <close>, _ = open()
    local server = runs.inner(run).attached
    local best = math.huge
    for _ = 1, 5 do
      local started = os.clock()
      for _ = 1, 10000 do server:pump() end
      best = math.min(best, (os.clock() - started) / 10000)
    end
    print(("# %.2f us an update without clients"):format(best * 1e6))
    -- One system call and a pcall; sanitizers and busy machines get room.
    assert.is_true(best < 20e-6)
  end)
end)
