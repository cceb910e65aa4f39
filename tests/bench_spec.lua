-- perigee bench and train --profile: the fields are there and sane. No time is judged.
local support = require "lua_support"
local core = require "perigee.core"

local PARTS = { "head", "attention", "gemm", "elementwise", "embedding", "optimizer",
  "communication", "data_wait", "rest" }
local tiny = { "--layers", "1", "--width", "16", "--heads", "2", "--head-dim", "8", "--vocab", "97",
  "--context", "8", "--sequences", "4" }

local temporary -- where the synthetic data lies meanwhile

local function perigee(words)
  local line = {}
  for i, word in ipairs(words) do line[i] = support.quote(word) end
  return support.shell(("TMPDIR=%s OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 %s bench %s"):format(
    support.quote(temporary), support.quote(support.program), table.concat(line, " ")))
end

local function bench(...)
  local words = table.move(tiny, 1, #tiny, 1, {})
  for _, word in ipairs { ... } do words[#words + 1] = word end
  return perigee(words)
end

local function positive(value, name)
  assert(type(value) == "number" and value > 0 and value < math.huge, name)
end

local function measured(...)
  local code, out, problem = bench("--json", ...)
  assert.equal(0, code, problem)
  assert.equal("", problem)
  return assert(core.json.decode(out))
end

describe("perigee bench", function()
  setup(function() temporary = support.folder() end)
  after_each(function() assert.same({}, core.fs.list(temporary)) end)
  teardown(support.clean)

  it("leaves no folder behind when a signal ends it", function()
    local words = {}
    for i, word in ipairs(tiny) do words[i] = support.quote(word) end
    local code, out, problem = support.shell(([[cd %s; export TMPDIR=$PWD
      OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 %s bench %s --updates 100000000 & pid=$!
      for i in $(seq 600); do ls perigee-bench-* 2>&1 | grep -q _train_ && break; sleep 0.05; done
      kill -INT $pid; wait $pid; echo $?]]):format(support.quote(temporary),
      support.quote(support.program), table.concat(words, " ")))
    assert.equal(0, code)
    assert.matches("1\n$", out)
    assert.is_true(support.one_line(problem, "ended by SIGINT"), problem)
  end)

  it("measures whole updates", function()
    local result = measured("--updates", "2", "--micro", "2", "--head", "adamw", "--head",
      "rownorm", "--device", "cpu", "--threads", "1")
    assert.equal("cpu", result.machine.device)
    assert.equal(1, result.machine.threads)
    assert.equal(core.version, result.machine.perigee)
    for _, name in ipairs { "bytes_per_second", "fp32_flops_per_second",
      "bf16_flops_per_second" } do
      positive(result.peak[name], name)
    end
    assert.same({}, result.kernels)
    assert.equal(2, #result.cases)
    for i, case in ipairs(result.cases) do
      assert.equal(({ "adamw", "rownorm" })[i], case.head)
      assert.equal("fp32", case.compute)
      assert.equal(97, case.model.vocab)
      for _, name in ipairs { "tokens_per_second", "seconds_per_update", "flops_per_token",
        "flops_per_second", "utilisation", "peak_memory_bytes", "profile_seconds",
        "newton_schulz_seconds", "diameter_seconds", "diameter_share",
        "diameter_work", "all_pairs_work", "all_pairs_seconds", "all_pairs_utilisation" } do
        positive(case[name], name)
      end
      assert(case.data_wait_seconds >= 0)
      -- 1 block: 4 16 16 + 3 16 64; head 97 16. Attention 12 x 16 x 8 / 2.
      assert.equal(6 * (1024 + 3072 + 1552) + 768, case.flops_per_token)
      local sum, flops, bytes = case.parts.between.share, 0, 0
      assert(sum >= 0)
      for _, part in ipairs(PARTS) do
        local one = case.parts[part]
        assert(one.share >= 0 and one.share < 1, part)
        assert(math.abs(one.seconds / case.profile_seconds - one.share) < 1e-9, part)
        sum, flops, bytes = sum + one.share, flops + one.flops, bytes + one.bytes
        -- No operation's floor is below that of the sums, nor above that of both together.
        local moving = one.bytes / result.peak.bytes_per_second
        local computing = one.flops / result.peak.fp32_flops_per_second
        assert(one.floor_seconds >= math.max(moving, computing) * (1 - 1e-9), part)
        assert(one.floor_seconds <= (moving + computing) * (1 + 1e-9), part)
      end
      assert(math.abs(sum - 1) < 1e-9, sum)
      for _, part in ipairs { "head", "attention", "gemm", "elementwise", "optimizer" } do
        for _, name in ipairs { "seconds", "bytes", "floor_seconds" } do
          positive(case.parts[part][name], part)
        end
        if part ~= "elementwise" then positive(case.parts[part].flops, part) end
      end
      for _, row in ipairs(case.operations) do
        flops, bytes = flops - row.flops, bytes - row.bytes
      end
      assert.equal(0, math.floor(math.abs(flops)) + math.floor(math.abs(bytes)))
      assert(#case.operations > 10)
      for j, row in ipairs(case.operations) do
        positive(row.calls, "calls")
        assert(j == 1 or row.seconds <= case.operations[j - 1].seconds)
      end
    end
  end)

  it("times every kernel against its floor", function()
    local result = measured("--kernels", "--updates", "0", "--compute", "bf16")
    assert.same({}, result.cases)
    assert(#result.kernels > 30)
    local seen = {}
    for _, kernel in ipairs(result.kernels) do
      seen[kernel.name] = true
      for _, name in ipairs { "seconds", "floor_seconds", "ratio", "bytes", "bytes_per_second",
        "repeats" } do
        positive(kernel[name], kernel.name .. "." .. name)
      end
      assert.matches("^[bf][fp]", kernel.type)
      assert.matches("%d", kernel.shape)
      local bytes = kernel.bytes / result.peak.bytes_per_second
      local flops = kernel.flops / result.peak[kernel.type .. "_flops_per_second"]
      assert(math.abs(math.max(bytes, flops) / kernel.floor_seconds - 1) < 1e-9)
      assert.equal(flops > bytes and "flops" or "bytes", kernel.floor_by)
      assert(math.abs(kernel.seconds / kernel.floor_seconds / kernel.ratio - 1) < 1e-9)
    end
    assert(seen.gemm and seen.attention_backward and seen.adamw and seen.diameter)
  end)

  it("computes in bf16", function()
    local case = measured("--updates", "1", "--warmup", "0", "--compute", "bf16").cases[1]
    assert.equal("bf16", case.compute)
    positive(case.utilisation, "utilisation")
  end)

  it("prints a table", function()
    local code, out = bench("--updates", "1", "--warmup", "0")
    assert.equal(0, code)
    assert.matches("tokens/s", out)
    assert.matches("optimizer", out)
    assert.matches("fp32 peak", out)
    code, out = bench("--updates", "0", "--kernels")
    assert.equal(0, code)
    assert.matches("rmsnorm_forward +32 x 16", out)
  end)

  -- PyTorch is played by a program that notes how it is called.
  it("stands beside a peer", function()
    local folder = support.folder()
    local function python(program)
      support.write(folder .. "/python3", "#!/bin/sh\n" .. program)
      assert(os.execute("chmod +x " .. support.quote(folder .. "/python3")))
    end
    python(([[
      echo "$@" >>%s/calls
      case "$*" in *"compute bf16"*) speed=1000 ;; *) speed=2000 ;; esac
      echo '{"torch": "2.x", "cases": [{"name": "torch eager", "compute": "x",' \
        '"tokens_per_second": 500}, {"name": "torch compiled", "compute": "x",' \
        '"tokens_per_second": '$speed'}]}'
    ]]):format(folder))
    assert(core.fs.make(folder .. "/tools"))
    support.write(folder .. "/tools/torch_bench.py", "") -- found when the source has none
    local words = table.concat(tiny, " ")
    local function compare(options)
      local code, out, problem = support.shell(("cd %s && PATH=.:$PATH TMPDIR=%s "
        .. "OMP_NUM_THREADS=1 %s bench %s --updates 1 --warmup 0 --device cpu --peer torch %s")
        :format(folder, temporary, support.program, words, options))
      return code, code == 0 and assert(core.json.decode(out)).cases or out, problem
    end
    local code, cases, problem = compare("--json --rounds 2")
    assert.equal(0, code, problem)
    assert.equal(2, #cases)
    for i, kind in ipairs { "best", "fp32" } do
      assert.matches("^" .. kind .. ":d=16", cases[i].name)
      assert.equal(2000, cases[i].peer_tokens_per_second)
      assert.equal("torch compiled", cases[i].peer.name)
      assert(math.abs(cases[i].ratio_to_peer - cases[i].tokens_per_second / 2000) < 1e-9)
    end
    assert.equal("fp32", cases[2].compute)
    assert(cases[1].tokens_per_second >= cases[2].tokens_per_second)
    local calls = support.read(folder .. "/calls")
    assert.equal(4, select(2, calls:gsub("\n", "")))
    assert.matches("torch_bench%.py %-%-json %-%-compute fp32 %-%-head rownorm", calls)
    assert.matches("%-%-head%-dim 8 %-%-mlp 64 %-%-vocab 97 %-%-context 8 %-%-threads 1\n", calls)
    python "exit 3"
    code, cases, problem = compare("--json --compute fp32")
    assert.equal(1, code, cases)
    assert(support.one_line(problem, "the peer ended with status 3"))
  end)

  it("refuses what cannot be", function()
    local function refused(code, parts, ...)
      local status, out, problem = bench(...)
      assert.equal(code, status, out .. problem)
      assert(support.one_line(problem, table.unpack(parts)))
    end
    refused(2, { "unknown option --kernl", "did you mean '--kernels'" }, "--kernl")
    refused(2, { "--micro 3 is not allowed: expected a divisor of --sequences 4" }, "--micro", "3")
    refused(2, { '--head "muon" is not allowed' }, "--head", "muon")
    refused(2, { "model.preset", "190m, 380m, 640m" }, "--model", "12m")
    local status, _, problem = perigee { "--vocab", "70000" }
    assert.equal(2, status)
    assert(support.one_line(problem, "--vocab 70000 is not allowed: expected 2 to 65536"))
    status, _, problem = perigee { "--head-dim", "7" }
    assert.equal(2, status)
    assert(support.one_line(problem, "head_dim", "7"))
    status, _, problem = perigee { "--layers", "4096", "--width", "1048576" }
    assert.equal(1, status)
    assert(support.one_line(problem, "ENOMEM"))
  end)
end)

describe("train --profile", function()
  local folder
  setup(function()
    folder = support.folder()
    support.data(folder .. "/data")
    support.write(folder .. "/recipe.lua", [[
      local pg = require "perigee"
      return pg.recipe {
        model = { layers = 1, width = 16, heads = 2, head_dim = 8, context = 8 },
        data = pg.data.shards { path = "data" }, batch = { sequences = 4, micro = 2 }, updates = 5,
        optimizers = { { role = { "embedding", "backbone", "head" }, pg.optim.adamw() } },
      }]])
  end)
  teardown(support.clean)

  local function train(...)
    local code, _, problem = support.perigee({ "train", "recipe.lua", ... }, folder)
    assert.equal(0, code, problem)
    return problem
  end
  local function weights(out)
    return assert(core.fs.sha256(("%s/%s/checkpoints/00000005/model.safetensors"):format(folder,
      out)))
  end

  it("writes a trace of the third update and changes no weight", function()
    local said = train("--out", "profiled", "--profile")
    assert.matches("profile of update 3", said)
    local trace = support.json(folder .. "/profiled/profile.json")
    local operations = 0
    for _, event in ipairs(trace.traceEvents) do
      if event.ph == "X" and event.tid == 2 then operations = operations + 1 end
    end
    assert(operations > 30)
    train("--out", "plain", "--quiet")
    assert.equal(weights("plain"), weights("profiled"))
    assert.is_false(core.fs.exists(folder .. "/plain/profile.json"))
  end)

  it("takes a file, and the last update when there are fewer", function()
    local said = train("--out", "short", "--max-updates", "2", "--profile=trace.json")
    assert.matches("profile of update 2", said)
    assert(support.json(folder .. "/trace.json").traceEvents)
  end)

  it("says before the first update when the file cannot be written", function()
    local resumed = folder .. "/resumed"
    train("--out", "resumed", "--max-updates", "2", "--quiet")
    core.fs.make(folder .. "/a_folder")
    for _, file in ipairs { "/no/such/folder/x.json", "a_folder", "/dev/full" } do
      local option = "--profile=" .. file
      for _, words in ipairs { { "train", "recipe.lua", "--out", "nowhere", option },
        { "resume", resumed, option } } do
        local code, out, problem = support.perigee(words, folder)
        assert.equal(1, code)
        assert.is_true(support.one_line(problem, file))
        assert.is_falsy(out:find("update 1", 1, true))
      end
      assert.is_false(core.fs.exists(folder .. "/nowhere"))
    end
    assert.is_true(core.fs.exists("/dev/full"))
    assert.same({ "00000002" }, core.fs.list(resumed .. "/checkpoints"))
    assert.equal(75, support.perigee({ "resume", resumed, "--profile=trace.json", "--max-time",
      "0.000001", "--quiet" }, folder))
    assert(support.json(folder .. "/trace.json").traceEvents) -- of the test before
    for _, option in ipairs { "--profile=", "--out=" } do
      local code, _, problem = support.perigee({ "train", "recipe.lua", option }, folder)
      assert.equal(2, code)
      assert.is_true(support.one_line(problem, option:sub(1, -2) .. ' "" is not allowed'))
    end
  end)
end)
