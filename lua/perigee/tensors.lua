-- Tensors for scripts, hooks and the prompt: constructors, files, text, and the methods that need
-- no C of their own. Failures of operations raise; those of files return nil, "NAME: text", "NAME".
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local random = require "perigee.random"

local tensors = {}
local methods = core.tensor_methods

local function type_of(value)
  return type(value) == "userdata" and (debug.getmetatable(value) or {}).__name or nil
end

function tensors.is(value) return type_of(value) == "perigee.tensor" end

local function need_tensor(label, value)
  if not tensors.is(value) then check.fail(nil, label, value, "a tensor") end
  return value
end

-- From 1, or from the end from -1.
local function axis_of(label, axis, dimensions)
  dimensions = math.max(1, dimensions)
  if check.integer(nil, label, axis, -dimensions, dimensions) == 0 then
    check.fail(nil, label, axis, ("1 to %d, or -1 to -%d from the end"):format(dimensions,
      dimensions))
  end
  return axis < 0 and dimensions + 1 + axis or axis
end

-- Lua functions over C ones: what those refuse is located at the caller.
local function public(f)
  return function(...) return errors.located(nil, f, ...) end
end

-- ---- where new tensors are -----------------------------------------------------------------

-- Contexts of runs and of what the prompt opened, the latest last; none is kept alive by this.
local known, own = {}, nil

