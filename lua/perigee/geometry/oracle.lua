-- The optimum of steepest descent under the row diameter, T(G) (SPEC §5), as a certified interval,
-- and its checker.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local support = require "perigee.geometry.support"

local oracle = {}
local number, result = support.number, support.result

local function render_oracle(o)
  if o.upper == 0 then return "T(G) = 0: all rows are alike" end
  return ("T(G) in [%s, %s], gap %.2g; RowNorm keeps %.2f to %.2f %% of it; %.3g s"):format(
    number(o.lower), number(o.upper), o.gap, 100 * o.rownorm_share.lower,
    100 * o.rownorm_share.upper, o.seconds)
end

-- T(G) = max { <G, Phi> : ||phi_i - phi_j|| <= 1 }, of G less its mean row: `bracket` holds it,
-- `potential` is a Phi that attains the lower end and `flow` a balanced flow that costs the upper
-- one. Ends when (upper - lower)/upper <= gap or after so many seconds.
function oracle.oracle(g, options)
  options = check.table(nil, "oracle", options == nil and {} or options)
  keys.check(options, { "gap", "seconds" }, "oracle")
  local o = errors.try(core.oracle(support.matrix(g, "oracle"), options))
  o.bracket = { lower = o.lower, upper = o.upper }
  local most = o.lower > 0 and math.min(1, o.rownorm / o.lower) or 1
  o.rownorm_share = { lower = o.upper > 0 and o.rownorm / o.upper or 1, upper = most }
  return result(o, render_oracle)
end

local function render_check(v)
  if v.ok then
    return ("both bounds hold: the certificates prove [%s, %s]"):format(number(v.lower),
      number(v.upper))
  end
  return v.problem
end

-- Recompute both bounds of a result of pg.geometry.oracle from its certificates alone.
function oracle.check_oracle(g, claimed)
  check.table(nil, "check_oracle", claimed, "a result of pg.geometry.oracle")
  return result(errors.try(core.check_oracle(support.matrix(g, "check_oracle"), claimed)),
    render_check)
end

return oracle
