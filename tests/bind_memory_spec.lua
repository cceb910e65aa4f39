-- Lua errors jump over C frames: memory that runs out at any allocation must leak and break
-- nothing. Leaks show in a sanitizer build, where the host program is built with it too.
local support = require "bind_support"

describe("memory that runs out", function()
  it("ends in an error wherever it happens", function()
    local host = support.build .. "/tests/host_lua_memory"
    if not support.core.fs.exists(host) then return pending "built without PG_TESTS" end
    local pipe = io.popen(("env -u LD_PRELOAD %s %s tests/bind_memory.lua %s 2>&1"):format(host,
      support.build, support.folder()))
    local output = pipe:read "a"
    local _, how, code = pipe:close()
    support.clean()
    assert.are.same({ "exit", 0 }, { how, code }, output)
    assert.matches("^%d+ allocations, %d+ states, %d+ failed\n$", output)
  end)
end)
