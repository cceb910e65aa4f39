-- First order: an increment of the head against its gradient. core/first_order.h has the formulas.
local core = require "perigee.core"
local errors = require "perigee.errors"
local support = require "perigee.geometry.support"

local first_order = {}
local number = support.number

local function render(f)
  return ("gain %s of RowNorm's %s under the same diameter (ratio %s)\n  cosine with -G %s, with "
    .. "RowNorm's increment %s; common mode of G %s"):format(number(f.gain), number(f.oracle),
    number(f.ratio), number(f.cosine_gradient), number(f.cosine_rownorm), number(f.common))
end

-- G, S -> { value = gain, gain, oracle, ratio, cosine_gradient, cosine_rownorm, common, … }; what
-- is 0/0 is nil.
function first_order.first_order(gradient, increment)
  local f = errors.try(core.first_order(support.matrix(gradient, "first_order gradient"),
    support.matrix(increment, "first_order increment")))
  f.value = f.gain
  return support.result(f, render)
end

return first_order
