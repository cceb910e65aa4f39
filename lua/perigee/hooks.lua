-- Hooks: what runs after which updates.
--
-- An occasion (pg.every(n), pg.at{…}, pg.logspaced(k)) answers due(update, last) for a number of
-- completed updates; update 0 stands for "before the first". A hook is an occasion with an action:
-- a function(run), a diagnostic, or a checkpoint.
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local check = require "perigee.check"

local hooks = {}

local Occasion = { __name = "an occasion" }
Occasion.__index = Occasion
local Hook = { __name = "a hook" }
Hook.__index = Hook

local function occasion(text, due) return setmetatable({ text = text, due_at = due }, Occasion) end

function Occasion:due(update, last) return self.due_at(update, last) end

-- An action: a function, or a callable object such as a diagnostic.
local function check_action(where, name, action)
  local meta = getmetatable(action)
  if type(action) == "function" or (type(meta) == "table" and meta.__call) then return action end
  check.fail(where, name, action, "a function(run) or a diagnostic")
end

local function make(when, action, where, label)
  return setmetatable({ occasion = when, action = check_action(where, label, action),
    where = where, text = label }, Hook)
end

-- pg.at{5, 10}(action) as well as pg.at({5, 10}, action).
function Occasion:__call(action)
  return make(self, action, errors.where(), self.text)
end

local function with_action(when, action)
  if action == nil then return when end
  return make(when, action, errors.where(), when.text)
end

-- Every n updates and at the run's last one. options.before_first also runs it before update 1.
function hooks.every(n, action, options)
  check.integer(nil, "pg.every n", n, 1)
  options = options or {}
  check.table(nil, "pg.every options", options)
  keys.check(options, { "before_first" }, "pg.every options")
  local before = options.before_first or false
  check.boolean(nil, "pg.every before_first", before)
  return with_action(occasion(("pg.every(%d)"):format(n), function(update, last)
    if update == 0 then return before end
    return update % n == 0 or update == last
  end), action)
end

-- After exactly these numbers of completed updates; 0 is before the first.
function hooks.at(list, action)
  check.table(nil, "pg.at", list, "a list of update numbers")
  if #list == 0 then check.fail(nil, "pg.at", list, "at least one update number") end
  keys.check(list, {}, "pg.at", nil, #list)
  local set, shown = {}, {}
  for i, update in ipairs(list) do
    set[check.integer(nil, ("pg.at[%d]"):format(i), update, 0)] = true
    shown[i] = tostring(math.tointeger(update))
  end
  return with_action(occasion("pg.at{" .. table.concat(shown, ", ") .. "}",
    function(update) return set[update] == true end), action)
end

-- k updates per factor of ten, evenly spaced on a logarithmic axis from 1 on, and the last one.
function hooks.logspaced(k, action)
  check.integer(nil, "pg.logspaced k", k, 1)
  return with_action(occasion(("pg.logspaced(%d)"):format(k), function(update, last)
    if update == 0 then return false end
    if update == last then return true end
    local i = math.floor(k * math.log(update, 10) + 0.5)
    for j = i - 1, i + 1 do
      if math.floor(10 ^ (j / k) + 0.5) == update then return true end
    end
    return false
  end), action)
end

-- Checkpoints: every n updates, keeping the last `keep` of them (or "all"); those of `at` stay.
function hooks.checkpoint(options)
  local where = errors.where()
  check.table(where, "pg.checkpoint", options)
  keys.check(options, { "every", "at", "keep" }, "pg.checkpoint", where)
  if options.every == nil and options.at == nil then
    errors.at(where, "pg.checkpoint: expected every = n or at = { … }")
  end
  local keep = options.keep
  if keep == nil then keep = 3 end
  if keep ~= "all" then
    check.integer(where, "pg.checkpoint keep", keep, 1, nil, '"all"')
  end
  local every = options.every ~= nil
    and check.integer(where, "pg.checkpoint every", options.every, 1) or nil
  local at = options.at ~= nil and hooks.at(options.at) or nil
  local hook = setmetatable({ where = where, checkpoint = true, keep = keep, every = every,
    at = at, text = "pg.checkpoint" }, Hook)
  hook.occasion = occasion("pg.checkpoint", function(update, last)
    if every and update > 0 and (update % every == 0 or update == last) then return true end
    return at ~= nil and at:due(update, last)
  end)
  return hook
end

-- True when a checkpoint of this update must never be removed by `keep`.
function Hook:pins(update)
  if not self.checkpoint then return false end
  if self.at and self.at:due(update) then return true end
  return self.keep == "all" and self.occasion:due(update, -1)
end

local always = occasion("every update", function(update) return update > 0 end)

-- The hooks of a recipe as a list of Hook objects, checkpoints apart.
function hooks.normalise(list, where)
  check.table(where, "hooks", list, "a list of functions, pg.every(…), pg.checkpoint{…}, …")
  keys.check(list, {}, "hooks", where, #list)
  local actions, checkpoints = {}, {}
  for i, item in ipairs(list) do
    local label = ("hooks[%d]"):format(i)
    if getmetatable(item) == Hook then
      local target = item.checkpoint and checkpoints or actions
      target[#target + 1] = item
    elseif getmetatable(item) == Occasion then
      errors.at(where, "%s = %s has no action: expected %s with a function(run) or a diagnostic",
        label, item.text, item.text)
    else
      local hook = make(always, item, where, label)
      if type(item) == "function" then hook.where = errors.defined(item) end
      actions[#actions + 1] = hook
    end
  end
  for i, hook in ipairs(actions) do hook.index = i end
  return actions, checkpoints
end

function Hook:due(update, last) return self.occasion:due(update, last) end

-- "pg.every(10) at recipe.lua:31", for messages and config.json.
function Hook:describe()
  local action = self.action
  local what = type(action) == "function" and "function" or tostring(action)
  if self.checkpoint then what = ("keep = %s"):format(self.keep) end
  return ("%s: %s%s"):format(self.occasion.text, what,
    self.where and " at " .. self.where or "")
end

return hooks
