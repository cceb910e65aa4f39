-- sweep.json: what a sweep is made of, so that its plan can be made again, and how far it is.
-- Beside it the recipe, as in a run directory.
local core = require "perigee.core"
local data = require "perigee.data"
local directory = require "perigee.directory"
local errors = require "perigee.errors"
local grid = require "perigee.sweep.grid"
local pairing = require "perigee.sweep.pairing"

local record = {}

-- What a plan is made from. The points of earlier plans stay in the folder, and so do these.
local function plan_object(self)
  local tuning, halving = self.tuning, self.halving
  local points = {}
  for i, point in ipairs(self.list or {}) do points[i] = point end
  return directory.object {
    { "grid", self.axes and grid.object(self.axes) or nil },
    { "order", self.order and core.json.array(self.order) or nil },
    { "runs", #points > 0 and core.json.array(points) or nil },
    { "filter", self.filter and "a function" or nil },
    { "samples", self.samples }, { "sample_seed", self.sample_seed },
    { "set", self.set and next(self.set) and self.set or nil },
    { "tuning", tuning and directory.object { { "by", tuning.by },
      { "seeds", core.json.array(tuning.seeds) }, { "report", core.json.array(tuning.report) },
      { "metric", tuning.metric } } or nil },
    { "halving", halving and directory.object { { "budgets", core.json.array(halving.budgets) },
      { "keep", type(halving.keep) == "function" and "a function" or halving.keep },
      { "metric", halving.metric } } or nil },
    { "device", self.device }, { "compute", self.compute }, { "threads", self.threads },
  }
end

-- sweep.json of an earlier call: { runs, plans }, what can be used of it.
function record.read(out)
  local path = out .. "/sweep.json"
  local ok, value = pcall(data.read_json, path)
  local found = { runs = {}, plans = {} }
  if not ok then
    errors.world(("EFORMAT: %s: move it away, and the sweep lists its own runs anew"):format(
      errors.text(value)), "EFORMAT")
  end
  if type(value) ~= "table" then return found end
  for _, name in ipairs { "runs", "plans" } do
    for _, entry in ipairs(type(value[name]) == "table" and value[name] or {}) do
      if type(entry) == "table" then table.insert(found[name], entry) end
    end
  end
  return found
end

local function runs_array(self)
  local list, mine = {}, {}
  for _, run in ipairs(self.runs) do
    mine[run.name] = true
    list[#list + 1] = directory.object { { "name", run.name }, { "dir", run.name },
      { "params", run.point }, { "stage", run.stage }, { "status", run.state.status },
      { "reason", run.state.reason }, { "update", run.state.update },
      { "updates", run.plan.last } }
  end
  for _, old in ipairs(self.before.runs) do -- of another grid in the same folder
    if not mine[old.name] then list[#list + 1] = old end
  end
  return core.json.array(list)
end

-- Plans of the folder, each once, the present one last.
local function plans_array(self)
  local present = plan_object(self)
  -- Without the order of keys, which reading does not keep.
  local function text(value) return core.json.encode(core.json.decode(core.json.encode(value))) end
  local same, list = text(present), {}
  for _, old in ipairs(self.before.plans) do
    if text(old) ~= same then list[#list + 1] = old end
  end
  list[#list + 1] = present
  return core.json.array(list)
end

function record.write(self)
  local params = {}
  for _, run in ipairs(self.runs) do
    for name in pairs(run.point) do params[name] = true end
  end
  directory.write_json(self.out .. "/sweep.json", directory.object {
    { "format", 1 }, { "name", self.name }, { "recipe", self.recipe:match "[^/]+$" },
    { "recipe_sha256", self.runs[1].plan.reading.sha256 },
    { "studied", core.json.array(grid.sorted(params)) },
    { "plans", plans_array(self) },
    { "runs", runs_array(self) },
    { "pairing", self.pairing and pairing.object(self.pairing) or nil },
    { "tuning", self.tuned },
  })
end

-- recipe.lua and what it loaded: the same for all runs, which are refused otherwise.
function record.write_recipe(self)
  directory.write_recipe(self.out, self.runs[1].plan.reading)
end

return record
