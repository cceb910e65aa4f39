-- Diagnostics of how large weights, their updates and logits are.
local check = require "perigee.check"
local core = require "perigee.core"
local geometry = require("perigee.geometry").raw
local keys = require "perigee.keys"
local panels = require "perigee.panels"
local runs = require "perigee.run"
local select_metrics = require "perigee.diagnostics.select"
local weights = require "perigee.weights"

return function(new)
  local size = {}

  local function flag(label, options, name, default)
    if options[name] == nil then return default end
    return check.boolean(nil, ("%s %s"):format(label, name), options[name])
  end

  -- ---- weights ---------------------------------------------------------------------------------

  -- Of every parameter, as a table by its name; and of the head U, as numbers.
  local each = { "rms", "row_rms_min", "row_rms_max", "rms_to_rms", "update_rms", "update_ratio",
    "update_cosine", "update_rms_to_rms" }
  local of_head = { "diameter", "mean_row", "mean_row_drift" }
  local weight_names = { "seconds" }
  for _, list in ipairs { each, of_head } do
    table.move(list, 1, #list, #weight_names + 1, weight_names)
  end

  -- U of a list of parameters, of a head A B as a tensor of ours; and what to close.
  local function head_of(list, factors)
    local outer = list[#list].value
    if not factors then return outer end
    local product = outer:matmul(list[#list - 1].value)
    return product, product
  end

  local function mean_row(list, factors)
    local u, ours = head_of(list, factors)
    local _ <close> = ours
    return geometry.weight(u, { name = "the head" }).mean
  end

  local starts = setmetatable({}, { __mode = "k" }) -- run -> the mean row that it started from
  local function mean_row_of_start(run, factors)
    if not starts[run] then
      local model <close> = weights.of_start(runs.inner(run))
      starts[run] = mean_row(model:parameters(), factors)
    end
    return starts[run]
  end

  local function distance(x, y)
    local sum = 0.0
    for i, a in ipairs(x) do sum = sum + (a - y[i]) ^ 2 end
    return math.sqrt(sum)
  end

  local function measure_head(run, wanted, values)
    local list, factors = run.parameters, (run.config.head or {}).rank ~= nil
    local u, ours = head_of(list, factors)
    local _ <close> = ours
    local function want(name) return not wanted or wanted[name] end
    if want "diameter" then values.diameter = run:diameter(u).value end
    if want "mean_row" or want "mean_row_drift" then
      local found = geometry.weight(u, { name = "the head" })
      values.mean_row = found.mean_row
      if want "mean_row_drift" then
        values.mean_row_drift = distance(found.mean, mean_row_of_start(run, factors))
      end
    end
  end

  local function measure_each(run, norms, values)
    for _, name in ipairs(each) do values[name] = {} end
    for _, p in ipairs(run.parameters) do
      local increment = run.update > 0 and p.increment or nil
      local w = geometry.weight(p, { update = increment, name = p.name,
        norms = norms and p.role ~= "embedding" })
      for _, name in ipairs { "rms", "row_rms_min", "row_rms_max", "rms_to_rms", "update_ratio",
        "update_cosine" } do
        values[name][p.name] = w[name]
      end
      if w.update then
        values.update_rms[p.name] = w.update.rms
        values.update_rms_to_rms[p.name] = w.update.rms_to_rms
      end
    end
    for _, name in ipairs(each) do
      if next(values[name]) == nil then values[name] = nil end
    end
  end

  -- The size of all weights and of their last updates, as far as the run keeps those.
  function size.weights(options)
    local label = "pg.diagnostics.weights"
    options = check.table(nil, label, options or {}, "{ norms, metrics }")
    keys.check(options, { "norms", "metrics" }, label)
    local norms = flag(label, options, "norms", false)
    local wanted = select_metrics.wanted(label, options.metrics, weight_names)
    return new("weights", function() end, function(run)
      local start, values = core.clock(), {}
      measure_each(run, norms, values)
      measure_head(run, wanted, values)
      values.seconds = core.clock() - start
      select_metrics.log(run, "weights/", each, values, wanted)
      select_metrics.log(run, "weights/lm_head/", of_head, values, wanted)
      select_metrics.log(run, "weights/", { "seconds" }, values, wanted)
      return values
    end)
  end

  -- ---- logits ----------------------------------------------------------------------------------

  local logit_names = { "rms", "centered_rms", "max_abs", "centered_max_abs", "logsumexp_mean",
    "logsumexp_max", "prob_entropy_mean", "prob_max_mean", "attention_max", "attention", "log_rank",
    "log_rank_bound", "log_rank_effective", "log_rank_stable", "panel", "tokens", "seconds" }

  -- The logits over a panel; with `attention` those of attention, with `rank` the rank of the
  -- log-probabilities.
  function size.logits(options)
    local label = "pg.diagnostics.logits"
    check.table(nil, label, options, "{ panel, attention, rank, metrics }")
    keys.check(options, { "panel", "attention", "rank", "metrics" }, label)
    local panel = panels.new(options.panel, label .. " panel")
    local attention, rank = flag(label, options, "attention", false),
      flag(label, options, "rank", false)
    local wanted = select_metrics.wanted(label, options.metrics, logit_names)
    return new("logits", function(run) return { panel = run:panel(panel) } end,
      function(run, ready)
        local z = geometry.logits(ready.panel, { run = run })
        if attention then
          local a = geometry.attention(ready.panel, { run = run })
          z.attention, z.attention_max, z.seconds = a.heads, a.value, z.seconds + a.seconds
        end
        if rank then
          local r = geometry.log_rank(ready.panel, { run = run })
          z.log_rank, z.log_rank_bound, z.log_rank_effective = r.rank, r.bound, r.effective
          z.log_rank_stable, z.seconds = r.stable, z.seconds + r.seconds
        end
        select_metrics.log(run, "logits/", logit_names, z, wanted)
        return z
      end)
  end

  return size
end
