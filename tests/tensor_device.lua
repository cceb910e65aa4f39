-- Operations of Lua tensors on device "cuda" against the CPU's, in one process; used by
-- tensor_device_spec.lua. Prints "ok" or what differs.
local pg = require "perigee"
local core = pg.core
local cpu = assert(core.context { device = "cpu", threads = 1 })
local cuda = assert(core.context { device = "cuda" })

local nan, inf = 0 / 0, math.huge
local edges = { 0, -0.0, nan, inf, -inf, 0.5, 1.5, 2.5, -0.5, -2.5, 3e38, 2 ^ -126, 2 ^ 23 + 1 }

-- The same numbers on both devices, whatever was drawn before.
local function fresh(ctx, seed, ...)
  return core.zeros(ctx, ...):normal_(0, 3, pg.generator(seed))
end

-- Bits of a number, so that zeros have signs; one NaN.
local function bits(x)
  return x ~= x and "nan" or math.type(x) == "integer" and x or ("%a"):format(x)
end

local function compare(name, a, b, tolerance, path)
  path = path or ""
  if type(a) == "table" and type(b) == "table" then
    assert(#a == #b, ("%s%s: %d and %d elements"):format(name, path, #a, #b))
    for i = 1, #a do compare(name, a[i], b[i], tolerance, ("%s[%d]"):format(path, i)) end
  elseif math.type(a) == "float" and math.type(b) == "float" then
    local near = tolerance and math.abs(a - b) <= tolerance * math.max(1, math.abs(a))
    assert(bits(a) == bits(b) or near, ("%s%s: %s, on cuda %s"):format(name, path, a, b))
  else
    assert(a == b, ("%s%s: %s, on cuda %s"):format(name, path, a, b))
  end
end

-- What f(ctx) returns, as numbers and tables.
local function results(f, ctx)
  local list = table.pack(f(ctx))
  for i = 1, list.n do
    if type(list[i]) == "userdata" then list[i] = list[i]:to_table() end
  end
  return list
end

local function check(name, f, tolerance)
  compare(name, results(f, cpu), results(f, cuda), tolerance)
end

-- Views of a matrix: whole, transposed, with steps, one row over all.
local views = {
  function(t) return t end,
  function(t) return t:t() end,
  function(t) return t[{ { 1, -1, 2 }, { 2, -2, 3 } }] end,
  function(t) return t:row(2):expand(5, 37) end,
}

-- Of the mathematical library: 2 units in the last place each on NVIDIA's side (pow 4).
local library = { exp = 8 * 2 ^ -23, log = 8 * 2 ^ -23, tanh = 8 * 2 ^ -23, pow = 8 * 2 ^ -23 }

for v, view in ipairs(views) do
  for _, op in ipairs { "neg", "abs", "square", "sign", "reciprocal", "isfinite", "floor", "ceil",
    "round", "exp", "tanh" } do
    check(op .. v, function(ctx)
      local x = view(fresh(ctx, 1, 21, 37))
      return x[op](x)
    end, library[op])
  end
  check("sqrt, log" .. v, function(ctx)
    local x = view(fresh(ctx, 2, 21, 37)):abs()
    return x:sqrt(), x:log()
  end, library.log)
  for _, op in ipairs { "add", "sub", "mul", "div", "minimum", "maximum", "lt", "le", "gt", "ge",
    "eq", "ne" } do
    check(op .. v, function(ctx)
      local a, b = view(fresh(ctx, 3, 21, 37)), view(fresh(ctx, 4, 21, 37))
      return a[op](a, b), a[op](a, 0.1), a[op](a, b:row(1))
    end)
  end
  check("where" .. v, function(ctx)
    local a, b = view(fresh(ctx, 5, 21, 37)), view(fresh(ctx, 6, 21, 37))
    return pg.where(a:gt(b), a, b), pg.where(a:gt(0), 1, b), a:where(b:lt(0), -2)
  end)
  check("moved" .. v, function(ctx)
    local a = view(fresh(ctx, 7, 21, 37))
    local values, order = a:sort()
    local down, at = a:topk(3, 1)
    local last = #a
    return values, order, down, at, a:argsort(1, true), a:index_select(1, { last, 1, -1 }),
      a:index_select(2, { 2, 1 }), a:reshape(-1), a:diagonal(), a:clamp(-1, 1),
      pg.cat { a, a }, pg.cat({ a, a }, 2), a:argmax(1), a:argmin(2), { a:argmax() },
      a:max(), a:min(2), a:equal(a:clone()), a:allclose(a * 1.5)
  end)
  -- fp64 sums in another order: 2^-24 of the result and of what the fp32 numbers cancel, here at
  -- most 777 terms of about 3.
  check("sums" .. v, function(ctx)
    local a = view(fresh(ctx, 8, 21, 37))
    return a:sum(), a:sum(1), a:mean(2), a:var(), a:std(1), a:norm(2), a:norm(nil, 1), a:dot(a),
      a:row_norms(), a:center_rows()
  end, 2 ^ -23)
  -- Sums of up to 37 products in fp32, of magnitude 9: 37^2 * 2^-24 * 9 at the very most.
  check("matmul" .. v, function(ctx)
    local a = view(fresh(ctx, 9, 21, 37))
    return a:matmul(a:t()), a[1]:matmul(a:t()), a:matmul(a[1])
  end, 37 ^ 2 * 9 * 2 ^ -24)
end

check("edges", function(ctx)
  local t = pg.tensor(edges, ctx)
  return t:floor(), t:ceil(), t:round(), t:isfinite(), t:sort(), t:argsort(1, true), t:clamp(-1, 1),
    t:where(t:eq(t), 7), pg.where(t, t, -0.0), t:eq(t), t:maximum(0)
end)
check("written views", function(ctx)
  local t = fresh(ctx, 10, 9, 8)
  t[{ { 1, 9, 2 }, 3 }] = 0
  t[{ 2, { 1, 8, 3 } }] = pg.tensor({ 1, 2, 3 }, ctx)
  t:diagonal():fill_(5)
  t:t():mul_rows_(pg.linspace(1, 8, 8, ctx))
  t:columns(2, 3):floor_():lerp_(pg.ones(2, ctx), 0.25)
  t:add_(t:t()[{ { 1, 8 }, { 1, 1 } }]:reshape(8))
  t[4] = t[5] * 2
  return t, t:get(4, 2), t[-1], pg.eye(3, ctx), pg.full({ 2, 3 }, 0.1, ctx)
end)
check("uniform", function(ctx) return core.zeros(ctx, 1023):uniform_(-1, 2, pg.generator(3)) end)
check("products that wait", function(ctx)
  local x = fresh(ctx, 11, 300, 250)
  local y = x * 3
  x:zero_()
  local z = y * 0.5
  y:close()
  return z:sum(2), z[300]
end, 2 ^ -23)
check("text", function(ctx) return { tostring(fresh(ctx, 12, 9, 9)) } end)

for _, name in ipairs { "t.npy", "t.safetensors" } do
  local path = arg[1] .. "/" .. name
  check(name, function(ctx)
    assert(fresh(ctx, 13, 5, 7):t():save(path))
    local t = assert(pg.load(path, ctx))
    return t.tensor or t
  end)
end

-- Memory: nothing is left of the above, and little of many temporaries at any time.
for _ = 1, 3 do collectgarbage() end
assert(cuda:live_tensors() == 0 and cuda:bytes() == 0, "tensors are left on cuda")
local x, most = core.zeros(cuda, 32, 32):fill_(1), 0
for i = 1, 1e5 do
  local _ = x + i
  if i % 1000 == 0 then most = math.max(most, cuda:bytes()) end
end
assert(most < 64 << 20, most)
for _ = 1, 3 do collectgarbage() end
assert(cuda:live_tensors() == 1 and cuda:bytes() == 32 * 32 * 4, cuda:bytes())
x:close()
print "ok"
