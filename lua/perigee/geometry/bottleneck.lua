-- The gradient bottleneck of the head: core/bottleneck.h has the formulas. It is geometry: that
-- more of the gradient gets through is not known to train better.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local panels = require "perigee.panels"
local report = require "perigee.repl.report"
local support = require "perigee.geometry.support"

local bottleneck = {}
local number, result = support.number, support.result

local function render(b)
  local lines = {
    ("kept %s of the logit gradient in the rms (median %s, 10%% %s, 90%% %s) over %d positions "
      .. "(%s)"):format(number(b.rms), number(b.median), number(b.p10), number(b.p90), b.tokens,
      b.panel),
    ("  a random subspace of %d among %d dimensions keeps sqrt(%d/%d) = %s; condition about %s")
      :format(b.rank, b.classes, b.rank, b.classes, number(b.baseline), number(b.condition)),
  }
  local rows = { { "loss", "kept (rms)", "positions" } }
  for i, d in ipairs(b.deciles) do
    rows[i + 1] = { number(d.loss), number(d.kept), tostring(d.count) }
  end
  lines[#lines + 1] = report.columns(rows)
  return table.concat(lines, "\n")
end

local function rms(list)
  local square = 0.0
  for _, x in ipairs(list) do square = square + x * x end
  return math.sqrt(square / #list)
end

-- Tenths of the positions in the order of their loss, fewer where there are fewer positions.
local function deciles(positions)
  table.sort(positions, function(a, b)
    if a.loss ~= b.loss then return a.loss < b.loss end
    return a.index < b.index
  end)
  local list, groups = {}, math.min(10, #positions)
  for g = 1, groups do
    local kept, loss = {}, 0.0
    for i = (g - 1) * #positions // groups + 1, g * #positions // groups do
      kept[#kept + 1], loss = positions[i].kept, loss + positions[i].loss
    end
    list[g] = { loss = loss / #kept, kept = rms(kept), count = #kept }
  end
  return list
end

local function summary(found, at, options)
  local kept, positions = {}, {}
  for i, x in ipairs(found.kept) do
    if x == x then -- no gradient, no share
      kept[#kept + 1] = x
      positions[#positions + 1] = { kept = x, loss = found.loss[i], index = i }
    end
  end
  local b = { rank = found.rank, classes = found.classes, baseline = found.baseline,
    condition = found.condition, seconds = found.seconds, tokens = #found.kept, panel = at,
    without_gradient = #found.kept - #kept }
  if #kept == 0 then
    errors.world("ENONFINITE: the bottleneck: no position has a gradient", "ENONFINITE")
  end
  local sum = 0.0
  for _, x in ipairs(kept) do sum = sum + x end
  b.rms, b.mean = rms(kept), sum / #kept
  b.value = b.rms
  b.deciles = deciles(positions)
  table.sort(kept)
  b.p10, b.median, b.p90 = report.quantile(kept, 0.1), report.quantile(kept, 0.5),
    report.quantile(kept, 0.9)
  if options.positions then
    b.positions = { kept = found.kept, norm = found.norm, loss = found.loss, target = found.target }
  end
  return result(b, render)
end

-- The share of ||p - e_c|| that gets through the head, at the positions of a panel. options: run,
-- where to measure, and positions = true for the lists.
function bottleneck.bottleneck(panel, options)
  options = check.table(nil, "bottleneck options", options or {})
  keys.check(options, { "run", "positions" }, "bottleneck options")
  local wanted = { positions = options.positions ~= nil
    and check.boolean(nil, "bottleneck positions", options.positions) }
  local states = panels.states_of(panel)
  if states then
    return summary(errors.try(core.bottleneck_states(states.value, states.hidden, states.targets,
      states.scale)), "of a head", wanted)
  end
  local place = panels.place_of(options.run, panel, "bottleneck run")
  panel = panels.read(panel, place, "bottleneck panel")
  local found
  if place.core then
    found = errors.try(place.core:bottleneck(panel))
  else
    found = errors.try(core.bottleneck(place.model, panel))
  end
  return summary(found, "panel " .. panel:hash(), wanted)
end

-- ||Pi g||_F / ||g||_F, Pi the projection onto the column space of u: what of a gradient of the
-- head a backward pass knows of. 1 minus its square is the share of the residual.
function bottleneck.column_share(u, g)
  u, g = support.matrix(u, "column_share"), support.matrix(g, "column_share gradient")
  local share = errors.try(core.bottleneck_gradient(u, g))
  return result({ value = share, residual = math.sqrt(math.max(0, 1 - share * share)) },
    function(s)
      return ("%s of the norm lies in the column space, the residual is %s"):format(
        number(s.value), number(s.residual))
    end)
end

return bottleneck
