-- What a sweep will run: every point resolved as `perigee train --dry-run` does, before any starts.
local check = require "perigee.check"
local console = require "perigee.console"
local errors = require "perigee.errors"
local grid = require "perigee.sweep.grid"
local rate = require "perigee.rate"
local updates = require "perigee.bench.updates"
local session = require "perigee.session"

local plan = {}

-- One point: what is known of the run that it would make. `set` are its parameters, as text or
-- values; the run's own, converted, come back as `params`.
function plan.resolve(recipe, set, options)
  local _, run = session.plan(recipe, { set = set, device = options.device,
    compute = options.compute, threads = options.threads, quiet = true })
  local spec = run.spec
  run.reading.identity = run.identity
  local found = {
    name = spec.name, params = run.params, identity = run.identity, reading = run.reading,
    last = run.last, total = run.total, tokens = run.tokens_per_update * run.last,
    weights = run.model_config.weights, need = run.need.total,
    fits = run.planned_for or run.available == nil or run.need.total <= run.available,
    flops_per_token = updates.flops_per_token(run.model_config),
    seed = spec.seed, compute = run.compute, device = run.ctx:device(), fork = spec.fork,
  }
  run.comm:leave()
  run:release()
  return found
end

-- 32 bits of a text, for names that would be too long (FNV-1a).
local function hash(text)
  local h = 0x811c9dc5
  for i = 1, #text do h = (h ~ text:byte(i)) * 0x01000193 & 0xffffffff end
  return h
end

-- The runs of a sweep: { name, point, set, dir, plan }. spec: see perigee.sweep.
function plan.runs(spec, points)
  local runs, by_params, by_name = {}, {}, {}
  for _, point in ipairs(points) do
    local set = {}
    for name, value in pairs(spec.set or {}) do set[name] = value end
    for name, value in pairs(point) do
      if set[name] ~= nil then
        errors.usage("--set %s=%s is on the grid as well: expected one or the other", name,
          check.show(set[name]))
      end
      set[name] = value
    end
    local ok, resolved = pcall(plan.resolve, spec.recipe, set, spec)
    if not ok then
      local text = ("%s: %s"):format(grid.key(point), errors.text(resolved))
      if errors.is_failure(resolved) and resolved.usage then errors.usage("%s", text) end
      errors.world(text, errors.is_failure(resolved) and resolved.name or "EINVAL")
    end
    local own = {} -- as the recipe reads them: 1e-3 and 0.001 are one value
    for name in pairs(point) do own[name] = resolved.params[name] end
    local key = grid.key(resolved.params)
    if by_params[key] then
      errors.misuse("sweep: %s and %s are the same run", grid.key(point), by_params[key])
    end
    by_params[key] = grid.key(point)
    local name = grid.name(own)
    if name == "" then name = resolved.name end
    if name == "logs" or name == "recipe" then name = name .. "-run" end -- the sweep's own
    if #name > 120 then name = ("%s-%08x"):format(name:sub(1, 100), hash(key)) end
    if by_name[name] then
      errors.misuse("sweep: %s and %s would both be in the folder %s", by_name[name],
        grid.key(point), name)
    end
    by_name[name] = grid.key(point)
    runs[#runs + 1] = { name = name, point = own, set = set, dir = spec.out .. "/" .. name,
      plan = resolved }
  end
  return runs
end

-- The plan as lines of a table. `speed`: of perigee.rate, for the times, or nil.
function plan.lines(runs, speed)
  local rows = { { "run", "weights", "updates", "tokens", "memory", speed and "time" or nil } }
  local tokens, seconds = 0, 0
  for _, run in ipairs(runs) do
    local p = run.plan
    local time = speed and rate.seconds(speed, p.compute, p.flops_per_token, p.tokens)
    tokens, seconds = tokens + p.tokens, seconds + (time or 0)
    rows[#rows + 1] = { run.name, console.grouped(p.weights), console.grouped(p.last),
      console.grouped(p.tokens), ("%.2f GiB%s"):format(p.need / 2 ^ 30, p.fits and "" or " (!)"),
      time and console.duration(time) or nil }
  end
  rows[#rows + 1] = { ("%d runs"):format(#runs), "", "", console.grouped(tokens), "",
    speed and console.duration(seconds) or nil }
  local lines = console.columns(rows)
  if speed then
    local types = {}
    for i, run in ipairs(runs) do types[i] = run.plan.compute end
    lines[#lines + 1] = ("times %s (%s), without validation, diagnostics and saves"):format(
      speed.text, rate.words(speed, types))
  end
  return lines
end

return plan
