-- Reading a metrics.jsonl: the last line of every update, as it stands for all its readers.
local core = require "perigee.core"
local errors = require "perigee.errors"

local metrics = {}

-- { line, … } by rising progress/update. A last line without its end is being written, or was torn
-- by a kill: it is left out, as is what is no object. A missing file has no lines.
function metrics.read(path)
  if core.fs.kind(path) ~= "file" then return {} end
  local by_update, updates = {}, {}
  for text in errors.try(core.fs.read(path)):gmatch "([^\n]*)\n" do
    local line = core.json.decode(text)
    local update = type(line) == "table" and line["progress/update"]
    if math.type(update) == "integer" then
      if not by_update[update] then updates[#updates + 1] = update end
      by_update[update] = line
    end
  end
  table.sort(updates)
  local lines = {}
  for i, update in ipairs(updates) do lines[i] = by_update[update] end
  return lines
end

-- Reading on while it is written.
local Follower = {}
Follower.__index = Follower

function metrics.follow(path)
  return setmetatable({ path = path, offset = 0, rest = "" }, Follower)
end

-- The lines that are new since the last call, as tables; true when the file has been cut since, and
-- the lines are those from its beginning. A line counts when its end has been written.
function Follower:read()
  local lines, restarted = {}, false
  local file = io.open(self.path, "rb")
  if not file then return lines, restarted end
  if file:seek "end" < self.offset then self.offset, self.rest, restarted = 0, "", true end
  file:seek("set", self.offset)
  local text = file:read "a"
  file:close()
  self.offset = self.offset + #text
  text = self.rest .. text
  local from = 1
  for line, after in text:gmatch "([^\n]*)\n()" do
    from = after
    local value = core.json.decode(line)
    if type(value) == "table" then lines[#lines + 1] = value end
  end
  self.rest = text:sub(from)
  return lines, restarted
end

return metrics
