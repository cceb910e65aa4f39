-- What a run shows: a bar on a terminal, plain lines elsewhere, nothing with quiet.
local console = require "perigee.console"

-- A file-like object that collects what is written.
local function sink()
  local parts = {}
  return {
    write = function(self, ...)
      for _, part in ipairs { ... } do parts[#parts + 1] = part end
      return self
    end,
    flush = function() end,
    text = function() return table.concat(parts) end,
  }
end

local function made(options)
  options.out, options.err = sink(), sink()
  options.last = options.last or 10
  options.tokens_per_update = 1000
  return console.new(options), options.out, options.err
end

local step = { update = 5, loss = 4.5, seconds = 0.5, wall = 0.6, logged = true, grad_norm = 1,
  lr = 8e-3, peak_gib = 1.5 }

local between = {}
for k, v in pairs(step) do between[k] = v end
between.logged = false

describe("the console", function()
  it("formats durations and large numbers", function()
    assert.equal("12s", console.duration(11.6))
    assert.equal("3m20s", console.duration(200))
    assert.equal("1h02m", console.duration(3725))
    assert.equal("2d03h", console.duration(2 * 86400 + 3 * 3600))
    assert.equal("?", console.duration(0 / 0))
    assert.equal("1,234,567", console.grouped(1234567))
    assert.equal("999", console.grouped(999.4))
  end)

  it("draws a bar with loss, tokens per second and the time left", function()
    local c, _, err = made { terminal = { tty = true, columns = 100 } }
    c:progress(between)
    assert.matches("^\r\27%[K%[=+ +%] 5/10  loss 4.5000  2,000 tok/s  eta 3s$", err.text())
    c:note("a note")
    assert.matches("\r\27%[Ka note\n$", err.text())
    c:progress(step) -- a report stays on the screen
    assert.matches("\nupdate 5/10  loss 4.50000 [^\n]+\n$", err.text())
  end)

  it("stays within narrow terminals", function()
    local c, _, err = made { terminal = { tty = true, columns = 20 } }
    c:progress(between)
    assert.is_true(#err.text() - #"\r\27[K" <= 19)
  end)

  it("writes plain lines at reports when there is no terminal", function()
    local c, out, err = made { terminal = { tty = false, columns = 80 } }
    c:progress { update = 4, loss = 1, seconds = 1, wall = 1, logged = false, grad_norm = 1,
      lr = 1, peak_gib = 1 }
    assert.equal("", err.text())
    c:progress(step)
    assert.matches("^update 5/10  loss 4.50000  grad_norm 1.000  lr 8.000e%-03  [%d,]+ tok/s  "
      .. "peak 1.50 GiB  eta %d+s\n$", err.text())
    c:print("table")
    assert.equal("table\n", out.text())
  end)

  it("is silent when quiet", function()
    local c, out, err = made { quiet = true, terminal = { tty = true, columns = 80 } }
    c:progress(step)
    c:print("x")
    c:note("y")
    c:validation(1, 2, 3)
    assert.equal("", out.text() .. err.text())
  end)
end)
