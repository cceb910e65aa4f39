-- Tensors from Lua: arithmetic against plain Lua numbers, views, indices, files, misuse.
local support = require "bind_support"
local core = support.core

describe("tensors", function()
  local ctx, m, v

  before_each(function()
    ctx = support.context()
    m = core.tensor(ctx, { { 1, -2, 3 }, { 4, 5, -6 } })
    v = core.tensor(ctx, { 2, 4 })
  end)
  after_each(function()
    m, v = nil, nil
    support.finish(ctx)
    support.clean()
  end)

  -- Small integers and powers of two: every result below is exact in fp32.
  local function is(expected, t) assert.are.same(expected, t:to_table()) end

  it("know shape, type and size", function()
    assert.are.same({ 2, 3 }, m:shape())
    assert.are.equal("F32", m:dtype())
    assert.are.equal(2, #m)
    assert.are.equal(6, m:elements())
    assert.are.same({}, core.tensor(ctx, 5):shape())
    assert.are.equal(5, core.tensor(ctx, 5):item())
    assert.are.same({ 0, 3 }, core.zeros(ctx, 0, 3):shape())
    assert.error_matches(function() return #core.tensor(ctx, 5) end, "scalar")
  end)

  it("add, subtract, multiply, divide and raise", function()
    is({ { 2, -4, 6 }, { 8, 10, -12 } }, m + m)
    is({ { 0, 0, 0 }, { 0, 0, 0 } }, m - m)
    is({ { 1, 4, 9 }, { 16, 25, 36 } }, m * m)
    is({ { 0.5, -1, 1.5 }, { 2, 2.5, -3 } }, m / 2)
    is({ 1, 0.5 }, 2 / v)
    is({ 0, -2 }, 2 - v)
    is({ 4, 6 }, 2 + v)
    is({ 6, 12 }, 3 * v)
    is({ 4, 16 }, v ^ 2)
    is({ 4, 16 }, 2 ^ v)
    is({ { -1, 2, -3 }, { -4, -5, 6 } }, -m)
    is({ { 1, 0, 1 }, { 1, 1, 0 } }, m:gt(0))
    is({ { 1, -2, 1 }, { 1, 1, -6 } }, m:minimum(1))
    is({ { 1, 0, 3 }, { 4, 5, 0 } }, m:maximum(core.zeros(ctx, 2, 3)))
    is({ { 0, 1, 0 }, { 0, 0, 0 } }, m:eq(-2))
  end)

  it("broadcast as NumPy does", function()
    is({ { 11, 18, 33 }, { 14, 25, 24 } }, m + core.tensor(ctx, { 10, 20, 30 }))
    is({ { 11, 8, 13 }, { 24, 25, 14 } }, m + core.tensor(ctx, { { 10 }, { 20 } }))
    is({ { 2, -1, 4 }, { 5, 6, -5 } }, m + core.tensor(ctx, 1))
  end)

  it("work in place and return themselves", function()
    local t = m:clone()
    assert.are.equal(t, t:add_(1):mul_(2))
    is({ { 4, -2, 8 }, { 10, 12, -10 } }, t)
    is({ { 1, -2, 3 }, { 4, 5, -6 } }, m)
    t:copy_(m):neg_():abs_():sqrt_():square_():sub_(m:abs())
    assert.is_true(t:abs():max() < 1e-6) -- sqrt and square round once each: 6 * 2^-23
    t:fill_(3):lerp_(core.tensor(ctx, { 7, 7, 7 }), 0.25)
    is({ { 4, 4, 4 }, { 4, 4, 4 } }, t)
    t:zero_()
    is({ { 0, 0, 0 }, { 0, 0, 0 } }, t)
    t:copy_(m):div_rows_(v):mul_rows_(v):add_rows_(v):sub_rows_(v)
    is(m:to_table(), t)
  end)

  it("compute functions of elements", function()
    local x = core.tensor(ctx, { 0.25, 1, 4 })
    is({ 0.5, 1, 2 }, x:sqrt())
    is({ 0.0625, 1, 16 }, x:square())
    is({ 4, 1, 0.25 }, x:reciprocal())
    is({ -1, 0, 1 }, core.tensor(ctx, { -3, 0, 9 }):sign())
    -- one fp32 rounding plus the library's error, at most 4 units in the last place
    for name, f in pairs { exp = math.exp, log = math.log,
      tanh = function(z) return (math.exp(2 * z) - 1) / (math.exp(2 * z) + 1) end } do
      for i, got in ipairs(x[name](x):to_table()) do
        local want = f(({ 0.25, 1, 4 })[i])
        assert.is_true(math.abs(got - want) <= 4 * 2 ^ -23 * math.max(math.abs(want), 0.25), name)
      end
    end
    local odd = core.tensor(ctx, { 1, math.huge, 0 / 0 })
    is({ 1, 0, 0 }, odd:isfinite())
    assert.is_false(odd:all_finite())
    assert.is_true(m:all_finite())
  end)

  it("reduce over everything to a number and over an axis to a tensor", function()
    assert.are.equal(5, m:sum())
    assert.are.equal(5 / 6, m:sum() / 6)
    assert.are.equal(5, m:max())
    assert.are.equal(-6, m:min())
    assert.are.equal("float", math.type(m:norm()))
    is({ 5, 3, -3 }, m:sum(1))
    is({ 2, 3 }, m:sum(2))
    is({ 2, 3 }, m:row_sums())
    is({ 5, 3, -3 }, m:column_sums())
    is({ 4, 5, 3 }, m:max(1))
    is({ -2, -6 }, m:min(2))
    is({ 5, 13 }, core.tensor(ctx, { { 3, 4, 0 }, { 0, 5, 12 } }):row_norms())
    assert.error_matches(function() m:sum(3) end, "axis: an integer from %-2 to 2 expected, got number 3")
  end)

  it("find the largest and the smallest, counted from 1", function()
    assert.are.same({ 2, 2 }, { m:argmax() })
    assert.are.same({ 2, 3 }, { m:argmin() })
    assert.are.same({ 2 }, { v:argmax() })
    is({ 2, 2, 1 }, m:argmax(1))
    is({ 3, 2 }, m:argmax(2))
    is({ 2, 3 }, m:argmin(2))
    assert.error_matches(function() core.zeros(ctx, 0, 2):argmax() end, "empty")
  end)

  it("multiply as matrices, also transposed views", function()
    is({ { 14, -24 }, { -24, 77 } }, m:matmul(m:t()))
    is({ { 17, 18, -21 }, { 18, 29, -36 }, { -21, -36, 45 } }, m:t():matmul(m))
    assert.error_matches(function() m:matmul(m) end, "%[2,%s?3%].*%[2,%s?3%]")
  end)

  it("subtract the mean row", function()
    is({ { -1.5, -3.5, 4.5 }, { 1.5, 3.5, -4.5 } }, m:center_rows())
    is({ { 1, -2, 3 }, { 4, 5, -6 } }, m)
    is({ { 0.5, -0.5 }, { -2.5, 2.5 }, { 2, -2 } },
      core.tensor(ctx, { { 1, -2, 2.5 }, { 0, 3, -1.5 } }):t():center_rows())
    assert.error_matches(function() v:center_rows() end, "matrix expected")
  end)

  it("show rows, columns and elements, counted from 1 or from the end", function()
    is({ 4, 5, -6 }, m[2])
    is({ 4, 5, -6 }, m[-1])
    is({ 1, -2, 3 }, m:row(1))
    is({ { 4, 5, -6 } }, m:rows(2, 2))
    is({ { -2, 3 }, { 5, -6 } }, m:columns(2, -1))
    assert.are.equal(-6, m:get(2, 3))
    assert.are.equal(-6, m[2][3])
    assert.are.equal(4, v[-1])
    for _, bad in ipairs { 0, 3, -3, 2 ^ 53 } do
      assert.error_matches(function() return m[bad] end, "is outside 1 to 2")
    end
    assert.error_matches(function() return m[1.5] end, "an integer expected, got number 1.5")
    assert.error_matches(function() m:get(1) end, "2 indices expected")
    assert.error_matches(function() m:rows(2, 1) end, "comes before")
    assert.error_matches(function() v:columns(1, 1) end, "matrix expected")
  end)

  it("write through views", function()
    m[1]:fill_(7)
    m:t()[3]:mul_(10)
    m:set(2, 1, -1)
    m[2][2] = 8
    is({ { 7, 7, 70 }, { -1, 8, -60 } }, m)
    m[1] = m[2]
    m[2] = 0
    is({ { -1, 8, -60 }, { 0, 0, 0 } }, m)
    assert.error_matches(function() m[1] = "x" end, "a number or a tensor")
    assert.error_matches(function() m.name = 1 end, "no field")
    local row = m[1]
    m:close()
    is({ -1, 8, -60 }, row) -- a view keeps the storage
  end)

  it("come from nested tables of one shape only", function()
    assert.error_matches(function() core.tensor(ctx, { { 1, 2 }, { 3 } }) end,
      "%[2%] has 1 elements, the tables before it .* have 2")
    assert.error_matches(function() core.tensor(ctx, { { 1 }, 2 }) end, "a table of 1 elements")
    assert.error_matches(function() core.tensor(ctx, { 1, { 2 } }) end, "number expected.*got table")
    assert.error_matches(function() core.tensor(ctx, { 1, "2" }) end, 'got string "2"')
    assert.error_matches(function() core.tensor(ctx, "x") end, "a table or a number")
    local self = {}
    self[1] = self
    assert.error_matches(function() core.tensor(ctx, self) end, "nested deeper than 4")
    local deep = 1
    for _ = 1, 1e5 do deep = { deep } end
    assert.error_matches(function() core.tensor(ctx, deep) end, "nested deeper than 4")
    local wide = {}
    for i = 1, 2000 do wide[i] = 0 end
    local shared = wide
    for _ = 1, 3 do
      local outer = {}
      for i = 1, 2000 do outer[i] = shared end
      shared = outer
    end
    assert.error_matches(function() core.tensor(ctx, shared) end, "more than 2%^32 elements")
  end)

  it("state both shapes when they do not fit", function()
    local other = core.zeros(ctx, 3, 2)
    for _, op in ipairs { "add", "sub_", "lerp_", "copy_" } do
      local _, message = pcall(m[op], m, other, 0.5)
      assert.matches("%[2,%s?3%]", message)
      assert.matches("%[3,%s?2%]", message)
    end
    assert.error_matches(function() m:div_rows(core.zeros(ctx, 3)) end, "%[2,%s?3%].*%[3%]")
  end)

  it("refuse other arguments by name", function()
    assert.error_matches(function() m:add "1" end, 'a tensor or a number expected, got string "1"')
    assert.error_matches(function() return m + {} end, "got table")
    assert.error_matches(function() return m + nil end, "got nil")
    assert.error_matches(function() m:lerp_(m, "w") end, "w: a number expected")
    assert.error_matches(function() m:fill_() end, "value: a number expected, got no value")
    local other = support.context()
    local foreign = core.zeros(other, 2, 3)
    assert.error_matches(function() return m + foreign end, "different contexts")
    foreign:close()
    support.finish(other)
  end)

  it("report sizes that cannot be had", function()
    local none, message, name = core.zeros(ctx, 2 ^ 40 // 1 | 0, 1024)
    assert.is_nil(none)
    assert.matches("^ENOMEM", message)
    assert.are.equal("ENOMEM", name)
    assert.has_error(function() core.zeros(ctx, 2 ^ 62 // 1 | 0, 2 ^ 62 // 1 | 0) end)
    assert.error_matches(function() core.zeros(ctx, -1) end, "size: an integer of at least 0")
    assert.error_matches(function() core.zeros(ctx, 1, 1, 1, 1, 1) end, "at most 4")
  end)

  it("go to files and come back", function()
    local file = support.folder() .. "/t.safetensors"
    assert(core.save_tensors(ctx, file, { { "a", m }, { "transposed", m:t() }, { "b", v } },
      { note = "ok" }))
    is(m:to_table(), core.load_tensor(ctx, file, "a"))
    is(m:t():to_table(), core.load_tensor(ctx, file, "transposed"))
    local list = core.tensors(ctx, file)
    assert.are.same({ name = "b", dtype = "F32", shape = { 2 } }, list[3])
    local none, message, name = core.load_tensor(ctx, file, "c")
    assert.is_nil(none)
    assert.matches("no tensor 'c'", message)
    assert.are.equal("ENOENT", name)
    assert.are.equal("ENOENT", select(3, core.load_tensor(ctx, file .. "x", "a")))
    core.fs.write(file, "\255\255\255\255\255\255\255\127")
    assert.are.equal("EFORMAT", select(3, core.load_tensor(ctx, file, "a")))
    assert.error_matches(function() core.save_tensors(ctx, file, { { "a", 1 } }) end,
      "'a' must be a tensor, got number 1")
    assert.error_matches(function() core.save_tensors(ctx, file, { 1 }) end, "entry 1")
  end)
end)
