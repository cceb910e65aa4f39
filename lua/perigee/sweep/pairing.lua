-- Whether runs that differ in one parameter only had the same start: initial weights, first batch
-- and way of computing. A difference between runs is that parameter's only where they had.
local core = require "perigee.core"
local data = require "perigee.data"
local directory = require "perigee.directory"
local grid = require "perigee.sweep.grid"
local look = require "perigee.sweep.look"

local pairing = {}

-- What has to agree: facts by name, as text; nil where the run does not say.
local function start_of(run)
  local ok, config = pcall(data.read_json, run.dir .. "/config.json")
  if not ok or type(config) ~= "table" then return nil end
  local host = type(config.host) == "table" and config.host or {}
  local compute = type(config.compute) == "table" and config.compute or {}
  return { initial_weights = config.initial_weights,
    first_batch = look.tail(run.dir):read().first_batch,
    compute_path = ("%s %s, %s, %s threads, %s"):format(host.device_name, compute.precision,
      compute.recompute, host.threads, host.attention) }
end

local facts = { "initial_weights", "first_batch", "compute_path" }

-- For each parameter of the points (but seeds): in how many groups of runs that are alike else each
-- fact is equal. List of { parameter, groups, equal = { fact = count }, unlike = { run names } }.
function pairing.check(runs)
  local names, starts = {}, {}
  for _, run in ipairs(runs) do
    for name in pairs(run.point) do names[name] = true end
    starts[run] = start_of(run)
  end
  local list = {}
  for _, name in ipairs(grid.sorted(names)) do
    local groups, order = {}, {}
    for _, run in ipairs(runs) do
      if run.point[name] ~= nil and starts[run] then
        local rest = {}
        for key, value in pairs(run.point) do
          if key ~= name then rest[key] = value end
        end
        local key = grid.key(rest)
        if not groups[key] then
          groups[key] = {}
          order[#order + 1] = key
        end
        table.insert(groups[key], run)
      end
    end
    local entry = { parameter = name, groups = 0, equal = {}, unlike = {} }
    for _, fact in ipairs(facts) do entry.equal[fact] = 0 end
    for _, key in ipairs(order) do
      local group = groups[key]
      if #group > 1 then
        entry.groups = entry.groups + 1
        for _, fact in ipairs(facts) do
          local same = true
          for i = 2, #group do
            same = same and starts[group[i]][fact] ~= nil
              and starts[group[i]][fact] == starts[group[1]][fact]
          end
          if same then
            entry.equal[fact] = entry.equal[fact] + 1
          else
            entry.unlike[#entry.unlike + 1] = ("%s (%s)"):format(group[1].name,
              fact:gsub("_", " "))
          end
        end
      end
    end
    if entry.groups > 0 and name ~= "seed" then list[#list + 1] = entry end
  end
  return list
end

-- One line for each parameter.
function pairing.lines(list)
  local lines = {}
  for i, entry in ipairs(list) do
    local parts = {}
    for j, fact in ipairs(facts) do
      parts[j] = ("%s equal in %d of %d groups"):format(fact:gsub("_", " "), entry.equal[fact],
        entry.groups)
    end
    local paired = true
    for _, fact in ipairs(facts) do paired = paired and entry.equal[fact] == entry.groups end
    lines[i] = ("%s: %s"):format(entry.parameter, paired
      and ("runs are paired: equal initial weights, first batch and compute path in %d groups")
      :format(entry.groups) or "runs are not all paired: " .. table.concat(parts, ", "))
  end
  return lines
end

-- For sweep.json.
function pairing.object(list)
  local out = {}
  for i, entry in ipairs(list) do
    out[i] = directory.object { { "parameter", entry.parameter }, { "groups", entry.groups },
      { "equal", entry.equal }, { "unlike", core.json.array(entry.unlike) } }
  end
  return core.json.array(out)
end

return pairing
