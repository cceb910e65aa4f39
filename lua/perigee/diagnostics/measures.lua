-- Diagnostics that measure the head's last update: its functional size, first order, and the noise
-- of the gradients.
local check = require "perigee.check"
local errors = require "perigee.errors"
local geometry = require("perigee.geometry").raw
local keys = require "perigee.keys"
local panels = require "perigee.panels"
local runs = require "perigee.run"
local select_metrics = require "perigee.diagnostics.select"

local selection, log = select_metrics.wanted, select_metrics.log

return function(new)
  local measures = {}

  -- Whether the gradients of an update are there: those of a session's first update are not before
  -- it, when it makes up for hooks that were left out.
  local function have_gradients(run)
    for _, parameter in ipairs(run.parameters) do
      if parameter.gradient then return true end
    end
    return false
  end

  local function need_head(run, where, label)
    if run.head.optimizer == "frozen" then
      errors.at(where, "%s: the head is frozen and has no increment", label)
    end
  end

  -- ---- functional size -----------------------------------------------------------------------

  local functional_names = { "hilbert_rms", "hilbert_mean", "hilbert_median", "hilbert_p90",
    "hilbert_p99", "hilbert_max", "utilisation", "diameter", "kl", "tv", "aitchison", "fisher_rao",
    "entropy", "entropy_change", "loss", "loss_change", "gradient_cosine", "loss_change_max",
    "loss_used", "backward", "backward_max", "backward_used", "rows_used", "flow_used",
    "extreme_tokens", "panel", "tokens", "seconds" }

  local function functional_values(h)
    local values = { hilbert_rms = h.rms, hilbert_mean = h.mean, hilbert_median = h.median,
      hilbert_p90 = h.p90, hilbert_p99 = h.p99, hilbert_max = h.max, utilisation = h.utilisation,
      diameter = h.diameter, loss_change_max = h.loss_change.max, loss_used = h.loss_used,
      panel = h.panel, tokens = h.tokens, seconds = h.seconds }
    for _, name in ipairs { "kl", "tv", "aitchison", "fisher_rao", "entropy", "entropy_change",
      "loss", "loss_change", "gradient_cosine" } do
      values[name] = h[name].mean
    end
    if h.backward then
      values.backward, values.backward_max = h.backward.mean, h.backward.max
      values.backward_used = h.backward_used
      values.rows_used, values.flow_used = h.rows_used, h.flow_used
    end
    local worst = h.worst[1]
    if worst and worst.range > 0 then values.extreme_tokens = { worst.high, worst.low } end
    return values
  end

  -- What the head's last increment does over a panel, or what has changed since the start or since
  -- a checkpoint, all weights together.
  function measures.functional(options)
    local label = "pg.diagnostics.functional"
    check.table(nil, label, options, "{ panel, of, backward, metrics }")
    keys.check(options, { "panel", "of", "backward", "metrics" }, label)
    local panel = panels.new(options.panel, label .. " panel")
    local of = options.of == nil and "increment" or check.string(nil, label .. " of", options.of)
    local backward = options.backward or false
    check.boolean(nil, label .. " backward", backward)
    local wanted = selection(label, options.metrics, functional_names)
    local step = of == "increment"
    local prefix = step and "functional/step/" or of == "start" and "functional/start/"
      or "functional/checkpoint/"
    return new("functional", function(run, where)
      if step then need_head(run, where, label) end
      return { panel = run:panel(panel) }
    end, function(run, ready)
      if step and run.update == 0 then return nil end
      local h
      if step then
        h = geometry.hilbert(run.head.increment, ready.panel, { run = run, backward = backward,
          worst = 1 })
      else
        h = geometry.between(of, run, ready.panel, { backward = backward, worst = 1 })
      end
      log(run, prefix, functional_names, functional_values(h), wanted)
      return h
    end)
  end

  -- ---- first order -----------------------------------------------------------------------------

  local first_order_names = { "gain", "oracle", "ratio", "cosine_gradient", "cosine_rownorm",
    "common", "gradient_norm", "increment_norm", "diameter", "predicted", "actual",
    "actual_to_predicted", "seconds" }

  -- The head's increment against its gradient, and with `predict` the whole update against what its
  -- gradients predicted, on its own batch.
  function measures.first_order(options)
    local label = "pg.diagnostics.first_order"
    options = check.table(nil, label, options or {}, "{ predict, metrics }")
    keys.check(options, { "predict", "metrics" }, label)
    local predict = options.predict or false
    check.boolean(nil, label .. " predict", predict)
    local wanted = selection(label, options.metrics, first_order_names)
    return new("first_order", function(run, where)
      need_head(run, where, label)
      if predict and runs.inner(run).spec.increments ~= "all" then
        errors.at(where, '%s: predict needs the increments of all parameters: expected '
          .. 'increments = "all" in the recipe', label)
      end
    end, function(run)
      if run.update == 0 or not run.head.gradient then return nil end
      local f = geometry.first_order(run.head.gradient, run.head.increment)
      if predict then
        local p = errors.try(runs.inner(run).core:prediction())
        f.predicted, f.actual, f.seconds = p.predicted, p.after - p.before, f.seconds + p.seconds
        if p.predicted and p.predicted ~= 0 then
          f.actual_to_predicted = f.actual / p.predicted
        end
      end
      log(run, "first_order/", first_order_names, f, wanted)
      return f
    end)
  end

  -- ---- noise scale -----------------------------------------------------------------------------

  local noise_names = { "small", "large", "small_square", "large_square", "gradient_square",
    "trace", "scale" }

  -- The gradient noise scale of the update, from its micro-batches on all ranks.
  function measures.noise_scale(options)
    local label = "pg.diagnostics.noise_scale"
    options = check.table(nil, label, options or {}, "{ metrics }")
    keys.check(options, { "metrics" }, label)
    local wanted = selection(label, options.metrics, noise_names)
    return new("noise_scale", function(run, where)
      local inner = runs.inner(run)
      if inner.spec.batch.sequences <= inner.spec.batch.micro then
        errors.at(where, "%s: batch.sequences = %d is one micro-batch: expected batch.micro below "
          .. "it", label, inner.spec.batch.sequences)
      end
      if inner.core then errors.try(inner.core:measure_noise(true)) end -- none in a dry run
    end, function(run)
      if run.update == 0 or not have_gradients(run) then return nil end
      local noise = errors.try(runs.inner(run).core:noise())
      log(run, "noise/", noise_names, noise, wanted)
      return noise
    end)
  end

  return measures
end
