-- What the machine can do, measured here and now: the denominators of everything else.
local core = require "perigee.core"
local directory = require "perigee.directory"

local peak = {}

-- Shortest of a few repeats of f, in seconds; `finish` waits for the device.
local function shortest(f, finish)
  local best = math.huge
  for _ = 1, 4 do
    local start = core.clock()
    f()
    finish()
    best = math.min(best, core.clock() - start)
  end
  return best
end

function peak.measure(ctx)
  local n, side = 1 << 25, 2048
  local a <close> = core.zeros(ctx, n)
  local b <close> = core.zeros(ctx, n)
  local copy = shortest(function() b:copy_(a) end, function() return b[1] end)
  local x <close> = core.zeros(ctx, side, side)
  local product = shortest(function() x:matmul(x):close() end, function() return x:get(1, 1) end)
  return directory.object {
    { "bytes_per_second", 8 * n / copy },
    { "bytes_by", "copy of 128 MiB, bytes read plus written" },
    { "fp32_flops_per_second", 2 * side ^ 3 / product },
    { "fp32_by", "matrix product 2048 x 2048 x 2048" },
  }
end

return peak
