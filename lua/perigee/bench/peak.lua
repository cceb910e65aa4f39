-- What the machine can do, measured here and now: the denominators of everything else.
local core = require "perigee.core"
local directory = require "perigee.directory"
local errors = require "perigee.errors"

local peak = {}

local function how(measured)
  if not measured.product then return "multiply-adds in registers" end
  return ("matrix product %d x %d x %d"):format(measured.product, measured.product,
    measured.product)
end

-- The peak table of --json.
function peak.measure(ctx)
  local found = errors.try(core.bench_peak(ctx))
  return directory.object {
    { "bytes_per_second", found.bytes_per_second },
    { "bytes_by", ("copy of %d MiB, bytes read plus written"):format(found.copy_bytes >> 20) },
    { "fp32_flops_per_second", found.fp32.flops_per_second }, { "fp32_by", how(found.fp32) },
    { "bf16_flops_per_second", found.bf16.flops_per_second }, { "bf16_by", how(found.bf16) },
  }
end

-- FLOP/s at which arithmetic of a type ("fp32", "bf16") could run.
function peak.flops(measured, type) return measured[type .. "_flops_per_second"] end

return peak
