-- The size of one matrix of weights, and of a change of it beside it.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local support = require "perigee.geometry.support"

local weights = {}
local number, result = support.number, support.result

local function render(w)
  local text = ("||W||_F %s  RMS %s  largest %s  row RMS %s to %s  mean row %s"):format(
    number(w.norm), number(w.rms), number(w.largest), number(w.row_rms_min), number(w.row_rms_max),
    number(w.mean_row))
  if w.rms_to_rms then text = text .. ("  rms-to-rms %s"):format(number(w.rms_to_rms)) end
  if w.update then
    text = text .. ("\n  update/weight %s  cosine %s\n  update: %s"):format(number(w.update_ratio),
      number(w.update_cosine), render(w.update))
  end
  return text
end

local function measure(t, change, norms, name)
  local found = errors.try(core.weight_size(t, name, change))
  local rows, columns = table.unpack(t:shape())
  local w = { norm = found.norm, largest = found.largest, mean_row = found.mean_row,
    mean = found.mean, rms = found.norm / math.sqrt(rows * columns),
    row_rms_min = found.row_min / math.sqrt(columns),
    row_rms_max = found.row_max / math.sqrt(columns),
    l1_to_rms = found.column_max / math.sqrt(rows),
    rms_to_inf = found.row_max * math.sqrt(columns), seconds = found.seconds }
  if norms then
    local start = core.clock()
    local spectral = errors.try(core.spectrum(t))[1]
    w.spectral = spectral
    w.rms_to_rms = spectral * math.sqrt(columns / rows)
    w.seconds = w.seconds + core.clock() - start
  end
  return w, found.product
end

-- Norms of t as a map of its columns to its rows, and of `update` beside it. options: update, what
-- was added to t; norms = true: the ones that need a spectrum.
function weights.weight(t, options)
  options = check.table(nil, "weight options", options or {})
  keys.check(options, { "update", "norms", "name" }, "weight options")
  t = support.matrix(t, "weight")
  local norms = options.norms ~= nil and check.boolean(nil, "weight norms", options.norms)
  local name = check.string(nil, "weight name", options.name or "the weights")
  local change = options.update ~= nil and support.matrix(options.update, "weight update") or nil
  local w, product = measure(t, change, norms, name)
  if change then
    w.update = measure(change, nil, norms, "the update of " .. name)
    if w.norm > 0 then w.update_ratio = w.update.norm / w.norm end
    if w.norm > 0 and w.update.norm > 0 then
      w.update_cosine = product / (w.norm * w.update.norm)
    end
    w.seconds = w.seconds + w.update.seconds
  end
  w.value = w.norm
  return result(w, render)
end

return weights
