-- Tensors from Lua, beside arithmetic: constructors, slices and views, order and choice, random
-- numbers, statistics, comparison, text. Values against plain Lua on fresh numbers, at odd shapes.
local support = require "bind_support"
local pg = require "perigee"
local core = support.core

describe("tensors", function()
  local ctx
  local generator = pg.generator(os.time())

  before_each(function()
    ctx = assert(core.context { device = os.getenv "PG_TEST_DEVICE" or "cpu", threads = 1 })
  end)
  after_each(function()
    support.finish(ctx)
    support.clean()
  end)

  local function is(expected, t) assert.are.same(expected, t:to_table()) end

  -- A fresh matrix as a tensor and as tables of what it holds; few different values when `grid`.
  local function fresh(rows, columns, grid)
    local t = core.zeros(ctx, rows, columns):normal_(0, 1, generator)
    if grid then
      local list = {}
      for i = 1, rows do
        list[i] = {}
        for j = 1, columns do list[i][j] = generator:draw(-3, 3) end
      end
      if rows * columns > 0 then t = core.tensor(ctx, list) end
    end
    return t, t:to_table()
  end

  describe("are made", function()
    it("from nested tables, numbers and sizes", function()
      is({ { 1, 2 }, { 3, 4 } }, pg.tensor({ { 1, 2 }, { 3, 4 } }, ctx))
      is({ { 0, 0, 0 } }, pg.zeros(1, 3, ctx))
      is({ 1, 1 }, pg.ones(2, ctx))
      is({ { 7 }, { 7 } }, pg.full({ 2, 1 }, 7, ctx))
      is({ { 1, 0 }, { 0, 1 } }, pg.eye(2, ctx))
      is({ 0, 0.25, 0.5, 0.75, 1 }, pg.linspace(0, 1, 5, ctx))
      is({ 3 }, pg.linspace(3, 9, 1, ctx))
      assert.are.equal(5, pg.tensor(5, ctx):item())
      assert.are.same({ 2, 3 }, pg.rand(2, 3, ctx):shape())
      assert.are.same({ 0, 3 }, pg.randn(0, 3, ctx):shape())
      assert.error_matches(function() pg.zeros(2, 1.5, ctx) end, "pg.zeros size = 1.5 is not allowed")
      assert.error_matches(function() pg.zeros(2, "x") end, 'pg.zeros place = "x" is not allowed')
    end)

    it("in a context of their own where no run is open", function()
      local t = pg.tensor { 1, 2 }
      is({ 4, 5 }, pg.ones(2) * 3 + t)
      assert.error_matches(function() return t + core.tensor(ctx, { 1, 2 }) end, "different contexts")
      t:close()
    end)

    it("beside and below each other", function()
      local a, b = pg.tensor({ { 1, 2 }, { 3, 4 } }, ctx), pg.tensor({ { 5, 6 } }, ctx)
      is({ { 1, 2 }, { 3, 4 }, { 5, 6 } }, pg.cat { a, b })
      is({ { 1, 2, 1, 3 }, { 3, 4, 2, 4 } }, pg.cat({ a, a:t() }, 2))
      is({ 1, 2, 4, 5, 6 }, pg.cat { a[1], a[2][{ { 2, 2 } }], b[1] })
      is({ { 5, 6 } }, pg.cat { core.zeros(ctx, 0, 2), b })
      assert.error_matches(function() pg.cat({ a, b }, 2) end,
        "entry 1 has shape %[2, 2%], entry 2 %[1, 2%]: they do not fit along axis 2")
      assert.error_matches(function() pg.cat {} end, "the list is empty")
    end)

    it("with the place of what is wrong in a table", function()
      local function refuses(values, text)
        assert.error_matches(function() pg.tensor(values, ctx) end, text)
      end
      refuses({ { 1, 2 }, { 3 } }, "%[2%] has 1 elements, the tables before it .* have 2")
      refuses({ { 1, 2 }, { 3, "x" } }, '%[2%]%[2%]: a number expected, got string "x"')
      refuses({ { { 1 } }, { { true } } }, "%[2%]%[1%]%[1%]: a number expected, got true")
      refuses({ { 1 }, 2 }, "%[2%]: a table of 1 elements expected, got number 2")
      refuses("x", "a table or a number expected")
    end)
  end)

  describe("are looked at", function()
    it("through slices, which are views", function()
      local t = pg.tensor({ { 11, 12, 13, 14 }, { 21, 22, 23, 24 }, { 31, 32, 33, 34 } }, ctx)
      is({ { 21, 22, 23, 24 } }, t[{ { 2, 2 } }])
      is({ 12, 22, 32 }, t[{ {}, 2 }])
      is({ 12, 22, 32 }, t:column(2))
      is({ { 12, 14 }, { 32, 34 } }, t[{ { 1, -1, 2 }, { 2, -1, 2 } }])
      is({ 11, 22, 33 }, t:diagonal())
      is({ 11, 22, 33 }, t:t():diagonal())
      assert.are.equal(33, t[{ -1, -2 }]:item())
      is({ { 33, 34 } }, t[{ { 2, 3 }, { 3, 4 } }][{ { 2, 2 } }])
      t[{ { 1, 3, 2 }, { 1, 2 } }] = 0
      t[{ 2, { 3, 4 } }] = pg.tensor({ 5, 6 }, ctx)
      t[{ 2, 1 }] = -1
      is({ { 0, 0, 13, 14 }, { -1, 22, 5, 6 }, { 0, 0, 33, 34 } }, t)
      is({ 22, 5 }, t[{ { row = 2 }, { 2, 3 } }]) -- a token object
      local view = t[{ {}, { 2, 3 } }]:t()[2]
      t:close()
      is({ 13, 5, 33 }, view) -- keeps the storage
      assert.error_matches(function() return t[{ 1 }] end, "closed")
    end)

    it("with refusals that say what is allowed", function()
      local t = core.zeros(ctx, 3, 4)
      local function refuses(index, text)
        assert.error_matches(function() return t[index] end, text)
      end
      refuses({ 4 }, "row 4 is outside 1 to 3")
      refuses({ {}, { 1, 5 } }, "column 5 is outside 1 to 4")
      refuses({ {}, { 3, 2 } }, "column: the last, 2, comes before the first, 3")
      refuses({ { 1 } }, "{first, last} or {first, last, step} expected, got a table of 1")
      refuses({ { 1, 2, 0 } }, "step: an integer of at least 1")
      refuses({ 1, 1, 1 }, "3 indices for the shape %[3, 4%]")
      refuses({ "x" }, 'row: an integer expected, got string "x"')
      assert.error_matches(function() t[{ 1 }] = pg.ones(3, ctx) end, "%[3%] into F32 %[4%]")
    end)

    it("in other shapes", function()
      local t = pg.tensor({ { 1, 2, 3 }, { 4, 5, 6 } }, ctx)
      is({ { 1, 2 }, { 3, 4 }, { 5, 6 } }, t:view(3, 2))
      is({ 1, 2, 3, 4, 5, 6 }, t:reshape(-1))
      is({ 1, 4, 2, 5, 3, 6 }, t:t():reshape(6))
      is({ { 2, 2 }, { 5, 5 } }, t[{ {}, 2 }]:reshape(-1, 1):expand(-1, 2))
      is({ { 1, 2, 3 }, { 1, 2, 3 } }, t[1]:expand(2, 3))
      t:view(6)[5] = 0
      assert.are.equal(0, t:get(2, 2))
      assert.are.same({ 0, 7 }, core.zeros(ctx, 7, 0):reshape(0, 7):shape())
      assert.are.equal(1, #t:t():contiguous():view(1, -1))
      assert.error_matches(function() t:view(4) end, "view: %[2, 3%] of 6 elements does not become %[4%]")
      assert.error_matches(function() t:reshape(-1, 4) end, "does not become %[%-1, 4%]")
      assert.error_matches(function() t:view(-1, -1) end, "only one size can be %-1")
      assert.error_matches(function() t:t():view(6) end, "not contiguous; reshape copies it")
      assert.error_matches(function() t:expand(2, 6) end, "size 3 of %[2, 3%] does not become 6")
      assert.error_matches(function() t:expand(3, 2, 3):row(1):expand(4, 4, 2, 3):row(1):row(1)
        :fill_(1):expand(7, 2, 3):row(1)[{ {}, 1 }]:expand(2, 2):fill_(1) end, "repeats elements")
    end)
  end)

  describe("are put in order", function()
    -- By Lua's own sort, equal ones in place.
    local function sorted(list, descending)
      local order = {}
      for i = 1, #list do order[i] = i end
      table.sort(order, function(a, b)
        if list[a] ~= list[b] then
          if descending then return list[a] > list[b] end
          return list[a] < list[b]
        end
        return a < b
      end)
      local values = {}
      for i, at in ipairs(order) do values[i] = list[at] end
      return values, order
    end

    it("along rows and columns, with and without ties", function()
      for _, sizes in ipairs { { 1, 1 }, { 3, 5 }, { 1, 300 }, { 7, 1 } } do
        for _, grid in ipairs { false, true } do
          for _, descending in ipairs { false, true } do
            local t, list = fresh(sizes[1], sizes[2], grid)
            local values, indices = t:sort(nil, descending)
            is(indices:to_table(), t:argsort(2, descending))
            local k = math.min(3, sizes[2])
            local top, where = t:topk(k, nil, descending)
            for i = 1, sizes[1] do
              local want, order = sorted(list[i], descending)
              is(want, values[i])
              is(order, indices[i])
              is(table.move(want, 1, k, 1, {}), top[i])
              is(table.move(order, 1, k, 1, {}), where[i])
            end
            local across, rows = t:t():sort(1, descending)
            assert.is_true(across:equal(values:t()) and rows:equal(indices:t()))
          end
        end
      end
    end)

    it("with NaN as the largest, zeros alike and infinities at the ends", function()
      local nan, inf = 0 / 0, math.huge
      local t = pg.tensor({ 0, nan, inf, -0.0, -inf, 2, -3 }, ctx)
      is({ 5, 7, 1, 4, 6, 3, 2 }, t:argsort())
      is({ 2, 3, 6, 1, 4, 7, 5 }, t:argsort(1, true))
      assert.are.equal(1, t:topk(0):elements() + 1)
      assert.are.same({ 0, 4 }, (core.zeros(ctx, 0, 4):sort()):shape())
      assert.are.same({ 4, 0 }, (core.zeros(ctx, 4, 0):sort()):shape())
      assert.are.equal(6, (pg.tensor(6, ctx):sort()):item())
      assert.error_matches(function() t:topk(8) end, "sort: 8 of each 7 elements %(shape %[7%]%)")
      assert.error_matches(function() t:sort(2) end, "axis = 2 is not allowed")
    end)

    it("with the lower one in the middle as the median", function()
      for _, sizes in ipairs { { 1, 1 }, { 4, 5 }, { 1, 300 }, { 8, 2 } } do
        for _, grid in ipairs { false, true } do
          local t, list = fresh(sizes[1], sizes[2], grid)
          local values, columns = t:median(2)
          local all = {}
          for i, row in ipairs(list) do
            local want, order = sorted(row, false)
            local middle = (sizes[2] + 1) // 2
            assert.are.equal(want[middle], values[i])
            assert.are.equal(order[middle], columns[i])
            assert.are.equal(want[middle], t:row(i):median())
            table.move(row, 1, #row, #all + 1, all)
          end
          assert.are.equal(sorted(all, false)[(#all + 1) // 2], t:median())
          local across, rows = t:t():median(-2)
          assert.is_true(across:equal(values) and rows:equal(columns))
        end
      end
      local nan, inf = 0 / 0, math.huge
      local t = pg.tensor({ { 3, nan, 1 }, { inf, 2, inf }, { -inf, 0, 4 } }, ctx)
      local values, columns = t:median(2)
      assert.is_true(values[1] ~= values[1] and columns[1] == 2)
      is({ inf, 0 }, values[{ { 2, 3 } }])
      is({ 1, 2 }, columns[{ { 2, 3 } }])
      assert.is_true(t:median() ~= t:median())
      is({ 3, 4 }, (t[{ {}, { 1, 3, 2 } }]:median(1)))
      assert.error_matches(function() core.zeros(ctx, 0, 3):median(1) end,
        "median of nothing: shape %[0, 3%]")
      assert.error_matches(function() t:median(3) end, "median axis = 3 is not allowed")
    end)

    it("along axes that count from either end", function()
      local t = fresh(4, 7)
      for _, name in ipairs { "sum", "mean", "max", "norm", "argmax", "argmin", "var", "sort",
        "argsort", "median" } do
        local f = t[name]
        assert.is_true(f(t, -1):equal((f(t, 2))), name)
        assert.is_true(f(t, -2):equal((f(t, 1))), name)
        assert.error_matches(function() f(t, 0) end, "axis.* 0")
        local v = t:column(3)
        local of_axis, of_all = f(v, 1), f(v)
        assert.is_true(of_axis == of_all or of_axis:equal(of_all), name)
      end
      assert.is_true(t:topk(2, -1):equal((t:topk(2, 2))))
      assert.is_true(t:index_select(-1, { 3 }):equal(t:index_select(2, { 3 })))
      assert.is_true(pg.cat({ t, t }, -1):equal(pg.cat({ t, t }, 2)))
      assert.are.equal(t:row(1):norm(nil, 3), t:row(1):norm(-1, 3))
      assert.are.equal(t:row(1):std(), t:row(1):std(1))
    end)

    it("by choosing rows and columns", function()
      local t, list = fresh(6, 4)
      is({ list[6], list[1], list[6] }, t:index_select(1, { -1, 1, 6 }))
      is({ list[3] }, t:index_select(1, { { id = 2, row = 3 } }))
      local _, where = t[1]:topk(2)
      local first, second = where[1], where[2]
      is({ list[5][first], list[5][second] }, t:index_select(2, where)[5])
      is({ list[2][4], list[2][1] }, t[2]:index_select(1, { 4, 1 }))
      is({ list[4][2], list[1][2] }, t:column(2):index_select(1, { 4, 1 }))
      assert.are.same({ 0, 4 }, t:index_select(1, {}):shape())
      assert.error_matches(function() t:index_select(1, { 1, 7 }) end,
        "entry 2 is number 7; indices from 1 to 6")
      assert.error_matches(function() t:index_select(1, { 0 }) end, "entry 1 is number 0")
      assert.error_matches(function() t:index_select(2, { 1.5 }) end, "entry 1 is number 1.5")
      assert.error_matches(function() pg.tensor(1, ctx):index_select(1, { 1 }) end, "from 1 to 0")
    end)
  end)

  describe("hold random numbers", function()
    it("alike for one seed, however they are drawn", function()
      local a, b = pg.generator(5), pg.generator(5)
      local x = core.zeros(ctx, 7, 9):normal_(0, 1, a)
      local y = core.zeros(ctx, 63)
      y[{ { 1, 10 } }]:normal_(0, 1, b)
      y[{ { 11, 63 } }]:normal_(0, 1, b)
      assert.is_true(x:reshape(63):equal(y))
      assert.is_false(x:equal(core.zeros(ctx, 7, 9):normal_(0, 1, a)))
      local u, v = core.zeros(ctx, 13):uniform_(0, 1, pg.generator(6)), core.zeros(ctx, 13)
      local c = pg.generator(6)
      v[{ { 1, 3 } }]:uniform_(0, 1, c)
      v[{ { 4, 13 } }]:uniform_(0, 1, c)
      assert.is_true(u:equal(v))
    end)

    it("with the moments they should have", function()
      local n = 1 << 16
      -- Six standard errors: 6/sqrt(n) of the mean, 6 sqrt(2/n) of the variance of normals.
      local x = core.zeros(ctx, n):normal_(3, 2, generator)
      assert.is_true(math.abs(x:mean() - 3) < 2 * 6 / n ^ 0.5)
      assert.is_true(math.abs(x:var() / 4 - 1) < 6 * (2 / n) ^ 0.5)
      local u = core.zeros(ctx, n):uniform_(-1, 3, generator)
      assert.is_true(u:min() >= -1 and u:max() < 3)
      assert.is_true(math.abs(u:mean() - 1) < 6 * (16 / 12 / n) ^ 0.5)
      -- The fourth moment of a uniform number is 9/5 of the squared variance.
      assert.is_true(math.abs(u:var() / (16 / 12) - 1) < 6 * ((9 / 5 - 1) / n) ^ 0.5)
      assert.is_true(core.zeros(ctx, n):uniform_(1, 1 + 2 ^ -23, generator):max() == 1)
    end)

    it("without touching the run's", function()
      local random = require "perigee.random"
      local before = random.current().index
      core.zeros(ctx, 5):normal_():uniform_()
      assert.are.equal(before, random.current().index)
      core.zeros(ctx, 5):normal_(0, 1, pg.random)
      assert.are.equal(before + 5, random.current().index)
      assert.error_matches(function() core.zeros(ctx, 2):uniform_(1, 1) end, "the first must be less")
      assert.error_matches(function() core.zeros(ctx, 2):normal_(0, -1) end, "0 or more")
      assert.error_matches(function() core.zeros(ctx, 2):normal_(0, 1, 7) end, "generator = 7")
    end)
  end)

  describe("give statistics", function()
    it("as sums over their elements do", function()
      for _, sizes in ipairs { { 2, 3 }, { 5, 2 }, { 17, 33 } } do
        local t, list = fresh(sizes[1], sizes[2])
        local rows, columns, all = {}, {}, {}
        for i, row in ipairs(list) do
          rows[i] = row
          for j, x in ipairs(row) do
            columns[j] = columns[j] or {}
            columns[j][i], all[#all + 1] = x, x
          end
        end
        local function var(values, correction)
          local mean, sum = 0, 0
          for _, x in ipairs(values) do mean = mean + x / #values end
          for _, x in ipairs(values) do sum = sum + (x - mean) ^ 2 end
          return sum / (#values - correction)
        end
        -- The mean and each difference round once to fp32: relative 2^-24 of numbers up to 5.
        local function close(want, got) assert.is_true(math.abs(want - got) <= 1e-5, want .. got) end
        close(var(all, 1), t:var())
        close(var(all, 0) ^ 0.5, t:std(nil, 0))
        for j, x in ipairs(t:var(1):to_table()) do close(var(columns[j], 1), x) end
        for i, x in ipairs(t:std(2):to_table()) do close(var(rows[i], 1) ^ 0.5, x) end
        local one, most, three, dot = 0, 0, 0, 0
        for _, x in ipairs(all) do
          one, most, three = one + math.abs(x), math.max(most, math.abs(x)), three + math.abs(x) ^ 3
          dot = dot + 2 * x * x
        end
        close(1, t:norm(nil, 1) / one)
        assert.are.equal(most, t:norm(nil, math.huge))
        close(1, t:norm(nil, 3) / three ^ (1 / 3))
        close(1, t:dot(t * 2) / dot)
        is(t:abs():sum(1):to_table(), t:norm(1, 1))
        is(t:norm(2):to_table(), t:norm(2, 2))
      end
      local t = pg.tensor({ { 1, 2 } }, ctx)
      assert.error_matches(function() t:dot(t:t()) end, "dot: shapes %[1, 2%] and %[2, 1%] differ")
      assert.error_matches(function() t:norm(nil, 0) end, "norm p = 0 is not allowed")
      is({ { 1.5, 2 } }, t:clamp(1.5))
      is({ { 1, 1.5 } }, t:clamp(nil, 1.5))
      is({ { 1.25, 1.5 } }, t:clamp_(1.25, 1.5))
      is({ { 1.25, 1.5 } }, t)
    end)

    it("chosen by a condition, or made whole", function()
      local nan, inf = 0 / 0, math.huge
      local a, b = pg.tensor({ { 1, nan, inf }, { -1, 5, 6 } }, ctx), pg.tensor({ 7, 8, 9 }, ctx)
      local c = pg.tensor({ { 1, 0, 1 }, { 0, 0, nan } }, ctx)
      is({ { 1, 8, inf }, { 7, 8, 6 } }, pg.where(c, a, b))
      is({ { 7, -2, 9 }, { -2, -2, 9 } }, b:where(c, -2))
      is({ { 1, 0, 1 }, { 0, 0, 1 } }, pg.where(c, 1, 0))
      is({ -inf, inf }, pg.tensor({ -0.0, 0 }, ctx):where(pg.ones(2, ctx), 1):reciprocal())
      assert.error_matches(function() pg.where(true, a, b) end, "where condition = true")
      assert.error_matches(function() pg.where(c, "x", b) end, 'where a = "x" .* a tensor or a number')
      assert.error_matches(function() a:where(c) end, "where b = nil")
      local t = pg.tensor({ -2.5, -1.5, -0.25, 0.5, 1.5, 2, inf }, ctx)
      is({ -3, -2, -1, 0, 1, 2, inf }, t:floor())
      is({ -2, -1, 0, 1, 2, 2, inf }, t:ceil())
      is({ -2, -2, 0, 0, 2, 2, inf }, t:round())
      is({ -2, -2, 0, 0, 2, 2, inf }, t:round_())
    end)

    it("about how alike they are", function()
      local nan, inf = 0 / 0, math.huge
      local t = fresh(4, 3)
      assert.is_true(t:equal(t:clone()) and t:t():equal(t:clone():t()))
      assert.is_false(t:equal(t:t()))
      assert.is_false(t:equal(t + 1))
      assert.is_true(core.zeros(ctx, 0, 2):equal(core.zeros(ctx, 0, 2)))
      assert.is_true(t:allclose(t * (1 + 1e-6)))
      assert.is_false(t:allclose(t * (1 + 1e-4)))
      assert.is_true(t:allclose(t * (1 + 1e-4), 1e-3))
      local odd = pg.tensor({ inf, -inf, 1 }, ctx)
      assert.is_true(odd:allclose(odd))
      assert.is_false(odd:allclose(pg.tensor({ inf, inf, 1 }, ctx)))
      assert.is_false(pg.tensor({ 1 }, ctx):allclose(pg.tensor({ inf }, ctx)))
      assert.is_false(pg.tensor({ nan }, ctx):allclose(pg.tensor({ nan }, ctx)))
      assert.is_true(pg.ones(3, 4, ctx):allclose(pg.ones(4, ctx)))
      assert.error_matches(function() t:allclose(t, -1) end, "rtol = %-1 is not allowed")
    end)
  end)

  it("state both shapes and the sizes that do not multiply", function()
    assert.error_matches(function() core.zeros(ctx, 3, 4):matmul(core.zeros(ctx, 5, 6)) end,
      "matmul: %[3, 4%] x %[5, 6%]: the inner sizes 4 and 5 differ")
    assert.error_matches(function() pg.tensor(1, ctx):matmul(core.zeros(ctx, 5, 6)) end,
      "matmul: %[%] x %[5, 6%]: a scalar has no inner size")
  end)

  it("read well", function()
    assert.are.equal("tensor F32 []: 1.5", tostring(pg.tensor(1.5, ctx)))
    assert.are.equal("tensor F32 [2, 2]\n   1  -0.5\n  20     3",
      tostring(pg.tensor({ { 1, -0.5 }, { 20, 3 } }, ctx)))
    assert.are.equal("tensor F32 [0, 3]", tostring(core.zeros(ctx, 0, 3)))
    local long = tostring(pg.linspace(1, 100, 100, ctx))
    assert.are.equal("tensor F32 [100]\n  1  2  3  4  …  97  98  99  100", long)
    local large = tostring(core.zeros(ctx, 50257, 3))
    assert.are.equal("tensor F32 [50257, 3]\n  0  0  0\n  0  0  0\n  0  0  0\n  …\n"
      .. "  0  0  0\n  0  0  0\n  0  0  0", large)
    assert.are.equal("tensor F32 [2, 1, 2]\n  [1]\n    0  0\n  [2]\n    0  0",
      tostring(core.zeros(ctx, 2, 1, 2)))
    local t = core.zeros(ctx, 2)
    t:close()
    assert.are.equal("tensor (closed)", tostring(t))
  end)

  -- Large enough that t * number stands for its numbers until they are needed.
  it("keep the value of a product whatever happens to its factor", function()
    local x = core.zeros(ctx, 300, 250):normal_(0, 1, generator)
    local list = x:to_table()
    local function thrice(t)
      local got, same = t:to_table(), true
      for i, row in ipairs(list) do
        for j, v in ipairs(row) do
          same = same and got[i][j] == string.unpack("f", string.pack("f", 3 * v))
        end
      end
      return same
    end
    local a = x * 3
    assert.is_true(thrice(a))
    local b, c = x:mul(3), x:row(1)
    c:zero_()
    assert.is_true(thrice(b))
    x:row(1):copy_(core.tensor(ctx, list[1]))
    local d = 3 * x
    x:add_(1)
    assert.is_true(thrice(d) and not thrice(x * 3))
    x = core.tensor(ctx, list)
    local e = x * 3
    x:close()
    assert.is_true(thrice(e))
    local f = (a + 0) * 1 -- its factor is garbage at once
    support.collect()
    assert.is_true(thrice(f))
    local y = a + 0
    local unused = y * 2
    unused:close()
    assert.is_true(thrice(y))
    local h = y * 2 * 2 * 0.25
    y:zero_()
    assert.is_true(thrice(h))
    local last = core.zeros(ctx, 300, 250):fill_(2) * 0.5
    assert.are.same({ 300, 250 }, last:shape())
    support.collect()
    assert.are.equal(1, last:min())
  end)

  it("make in Lua what the optimizer in C makes, also where products wait", function()
    local function trained(optimizer, hypers, steps)
      local model = assert(core.model(ctx, { layers = 0, width = 512, heads = 1, head_dim = 64,
        vocab = 150, context = 16 }))
      assert(model:init(5))
      local run = assert(core.run(model, { data = support.golden, sequences = 2, micro = 2,
        clip = 1.0, data_seed = 3 }))
      run:assign { optimizer = core.optimizer "frozen", hypers = {},
        parameters = support.by_role(model, "embedding") }
      local head = support.by_role(model, "head")
      run:assign { optimizer = optimizer, hypers = hypers, parameters = head }
      local ok, e = pcall(function() for _ = 1, steps or 4 do assert(run:step()) end end)
      local value, increment = head[1].value:clone(), head[1].increment:clone()
      run:close()
      model:close()
      if not ok then error(e, 0) end
      return value, increment
    end
    local function mine(finish)
      return core.define_optimizer { name = "mine", slots = { momentum = "matrix" },
        defaults = { lr = 1e-2, beta = 0.95, eps = 1e-8 },
        increment = function(w, h)
          local m = w.slots.momentum
          m:lerp_(w.gradient, 1 - h.beta)
          return finish(m:div_rows(m:row_norms() + h.eps * (1 - h.beta ^ w.updates)), h.lr)
        end }
    end
    local hypers = { lr = 1e-2, beta = 0.95, eps = 1e-8, weight_decay = 0.1 }
    local value, increment = trained(core.optimizer "rownorm", hypers)
    local kept
    for _, finish in ipairs {
      function(d, lr) return d:mul(-lr) end,
      function(d, lr) return -lr * d end,
      function(d, lr) return d:mul_(-lr) end,
      function(d, lr) kept = d * -lr; return kept end,
      function(d, lr) local s = d:t() * -lr; return s:t() end,
    } do
      local v, s = trained(mine(finish), hypers)
      assert.is_true(support.same_bits(value, v) and support.same_bits(increment, s))
    end
    assert.is_true(support.same_bits(increment, kept))
    kept = nil
    for _, factor in ipairs { 3e38, math.huge, 0 / 0 } do
      assert.error_matches(function()
        trained(mine(function(d) return (d * 100):add(0) * factor end), hypers)
      end, "its increment: row %d+, column %d+ .* is %-?[in]")
    end
    -- Longer than fp32 holds, but no element is.
    trained(mine(function(d) return d:fill_(1) * 1e38 end), hypers, 1)
  end)

  it("give their memory back after 10^5 temporaries", function()
    local x, baseline = core.zeros(ctx, 32, 32):fill_(1), ctx:bytes()
    support.collect()
    local most = 0
    for i = 1, 1e5 do
      local _ = x + i
      if i % 1000 == 0 then most = math.max(most, ctx:bytes()) end
    end
    -- 400 MB went by; the collector was told of 8 MiB and more at a time.
    assert.is_true(most < baseline + (64 << 20), ("%d bytes"):format(most))
    support.collect()
    assert.are.equal(x:elements() * 4, ctx:bytes())
    assert.are.equal(1, ctx:live_tensors())
  end)
end)
