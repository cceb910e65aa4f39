-- Several ranks on GPUs, here emulated ones: NCCL's calls over shared memory, and everything else
-- as it is on a machine with GPUs. Tests are tagged #cuda. The program is that of a build with
-- -DPG_EMULATE_CUDA=ON: PERIGEE_EMU, or emu/ in the build folder. With three real GPUs it can be
-- that of an ordinary build; PERIGEE_GPUS says how many there are.
local support = require "lua_support"
local core = support.core

local recipe = support.root .. "/tests/mpi_recipe.lua"
local program, emulated_it = support.emulated(), support.emulated_it(it, pending)
local gpus = tonumber(os.getenv "PERIGEE_GPUS") or 0
local environment = ("OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 "
  .. "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 CUDAEMU_DEVICES=%d "):format(math.max(3, gpus))

local port = 20000 + core.host().pid % 20000
local function words_of(out, settings)
  local words = { support.quote(program), "train", support.quote(recipe), "--quiet", "--out",
    support.quote(out), "--compute fp32 --device cuda" }
  local given = { last = 6 }
  for name, value in pairs(settings) do given[name] = value end
  for name, value in pairs(given) do
    words[#words + 1] = "--set " .. support.quote(("%s=%s"):format(name, tostring(value)))
  end
  return table.concat(words, " ")
end

-- Ranks that only the environment tells of each other. Exit codes and standard error by rank.
local function ranks(count, settings, only, variables)
  local folder = support.folder()
  local lines = { "cd " .. support.quote(support.root) }
  port = port + 1
  for rank = 0, count - 1 do
    if not only or only == rank then
      lines[#lines + 1] = ("(%s%sRANK=%d WORLD_SIZE=%d LOCAL_RANK=%d MASTER_ADDR=127.0.0.1 "
        .. "MASTER_PORT=%d timeout 100 %s >%s/out%d 2>%s/err%d; echo $? >%s/code%d) &"):format(
        environment, variables or "", rank, count, rank, port,
        words_of(folder .. "/run", settings), folder, rank, folder, rank, folder, rank)
    end
  end
  lines[#lines + 1] = "wait"
  local started = core.clock()
  support.shell(table.concat(lines, "\n"))
  local codes, errs = {}, {}
  for rank = 0, count - 1 do
    if not only or only == rank then
      codes[rank] = tonumber(support.read(("%s/code%d"):format(folder, rank)))
      errs[rank] = support.read(("%s/err%d"):format(folder, rank))
    end
  end
  return folder .. "/run", codes, errs, core.clock() - started
end

local function one_rank(settings)
  local out = support.folder() .. "/run"
  local code, _, err = support.shell(("cd %s && %s%s"):format(support.quote(support.root),
    environment, words_of(out, settings)))
  assert.equal(0, code, err)
  return out
end

-- The bars of mpi_spec.lua.
local function same(a, b)
  local _, want = support.metrics(a)
  local _, got = support.metrics(b)
  local compared = 0
  for update, line in pairs(want) do
    for _, name in ipairs { "train/loss", "train/grad_norm", "validation/loss",
      "validation/hilbert_step/rms", "diagnostics/lm_head_step/diameter_exact" } do
      local x, y = line[name], got[update][name]
      if x then
        assert.is_true(math.abs(x - y) <= 1e-6 * math.abs(x),
          ("update %d, %s: %.9g and %.9g"):format(update, name, x, y))
        compared = compared + 1
      end
    end
    assert.equal(line["data/batch_hash"], got[update]["data/batch_hash"])
  end
  return compared
end

teardown(support.clean)

local cases = {
  { 2, { head = "rownorm", shard = true } },
  { 3, { head = "adamw", shard = true, sequences = 6, micro = 1 } },
  { 2, { head = "adamw", shard = false, own = true } },
}
if gpus > 3 then
  cases[#cases + 1] = { gpus, { head = "rownorm", shard = true, sequences = gpus, micro = 1 } }
end

describe("ranks on GPUs", function()
  for _, case in ipairs(cases) do
    local count, settings = case[1], case[2]
    emulated_it(("train as one, %d of them, head %s, shard_optimizer = %s"):format(count,
      settings.head, tostring(settings.shard)), function()
      local out, codes, errs = ranks(count, settings)
      for rank = 0, count - 1 do assert.equal(0, codes[rank], errs[rank]) end
      assert.equal(20, same(one_rank(settings), out))
    end)
  end

  -- 14 whole matrices, and both halves of the embedding, the head and the head's increment.
  emulated_it("send what they updated as one group", function()
    local trace = support.folder() .. "/trace"
    local _, codes, errs = ranks(2, { head = "adamw", shard = true }, nil,
      "CUDAEMU_TRACE=" .. trace .. " ")
    for rank = 0, 1 do assert.equal(0, codes[rank], errs[rank]) end
    local _, groups = support.read(trace):gsub("ncclGroupEnd 20\n", "")
    assert.equal(2 * 6, groups)
  end)

  emulated_it("train under mpirun too", function()
    if support.shell("command -v mpirun") ~= 0 then return pending("there is no mpirun") end
    local out = support.folder() .. "/run"
    local code, _, err = support.shell(("cd %s && %s timeout 100 mpirun --bind-to none "
      .. "--oversubscribe -n 2 %s"):format(support.quote(support.root), environment,
      words_of(out, {})))
    assert.equal(0, code, err)
    assert.equal(20, same(one_rank {}, out))
  end)

  for fault, text in pairs {
    hook = "rank 1 failed: ", vanish = "rank 1 failed: the process ended before the run did",
    exit = "os.exit was called before the run ended",
    kill = "rank 1 failed: its process ended without a word",
    nan = "is not finite on rank 1 (loss nan)",
  } do
    emulated_it("end together: " .. fault, function()
      local _, codes, errs, seconds = ranks(3, { fault = fault, sequences = 6 })
      for rank = 0, 2 do assert.is_true(codes[rank] ~= 0 and codes[rank] ~= 124, fault) end
      for _, rank in ipairs { 0, 2 } do
        assert.is_true(support.one_line(errs[rank], text), errs[rank])
      end
      assert.is_true(seconds < 60)
    end)
  end

  emulated_it("do not wait for ever", function()
    local _, codes, errs = ranks(2, { fault = "hang", timeout = 2.0, at = 1 })
    assert.equal(1, codes[0])
    assert.equal(1, codes[1]) -- once it wakes up
    assert.is_true(support.one_line(errs[0], "rank 1 did not come to ", "within 2 s"), errs[0])
  end)

  emulated_it("say who is missing at the start", function()
    local _, codes, errs, seconds = ranks(3, { timeout = 2.0, sequences = 6 }, 0)
    assert.equal(1, codes[0])
    assert.is_true(support.one_line(errs[0], "rank 1, 2 did not come to rank 0 at port",
      "within 2 s"), errs[0])
    assert.is_true(seconds < 30)
    _, codes, errs, seconds = ranks(2, { timeout = 2.0 }, 1)
    assert.equal(1, codes[1])
    assert.is_true(support.one_line(errs[1], "rank 0 at 127.0.0.1, port",
      "cannot be reached: connection refused"), errs[1])
    assert.is_true(seconds < 30)
  end)

  -- Both jobs have two ranks; the second begins when the first one's ranks have met.
  emulated_it("leave the port to another job", function()
    local folder = support.folder()
    local lines = { "cd " .. support.quote(support.root) }
    port = port + 1
    for job, settings in ipairs { { updates = 60, last = 60, every = 60 }, {} } do
      if job == 2 then
        lines[#lines + 1] = ("until [ -s %s/run1/metrics.jsonl ]; do sleep 0.1; done"):format(
          folder)
      end
      for rank = 0, 1 do
        lines[#lines + 1] = ("(%sRANK=%d WORLD_SIZE=2 LOCAL_RANK=%d MASTER_ADDR=127.0.0.1 "
          .. "MASTER_PORT=%d timeout 100 %s 2>%s/err%d-%d; echo $? >%s/code%d-%d) &"):format(
          environment, rank, rank, port, words_of(folder .. "/run" .. job, settings), folder, job,
          rank, folder, job, rank)
      end
    end
    support.shell(table.concat(lines, "\n") .. "\nwait")
    for job = 1, 2 do
      for rank = 0, 1 do
        local name = ("%d-%d"):format(job, rank)
        assert.equal("0\n", support.read(folder .. "/code" .. name),
          support.read(folder .. "/err" .. name))
      end
    end
  end)

  emulated_it("tell at once why one of them cannot start", function()
    local folder = support.folder()
    support.write(folder .. "/broken.lua", ([[
      if require "perigee.core".launch().rank == 1 then error("no such thing", 0) end
      return dofile(%q)]]):format(recipe))
    local before = recipe
    recipe = folder .. "/broken.lua"
    local _, codes, errs, seconds = ranks(2, { timeout = 60.0 })
    recipe = before
    for rank = 0, 1 do
      assert.equal(1, codes[rank])
      assert.is_true(support.one_line(errs[rank], "no such thing"), errs[rank])
    end
    assert.is_true(support.one_line(errs[0], "rank 1 failed: "), errs[0])
    assert.is_true(seconds < 30)
  end)

  emulated_it("say which devices they chose when these differ", function()
    if support.shell("command -v mpirun") ~= 0 then return pending("there is no mpirun") end
    local out = support.folder() .. "/run"
    local words = words_of(out, {}):gsub("%-%-device cuda", "--device auto")
    local code, _, err = support.shell(("cd %s && %s timeout 100 mpirun --bind-to none "
      .. "--oversubscribe -n 1 env CUDAEMU_DEVICES=0 %s : -n 1 env CUDAEMU_DEVICES=2 %s"):format(
      support.quote(support.root), environment, words, words))
    assert.equal(1, code, err)
    for rank = 0, 1 do
      assert.is_truthy(err:find(("perigee: rank %d: EPEER: the ranks chose different devices "
        .. "(rank 0: cpu, rank 1: cuda): expected one kind"):format(rank), 1, true), err)
    end
  end)

  emulated_it("need a GPU each", function()
    local out = support.folder() .. "/run"
    local code, _, err = support.shell(("cd %s && %s CUDAEMU_DEVICES=1 CUDA_VISIBLE_DEVICES=0 "
      .. "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 %s"):format(support.quote(support.root), environment,
      words_of(out, {})))
    assert.equal(1, code)
    assert.is_true(support.one_line(err, "rank 1: EDEVICE"), err)
  end)
end)
