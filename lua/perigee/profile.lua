-- The profile of one update of a run: which one, where its trace goes, and what it says in a line.
local core = require "perigee.core"
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

-- Where the first rank's trace goes; nil when none is wanted.
local function file_of(run)
  local wanted = run.options.profile
  if not wanted or run.rank > 0 then return nil end
  return wanted == true and run.out .. "/profile.json" or wanted
end

-- Before training: refuse a file that could not be written after the update, which is lost then.
function profile.prepare(run)
  local path = file_of(run)
  if not path then return end
  local kind = core.fs.kind(path)
  if kind ~= nil and kind ~= "file" then
    errors.world(("EEXIST: the profile %s is no file: expected a file, or a new name"):format(path),
      "EEXIST")
  end
  -- Beside an earlier trace, which a run that fails leaves as it is.
  local ok, _, name = core.fs.write(path .. ".try", "")
  if not ok then errors.world(("%s: the profile %s cannot be written"):format(name, path), name) end
  errors.try(core.fs.remove(path .. ".try"))
end

-- Call step(), the next update of `run`; record it when options.profile asks for that: the third of
-- the session, or its last. The first rank's operations go to the file.
function profile.around(run, step)
  local path = file_of(run)
  if not path then return step() end
  run.profile_at = run.profile_at or math.min(run.update + 1 + WARMUP, run.last)
  if run.update + 1 ~= run.profile_at then return step() end
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
