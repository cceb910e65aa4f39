-- Random numbers that a checkpoint can hold. Draw number i of a stream is a pure function of
-- (seed, stream, i), so the state is a seed and a count.
--
-- pg.random is the run's own generator. math.random and math.randomseed are replaced while a run
-- is open, since Lua cannot export the state of its generator.
local core = require "perigee.core"
local check = require "perigee.check"

local random = {}

local Generator = { __name = "a generator" }
Generator.__index = Generator

-- Streams keep generators of one seed apart.
local streams = { random = 1, math = 2, tensor = 3 }

function random.new(seed, stream)
  return setmetatable({ seed = seed, first_seed = seed, stream = streams[stream], index = 0 },
    Generator)
end

function Generator:uniform()
  local value = core.uniform(self.seed, self.stream, self.index)
  self.index = self.index + 1
  return value
end

-- Like math.random: () in [0,1), (m) in 1 … m, (m, n) in m … n.
function Generator:draw(m, n, ...)
  if m == nil then return self:uniform() end
  if n == nil then m, n = 1, m end
  m = check.integer(nil, "random m", m)
  n = check.integer(nil, "random n", n)
  if select("#", ...) > 0 then error("wrong number of arguments to 'random'", 3) end
  if m > n then error(("random: the interval from %d to %d is empty"):format(m, n), 3) end
  return m + math.floor(self:uniform() * (n - m + 1))
end

-- A normal number (Box-Muller; two uniforms a draw, so that the count stays the whole state).
function Generator:normal(mean, deviation)
  local u, v = 1 - self:uniform(), self:uniform()
  local z = math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)
  return (mean or 0) + (deviation or 1) * z
end

function Generator:reseed(seed)
  if seed == nil then
    seed = self.first_seed
  elseif math.type(seed) ~= "integer" then
    seed = math.tointeger(seed) or string.unpack("i8", string.pack("d", seed))
  end
  self.seed, self.index = seed, 0
end

function Generator:save()
  return { seed = self.seed, first_seed = self.first_seed, index = self.index }
end

function Generator:load(saved)
  self.seed, self.first_seed, self.index = saved.seed, saved.first_seed, saved.index
end

local lua_random, lua_randomseed = math.random, math.randomseed
local active -- { random =, math = } of the run that is at work

-- The two generators of a seed.
function random.pair(seed)
  return { random = random.new(seed, "random"), math = random.new(seed, "math") }
end

-- Outside any run: a fixed seed, so that a recipe that draws numbers reads the same each time.
local default = random.pair(0)

local function of(kind) return (active or default)[kind] end

-- math.random of Lua 5.4 also takes 0 for a random integer.
local function replaced_random(m, n, ...)
  local generator = of("math")
  if m == 0 and n == nil then
    local high, low = generator:uniform(), generator:uniform()
    return (math.floor(high * 4294967296) << 32) | math.floor(low * 4294967296)
  end
  return generator:draw(m, n, ...)
end

local function replaced_randomseed(seed) of("math"):reseed(seed) end

-- Let this pair answer pg.random and math.random from now on.
function random.activate(pair)
  active = pair
  math.random, math.randomseed = replaced_random, replaced_randomseed -- luacheck: ignore 122
end

-- Lua's own generator again, when `pair` is the active one (nil: in any case).
function random.release(pair)
  if pair ~= nil and active ~= pair then return end
  active = nil
  math.random, math.randomseed = lua_random, lua_randomseed -- luacheck: ignore 122
end

function random.active() return active end

function random.is(value) return getmetatable(value) == Generator end

-- The generator behind pg.random.
function random.current() return of("random") end

-- Read a recipe (f) with generators that always start alike.
function random.during_reading(f, ...)
  local outer = active
  random.activate(random.pair(0))
  local results = table.pack(pcall(f, ...))
  if outer then random.activate(outer) else random.release() end
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

-- pg.random(), pg.random(n), pg.random(m, n), pg.random.normal([mean, deviation]).
random.public = setmetatable({
  uniform = function() return of("random"):uniform() end,
  normal = function(mean, deviation) return of("random"):normal(mean, deviation) end,
}, { __call = function(_, ...) return of("random"):draw(...) end })

return random
