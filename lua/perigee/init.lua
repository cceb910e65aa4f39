-- The module `perigee`: what recipes and scripts use.
local core = require "perigee.core"
local check = require "perigee.check"
local data = require "perigee.data"
local diagnostics = require "perigee.diagnostics"
local ema = require "perigee.ema"
local errors = require "perigee.errors"
local geometry = require "perigee.geometry"
local head = require "perigee.head"
local hooks = require "perigee.hooks"
local keys = require "perigee.keys"
local open = require "perigee.open"
local optim = require "perigee.optim"
local panels = require "perigee.panels"
local params = require "perigee.params"
local random = require "perigee.random"
local recipe = require "perigee.recipe"
local report = require "perigee.report"
local schedule = require "perigee.schedule"
local session = require "perigee.session"
local shadow = require "perigee.shadow"
local statistics = require "perigee.statistics"
local grid = require "perigee.sweep.grid"
local sweep = require "perigee.sweep"
local tensors = require "perigee.tensors"

local pg = {
  core = core,
  version = core.version,
  params = params.declare,
  choice = params.choice,
  recipe = recipe.new,
  model = recipe.model,
  data = data.public,
  optim = optim.public,
  schedule = schedule.public,
  diagnostics = diagnostics.public,
  geometry = geometry.public,
  head = function(options) return errors.guard(head.new, options) end,
  panel = function(options) return panels.new(options, "pg.panel") end,
  every = hooks.every,
  at = hooks.at,
  logspaced = hooks.logspaced,
  checkpoint = hooks.checkpoint,
  ema = ema.new,
  shadow = shadow.new,
  random = random.public,
  sweep = sweep.public,
  report = report.public,
  statistics = statistics,
  uniform = grid.uniform,
  loguniform = grid.loguniform,
}
for name, f in pairs(tensors.public) do pg[name] = f end

-- Open a run of a recipe (an object, or a path to a recipe file). options: out, set, device,
-- threads, compute, recompute, micro, max_updates, max_time (seconds), quiet, signals. Failures of
-- the world return nil, "NAME: text", "NAME".
function pg.open(from, options)
  options = options or {}
  open.check_options(options, "pg.open")
  local copy = { quiet = true }
  for key, value in pairs(options) do copy[key] = value end
  return errors.guard(session.new, from, copy)
end

-- Continue a run directory. options: as pg.open, also recipe and allow_changed_recipe.
function pg.resume(path, options)
  options = options or {}
  check.string(nil, "pg.resume path", path)
  check.table(nil, "pg.resume options", options)
  local known = table.move(open.option_keys, 1, #open.option_keys, 1, {})
  known[#known + 1], known[#known + 2] = "recipe", "allow_changed_recipe"
  keys.check(options, known, "pg.resume")
  local copy = { quiet = true }
  for key, value in pairs(options) do copy[key] = value end
  return errors.guard(session.resume, path, copy)
end

-- Read a recipe file; `set` gives values to its pg.params. Or tensors: pg.load(path [, name]).
function pg.load(path, set, ...)
  check.string(nil, "pg.load path", path)
  if tensors.is_file(path) then return errors.guard(tensors.load, path, set, ...) end
  return errors.guard(function() return (open.read(path, set)) end)
end

return setmetatable(pg, {
  __index = function(_, name)
    local known = {}
    for key in pairs(pg) do known[#known + 1] = key end
    table.sort(known)
    errors.misuse("perigee has no '%s'%s", tostring(name), keys.suggestion(name, known))
  end,
})
