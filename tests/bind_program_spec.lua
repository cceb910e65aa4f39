-- The perigee program around the Lua files: where it finds them, exit codes, odd error objects.
local support = require "bind_support"
local core = support.core
local fs = core.fs

-- Run a command; standard output and error together, and the exit code.
local function execute(command)
  local pipe = io.popen(command .. " 2>&1", "r")
  local output = pipe:read "a"
  local _, how, code = pipe:close()
  assert.are.equal("exit", how)
  return output, code
end

describe("the program", function()
  local folder
  -- A copy of the program whose main is this Lua text.
  local function program(main, where)
    folder = support.folder()
    assert(fs.make(folder .. "/bin"))
    assert(os.execute(("cp %s/perigee %s/bin/"):format(support.build, folder)))
    assert(fs.make(folder .. "/" .. (where or "bin/lua") .. "/perigee"))
    fs.write(folder .. "/" .. (where or "bin/lua") .. "/perigee/main.lua", main)
    return folder .. "/bin/perigee"
  end
  after_each(support.clean)

  it("tells its version at once", function()
    local best = math.huge
    for _ = 1, 7 do
      local start = core.clock()
      local output, code = execute(support.build .. "/perigee --version")
      best = math.min(best, core.clock() - start)
      assert.are.same({ "perigee " .. core.version .. "\n", 0 }, { output, code })
    end
    -- A sanitizer's start-up is its own.
    if not os.getenv "ASAN_OPTIONS" then assert.is_true(best < 0.02, best .. " s") end
  end)

  it("gives its words to main and ends with its integer", function()
    local exe = program "return function(words) print(#words, table.unpack(words)) return 7 end"
    assert.are.same({ "2\ta\tb c\n", 7 }, { execute(exe .. " a 'b c'") })
  end)

  it("finds the Lua files of an installation", function()
    local exe = program("return function() print(require 'perigee.core'.version) return 0 end",
      "share/lua/5.4")
    assert.are.same({ core.version .. "\n", 0 }, { execute(exe) })
    assert.are.same({ core.version .. "\n", 0 }, { execute("cd / && " .. exe) })
  end)

  it("puts its own files first and has the module built in", function()
    local exe = program [[return function()
      print(package.path:match "^[^;]*", package.preload["perigee.core"] ~= nil, arg[0] ~= nil)
      return 0
    end]]
    assert.are.same({ folder .. "/bin/lua/?.lua\ttrue\ttrue\n", 0 }, { execute(exe) })
  end)

  it("shows errors of any kind on one line and ends with 1", function()
    for body, message in pairs {
      ["error 'plain'"] = "perigee: .*main.lua:1: plain\n$",
      ["error({})"] = "perigee: table: 0x%x+\n$",
      ["error(nil)"] = "perigee: nil\n$",
      ["error(setmetatable({}, {__tostring = function() error 'no' end}))"] =
        "perigee: %(an error object of type table that cannot be shown%)\n$",
      ["error(setmetatable({}, {__tostring = function() return 'shown' end}))"] = "perigee: shown\n$",
      ["return 'x'"] = "perigee.main returned a string, an integer is expected\n$",
      ["local function f() return 1 + f() end return f()"] = "stack overflow",
    } do
      local output, code = execute(program("return function() " .. body .. " end"))
      assert.are.equal(1, code)
      assert.matches(message, output)
    end
    local output, code = execute(program "return function( end")
    assert.are.equal(1, code)
    assert.matches("main.lua:1", output)
  end)

  it("says so when the Lua files are missing", function()
    local exe = program("return 1", "elsewhere")
    local output, code = execute("cd " .. folder .. " && env -u LUA_PATH " .. exe)
    assert.are.equal(1, code)
    assert.matches("module 'perigee.main' not found", output)
  end)

  it("survives a reader that goes away", function()
    local exe = program [[return function()
      for i = 1, 1e5 do io.write(i, "\n") end
      io.stderr:write "to the end\n"
      return 0
    end]]
    local output = execute(("{ { %s; echo code $? >&2; } | head -n 1; }"):format(exe))
    assert.matches("to the end\ncode 0\n", output)
  end)
end)
