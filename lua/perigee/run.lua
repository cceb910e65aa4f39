-- A run: what hooks and scripts see as `run`, and the loop behind it.
--
-- One update (DESIGN): step -> hooks in list order -> one merged metrics line -> checkpoint.
-- run:updates() yields the number of completed updates after the hooks; what the loop's body logs
-- joins the same line, which is written when the body is done.
--
-- The user holds a handle; its state is in a Run table that this module keeps.
local core = require "perigee.core"
local check = require "perigee.check"
local checkpoints = require "perigee.checkpoints"
local errors = require "perigee.errors"
local exit = require "perigee.exit"
local keepers = require "perigee.keepers"
local keys = require "perigee.keys"
local profile = require "perigee.profile"
local random = require "perigee.random"
local ranks = require "perigee.ranks"
local record = require "perigee.record"
local routing = require "perigee.routing"
local state = require "perigee.state"

local runs = {}

local Run = {}
Run.__index = Run
for name, method in pairs(ranks) do Run[name] = method end

local methods = {} -- run:METHOD, defined in handle.lua
runs.methods = methods
local of_handle = setmetatable({}, { __mode = "k" })

-- The Run behind a handle.
function runs.inner(handle)
  local run = of_handle[handle]
  if not run then check.fail(nil, "run", handle, "a run (call methods as run:name())") end
  return run
end

-- The Run of a handle, or a Run itself; for nil the only one that is open. nil when there is none.
function runs.find(value)
  if value ~= nil then
    return of_handle[value] or (getmetatable(value) == Run and value or nil)
  end
  local found
  for _, run in pairs(of_handle) do
    if run.core and not run.closed then
      if found then return nil end
      found = run
    end
  end
  return found
end

