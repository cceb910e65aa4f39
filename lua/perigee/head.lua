-- pg.head{…}: a head from anywhere, with hidden states and the tokens that followed them, as an
-- exported model gives them (tools/export_head.py). All that is measured at a panel's positions is
-- measured at these instead, and any optimizer updates the head alone.
--
-- Under it lies a run of the core on given hidden states: a model without blocks, whose only
-- trained parameter is the head.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local geometry = require "perigee.geometry"
local keys = require "perigee.keys"
local optim = require "perigee.optim"
local panels = require "perigee.panels"
local report = require "perigee.repl.report"
local support = require "perigee.geometry.support"
local tensors = require "perigee.tensors"

local head = {}

local Head = { __name = "a head" }
local getters, methods = {}, {}
local number, result = support.number, support.result

local parts = { "U", "hidden", "targets" }
local option_keys = { "U", "hidden", "targets", "file", "scale", "compute", "device", "threads",
  "context" }

local function known_names()
  local names = {}
  for name in pairs(getters) do names[#names + 1] = name end
  for name in pairs(methods) do names[#names + 1] = name end
  table.sort(names)
  return names
end
Head.__names = known_names

function Head.__index(self, key)
  if methods[key] then return methods[key] end
  if getters[key] then
    if rawget(self, "_closed") then errors.misuse("this head is closed") end
    return getters[key](self)
  end
  if type(key) == "string" and key:sub(1, 1) == "_" then return nil end
  errors.misuse("a head has no '%s'%s", tostring(key), keys.suggestion(key, known_names()))
end

function Head.__tostring(self)
  if rawget(self, "_closed") then return "a head (closed)" end
  return ("head [%d, %d] with %d hidden states, %d updates"):format(self.rows, self.columns,
    self.positions, self.update)
end

function head.is(value) return getmetatable(value) == Head end

-- ---- reading -------------------------------------------------------------------------------

-- One part of a file: the whole of an .npy, or the tensor of that name.
local function from_file(ctx, path, part)
  if not tensors.is_file(path) then
    check.fail(nil, "pg.head " .. part, path, "a tensor, or the path of an .npy or a .safetensors "
      .. "file")
  end
  if path:find "%.npy$" then return tensors.load(path, ctx) end
  return tensors.load(path, part, ctx)
end

local function matrix_of(ctx, value, part)
  if type(value) == "string" then value = from_file(ctx, value, part) end
  if type(value) == "table" and not tensors.is(value) then value = errors.try(core.tensor(ctx,
    value)) end
  if not tensors.is(value) then
    check.fail(nil, "pg.head " .. part, value, "a tensor, nested tables or the path of a file")
  end
  local shape = value:shape()
  if #shape ~= 2 then
    errors.misuse("pg.head %s: %d dimensions; expected a matrix [%s, d]", part, #shape,
      part == "U" and "V" or "n")
  end
  return value
end

-- A list of ids.
local function targets_of(ctx, value)
  if type(value) == "string" then value = from_file(ctx, value, "targets") end
  if tensors.is(value) then value = value:to_table() end
  check.table(nil, "pg.head targets", value, "a list or a vector of token ids, or a file's path")
  local list = {}
  for i, id in ipairs(value) do
    if type(id) == "table" then id = id[1] end
    list[i] = math.tointeger(id) or check.fail(nil, ("pg.head targets[%d]"):format(i), id,
      "a whole number")
  end
  return list
end

-- Files of parts: a .safetensors with some of them by name, an .npy that is called as one is.
function head.of_files(files, options)
  local all = {}
  for name, value in pairs(options) do all[name] = value end
  for _, path in ipairs(files) do
    local stem = path:match "([^/]*)%.npy$"
    if stem then
      if stem ~= "U" and stem ~= "hidden" and stem ~= "targets" then
        errors.usage("--head %s: expected U.npy, hidden.npy, targets.npy or a .safetensors "
          .. "file", path)
      end
      all[stem] = path
    else
      all.file = path
    end
  end
  return head.new(all)
end

-- pg.head { U, hidden, targets } or pg.head { file = PATH } with all three in one file. Without a
-- part given, `file` has it.
function head.new(options)
  if type(options) == "string" then options = { file = options } end
  check.table(nil, "pg.head", options, "{ U = …, hidden = …, targets = … }")
  keys.check(options, option_keys, "pg.head")
  for _, part in ipairs(parts) do
    if options[part] == nil and options.file == nil then
      errors.misuse("pg.head: %s is missing: expected U [V, d], hidden [n, d], targets [n]", part)
    end
  end
  local scale = check.number(nil, "pg.head scale", options.scale or 1, { min = 0, open_min = true })
  local ctx, own
  if options.context == nil and (options.device or options.threads) then
    local device, index = check.device(nil, "pg.head device", options.device or "auto")
    ctx, own = errors.try(core.context { device = device, device_index = index,
      threads = options.threads }), true
  else
    ctx = tensors.context_of("pg.head", options.context)
  end
  local function part(name) return options[name] == nil and options.file or options[name] end
  local u, hidden = matrix_of(ctx, part "U", "U"), matrix_of(ctx, part "hidden", "hidden")
  local targets = targets_of(ctx, part "targets")
  local vocab, width, n = u:shape()[1], u:shape()[2], hidden:shape()[1]
  if hidden:shape()[2] ~= width then
    errors.misuse("pg.head: hidden states have %d columns, U has %d", hidden:shape()[2], width)
  elseif n < 1 or #targets ~= n then
    errors.misuse("pg.head: %d targets for %d hidden states", #targets, n)
  end
  errors.try(core.check_finite(u, "U"))
  errors.try(core.check_finite(hidden, "hidden states"))
  local model = errors.try(core.model(ctx, { layers = 0, width = width, heads = 1, head_dim = 2,
    mlp = 1, vocab = vocab, context = 1, logit_scale = scale, init_std = 0 },
    check.one_of(nil, "pg.head compute", options.compute or "fp32", { "fp32", "bf16" })))
  local list = model:parameters()
  list[2].value:copy_(u)
  errors.try(model:refresh())
  hidden = hidden:clone() -- contiguous, and nobody else's
  local run = errors.try(core.run(model, { hidden = hidden, targets = targets, clip = math.huge }))
  local frozen = optim.public.frozen()
  errors.try(run:assign { optimizer = frozen:core_optimizer(), parameters = { list[1] } })
  return setmetatable({ _context = ctx, _own = own, _model = model, _run = run, _hidden = hidden,
    _targets = targets, _parameter = list[2], _scale = scale, _step = 0 }, Head)
end

-- ---- fields --------------------------------------------------------------------------------

function getters.context(self) return self._context end
function getters.parameter(self) return self._parameter end
function getters.value(self) return self._parameter.value end
function getters.hidden(self) return self._hidden end
function getters.targets(self) return self._targets end
function getters.scale(self) return self._scale end
function getters.rows(self) return self._parameter.rows end
function getters.columns(self) return self._parameter.columns end
function getters.positions(self) return #self._targets end
function getters.update(self) return self._step end
function getters.increment(self) return self._step > 0 and self._parameter.increment or nil end
function getters.slots(self) return self._parameter.slots end
function getters.optimizer(self) return rawget(self, "_optimizer") end

-- The gradient of the mean loss at the present weights; valid until the next update.
function getters.gradient(self)
  if not rawget(self, "_fresh") then self:gradients() end
  return self._parameter.gradient
end

-- ---- updates -------------------------------------------------------------------------------

local function assign(self, optimizer)
  if not optim.is(optimizer) then
    check.fail(nil, "head optimizer", optimizer, "an optimizer, pg.optim.NAME{…}")
  end
  if rawget(self, "_optimizer") == optimizer then return end
  self._assigned = errors.try(self._run:assign { optimizer = optimizer:core_optimizer(),
    hypers = optimizer:values(self._step, self._step + 1),
    independent_decay = optimizer.decay_scale == "independent", cautious = optimizer.cautious,
    max_norm = optimizer.clip or nil, parameters = { self._parameter } })
  rawset(self, "_optimizer", optimizer)
  rawset(self, "_fresh", false)
end

-- { loss, norm } at the present weights, and their gradient; nothing is applied.
function methods:gradients()
  if not rawget(self, "_optimizer") then assign(self, optim.public.sgd { lr = 1 }) end
  local step = errors.try(self._run:gradients())
  rawset(self, "_fresh", true)
  return { loss = step.loss, norm = step.norm }
end

function methods:loss() return self:gradients().loss end

-- `count` updates (1) of the head alone by an optimizer, each from the gradient of the mean loss
-- over all positions: { loss (before the last one), norm }. Slots stay with the same optimizer.
function methods:step(optimizer, count)
  count = check.integer(nil, "head:step count", count or 1, 1)
  assign(self, optimizer)
  local step
  for _ = 1, count do
    self._run:set(self._assigned, { hypers = optimizer:values(self._step, self._step + 1) })
    step = errors.try(self._run:step())
    self._step = self._step + 1
  end
  rawset(self, "_fresh", false)
  return { loss = step.loss, norm = step.norm }
end

-- Increments of several optimizers from the present gradient, with slots of zeros; nothing is
-- applied. A list of { name, settings, increment, norm, gain, diameter, hilbert, rownorm_share }.
local function render_what_if(list)
  local rows = { { "optimizer", "gain", "diameter", "Hilbert RMS", "norm" } }
  for i, e in ipairs(list) do
    rows[i + 1] = { e.name, number(e.gain), number(e.diameter), number(e.hilbert), number(e.norm) }
  end
  return report.columns(rows, { true })
end

function methods:what_if(given)
  if optim.is(given) then given = { given } end
  check.table(nil, "head:what_if", given, "an optimizer, pg.optim.NAME{…}, or a list of them")
  local list, gradient = {}, self.gradient
  for i, optimizer in ipairs(given) do
    if not optim.is(optimizer) or optimizer:is_frozen() then
      check.fail(nil, ("head:what_if[%d]"):format(i), optimizer, "an optimizer, pg.optim.NAME{…}")
    end
    local trial = errors.try(self._run:trial(self._parameter, {
      optimizer = optimizer:core_optimizer(),
      hypers = optimizer:values(self._step, self._step + 1) }))
    errors.try(self._run:gradients()) -- a trial may ask for more than there was
    errors.try(trial:increment(1))
    local s = trial:value()
    trial:close()
    list[i] = { name = optimizer.name, settings = optimizer:describe(), increment = s,
      norm = s:norm(), gain = -(gradient * s):sum(),
      diameter = errors.try(core.diameter(s)).value,
      hilbert = geometry.raw.hilbert(s, self, { before = true }).rms }
  end
  return result(list, render_what_if)
end

-- ---- geometry ------------------------------------------------------------------------------

-- First order, at the present weights: the increment s [V, d] against the gradient.
function methods:first_order(s) return geometry.raw.first_order(self.gradient, s) end

function methods:hilbert(t, options)
  if t == nil then t = self.increment end
  if t == nil then errors.misuse("head:hilbert: no update was made: give a matrix [V, d]") end
  return geometry.raw.hilbert(t, self, options)
end

-- At its hidden states: statistics of logits, the rank of the log-probabilities.
function methods:logits() return geometry.raw.logits(self) end
function methods:log_rank() return geometry.raw.log_rank(self) end

function methods:bottleneck(options) return geometry.raw.bottleneck(self, options) end

-- pg.geometry's measurements of a matrix, of U; `head.increment` and `head.gradient` take them too.
for _, name in ipairs { "diameter", "neighbours", "row_norms", "participation", "common_mode",
  "separation", "radius", "spectrum" } do
  if geometry.raw[name] then
    methods[name] = function(self, ...) return geometry.raw[name](self._parameter.value, ...) end
  end
end
-- The exact optimum for the present gradient.
if geometry.raw.oracle then
  function methods:oracle(options) return geometry.raw.oracle(self.gradient, options) end
end

function methods:save(path)
  return self._parameter.value:save(check.string(nil, "head:save", path))
end

function methods:close()
  if rawget(self, "_closed") then return end
  rawset(self, "_closed", true)
  self._run:close()
  self._model:close()
  if self._own then
    self._hidden:close()
    self._context:close()
  end
end
Head.__close = function(self) methods.close(self) end

-- What a panel and its place are elsewhere: positions with hidden states of their own.
panels.add_place(function(value)
  if not head.is(value) or rawget(value, "_closed") then return nil end
  return { owner = value, ctx = value._context, model = value._model, states = value }
end)

return head
