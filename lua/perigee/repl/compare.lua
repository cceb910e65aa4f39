-- Two checkpoints on one panel: the difference of their losses with a bootstrap interval over
-- sequences, how far their distributions are apart, and the contexts where that is largest.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local measure = require "perigee.repl.measure"
local report = require "perigee.repl.report"
local show = require "perigee.repl.print"
local view = require "perigee.repl.view"

local compare = {}
local number = report.number

-- Percentile interval of the mean of per-position values: whole sequences are resampled, which are
-- independent where the positions within one are not. sums, lengths: of each. The draws are
-- a fixed stream, so that a comparison gives the same numbers each time and disturbs no generator.
function compare.bootstrap(sums, lengths, level)
  local n = #sums
  if n < 2 then return nil end
  local rounds = math.max(200, math.min(2000, 4000000 // n))
  local means = {}
  local draw = 0
  for r = 1, rounds do
    local sum, count = 0, 0
    for _ = 1, n do
      local i = 1 + math.floor(core.uniform(0, "bootstrap", draw) * n)
      draw = draw + 1
      sum, count = sum + sums[i], count + lengths[i]
    end
    means[r] = sum / count
  end
  table.sort(means)
  return { report.quantile(means, (1 - level) / 2), report.quantile(means, (1 + level) / 2) }
end

local function render(c)
  local interval = c.interval
    and ("  95%% %+.5f … %+.5f over %d sequences"):format(c.interval[1], c.interval[2], c.sequences)
    or "  (one sequence: no interval)"
  local lines = {
    ("loss %.5f -> %.5f: %+.5f%s"):format(c.loss[1], c.loss[2], c.difference, interval),
    ("Hilbert distance RMS %s  mean %s  median %s  90%% %s  99%% %s  max %s (%d positions, panel "
      .. "%s)"):format(number(c.rms), number(c.mean), number(c.median), number(c.p90),
      number(c.p99), number(c.max), c.tokens, c.panel),
  }
  for _, entry in ipairs(c.worst) do
    lines[#lines + 1] = ("  %s -> %s  %s then %s"):format(number(entry.loss[1]),
      number(entry.loss[2]), show.quoted(entry.text), show.quoted(entry.next))
  end
  return table.concat(lines, "\n")
end

-- compare(a, b, panel): from a to b. panel: a panel, a number of positions, or nil.
function view.methods:compare(other, given)
  if not view.is(other) then
    check.fail(nil, "compare", other, "two opened runs, as compare(a, b, panel)")
  end
  if self.config.vocab ~= other.config.vocab then
    errors.misuse("compare: vocabularies of %d and %d cannot be compared", self.config.vocab,
      other.config.vocab)
  end
  local panel = measure.panel(self, given)
  local from = errors.try(core.panel_losses(self.model, panel))
  local to = errors.try(core.panel_losses(other.model, panel))
  local rms, distances = errors.try(core.hilbert_between(self.model, other.model, panel))
  local result = measure.distribution(distances, 0)
  local lengths, sums, changes = panel:lengths(), {}, {}
  local loss, at = { 0, 0 }, 0
  for s, length in ipairs(lengths) do
    sums[s] = 0
    for i = at + 1, at + length do
      changes[i] = math.abs(to[i] - from[i])
      sums[s] = sums[s] + to[i] - from[i]
      loss[1], loss[2] = loss[1] + from[i], loss[2] + to[i]
    end
    at = at + length
  end
  result.loss = { loss[1] / at, loss[2] / at }
  result.difference = result.loss[2] - result.loss[1]
  result.interval = compare.bootstrap(sums, lengths, 0.95)
  result.rms, result.tokens, result.panel, result.sequences = rms, at, panel:hash(), #lengths
  result.worst = {}
  for k, i in ipairs(measure.distribution(changes, 3).worst) do
    local _, following = panel:context(i, 1)
    result.worst[k] = { position = i, loss = { from[i], to[i] }, distance = distances[i],
      text = measure.context(self, panel, i), next = view.tokens(self):decode { following } }
  end
  return report.new(result, render)
end

return compare
