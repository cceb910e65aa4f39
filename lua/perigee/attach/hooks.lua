-- Hooks that clients add to a live run. They run under the time limit of their client; one that
-- fails or works longer is removed, and training goes on.
--
-- A resume has them again where their code is known: where the client's command was one call of
-- hook(…) whose code needs nothing of that client or its prompt but `pg` and `run`. In a run's list
-- of changes: { hook = index, occasion, source (nil: it cannot come back), limit } and
-- { unhook = index }.
local check = require "perigee.check"
local core = require "perigee.core"
local errors = require "perigee.errors"
local hooks = require "perigee.hooks"

local live = {}

-- ---- code ----------------------------------------------------------------------------------

-- What a hook's code finds when it comes back.
local function environment(run)
  return setmetatable({ pg = require "perigee", run = run.handle }, { __index = _G })
end

local own = { print = true, io = true, os = true } -- of a prompt, and as good outside of it

-- A name of the code that means something else at the client's prompt.
local function foreign_name(source, prompt, clean)
  local known = {} -- also names without a value yet, as an increment before the first update
  for _, name in ipairs(getmetatable(prompt).__names()) do known[name] = true end
  local bare = source:gsub("%-%-[^\n]*", ""):gsub('"[^"\n]*"', '""'):gsub("'[^'\n]*'", "''")
  for at, word, after in bare:gmatch("()%f[%w_]([%a_][%w_]*)()") do
    local before = bare:sub(math.max(1, at - 2), at - 1)
    local field = before:match("[%.:]$") and before ~= ".."
    local key = bare:match("^%s*=[^=]", after) or bare:match("^%s*=$", after)
    local same = own[word] or prompt[word] == clean[word] and not known[word] or word == "run"
    if not (field or key or same) then return word end
  end
end

-- The code between the parentheses of a command that is one call of hook(…), if a resume can use
-- it; else nil and why not.
local function source_of(run, code, prompt)
  local inner = code:match "^%s*r?e?t?u?r?n?%s*hook%s*(%b())%s*;?%s*$"
  if not inner then return nil, "the command was more than one call of hook(…)" end
  inner = inner:sub(2, -2)
  local clean = environment(run)
  local name = foreign_name(inner, prompt, clean)
  if name then return nil, ("it uses the client's '%s'"):format(name) end
  if not load("return " .. inner .. "\n", "=hook", "t", clean) then
    return nil, "its code cannot be read again"
  end
  return inner
end

-- ---- adding --------------------------------------------------------------------------------

-- One hook of a recipe's list as a client gives it.
local function one_hook(item)
  if item == nil then check.fail(nil, "hook", item, "a function(run) or a diagnostic") end
  local actions, checkpoints = hooks.normalise({ item }, nil)
  if #checkpoints > 0 then
    errors.misuse("hook: a pg.checkpoint{…} belongs into the recipe: checkpoint() saves now")
  end
  return actions[1]
end

local function removed(run, made, text)
  made.removed = true
  table.insert(run.changes, { update = run.update, unhook = made.index })
  local attached = run.attached
  if not attached then
    run.console:note(text)
    return
  end
  attached:record { { "attach/update", run.update }, { "attach/hook", made.index },
    { "attach/error", text } }
  attached:tell(text .. "\n")
end

-- The list's newest hook, guarded.
local function append(run, item, limit)
  local made = one_hook(item)
  local meta = getmetatable(made.action)
  if type(meta) == "table" and meta.prepare then made.action:prepare(run.handle) end
  local action, index = made.action, #run.spec.hooks + 1
  made.action = function(r)
    local attached = run.attached
    if attached then attached.hooking = true end
    local ok, problem, _, reason = core.guard({ seconds = limit }, function() action(r) end)
    if attached then attached.hooking = false end
    if ok or reason == "interrupted" then return end -- a signal to the run is no fault of it
    removed(run, made, ("hook %d was removed: %s"):format(index, reason or errors.text(problem)))
  end
  made.index = index
  local occasion = made.occasion
  made.occasion = setmetatable({ text = occasion.text, due_at = function(update, last)
    return not made.removed and occasion:due(update, last)
  end }, getmetatable(occasion))
  run.spec.hooks[index] = made
  run.live_hooks = run.live_hooks or {}
  run.live_hooks[index] = made
  return made
end

-- For a client: `code` is the command that gave the item, `prompt` the names that it sees. Returns
-- the hook's number, and what to say of it.
function live.add(run, item, limit, code, prompt)
  local source, why = source_of(run, code, prompt)
  local made = append(run, item, limit)
  table.insert(run.changes, { update = run.update, hook = made.index, limit = limit,
    occasion = made.occasion.text, source = source })
  return made.index, ("hook %d: %s%s"):format(made.index, made.occasion.text,
    source and "" or (" (a resume does not have it: %s)"):format(why))
end

function live.remove(run, index)
  check.integer(nil, "unhook", index, 1)
  local made = run.live_hooks and run.live_hooks[index]
  if not made or made.removed then
    errors.misuse("unhook: %d is not a hook that hook(…) added", index)
  end
  made.removed = true
  table.insert(run.changes, { update = run.update, unhook = made.index })
end

-- ---- coming back ---------------------------------------------------------------------------

-- The hooks among a checkpoint's changes that were there when it was written, again.
-- run.replayed_hooks: a text for each, of those that cannot come back too.
function live.replay(run, changes)
  local gone, texts = {}, {}
  for _, change in ipairs(changes) do
    if change.unhook then gone[change.unhook] = true end
  end
  for _, change in ipairs(changes) do
    if change.hook and not gone[change.hook] then
      local label = ("hook %d: %s"):format(change.hook, change.occasion)
      if not change.source then
        texts[#texts + 1] = label .. " (left out: its code is not known)"
      else
        local ok, made = pcall(function()
          local chunk = assert(load("return " .. change.source .. "\n", "=hook", "t",
            environment(run)))
          return append(run, (chunk()), change.limit)
        end)
        if ok then
          table.insert(run.changes, { update = change.update, hook = made.index,
            limit = change.limit, occasion = change.occasion, source = change.source })
          texts[#texts + 1] = label
        else
          texts[#texts + 1] = ("%s (left out: %s)"):format(label, errors.text(made))
        end
      end
    end
  end
  if #texts > 0 then run.replayed_hooks = texts end
end

return live
