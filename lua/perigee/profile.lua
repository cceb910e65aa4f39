-- The profile of one update of a run: which one, where its trace goes, and what it says in a line.
local errors = require "perigee.errors"

local profile = {}

-- Buffers, thread teams and caches are as they stay after two updates.
local WARMUP = 2

-- "head 40 %, gemm 31 %, …" of ctx:profile_stop's result, parts of at least a percent.
function profile.summary(result)
  local names = {}
  for name in pairs(result.parts) do names[#names + 1] = name end
  table.sort(names, function(a, b) return result.parts[a] > result.parts[b] end)
  local words, rest = {}, result.seconds
  for _, name in ipairs(names) do
    local seconds = result.parts[name]
    rest = rest - seconds
    if seconds >= 0.01 * result.seconds then
      words[#words + 1] = ("%s %.0f %%"):format(name, 100 * seconds / result.seconds)
    end
  end
  words[#words + 1] = ("between operations %.0f %%"):format(100 * rest / result.seconds)
  return table.concat(words, ", ")
end

-- Call step(), the next update of `run`; record it when options.profile asks for that: the third of
-- the session, or its last. The first rank's operations go to the file.
function profile.around(run, step)
  local wanted = run.options.profile
  if not wanted or run.rank > 0 then return step() end
  run.profile_at = run.profile_at or math.min(run.update + 1 + WARMUP, run.last)
  if run.update + 1 ~= run.profile_at then return step() end
  local path = wanted == true and run.out .. "/profile.json" or wanted
  errors.try(run.ctx:profile_start())
  local results = table.pack(pcall(step))
  local result, message, name = run.ctx:profile_stop(results[1] and path or nil)
  if not results[1] then error(results[2], 0) end
  errors.try(result, message, name)
  run.console:note(("profile of update %d, %.4f s: %s; trace: %s"):format(run.profile_at,
    result.seconds, profile.summary(result), path))
  return table.unpack(results, 2, results.n)
end

return profile
