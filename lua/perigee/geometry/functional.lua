-- The functional size of a change of the head over a panel: core/functional.h has the formulas.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local panels = require "perigee.panels"
local report = require "perigee.repl.report"
local runs = require "perigee.run"
local show = require "perigee.repl.print"
local support = require "perigee.geometry.support"
local weights = require "perigee.weights"

local functional = {}
local number, result = support.number, support.result

local columns = { "range", "kl", "tv", "aitchison", "fisher_rao", "entropy", "entropy_change",
  "loss", "loss_change", "gradient_cosine" }
local backward_columns = { "backward", "bound_before", "bound_after", "rows", "rows_bound", "flow",
  "flow_bound" }

-- Mean, root mean square, the largest absolute value, and quantiles of a list.
local function statistics(list)
  local sorted, sum, square, largest = table.move(list, 1, #list, 1, {}), 0.0, 0.0, 0.0
  for _, x in ipairs(list) do
    sum, square, largest = sum + x, square + x * x, math.max(largest, math.abs(x))
  end
  table.sort(sorted)
  local function q(share) return report.quantile(sorted, share) end
  return { mean = sum / #list, rms = math.sqrt(square / #list), max = largest, p10 = q(0.1),
    median = q(0.5), p90 = q(0.9), p99 = q(0.99) }
end

-- Positions in the order of a list's values, the largest first, at most n.
local function largest(list, n)
  local order = {}
  for i = 1, #list do order[i] = i end
  table.sort(order, function(a, b)
    if list[a] ~= list[b] then return list[a] > list[b] end
    return a < b
  end)
  return table.move(order, 1, math.min(n, #order), 1, {})
end

-- The largest ratio of a change to its bound, positions where the bound is 0 aside.
local function used(changes, bounds)
  local most = 0.0
  for i, bound in ipairs(bounds) do
    if bound > 0 then most = math.max(most, math.abs(changes[i]) / bound) end
  end
  return most
end

local function render(h)
  local lines = {
    ("Hilbert RMS %s  mean %s  median %s  90%% %s  99%% %s  max %s over %d positions (panel %s)")
      :format(number(h.rms), number(h.mean), number(h.median), number(h.p90), number(h.p99),
        number(h.max), h.tokens, h.panel),
  }
  if h.diameter then
    lines[#lines + 1] = ("  diameter %s, utilisation RMS/(D sqrt d) %s"):format(number(h.diameter),
      number(h.utilisation))
  end
  local rows = { { "", "mean", "rms", "max" } }
  for _, name in ipairs(columns) do
    if name ~= "range" then
      local s = h[name]
      rows[#rows + 1] = { name, number(s.mean), number(s.rms), number(s.max) }
    end
  end
  if h.backward then
    for _, name in ipairs { "backward", "rows", "flow" } do
      local s = h[name]
      rows[#rows + 1] = { name, number(s.mean), number(s.rms), number(s.max) }
    end
  end
  lines[#lines + 1] = report.columns(rows, { true })
  lines[#lines + 1] = ("  the loss moves by at most %s of its bound H"):format(number(h.loss_used))
  if h.backward then
    lines[#lines + 1] = ("  what the loss sends back by at most %s of its bound, rows %s, flow %s")
      :format(number(h.backward_used), number(h.rows_used), number(h.flow_used))
  end
  for _, entry in ipairs(h.worst) do
    local function token(name)
      local text = entry[name .. "_text"]
      return text and show.quoted(text) or ("token %d"):format(entry[name])
    end
    lines[#lines + 1] = ("  %s at position %d: %s against %s%s"):format(number(entry.range),
      entry.position, token "high", token "low",
      entry.text and ", after " .. show.quoted(entry.text) or "")
  end
  return table.concat(lines, "\n")
end

-- A result from the lists of the core. options: worst, positions, backward.
local function summary(lists, place, panel, options)
  local h = statistics(lists.range)
  h.value, h.diameter, h.seconds = h.rms, lists.diameter, lists.seconds
  h.tokens = #lists.range
  h.panel = place.states and "of a head" or panel:hash()
  if h.diameter and h.diameter > 0 then
    h.utilisation = h.rms / (h.diameter * math.sqrt(place.model:config().width))
  end
  for _, name in ipairs(columns) do
    if name ~= "range" then h[name] = statistics(lists[name]) end
  end
  h.loss_used = used(lists.loss_change, lists.range)
  if options.backward then
    for _, name in ipairs(backward_columns) do h[name] = statistics(lists[name]) end
    h.before_diameter, h.after_diameter = lists.before_diameter, lists.after_diameter
    local least = {}
    for i, x in ipairs(lists.bound_before) do least[i] = math.min(x, lists.bound_after[i]) end
    h.backward_used = used(lists.backward, least)
    h.rows_used = used(lists.rows, lists.rows_bound)
    h.flow_used = used(lists.flow, lists.flow_bound)
  end
  h.worst = largest(lists.range, options.worst)
  for i, at in ipairs(h.worst) do
    h.worst[i] = { position = at, range = lists.range[at], high = lists.high[at],
      low = lists.low[at], target = lists.target[at], loss_change = lists.loss_change[at] }
  end
  if options.positions then
    h.positions = { target = lists.target, high = lists.high, low = lists.low }
    for _, name in ipairs(columns) do h.positions[name] = lists[name] end
    for _, name in ipairs(options.backward and backward_columns or {}) do
      h.positions[name] = lists[name]
    end
  end
  return result(h, render)
end

local function read_options(options, known, what)
  options = check.table(nil, what .. " options", options or {})
  keys.check(options, known, what .. " options")
  local function flag(name)
    if options[name] == nil then return false end
    return check.boolean(nil, ("%s %s"):format(what, name), options[name])
  end
  return { run = options.run, before = flag "before", backward = flag "backward",
    positions = flag "positions",
    worst = check.integer(nil, what .. " worst", options.worst or 3, 0) }
end

-- What the change t of the head does over a panel. Without `before` it is in the weights already,
-- as an update's increment is; with it, it would come after them.
function functional.hilbert(t, panel, options)
  options = read_options(options, { "run", "before", "backward", "worst", "positions" }, "hilbert")
  t = support.matrix(t, "hilbert")
  local states = panels.states_of(panel)
  if states then
    return summary(errors.try(core.functional_states(states.value, t, states.hidden, states.targets,
      states.scale, { before = options.before, backward = options.backward })),
      panels.place(states), states, options)
  end
  local place = panels.place_of(options.run, panel, "hilbert run")
  panel = panels.read(panel, place, "hilbert panel")
  local wanted = { before = options.before, backward = options.backward }
  local lists
  if place.core then
    lists = errors.try(place.core:functional(panel, t, wanted))
  else
    lists = errors.try(core.functional(place.model, panel, t, wanted))
  end
  return summary(lists, place, panel, options)
end

-- From one model to another, hidden states and all. `to` is a run, or what is opened at the prompt;
-- `from` is such a one of the same context, a checkpoint, or "start": what the run started from.
function functional.between(from, to, panel, options)
  options = read_options(options, { "backward", "worst", "positions" }, "between")
  local place = panels.place_of(to, panel, "between")
  panel = panels.read(panel, place, "between panel")
  local wanted = { backward = options.backward }
  local other -- ours to close
  if from == "start" then
    other = weights.of_start(runs.find(to) or check.fail(nil, "between to", to,
      "a run, whose start is asked for"))
  elseif type(from) == "string" then
    other = weights.of_checkpoint(place.ctx, from, place.model:compute())
  end
  local _ <close> = other
  local model = other or (panels.place(from) or check.fail(nil, "between from", from,
    'a run, what is opened at the prompt, a checkpoint or "start"')).model
  local lists
  if place.core then
    lists = errors.try(place.core:functional_from(model, panel, wanted))
  else
    lists = errors.try(core.functional_between(model, place.model, panel, wanted))
  end
  return summary(lists, place, panel, options)
end

return functional
