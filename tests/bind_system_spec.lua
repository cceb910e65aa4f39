-- Files, signals, clocks, the machine, random numbers and schedules from Lua.
local support = require "bind_support"
local core = support.core
local fs = core.fs

local function failure(name, none, message, got)
  assert.is_nil(none)
  assert.are.equal(name, got)
  assert.matches("^" .. name .. ": ", message)
  return message
end

describe("files", function()
  local dir
  before_each(function() dir = support.folder() end)
  after_each(support.clean)

  it("are written whole, read, appended to and hashed", function()
    local path = dir .. "/a"
    assert.is_true(fs.write(path, "abc\0def"))
    assert.are.equal("abc\0def", fs.read(path))
    assert.is_true(fs.append(path, "!"))
    assert.are.equal(8, fs.size(path))
    assert.is_true(fs.write(path, "abc"))
    assert.are.equal("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", fs.sha256(path))
    assert.are.same({ "a" }, fs.list(dir))
    assert.are.equal("file", fs.kind(path))
    assert.are.equal("directory", fs.kind(dir))
    assert.are.equal("other", fs.kind "/dev/null")
    assert.is_nil(fs.kind(path .. "x"))
    assert.is_true(fs.exists(path))
    assert.is_false(fs.exists(path .. "x"))
  end)

  it("are listed in byte order", function()
    for _, name in ipairs { "b", "A", "a", ".h", "\xc3\xa9", "10", "9" } do fs.write(dir .. "/" .. name, "") end
    assert.are.same({ ".h", "10", "9", "A", "a", "b", "\xc3\xa9" }, fs.list(dir))
  end)

  it("live in folders that are made, renamed and removed", function()
    assert.is_true(fs.make(dir .. "/x/y/z"))
    assert.is_true(fs.make(dir .. "/x/y/z"))
    assert.is_true(fs.make_exclusive(dir .. "/p/q"))
    failure("EEXIST", fs.make_exclusive(dir .. "/p/q"))
    fs.write(dir .. "/x/y/f", "1")
    assert.is_true(fs.rename(dir .. "/x", dir .. "/w"))
    assert.are.equal("1", fs.read(dir .. "/w/y/f"))
    assert.is_true(fs.remove(dir .. "/w/y/f"))
    assert.is_true(fs.remove(dir .. "/w"))
    assert.is_true(fs.remove(dir .. "/w"))
    assert.are.same({ "p" }, fs.list(dir))
    assert.are.equal(fs.real(dir), fs.real(dir .. "/p/.."))
    assert.matches("^/", fs.cwd())
    assert.is_true(fs.free(dir) > 0)
  end)

  it("do not follow a link when removing", function()
    fs.write(dir .. "/kept", "1")
    fs.make(dir .. "/links")
    os.execute(("ln -s %s/kept %s/links/l; ln -s %s %s/links/d"):format(dir, dir, dir, dir))
    assert.is_true(fs.remove(dir .. "/links/d"))
    assert.is_true(fs.remove(dir .. "/links"))
    assert.are.equal("1", fs.read(dir .. "/kept"))
  end)

  it("fail with a name, the path and the reason", function()
    local path = dir .. "/none"
    assert.matches("none", failure("ENOENT", fs.read(path)))
    assert.matches("No such file", failure("ENOENT", fs.list(path)))
    failure("ENOENT", fs.size(path))
    failure("ENOENT", fs.sha256(path))
    failure("ENOENT", fs.real(path))
    failure("ENOENT", fs.rename(path, path .. "2"))
    failure("ENOENT", fs.append(path .. "/x", "t"))
    assert.is_nil((fs.write(path .. "/x", "t")))
    assert.error_matches(function() fs.read "a\0b" end, "zero bytes")
    assert.error_matches(function() fs.read(3) end, "path: a string expected, got number 3")
    assert.error_matches(function() fs.write(path, 5) end, "text: a string expected")
  end)
end)

