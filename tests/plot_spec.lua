-- plot(…) at the prompt: what is computed, and what gnuplot makes of it.
local support = require "lua_support"
local plot = require "perigee.repl.plot"
local gnuplot = require "perigee.repl.gnuplot"
local core = support.core

local folder, out

local function eval(...)
  local words = { "repl", out }
  for _, code in ipairs { ... } do
    words[#words + 1] = "-e"
    words[#words + 1] = code
  end
  return support.perigee(words, folder)
end

setup(function()
  folder = support.folder()
  local data = support.text_data(folder .. "/text")
  out = folder .. "/run"
  local code, _, err = support.perigee { "train", "recipes/tiny.lua", "--set", "data=" .. data,
    "--set", "tokens=128", "--out", out, "--quiet" }
  assert(code == 0, err)
end)
teardown(support.clean)

describe("plots compute", function()
  it("histograms that count every value once", function()
    local rows = plot.histogram({ 0, 0.1, 0.99, 1, 2, 3.5, 4 }, 4)
    assert.same({ { 0.5, 3 }, { 1.5, 1 }, { 2.5, 1 }, { 3.5, 2 } }, rows)
    assert.same({ { 2, 3 } }, plot.histogram({ 2, 2, 2 }, 10))
  end)

  it("the two directions of largest variance", function()
    -- Rows c + s q1 + t q2 with orthonormal q1, q2 in 3 dimensions, s and t uncorrelated, of
    -- variance 4 and 1, and nothing else: coordinates are s and t up to a sign.
    local ctx <close> = assert(core.context { threads = 1 })
    local q1, q2 = { 2 / 3, 2 / 3, 1 / 3 }, { -2 / 3, 1 / 3, 2 / 3 }
    local rows, s, t = {}, {}, {}
    for i, pair in ipairs { { 2, 1 }, { -2, 1 }, { 2, -1 }, { -2, -1 } } do
      s[i], t[i] = pair[1], pair[2]
      rows[i] = {}
      for k = 1, 3 do rows[i][k] = 5 + s[i] * q1[k] + t[i] * q2[k] end
    end
    local x <close> = core.tensor(ctx, rows)
    local coordinates, shares = plot.principal(x)
    -- fp32 numbers near 7: 1e-6; a direction within 1e-5.
    assert.is_true(math.abs(shares[1] - 0.8) < 1e-5 and math.abs(shares[2] - 0.2) < 1e-5)
    for k, expected in ipairs { s, t } do
      local sign = coordinates[k][1] * expected[1] > 0 and 1 or -1
      for i = 1, 4 do
        assert.is_true(math.abs(sign * coordinates[k][i] - expected[i]) < 1e-4)
      end
    end
    -- One column, and rows that are all alike.
    local thin <close> = core.tensor(ctx, { { 1 }, { 3 } })
    assert.same({ 0, 0 }, plot.principal(thin)[2])
    local flat <close> = core.tensor(ctx, { { 1, 2 }, { 1, 2 } })
    assert.same({ 0, 0 }, select(2, plot.principal(flat)))
    support.collect()
  end)

  it("scripts in which no text is a command", function()
    local script = gnuplot.script { width = 80, height = 20, title = "it's\n`ls` \"x\"", series = {
      { rows = { { 1, 2, " a\tb\nEND_OF_DATA" } }, style = "labels" } } }
    assert.matches("set title 'it''s\\n`ls` \"x\"'", script, 1, true)
    assert.matches("1\t2\t␣a\\tb\\nEND_OF_DATA\nEND_OF_DATA\n", script, 1, true)
  end)
end)

describe("plots are drawn", function()
  it("in the terminal", function()
    local code, shown, err = eval("plot 'train/loss'", "plot { 1, 4, 9, width = 40, height = 10 }",
      "plot { histogram = inc:row_norms() }", "plot { scatter = head, labels = { tok ' the' } }")
    assert.equal(0, code, err)
    assert.matches("train/loss %*", shown)
    assert.matches("update\n", shown)
    assert.matches("first direction, %d+%.%d %% of the variance", shown)
    assert.matches("␣the", shown)
    assert.is_nil(shown:find("\27", 1, true))
  end)

  it("as wide as the terminal of the person who asked", function()
    local prompt = require("perigee.repl.workspace").new { out = function() end }
    for _, columns in ipairs { 50, 90 } do
      prompt.columns = columns
      local text = prompt:run("plot { 1, 4, 9 }").values[1].text
      local widest = 0
      for line in text:gmatch "[^\n]+" do widest = math.max(widest, utf8.len(line)) end
      assert.is_true(widest <= columns - 1 and widest > columns - 12, widest)
    end
  end)

  it("into files of three formats", function()
    local starts = { svg = "<?xml", pdf = "%PDF", png = "\137PNG" }
    for format, start in pairs(starts) do
      local code, shown, err = eval(("plot { scatter = inc, file = 'x.%s', title = 'x' }"):format(
        format))
      assert.equal(0, code, err)
      assert.equal(("written to %s/x.%s\n"):format(folder, format), shown)
      assert.equal(start, support.read(folder .. "/x." .. format):sub(1, #start))
    end
    -- Labels are texts of the picture.
    for labels, found in pairs { ["0"] = 0, ["{ tok ' the', 7 }"] = 1 } do
      local code, _, err = eval(("plot { scatter = inc, file = 'l.svg', labels = %s }"):format(
        labels))
      assert.equal(0, code, err)
      assert.equal(found, select(2, support.read(folder .. "/l.svg"):gsub(">␣the<", "")))
    end
  end)

  it("of several runs, and of steps in memory", function()
    local code, shown, err = support.perigee({ "repl", out .. "/checkpoints/00000010", out, "-e",
      "plot 'train/loss'", "--json", "-e", "step(10)", "-e",
      "local t = require('perigee.repl.plot').lines_of(a) return #t, t[#t]['progress/update']" },
      folder)
    assert.equal(0, code, err)
    assert.matches("run: train/loss", shown)
    assert.matches('"values": %[4, 20%]', shown)
  end)

  it("or say what is wrong", function()
    for code, part in pairs {
      ["plot 'train/los'"] = "did you mean 'train/loss'", ["plot {}"] = "a metric's name",
      ["plot { file = 'x.gif', 1, 2 }"] = "ends in .svg", ["plot { scater = head }"] = "scatter",
      ["plot { 1, 0/0 }"] = "finite", ["plot { x = { 1 }, y = { 1, 2 } }"] = "as many",
      ["plot { 1, 2, file = 'no/where/x.svg' }"] = "ENOENT", ["plot(3)"] = "a metric's name",
      ["plot { 0, -1, log = 'z' }"] = '"xy"',
    } do
      local status, _, err = eval(code)
      assert.equal(1, status, code)
      assert.is_truthy(err:find(part, 1, true), code .. ": " .. err)
    end
    local status, _, err = support.shell(("mkdir %s/bin; ln -s /bin/sh %s/bin/sh; PATH=%s/bin %s "
      .. "repl -e 'plot { 1, 2 }'"):format(folder, folder, folder, support.program))
    assert.equal(1, status)
    assert.matches("gnuplot%-nox", err)
  end)
end)
