-- Unknown keys are errors that name the nearest known one.
local errors = require "perigee.errors"

local keys = {}

-- Edit distance with transpositions of neighbours (optimal string alignment).
function keys.distance(a, b)
  local before, row = {}, {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local next_row = { [0] = i }
    for j = 1, #b do
      local same = a:byte(i) == b:byte(j)
      local best = math.min(row[j] + 1, next_row[j - 1] + 1, row[j - 1] + (same and 0 or 1))
      if i > 1 and j > 1 and a:byte(i) == b:byte(j - 1) and a:byte(i - 1) == b:byte(j) then
        best = math.min(best, before[j - 2] + 1)
      end
      next_row[j] = best
    end
    before, row = row, next_row
  end
  return row[#b]
end

-- The nearest of `known` (a list), ties to the first; nil for an empty list.
function keys.nearest(name, known)
  local best, least
  for _, candidate in ipairs(known) do
    local distance = keys.distance(name:lower(), candidate:lower())
    if not least or distance < least then best, least = candidate, distance end
  end
  return best
end

-- ", did you mean 'x'? (known: a, b, x)"
function keys.suggestion(name, known)
  local text = ""
  local nearest = keys.nearest(tostring(name):sub(1, 60), known)
  if nearest then text = ("; did you mean '%s'?"):format(nearest) end
  return ("%s (known: %s)"):format(text, table.concat(known, ", "))
end

-- Every key of t must be in the list `known`; positions 1 … `positional` are allowed too.
-- `what` names the table in the message, `where` is a position or nil.
function keys.check(t, known, what, where, positional)
  local allowed = {}
  for _, k in ipairs(known) do allowed[k] = true end
  local unknown
  for k in pairs(t) do
    if math.type(k) == "integer" and k >= 1 and k <= (positional or 0) then
      goto continue
    end
    if not allowed[k] then
      -- The smallest one, so that the message does not depend on the order of iteration.
      if unknown == nil or tostring(k) < tostring(unknown) then unknown = k end
    end
    ::continue::
  end
  if unknown == nil then return end
  if type(unknown) == "number" then
    errors.at(where, "%s: a value without a key at position %s; known keys: %s", what, unknown,
      table.concat(known, ", "))
  end
  errors.at(where, "%s: unknown key '%s'%s", what, tostring(unknown):sub(1, 60),
    keys.suggestion(unknown, known))
end

return keys
