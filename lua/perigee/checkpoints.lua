-- The checkpoints of a run directory: names, the latest valid one, and which ones to remove.
local core = require "perigee.core"
local errors = require "perigee.errors"
local data = require "perigee.data"

local checkpoints = {}

function checkpoints.name(update) return ("%08d"):format(update) end

-- Update numbers of the checkpoints in a run directory, ascending.
function checkpoints.list(directory)
  local found = {}
  local folder = directory .. "/checkpoints"
  if core.fs.kind(folder) ~= "directory" then return found end
  for _, name in ipairs(errors.try(core.fs.list(folder))) do
    if name:match("^%d%d%d%d%d%d%d%d+$") then found[#found + 1] = math.tointeger(tonumber(name)) end
  end
  table.sort(found)
  return found
end

function checkpoints.path(directory, update)
  return ("%s/checkpoints/%s"):format(directory, checkpoints.name(update))
end

-- The newest checkpoint that is complete and undamaged: path, update; nil when there is none. Also
-- a list of { path, reason } of those that were passed over.
function checkpoints.latest(ctx, directory)
  local skipped = {}
  local found = checkpoints.list(directory)
  for i = #found, 1, -1 do
    local path = checkpoints.path(directory, found[i])
    local ok, message = core.checkpoint_verify(ctx, path, true)
    if ok then return path, found[i], skipped end
    skipped[#skipped + 1] = { path = path, reason = message }
  end
  return nil, nil, skipped
end

-- Remove what a killed save left behind: entries that are not checkpoints.
function checkpoints.sweep(directory)
  local folder = directory .. "/checkpoints"
  if core.fs.kind(folder) ~= "directory" then return end
  for _, name in ipairs(errors.try(core.fs.list(folder))) do
    if name:match("^%.?%d+%..*tmp") or name:match("^%.tmp") or name:match("%.tmp%-%d+$")
      or name:match("%.old%-%d+$") then
      core.fs.remove(folder .. "/" .. name)
    end
  end
end

-- After a complete save: keep the newest `keep` of those that no hook pins, and always `newest`.
function checkpoints.prune(directory, hooks, newest)
  local keep
  for _, hook in ipairs(hooks) do
    if hook.keep == "all" and hook.every then return end
    if hook.keep ~= "all" then keep = math.max(keep or 0, hook.keep) end
  end
  if not keep then return end
  local candidates = {}
  for _, update in ipairs(checkpoints.list(directory)) do
    local pinned = false
    for _, hook in ipairs(hooks) do pinned = pinned or hook:pins(update) end
    if not pinned then candidates[#candidates + 1] = update end
  end
  for i = 1, #candidates - keep do
    if candidates[i] ~= newest then
      core.fs.remove(checkpoints.path(directory, candidates[i]))
    end
  end
end

-- The checkpoint that a path names: a checkpoint folder itself, or the latest valid one of a run
-- directory. Raises a failure that says what is missing.
function checkpoints.resolve(ctx, path)
  path = #path > 1 and path:gsub("/+$", "") or path
  if core.fs.kind(path) ~= "directory" then
    errors.world(("ENOENT: %s is not a folder: expected a checkpoint or a run directory")
      :format(path), "ENOENT")
  end
  if core.fs.kind(path .. "/manifest.json") == "file" then
    errors.try(core.checkpoint_verify(ctx, path, true))
    return path
  end
  local found, _, skipped = checkpoints.latest(ctx, path)
  if not found then
    local reason = skipped[1] and (": " .. skipped[1].reason) or ""
    errors.world(("ENOENT: %s holds no valid checkpoint%s"):format(path, reason), "ENOENT")
  end
  return found
end

-- What the host kept in a checkpoint's state.json.
function checkpoints.host_state(path)
  local state = data.read_json(path .. "/state.json")
  if type(state) ~= "table" then
    errors.world(("EFORMAT: %s/state.json is missing or not an object"):format(path), "EFORMAT")
  end
  local host = state.host
  if type(host) == "string" then host = errors.try(core.json.decode(host)) end
  if type(host) ~= "table" then
    errors.world(("EFORMAT: %s/state.json: no host state: this checkpoint was not written by a "
      .. "recipe run"):format(path), "EFORMAT")
  end
  return host
end

return checkpoints