function tensors.use(ctx)
  if #known > 0 and known[#known][1] == ctx then return end
  known[#known + 1] = setmetatable({ ctx }, { __mode = "v" })
end

local function is_open(ctx)
  return ctx ~= nil and not tostring(ctx):find("closed", 1, true)
end

-- The context that `place` names (a context, or a run), or that of the latest run that is open, or
-- one of our own on the CPU.
local function context_of(label, place)
  if type_of(place) == "perigee.context" then return place end
  if place ~= nil then
    local ok, ctx = pcall(function() return place.context end)
    if not ok or type_of(ctx) ~= "perigee.context" then
      check.fail(nil, label .. " place", place, "a context or a run")
    end
    return ctx
  end
  for i = #known, 1, -1 do
    if is_open(known[i][1]) then return known[i][1] end
    table.remove(known, i)
  end
  if not is_open(own) then own = errors.try(core.context { device = "cpu" }) end
  return own
end

tensors.context_of = context_of

-- ---- constructors --------------------------------------------------------------------------

local function made(...) return (errors.try(...)) end

-- Sizes, and at the end perhaps a place.
local function sizes_and_place(label, ...)
  local sizes, place = { ... }, nil
  local n = select("#", ...)
  if n > 0 and type(sizes[n]) ~= "number" then
    place, n = sizes[n], n - 1
    sizes[n + 1] = nil
  end
  for i = 1, n do sizes[i] = check.integer(nil, label .. " size", sizes[i], 0) end
  return sizes, context_of(label, place)
end

tensors.public = {}
local constructors = tensors.public

function constructors.tensor(values, place)
  if tensors.is(values) then
    check.fail(nil, "pg.tensor", values, "a number or nested tables; t:clone() copies a tensor")
  end
  return made(core.tensor(context_of("pg.tensor", place), values))
end

function constructors.zeros(...)
  local sizes, ctx = sizes_and_place("pg.zeros", ...)
  return made(core.zeros(ctx, table.unpack(sizes)))
end

function constructors.ones(...)
  local sizes, ctx = sizes_and_place("pg.ones", ...)
  return made(core.zeros(ctx, table.unpack(sizes))):fill_(1)
end

function constructors.full(sizes, value, place)
  check.table(nil, "pg.full sizes", sizes, "a list of sizes")
  local list = sizes_and_place("pg.full", table.unpack(sizes))
  return made(core.zeros(context_of("pg.full", place), table.unpack(list))):fill_(value)
end

function constructors.eye(n, place)
  check.integer(nil, "pg.eye n", n, 0)
  local t = made(core.zeros(context_of("pg.eye", place), n, n))
  t:diagonal():fill_(1)
  return t
end

function constructors.linspace(from, to, n, place)
  check.number(nil, "pg.linspace from", from)
  check.number(nil, "pg.linspace to", to)
  check.integer(nil, "pg.linspace n", n, 1)
  local list = {}
  for i = 1, n do list[i] = n == 1 and from or from + (to - from) * ((i - 1) / (n - 1)) end
  return made(core.tensor(context_of("pg.linspace", place), list))
end

function constructors.rand(...)
  local sizes, ctx = sizes_and_place("pg.rand", ...)
  return made(core.zeros(ctx, table.unpack(sizes))):uniform_()
end

function constructors.randn(...)
  local sizes, ctx = sizes_and_place("pg.randn", ...)
  return made(core.zeros(ctx, table.unpack(sizes))):normal_()
end

-- pg.cat(list [, axis]): matrices one below (axis 1) or beside the other; vectors end to end.
function constructors.cat(list, axis)
  check.table(nil, "pg.cat", list, "a list of tensors")
  local dimensions = tensors.is(list[1]) and #list[1]:shape() or 2
  axis = axis == nil and 1 or axis == 2 and 2 or axis_of("pg.cat axis", axis, dimensions)
  local total, first = 0, nil
  for i = 1, #list do
    local shape = need_tensor(("pg.cat entry %d"):format(i), list[i]):shape()
    first = first or shape
    local other = 3 - axis
    if #shape ~= #first or #shape < axis or #shape > 2 or shape[other] ~= first[other] then
      errors.misuse("pg.cat: entry 1 has shape [%s], entry %d [%s]: they do not fit along axis %d",
        table.concat(first, ", "), i, table.concat(shape, ", "), axis)
    end
    total = total + shape[axis]
  end
  if not first then errors.misuse("pg.cat: the list is empty") end
  local sizes = table.move(first, 1, #first, 1, {})
  sizes[axis] = total
  local result, at = list[1]:new_zeros(table.unpack(sizes)), 0
  for _, t in ipairs(list) do
    local n = t:shape()[axis]
    if n > 0 then
      local range = axis == 1 and { { at + 1, at + n } } or { {}, { at + 1, at + n } }
      result[range]:copy_(t)
      at = at + n
    end
  end
  return result
end

for name, f in pairs(constructors) do constructors[name] = public(f) end

-- Random numbers apart from those of runs.
function constructors.generator(seed)
  return random.new(check.integer(nil, "pg.generator seed", seed), "tensor")
end

-- ---- files ---------------------------------------------------------------------------------

local function extension(label, path)
  check.string(nil, label, path)
  local found = path:match("%.([%w]+)$")
  if found ~= "npy" and found ~= "safetensors" then
    check.fail(nil, label, path, "a file name that ends in .npy or .safetensors")
  end
  return found
end

-- True when pg.load reads this path as tensors.
function tensors.is_file(path)
  return type(path) == "string" and (path:find("%.npy$") or path:find("%.safetensors$")) ~= nil
end

-- A tensor of an .npy file; of a safetensors file the one called `name`, or a table of all by name.
function tensors.load(path, name, place)
  local kind = extension("pg.load path", path)
  if kind == "npy" then
    if place == nil then place = name end
    return made(core.load_npy(context_of("pg.load", place), path))
  end
  if name ~= nil and type(name) ~= "string" then name, place = nil, name end
  local ctx = context_of("pg.load", place)
  if name then return made(core.load_tensor(ctx, path, name)) end
  local all = {}
  for _, entry in ipairs(errors.try(core.tensors(ctx, path))) do
    all[entry.name] = errors.try(core.load_tensor(ctx, path, entry.name))
  end
  return all
end

-- Through another name, so that a file is whole or not there.
local function save(t, path)
  local kind, partial = extension("t:save path", path), path .. ".partial"
  local there = core.fs.kind(path)
  if there and there ~= "file" then
    errors.world(("EIO: cannot replace %s: it is %s, expected a new name or a file"):format(path,
      there == "directory" and "a folder" or "a device, pipe or socket"), "EIO")
  end
  if kind == "npy" then
    errors.try(core.save_npy(t, partial))
  else
    errors.try(core.save_tensor(t, partial))
  end
  return made(core.fs.rename(partial, path))
end

function methods.save(t, path)
  need_tensor("save", t)
  return errors.guard(save, t, path)
end

-- ---- random numbers ------------------------------------------------------------------------

-- Draws of tensors that name no generator: not the run's, so that a look at a run changes nothing.
local default = random.new(0, "tensor")

local function fill(t, normal, a, b, generator)
  need_tensor(normal and "normal_" or "uniform_", t)
  local from = generator == nil and default or generator
  if from == random.public then from = random.current() end
  if not random.is(from) then
    check.fail(nil, "generator", generator, "pg.generator(seed) or pg.random")
  end
  -- Streams apart from those of single numbers, which count the same index.
  core.fill_random(t, normal, from.seed, from.stream + ((normal and 2 or 1) << 32),
    from.index, a, b)
  from.index = from.index + t:elements()
  return t
end

methods.uniform_ = public(function(t, low, high, generator)
  return fill(t, false, low == nil and 0 or low, high == nil and 1 or high, generator)
end)
methods.normal_ = public(function(t, mean, deviation, generator)
  return fill(t, true, mean == nil and 0 or mean, deviation == nil and 1 or deviation, generator)
end)

-- ---- order and choice ----------------------------------------------------------------------

local masked = methods.masked
methods.masked = nil

local function need_operand(label, value)
  if type(value) ~= "number" and not tensors.is(value) then
    check.fail(nil, label, value, "a tensor or a number")
  end
end

-- One where `condition` is not 0 (NaN is not), else the other; tensors or numbers. Adding the -0
-- that masked() leaves elsewhere changes nothing.
local function where(condition, a, b)
  need_tensor("where condition", condition)
  need_operand("where a", a)
  need_operand("where b", b)
  return masked(a, condition) + masked(b, condition:eq(0))
end

-- Along the last dimension, or axis 1 of a matrix.
local function sorted(t, k, axis, descending)
  local dimensions = #t:shape()
  if axis ~= nil then axis = axis_of("axis", axis, dimensions) end
  if k ~= nil then check.integer(nil, "k", k, 0) end
  local turned = dimensions == 2 and axis == 1
  local from = turned and t:t() or t
  local shape = from:shape()
  local values, indices = core.sort(from, k or shape[#shape] or 1, descending)
  if turned then return values:t(), indices:t() end
  return values, indices
end

methods.sort = public(function(t, axis, descending)
  return sorted(need_tensor("sort", t), nil, axis, descending == true)
end)
methods.argsort = public(function(t, axis, descending)
  return (select(2, sorted(need_tensor("argsort", t), nil, axis, descending == true)))
end)
methods.topk = public(function(t, k, axis, largest)
  if k == nil then check.fail(nil, "topk k", k, "a whole number") end
  return sorted(need_tensor("topk", t), k, axis, largest ~= false)
end)

-- Of an even number the lower of the two in the middle, as PyTorch's: an element of the tensor. NaN
-- where there is one: it counts as the largest, so that it comes last.
methods.median = public(function(t, axis)
  local shape = need_tensor("median", t):shape()
  if axis ~= nil then axis = axis_of("median axis", axis, #shape) end
  if #shape ~= 2 then axis = nil end
  if axis == nil then t = t:reshape(t:elements()) end
  local n = axis and shape[axis] or t:elements()
  if n == 0 then
    errors.misuse("median of nothing: shape [%s]", table.concat(shape, ", "))
  end
  local values, indices = sorted(t, nil, axis, false)
  local middle = (n + 1) // 2
  if axis == nil then
    local last = values[n]
    return last ~= last and last or values[middle]
  end
  local function pick(from, at) return axis == 1 and from:row(at) or from:column(at) end
  local last = pick(values, n)
  local missing = last:ne(last)
  return where(missing, last, pick(values, middle)),
    where(missing, pick(indices, n), pick(indices, middle))
end)

methods.index_select = public(function(t, axis, list)
  need_tensor("index_select", t)
  axis = axis_of("index_select axis", axis, #t:shape())
  if tensors.is(list) then
    list = list:to_table()
    for i, x in ipairs(list) do list[i] = math.tointeger(x) or x end
  elseif type(list) == "table" then
    local rows = {}
    for i, entry in ipairs(list) do rows[i] = type(entry) == "table" and entry.row or entry end
    list = rows
  else
    check.fail(nil, "index_select", list, "a list or a tensor of indices")
  end
  if axis == 2 then return core.gather_rows(t:t(), list):t() end
  return core.gather_rows(t, list)
end)

-- ---- statistics and comparison ---------------------------------------------------------------

-- Squared deviations from the mean over n - correction.
local function variance(t, axis, correction)
  local shape = t:shape()
  if axis ~= nil then axis = axis_of("axis", axis, #shape) end
  if #shape < 2 then axis = nil end
  local n = axis == nil and t:elements() or shape[axis]
  local mean = t:mean(axis)
  local d = axis == 2 and t:sub_rows(mean) or t - mean
  local norm = d:norm(axis)
  if axis == nil then return norm * norm / (n - correction) end
  return norm:square_():div_(n - correction)
end

local function correction_of(label, correction)
  return check.integer(nil, label .. " correction", correction == nil and 1 or correction, 0)
end

methods.var = public(function(t, axis, correction)
  return variance(need_tensor("var", t), axis, correction_of("var", correction))
end)
methods.std = public(function(t, axis, correction)
  local v = variance(need_tensor("std", t), axis, correction_of("std", correction))
  return tensors.is(v) and v:sqrt_() or v ^ 0.5
end)

local norm = methods.norm
-- norm([axis [, p]]): p = 2, 1, math.huge or another positive number.
methods.norm = public(function(t, axis, p)
  if p == nil or p == 2 then return norm(t, axis) end
  check.number(nil, "norm p", p, { min = 0, open_min = true, infinite = true })
  local a = need_tensor("norm", t):abs()
  if p == 1 then return a:sum(axis) end
  if p == math.huge then return a:max(axis) end
  local sum = a:pow_(p):sum(axis)
  return tensors.is(sum) and sum:pow_(1 / p) or sum ^ (1 / p)
end)

methods.dot = public(function(a, b)
  need_tensor("dot", a)
  need_tensor("dot", b)
  local shape, other = table.concat(a:shape(), ", "), table.concat(b:shape(), ", ")
  if shape ~= other then
    errors.misuse("dot: shapes [%s] and [%s] differ", shape, other)
  end
  return (a * b):sum()
end)

local function clamp(t, low, high, in_place)
  if low == nil and high == nil then errors.misuse("clamp: a lower or an upper bound expected") end
  if low ~= nil then t = in_place and t:maximum_(low) or t:maximum(low) end
  if high ~= nil then t = (in_place or low ~= nil) and t:minimum_(high) or t:minimum(high) end
  return t
end
constructors.where = public(where)
methods.where = public(function(t, condition, other)
  return where(condition, need_tensor("where", t), other)
end)

methods.clamp = public(function(t, low, high) return clamp(t, low, high, false) end)
methods.clamp_ = public(function(t, low, high) return clamp(t, low, high, true) end)

local function same_shape(a, b)
  return table.concat(a:shape(), ",") == table.concat(b:shape(), ",")
end

methods.equal = public(function(a, b)
  need_tensor("equal", a)
  need_tensor("equal", b)
  if not same_shape(a, b) or a:dtype() ~= b:dtype() then return false end
  if a:dtype() ~= "F32" then a, b = a:float(), b:float() end
  return a:elements() == 0 or a:eq(b):min() == 1
end)

-- |a - b| <= atol + rtol |b| everywhere; equal infinities are close, NaN is close to nothing.
methods.allclose = public(function(a, b, rtol, atol)
  need_tensor("allclose", a)
  need_tensor("allclose", b)
  rtol = check.number(nil, "allclose rtol", rtol == nil and 1e-5 or rtol, { min = 0 })
  atol = check.number(nil, "allclose atol", atol == nil and 1e-8 or atol, { min = 0 })
  local bound = b:abs():mul_(rtol):add_(atol)
  local near, same = (a - b):abs_():le_(bound), a:eq(b)
  if near:elements() == 0 then return true end
  return near:maximum_(same):mul_(b:isfinite():maximum(same)):min() == 1
end)

-- ---- text ----------------------------------------------------------------------------------

local edge = 3

-- Positions to show of n: all of a few, else the first and last ones with a gap (false) between.
local function ends(n, most)
  local list = {}
  if n <= most then
    for i = 1, n do list[i] = i end
    return list
  end
  local half = most // 2
  for i = 1, half do list[i] = i end
  list[half + 1] = false
  for i = n - half + 1, n do list[#list + 1] = i end
  return list
end

local function cell(x) return math.type(x) == "integer" and tostring(x) or ("%.5g"):format(x) end

local function columns_aligned(rows, indent)
  local widths = {}
  for _, row in ipairs(rows) do
    for i, text in ipairs(row) do widths[i] = math.max(widths[i] or 0, utf8.len(text) or #text) end
  end
  local lines = {}
  for r, row in ipairs(rows) do
    local cells = {}
    for i, text in ipairs(row) do
      cells[i] = (" "):rep(widths[i] - (utf8.len(text) or #text)) .. text
    end
    lines[r] = indent .. table.concat(cells, "  ")
  end
  return lines
end

local function cells_of(vector, wanted)
  local cells = {}
  for i, position in ipairs(wanted) do
    cells[i] = position and cell(vector[position]) or "…"
  end
  return cells
end

-- Lines of a vector or matrix; of more dimensions one matrix after the other, under its indices.
local function describe(t, shape, path, lines)
  if #shape > 2 then
    local rest = table.move(shape, 2, #shape, 1, {})
    for _, i in ipairs(ends(shape[1], 2 * edge)) do
      local below = ("%s%s, "):format(path, i or "…")
      if not i then
        lines[#lines + 1] = ("  [%s…]"):format(path)
      else
        if #rest == 2 then lines[#lines + 1] = ("  [%s]"):format(below:sub(1, -3)) end
        describe(t:row(i), rest, below, lines)
      end
    end
    return
  end
  local rows = {}
  if #shape == 1 then
    rows[1] = cells_of(t, ends(shape[1], 2 * edge + 2))
  else
    local across = ends(shape[2], 2 * edge)
    for _, i in ipairs(ends(shape[1], 2 * edge)) do
      rows[#rows + 1] = i and cells_of(t:row(i), across) or { "…" }
    end
  end
  table.move(columns_aligned(rows, path == "" and "  " or "    "), 1, #rows, #lines + 1, lines)
end

local meta = debug.getregistry()["perigee.tensor"]
local head_of = meta.__tostring

-- Shape and type, then the elements, those in the middle of long dimensions left out.
function meta.__tostring(t)
  local head = head_of(t)
  local ok, text = pcall(function()
    local shape = t:shape()
    if t:elements() == 0 then return head end
    if #shape == 0 then return ("%s: %s"):format(head, cell(t:item())) end
    local lines = { head }
    describe(t, shape, "", lines)
    return table.concat(lines, "\n")
  end)
  return ok and text or head
end

return tensors
