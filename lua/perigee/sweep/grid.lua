-- The points of a sweep: tables of parameter values, from a grid, random axes and a list of runs.
--
-- An axis is NAME = { value, … }; or { VALUE = grid, … }, where every value brings a grid of its
-- own; or pg.uniform(a, b) and pg.loguniform(a, b), drawn anew for every sample.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local keys = require "perigee.keys"

local grid = {
  most_samples = 100000, -- every one is planned and becomes a folder
}

local Range = { __name = "a random axis" }
Range.__index = Range

local function range(kind, low, high)
  local what = "pg." .. kind
  check.number(nil, what .. "[1]", low)
  check.number(nil, what .. "[2]", high)
  if low >= high or (kind == "loguniform" and low <= 0) then
    errors.misuse("%s(%s, %s): expected %s < b", what, check.show(low), check.show(high),
      kind == "loguniform" and "0 < a" or "a")
  end
  return setmetatable({ kind = kind, low = low, high = high }, Range)
end

-- Uniform in [a, b), and in its logarithm.
function grid.uniform(a, b) return range("uniform", a, b) end
function grid.loguniform(a, b) return range("loguniform", a, b) end

-- Number `index` of the axis `name`: the same in every sweep of that seed.
function Range:draw(seed, name, index)
  local u = core.uniform(seed, "sweep/" .. name, index)
  if self.kind == "loguniform" then
    return math.exp(math.log(self.low) + u * (math.log(self.high) - math.log(self.low)))
  end
  return self.low + u * (self.high - self.low)
end

function Range:__tostring() return ("%s:%g:%g"):format(self.kind, self.low, self.high) end

