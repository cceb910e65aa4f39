-- The checkpoints of a run directory: names, the latest valid one, and which ones to remove.
local core = require "perigee.core"
local errors = require "perigee.errors"
local data = require "perigee.data"

local checkpoints = {}

function checkpoints.name(update) return ("%08d"):format(update) end

-- Whether a folder has an entry of that name; a link that leads nowhere is one.
local function taken(folder, name)
  for _, entry in ipairs(core.fs.list(folder) or {}) do
    if entry == name then return true end
  end
  return false
end

-- Update numbers of the checkpoints in a run directory, ascending.
function checkpoints.list(directory)
  local found = {}
  local folder = directory .. "/checkpoints"
  if core.fs.kind(folder) ~= "directory" then
    if taken(directory, "checkpoints") then
      errors.world(("ENOENT: %s is not a folder: expected a folder of checkpoints, or nothing")
        :format(folder), "ENOENT")
    end
    return found
  end
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

-- Move what has a checkpoint's name and is none out of the way of later saves: NAME.invalid-1 and
-- so on. Returns its new name.
function checkpoints.set_aside(path)
  local folder, name = path:match("^(.*)/([^/]+)$")
  local number = 1
  while taken(folder, ("%s.invalid-%d"):format(name, number)) do number = number + 1 end
  local aside = ("%s.invalid-%d"):format(name, number)
  errors.try(core.fs.rename(path, folder .. "/" .. aside))
  return aside
end

-- Set aside `skipped` (see latest) and every older entry that is incomplete; returns all of them as
-- a list of { path, reason, aside }.
function checkpoints.set_aside_invalid(ctx, directory, skipped)
  local list = table.move(skipped, 1, #skipped, 1, {})
  for _, entry in ipairs(list) do entry.aside = checkpoints.set_aside(entry.path) end
  for _, update in ipairs(checkpoints.list(directory)) do
    local path = checkpoints.path(directory, update)
    local ok, message = core.checkpoint_verify(ctx, path, false)
    if not ok then
      list[#list + 1] = { path = path, reason = message, aside = checkpoints.set_aside(path) }
    end
  end
  return list
end

-- Before a save under `path`: what stands there and cannot be replaced, because it is no whole
-- checkpoint or only a link to one, is set aside. Returns its new name, or nil.
function checkpoints.make_room(ctx, path)
  local folder, name = path:match("^(.*)/([^/]+)$")
  if not taken(folder, name) then return nil end
  if core.checkpoint_verify(ctx, path, false)
    and core.fs.real(path) == core.fs.real(folder) .. "/" .. name then
    return nil
  end
  return checkpoints.set_aside(path)
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
      -- Under a name that sweep() knows: half removed it would look like a damaged checkpoint.
      local path = checkpoints.path(directory, candidates[i])
      local leaving = path .. ".old-0"
      core.fs.remove(leaving)
      if core.fs.rename(path, leaving) then core.fs.remove(leaving) end
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
