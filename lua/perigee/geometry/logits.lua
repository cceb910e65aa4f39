-- Logits over a panel: their size, the largest attention logit of every head, and the rank of the
-- log-probabilities. core/logits.h has the formulas.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local panels = require "perigee.panels"
local report = require "perigee.repl.report"
local support = require "perigee.geometry.support"

local logits = {}
local number, result = support.number, support.result

local statistics = { "rms", "centered_rms", "max_abs", "centered_max_abs", "logsumexp_mean",
  "logsumexp_max", "prob_entropy_mean", "prob_max_mean" }

-- What to measure, where, and the options; of a head with hidden states, those.
local function read(panel, options, what)
  options = check.table(nil, what .. " options", options or {})
  keys.check(options, { "run" }, what .. " options")
  local states = panels.states_of(panel)
  if states then return nil, states end
  local place = panels.place_of(options.run, panel, what .. " run")
  return place.core or place.model, panels.read(panel, place, what .. " panel")
end

local function note_place(found, where, panel)
  found.panel = where and panel:hash() or "of a head"
  found.tokens = where and panel:tokens() or panel.positions
end

-- The eight statistics of Lau and Su; value = rms.
function logits.logits(panel, options)
  local where
  where, panel = read(panel, options, "logits")
  local z
  if where then
    z = errors.try(core.logits(where, panel))
  else
    z = errors.try(core.logits_states(panel.value, panel.hidden, panel.scale))
  end
  z.value = z.rms
  note_place(z, where, panel)
  return result(z, function(self)
    local rows = {}
    for i, name in ipairs(statistics) do rows[i] = { name, number(self[name]) } end
    return ("logits over %d positions (panel %s), in %.3g s\n%s"):format(self.tokens, self.panel,
      self.seconds, report.columns(rows, { true }))
  end)
end

-- The largest attention logit of every head: heads[block][head], and which it is of all.
function logits.attention(panel, options)
  local where
  where, panel = read(panel, options, "attention")
  if not where then
    errors.misuse("attention: a head alone has no attention: give the panel of a model with blocks")
  end
  local heads, seconds = errors.try(core.attention_logits(where, panel))
  local a = { heads = heads, value = -math.huge, panel = panel:hash(), tokens = panel:tokens(),
    seconds = seconds }
  for layer, list in ipairs(heads) do
    for head, x in ipairs(list) do
      if x > a.value then a.value, a.layer, a.head = x, layer, head end
    end
  end
  return result(a, function(self)
    local rows = {}
    for layer, list in ipairs(self.heads) do
      rows[layer] = { tostring(layer) }
      for head, x in ipairs(list) do rows[layer][head + 1] = number(x) end
    end
    return ("largest attention logit %s, block %s, head %s (panel %s), in %.3g s; of each block's "
      .. "heads\n%s"):format(number(self.value), self.layer, self.head, self.panel, self.seconds,
      report.columns(rows, { true }))
  end)
end

-- The rank of the matrix of log-probabilities [positions, classes].
function logits.log_rank(panel, options)
  local where
  where, panel = read(panel, options, "log_rank")
  local r
  if where then
    r = errors.try(core.log_rank(where, panel))
  else
    r = errors.try(core.log_rank_states(panel.value, panel.hidden, panel.scale))
  end
  r.value = r.rank
  note_place(r, where, panel)
  return result(r, function(self)
    return ("rank %d of at most %d, effective rank %s, stable rank %s over %d positions\n"
      .. "  panel %s, in %.3g s"):format(self.rank, self.bound, number(self.effective),
      number(self.stable), self.tokens, self.panel, self.seconds)
  end)
end

return logits