exit.guard(function()
  local list = {}
  for _, run in pairs(of_handle) do
    local lives = run.status == "running" or run.status == "prepared"
    if lives and not run.closed then list[#list + 1] = run end
  end
  return list
end)

-- Fields that hooks may read; nil before the first update where that makes sense.
local fields = { loss = true, update = true, tokens = true, grad_norm = true, clip_factor = true,
  scale = true, batch_hash = true, parameters = true, head = true, embedding = true, out = true,
  name = true, total = true, last = true, state = true, schedule = true, status = true,
  reason = true, context = true, config = true, params = true, epoch = true,
  last_checkpoint = true, rank = true, world = true }

local function known_names()
  local names = {}
  for name in pairs(fields) do names[#names + 1] = name end
  for name in pairs(methods) do names[#names + 1] = name end
  table.sort(names)
  return names
end

runs.names = known_names

local function read_field(handle, key)
  if methods[key] then return methods[key] end
  if not fields[key] then
    errors.misuse("run has no '%s'%s", tostring(key), keys.suggestion(key, known_names()))
  end
  local run = runs.inner(handle)
  if key == "context" then return run.ctx end
  if key == "config" then return run.model_config end
  if key == "schedule" then return run.spec.schedule:bind(run.total) end
  if key == "name" then return run.spec.name end
  if key == "epoch" then return run:epoch() end
  return run[key]
end

local function write_field(handle, key, value)
  if key == "state" then
    runs.inner(handle).state = check.table(nil, "run.state", value, "a plain table")
    return
  end
  errors.misuse("run.%s cannot be set: what must survive a resume belongs into run.state",
    tostring(key))
end

local handle_meta = {
  __name = "a run", __names = known_names, __index = read_field, __newindex = write_field,
  __close = function(handle, e)
    if e ~= nil then runs.inner(handle):fail(e) end
    methods.close(handle)
  end,
  __gc = function(handle)
    local run = of_handle[handle]
    if run then pcall(run.release, run) end
  end,
  __tostring = function(handle)
    local run = of_handle[handle]
    return ("run %s at update %d of %d"):format(run.spec and run.spec.name or "?", run.update,
      run.last or 0)
  end,
}

function runs.new()
  local run = setmetatable({ update = 0, tokens = 0, state = {}, entries = {}, pending = {},
    changes = {}, elapsed_before = 0.0, status = "prepared", session = 1, final = {},
    rank = 0, world = 1 }, Run)
  run.handle = setmetatable({}, handle_meta)
  of_handle[run.handle] = run
  return run
end

-- ---- assignments -----------------------------------------------------------------------------

-- Let `optimizer` update these parameters from the next update on.
function Run:assign(optimizer, parameters, schedule, decay_scale)
  local index = errors.try(self.core:assign {
    optimizer = optimizer:core_optimizer(),
    hypers = optimizer:values(self.update, self.total),
    independent_decay = (decay_scale or optimizer.decay_scale) == "independent",
    cautious = optimizer.cautious, max_norm = optimizer.clip or nil,
    parameters = parameters,
  })
  self.assignments[index] = { optimizer = optimizer, schedule = schedule, index = index,
    decay_scale = decay_scale }
  for _, parameter in ipairs(parameters) do self.owner[parameter.name] = index end
  return index
end

-- run:set_optimizer: parameters keep the schedule of the entry that they had, and its scale of
-- weight decay unless the optimizer states one.
function Run:change_optimizer(names, optimizer)
  local order, groups = {}, {}
  for _, name in ipairs(names) do
    local index = self.owner[name]
    if not groups[index] then
      groups[index] = {}
      order[#order + 1] = index
    end
    table.insert(groups[index], self.by_name[name])
  end
  for _, index in ipairs(order) do
    local before = self.assignments[index]
    local kept = not optimizer.states_decay_scale
      and (before.decay_scale or before.optimizer.decay_scale) or nil
    self:assign(optimizer, groups[index], before.schedule, kept)
  end
end

-- Raises where these are no hyperparameters of the present optimizers.
function Run:check_hypers(names, changes)
  for _, name in ipairs(names) do
    self.assignments[self.owner[name]].optimizer:with(changes)
  end
end

-- run:set: other hyperparameters for the same optimizers, whose slots and schedules stay.
function Run:change_hypers(names, changes)
  local order, groups, made = {}, {}, {}
  for _, name in ipairs(names) do
    local index = self.owner[name]
    if not groups[index] then
      groups[index], made[index] = {}, self.assignments[index].optimizer:with(changes)
      order[#order + 1] = index
    end
    table.insert(groups[index], self.by_name[name])
  end
  for _, index in ipairs(order) do
    local before = self.assignments[index]
    self:assign(made[index], groups[index], before.schedule, before.decay_scale)
  end
end

-- A change from outside the recipe: what was saved of this update no longer holds. `exactly`: what
-- was changed, in a text that is the same on all ranks.
function Run:changed(text, exactly)
  self.saved_update = nil
  if exactly and self.world > 1 then
    self.since_agreed = self.since_agreed or {}
    table.insert(self.since_agreed, exactly)
  end
  if self.attached and text then self.attached:note(text) end
end

-- Scales and function-valued hyperparameters of update index t.
function Run:set_hypers(t)
  self.scale = self.spec.schedule:scale(t, self.total)
  for _, a in pairs(self.assignments) do
    a.scale = a.schedule and a.schedule:scale(t, self.total) or self.scale
    self.core:set(a.index, { scale = a.scale, hypers = a.optimizer:changing(t, self.total) })
  end
  self:note_rates(t)
end

-- Learning rate and peak of every role at update index t, those of its first parameter: noted
-- before the hooks, which may change the optimizer of the next update.
function Run:note_rates(t)
  self.rates = {}
  for _, parameter in ipairs(self.parameters) do
    if not self.rates[parameter.role] then
      local a = self.assignments[self.owner[parameter.name]]
      local peak = a.optimizer:peak(t, self.total)
      self.rates[parameter.role] = { peak * (a.scale or 0), peak }
    end
  end
end

function Run:role_rates(role)
  if self.rates and self.rates[role] then return table.unpack(self.rates[role]) end
end

-- ---- one update ------------------------------------------------------------------------------

function Run:epoch()
  if self.update == 0 then return 0 end
  local served = self.core:loader().batches
  return (math.max(served, 1) - 1) // self.updates_per_epoch
end

local function guard_entry(self)
  if self.busy then
    errors.misuse("the run is inside an update: a hook or an optimizer may not advance it")
  end
  if self.closed then errors.misuse("the run is closed") end
end

-- Let a signal interrupt a long operation of the core: it then fails with ECANCELED.
function Run:cancellable(f)
  -- Several ranks work together, to the end.
  if not self.options.signals or self.world > 1 then return f() end
  core.signals.cancel_on(self.ctx, true)
  local results = table.pack(pcall(f))
  core.signals.cancel_on(self.ctx, false)
  self.ctx:resume()
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

-- The step alone. A signal may end a long one: its gradients are dropped, nothing is applied.
function Run:step()
  local t = self.update
  self:set_hypers(t)
  local step = profile.around(self, function()
    return self:cancellable(function() return errors.try(self.core:step()) end)
  end)
  self.update, self.tokens = step.update, step.tokens
  self.loss, self.grad_norm, self.clip_factor = step.loss, step.norm, step.factor
  self.batch_hash, self.step_seconds = step.batch_hash, step.seconds
  self.tracker:add(step)
  self.line_written = false
end

-- Call a hook in a coroutine of its own, so that a yield cannot leave the run half done.
local function call_hook(hook, handle)
  local co = coroutine.create(function() hook.action(handle) end)
  local ok, e = coroutine.resume(co)
  if ok and coroutine.status(co) ~= "dead" then
    ok, e = false, "a hook may not yield"
  end
  if ok then return true end
  local trace = debug.traceback(co, errors.text(e))
  coroutine.close(co)
  return false, e, trace
end

-- A hook's error as one located line; world failures keep their name.
local function hook_error(self, hook, e)
  local text = errors.text(e)
  -- Another rank's failure, with that one's place.
  if errors.is_failure(e) and e.name == "EPEER" and self.comm:failure() then return text end
  local context = ("hook %s, update %d"):format(hook.occasion.text, self.update)
  if type(e) == "string" and text:match("^[^%s:]+:%d+: ") then
    return ("%s (%s)"):format(text, context)
  end
  return ("%s: %s (%s)"):format(hook.where or self.spec.where or "recipe", text, context)
end

-- Run the hooks that are due, from a list of indices. A measurement that a signal interrupts, and
-- whatever a failure left out, is pending: a resume makes up for it.
function Run:run_hooks(indices)
  self.pending = {}
  for position, index in ipairs(indices) do
    local hook = self.spec.hooks[index]
    local measurement = type(hook.action) ~= "function"
    if measurement and self:signal() then
      table.insert(self.pending, index)
    else
      self.busy = true
      local ok, e, trace = call_hook(hook, self.handle)
      self.busy = false
      if not ok and errors.is_failure(e) and e.name == "ECANCELED" and self:signal() then
        table.insert(self.pending, index)
      elseif not ok then
        for later = position, #indices do table.insert(self.pending, indices[later]) end
        self.trace = trace
        errors.world(hook_error(self, hook, e), errors.is_failure(e) and e.name or "EHOST")
      end
    end
  end
end

function Run:due_hooks()
  local due = {}
  for index, hook in ipairs(self.spec.hooks) do
    if hook:due(self.update, self.last) then due[#due + 1] = index end
  end
  return due
end

function Run:checkpoint_due()
  for _, hook in ipairs(self.spec.checkpoints) do
    if hook:due(self.update, self.last) then return true end
  end
  return self.update == self.last or self.save_requested == true
end

-- ---- signals ---------------------------------------------------------------------------------

-- The signal or time limit that asks this run to stop, or nil: with several ranks the one that they
-- agreed on.
function Run:signal()
  if self.world > 1 then return self.agreed_signal end
  return self:own_signal()
end

function Run:own_signal()
  if self.options.signals then
    local pending = core.signals.pending()
    if pending then return pending end
  end
  if self.deadline and core.clock() >= self.deadline then return "--max-time" end
end

-- Write the line of the present update and save when due. Only once per update.
function Run:finish_update()
  if self.line_written then return end
  self.line_written = true
  self:agree()
  record.write(self)
  if self:checkpoint_due() and #self.pending == 0 and not self.in_memory then
    self:save_checkpoint()
  end
end

-- One update and its hooks; false when a signal ended it before anything was applied.
function Run:advance()
  guard_entry(self)
  local before = self.progress_clock or core.clock()
  random.activate(self.random)
  self.busy, self.refused = true, false
  local ok, e = pcall(self.step, self)
  self.busy = false
  if not ok then
    -- All ranks refuse the same update, and can still save together.
    self.refused = errors.is_failure(e) and e.name == "ENONFINITE" and not self.comm:failure()
    if errors.is_failure(e) and e.name == "ECANCELED" and self:signal() then return false end
    error(e, 0)
  end
  self:run_hooks(self:due_hooks())
  local now = core.clock()
  self.progress_clock = now
  -- A report shows the interval's means, as its metrics line does.
  local logged = record.log_due(self)
  local loss, grad_norm = self.loss, self.grad_norm
  if logged then loss, grad_norm = self.tracker:means() end
  self.console:progress {
    update = self.update, loss = loss, seconds = self.step_seconds, wall = now - before,
    logged = logged, grad_norm = grad_norm,
    lr = (self:role_rates("backbone")) or (self:role_rates("head")),
    peak_gib = self.ctx:peak_bytes() / 2 ^ 30,
  }
  return true
end

-- ---- checkpoints -----------------------------------------------------------------------------

function Run:save_checkpoint(keep_all)
  local started = core.clock()
  local tensors, kept = keepers.collect(self)
  local host = core.json.encode(state.collect(self, kept))
  local path = checkpoints.path(self.out, self.update)
  if self.rank == 0 then
    errors.try(core.fs.make(self.out .. "/checkpoints"))
    local aside = checkpoints.make_room(self.ctx, path)
    if aside then
      self.console:note(("%s was no checkpoint: set aside as %s"):format(path, aside))
    end
  end
  errors.try(self.core:save(path, { tokenizer = self.tokenizer_path, host_state = host,
    tensors = tensors }))
  self.last_checkpoint, self.saved_update, self.save_requested = path, self.update, nil
  self.checkpoint_seconds = (self.checkpoint_seconds or 0) + core.clock() - started
  if not keep_all and self.rank == 0 then
    checkpoints.prune(self.out, self.spec.checkpoints, self.update)
  end
  return path
end

-- ---- the life of a run -----------------------------------------------------------------------

function Run:start()
  self.status = "running"
  self.started = core.clock()
  if self.options.max_time then self.deadline = self.started + self.options.max_time end
  if self.options.signals then core.signals.install() end
  if self.options.attach and self.rank == 0 then
    self.attached = require("perigee.attach.server").open(self)
  end
end

-- Seconds of all sessions.
function Run:elapsed()
  return self.elapsed_before + (self.started and core.clock() - self.started or 0)
end

-- Before the first step of a session: hooks of update 0, or those that a stop left over.
function Run:begin()
  if self.begun then return end
  self.begun = true
  random.activate(self.random)
  if #self.pending > 0 then
    self:run_hooks(self.pending)
    self.line_written = false
    self:finish_update()
  elseif self.update == 0 then
    local due = self:due_hooks()
    if #due > 0 then
      self:run_hooks(due)
      self.line_written = false
    end
    self:agree()
    if #due > 0 then record.write(self) end
    self.line_written = true
    for _, hook in ipairs(self.spec.checkpoints) do
      if hook:due(0, self.last) then
        self:save_checkpoint()
        break
      end
    end
  else
    self:agree() -- on what a script changed since the run was opened
  end
end

-- Why the loop must end now: status, reason; nil to go on.
function Run:ending()
  if self.left then error(self.left, 0) end
  local signal = self:signal()
  if #self.pending > 0 then return "stopped", signal or "hooks pending" end
  if self.update >= self.last then
    return "finished", self.last < self.total and "max_updates" or "updates"
  end
  if self.stop_reason then return "finished", self.stop_reason end
  if signal then return "stopped", signal end
end

-- Whether the present state is not in a checkpoint yet. Ranks may differ: clients of rank 0 can
-- have changed it.
function Run:unsaved()
  local unsaved = self.saved_update ~= self.update
  if self.world == 1 then return unsaved end
  return errors.try(self.comm:meet("the last checkpoint", { unsaved and 1 or 0 }))[1] > 0
end

function Run:conclude(status, reason)
  if not self.in_memory and self:unsaved() then self:save_checkpoint() end
  self.status, self.reason = status, reason
  record.summary(self, status == "stopped" and 75 or 0)
  errors.try(self.comm:leave())
end

-- Next update for run:updates(); nil at the end.
function Run:next_update()
  guard_entry(self)
  if self.status ~= "running" then return nil end
  self:begin()
  self:finish_update()
  self:serve_clients()
  local status, reason = self:ending()
  if status then
    self:conclude(status, reason)
    return nil
  end
  if not self:advance() then
    self:conclude("stopped", self:signal())
    return nil
  end
  return self.update
end

-- After an error: the summary says so, and what was trained is saved when it is whole. With several
-- ranks that takes all of them, who come here together only after a refusal: after any other
-- failure of one rank, the rest may be anywhere.
function Run:fail(e)
  local together = self.world == 1 or self.refused
  if self.comm and not self.closed and not together then self.comm:fail(errors.text(e)) end
  if self.status ~= "running" then return end
  self.status, self.reason = "failed", errors.text(e)
  self.busy = false
  if self.in_memory then return end
  -- What was trained is saved when it is whole: the core refuses an update that failed halfway
  -- (ESTATE) and weights that are not finite, and those the last checkpoint stands for.
  if together and self.update > 0 then
    local ok, problem = pcall(function()
      if self:unsaved() then self:save_checkpoint(true) end
    end)
    local whole = not (errors.is_failure(problem)
      and (problem.name == "ESTATE" or problem.name == "ENONFINITE"))
    if not ok and whole then
      self.reason = self.reason .. " | not saved: " .. errors.text(problem)
    end
  end
  if self.world > 1 and together then self.comm:leave() end
  pcall(record.summary, self, 1)
end

-- Free everything; the directory stays.
function Run:release()
  if self.closed then return end
  self.closed = true
  if self.attached then self.attached:close() end
  if self.lock then core.fs.unlock(self.lock) end
  if self.console then self.console:clear() end
  if self.random then random.release(self.random) end
  keepers.release(self)
  for _, panel in ipairs(self.panels or {}) do panel:close() end
  for _, name in ipairs { "tokenizer", "metrics", "core", "model", "comm", "ctx" } do
    if self[name] and not (name == "ctx" and self.borrowed) then self[name]:close() end
  end
  self.parameters, self.by_name, self.head, self.embedding = nil, nil, nil, nil
end

function Run:close()
  if self.closed then return end
  if self.busy then
    errors.misuse("the run is inside an update: a hook may end it with run:stop(reason)")
  end
  if self.status == "running" then
    -- A loop that was left early: the run can be resumed.
    local ok, e = pcall(function()
      self:finish_update()
      local status, reason = self:ending()
      self:conclude(status or "stopped", reason or "the loop was left")
    end)
    if not ok then
      self:fail(e)
      self:release()
      error(e, 0)
    end
  end
  self:release()
end

-- Selected parameters as names: a role, { role =, match =, except = }, a parameter, a predicate.
function Run:select(selector)
  if type(selector) == "string" and self.by_name[selector] then return { selector } end
  if type(selector) == "string" then selector = { role = selector } end
  if type(selector) == "userdata" then return { selector.name } end
  if type(selector) == "function" then selector = { match = selector } end
  check.table(nil, "selector", selector, "a role, { role =, match =, except = } or a parameter")
  if getmetatable(selector) ~= nil and selector.name then return { selector.name } end
  keys.check(selector, { "role", "match", "except" }, "selector")
  local select_one = routing.selector(selector, nil, "selector")
  local names = {}
  for _, parameter in ipairs(self.parameters) do
    if select_one(parameter) then names[#names + 1] = parameter.name end
  end
  if #names == 0 then errors.misuse("selector: no parameter matches") end
  return names
end

return runs
