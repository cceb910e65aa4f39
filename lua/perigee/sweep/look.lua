-- What a run directory of a sweep says about itself. Nothing here trusts it: it may be torn by a
-- kill or edited by hand.
local core = require "perigee.core"
local data = require "perigee.data"
local errors = require "perigee.errors"
local metrics = require "perigee.metrics"

local look = {}

-- What a new run writes before recipe.lua, with which it has begun.
local function is_first(name)
  name = name:gsub("%.tmp%-%d+$", "")
  return name == "config.json" or name == "state.json" or name == "recipe" or name == "recipe.lua"
end

-- { status, reason, update, loss, identity }: status is
--   "waiting"      there is nothing yet
--   "finished"     at its end
--   "stopped"      with a checkpoint to resume from
--   "interrupted"  without a word: killed, or still training somewhere
--   "failed"       with a reason
--   "damaged"      it does not read as a run directory; the reason says why
function look.at(dir)
  local kind = core.fs.kind(dir)
  if kind == nil then return { status = "waiting" } end
  if kind ~= "directory" then
    return { status = "damaged", reason = dir .. " is a file" }
  end
  local entries = core.fs.list(dir) or {}
  if #entries == 0 then return { status = "waiting", empty = true } end
  local function part(name)
    local ok, value = pcall(data.read_json, dir .. "/" .. name)
    if not ok then return nil, errors.text(value) end
    return value
  end
  if core.fs.kind(dir .. "/recipe.lua") == nil then
    local ours = true
    for _, name in ipairs(entries) do ours = ours and is_first(name) end
    if ours then return { status = "waiting", begun = true } end -- killed before it had begun
  end
  local place, problem = part "state.json"
  if type(place) ~= "table" or type(place.recipe) ~= "string" then
    return { status = "damaged", reason = problem or dir .. "/state.json is not that of a run" }
  end
  local summary, torn = part "summary.json"
  if torn or (summary ~= nil and type(summary) ~= "table") then
    return { status = "damaged", reason = torn or dir .. "/summary.json is not that of a run" }
  end
  local found = { identity = place.recipe, params = place.params, files = place.files }
  if summary == nil then
    found.status = "interrupted"
  else
    found.status, found.reason = summary.status, summary.reason
    found.update = math.type(summary.update) == "integer" and summary.update or nil
    local loss = summary.final_validation_loss -- null: it was not finite
    if loss == nil then loss = summary.final_train_loss end
    found.loss = type(loss) == "number" and loss or nil
    if summary.exit_code ~= 0 and summary.status ~= "stopped" then found.status = "failed" end
    if found.status ~= "finished" and found.status ~= "stopped" then found.status = "failed" end
  end
  return found
end

-- Follow the metrics of a run while it is written. Keeps what the lines last said of some names.
local Tail = {}
Tail.__index = Tail

function look.tail(dir)
  return setmetatable({ metrics = metrics.follow(dir .. "/metrics.jsonl"), values = {} }, Tail)
end

-- Read what is new; returns the values so far.
function Tail:read()
  for _, line in ipairs((self.metrics:read())) do
    for _, name in ipairs { "progress/update", "train/loss", "validation/loss" } do
      if type(line[name]) == "number" then self.values[name] = line[name] end
    end
    local update, hash = line["progress/update"], line["data/batch_hash"]
    if hash and not self.values.first_batch then
      self.values.first_batch = ("%s:%s"):format(tostring(update), tostring(hash))
    end
  end
  return self.values
end

return look
