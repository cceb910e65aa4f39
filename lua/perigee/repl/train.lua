-- Training at the prompt: steps of the run in memory, and what another optimizer would do.
local core = require "perigee.core"
local check = require "perigee.check"
local console = require "perigee.console"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local measure = require "perigee.repl.measure"
local optim = require "perigee.optim"
local report = require "perigee.repl.report"
local runs = require "perigee.run"
local state = require "perigee.state"
local view = require "perigee.repl.view"

local methods = view.methods
local number = report.number

-- ---- steps ---------------------------------------------------------------------------------

-- The run in memory; made when there is none yet.
local function in_memory(self, what)
  if self._live then errors.misuse("%s: this run is live, it trains by itself", what) end
  return runs.inner(self.run)
end

-- An error in the middle of an update may have left it half done; what a signal ended in the core
-- before anything was applied has not.
local function give_up_unless_whole(self, run, e)
  local cancelled = errors.is_failure(e) and e.name == "ECANCELED"
  if cancelled and run.core:updates() == run.update and #run.pending == 0 then return end
  self._run = nil
  rawset(self, "update", self._host.update)
  run:release()
end

local function render_steps(r)
  local lines = {}
  local shown = math.min(#r.losses, 10)
  for i = #r.losses - shown + 1, #r.losses do
    lines[#lines + 1] = ("update %d  loss %.5f  grad_norm %.3f"):format(r.first + i - 1,
      r.losses[i], r.grad_norms[i])
  end
  lines[#lines + 1] = ("%d updates in %s, now at %d; nothing was written"):format(#r.losses,
    console.duration(r.seconds), r.update)
  return table.concat(lines, "\n")
end

-- step(n): n updates of the run in memory, with its hooks. { first, update, losses, grad_norms,
-- seconds }
function methods:step(n)
  n = check.integer(nil, "step", n == nil and 1 or n, 1)
  local run = in_memory(self, "step")
  if run.update >= run.last then
    errors.misuse("step: the run is finished at update %d of %d: open an earlier checkpoint of it",
      run.update, run.last)
  end
  local result = { first = run.update + 1, losses = {}, grad_norms = {}, seconds = 0 }
  local started = core.clock()
  for i = 1, n do
    local ok, e = pcall(run.next_update, run)
    if not ok then
      give_up_unless_whole(self, run, e)
      error(e, 0)
    end
    if not e then break end
    result.losses[i], result.grad_norms[i] = run.loss, run.grad_norm
  end
  result.update, result.seconds = run.update, core.clock() - started
  return report.new(result, render_steps)
end

-- save(path): a checkpoint of the run in memory, wherever that is; perigee fork continues from it.
function methods:save(path)
  check.string(nil, "save path", path)
  local run = in_memory(self, "save")
  if core.fs.exists(path) then
    errors.world(("EEXIST: %s exists already: expected a new folder"):format(path), "EEXIST")
  end
  core.uninterrupted(function()
    errors.try(run.core:save(path, { tokenizer = run.tokenizer_path,
      host_state = core.json.encode(state.collect(run)) }))
  end)
  return path
end

-- ---- what if -------------------------------------------------------------------------------

local function render(r)
  local rows = { { "optimizer", "lr", "norm", "diameter", "Hilbert RMS", "gain", "cosine" } }
  for i, c in ipairs(r.optimizers) do
    rows[i + 1] = { c.name, number(c.lr), number(c.norm), number(c.diameter), number(c.hilbert),
      number(c.gain), number(c.cosine) }
  end
  local lines = { ("%s after update %d, from the gradients of %d batch%s; nothing was applied")
    :format(r.parameter, r.update, r.warm + 1, r.warm == 0 and "" or "es"),
    report.columns(rows, { true }) }
  return table.concat(lines, "\n")
end

-- The optimizers to try as a list: the run's own one first, with its slots.
local function candidates(run, parameter, given)
  local list = { { optimizer = run.assignments[run.owner[parameter.name]].optimizer, own = true } }
  if optim.is(given) then given = { given } end
  check.table(nil, "what_if", given, "an optimizer, pg.optim.NAME{…}, or a list of them")
  if #given == 0 then errors.misuse("what_if: expected at least one optimizer") end
  for i, optimizer in ipairs(given) do
    if not optim.is(optimizer) then
      check.fail(nil, ("what_if[%d]"):format(i), optimizer, "an optimizer, pg.optim.NAME{…}")
    end
    list[i + 1] = { optimizer = optimizer }
  end
  return list
end

local function measured(run, parameter, c, own, panel)
  local s = c.trial:value()
  c.trial:close()
  local norm, own_norm = s:norm(), own and own:norm() or s:norm()
  local product = own and (s * own):sum() or norm * norm
  local entry = { name = (c.own and "now: " or "") .. c.optimizer.name,
    settings = c.optimizer:describe(), lr = c.lr, increment = s, norm = norm,
    gain = -(parameter.gradient * s):sum(),
    cosine = norm > 0 and own_norm > 0 and product / (norm * own_norm) or nil }
  if parameter.role == "head" then
    entry.diameter = errors.try(core.diameter(s)).value
    entry.hilbert = (errors.try(run.core:hilbert(panel, s)))
  end
  return entry
end

-- what_if(optimizer or list, { warm, parameter, panel }): the increments that these optimizers and
-- the run's own one would make now, all from the same gradients: those of the next `warm` + 1
-- optimizer batches at the present weights, the last of which is the one that counts. The run's own
-- optimizer begins with its slots, as does another setting of it; others begin with zeros. Nothing
-- of the run changes.
function methods:what_if(given, options)
  options = options or {}
  check.table(nil, "what_if options", options, "{ warm, parameter, panel }")
  keys.check(options, { "warm", "parameter", "panel" }, "what_if options")
  local warm = check.integer(nil, "what_if warm", options.warm or 0, 0)
  local run = runs.inner(self.run)
  if run.world > 1 then errors.misuse("what_if needs all %d ranks", run.world) end
  local name = options.parameter or run.head.name
  if type(name) == "userdata" then name = name.name end
  local parameter = run.by_name[check.string(nil, "what_if parameter", name)]
  if not parameter then
    errors.misuse("what_if: no parameter is called %s", check.show(name))
  end
  local list = candidates(run, parameter, given)
  local panel = parameter.role == "head" and measure.panel(self, options.panel) or nil
  local t = math.min(run.update, run.total - 1)
  local assignment = run.assignments[run.owner[name]]
  local scale = (assignment.schedule or run.spec.schedule):scale(t, run.total)
  for _, c in ipairs(list) do
    local hypers = c.optimizer:values(t, run.total)
    c.lr = (hypers.lr or 0) * scale
    c.trial = errors.try(run.core:trial(parameter, { optimizer = c.optimizer:core_optimizer(),
      hypers = hypers,
      inherit = c.optimizer:core_optimizer():name() == parameter.optimizer and (c.own
        or not c.optimizer.userdata) }))
  end
  local position = run.core:loader()
  local result = { warm = warm, parameter = name, update = run.update,
    optimizers = {} }
  local ok, e = pcall(function()
    for _ = 1, warm + 1 do
      errors.try(run.core:gradients())
      for _, c in ipairs(list) do errors.try(c.trial:increment(scale)) end
    end
    local own
    for i, c in ipairs(list) do
      result.optimizers[i] = measured(run, parameter, c, own, panel)
      own = own or result.optimizers[i].increment
    end
  end)
  core.uninterrupted(function()
    errors.try(run.core:rewind { epoch = position.epoch, batches = position.batches,
      shard_position = position.shard_position, batch_position = position.batch_position })
  end)
  if not ok then error(e, 0) end
  return report.new(result, render)
end
