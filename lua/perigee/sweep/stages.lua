-- Sweeps of several stages: tuning on seeds of its own and then the reported runs, or successive
-- halving. Without either there is one stage, of all runs.
local core = require "perigee.core"
local check = require "perigee.check"
local data = require "perigee.data"
local directory = require "perigee.directory"
local errors = require "perigee.errors"
local grid = require "perigee.sweep.grid"
local keys = require "perigee.keys"

local stages = {}

local function checked_seeds(name, list)
  check.table(nil, "sweep.tuning." .. name, list, "a list of seeds")
  if #list == 0 then check.fail(nil, "sweep.tuning." .. name, list, "at least one seed") end
  for i, seed in ipairs(list) do
    check.integer(nil, ("sweep.tuning.%s[%d]"):format(name, i), seed, 0)
  end
end

-- tuning = { by = parameter, seeds = { … }, report = { … }, metric = name }
-- halving = { budgets = { updates, … }, keep = share or function(reports, stage) -> names }
function stages.check(spec)
  local tuning, halving = spec.tuning, spec.halving
  if tuning and halving then
    errors.misuse("sweep: tuning and halving: expected one of them")
  end
  if tuning then
    check.table(nil, "sweep.tuning", tuning, "{ by, seeds, report, metric }")
    keys.check(tuning, { "by", "seeds", "report", "metric" }, "sweep.tuning")
    check.string(nil, "sweep.tuning.by", tuning.by)
    checked_seeds("seeds", tuning.seeds)
    checked_seeds("report", tuning.report)
    if tuning.metric ~= nil then check.string(nil, "sweep.tuning.metric", tuning.metric) end
    for _, a in ipairs(tuning.seeds) do
      for _, b in ipairs(tuning.report) do
        if a == b then
          errors.misuse("sweep.tuning: seed %d is a tuning seed and a reported one: expected "
            .. "other seeds for what is reported", a)
        end
      end
    end
    if spec.grid and spec.grid.seed ~= nil then
      errors.misuse("sweep: seeds are in tuning.seeds and tuning.report, not on the grid")
    end
    local merged = { seed = tuning.seeds }
    for name, axis in pairs(spec.grid or {}) do merged[name] = axis end
    spec.grid = merged
    if spec.order then
      spec.order = table.move(spec.order, 1, #spec.order, 1, {})
      table.insert(spec.order, "seed")
    end
  end
  if halving then
    check.table(nil, "sweep.halving", halving, "{ budgets, keep, metric }")
    keys.check(halving, { "budgets", "keep", "metric" }, "sweep.halving")
    check.table(nil, "sweep.halving.budgets", halving.budgets, "a list of updates")
    for i, budget in ipairs(halving.budgets) do
      check.integer(nil, ("sweep.halving.budgets[%d]"):format(i), budget,
        (halving.budgets[i - 1] or 0) + 1)
    end
    if type(halving.keep) ~= "function" then
      check.number(nil, "sweep.halving.keep", halving.keep, { min = 0, max = 1, open_min = true })
    end
  end
end

-- Equal budgets: as many tuning runs for each method.
function stages.plan(spec)
  local tuning = spec.tuning
  if not tuning then return end
  local counts, order = {}, {}
  for _, run in ipairs(spec.runs) do
    run.stage = "tuning"
    local method = run.point[tuning.by]
    if method == nil then
      errors.misuse("sweep.tuning.by = %q is not on the grid", tuning.by)
    end
    if not counts[method] then order[#order + 1] = method end
    counts[method] = (counts[method] or 0) + 1
  end
  for _, method in ipairs(order) do
    if counts[method] ~= counts[order[1]] then
      errors.misuse("sweep.tuning: %s = %s has %d tuning runs, %s has %d: expected equal budgets",
        tuning.by, check.show(order[1]), counts[order[1]], check.show(method), counts[method])
    end
  end
end

-- What a run ended with: `metric` as summary.json has it, or the last of metrics.jsonl; nil when
-- that was not finite.
local function result(run, metric)
  if run.state.status ~= "finished" and run.state.status ~= "paused" then return nil end
  if metric == "validation/loss" and run.state.loss then return run.state.loss end
  local found
  for line in errors.try(core.fs.read(run.dir .. "/metrics.jsonl")):gmatch "[^\n]+" do
    local value = core.json.decode(line)
    if type(value) == "table" then
      if type(value[metric]) == "number" then found = value[metric] end
      for _, name in ipairs(type(value.nonfinite) == "table" and value.nonfinite or {}) do
        if name == metric then found = nil end
      end
    end
  end
  return found
end

-- The point of a run without its seed, and its mean result over seeds; nil when one has none.
local function by_setting(runs, metric)
  local settings, order = {}, {}
  for _, run in ipairs(runs) do
    local rest = {}
    for name, value in pairs(run.point) do
      if name ~= "seed" then rest[name] = value end
    end
    local key = grid.key(rest)
    local entry = settings[key]
    if not entry then
      entry = { point = rest, key = key, sum = 0, runs = {}, whole = true }
      settings[key] = entry
      order[#order + 1] = entry
    end
    local value = result(run, metric)
    if value then entry.sum = entry.sum + value else entry.whole = false end
    entry.runs[#entry.runs + 1] = run
  end
  for _, entry in ipairs(order) do
    entry.mean = entry.whole and entry.sum / #entry.runs or nil
  end
  return order
end

-- Tuning first, then every method's best setting on the reported seeds.
local function tune(self, work, add)
  local tuning = self.tuning
  if not work(self.runs) then return false end
  local metric = tuning.metric or "validation/loss"
  local best, order = {}, {}
  for _, entry in ipairs(by_setting(self.runs, metric)) do
    local method = entry.point[tuning.by]
    if not best[method] then
      best[method] = { runs = 0 }
      order[#order + 1] = method
    end
    local b = best[method]
    b.runs = b.runs + #entry.runs
    if entry.mean and (not b.mean or entry.mean < b.mean) then
      b.mean, b.point, b.key = entry.mean, entry.point, entry.key
    end
  end
  local points, tuned = {}, {}
  for i, method in ipairs(order) do
    local b = best[method]
    tuned[i] = directory.object { { "method", ("%s=%s"):format(tuning.by, tostring(method)) },
      { "runs", b.runs }, { "metric", metric }, { "mean", b.mean }, { "choice", b.key } }
    for _, seed in ipairs(b.point and tuning.report or {}) do
      local point = { seed = seed }
      for name, value in pairs(b.point) do point[name] = value end
      points[#points + 1] = point
    end
  end
  self.tuned = core.json.array(tuned)
  if #points == 0 then return true end
  local added = add(points)
  for _, run in ipairs(added) do run.stage = "report" end
  return work(added)
end

-- Every budget for the settings that the one before left.
local function halve(self, work)
  local halving = self.halving
  local alive = self.runs
  for stage, budget in ipairs(halving.budgets) do
    local last = stage == #halving.budgets
    for _, run in ipairs(alive) do
      run.until_update = math.min(budget, run.plan.last)
      if run.state.status == "stopped" and (run.state.update or 0) >= run.until_update then
        run.state.status = "paused"
      end
      run.tried = run.state.status == "failed"
    end
    if not work(alive) then return false end
    if last then return true end
    local kept = {}
    if type(halving.keep) == "function" then
      local reports = {}
      for i, run in ipairs(alive) do
        reports[i] = { name = run.name, params = run.plan.params, dir = run.dir,
          status = run.state.status, update = run.state.update, loss = run.state.loss,
          summary = data.read_json(run.dir .. "/summary.json") }
      end
      local names = halving.keep(reports, stage)
      check.table(nil, "sweep.halving.keep's result", names, "a list of runs' names")
      local wanted = {}
      for _, name in ipairs(names) do wanted[name] = true end
      for _, run in ipairs(alive) do
        if wanted[run.name] then kept[#kept + 1] = run end
      end
    else
      local list = {}
      for _, entry in ipairs(by_setting(alive, halving.metric or "validation/loss")) do
        if entry.mean then list[#list + 1] = entry end
      end
      table.sort(list, function(a, b)
        if a.mean ~= b.mean then return a.mean < b.mean end
        return a.key < b.key
      end)
      for i = 1, math.max(1, math.ceil(#list * halving.keep)) do
        for _, run in ipairs(list[i] and list[i].runs or {}) do kept[#kept + 1] = run end
      end
    end
    alive = kept
    if #alive == 0 then return true end
  end
  return true
end

-- work(runs) -> false when a signal stopped it; add(points) -> runs of a later stage.
function stages.run(self, work, add)
  if self.tuning then return tune(self, work, add) end
  if self.halving then return halve(self, work) end
  return work(self.runs)
end

return stages
