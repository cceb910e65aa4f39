-- The Lua half of recipe_fuzz.c: returns a function that reads bytes as a recipe table, starting
-- from a valid recipe so that deep checks are reached, and demands a clean answer.
local pg = require "perigee"
local errors = require "perigee.errors"

local function valid()
  return {
    name = "fuzz", seed = 0, updates = 10,
    model = { layers = 1, width = 8, heads = 2, head_dim = 4, context = 8, vocab = 16 },
    data = pg.data.shards { path = "nowhere" },
    batch = { sequences = 4, micro = 2 },
    schedule = pg.schedule.warmup_cosine { warmup = 0.1, floor = 0.1 },
    log = { every = 1 },
    optimizers = {
      { role = "embedding", pg.optim.adamw { lr = 1e-3 } },
      { role = "backbone", pg.optim.muon { lr = 1e-3 } },
      { role = "head", pg.optim.rownorm { lr = 1e-3 } },
    },
    hooks = { pg.every(2, pg.diagnostics.head_diameter()) },
  }
end

local keys = { "name", "seed", "model", "data", "batch", "updates", "tokens_per_parameter",
  "max_updates", "schedule", "clip", "log", "optimizers", "hooks", "compute", "device", "threads",
  "increments", "fork", "preset", "layers", "width", "heads", "head_dim", "mlp", "vocab", "context",
  "norm_eps", "rope_base", "init_std", "logit_scale", "init", "sequences", "micro", "every", "role",
  "match", "except", "slots", "head", "embedding", "backbone", "weight_decay_scale", "sequencess" }
local numbers = { 0, 1, -1, 2, 3, 0.5, -0.0, 1e-300, 1e308, math.huge, -math.huge, 0 / 0,
  math.maxinteger, math.mininteger, 4, 8 }
local strings = { "", "head", "embedding", "backbone", "keep", "190m", "cpu", "fp32", "auto", "%",
  "([", "lm_head", ("x"):rep(300), "\0", "a/b", "none" }

-- The fuzzer sees no coverage inside Lua and so keeps its inputs short: past their end a generator
-- that they seed goes on, so that every input is a different recipe.
local function reader(bytes)
  local at, state = 0, 0x9E3779B97F4A7C15
  for i = 1, #bytes do state = (state ~ bytes:byte(i)) * 0xD1342543DE82EF95 + 1 end
  local read = {}
  function read.byte()
    at = at + 1
    state = state * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D
    return bytes:byte(at) or state >> 56
  end
  local length = math.max(#bytes, 4 + (state >> 58))
  function read.done() return at >= length end
  function read.of(list) return list[read.byte() % #list + 1] end
  -- A value, possibly one of the tables met so far, which makes cycles.
  function read.value(seen, depth)
    local kind = read.byte() % 12
    if kind <= 2 then return read.of(numbers) end
    if kind <= 4 then return read.of(strings) end
    if kind == 5 then return true end
    if kind == 6 then return false end
    if kind == 7 then return function() return read.of(numbers) end end
    if kind == 8 then return seen[read.byte() % #seen + 1] end
    if kind == 9 and depth > 0 then return read.fill({}, seen, depth - 1) end
    if kind == 10 then return pg.optim[read.of { "adamw", "muon", "frozen" }] {} end
    return nil
  end
  function read.fill(t, seen, depth)
    seen[#seen + 1] = t
    for _ = 1, read.byte() % 6 do
      local key = read.byte() % 5 == 0 and read.byte() % 6 or read.of(keys)
      t[key] = read.value(seen, depth)
    end
    return t
  end
  -- A table inside t, so that changes reach every level.
  function read.descend(t)
    for _ = 1, read.byte() % 4 do
      local inner = t[read.of(keys)] or t[read.byte() % 4]
      if type(inner) == "table" and getmetatable(inner) == nil then t = inner end
    end
    return t
  end
  return read
end

-- An error is clean when it is Perigee's own failure, or a message that names what was wrong
-- rather than a Lua operation that went wrong inside Perigee.
local function check_error(e)
  if errors.is_failure(e) then return end
  assert(type(e) == "string", "an error of type " .. type(e))
  assert(not e:find "attempt to" and not e:find "stack overflow" and not e:find "bad argument", e)
end

return function(bytes)
  local read = reader(bytes)
  local raw = valid()
  local seen = { raw }
  while not read.done() do read.fill(read.descend(raw), seen, 3) end
  local ok, e = pcall(pg.recipe, raw)
  if not ok then return check_error(e) end
  local ok2, e2 = pcall(e.with, e, read.fill({}, seen, 2))
  if not ok2 then check_error(e2) end
end
