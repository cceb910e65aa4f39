-- JSON, metrics files, and numbers in any locale.
local support = require "bind_support"
local core = support.core
local json = core.json

describe("json", function()
  it("writes values", function()
    for _, case in ipairs {
      { nil, "null" }, { json.null, "null" }, { true, "true" }, { 3, "3" }, { 3.0, "3.0" },
      { 0.1, "0.1" }, { 1e300, "1e300" }, { -0.0, "-0.0" }, { math.maxinteger, "9223372036854775807" },
      { "a\"\\\n\0é", '"a\\"\\\\\\n\\u0000é"' }, { {}, "{}" }, { json.array {}, "[]" },
    } do
      assert.are.equal(case[2], json.encode(case[1]))
    end
    assert.are.equal("[1, 2, [3.5], {}]", json.encode { 1, 2, { 3.5 }, {} })
    assert.are.equal('{"a": 1, "b": {"c": true}}', json.encode { b = { c = true }, a = 1 })
    assert.are.equal('{"z": 1, "a": 2, "b": 3}',
      json.encode(setmetatable({ a = 2, b = 3, z = 1 }, { __order = { "z", "x", "a", "z" } })))
    assert.are.equal("{\n  \"a\": [1]\n}", json.encode({ a = { 1 } }, 2))
  end)

  it("reads back what it wrote", function()
    local value = { a = { 1, 2.5, "x", { b = false } }, n = 1e-310, i = -7, empty = json.array {},
      text = "\u{1F600} \t", zero = "\0a\0" }
    assert.are.same(value, json.decode(json.encode(value)))
    assert.are.equal("[]", json.encode(json.decode "[]"))
    assert.are.equal("{}", json.encode(json.decode "{}"))
    assert.are.equal(json.null, json.decode "null")
    assert.are.equal("integer", math.type(json.decode "3"))
    assert.are.equal("float", math.type(json.decode "3.0"))
    math.randomseed(1)
    for _ = 1, 2000 do
      local bits = math.random(0)
      local x = string.unpack("d", string.pack("i8", bits))
      if x == x and math.abs(x) < math.huge then assert.are.equal(x, json.decode(json.encode(x))) end
    end
  end)

  it("refuses what JSON has no form for", function()
    for _, case in ipairs {
      { 0 / 0, "not finite" }, { { 1, math.huge }, "not finite" }, { print, "function has no JSON form" },
      { { [1] = 1, a = 2 }, "both string keys and positions" }, { { [1] = 1, [3] = 2 }, "position 3" },
      { { [1.5] = 1 }, "key must be a string or a position from 1, got number 1.5" },
      { { [true] = 1 }, "got true" }, { "\xff", "UTF%-8" }, { { ["\xff"] = 1 }, "UTF%-8" },
      { { ["a\0b"] = 1 }, "zero bytes" }, { coroutine.create(print), "thread" },
    } do
      assert.error_matches(function() json.encode(case[1]) end, case[2])
    end
    assert.has_error(function() json.encode() end)
    assert.error_matches(function() json.encode(1, "x") end, "indent")
  end)

  it("survives depth and recursion", function()
    local self = {}
    self[1] = self
    assert.error_matches(function() json.encode(self) end, "deeper than 64 levels")
    local named = {}
    named.me = { named }
    assert.error_matches(function() json.encode(named) end, "deeper than 64 levels")
    local deep = {}
    for _ = 1, 1e5 do deep = { deep } end
    assert.error_matches(function() json.encode(deep) end, "deeper than 64 levels")
    local ok = {}
    for _ = 1, 62 do ok = { ok } end
    assert.are.same(ok, json.decode(json.encode(ok)))
    for _, text in ipairs { ("["):rep(1e6), ("["):rep(70) .. ("]"):rep(70),
      ('{"a":'):rep(1e5) .. "1" .. ("}"):rep(1e5) } do
      local none, message, name = json.decode(text)
      assert.is_nil(none)
      assert.matches("^EFORMAT: ", message)
      assert.are.equal("EFORMAT", name)
    end
  end)

  it("refuses malformed text with the place", function()
    for _, text in ipairs { "", "{", "[1,]", "nul", "01", "1 2", '{"a": 1, "a": 2}', '"\xff"', "[1e999]",
      "NaN", "'a'" } do
      local none, message, name = json.decode(text)
      assert.is_nil(none, text)
      assert.matches("^EFORMAT: ", message)
      assert.are.equal("EFORMAT", name)
    end
    assert.matches("line 2", select(2, json.decode "{\n x }"))
    assert.error_matches(function() json.decode(3) end, "text: a string expected, got number 3")
  end)

  it("does not look at the locale", function()
    local places = support.folder()
    local make = "env -u LD_PRELOAD localedef -c -i de_DE -f UTF-8 %s/de_DE.UTF-8 2>/dev/null"
    if not os.execute(make:format(places)) then
      return pending "localedef cannot make a locale with a decimal comma"
    end
    local output = support.process([[
      assert(os.setlocale "de_DE.UTF-8")
      local core = require "perigee.core"
      print(0.5) -- the premise: this process writes commas
      print(core.json.encode { 0.5, 1e-7 }, core.json.decode "[0.25]"[1] == 1 / 4)
      local ctx = core.context { threads = 1 }
      local path = os.tmpname()
      local m = core.metrics(ctx, path)
      m:write { { "x", 0.5 }, { "pair", { 1.5, 2.5 } }, { "nan", 0 / 0 } }
      io.write((core.fs.read(path)))
      os.remove(path)
    ]], "LOCPATH=" .. places)
    assert.are.equal('0,5\n[0.5, 1e-7]\ttrue\n'
      .. '{"x": 0.5, "pair": [1.5, 2.5], "nan": null, "nonfinite": ["nan"]}\n', output)
    support.clean()
  end)
end)

