-- How long a plan takes: its arithmetic over FLOP per second, as given (--rate 4e14) or measured on
-- the device (--rate measured), which is that of its products and no run reaches.
local core = require "perigee.core"
local console = require "perigee.console"
local errors = require "perigee.errors"
local peak = require "perigee.bench.peak"
local updates = require "perigee.bench.updates"

local rate = {}

rate.option = { name = "rate", value = "FLOPS", help = "with --dry-run: FLOP per second, for the "
  .. "times (perigee bench says what updates reach); or 'measured': the products of this device, "
  .. "for the least time" }

-- The rate of the text of --rate, nil without one: { text, measured, at = { fp32 = …, bf16 = … } }.
-- `devices` work side by side, each as fast as `device`, which a measurement needs.
function rate.from(text, device, threads, devices)
  if text == nil then return nil end
  if text == "measured" then
    local name, index = device:match "^(%a+):?(%d*)$"
    local ctx <close> = errors.try(core.context { device = name,
      device_index = math.tointeger(tonumber(index)) or 0, threads = threads })
    local found = peak.measure(ctx)
    local at = {}
    for _, type in ipairs { "fp32", "bf16" } do at[type] = peak.flops(found, type) * devices end
    return { measured = true, at = at, text = ("at least, at the peak measured on %s%s"):format(
      ctx:device(), devices > 1 and (", times %d"):format(devices) or "") }
  end
  local value = tonumber(text)
  if not value or not (value > 0 and value < math.huge) then
    errors.usage("--rate %s is not allowed: expected FLOP per second above 0, or 'measured'", text)
  end
  return { at = { fp32 = value, bf16 = value }, text = "at the given rate" }
end

-- Seconds of so many tokens of a model.
function rate.seconds(self, compute, flops_per_token, tokens)
  return tokens * flops_per_token / self.at[compute]
end

-- "4e+14 FLOP/s", or one for each type of these plans' products.
function rate.words(self, types)
  local parts, seen = {}, {}
  for _, type in ipairs(types) do
    local words = ("%.3g FLOP/s%s"):format(self.at[type], self.measured and " in " .. type or "")
    if not seen[words] then parts[#parts + 1] = words end
    seen[words] = true
  end
  return table.concat(parts, ", ")
end

-- The line of a dry run. `compute`: the type of its products.
function rate.line(self, compute, config, tokens)
  local flops = updates.flops_per_token(config)
  local work = ("training takes %.3g FLOP: %s tokens of %.4g, %s"):format(tokens * flops,
    console.grouped(tokens), flops, updates.formula)
  if not self then return work end
  return ("%s\ntime: %s %s (%s), without validation, diagnostics and saves"):format(work,
    console.duration(rate.seconds(self, compute, flops, tokens)), self.text,
    rate.words(self, { compute }))
end

return rate
