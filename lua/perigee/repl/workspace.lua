-- What a prompt works in: the names it knows, what is opened, and how a line is run. The same for a
-- terminal of its own and for a client of a live run.
local core = require "perigee.core"
local check = require "perigee.check"
local complete = require "perigee.repl.complete"
local errors = require "perigee.errors"
local evaluate = require "perigee.repl.evaluate"
local help = require "perigee.repl.help"
local measure = require "perigee.repl.measure"
local plot = require "perigee.repl.plot"
local show = require "perigee.repl.print"
local view = require "perigee.repl.view"
require "perigee.repl.compare"
require "perigee.repl.train"

local workspace = {}

local Workspace = {}
Workspace.__index = Workspace

-- Fields of the first opened one that are names of the prompt.
local shared = { run = true, model = true, head = true, inc = true, parameters = true, tok = true,
  embedding = true }

local current -- the workspace that runs a line: methods of tensors ask it for tokens
measure.set_views(function() return current and current.views or {} end)

-- print, and io.write, into `out`.
local function output(self, env)
  function env.print(...)
    local texts = table.pack(...)
    for i = 1, texts.n do texts[i] = tostring(texts[i]) end
    self.out(table.concat(texts, "\t") .. "\n")
  end
  env.io = setmetatable({
    write = function(...)
      for i = 1, select("#", ...) do self.out(tostring((select(i, ...)))) end
      return io.stdout
    end,
  }, { __index = io })
end

-- For a client of a live run: it must not end the training, and waits for no input of its process.
local function in_live_run(env)
  local function no_input()
    errors.misuse("a live run has no input of its clients: give values in the command itself")
  end
  env.os = setmetatable({
    exit = function() errors.misuse("os.exit would end the training: Ctrl-D leaves") end,
  }, { __index = os })
  env.io.read, env.io.input = no_input, no_input
  env.io.stdin = setmetatable({}, { __name = "no input", __index = no_input })
  function env.io.lines(path, ...)
    if path == nil then no_input() end
    return io.lines(path, ...)
  end
end

local function first_view(self, what)
  if not self.views[1] then
    errors.misuse('%s: nothing is opened: open("DIR") takes a run directory or a checkpoint', what)
  end
  return self.views[1]
end

local function names_of(self)
  local names = {}
  for name in pairs(shared) do if self.views[1] then names[#names + 1] = name end end
  for name in pairs(view.methods) do if name ~= "describe" then names[#names + 1] = name end end
  return names
end

local function make_env(self)
  local env = {}
  output(self, env)
  if self.live then in_live_run(env) end
  env.pg = require "perigee"
  env.runs = self.views
  env.plot = function(what) return plot.plot(self.views, what, self.columns) end
  env.help = function(...) return help.show(self, ...) end
  env.open = function(path)
    local opened = view.open(self.ctx, check.string(nil, "open path", path), self.options)
    self:add(opened)
    return opened
  end
  for name, f in pairs(self.functions or {}) do env[name] = f end
  return setmetatable(env, {
    __name = "the prompt",
    __index = function(_, name)
      if shared[name] then return self.views[1] and self.views[1][name] end
      local method = view.methods[name]
      if method and name ~= "describe" then
        return function(...)
          -- Also as a method of an opened one: a:hilbert{} is hilbert{} of a.
          if view.is((...)) then return method(...) end
          return method(first_view(self, name), ...)
        end
      end
      return _G[name]
    end,
    __names = function() return names_of(self) end,
    __peek = function(t, name)
      if shared[name] then return self.views[1] and view.peek(self.views[1], name) end
      return t[name]
    end,
  })
end

-- options: ctx, out = function(text), data, compute; functions: more names of the prompt;
-- live = true for a client of a live run.
function workspace.new(options)
  local self = setmetatable({ ctx = options.ctx, out = options.out, views = {},
    options = { data = options.data, compute = options.compute },
    functions = options.functions, live = options.live or false }, Workspace)
  self.env = make_env(self)
  return self
end

-- One more opened: runs[i], also a, b, c, …
function Workspace:add(opened)
  local views = self.views
  views[#views + 1] = opened
  local letter = #views <= 26 and string.char(96 + #views)
  if letter and rawget(self.env, letter) == nil then self.env[letter] = opened end
  return opened
end

-- "incomplete" | an outcome of evaluate.call, or nil when there is nothing to run.
function Workspace:run(text, limits)
  local chunk, problem = evaluate.compile(text, self.env)
  if not chunk and problem == "incomplete" then return "incomplete" end
  if not chunk then return { ok = false, error = problem } end
  local before = current
  current = self
  local outcome = evaluate.call(chunk, limits)
  current = before
  return outcome
end

-- The text of an outcome for a person; "" when there is none.
function workspace.text(outcome)
  if outcome.ok then
    return outcome.values.n > 0 and show.values(outcome.values) .. "\n" or ""
  end
  return outcome.error .. "\n" .. (outcome.trace and outcome.trace .. "\n" or "")
end

-- As text: showing a value may run its __tostring, which must not hang or draw the prompt down.
function Workspace:shown(outcome, limits)
  local before = current
  current = self
  local ok, text = core.guard(limits or {}, workspace.text, outcome)
  current = before
  return ok and text or ("the result cannot be shown: " .. errors.text(text) .. "\n")
end

-- Looking at values may run code of theirs, for as long as the limits allow.
function Workspace:complete(line, limits)
  local before = current
  current = self
  local ok, insert, list = core.guard(limits or {}, complete.line, self, line)
  current = before
  if not ok then return nil, nil end
  return insert, list
end

function Workspace:token_texts()
  return self.views[1] and view.tokens(self.views[1]):texts() or {}
end

return workspace