describe("signals", function()
  after_each(support.clean)
  -- In a process of its own: the handlers are the process's.
  it("set a flag, count, and cancel a context when asked to", function()
    local output, how, code = support.process [[
      local support = require "bind_support"
      local core = support.core
      local s, ctx = core.signals, support.context()
      -- os.execute would ignore SIGINT meanwhile
      local function kill(name) io.popen("kill -" .. name .. " " .. core.host().pid):close() end
      s.install()
      print(s.pending(), s.count())
      kill "TERM"
      print(s.pending(), s.count(), ctx:cancelled())
      kill "INT"
      print(s.pending(), s.count())
      s.clear()
      s.cancel_on(ctx, true)
      kill "INT"
      print(s.pending(), s.count(), ctx:cancelled())
      ctx:resume()
      s.cancel_on(ctx, false)
      kill "INT"
      print(s.count(), ctx:cancelled())
      s.cancel_on(ctx, true) -- one is pending: at once
      print(ctx:cancelled())
      ctx:close()
      kill "INT" -- the context is gone
      local start = core.clock()
      core.sleep(0.05)
      print(core.clock() - start >= 0.05)
      s.uninstall()
      kill "TERM"
      core.sleep(5)
    ]]
    assert.are.equal("nil\t0\nSIGTERM\t1\tfalse\nSIGTERM\t2\nSIGINT\t1\ttrue\n2\tfalse\ntrue\ntrue\n",
      (output:gsub("Terminated.*", "")))
    assert.is_false(how == "exit" and code == 0)
  end)
end)

describe("the machine", function()
  it("is described", function()
    local host = core.host()
    assert.is_true(host.cores >= 1 and host.memory_bytes > 2 ^ 28)
    assert.are.equal("openmp", host.openblas_parallel)
    assert.matches("Lua 5.4", host.lua)
    assert.matches("Linux", host.os)
    assert.are.equal("number", type(core.terminal().columns))
    assert.are.equal("boolean", type(core.terminal().tty))
    assert.matches("^%d+%.%d+%.%d+$", core.version)
    assert.is_boolean(core.build.cuda)
    assert.are.equal("base", core.build.cpu_levels[1])
  end)

  it("has clocks", function()
    local a = core.clock()
    assert.is_true(core.clock() >= a)
    assert.is_true(math.abs(core.time() - os.time()) < 2)
    assert.error_matches(function() core.sleep(-1) end, "0 to 1e6 seconds")
  end)
end)

