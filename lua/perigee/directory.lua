-- The run directory: created exclusively and only when everything else has been checked; holds
-- recipe.lua, config.json, metrics.jsonl, summary.json and checkpoints/.
local core = require "perigee.core"
local errors = require "perigee.errors"
local sources = require "perigee.sources"

local directory = {}

-- Create `out`, or runs/NAME-NNN with the next free number; returns the path.
function directory.reserve(out, name)
  if out then
    out = #out > 1 and out:gsub("/+$", "") or out
    local parent = out:match("^(.*)/[^/]+/*$")
    if parent and parent ~= "" then errors.try(core.fs.make(parent)) end
    local ok, message, code = core.fs.make_exclusive(out)
    if not ok then
      if code == "EEXIST" then
        errors.world(("EEXIST: --out %s exists already: expected a new folder (perigee resume "
          .. "continues a run)"):format(out), code)
      end
      errors.world(message, code)
    end
    return out
  end
  errors.try(core.fs.make("runs"))
  local number = 0
  for _, entry in ipairs(errors.try(core.fs.list("runs"))) do
    local prefix, digits = entry:match("^(.*)%-(%d%d%d+)$")
    if prefix == name then number = math.max(number, math.tointeger(tonumber(digits)) or 0) end
  end
  while true do
    number = number + 1
    local path = ("runs/%s-%03d"):format(name, number)
    local ok, message, code = core.fs.make_exclusive(path)
    if ok then return path end
    if code ~= "EEXIST" then errors.world(message, code) end
  end
end

-- recipe.lua and the Lua files it loaded.
function directory.write_recipe(path, reading)
  if #reading.files > 0 then
    errors.try(core.fs.make(path .. "/recipe"))
    for _, file in ipairs(sources.archive_names(reading).files) do
      errors.try(core.fs.write(path .. "/" .. file.archived, file.text))
    end
  end
  errors.try(core.fs.write(path .. "/recipe.lua", reading.text))
end

function directory.write_json(path, value)
  errors.try(core.fs.write(path, core.json.encode(value, 2) .. "\n"))
end

-- A table whose keys core.json writes in this order: { {key, value}, … }, nil values left out.
function directory.object(pairs_in_order)
  local value, order = {}, {}
  for i = 1, #pairs_in_order do
    local key, v = pairs_in_order[i][1], pairs_in_order[i][2]
    if v ~= nil then
      value[key] = v
      order[#order + 1] = key
    end
  end
  return setmetatable(value, { __order = order })
end

-- A path for config.json, which holds no absolute ones: the last component of those.
function directory.public_path(path)
  if path:sub(1, 1) == "/" then return (path:gsub("/+$", ""):match("([^/]+)$")) or "/" end
  return path
end

return directory
