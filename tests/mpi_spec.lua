-- Several ranks on CPUs, started by mpirun: the same training as on one rank, and what happens when
-- one of them fails. Tests are tagged #mpi.
local support = require "lua_support"
local core = support.core

local recipe = support.root .. "/tests/mpi_recipe.lua"
local environment = "OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 "
  .. "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
local start = "timeout 100 mpirun --bind-to none --oversubscribe"

local function why_not()
  if support.shell("command -v mpirun") ~= 0 then return "there is no mpirun" end
  if core.fs.kind(support.build .. "/lib/perigee/perigee_mpi.so") ~= "file" then
    return "this build has no perigee_mpi.so"
  end
end
local skipped = why_not()

-- it(), unless there is nothing to run it with.
local function mpi_it(name, f)
  it(name .. " #mpi", function()
    if skipped then return pending(skipped) end
    f()
  end)
end

local function words_of(command, settings)
  local words = {}
  for _, word in ipairs(command) do words[#words + 1] = support.quote(word) end
  local names = {}
  for name in pairs(settings or {}) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    words[#words + 1] = "--set " .. support.quote(name .. "=" .. tostring(settings[name]))
  end
  return support.quote(support.program) .. " " .. table.concat(words, " ")
end

local function run(ranks, command, settings)
  local prefix = ranks == 0 and "" or ("%s -n %d "):format(start, ranks)
  return support.shell(("cd %s && %s%s%s"):format(support.quote(support.root), environment, prefix,
    words_of(command, settings)))
end

local function train(ranks, settings, ...)
  local out = support.folder() .. "/run"
  local code, stdout, err = run(ranks, { "train", recipe, "--out", out, ... }, settings)
  return out, code, stdout, err
end

-- Lines of the ranks on standard error, by rank; mpirun adds lines of its own.
local function complaints(err)
  local found, count = {}, 0
  for rank, text in err:gmatch("perigee: rank (%d+): ([^\n]*)") do
    assert.is_nil(found[rank], "rank " .. rank .. " says two things: " .. err)
    found[rank] = text
    count = count + 1
  end
  return found, count
end

-- Relative error of every number that does not measure time or memory; exact for the rest.
local function same(a, b)
  local _, want = support.metrics(a)
  local _, got = support.metrics(b)
  local compared = 0
  for update, line in pairs(want) do
    assert.is_table(got[update], "update " .. update)
    for name, x in pairs(line) do
      local y = got[update][name]
      if name:match("^performance/") or name:match("^memory/") or name == "validation/seconds" then
        assert.is_number(y)
      elseif math.type(x) == "float" then
        -- 1e-6 is the bar of an fp32 implementation for the loss; the perplexity is its
        -- exponential and the loss is at most 4.7.
        local bar = name:match("perplexity") and 5e-6 or 1e-6
        assert.is_true(math.abs(x - y) <= bar * math.abs(x),
          ("update %d, %s: %.9g and %.9g"):format(update, name, x, y))
        compared = compared + 1
      else
        assert.same(x, y, ("update %d, %s"):format(update, name))
      end
    end
  end
  return compared
end

local alone = {} -- sequences and head -> the run directory of one rank
local function one_rank(settings)
  local key = ("%d %s %s %s"):format(settings.sequences or 8, settings.head or "adamw",
    tostring(settings.own), tostring(settings.switched))
  if not alone[key] then
    local out, code, _, err = train(0, settings)
    assert.equal(0, code, err)
    alone[key] = out
  end
  return alone[key]
end

teardown(support.clean)

describe("ranks", function()
  for _, case in ipairs {
    { 2, { head = "adamw", shard = true } }, { 2, { head = "rownorm", shard = false } },
    { 3, { head = "rownorm", shard = true, sequences = 6, micro = 1 } },
    { 3, { head = "adamw", shard = false, sequences = 6, micro = 2 } },
    { 4, { head = "rownorm", shard = true } }, { 4, { head = "adamw", shard = false } },
    { 4, { head = "adamw", shard = true, micro = 0 } },
    { 3, { head = "adamw", shard = true, sequences = 6, micro = 2, own = true } },
    { 2, { head = "adamw", shard = true, switched = true } },
  } do
    local ranks, settings = case[1], case[2]
    local words = {}
    for name, value in pairs(settings) do words[#words + 1] = name .. "=" .. tostring(value) end
    table.sort(words)
    mpi_it(("train the golden trajectory on %d ranks, %s"):format(ranks,
      table.concat(words, " ")), function()
      local out, code, stdout, err = train(ranks, settings)
      assert.equal(0, code, err)
      assert.is_true(same(one_rank(settings), out) > 200)
      assert.matches("printed at 20.*printed at 40", stdout)
      assert.equal(2, select(2, stdout:gsub("printed at", "")))
      local described = support.json(out .. "/config.json")
      assert.equal(ranks, described.batch.ranks)
    end)
  end

  mpi_it("agree with one rank's numbers from an independent program", function()
    local expected = support.json(support.golden .. "/expected.json").runs.adamw
    local out, code, _, err = train(4, { head = "adamw" })
    assert.equal(0, code, err)
    local _, lines = support.metrics(out)
    for i, want in ipairs(expected) do
      local loss, norm = lines[i]["train/loss"], lines[i]["train/grad_norm"]
      assert.is_true(math.abs(loss - want.loss) <= 1e-6 * want.loss)
      assert.is_true(math.abs(norm - want.grad_norm) <= 5e-6 * want.grad_norm)
    end
  end)

  mpi_it("continue a checkpoint of other ranks: 4, 2, 4, 1", function()
    local out, code, _, err = train(4, { last = 11, head = "rownorm" })
    assert.equal(0, code, err)
    for _, step in ipairs { { 2, 20 }, { 4, 31 }, { 0, 40 } } do
      local ended, _, text = run(step[1], { "resume", out, "--allow-changed-recipe",
        "--max-updates", tostring(step[2]) }, { last = step[2] })
      assert.equal(0, ended, text)
    end
    assert.is_true(same(one_rank { head = "rownorm" }, out) > 200)
  end)

  mpi_it("give hooks whole slots", function()
    local compared = 0
    local settings = { fault = "slots", sequences = 6, head = "rownorm", last = 20 }
    local whole, code, _, err = train(0, settings)
    assert.equal(0, code, err)
    local _, want = support.metrics(whole)
    settings.micro = 1
    for _, shard in ipairs { true, false } do
      settings.shard = shard
      local out
      out, code, _, err = train(3, settings)
      assert.equal(0, code, err)
      local _, got = support.metrics(out)
      for _, update in ipairs { 10, 20 } do
        for name, x in pairs(want[update]) do
          if name:match("^slots/") then
            -- Norms of sums of gradients, which agree to 5e-6 (SPEC §7).
            local y = got[update][name]
            assert.is_true(math.abs(x - y) <= 5e-6 * x, ("%s: %.9g and %.9g"):format(name, x, y))
            compared = compared + 1
          end
        end
      end
    end
    assert.equal(2 * 2 * 4, compared) -- momentum, m and v, momentum
  end)

  mpi_it("show who would do what with --dry-run", function()
    local folder = support.folder()
    local code, stdout, err = support.shell(("cd %s && %s%s -n 3 %s"):format(folder, environment,
      start, words_of({ "train", recipe, "--dry-run" },
      { golden = support.golden, sequences = 6, micro = 1 })))
    assert.equal(0, code, err)
    assert.matches("rank%s+host%s+local%s+device%s+threads", stdout)
    for rank = 0, 2 do
      assert.matches(("\n%d%%s+%%S+%%s+%d%%s+cpu%%s+1%%s"):format(rank, rank), stdout)
    end
    assert.matches("3 ranks %(mpirun, mpi%): 2 sequences each per update, in 2 micro%-batches of 1",
      stdout)
    for rank = 0, 2 do
      assert.matches(("\n%d%%s+%%d+%%.%%d%%s+[%%d%%. ]+yes\n"):format(rank), stdout)
    end
    assert.same({}, core.fs.list(folder))
  end)

  mpi_it("refuse what they cannot hold together, before they allocate", function()
    local out, code, stdout, err = train(2, { golden = support.golden, layers = 4096,
      width = 1 << 20 })
    assert.equal(1, code)
    assert.equal("", stdout)
    local found, count = complaints(err)
    assert.equal(2, count)
    for rank = 0, 1 do
      assert.matches("ENOMEM: .* GiB for each of the 2 ranks of this machine",
        found[tostring(rank)])
    end
    assert.is_nil(core.fs.kind(out))
  end)
end)

-- Exit codes of the ranks of a command, by rank, and its standard error. mpirun tells only one of
-- them, and ends the shells that keep the others as soon as a first rank has failed.
local function codes_of(ranks, folder, words)
  local _, _, err = support.shell(("cd %s && %s%s --mca odls_base_sigkill_timeout 2 -n %d sh -c %s")
    :format(support.quote(support.root), environment, start, ranks, support.quote(
      ("trap '' TERM; %s; echo $? >%s/code$OMPI_COMM_WORLD_RANK"):format(words, folder))))
  local codes = {}
  for rank = 0, ranks - 1 do
    codes[rank] = tonumber(core.fs.read(("%s/code%d"):format(folder, rank)) or "")
  end
  return codes, err
end

-- What the failing rank and the others say; all end, in time, and none with success.
local function fails(settings, own, others, ended)
  settings.sequences, settings.micro = 6, 2
  local folder = support.folder()
  local out = folder .. "/run"
  local before = core.clock()
  local codes, err = codes_of(3, folder,
    words_of({ "train", recipe, "--out", out }, settings))
  local seconds = core.clock() - before
  for rank = 0, 2 do
    if rank == ended then
      assert.is_nil(codes[rank]) -- by the launcher
    else
      assert.is_number(codes[rank], ("rank %d did not end by itself: %s"):format(rank, err))
      assert.is_true(codes[rank] ~= 0 and codes[rank] ~= 75, "exit code " .. codes[rank])
    end
  end
  assert.is_true(seconds < 15, ("it took %.1f s: %s"):format(seconds, err))
  local found = complaints(err)
  for _, rank in ipairs { "0", "2" } do
    assert.is_string(found[rank], err)
    assert.is_truthy(found[rank]:find(others, 1, true), found[rank])
  end
  if own then
    assert.is_string(found["1"], err)
    assert.is_truthy(found["1"]:find(own, 1, true), found["1"])
  end
  local summary = support.json(out .. "/summary.json")
  assert.equal("failed", summary.status)
  assert.is_truthy(summary.reason:find(others, 1, true), summary.reason)
  return out, err
end

describe("a failure of one rank ends all of them", function()
  mpi_it("when its gradient is not finite", function()
    local text = "is not finite on rank 1 (loss nan); nothing was applied"
    local out = fails({ fault = "nan" }, text, text)
    -- As with one rank, weights that are not finite are not worth a checkpoint.
    assert.same({}, core.fs.list(out .. "/checkpoints"))
    assert.is_falsy(support.json(out .. "/summary.json").reason:find("not saved", 1, true))
  end)

  mpi_it("with a checkpoint of what was trained before a refused update", function()
    local text = "is not finite on rank 1"
    local out = fails({ fault = "overflow" }, text, text)
    local alone_out, code = train(0, { fault = "overflow", rank = 0, sequences = 6 })
    assert.equal(1, code)
    for _, folder in ipairs { out, alone_out } do
      local summary = support.json(folder .. "/summary.json")
      assert.equal(3, summary.update)
      assert.equal("checkpoints/00000003", summary.checkpoint)
      assert.same({ "00000003" }, core.fs.list(folder .. "/checkpoints"))
    end
    for _, ranks in ipairs { 2, 0 } do
      local copy = support.folder() .. "/copy"
      assert.equal(0, support.shell(("cp -r %s %s"):format(out, copy)))
      local ended, _, err = run(ranks, { "resume", copy, "--quiet", "--allow-changed-recipe" },
        { fault = "none", micro = 1 })
      assert.equal(0, ended, err)
      assert.is_true(same(one_rank { sequences = 6 }, copy) > 200)
    end
  end)

  mpi_it("when its hook raises an error", function()
    local _, err = fails({ fault = "hook" }, "this hook is broken", "rank 1 failed: ")
    for _, line in pairs(complaints(err)) do
      assert.equal(1, select(2, line:gsub("%(hook pg%.", "")), line)
    end
  end)

  for fault, text in pairs { set = "lm_head.weight: lr = 1",
    edit = "lm_head.weight: edited, weights", optimizer_of_one = "lm_head.weight: adamw" } do
    for _, at in ipairs { 0, 3 } do
      mpi_it(("when it alone changes something: %s at update %d"):format(fault, at), function()
        local line = "EPEER: rank 1 changed " .. text
        local _, err = fails({ fault = fault, at = at }, line, line)
        assert.matches((", rank 0 nothing, at update %d: expected the same on all ranks"):format(
          at), err)
      end)
    end
  end

  mpi_it("when its optimizer raises an error", function()
    fails({ fault = "optimizer" }, "this optimizer is broken", "rank 1 failed: ")
  end)

  mpi_it("when a hook calls os.exit", function()
    local text = "os.exit was called before the run ended"
    fails({ fault = "exit" }, text, "rank 1 failed: ")
  end)

  mpi_it("when a hook ends the process", function()
    fails({ fault = "vanish" }, nil, "rank 1 failed: the process ended before the run did")
  end)

  mpi_it("when it does not come", function()
    fails({ fault = "hang", timeout = 2.0 }, nil, "rank 1 did not come to ", 1)
  end)

  mpi_it("when its data ends", function()
    local folder = support.folder()
    for rank = 0, 2 do
      assert.equal(0, support.shell(("mkdir %s/place%d; cp -r %s %s/place%d/data"):format(folder,
        rank, support.golden, folder, rank)))
    end
    local before = core.clock()
    local codes, err = codes_of(3, folder, ("cd %s/place$OMPI_COMM_WORLD_RANK; "):format(folder)
      .. words_of({ "train", recipe, "--quiet", "--out", folder .. "/run" }, { sequences = 6,
        golden = support.golden, data = "data", fault = "end", updates = 4000, last = 4000 }))
    assert.is_true(core.clock() - before < 15)
    local found = complaints(err)
    for rank = 0, 2 do
      assert.equal(1, codes[rank], err)
      assert.is_truthy(found[tostring(rank)]:find("changed while in use", 1, true), err)
      assert.is_truthy(found[tostring(rank)]:find(rank == 1 and "EFORMAT" or "rank 1 failed: ", 1,
        true), err)
    end
  end)

  mpi_it("when it alone makes a call that takes all of them", function()
    fails({ fault = "alone", timeout = 20.0 }, "rank 1 is at the slots of lm_head.weight while",
      "rank 1 is at the slots of lm_head.weight while rank 0 is at the end of update 3")
  end)

  mpi_it("when it is killed, through the launcher", function()
    local _, code = train(3, { fault = "kill", sequences = 6 })
    assert.is_true(code ~= 0 and code ~= 124, "exit code " .. code)
  end)
end)

describe("ranks stop together", function()
  mpi_it("with one checkpoint after a signal to one of them", function()
    local out, code, _, err = train(3, { fault = "signal", sequences = 6, rank = 2 })
    assert.equal(75, code, err)
    local summary = support.json(out .. "/summary.json")
    assert.equal("stopped", summary.status)
    assert.equal("SIGTERM", summary.reason)
    assert.equal(3, summary.update)
    assert.same({ "00000003" }, core.fs.list(out .. "/checkpoints"))
    local ended, _, text = run(2, { "resume", out, "--quiet" }, { micro = 1, fault = "none" })
    assert.equal(1, ended) -- another recipe
    assert.matches("the recipe is not the one", text)
    ended, _, text = run(2, { "resume", out, "--quiet", "--allow-changed-recipe" },
      { micro = 1, fault = "none" })
    assert.equal(0, ended, text)
    assert.is_true(same(one_rank { sequences = 6 }, out) > 200)
  end)

  mpi_it("when a hook of one of them asks for it", function()
    local out, code, _, err = train(3, { fault = "stop", sequences = 6 })
    assert.equal(0, code, err)
    assert.equal(3, support.json(out .. "/summary.json").update)
    out, code, _, err = train(2, { fault = "stop", sequences = 6, micro = 1, at = 0 })
    assert.equal(0, code, err)
    assert.equal(0, support.json(out .. "/summary.json").update)
  end)

  mpi_it("at a time limit", function()
    local out, code, _, err = train(2, { updates = 100000, last = 100000, every = 100000,
      sequences = 6, micro = 1 }, "--max-time", "1")
    assert.equal(75, code, err)
    local summary = support.json(out .. "/summary.json")
    assert.equal("--max-time", summary.reason)
    assert.is_true(summary.update > 0)
    assert.same({ ("%08d"):format(summary.update) }, core.fs.list(out .. "/checkpoints"))
    code, _, err = run(3, { "resume", out, "--quiet", "--allow-changed-recipe", "--max-updates",
      tostring(summary.update + 2) }, { sequences = 6, updates = 100000, every = 100000 })
    assert.equal(0, code, err)
    assert.equal(summary.update + 2, support.json(out .. "/summary.json").update)
  end)
end)

describe("ranks that cannot train together are refused", function()
  -- Every rank says why, and nothing is written.
  local function refused(out, code, err, text)
    assert.is_true(code ~= 0 and code ~= 124, "exit code " .. code)
    local found, count = complaints(err)
    assert.is_true(count >= 1, err)
    for _, line in pairs(found) do assert.is_truthy(line:find(text, 1, true), line) end
    assert.is_nil(core.fs.kind(out))
    return count
  end

  mpi_it("when their number does not divide the batch", function()
    local out, code, _, err = train(3, {})
    refused(out, code, err, "batch.sequences = 8 cannot be split over 3 ranks in micro-batches of "
      .. "2: expected a multiple of 6")
    out, code, _, err = train(3, { micro = 0 })
    refused(out, code, err, "batch.sequences = 8 cannot be split over 3 ranks: expected a multiple "
      .. "of 3")
  end)

  mpi_it("when their recipes differ", function()
    local out = support.folder() .. "/run"
    local function words(updates)
      return words_of({ "train", recipe, "--out", out }, { updates = updates })
    end
    local code, _, err = support.shell(("cd %s && %s%s -n 1 %s : -n 1 %s"):format(
      support.quote(support.root), environment, start, words(40), words(41)))
    assert.equal(2, refused(out, code, err,
      "of rank 1 is not that of rank 0 (set updates=41, not set updates=40)"))
  end)

  -- Two ranks with words of their own, in folders of their own.
  local function apart(first, second, places)
    return support.shell(("cd %s && %s%s -n 1 %s%s : -n 1 %s%s"):format(support.quote(support.root),
      environment, start, places and places[1] or "", first, places and places[2] or "", second))
  end

  mpi_it("when one of them only plans", function()
    local out = support.folder() .. "/run"
    local code, _, err = apart(words_of { "train", recipe, "--out", out },
      words_of { "train", recipe, "--dry-run" })
    assert.equal(2, refused(out, code, err,
      "of rank 1 is not that of rank 0 (train --dry-run, not train)"))
  end)

  mpi_it("when they compute in different types", function()
    local out = support.folder() .. "/run"
    local code, _, err = apart(words_of { "train", recipe, "--out", out },
      words_of { "train", recipe, "--out", out, "--compute", "bf16" })
    assert.equal(2, refused(out, code, err, "(--compute bf16, not --compute fp32)"))
  end)

  mpi_it("when their tokens or initial weights differ", function()
    local folder = support.folder()
    local out = folder .. "/run"
    for _, place in ipairs { "a", "b" } do
      assert.equal(0, support.shell(("mkdir %s/%s; cp -r %s %s/%s/data"):format(folder, place,
        support.golden, folder, place)))
    end
    local places = { ("env -C %s/a "):format(folder), ("env -C %s/b "):format(folder) }
    local words = words_of({ "train", recipe, "--out", out }, { golden = support.golden,
      data = "data", init = "data/init.safetensors", last = 3, updates = 3 })
    local function spoil(name)
      local path = ("%s/b/data/%s"):format(folder, name)
      local text = support.read(path)
      local last = text:byte(#text - 1)
      support.write(path, text:sub(1, #text - 2) .. string.char(last ~ 1) .. text:sub(-1))
    end
    spoil "fineweb_val_000000.bin"
    local code, _, err = apart(words, words, places)
    assert.equal(2, refused(out, code, err, "the data or an option of rank 1 is not that of rank 0 "
      .. "(tokens "))
    spoil "fineweb_val_000000.bin"
    spoil "init.safetensors"
    code, _, err = apart(words, words, places)
    assert.equal(2, refused(out, code, err, "the weights of rank 1 is not that of rank 0"))
    spoil "init.safetensors"
    code, _, err = apart(words, words, places)
    assert.equal(0, code, err)
  end)

  mpi_it("when one of them does not come to the start", function()
    local folder = support.folder()
    support.write(folder .. "/hang.lua", ([[
      local core = require "perigee.core"
      if core.launch().rank == 1 then os.execute("kill -STOP $PPID") end
      return dofile(%q)]]):format(recipe))
    local before = core.clock()
    local code, _, err = run(2, { "train", folder .. "/hang.lua", "--rank-timeout", "2", "--out",
      folder .. "/run" })
    assert.is_true(code ~= 0 and code ~= 124, "exit code " .. code)
    assert.is_truthy(complaints(err)["0"]:find(
      "another rank did not come to the start of MPI within 2 s", 1, true), err)
    assert.is_true(core.clock() - before < 30)
  end)

  mpi_it("when the run directory exists", function()
    local out = support.folder()
    local code, _, err = run(2, { "train", recipe, "--out", out })
    assert.equal(1, code)
    local found = complaints(err)
    assert.matches("EEXIST", found["0"])
    assert.matches("rank 0 failed: EEXIST", found["1"])
  end)

  it("when nothing connects them", function()
    local code, _, err = support.shell(("cd %s && RANK=0 WORLD_SIZE=2 %s"):format(
      support.quote(support.root), words_of { "train", recipe, "--device", "cpu" }))
    assert.equal(1, code)
    assert.is_true(support.one_line(err, "rank 0: ", "WORLD_SIZE = 2 on the cpu",
      "mpirun or srun"), err)
    code, _, err = support.shell(("cd %s && RANK=2 WORLD_SIZE=2 %s"):format(
      support.quote(support.root), words_of { "train", recipe }))
    assert.equal(1, code)
    assert.is_true(support.one_line(err, "RANK = 2 with WORLD_SIZE = 2 is not allowed"), err)
  end)
end)