describe("metrics", function()
  local ctx
  before_each(function() ctx = support.context() end)
  after_each(function()
    support.finish(ctx)
    support.clean()
  end)

  it("are one line per report, also for odd values", function()
    local path = support.folder() .. "/metrics.jsonl"
    local m = assert(core.metrics(ctx, path))
    assert.is_true(m:write { { "train/loss", 0.5 }, { "progress/update", 3 }, { "text", "a\nb" },
      { "on", true }, { "pair", { 1, 2 } }, { "none", json.null }, { "zero", "a\0b" },
      { "zeros", { "\0", "c" } } })
    assert.is_true(m:write { { "bad", 0 / 0 }, { "worse", -math.huge }, { "good", 1.0 } })
    local lines = {}
    for line in io.lines(path) do lines[#lines + 1] = assert(json.decode(line)) end
    assert.are.same({ ["train/loss"] = 0.5, ["progress/update"] = 3, text = "a\nb", on = true,
      pair = { 1, 2 }, none = json.null, zero = "a\0b", zeros = { "\0", "c" } }, lines[1])
    assert.are.same({ bad = json.null, worse = json.null, good = 1.0, nonfinite = { "bad", "worse" } },
      lines[2])
    assert.are.equal(2, #lines)
    assert.matches('^{"train/loss": ?0.5, ?"progress/update": ?3,', (core.fs.read(path)))
    m:close()
    assert.error_matches(function() m:write { { "a", 1 } } end, "this metrics file is closed")
  end)

  it("refuse misuse before anything is written", function()
    local path = support.folder() .. "/metrics.jsonl"
    local m <close> = assert(core.metrics(ctx, path))
    assert.error_matches(function() m:write { { "a", 1 }, { "b", print } } end,
      "'b' must be a number, string, boolean or table, got function")
    assert.error_matches(function() m:write { { 1, 2 } } end, "entry 1 must be")
    assert.error_matches(function() m:write { "a" } end, "entry 1 must be")
    assert.error_matches(function() m:write { { "a", 1 }, { "t", { print } } } end, "no JSON form")
    local self = {}
    self[1] = self
    assert.error_matches(function() m:write { { "t", self } } end, "deeper")
    assert.is_true(m:write { { "c", 1 } })
    assert.are.same({ c = 1 }, json.decode((core.fs.read(path))))
    assert.are.equal("ENOENT", select(3, core.metrics(ctx, path .. "/x/y")) == "EIO" and "ENOENT"
      or select(3, core.metrics(ctx, "/nowhere/m.jsonl")))
  end)
end)
