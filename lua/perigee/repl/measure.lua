-- Measurements at the prompt: diameter and neighbours of rows, Hilbert ranges over a panel. All are
-- pure. Results are tables with a text.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local geometry = require("perigee.geometry").raw
local keys = require "perigee.keys"
local panels = require "perigee.panels"
local report = require "perigee.repl.report"
local show = require "perigee.repl.print"
local view = require "perigee.repl.view"

local measure = {}
local methods = view.methods
local number = report.number

-- The first opened one whose vocabulary a matrix has as rows: set by the workspace.
local views_of_prompt = function() return {} end
function measure.set_views(f) views_of_prompt = f end

local function tokens_for(rows)
  for _, v in ipairs(views_of_prompt()) do
    if v.config.vocab == rows then return view.tokens(v) end
  end
end

-- A tensor, or the value of a parameter.
local function matrix_of(what, label)
  if show.is_tensor(what) then return what end
  if type(what) == "userdata" then return what.value end
  check.fail(nil, label, what, "a tensor or a parameter")
end

-- ---- rows ----------------------------------------------------------------------------------

local function render_diameter(d)
  if not d.rows then return "diameter 0: all rows are alike" end
  local pair = ("rows %d and %d"):format(d.rows[1], d.rows[2])
  if d.tokens then
    local texts = {}
    for i, token in ipairs(d.tokens) do
      texts[i] = token.text and show.quoted(token.text) or ("token %d"):format(token.id)
    end
    pair = ("%s and %s (%s)"):format(texts[1], texts[2], pair)
  end
  return ("diameter %s between %s, in %.3g s"):format(number(d.value), pair, d.seconds)
end

-- t:diameter(): pg.geometry.diameter with `tokens` and their `text`.
function core.tensor_methods.diameter(t)
  local found = geometry.diameter(t)
  local all = tokens_for(t:shape()[1])
  if all and found.rows then
    local a, b = all:by_row(found.rows[1]), all:by_row(found.rows[2])
    found.tokens, found.text = { a, b }, { a.text, b.text }
  end
  return report.new(found, render_diameter)
end

local function render_neighbours(result)
  local rows = { { "row", "distance", "cosine", "token" } }
  for i, entry in ipairs(result) do
    local token = entry.token
    rows[i + 1] = { tostring(entry.row), number(entry.distance), number(entry.cosine),
      token and token.text and show.quoted(token.text) or token and tostring(token.id) or "" }
  end
  return report.columns(rows, { [4] = true })
end

-- t:neighbours(row or token, k): pg.geometry.neighbours with each row's `token`.
function core.tensor_methods.neighbours(t, at, k)
  local found = geometry.neighbours(t, at, k)
  local all = tokens_for(matrix_of(t, "neighbours"):shape()[1])
  for _, entry in ipairs(found) do entry.token = all and all:by_row(entry.row) end
  return report.new(found, render_neighbours)
end

core.parameter_methods.neighbours = core.tensor_methods.neighbours
function core.parameter_methods.diameter(p) return core.tensor_methods.diameter(p.value) end

-- ---- panels --------------------------------------------------------------------------------

panels.add_place(function(value)
  if not view.is(value) then return nil end
  return { owner = value, ctx = value._ctx, source = view.source(value),
    context = value.config.context, vocab = value.config.vocab, model = value.model,
    -- with several ranks the run's own methods are for all of them
    core = value._run and value._run.world == 1 and value._run.core or nil }
end)

-- panel(n), panel{ tokens, ranks, micro, spread } or panel(pg.panel{…}): validation positions, of
-- the first opened one.
function methods:panel(options)
  if options == nil then options = {} end
  if type(options) == "table" and not panels.is(options) and options.tokens == nil then
    local context = self.config.context
    local groups = view.source(self):validation_groups(self._ctx, context, 1)
    local copy = { tokens = math.min(2048, groups * context) }
    for key, value in pairs(options) do copy[key] = value end
    options = copy
  end
  return panels.read(options, panels.place(self), "panel")
end

-- The panel of a call: given, of so many tokens, or the default one, which is kept.
function measure.panel(self, given)
  if given ~= nil then return self:panel(given) end
  if not self._panel then self._panel = self:panel() end
  return self._panel
end

measure.quantiles = { 0.5, 0.9, 0.99, 1 }

-- Mean, quantiles and the positions with the largest values of a list.
function measure.distribution(values, worst)
  local sorted, sum = table.move(values, 1, #values, 1, {}), 0
  for _, x in ipairs(values) do sum = sum + x end
  table.sort(sorted)
  local order = {}
  for i = 1, #values do order[i] = i end
  table.sort(order, function(a, b)
    if values[a] ~= values[b] then return values[a] > values[b] end
    return a < b
  end)
  return { mean = sum / #values, median = report.quantile(sorted, 0.5),
    p90 = report.quantile(sorted, 0.9), p99 = report.quantile(sorted, 0.99),
    max = sorted[#sorted], worst = table.move(order, 1, math.min(worst, #order), 1, {}) }
end

-- The text that ends with a panel position.
function measure.context(self, panel, position)
  return view.tokens(self):decode(panel:context(position, 24))
end

-- hilbert{ matrix, panel, tokens, worst, backward, positions }: the functional size of a matrix
-- (the last increment of the head), pg.geometry.hilbert with its tokens and contexts as text.
function methods:hilbert(options)
  if options == nil then options = {} end
  if type(options) == "number" then options = { tokens = options } end
  if type(options) == "userdata" then options = { matrix = options } end
  check.table(nil, "hilbert", options, "{ matrix, panel, tokens, worst, backward, positions }")
  keys.check(options, { "matrix", "panel", "tokens", "worst", "backward", "positions" }, "hilbert")
  local matrix = options.matrix or self.inc
  if matrix == nil then
    errors.misuse("hilbert: there is no increment of the head yet: give matrix = …")
  end
  local panel = measure.panel(self, options.panel or options.tokens)
  local h = geometry.hilbert(matrix_of(matrix, "hilbert matrix"), panel, { run = self,
    worst = options.worst, backward = options.backward, positions = options.positions })
  local all = view.tokens(self)
  for _, entry in ipairs(h.worst) do
    entry.text = measure.context(self, panel, entry.position)
    entry.high_text, entry.low_text = all:text(entry.high), all:text(entry.low)
    entry.target_text = all:text(entry.target)
  end
  return h
end

-- oracle{ matrix, gap, seconds }: the optimum of steepest descent under the row diameter (of the
-- head's last gradient), certified.
function methods:oracle(options)
  if options == nil then options = {} end
  if type(options) == "userdata" then options = { matrix = options } end
  check.table(nil, "oracle", options, "{ matrix, gap, seconds }")
  keys.check(options, { "matrix", "gap", "seconds" }, "oracle")
  local matrix = options.matrix or self.head.gradient
  if matrix == nil then
    errors.misuse("oracle: there is no gradient of the head: step(1) makes one, or give matrix = …")
  end
  return require("perigee.geometry").raw.oracle(matrix,
    { gap = options.gap, seconds = options.seconds })
end

measure.matrix_of, measure.tokens_for = matrix_of, tokens_for

return measure
