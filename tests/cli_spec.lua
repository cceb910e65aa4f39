-- The program: commands, exit codes, one clear line per error, signals and time limits.
local support = require "lua_support"
local cli = require "perigee.cli"
local core = support.core

local data
local tiny = support.root .. "/recipes/tiny.lua"

local function train(out, ...)
  return support.perigee { "train", tiny, "--set", "data=" .. data, "--out", out, ... }
end

-- One line on standard error with these parts, nothing on standard output.
local function refused(code, parts, words, cwd)
  local got, _, err = support.perigee(words, cwd)
  assert.equal(code, got, err)
  for _, part in ipairs(parts) do
    assert.is_truthy(err:find(part, 1, true), ("%s not in: %s"):format(part, err))
  end
  assert.is_true(support.one_line(err), err)
end

setup(function() data = support.data() end)
teardown(support.clean)

describe("command lines", function()
  it("take durations in several forms", function()
    assert.equal(90, cli.duration("90"))
    assert.equal(1.5, cli.duration("1.5s"))
    assert.equal(600, cli.duration("10m"))
    assert.equal(5400, cli.duration("1h30m"))
    assert.equal(3723, cli.duration("01:02:03"))
    for _, bad in ipairs { "", "x", "10x", "1m1h", "-5", "1:2:3" } do
      assert.is_nil(cli.duration(bad))
    end
  end)

  it("have a help text for every command", function()
    for _, name in ipairs { "train", "resume", "fork", "eval", "generate", "export", "data", "repl",
      "attach", "run", "bench", "doctor" } do
      local code, out = support.perigee { name, "--help" }
      assert.equal(0, code)
      assert.matches("^usage: perigee " .. name, out)
      assert.is_nil(out:find(("[^\n]"):rep(101)), out)
    end
    local code, out = support.perigee { "--help" }
    assert.equal(0, code)
    assert.matches("doctor", out)
    code, out = support.perigee { "--version" }
    assert.equal(0, code)
    assert.equal("perigee " .. core.version .. "\n", out)
  end)

  it("are refused with 2 and a suggestion", function()
    refused(2, { "unknown command trian", "did you mean 'train'" }, { "trian" })
    refused(2, { "unknown option --ouut", "did you mean '--out'" }, { "train", tiny, "--ouut" })
    refused(2, { "unknown option --qui" }, { "train", tiny, "--qui" })
    refused(2, { "usage: perigee train RECIPE" }, { "train" })
    refused(2, { "--max-time \"x\" is not allowed" }, { "train", tiny, "--max-time", "x" })
    for _, bad in ipairs { "0", "1025", "99999", "1.5", "x" } do
      for _, words in ipairs { { "train", tiny }, { "resume", "runs" }, { "bench" },
        { "eval", "x" }, { "generate", "x", "--prompt", "y" }, { "repl" } } do
        words[#words + 1], words[#words + 2] = "--threads", bad
        refused(2, { ("--threads %s is not allowed: expected a whole number >= 1 and <= 1024")
          :format(("%q"):format(bad)) }, words)
      end
    end
    refused(2, { "--set novalue: expected name=value" }, { "train", tiny, "--set", "novalue" })
    refused(2, { "no parameter 'haed'; did you mean 'head'" },
      { "train", tiny, "--set", "haed=x" })
    refused(2, { 'head = "x" is not allowed: expected "rownorm" or "adamw"' },
      { "train", tiny, "--set", "head=x" })
    refused(2, { "--out: expected DIR after it" }, { "train", tiny, "--out" })
    refused(2, { "--out is given twice" }, { "train", tiny, "--out", "a", "--out", "b" })
    refused(2, { "--quiet takes no value" }, { "train", tiny, "--quiet=1" })
    local code = support.perigee {}
    assert.equal(2, code)
  end)
end)

describe("perigee train", function()
  it("prints the routing table, progress lines and the result", function()
    local out = support.folder() .. "/run"
    local code, stdout, err = train(out)
    assert.equal(0, code, err)
    assert.matches("parameter%s+shape%s+optimizer%s+peak lr%s+factor%s+decay", stdout)
    assert.matches("lm_head.weight%s+97 x 32%s+rownorm%s+0.0032", stdout)
    assert.matches("run directory: " .. out:gsub("%p", "%%%0"), stdout)
    assert.matches("finished at update 20, validation loss [%d.]+, diameter", stdout)
    assert.matches("update 20/20  loss [%d.]+  grad_norm [%d.]+  lr 8.000e%-04  [%d,]+ tok/s", err)
    assert.matches("update 20  val_loss [%d.]+  hilbert_rms", err)
    assert.is_nil(err:find("\27"))
    -- keep = 3 of the checkpoints at 5, 10, 15, 20.
    assert.same({ "00000010", "00000015", "00000020" }, core.fs.list(out .. "/checkpoints"))
  end)

  it("is silent with --quiet and numbers its directories", function()
    local folder = support.folder()
    for number = 1, 2 do
      local code, stdout, err = support.perigee({ "train", tiny, "--set", "data=" .. data,
        "--set", "updates=2", "--quiet" }, folder)
      assert.equal(0, code)
      assert.equal("", stdout .. err)
      assert.is_true(core.fs.exists(("%s/runs/tiny-%03d/summary.json"):format(folder, number)))
    end
  end)

  it("gives one clear line for bad input and leaves nothing", function()
    local folder = support.folder()
    local function bad(parts, recipe, ...)
      local words = { "train", recipe, "--out", folder .. "/run", ... }
      refused(1, parts, words, folder)
      assert.is_false(core.fs.exists(folder .. "/run"))
    end
    bad({ "ENOENT", "nothing.lua" }, folder .. "/nothing.lua")
    bad({ "data.path = \"/nowhere\" is not a folder", "tiny.lua:" }, tiny, "--set",
      "data=/nowhere")
    local text = support.read(tiny)
    local function variant(from, to)
      local start, stop = text:find(from, 1, true)
      assert(start, from)
      return support.write(folder .. "/r.lua", text:sub(1, start - 1) .. to .. text:sub(stop + 1))
    end
    bad({ "r.lua:", "unknown key 'bach'", "did you mean 'batch'" },
      variant("batch = ", "bach = "), "--set", "data=" .. data)
    bad({ "r.lua:", "lr = -1 is not allowed: expected a number >= 0" },
      variant("lr = 8e-3", "lr = -1"), "--set", "data=" .. data)
    bad({ "no entry updates", "lm_head.weight" },
      variant('{ role = "head",      head_optimizer[p.head] },', ""), "--set", "data=" .. data)
    -- A wrong header, a truncated shard, an id outside the vocabulary at the first batch.
    local broken = support.data(folder .. "/broken")
    local shard = broken .. "/text_train_000001.bin"
    local bytes = support.read(shard)
    support.write(shard, "X" .. bytes:sub(2))
    bad({ "EFORMAT", "text_train_000001.bin" }, tiny, "--set", "data=" .. broken)
    support.write(shard, bytes:sub(1, -3))
    bad({ "EFORMAT", "text_train_000001.bin" }, tiny, "--set", "data=" .. broken)
    refused(1, { "EEXIST", folder .. " exists already" },
      { "train", tiny, "--set", "data=" .. data, "--out", folder })
    refused(1, { "/proc/perigee" },
      { "train", tiny, "--set", "data=" .. data, "--out", "/proc/perigee/run" })
  end)

  it("names shard, offset, value and vocabulary of a token outside, and applies nothing",
    function()
      local folder = support.folder()
      local broken = folder .. "/data"
      core.fs.make(broken)
      support.shard(broken .. "/t_train_000000.bin", 129, function(i)
        return i == 128 and 65535 or i % 97 -- only the very last target
      end)
      support.shard(broken .. "/t_val_000000.bin", 600, function(i) return i % 97 end)
      support.write(broken .. "/dataset.json", '{"vocab": 97}')
      local code, _, err = support.perigee { "train", tiny, "--set", "data=" .. broken, "--out",
        folder .. "/run", "--quiet" }
      assert.equal(1, code)
      for _, part in ipairs { "t_train_000000.bin", "128", "65535", "97" } do
        assert.is_truthy(err:find(part, 1, true), err)
      end
      assert.is_true(support.one_line(err))
      local summary = support.json(folder .. "/run/summary.json")
      assert.equal(1, summary.exit_code)
      assert.equal(0, summary.update)
    end)

  it("ends with 1 and a summary when a recipe or a script calls os.exit", function()
    local folder = support.folder()
    local function recipe(hook)
      return support.write(folder .. "/r.lua", (support.read(tiny):gsub("hooks = {",
        "hooks = {\n" .. hook .. ",", 1)))
    end
    local code, _, err = support.perigee { "train",
      recipe("pg.at({ 3 }, function() os.exit(0) end)"), "--set", "data=" .. data, "--quiet",
      "--no-attach", "--out", folder .. "/hook" }
    assert.equal(1, code)
    assert.matches("\nperigee: [^\n]*r.lua:%d+: os.exit was called before the run ended: [^\n]*"
      .. "update 3%)\n$", err)
    assert.equal("failed", support.json(folder .. "/hook/summary.json").status)
    support.write(folder .. "/r.lua", "pcall(os.exit, 0)\nos.exit(0)\n")
    refused(1, { "r.lua:2: os.exit was called before the run ended" },
      { "train", folder .. "/r.lua", "--out", folder .. "/none" })
    refused(1, { "r.lua:2: os.exit was called before the run ended" },
      { "train", folder .. "/r.lua", "--dry-run" })
    -- In a script's own loop it leaves the loop: the run can be resumed.
    support.write(folder .. "/s.lua", ([[
local pg = require "perigee"
local run = assert(pg.open(%q, { out = %q, set = { data = %q } }))
for update in run:updates() do
  if update == 3 then os.exit(4) end
end]]):format(recipe("function() end"), folder .. "/loop", data))
    code, _, err = support.perigee { "run", folder .. "/s.lua" }
    assert.equal(4, code, err)
    local summary = support.json(folder .. "/loop/summary.json")
    assert.equal("stopped", summary.status)
    assert.equal("checkpoints/00000003", summary.checkpoint)
  end)

  it("shows the stack only when PERIGEE_TRACE asks", function()
    local recipe = support.write(support.folder() .. "/r.lua",
      "local function inner() error('deep') end\ninner()")
    refused(1, { "r.lua:1: deep" }, { "train", recipe })
    local code, _, err = support.shell(("PERIGEE_TRACE=1 %s train %s"):format(
      support.quote(support.program), support.quote(recipe)))
    assert.equal(1, code)
    assert.matches("stack traceback", err)
  end)

  it("stops at --max-time with 75 and resumes to the same end", function()
    local folder = support.folder()
    assert.equal(0, (train(folder .. "/whole", "--set", "updates=600", "--quiet")))
    local code, _, err = train(folder .. "/parts", "--set", "updates=600", "--max-time", "0.3s")
    assert.equal(75, code, err)
    assert.matches("perigee resume", err)
    local summary = support.json(folder .. "/parts/summary.json")
    assert.equal("stopped", summary.status)
    assert.equal("--max-time", summary.reason)
    assert.is_true(summary.update < 600)
    assert.equal(0, (support.perigee { "resume", folder .. "/parts", "--quiet" }))
    for _, file in ipairs { "model", "optimizer", "increment" } do
      local name = ("/checkpoints/00000600/%s.safetensors"):format(file)
      assert.equal(core.fs.sha256(folder .. "/whole" .. name),
        core.fs.sha256(folder .. "/parts" .. name))
    end
    -- A finished run has nothing left to do.
    local stdout
    code, stdout = support.perigee { "resume", folder .. "/parts" }
    assert.equal(0, code)
    assert.matches("is finished at update 600", stdout)
  end)
end)

describe("signals", function()
  -- A recipe with a slow hook (so that a signal lands in it), a long validation, or saves all the
  -- time.
  local function recipe(folder, hook, updates)
    return support.write(folder .. "/r.lua", ([[
local pg = require "perigee"
local core = require "perigee.core"
return pg.recipe { name = "signalled",
  model = { layers = 1, width = 16, heads = 2, head_dim = 8, context = 8 },
  data = { path = %q }, batch = { sequences = 4, micro = 2 }, updates = %d,
  log = { every = 3 }, schedule = pg.schedule.warmup_cosine { warmup = 0.5, floor = 0.1 },
  optimizers = { { role = { "embedding", "backbone", "head" }, pg.optim.adamw { lr = 1e-3 } } },
  hooks = { %s } }]]):format(data, updates or 12, hook))
  end

  -- Train in the background, send the signals after `ready` appears, wait for the end.
  local function interrupted(folder, path, signals)
    return support.shell(([[
cd %s; export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1
%s train %s --out run & pid=$!
for i in $(seq 1 200); do [ -e ready ] && break; sleep 0.05; done
for s in %s; do kill -$s $pid; sleep 0.02; done
wait $pid; exit $?]]):format(support.quote(folder), support.quote(support.program),
      support.quote(path), signals))
  end

  local waiting = [[
  function(run)
    if run.update == %d and not io.open("over") then
      io.open("ready", "w"):close()
      local till = core.clock() + 0.4
      while core.clock() < till do core.signals.pending() end
      io.open("over", "w"):close()
    end
  end]]

  local cases = {
    { "SIGTERM during warmup", waiting:format(3), "TERM" },
    { "SIGINT twice in a row", waiting:format(7), "INT INT INT" },
    { "SIGTERM while a validation is due",
      waiting:format(6) .. [[, pg.every(3, pg.diagnostics.validation { tokens = 700,
        hilbert_panel = 300 }), pg.every(3, pg.diagnostics.head_diameter())]], "TERM" },
    { "SIGTERM before a save", waiting:format(6) .. ", pg.checkpoint { every = 3 }", "TERM INT" },
    { "SIGTERM at the last update",
      waiting:format(12) .. ", pg.every(4, pg.diagnostics.head_diameter())", "TERM" },
  }
  for _, case in ipairs(cases) do
    it(case[1] .. ": one checkpoint, exit code 75, and an exact resume", function()
      local folder = support.folder()
      local path = recipe(folder, case[2])
      support.write(folder .. "/over", "")
      assert.equal(0, (support.perigee({ "train", path, "--out", "whole", "--quiet" }, folder)))
      core.fs.remove(folder .. "/over")
      local code, _, err = interrupted(folder, path, case[3])
      local last = case[1]:match("last update")
      local pending_hooks = case[2]:find("diagnostics", 1, true)
      assert.equal(last and not pending_hooks and 0 or 75, code, err)
      assert.equal("stopped", support.json(folder .. "/run/summary.json").status)
      code, _, err = support.perigee({ "resume", "run", "--quiet" }, folder)
      assert.equal(0, code, err)
      local name = "/checkpoints/00000012/model.safetensors"
      assert.equal(core.fs.sha256(folder .. "/whole" .. name),
        core.fs.sha256(folder .. "/run" .. name))
      -- Every line of the uninterrupted run is there, with the same values.
      local _, whole = support.metrics(folder .. "/whole")
      local _, parts = support.metrics(folder .. "/run")
      for update, line in pairs(whole) do
        for field, value in pairs(line) do
          if not field:match("^performance/") and not field:match("^memory/")
            and not field:match("seconds") then
            assert.same(value, (parts[update] or {})[field], field .. " at " .. update)
          end
        end
      end
    end)
  end
end)

describe("a run that is killed", function()
  it("resumes from a whole checkpoint wherever SIGKILL struck", function()
    local folder = support.folder()
    assert.equal(0, (train(folder .. "/whole", "--set", "updates=60", "--set",
      "checkpoint_every=1", "--quiet")))
    -- Some while it starts, the others soon after its first line, however busy the machine is.
    local command = ([[cd %s; export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1
      lines() { [ -e run/metrics.jsonl ] && wc -l <run/metrics.jsonl || echo 0; }
      before=$(lines); %s %%s & pid=$!
      [ %%d -lt 3 ] || until [ "$(lines)" -gt "$before" ] || ! kill -0 $pid; do sleep 0.01; done
      sleep %%.3f; kill -KILL $pid; wait $pid]]):format(support.quote(folder),
      support.quote(support.program))
    local start = ("train %s --set data=%s --set updates=60 --set checkpoint_every=1 --quiet "
      .. "--out run"):format(tiny, data)
    local kills = 0
    for i = 1, 8 do
      local words = core.fs.exists(folder .. "/run/state.json") and "resume run --quiet" or start
      -- Killed while it was made: no run directory worth keeping.
      if words == start then core.fs.remove(folder .. "/run") end
      local code = support.shell(command:format(words, i, 0.04 * i))
      if code == 137 then kills = kills + 1 end
    end
    assert.is_true(kills > 0)
    local code, _, err = support.perigee({ "resume", "run", "--quiet" }, folder)
    assert.equal(0, code, err)
    for _, file in ipairs { "model", "optimizer", "increment" } do
      local name = ("/checkpoints/00000060/%s.safetensors"):format(file)
      assert.equal(core.fs.sha256(folder .. "/whole" .. name),
        core.fs.sha256(folder .. "/run" .. name))
    end
    for _, name in ipairs(core.fs.list(folder .. "/run/checkpoints")) do
      assert.matches("^%d+$", name) -- nothing half-written stays
    end
  end)
end)

describe("logs", function()
  it("stay valid JSON with a decimal comma in the locale", function()
    local folder = support.folder()
    local made = support.shell(("localedef -i de_DE -f UTF-8 %s/de_DE.UTF-8"):format(folder))
    if made > 1 or not core.fs.exists(folder .. "/de_DE.UTF-8") then
      pending("localedef cannot make a locale here")
      return
    end
    local path = support.write(folder .. "/r.lua", ([[
local pg = require "perigee"
assert(os.setlocale("de_DE.UTF-8"))
assert(("%%.1f"):format(0.5) == "0,5")
return pg.recipe { model = { layers = 0, width = 16, heads = 1, context = 8 },
  data = { path = %q }, batch = { sequences = 2 }, updates = 3, log = { every = 1 },
  optimizers = { { role = { "embedding", "head" }, pg.optim.adamw { lr = 0.001 } } },
  hooks = { function(run) run:log("x", 0 / 0); run:log("y", -1 / 0); run:log("z", 2.5) end,
    pg.checkpoint { every = 1 } } }]]):format(data))
    local code, _, err = support.shell(("cd %s && LOCPATH=%s %s train r.lua --out run"):format(
      folder, folder, support.quote(support.program)))
    assert.equal(0, code, err)
    for _, file in ipairs { "metrics.jsonl", "config.json", "summary.json",
      "checkpoints/00000003/state.json" } do
      assert.is_nil(support.read(folder .. "/run/" .. file):find("%d,%d"), file)
    end
    local lines = support.metrics(folder .. "/run")
    assert.equal(core.json.null, lines[1].x)
    assert.equal(2.5, lines[1].z)
    assert.same({ "x", "y" }, lines[1].nonfinite)
    local resumed = support.shell(("cd %s && LOCPATH=%s %s resume run"):format(folder, folder,
      support.quote(support.program)))
    assert.equal(0, resumed)
    assert.is_truthy(path)
  end)
end)

describe("the other commands", function()
  local run

  setup(function()
    run = support.folder() .. "/run"
    assert.equal(0, (train(run, "--quiet")))
  end)

  it("eval reports checkpoints on one panel", function()
    local code, out, err = support.perigee { "eval", run, run .. "/checkpoints/00000010",
      "--tokens", "256", "--micro", "4", "--panel", "256", "--json" }
    assert.equal(0, code, err)
    local rows = {}
    for line in out:gmatch("[^\n]+") do rows[#rows + 1] = core.json.decode(line) end
    assert.equal(2, #rows)
    local _, lines = support.metrics(run)
    for i, update in ipairs { 20, 10 } do
      assert.equal(update, rows[i].update)
      for _, name in ipairs { "validation/loss", "validation/hilbert_step/rms",
        "diagnostics/lm_head_step/diameter_exact", "validation/hilbert_step/panel",
        "validation/tokens" } do
        local expected, got = lines[update][name], rows[i][name]
        if type(expected) == "number" then
          -- The same kernels on other batch sizes: equal to rounding.
          assert.is_true(math.abs(expected - got) <= 5e-6 * expected, name)
        else
          assert.equal(expected, got)
        end
      end
    end
    code, out = support.perigee { "eval", run }
    assert.equal(0, code)
    assert.matches("checkpoint%s+update%s+val loss%s+diameter%s+Hilbert RMS", out)
    refused(1, { "ENOENT", "/nowhere is not a folder" }, { "eval", "/nowhere" })
    refused(1, { "holds no valid checkpoint" }, { "eval", data })
    refused(1, { "EDATA", "holds" }, { "eval", run, "--tokens", "100000000" })
  end)

  it("data check validates every token and counts epochs", function()
    local code, out, err = support.perigee { "data", "check", data, "--sequences", "4",
      "--context", "8" }
    assert.equal(0, code, err)
    assert.matches("train: 2 shards, 5,000 tokens, largest id 96", out)
    assert.matches("digest: %x+", out)
    assert.matches("vocabulary: 97 %(dataset.json%)", out)
    local expected = (2999 // 8) // 4 + (1999 // 8) // 4
    assert.matches("updates per epoch: " .. expected, out)
    local folder = support.folder()
    support.data(folder)
    support.shard(folder .. "/text_val_000001.bin", 50, function(i) return i == 49 and 97 or 0 end)
    local _
    code, _, err = support.perigee { "data", "check", folder }
    assert.equal(1, code)
    assert.matches("text_val_000001.bin: token 97 at offset 49 is outside the vocabulary of 97",
      err)
    refused(2, { "usage: perigee data prepare|check" }, { "data" })
    refused(2, { "expected --out DIR" }, { "data", "prepare", "--text", tiny })
    refused(2, { "not both" }, { "data", "prepare", "--text", tiny, "--out", "x", "--tokenizer",
      "t", "--vocab-size", "300" })
  end)

  it("doctor says what the machine has", function()
    local code, out = support.perigee { "doctor" }
    assert.equal(0, code)
    for _, name in ipairs { "device", "threads", "openblas mode", "cpu level", "limits" } do
      assert.is_truthy(out:find("\n" .. name, 1, true), name)
    end
  end)

  it("run gives a script the module and its arguments", function()
    local folder = support.folder()
    support.write(folder .. "/beside.lua", "return 'beside'")
    local script = support.write(folder .. "/s.lua", [[#!/usr/bin/env perigee
local pg = require "perigee"
print(pg.version, arg[0]:match("[^/]+$"), arg[1], (require "beside"), ...)
return tonumber(arg[2])]])
    local code, out = support.perigee { "run", script, "--flag", "7" }
    assert.equal(7, code)
    assert.equal(core.version .. "\ts.lua\t--flag\tbeside\t--flag\t7\n", out)
    support.write(script, "error({})")
    refused(1, { "an error object of type table" }, { "run", script })
    refused(1, { "ENOENT", "absent.lua" }, { "run", folder .. "/absent.lua" })
  end)

  it("data prepare makes what training and generate need", function()
    local folder = support.folder()
    local some = { "the", "light", "of", "a", "day", "was", "good" }
    local words = {}
    for i = 1, 3000 do words[i] = some[i * i % 7 + 1] end
    support.write(folder .. "/a.txt", table.concat(words, " "))
    support.write(folder .. "/b.txt", "Let there be light. " .. ("And there was. "):rep(200))
    local code, out, err = support.perigee({ "data", "prepare", "--text", "a.txt", "b.txt",
      "--out", "d", "--vocab-size", "270" }, folder)
    assert.equal(0, code, err)
    assert.matches("^d: vocabulary 270, [%d,]+ training tokens in 1 shards", out)
    code, out, err = support.perigee({ "train", tiny, "--set", "data=d", "--set", "updates=4",
      "--set", "tokens=64", "--out", "run", "--quiet" }, folder)
    assert.equal(0, code, out .. err)
    assert.is_true(core.fs.exists(folder .. "/run/checkpoints/00000004/tokenizer.json"))
    local _, lines = support.metrics(folder .. "/run")
    assert.equal(2, #lines[4]["diagnostics/lm_head_step/diameter_text"])
    local function generate(...)
      local status, text, problem = support.perigee({ "generate", "run", "--prompt", "Let there",
        "--tokens", "12", ... }, folder)
      assert.equal(0, status, problem)
      assert.equal("Let there", text:sub(1, 9))
      return text
    end
    assert.equal(generate("--seed", "5"), generate("--seed", "5"))
    assert.equal(generate("--temperature", "0"), generate("--temperature", "0", "--seed", "9"))
    assert.equal(generate("--top-k", "1"), generate("--temperature", "0"))
    assert.equal(0, (support.perigee({ "generate", "run", "--tokens", "2" }, folder)))
    -- A folder that holds a data set already, a missing text.
    refused(1, { "EEXIST", "d" }, { "data", "prepare", "--text", "a.txt", "--out", "d",
      "--vocab-size", "270" }, folder)
    refused(1, { "none.txt" }, { "data", "prepare", "--text", "none.txt", "--out", "e",
      "--vocab-size", "270" }, folder)
    assert.is_false(core.fs.exists(folder .. "/e"))
    refused(2, { "--vocab-size \"100\" is not allowed" }, { "data", "prepare", "--text", "a.txt",
      "--out", "e", "--vocab-size", "100" }, folder)
  end)

  it("generate needs a tokenizer", function()
    refused(1, { "has no tokenizer.json" }, { "generate", run, "--prompt", "x" })
    refused(2, { "--temperature" }, { "generate", run, "--temperature", "-1" })
  end)
end)

describe("odd callers", function()
  it("two processes do not work in one run directory", function()
    local folder = support.folder()
    local code, _, err = support.shell(("cd %s; export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1; "
      .. "%s train %s --set data=%s --set updates=100000 --quiet --out run & pid=$!; "
      .. "until [ -e run/metrics.jsonl ]; do sleep 0.05; done; %s resume run --quiet; code=$?; "
      .. "kill $pid; wait $pid; exit $code"):format(support.quote(folder),
      support.quote(support.program), tiny, data, support.quote(support.program)))
    assert.equal(1, code)
    assert.matches("in use by another process", err)
  end)

  it("closed standard descriptors change nothing", function()
    local folder = support.folder()
    local code, _, err = support.shell(("cd %s; OMP_NUM_THREADS=1 %s train %s --set data=%s "
      .. "--set updates=3 --quiet --out run <&- >&- 2>&-"):format(support.quote(folder),
      support.quote(support.program), tiny, data))
    assert.equal(0, code, err)
    assert.equal("finished", support.json(folder .. "/run/summary.json").status)
  end)

  it("data check opens the tokenizer", function()
    local copy = support.data()
    support.write(copy .. "/tokenizer.json", "{")
    local code, _, err = support.perigee { "data", "check", copy }
    assert.equal(1, code)
    assert.matches("tokenizer.json, line", err)
  end)

  it("too little address space is one line, before OpenBLAS waits for it forever", function()
    local sanitized = support.shell(("grep -q '^PG_SANITIZE:STRING=.' %s"):format(
      support.quote(support.build .. "/CMakeCache.txt"))) == 0
    if sanitized then return pending("a sanitizer maps terabytes") end
    for _, limit in ipairs { "-v 150000", "-v 250000", "-d 100000" } do
      for _, words in ipairs { "--help", "--version", "train x.lua" } do
        local code, out, err = support.shell(("ulimit %s; timeout 20 %s %s"):format(limit,
          support.quote(support.program), words))
        assert.equal(1, code, limit .. err)
        assert.equal("", out)
        assert.is_true(support.one_line(err, "272 MiB of address space", "ulimit"))
      end
    end
    assert.equal(0, (support.shell("ulimit -v 1000000; " .. support.quote(support.program)
      .. " --help")))
  end)

  it("output that cannot be written is an error", function()
    local code = support.shell(support.quote(support.program) .. " doctor >/dev/full")
    assert.equal(1, code)
  end)

  it("weights that are not finite are never saved", function()
    local folder = support.folder()
    local path = support.write(folder .. "/diverges.lua", support.read(tiny:gsub("'", ""))
      :gsub("lr = 4e%-3", "lr = 1e40"))
    local code, _, err = support.perigee({ "train", path, "--set", "data=" .. data:gsub("'", ""),
      "--set", "updates=1", "--quiet", "--out", folder .. "/run" })
    assert.equal(1, code, err)
    assert.matches("ENONFINITE", err)
    assert.is_nil(core.fs.kind(folder .. "/run/checkpoints/00000001"))
  end)
end)
