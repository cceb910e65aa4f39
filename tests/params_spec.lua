-- pg.params and pg.choice: types from defaults, values from outside.
local pg = require "perigee"
local params = require "perigee.params"

local function declare(given, defaults)
  local values = params.with(given, function() return pg.params(defaults) end)
  return values
end

describe("pg.params", function()
  it("returns the defaults when nothing is given", function()
    local p = pg.params { head = "rownorm", seed = 0, rate = 0.5, on = true }
    assert.equal("rownorm", p.head)
    assert.equal(0, p.seed)
    assert.equal(0.5, p.rate)
    assert.is_true(p.on)
  end)

  it("converts text to the type of the default", function()
    local p = declare({ seed = "3", rate = "1e-3", on = "false", head = "12" },
      { head = "rownorm", seed = 0, rate = 0.5, on = true })
    assert.equal("integer", math.type(p.seed))
    assert.same({ seed = 3, rate = 1e-3, on = false, head = "12" }, p)
    assert.equal("float", math.type(declare({ rate = "2" }, { rate = 0.5 }).rate))
    assert.equal(1000, declare({ n = "1e3" }, { n = 1 }).n)
  end)

  it("refuses values of another type with the value and what is allowed", function()
    local function refused(given, defaults, pattern)
      local ok, e = pcall(declare, given, defaults)
      assert.is_false(ok)
      assert.is_true(e.usage)
      assert.matches(pattern, tostring(e))
    end
    refused({ seed = "1.5" }, { seed = 0 }, 'seed = "1.5" is not allowed: expected a whole number')
    refused({ rate = "fast" }, { rate = 0.5 }, 'rate = "fast" is not allowed: expected a number')
    refused({ rate = "nan" }, { rate = 0.5 }, "expected a number")
    refused({ on = "yes" }, { on = true }, "expected true or false")
    refused({ h = "adam" }, { h = pg.choice { "rownorm", "adamw" } },
      'expected "rownorm" or "adamw"')
  end)

  it("suggests the nearest parameter for an unknown name", function()
    local ok, e = pcall(declare, { updtes = "3" }, { updates = 1, seed = 0 })
    assert.is_false(ok)
    assert.matches("no parameter 'updtes'; did you mean 'updates'%?", tostring(e))
    ok, e = pcall(declare, { x = "3" }, {})
    assert.is_false(ok)
    assert.matches("declares none", tostring(e))
    assert.error_matches(function() return pg.params({ seed = 0 }).sed end, "did you mean 'seed'")
  end)

  it("takes the first of pg.choice as the default", function()
    assert.equal("a", pg.params({ x = pg.choice { "a", "b" } }).x)
    assert.equal("b", declare({ x = "b" }, { x = pg.choice { "a", "b" } }).x)
    assert.equal(2, declare({ x = "2" }, { x = pg.choice { 1, 2 } }).x)
    assert.error_matches(function() pg.choice {} end, "at least one value")
    assert.error_matches(function() pg.choice { "a", 1 } end, "pg.choice%[2%]")
  end)

  it("refuses defaults that a command line cannot set", function()
    assert.error_matches(function() pg.params { f = print } end, "pg.params.f = a function")
    assert.error_matches(function() pg.params { ["a b"] = 1 } end, "is not a name")
  end)

  it("reads name=value", function()
    local name, value = params.parse("a=b=c")
    assert.equal("a", name)
    assert.equal("b=c", value)
    assert.has_error(function() params.parse("novalue") end)
    assert.has_error(function() params.parse("=3") end)
  end)
end)
