-- pg.panel: which positions of the validation stream a measurement looks at (SPEC §4). A panel is
-- declared as { tokens, ranks, micro, spread }, in a recipe or at the prompt, and read from the
-- data of what is measured; from then on it has a hash. Whoever takes a panel takes a number of
-- tokens, such a table, pg.panel{…}, or what was read.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local keys = require "perigee.keys"

local panels = {}

local Panel = { __name = "a panel" }
Panel.__index = function(_, name)
  if Panel[name] then return Panel[name] end
  errors.misuse("a panel has no '%s'%s", tostring(name),
    keys.suggestion(name, { "hash", "tokens", "lengths", "context" }))
end

local allowed = "a number of tokens, { tokens, ranks, micro, spread } or pg.panel{…}"

local function is_read(value)
  local meta = debug.getmetatable(value)
  return type(value) == "userdata" and type(meta) == "table" and meta.__name == "perigee.panel"
end

function panels.is(value) return getmetatable(value) == Panel or is_read(value) end

-- A panel from what someone gave for one. `name` is what messages call it.
function panels.new(value, name, where)
  name = name or "pg.panel"
  if panels.is(value) then return value end
  if type(value) == "number" then value = { tokens = value } end
  check.table(where, name, value, allowed)
  keys.check(value, { "tokens", "ranks", "micro", "spread" }, name, where)
  local function count(key, required)
    if value[key] == nil and not required then return nil end
    return check.integer(where, name .. "." .. key, value[key], 1)
  end
  return setmetatable({
    options = { tokens = count("tokens", true), ranks = count "ranks", micro = count "micro",
      spread = value.spread ~= nil and check.boolean(where, name .. ".spread", value.spread) },
    read = setmetatable({}, { __mode = "k" }), -- owner of a place -> what was read there
  }, Panel)
end

-- A place is where a panel can be read and a matrix measured: { owner, ctx, source, context, vocab,
-- world, micro, model, core }. `owner` is the run or what was opened; core is the run's, if
-- there is one. Modules that have such things say how to find them.
local finders = {}
function panels.add_place(find) finders[#finders + 1] = find end

-- The place of a run, or of what is opened at the prompt; nil when it is neither.
function panels.place(value)
  for _, find in ipairs(finders) do
    local place = find(value)
    if place then return place end
  end
end

local homes = setmetatable({}, { __mode = "k" }) -- what was read -> owner

-- A head with hidden states of its own (head.lua) stands for a panel and its place.
function panels.states_of(value)
  local place = value ~= nil and panels.place(value)
  return place and place.states
end

-- The place to measure at: what was named, where the panel was read, or the only open run.
function panels.place_of(given, panel, what)
  local place = panels.place(given)
  if given ~= nil and not place then
    check.fail(nil, what, given, "a run, or what is opened at the prompt")
  end
  if not place and panels.is(panel) then place = panels.place(panels.home(panel)) end
  place = place or panels.place(nil)
  if not place then
    errors.misuse("%s: expected a panel that a run has read (run:panel{…}), or run = …", what)
  end
  return place
end

-- The owner of the place where a panel was read last.
function panels.home(panel)
  if is_read(panel) then return homes[panel] end
  local last = rawget(panel, "last")
  return last and homes[last]
end

-- Read it there, once. Several ranks read their own slices (SPEC §4) unless it says otherwise.
function panels.read(value, place, name)
  local panel = panels.new(value, name)
  if is_read(panel) then return panel end
  if panel.read[place.owner] then return panel.read[place.owner] end
  local o = panel.options
  local ranks, micro = o.ranks, o.micro
  if (place.world or 1) > 1 and ranks == nil then
    ranks, micro = place.world, micro or place.micro
  end
  local found = errors.try(core.panel(place.ctx, { data = place.source.path,
    val = place.source.val, time = place.context, vocab = place.vocab, tokens = o.tokens,
    ranks = ranks, micro = micro, spread = o.spread or nil }))
  panel.read[place.owner], homes[found] = found, place.owner
  rawset(panel, "last", found)
  return found
end

local function last(self)
  local found = rawget(self, "last")
  if not found then
    errors.misuse("a panel has a hash once it has been read: by run:panel(panel), or by what "
      .. "measures with it")
  end
  return found
end

function Panel:hash() return last(self):hash() end
function Panel:tokens() return self.options.tokens end
function Panel:lengths() return last(self):lengths() end
function Panel:context(...) return last(self):context(...) end
Panel.__tostring = function(self)
  if rawget(self, "last") then return tostring(self.last) end
  return ("panel of %d positions%s"):format(self.options.tokens,
    self.options.spread and ", spread" or "")
end

panels.is_read = is_read

return panels
