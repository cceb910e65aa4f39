-- What a run asks of its device besides numbers, observed on the emulated one: when memory is
-- allocated, when the host waits, and what it says when a kernel fails. Tests are tagged #cuda.
local support = require "lua_support"
local emulated_it = support.emulated_it(it, pending)

local function trained(settings, environment)
  local folder = support.folder()
  local words = { "OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 CUDAEMU_STREAMS=lazy",
    environment or "", support.quote(support.emulated()), "train",
    support.quote(support.root .. "/tests/device_recipe.lua"), "--quiet", "--out",
    support.quote(folder .. "/run"), "--compute bf16 --device cuda" }
  for name, value in pairs(settings) do
    words[#words + 1] = "--set " .. support.quote(("%s=%s"):format(name, tostring(value)))
  end
  local code, _, err = support.shell(("cd %s && %s"):format(support.quote(support.root),
    table.concat(words, " ")))
  return code, err, folder .. "/run"
end

-- The lines of the trace by update: what came after the update before had run its hooks.
local function traced(settings)
  local path = support.folder() .. "/trace"
  settings.trace = path
  local code, err = trained(settings, "CUDAEMU_TRACE=" .. support.quote(path))
  assert.equal(0, code, err)
  local updates, now = {}, {}
  for line in support.read(path):gmatch("[^\n]+") do
    local update = line:match("^update (%d+)$")
    if update then
      updates[tonumber(update)], now = now, {}
    else
      now[#now + 1] = line
    end
  end
  return updates
end

local function count(lines, pattern)
  local n = 0
  for _, line in ipairs(lines) do
    if line:find(pattern) then n = n + 1 end
  end
  return n
end

teardown(support.clean)

describe("a run on a device", function()
  for _, head in ipairs { "adamw", "rownorm", "lua" } do
    emulated_it("allocates nothing after its first update, head " .. head, function()
      local updates = traced { head = head }
      assert.equal(5, #updates)
      assert.is_true(count(updates[1], "^cudaMalloc %d") > 5) -- it is the trace of this run
      for update = 2, 5 do
        assert.equal(0, count(updates[update], "^cuda"), table.concat(updates[update], "\n"))
      end
    end)
  end

  emulated_it("waits once in an update, however many micro-batches there are", function()
    for _, micro in ipairs { 8, 1 } do
      local updates = traced { head = "rownorm", micro = micro, diagnostics = false }
      for update = 2, 5 do
        assert.equal(1, count(updates[update], "^wait$"), ("micro %d, update %d"):format(micro,
          update))
      end
    end
  end)
end)
