-- What is opened at the prompt: a checkpoint, or the run behind it. Its fields are made when they
-- are first asked for; once the run is in memory (or live) they are the run's own.
local core = require "perigee.core"
local checkpoints = require "perigee.checkpoints"
local complete = require "perigee.repl.complete"
local data = require "perigee.data"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local open = require "perigee.open"
local report = require "perigee.repl.report"
local runs = require "perigee.run"
local session = require "perigee.session"
local tensors = require "perigee.tensors"
local tokens = require "perigee.repl.tokens"
local weights = require "perigee.weights"

local view = {}

local View = { __name = "an opened run" }
local getters, methods = {}, {}
view.methods = methods -- a:NAME(…), and NAME(…) at the prompt for the first one opened

local function known_names()
  local names = { "path", "checkpoint", "update" }
  for name in pairs(getters) do names[#names + 1] = name end
  for name in pairs(methods) do names[#names + 1] = name end
  table.sort(names)
  return names
end
View.__names = known_names

-- What a completion needs to know of a field: the field itself when that costs nothing, else
-- something with its names.
function view.peek(self, key)
  local function stand_in(methods_of, names)
    return setmetatable({}, { __index = methods_of, __names = function() return names end })
  end
  if methods[key] or self._run or self._model and key ~= "run" then return self[key] end
  if key == "run" then return stand_in(runs.methods, runs.names()) end
  if key == "model" then return stand_in(core.model_methods, {}) end
  if key == "head" or key == "embedding" then
    return stand_in(core.parameter_methods, complete.parameter_fields)
  end
  if key ~= "parameters" then return self[key] end
  local names = {}
  for i, p in ipairs(core.model_parameters(self._config)) do names[i] = p.name end
  return stand_in(nil, names)
end
View.__peek = view.peek

function View.__index(self, key)
  if methods[key] then return methods[key] end
  local getter = getters[key]
  if getter then return getter(self) end
  if type(key) == "string" and key:sub(1, 1) == "_" then return nil end -- not made yet
  errors.misuse("what is opened has no '%s'%s", tostring(key),
    keys.suggestion(key, known_names()))
end

function View.__tostring(self) return self:describe() end

function view.is(value) return getmetatable(value) == View end

-- ---- opening -------------------------------------------------------------------------------

local function recorded(path)
  local ok, host = pcall(checkpoints.host_state, path)
  return ok and host or {}
end

-- The run directory that holds a checkpoint, or nil.
local function run_of(path)
  local folder = path:match("^(.*)/checkpoints/%d+$")
  if folder and core.fs.kind(folder .. "/recipe.lua") == "file"
    and core.fs.kind(folder .. "/state.json") == "file" then
    return folder
  end
end

-- A run directory (its newest checkpoint) or a checkpoint. options: data, compute.
function view.open(ctx, path, options)
  local found = checkpoints.resolve(ctx, path)
  local config = errors.try(core.checkpoint_config(ctx, found))
  tensors.use(ctx)
  local host = recorded(found)
  return setmetatable({ _ctx = ctx, _host = host, _config = config, _options = options or {},
    _directory = run_of(found), path = path, checkpoint = found,
    update = host.update or math.tointeger(tonumber(found:match("(%d+)$"))) or 0 }, View)
end

-- A run that exists in this process.
function view.of_run(handle)
  local run = runs.inner(handle)
  return setmetatable({ _ctx = run.ctx, _host = {}, _config = run.model_config, _options = {},
    _directory = run.out, _live = true, _run = run, path = run.out }, View)
end

-- ---- fields --------------------------------------------------------------------------------

-- The run, in memory: resumed from the checkpoint with its data, writing nothing.
function getters.run(self)
  if not self._run then
    if not self._directory then
      errors.world(("ESTATE: %s is a checkpoint without its run directory: there is no recipe to "
        .. "train it with"):format(self.path), "ESTATE")
    end
    local _, run = session.in_memory(self._directory, self.checkpoint, {
      context = self._ctx, quiet = true, compute = self._options.compute,
      data_path = self._options.data })
    self._run, self._model, self._inc = run, nil, nil
    rawset(self, "update", nil)
  end
  return self._run.handle
end

function getters.update(self) return self._run.update end
function getters.checkpoint(self) return self._run.last_checkpoint end
function getters.config(self) return self._config end

function getters.model(self)
  if self._run then return self._run.model end
  if not self._model then
    local compute = open.compute(self._ctx, self._options.compute or "auto")
    local model = errors.try(core.model(self._ctx, self._config, compute))
    errors.try(model:load(self.checkpoint .. "/model.safetensors"))
    self._model = model
  end
  return self._model
end

local Parameters = { __name = "parameters" }
Parameters.__index = function(self, name)
  for i = 1, #self do
    if rawget(self, i).name == name then return rawget(self, i) end
  end
end
Parameters.__names = function(self)
  local names = {}
  for i = 1, #self do names[i] = self[i].name end
  return names
end
Parameters.__tostring = function(self)
  local rows = { { "name", "role", "shape", "optimizer" } }
  for i, p in ipairs(self) do
    rows[i + 1] = { p.name, p.role, ("%d x %d"):format(p.rows, p.columns), p.optimizer or "" }
  end
  return report.columns(rows, { true, true, false, true })
end

function getters.parameters(self)
  local list = {}
  for i, parameter in ipairs(self.model:parameters()) do list[i] = parameter end
  return setmetatable(list, Parameters)
end

local function by_role(self, role)
  local found -- the last: A of a head A B
  for _, parameter in ipairs(self.model:parameters()) do
    if parameter.role == role then found = parameter end
  end
  return found
end

function getters.head(self) return by_role(self, "head") end
function getters.embedding(self) return by_role(self, "embedding") end

-- The last increment of the head: the run's own when it has made one, else the saved one.
function getters.inc(self)
  if self._run then
    return self._run.update > 0 and self._run.handle:head_increment() or nil
  end
  if not self._inc and self.checkpoint then
    self._inc = weights.saved_head_step(self._ctx, self.model, self.checkpoint)
  end
  return self._inc
end

local function data_folder(self)
  if self._run then return self._run.spec.data.path end
  return self._options.data or (self._host.paths or {}).data
end

-- The shards that validation reads.
function view.source(self)
  if self._run then return self._run.spec.data end
  local path = data_folder(self)
  if not path or core.fs.kind(path) ~= "directory" then
    errors.world(("ENOENT: %s does not say where its data is%s: expected --data DIR"):format(
      self.path, path and (" (%s is not a folder)"):format(path) or ""), "ENOENT")
  end
  local source = data.shards { path = path, val = (self._host.splits or {}).val }
  source.where = nil
  return source
end

function view.tokens(self)
  if not self._tokens then
    local folders = { self.checkpoint or self.path, data_folder(self) }
    local tokenizer = tokens.load(self._ctx, table.unpack(folders))
    self._tokens = tokens.new(tokenizer, self._config.vocab)
  end
  return self._tokens
end

-- tok "…", tok(id), tok.row(r)
function getters.tok(self)
  if not self._tok then
    local all = view.tokens(self)
    self._tok = setmetatable({
      row = function(row) return all:by_row(row) end,
      text = function(list)
        return all:decode(all:ids("tok.text", list))
      end,
    }, { __name = "the tokens", __call = function(_, value) return all:token(value) end,
      __tostring = function()
        return ('%d tokens; tok "…" is one by its text, tok(id) by its id, tok.row(r) by its row')
          :format(all.vocab)
      end })
  end
  return self._tok
end

-- ---- description ---------------------------------------------------------------------------

function methods:describe()
  local c = self._config
  local place = self._live and "live" or self._run and "in memory" or self.checkpoint
  return ("%s at update %s (%s): %d blocks, width %d, vocabulary %d, context %d"):format(self.path,
    tostring(self.update), place, c.layers, c.width, c.vocab, c.context)
end

return view
