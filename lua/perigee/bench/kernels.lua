-- Every kernel at the sizes of a model, against its floor: the time that moving its bytes at the
-- rate of a copy, or its arithmetic at the peak, would take.
local core = require "perigee.core"
local directory = require "perigee.directory"
local errors = require "perigee.errors"
local peaks = require "perigee.bench.peak"

local kernels = {}

local function against(measured, peak)
  local bytes = measured.bytes / peak.bytes_per_second
  local flops = measured.flops / peaks.flops(peak, measured.type)
  local floor = math.max(bytes, flops)
  local function rate(amount) return amount > 0 and amount / measured.seconds or nil end
  return directory.object {
    { "name", measured.name }, { "shape", measured.shape }, { "type", measured.type },
    { "seconds", measured.seconds }, { "repeats", measured.repeats },
    { "bytes", measured.bytes }, { "flops", measured.flops },
    { "bytes_per_second", rate(measured.bytes) }, { "flops_per_second", rate(measured.flops) },
    { "floor_seconds", floor }, { "floor_by", flops > bytes and "flops" or "bytes" },
    { "ratio", measured.seconds / floor },
  }
end

-- The kernels list of --json.
function kernels.measure(ctx, case, peak)
  local list = core.json.array {}
  for i, measured in ipairs(errors.try(core.bench_kernels(ctx, case.config, case.compute,
    case.micro))) do
    list[i] = against(measured, peak)
  end
  return list
end

return kernels