local function sorted(t)
  local list = {}
  for key in pairs(t) do list[#list + 1] = key end
  table.sort(list, function(a, b)
    if (a == "seed") ~= (b == "seed") then return b == "seed" end -- seeds of a point side by side
    return tostring(a) < tostring(b)
  end)
  return list
end

local function copied(point, name, value)
  local copy = {}
  for k, v in pairs(point) do copy[k] = v end
  if copy[name] ~= nil then
    errors.misuse("sweep: %s is on two axes of the same point", name)
  end
  copy[name] = value
  return copy
end

local function scalar(value)
  local kind = type(value)
  return kind == "number" or kind == "string" or kind == "boolean"
end

-- Every point of `points` with every value of the axis.
local function cross(points, name, axis, sample)
  if type(name) ~= "string" then
    errors.misuse("sweep.grid: %s is not the name of a parameter", check.show(name))
  end
  local out = {}
  if getmetatable(axis) == Range then
    for _, point in ipairs(points) do
      out[#out + 1] = copied(point, name, axis:draw(sample.seed, name, sample.index))
    end
    return out
  end
  if type(axis) ~= "table" or next(axis) == nil then
    check.fail(nil, "sweep.grid." .. name, axis, "a list of values, or a table of grids by value")
  end
  local list = #axis > 0
  if list then keys.check(axis, {}, "sweep.grid." .. name, nil, #axis) end
  for _, point in ipairs(points) do
    for _, key in ipairs(list and axis or sorted(axis)) do
      if not scalar(key) then
        check.fail(nil, "sweep.grid." .. name, key, "numbers, strings and booleans")
      end
      local branch = { copied(point, name, key) }
      if not list then
        check.table(nil, ("sweep.grid.%s.%s"):format(name, tostring(key)), axis[key], "a grid")
        for _, inner in ipairs(sorted(axis[key])) do
          branch = cross(branch, inner, axis[key][inner], sample)
        end
      end
      table.move(branch, 1, #branch, #out + 1, out)
    end
  end
  return out
end

local function any_range(axes)
  if getmetatable(axes) == Range then return true end
  if type(axes) ~= "table" then return false end
  for _, value in pairs(axes) do
    if any_range(value) then return true end
  end
  return false
end

-- A name for messages and sets: alike for points with equal values.
function grid.key(point)
  local parts = {}
  for _, name in ipairs(sorted(point)) do
    parts[#parts + 1] = ("%s=%s"):format(name, check.show(point[name]))
  end
  return table.concat(parts, " ")
end

-- spec: { grid, order (names, first varies slowest), runs, filter, samples, sample_seed }. Returns
-- the list of points; two equal ones, or none, are errors.
function grid.points(spec)
  local points = {}
  local axes = spec.grid or {}
  if next(axes) ~= nil then
    local order = spec.order or sorted(axes)
    local samples = 1
    if any_range(axes) then
      if not spec.samples then
        errors.misuse("sweep: a random axis needs samples = n, the number of draws")
      end
      samples = spec.samples
    elseif spec.samples then
      errors.misuse("sweep: samples = %d without a random axis (pg.uniform, pg.loguniform)",
        spec.samples)
    end
    for index = 0, samples - 1 do
      local branch = { {} }
      for _, name in ipairs(order) do
        branch = cross(branch, name, axes[name], { seed = spec.sample_seed or 0, index = index })
      end
      table.move(branch, 1, #branch, #points + 1, points)
    end
  end
  for i, point in ipairs(spec.runs or {}) do
    check.table(nil, ("sweep.runs[%d]"):format(i), point, "a table of parameters")
    for name, value in pairs(point) do
      if type(name) ~= "string" or not scalar(value) then
        check.fail(nil, ("sweep.runs[%d].%s"):format(i, tostring(name)), value,
          "a number, string or boolean")
      end
    end
    points[#points + 1] = point
  end
  local kept, seen = {}, {}
  for _, point in ipairs(points) do
    if not spec.filter or spec.filter(point) then
      local key = grid.key(point)
      if seen[key] then errors.misuse("sweep: %s is there twice", key) end
      seen[key] = true
      kept[#kept + 1] = point
    end
  end
  if #kept == 0 then
    errors.misuse("sweep: there is no run: the grid and the list of runs are empty")
  end
  return kept
end

-- "lr=1e-3,1e-4" or "lr=loguniform:1e-4:1e-1" from the command line -> name, axis.
function grid.parse(text)
  local name, values = text:match("^([%a_][%w_]*)=(.+)$")
  if not name then errors.usage("--grid %s: expected name=value,value,…", text) end
  local kind, low, high = values:match("^(%a+):([^:,]+):([^:,]+)$")
  if kind == "uniform" or kind == "loguniform" then
    low, high = tonumber(low), tonumber(high)
    if not low or not high or not (low < high and high - low < math.huge)
      or (kind == "loguniform" and low <= 0) then
      errors.usage("--grid %s: expected %s:a:b with finite numbers a < b", text, kind)
    end
    return name, range(kind, low, high)
  end
  local list = {}
  for value in (values .. ","):gmatch("(.-),") do
    if value == "" then errors.usage("--grid %s: expected a value between the commas", text) end
    list[#list + 1] = value
  end
  return name, list
end

-- The name of a point's folder: its parameters, those of text that is no file name replaced.
function grid.name(point)
  local parts = {}
  for _, name in ipairs(sorted(point)) do
    local value = point[name]
    local text = math.type(value) == "float" and ("%.6g"):format(value) or tostring(value)
    parts[#parts + 1] = name .. "=" .. text:gsub("[^%w.+=-]", "_")
  end
  return table.concat(parts, ",")
end

-- A grid as plain data, for sweep.json: { loguniform = { a, b } } is a random axis.
function grid.object(axes)
  local object = {}
  for name, axis in pairs(axes) do
    if getmetatable(axis) == Range then
      object[tostring(name)] = { [axis.kind] = core.json.array { axis.low, axis.high } }
    elseif #axis > 0 then
      object[tostring(name)] = core.json.array(table.move(axis, 1, #axis, 1, {}))
    else
      object[tostring(name)] = grid.object(axis)
    end
  end
  return object
end

grid.sorted = sorted
return grid
