-- perigee watch, on run directories that the test writes as a training would.
local support = require "lua_support"
local core = support.core

teardown(support.clean)

local function line(update, loss)
  return core.json.encode { ["progress/update"] = update, ["train/loss"] = loss,
    ["performance/tokens_per_second"] = 1234.0, ["performance/seconds_per_update"] = 2.0 } .. "\n"
end

-- A run that is at `updates` of 100; summary: what its end wrote.
local function run(folder, name, updates, summary)
  local dir = folder .. "/" .. name
  assert(core.fs.make(dir))
  support.write(dir .. "/recipe.lua", "")
  support.write(dir .. "/state.json", '{"recipe": "r", "params": {}}')
  support.write(dir .. "/config.json", '{"plan": {"updates": 100}}')
  local lines = {}
  for u = 1, updates do lines[u] = line(u, 5 - u / 50) end
  support.write(dir .. "/metrics.jsonl", table.concat(lines) .. '{"progress/update": 9')
  if summary then support.write(dir .. "/summary.json", core.json.encode(summary)) end
  return dir
end

local function watch(words)
  return support.perigee { "watch", table.unpack(words) }
end

describe("perigee watch", function()
  it("prints one picture where there is no terminal", function()
    local folder = support.folder()
    run(folder, "one", 50)
    run(folder, "two", 100, { status = "finished", exit_code = 0, update = 100 })
    run(folder, "three", 10, { status = "failed", exit_code = 5, reason = "the loss is nan" })
    local code, out, err = watch { folder }
    assert.equal(0, code, err)
    assert.matches("one +running +50/100 +4%.0000 +%- +1,234 +1m40s\n", out)
    assert.matches("two +finished +100/100 +3%.0000 +%- +1,234\n", out)
    assert.matches("three +failed +10/100 ", out)
    assert.matches("\nthree: the loss is nan\n", out)
    assert.matches("\n%* one   # three   %$ two\n", out)
    assert.matches("\n +train/loss\n", out)
    assert.not_matches("validation/loss", out)
  end)

  it("draws what was asked for, of the last updates", function()
    local folder = support.folder()
    local dir = run(folder, "one", 100)
    local _, whole = watch { dir, "--metric", "train/loss" }
    local _, last = watch { dir, "--metric", "train/loss", "--last", "10" }
    assert.matches(" 4%.8 |", whole)
    assert.not_matches(" 4%.8 |", last)
    assert.matches("\n *3%.15 |", last)
  end)

  it("refuses what it cannot watch in a line", function()
    local folder = support.folder()
    local dir = run(folder, "one", 5)
    for _, case in ipairs {
      { { folder .. "/none" }, 1, "ENOENT: .*none is not a folder: expected a run" },
      { { dir, "--metric", "loss" }, 2, "%-%-metric loss is no metric of these runs" },
      { { dir, "--every", "0" }, 2, "%-%-every \"0\" is not allowed" },
      { { dir, "--log", "z" }, 2, "%-%-log \"z\" is not allowed" },
      { {}, 2, "watch" },
    } do
      local code, _, err = watch(case[1])
      assert.equal(case[2], code, err)
      assert.matches(case[3], err)
    end
    assert.equal(0, (watch { support.folder() }))
  end)

  it("follows a run in a terminal to its end, and leaves the terminal as it was", function()
    local folder = support.folder()
    local dir = run(folder, "one", 20)
    support.write(folder .. "/later.sh", ([[
      sleep 1; printf '%%s' '0, "train/loss": 4.5}' >>%s/metrics.jsonl
      echo >>%s/metrics.jsonl; sleep 0.5
      echo '{"progress/update": 91, "train/loss": 1.25}' >>%s/metrics.jsonl; sleep 1
      echo '{"status": "finished", "exit_code": 0, "update": 100}' >%s/summary.json]])
      :format(dir, dir, dir, dir))
    os.execute(("sh %s/later.sh &"):format(folder))
    local code, out = support.terminal({ "< 20/100", "< 90/100", "< 91/100", "< 1.2500",
      "< finished" }, { "watch", dir, "--every", "0.1" })
    assert.equal(0, code, out)
    -- The last picture stays on the first screen.
    assert.matches("one +finished +91/100 +1%.2500", out:sub(-3000))
  end)

  it("ends with Ctrl-C", function()
    local dir = run(support.folder(), "one", 20)
    local code, out = support.terminal({ "< 20/100", "^C" }, { "watch", dir, "--every", "0.1" })
    assert.equal(0, code, out)
    assert.matches("one +running +20/100", out)
  end)
end)
