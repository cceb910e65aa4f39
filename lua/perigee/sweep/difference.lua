-- What has changed between the recipe that a run directory was begun with and the present one.
local check = require "perigee.check"

local difference = {}

local most_lines = 100

local function quote(word) return "'" .. word:gsub("'", "'\\''") .. "'" end

-- Lines of `diff -u`; none when the files are equal.
local function diff(before, after)
  local pipe = io.popen(("diff -u -L %s -L %s -- %s %s 2>&1"):format(quote(before), quote(after),
    quote(before), quote(after)))
  local text = pipe and pipe:read "a" or ""
  if pipe then pipe:close() end
  return text
end

local function parameters(before, after)
  local names, lines = {}, {}
  for name in pairs(before) do names[name] = true end
  for name in pairs(after) do names[name] = true end
  local sorted = {}
  for name in pairs(names) do sorted[#sorted + 1] = name end
  table.sort(sorted)
  for _, name in ipairs(sorted) do
    local old, new = before[name], after[name]
    if check.show(old) ~= check.show(new) then
      if old ~= nil then lines[#lines + 1] = ("-%s = %s\n"):format(name, check.show(old)) end
      if new ~= nil then lines[#lines + 1] = ("+%s = %s\n"):format(name, check.show(new)) end
    end
  end
  return table.concat(lines)
end

-- dir: of a run; state: what look.at says of it; reading, params: of the present recipe. "" when
-- there is nothing to show.
function difference.text(dir, state, reading, params)
  local parts = { diff(dir .. "/recipe.lua", reading.path) }
  local now = {}
  for _, file in ipairs(reading.files) do now[file.kind .. " " .. file.name] = file end
  for _, file in ipairs(type(state.files) == "table" and state.files or {}) do
    local key = ("%s %s"):format(tostring(file.kind), tostring(file.name))
    local path = dir .. "/" .. tostring(file.file)
    parts[#parts + 1] = now[key] and diff(path, now[key].path)
      or ("-%s is no longer loaded\n"):format(key)
    now[key] = nil
  end
  for key in pairs(now) do parts[#parts + 1] = ("+%s is loaded\n"):format(key) end
  if params then
    parts[#parts + 1] = parameters(type(state.params) == "table" and state.params or {}, params)
  end
  local lines, hidden = {}, 0
  for line in table.concat(parts):gmatch "[^\n]+" do
    if #lines < most_lines then lines[#lines + 1] = line else hidden = hidden + 1 end
  end
  if hidden > 0 then lines[#lines + 1] = ("… and %d lines more"):format(hidden) end
  return table.concat(lines, "\n")
end

-- The part of an identity (see sources.identity) that is the recipe's, without its parameters.
function difference.recipe_of(identity)
  local parts = {}
  for part in (identity .. "; "):gmatch "(.-); " do
    if not part:find "^set " then parts[#parts + 1] = part end
  end
  return table.concat(parts, "; ")
end

return difference
