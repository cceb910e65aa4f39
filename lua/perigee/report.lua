-- pg.report and `perigee report`: tables and figures of runs, from their directories alone.
local bundle = require "perigee.report.bundle"
local check = require "perigee.check"
local collect = require "perigee.report.collect"
local core = require "perigee.core"
local errors = require "perigee.errors"
local figures = require "perigee.report.figures"
local gnuplot = require "perigee.repl.gnuplot"
local keys = require "perigee.keys"
local page = require "perigee.report.page"
local tables = require "perigee.report.tables"

local report = {}

local Report = { __name = "a report" }
Report.__index = Report

-- All tables, one after another, in one format of perigee.report.tables.
local function render(self, format)
  local parts = {}
  for i, t in ipairs(self.tables) do parts[i] = tables[format](t) end
  return table.concat(parts, "\n")
end

for _, format in ipairs { "text", "markdown", "latex", "csv" } do
  Report[format] = function(self) return render(self, format) end
end

function Report:html() return page.html(self) end

function Report:__tostring() return self:text() end

local function rates_of(groups, names)
  local found = {}
  for _, name in ipairs(names) do
    local numeric = name:find "^lr" or name:find "_lr$" or name:find "_lr_"
    for _, group in ipairs(groups) do
      numeric = numeric and type(group.point[name]) == "number"
    end
    if numeric then found[#found + 1] = name end
  end
  return found
end

-- Cairo writes the time into a PDF: without it the same runs give the same bytes. As many digits as
-- before, so that the file's table of offsets holds.
local function undate(path)
  local text = errors.try(core.fs.read(path))
  errors.try(core.fs.write(path, (text:gsub("/CreationDate %(D:%d%d%d%d%d%d%d%d%d%d%d%d%d%d",
    "/CreationDate (D:19700101000000"))))
end

-- Into the folder `out`, which may hold other files too: self.files are the report's.
local function write(self, out)
  self.files = {}
  local function path(name)
    table.insert(self.files, name)
    return out .. "/" .. name
  end
  errors.try(core.fs.make(out))
  for name, format in pairs { ["report.md"] = "markdown", ["report.tex"] = "latex",
    ["report.txt"] = "text" } do
    errors.try(core.fs.write(path(name), self[format](self)))
  end
  for i, t in ipairs(self.tables) do
    errors.try(core.fs.write(path(("table-%d.csv"):format(i)), tables.csv(t)))
  end
  for _, figure in ipairs(self.figures) do
    errors.try(core.fs.write(path(figure.name .. ".csv"), figures.csv(figure)))
    for _, format in ipairs { "svg", "pdf", "png" } do
      figure.drawing.file = path(figure.name .. "." .. format)
      gnuplot.draw(figure.drawing)
    end
    undate(out .. "/" .. figure.name .. ".pdf")
  end
  errors.try(core.fs.write(path "report.html", self:html()))
end

-- A baseline is a value of a parameter in which the runs differ.
local function check_baseline(groups, names, baseline)
  local known, list = {}, {}
  for _, name in ipairs(names) do
    for _, group in ipairs(groups) do
      local text = tostring(group.point[name])
      if text == baseline then return end
      if not known[text] and type(group.point[name]) == "string" then
        known[text], list[#list + 1] = true, check.show(text)
      end
    end
  end
  errors.usage("baseline %s is not allowed: expected a value that the runs have%s",
    check.show(baseline), #list > 0 and ", " .. table.concat(list, " or ") or "")
end

-- options: dirs, mixed, target, baseline, out, bundle (needs out).
function report.make(options)
  local runs = collect.runs(options.dirs)
  collect.check_alike(runs, options.mixed)
  local names = collect.varying(runs)
  local groups = collect.groups(runs, names)
  collect.check_models(groups)
  if options.baseline then check_baseline(groups, names, options.baseline) end
  local self = setmetatable({ runs = runs, groups = groups, tables = {}, out = options.out,
    title = runs[1].config and runs[1].config.name or "runs" }, Report)
  local function add(t) self.tables[#self.tables + 1] = t end
  add(tables.final(groups))
  add(tables.paired(groups, names, options.baseline))
  add(tables.paper(runs))
  local rates = rates_of(groups, names)
  for _, name in ipairs(rates) do add(tables.rates(groups, names, name)) end
  if options.target then add(tables.target(groups, options.target)) end
  add(tables.left_out(runs))
  self.figures = figures.all(groups, rates)
  if options.out then write(self, options.out) end
  if options.bundle then bundle.write(self, options.out, options.bundle) end
  return self
end

local option_keys = { "mixed", "target", "baseline", "out", "bundle" }

-- pg.report{ DIR, …, out =, bundle =, target =, baseline =, mixed = }: { tables, figures, groups,
-- runs } with methods text, markdown, latex, csv, html. Failures return nil, "NAME: text", "NAME".
function report.public(options)
  check.table(nil, "pg.report", options)
  keys.check(options, option_keys, "pg.report", nil, #options)
  if #options == 0 then errors.misuse("pg.report: expected folders of runs") end
  local dirs = {}
  for i, dir in ipairs(options) do dirs[i] = check.string(nil, "pg.report folder", dir) end
  if options.target ~= nil then check.number(nil, "pg.report target", options.target, {}) end
  if options.out ~= nil then check.string(nil, "pg.report out", options.out) end
  if options.bundle ~= nil then
    check.string(nil, "pg.report bundle", options.bundle)
    if not options.out then errors.misuse("pg.report bundle: expected with out") end
  end
  return errors.guard(report.make, { dirs = dirs, mixed = options.mixed, target = options.target,
    baseline = options.baseline and tostring(options.baseline), out = options.out,
    bundle = options.bundle })
end

return report
