-- Tensors of Lua on the emulated device: tensor_device.lua compares each operation with the CPU's.
local support = require "lua_support"

describe("tensors on the device", function()
  teardown(support.clean)
  support.emulated_it(it, pending)("are those of the CPU and give their memory back", function()
    local code, out, err = support.shell(("cd %s && OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive %s "
      .. "run tests/tensor_device.lua %s"):format(support.quote(support.root),
      support.quote(support.emulated()), support.folder()))
    assert.equal("", err)
    assert.equal("ok\n", out)
    assert.equal(0, code)
  end)
end)
