-- Runs for a report, from their directories: a run, a sweep, or a folder of runs. What is torn,
-- unfinished or not a number is named, never averaged.
local core = require "perigee.core"
local data = require "perigee.data"
local errors = require "perigee.errors"
local grid = require "perigee.sweep.grid"
local look = require "perigee.sweep.look"
local metrics = require "perigee.metrics"

local collect = {}

local function json(path)
  local ok, value = pcall(data.read_json, path)
  return ok and type(value) == "table" and value or nil
end

-- The measures of a report: their column, what they are in summary.json and in metrics.jsonl.
collect.measures = {
  { key = "loss", title = "validation loss", summary = "final_validation_loss",
    metric = "validation/loss", format = "%.4f" },
  { key = "diameter", title = "row diameter D(S)", summary = "final_diameter_exact",
    metric = "diagnostics/lm_head_step/diameter_exact", format = "%.3e", log = true },
  { key = "hilbert", title = "Hilbert RMS", summary = "final_validation_hilbert_step_rms",
    metric = "validation/hilbert_step/rms", format = "%.3e", log = true },
}

-- Whether the last line that reports a metric says that it was not finite.
local function not_finite(lines, metric)
  for i = #lines, 1, -1 do
    if type(lines[i][metric]) == "number" then return false end
    local names = lines[i].nonfinite
    for _, name in ipairs(type(names) == "table" and names or {}) do
      if name == metric then return true end
    end
  end
  return false
end

