-- pg.diagnostics: measurements of the head and of the model, as hooks. They use only what `run`
-- offers to any hook, change nothing, and may be called by hand: pg.diagnostics.validation{…}(run).
--
-- prepare(run) runs before the run directory exists and refuses what cannot work; its result is
-- handed to measure(run, prepared).
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local check = require "perigee.check"
local panels = require "perigee.panels"

local diagnostics = {}

local Diagnostic = { __name = "a diagnostic" }
Diagnostic.__index = Diagnostic
Diagnostic.__tostring = function(self) return "pg.diagnostics." .. self.name end

local prepared = setmetatable({}, { __mode = "k" }) -- run -> diagnostic -> prepared value

local function new(name, prepare, measure)
  return setmetatable({ name = name, prepare_with = prepare, measure = measure,
    where = errors.where() }, Diagnostic)
end

diagnostics.new = new

function diagnostics.is(value) return getmetatable(value) == Diagnostic end

function Diagnostic:prepare(run)
  prepared[run] = prepared[run] or {}
  if prepared[run][self] == nil then
    prepared[run][self] = self.prepare_with(run, self.where) or true
  end
  return prepared[run][self]
end

function Diagnostic:__call(run) return self.measure(run, self:prepare(run)) end

-- A table of switches with their defaults.
local function switches(name, options, defaults)
  check.table(nil, name, options)
  local known, values = {}, {}
  for key in pairs(defaults) do known[#known + 1] = key end
  table.sort(known)
  keys.check(options, known, name)
  for key, default in pairs(defaults) do
    values[key] = default
    if options[key] ~= nil then
      values[key] = check.boolean(nil, name .. " " .. key, options[key])
    end
  end
  return values
end

-- prepare of what measures the head's increment.
local function needs_increment(name)
  return function(run, where)
    if run.head.optimizer == "frozen" then
      errors.at(where, "pg.diagnostics.%s: the head is frozen and has no increment", name)
    end
  end
end

-- Exact row diameter of the head's increment and the tokens that attain it (SPEC §4); with
-- `bracket` also the bounds that cost one pass over the rows.
function diagnostics.head_diameter(options)
  local want = switches("pg.diagnostics.head_diameter", options or {}, { bracket = false })
  return new("head_diameter", needs_increment("head_diameter"), function(run)
    local name = "diagnostics/lm_head_step/diameter_exact"
    if run.update == 0 then return nil end -- no increment yet
    local product <close> = (run.config.head or {}).rank and run:head_increment() or nil
    local found = run:diameter(product or run.head.increment)
    run:log(name, found.value)
    if found.rows then
      -- Rows count from 1, token ids from 0.
      local first, second = found.rows[1] - 1, found.rows[2] - 1
      run:log("diagnostics/lm_head_step/diameter_tokens", { first, second })
      local a, b = run:token_text(first), run:token_text(second)
      if a and b then run:log("diagnostics/lm_head_step/diameter_text", { a, b }) end
    end
    if want.bracket then
      run:log("diagnostics/lm_head_step/diameter_lower", found.bracket.lower)
      run:log("diagnostics/lm_head_step/diameter_upper", found.bracket.upper)
    end
    return found.value
  end)
end

-- What else the rows of the head's increment are like (pg.geometry). The separation takes a search
-- over all pairs of rows, so it has to be asked for.
function diagnostics.head_geometry(options)
  local want = switches("pg.diagnostics.head_geometry", options or {},
    { common_mode = true, spectrum = true, separation = false })
  return new("head_geometry", needs_increment("head_geometry"), function(run)
    if run.update == 0 then return nil end
    local geometry, found = require("perigee.geometry").raw, {}
    local product <close> = (run.config.head or {}).rank and run:head_increment() or nil
    local increment = product or run.head.increment
    if want.common_mode then found.common_mode = geometry.common_mode(increment).value end
    if want.spectrum then
      local s = geometry.spectrum(increment)
      found.spectral_norm, found.norm = s.value, s.norm
      found.stable_rank, found.effective_rank = s.stable_rank, s.effective_rank
    end
    if want.separation then
      local s = geometry.separation(increment)
      found.separation, found.rho = s.value, s.rho -- no rho when all rows are alike
    end
    for _, name in ipairs { "common_mode", "spectral_norm", "norm", "stable_rank",
      "effective_rank", "separation", "rho" } do
      if found[name] then run:log("diagnostics/lm_head_step/" .. name, found[name]) end
    end
    return found
  end)
end

-- Validation loss on a fixed prefix of the validation split and, with hilbert_panel, the Hilbert
-- RMS of the head's increment over a fixed panel of positions.
function diagnostics.validation(options)
  check.table(nil, "pg.diagnostics.validation", options)
  keys.check(options, { "tokens", "hilbert_panel" }, "pg.diagnostics.validation")
  local tokens = check.integer(nil, "pg.diagnostics.validation tokens", options.tokens, 1)
  local panel = options.hilbert_panel and panels.new(options.hilbert_panel, "hilbert_panel")
  return new("validation", function(run)
    run:validation_tokens(tokens)
    return { panel = panel and run:panel(panel) or nil }
  end, function(run, ready)
    local found = run:validate { tokens = tokens }
    run:log("validation/loss", found.loss)
    run:log("validation/perplexity", math.exp(found.loss))
    run:log("validation/tokens", found.tokens)
    run:log("validation/seconds", found.seconds)
    run:log("events/evaluation", 1)
    if ready.panel and run.update > 0 and run.head.optimizer ~= "frozen" then
      run:log("validation/hilbert_step/rms", (run:hilbert(ready.panel)))
      run:log("validation/hilbert_step/tokens", ready.panel:tokens())
      run:log("validation/hilbert_step/panel", ready.panel:hash())
    end
    return found.loss
  end)
end

-- How much of the loss's gradient at the logits gets through the head, over a panel: geometry,
-- which is not known to tell how well a model trains.
function diagnostics.bottleneck(options)
  check.table(nil, "pg.diagnostics.bottleneck", options, "{ panel = … }")
  keys.check(options, { "panel" }, "pg.diagnostics.bottleneck")
  local panel = panels.new(options.panel, "pg.diagnostics.bottleneck panel")
  return new("bottleneck", function(run) return { panel = run:panel(panel) } end,
    function(run, ready)
      local found = require("perigee.geometry").raw.bottleneck(ready.panel, { run = run })
      run:log("geometry/lm_head/kept_rms", found.rms)
      run:log("geometry/lm_head/kept_median", found.median)
      run:log("geometry/lm_head/kept_baseline", found.baseline)
      return found.rms
    end)
end

-- How much of the steepest descent under the row diameter the head's update keeps, as certified
-- intervals: RowNorm of this update's gradient, and the increment itself.
function diagnostics.oracle(options)
  options = check.table(nil, "pg.diagnostics.oracle", options or {})
  keys.check(options, { "gap", "seconds" }, "pg.diagnostics.oracle")
  local name = "pg.diagnostics.oracle "
  local asked = {
    gap = check.number(nil, name .. "gap", options.gap or 0.02, { min = 1e-9, max = 1 }),
    seconds = check.number(nil, name .. "seconds", options.seconds or 10, { min = 1e-3 }),
  }
  return new("oracle", function(run, where)
    if run.head.optimizer == "frozen" then
      errors.at(where, "pg.diagnostics.oracle: the head is frozen and has no gradient")
    end
  end, function(run)
    if run.update == 0 then return nil end -- no gradient yet
    local geometry = require("perigee.geometry").raw
    local g, s = run.head.gradient, run.head.increment
    local best = geometry.oracle(g, asked)
    run:log("geometry/oracle", { best.lower, best.upper })
    run:log("geometry/oracle_share", { best.rownorm_share.lower, best.rownorm_share.upper })
    run:log("geometry/oracle_seconds", best.seconds)
    local diameter = run:diameter(s).value
    if diameter > 0 and best.lower > 0 then
      local gain = -(g * s):sum() / diameter
      local low, high = gain / best.upper, gain / best.lower
      run:log("geometry/oracle_increment_share", { math.min(low, high), math.max(low, high) })
    end
    return best
  end)
end

local public = { head_diameter = diagnostics.head_diameter, validation = diagnostics.validation,
  head_geometry = diagnostics.head_geometry, bottleneck = diagnostics.bottleneck,
  oracle = diagnostics.oracle }
for _, part in ipairs { "measures", "size" } do
  for name, make in pairs(require("perigee.diagnostics." .. part)(new)) do public[name] = make end
end

local names = {}
for name in pairs(public) do names[#names + 1] = name end
table.sort(names)

diagnostics.public = setmetatable(public, {
  __index = function(_, name)
    errors.misuse("pg.diagnostics has no '%s'%s", tostring(name), keys.suggestion(name, names))
  end,
})

return diagnostics
