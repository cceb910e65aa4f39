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

return metrics