local function read_run(dir, name, listed)
  local state = look.at(dir)
  local run = { dir = dir, name = name, status = state.status, reason = state.reason,
    stage = listed and listed.stage }
  local config = json(dir .. "/config.json")
  local place = json(dir .. "/state.json")
  local params = state.params or place and place.params
  if not config or type(params) ~= "table" then
    run.params = listed and listed.params or {}
    if run.status == "finished" then run.status, run.reason = "damaged", "no config.json" end
    return run
  end
  run.params, run.config = params, config
  if run.status == "interrupted" then
    run.reason = "it has not ended: killed, or still training"
  end
  local summary = json(dir .. "/summary.json")
  run.lines = metrics.read(dir .. "/metrics.jsonl")
  if run.status == "finished" then
    local seconds = summary.elapsed_seconds
    run.final, run.seconds = {}, type(seconds) == "number" and seconds >= 0
      and math.tointeger(seconds // 1) and seconds or nil
    run.update, run.tokens = summary.final_update, summary.final_tokens
    for _, measure in ipairs(collect.measures) do
      local value = summary[measure.summary]
      if type(value) == "number" then
        run.final[measure.key] = value
      elseif value ~= nil or not_finite(run.lines, measure.metric) then
        run.status, run.reason = "not finite", measure.title .. " is not a finite number"
      end
    end
  end
  return run
end

local function is_run(dir) return core.fs.kind(dir .. "/state.json") == "file" end

-- { dir, name, listed } of every run that is in these folders or that a sweep of them lists; listed
-- is what the sweep says of it.
function collect.find(paths)
  local found, seen = {}, {}
  local function add(dir, name, listed)
    local real = core.fs.real(dir) or dir
    if seen[real] then return end
    seen[real] = true
    found[#found + 1] = { dir = dir, name = name, listed = listed }
  end
  for _, path in ipairs(paths) do
    path = #path > 1 and path:gsub("/+$", "") or path
    if core.fs.kind(path) ~= "directory" then
      errors.world(("ENOENT: %s is not a folder: expected a run, a sweep, or a folder of runs")
        :format(path), "ENOENT")
    end
    local sweep = json(path .. "/sweep.json")
    if is_run(path) then
      add(path, path:match "[^/]+$")
    elseif sweep and type(sweep.runs) == "table" then
      for _, listed in ipairs(sweep.runs) do
        if type(listed) == "table" and type(listed.dir) == "string"
          and not listed.dir:find "^/" and not listed.dir:find "%.%." then
          add(path .. "/" .. listed.dir, listed.name or listed.dir, listed)
        end
      end
    else
      for _, name in ipairs(errors.try(core.fs.list(path))) do
        if is_run(path .. "/" .. name) then add(path .. "/" .. name, name) end
      end
    end
  end
  return found
end

-- All runs of these folders.
function collect.runs(paths)
  local runs = {}
  for i, found in ipairs(collect.find(paths)) do
    runs[i] = read_run(found.dir, found.name, found.listed)
  end
  if #runs == 0 then
    errors.world(("ENOENT: there is no run in %s"):format(table.concat(paths, ", ")), "ENOENT")
  end
  return runs
end

-- The model's sizes in one line, for comparison.
local function sizes(model)
  local parts = {}
  for name, value in pairs(type(model) == "table" and model or {}) do
    if type(value) ~= "table" then parts[#parts + 1] = ("%s=%s"):format(name, tostring(value)) end
  end
  table.sort(parts)
  return table.concat(parts, " ")
end

-- Refuse runs that no table should hold together, unless `mixed`.
function collect.check_alike(runs, mixed)
  if mixed then return end
  local first
  for _, run in ipairs(runs) do
    if run.config then
      local facts = { { "recipe", run.config.name },
        { "data", type(run.config.data) == "table" and run.config.data.digest } }
      if not first then
        first = { run = run, facts = facts }
      else
        for i, fact in ipairs(facts) do
          if fact[2] ~= first.facts[i][2] then
            errors.world(("ESTATE: %s and %s differ in their %s (%s, %s): expected runs of one "
              .. "experiment, or --mixed"):format(first.run.dir, run.dir, fact[1],
              tostring(first.facts[i][2]):sub(1, 40), tostring(fact[2]):sub(1, 40)), "ESTATE")
          end
        end
      end
    end
  end
end

-- Refuse a group whose models differ although their parameters do not.
function collect.check_models(groups)
  for _, group in ipairs(groups) do
    local first
    for _, run in ipairs(group.runs) do
      local model = run.config and sizes(run.config.model)
      if model and not first then first = { run = run, model = model } end
      if model and model ~= first.model then
        errors.world(("ESTATE: %s and %s differ in their model (%s; %s): expected runs of one "
          .. "model, or a parameter that says which"):format(first.run.dir, run.dir, first.model,
          model), "ESTATE")
      end
    end
  end
end

-- Names of the parameters in which the runs differ; "seed" and `seeds` are the repetitions.
function collect.varying(runs)
  local values, names = {}, {}
  for _, run in ipairs(runs) do
    for name, value in pairs(run.params) do
      values[name] = values[name] or {}
      values[name][tostring(value)] = true
    end
  end
  for name, set in pairs(values) do
    if next(set, next(set)) ~= nil and name ~= "seed" and name ~= "trunk" then
      names[#names + 1] = name
    end
  end
  table.sort(names)
  return names
end

-- Groups of runs alike in the varying parameters: { key, point, runs, finished }, in the order of
-- their values. Tuning runs stay apart where there are reported ones.
function collect.groups(runs, names)
  local reported = false
  for _, run in ipairs(runs) do reported = reported or run.stage == "report" end
  local groups, by_key = {}, {}
  for _, run in ipairs(runs) do
    if not (reported and run.stage == "tuning") then
      local point, parts = {}, {}
      for i, name in ipairs(names) do
        point[name] = run.params[name]
        parts[i] = ("%s=%s"):format(name, tostring(run.params[name]))
      end
      local key = table.concat(parts, " ")
      local group = by_key[key]
      if not group then
        group = { key = key == "" and run.config and run.config.name or key, point = point,
          runs = {}, finished = {} }
        by_key[key] = group
        groups[#groups + 1] = group
      end
      table.insert(group.runs, run)
      if run.status == "finished" and run.final then table.insert(group.finished, run) end
    end
  end
  table.sort(groups, function(a, b)
    for _, name in ipairs(names) do
      local x, y = a.point[name], b.point[name]
      if x ~= y then
        if type(x) == "number" and type(y) == "number" then return x < y end
        return tostring(x) < tostring(y)
      end
    end
    return false
  end)
  return groups
end

collect.key = grid.key
return collect