describe("random numbers", function()
  it("are functions of seed, stream and index", function()
    local u = {}
    for i = 0, 999 do u[i + 1] = core.uniform(1, "hook", i) end
    local sum, low, high = 0, 1, 0
    for _, x in ipairs(u) do sum, low, high = sum + x, math.min(low, x), math.max(high, x) end
    assert.is_true(low >= 0 and high < 1)
    assert.is_true(math.abs(sum / 1000 - 0.5) < 5 * math.sqrt(1 / 12 / 1000)) -- five deviations
    assert.are.equal(u[7], core.uniform(1, "hook", 6))
    assert.are_not.equal(u[7], core.uniform(2, "hook", 6))
    assert.are_not.equal(u[7], core.uniform(1, "other", 6))
    local normals = core.random(3, 5, 0, 100)
    assert.are.equal(100, #normals)
    assert.are.same({ table.unpack(normals, 41, 60) }, core.random(3, 5, 40, 20))
    assert.error_matches(function() core.uniform(1, {}, 0) end, "stream")
  end)
end)

describe("processes", function()
  local folder
  local function ended(process)
    for _ = 1, 200 do
      local code, signal = process:poll()
      if code then return code, signal end
      core.sleep(0.05)
    end
    error "the process does not end"
  end
  local function shell(command, env)
    return core.spawn { args = { "/bin/sh", "-c", command }, env = env or core.environment(),
      output = folder }
  end
  setup(function() folder = os.tmpname() end)
  teardown(function() os.remove(folder) end)

  it("end with a code or a signal, and write where they are told", function()
    local process <close> = assert(shell("echo $A; echo no >&2; cat; exit 3", { "A=is here" }))
    assert.are.same({ 3, 0 }, { ended(process) })
    assert.are.same({ 3, 0 }, { process:poll() }) -- again
    process:kill "SIGTERM" -- nothing
    assert.are.equal("is here\nno\n", core.fs.read(folder))
    local sleeper <close> = assert(shell "exec sleep 100")
    assert.is_nil(sleeper:poll())
    assert.are.equal("number", type(sleeper:pid()))
    sleeper:kill "SIGTERM"
    assert.are.same({ 0, 15 }, { ended(sleeper) })
  end)
  it("outlive their object", function()
    local process = assert(shell "sleep 0.2; echo late")
    process:close()
    process:close()
    assert.error_matches(function() process:poll() end, "closed")
    core.sleep(0.6)
    assert.is_truthy(core.fs.read(folder):find "late")
  end)
  it("take over descriptors, as 3 and on", function()
    local lock = assert(core.fs.lock "/tmp")
    local listener <close> = assert(core.listener())
    local process <close> = assert(core.spawn { args = { "/bin/sh", "-c",
      "readlink /proc/$$/fd/3; readlink /proc/$$/fd/4; exec sleep 100" }, env = core.environment(),
      output = folder, inherit = { lock, listener:descriptor() } })
    core.fs.unlock(lock)
    for _ = 1, 100 do
      if (core.fs.read(folder) or ""):find "socket" then break end
      core.sleep(0.02)
    end
    assert.is_truthy(core.fs.read(folder):find("/tmp\nsocket:", 1, true))
    failure("ESTATE", core.fs.lock "/tmp") -- until it ends
    process:kill "SIGTERM"
    ended(process)
    core.fs.unlock(assert(core.fs.lock "/tmp"))
    assert.error_matches(function()
      core.spawn { args = { "/bin/true" }, env = {}, output = folder, inherit = { 1000 } }
    end, "spawn.inherit%[1%]: an open descriptor")
    assert.error_matches(function()
      core.spawn { args = { "/bin/true" }, env = {}, output = folder, inherit = { 0, 0, 0, 0, 0 } }
    end, "at most 4")
  end)
  it("listen at ports of their own", function()
    local a <close> = assert(core.listener())
    local b <close> = assert(core.listener())
    assert.is_true(a:port() > 0 and a:port() < 65536 and a:port() ~= b:port())
    a:close()
    assert.error_matches(function() a:descriptor() end, "closed")
  end)
  it("are refused with a reason", function()
    failure("ENOENT", core.spawn { args = { "/no/such" }, env = {}, output = folder })
    failure("ENOENT", core.spawn { args = { "/bin/true" }, env = {}, output = "/no/such/file" })
    assert.error_matches(function() core.spawn {} end, "args")
    assert.error_matches(function() core.spawn { args = {}, env = {}, output = folder } end,
      "at least a program")
    assert.error_matches(function() core.spawn { args = { 1 }, env = {}, output = folder } end,
      "a string expected")
    for _, key in ipairs { "args", "env" } do
      local words = { args = { "/bin/true" }, env = {}, output = folder }
      words[key] = { "/bin/true\0x" }
      assert.error_matches(function() core.spawn(words) end,
        "spawn." .. key .. "%[1%]: a string without NUL bytes")
    end
    local short = setmetatable({ "/bin/true" }, { __len = function() return -5 end })
    ended(assert(core.spawn { args = short, env = {}, output = folder }))
    local many = core.environment()
    for i = 1, 1000 do many[#many + 1] = ("V%d=%d"):format(i, i) end
    ended(assert(shell("true", many)))
    local process <close> = assert(shell "true")
    assert.error_matches(function() process:kill "SIGUSR1" end, "SIGTERM or SIGKILL")
    ended(process)
  end)
end)

describe("schedules", function()
  it("warm up and decay as SPEC says", function()
    assert.are.equal(28, core.schedule_warmup(0.29, 100))
    assert.are.equal(4, core.schedule_warmup(0.1, 40))
    failure("EINVAL", core.schedule_warmup(1, 10))
    failure("EINVAL", core.schedule_warmup(-0.1, 10))
    assert.are.equal(0, core.warmup_cosine(0, 40, 4, 0.1))
    assert.are.equal(0.25, core.warmup_cosine(1, 40, 4, 0.1))
    assert.are.equal(1, core.warmup_cosine(4, 40, 4, 0.1))
    assert.is_true(math.abs(core.warmup_cosine(39, 40, 4, 0.1) - 0.1) < 1e-15)
    assert.are.equal(0.1, core.warmup_cosine(0, 1, 0, 0.1))
    assert.error_matches(function() core.warmup_cosine(40, 40, 4, 0.1) end, "t: an integer from 0 to 39")
    assert.error_matches(function() core.warmup_cosine(0, 40, 40, 0.1) end, "W: an integer from 0 to 39")
  end)
end)
