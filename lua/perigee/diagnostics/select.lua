-- Which of its metrics a diagnostic logs.
local check = require "perigee.check"

local select_metrics = {}

-- The option `metrics`: which of `names` are logged, nil for all.
function select_metrics.wanted(label, given, names)
  if given == nil then return nil end
  local known, wanted = {}, {}
  for _, name in ipairs(names) do known[name] = true end
  check.table(nil, label .. " metrics", given, "a list of names")
  for _, name in ipairs(given) do
    if not known[name] then
      check.fail(nil, label .. " metrics", name, "some of " .. table.concat(names, ", "))
    end
    wanted[name] = true
  end
  return wanted
end

-- Log what there is of `names`, in their order.
function select_metrics.log(run, prefix, names, values, wanted)
  for _, name in ipairs(names) do
    if values[name] ~= nil and (not wanted or wanted[name]) then
      run:log(prefix .. name, values[name])
    end
  end
end

return select_metrics
