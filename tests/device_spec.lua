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

  -- AdamW has two parameters: its third call is in the second update. A forward pass makes at least
  -- three and at most seven products for each block.
  local failures = {
    ["adamw:3"] = "adamw failed in update 2, adamw, model.embed_tokens.weight: ",
    ["adamw:4"] = "adamw failed in update 2, adamw, lm_head.weight: ",
    ["momentum:1"] = "momentum failed in update 1, muon, model%.layers%.[%w_.]+ and %d+ more: ",
    ["cublasLtMatmul:7"] = "gemm failed in update 1, block forward %d, "
      .. "model%.layers%.%d%.[%w_.]+: cublasLtMatmul: ",
    ["attention_forward:2"] = "attention_forward failed in update 1, block forward 1: ",
    ["attention_dquery:1"] = "attention_backward failed in update 1, block backward 1: ",
    ["scale_by_factor:2"] = "clip_apply failed in update 2, clip: ",
  }
  -- Work that fails while it runs shows at the next wait, or with PG_CUDA_SYNC at its launch.
  local late = {
    ["PG_CUDA_SYNC=0"] = "download failed in update %d, clip: an illegal memory access .* "
      .. "the last kernel queued was [%w_]+",
    ["PG_CUDA_SYNC=1"] = "[%w_]+ failed in update %d, [%w_ ]+.*: [%w_<>]+: an illegal memory",
  }

  local function one_line(err, text)
    local said = err:gsub("perigee: saved [^\n]*\n", "")
    assert.is_true(support.one_line(said, 'EDEVICE: device "cuda": '), err)
    assert.matches(text, said)
  end
  for fault, text in pairs(failures) do
    emulated_it("says what failed where: " .. fault, function()
      local code, err = trained({ head = "adamw", micro = 8, diagnostics = false },
        "CUDAEMU_FAIL=" .. fault)
      assert.equal(1, code)
      one_line(err, text)
    end)
  end
  for environment, text in pairs(late) do
    emulated_it("says when queued work failed, " .. environment, function()
      local code, err = trained({ head = "adamw", diagnostics = false },
        environment .. " CUDAEMU_FAIL=execute:1400")
      assert.equal(1, code)
      one_line(err, text)
    end)
  end
end)
