-- What the specs of the binding share: a context whose tensors must all be gone in the end, small
-- models and runs on the golden shards, temporary folders.
local core = require "perigee.core"

local support = { core = core }

support.golden = "tests/golden/trajectory"
support.build = os.getenv "PERIGEE_BUILD" or "./build"

-- A context for one spec file. `finish` collects garbage and checks that nothing is left.
function support.context()
  return assert(core.context { device = "cpu", threads = 1 })
end

function support.collect()
  for _ = 1, 3 do collectgarbage() end
end

function support.finish(ctx, baseline)
  support.collect()
  local left = ctx:live_tensors()
  ctx:close()
  if left ~= (baseline or 0) then error(("%d tensors are still alive"):format(left)) end
end

-- A temporary folder, removed by support.clean.
local folders = {}
function support.folder()
  local name = os.tmpname()
  os.remove(name)
  name = name:gsub("lua_", "perigee-")
  assert(core.fs.make_exclusive(name))
  folders[#folders + 1] = name
  return name
end

function support.clean()
  for _, name in ipairs(folders) do core.fs.remove(name) end
  folders = {}
end

-- The model of golden/trajectory (tests/golden/trajectory/expected.json), with its weights.
function support.golden_model(ctx)
  local model = assert(core.model(ctx, {
    layers = 2, width = 32, heads = 2, head_dim = 16, mlp = 128, vocab = 97, context = 16,
  }))
  assert(model:load(support.golden .. "/init.safetensors"))
  return model
end

-- A panel of the golden data.
function support.golden_panel(ctx, tokens, options)
  options = options or {}
  return core.panel(ctx, { data = support.golden, time = 16, vocab = 97, tokens = tokens,
    ranks = options.ranks, micro = options.micro })
end

function support.golden_run(model, options)
  local settings = { data = support.golden, sequences = 8, micro = 4, clip = 1.0, data_seed = 3 }
  for key, value in pairs(options or {}) do settings[key] = value end
  return assert(core.run(model, settings))
end

function support.by_role(model, role)
  local list = {}
  for _, p in ipairs(model:parameters()) do
    if p.role == role then list[#list + 1] = p end
  end
  return list
end

-- Assign AdamW, Muon and, for the head, `head` (an optimizer userdata, or a name) as in golden.
function support.assign_golden(run, model, head, hypers)
  local adamw = { lr = 4e-3, betas = { 0.9, 0.999 }, eps = 1e-10, weight_decay = 0.1 }
  local muon = { lr = 8e-3, momentum = 0.95, nesterov = true, steps = 5, eps = 1e-5,
    weight_decay = 0.1 }
  if head == "adamw" then hypers = adamw end
  if head == "rownorm" then hypers = { lr = 3.2e-3, beta = 0.95, eps = 1e-8 } end
  if type(head) == "string" then head = core.optimizer(head) end
  return {
    run:assign { optimizer = core.optimizer "adamw", hypers = adamw,
      parameters = support.by_role(model, "embedding") },
    run:assign { optimizer = core.optimizer "muon", hypers = muon,
      parameters = support.by_role(model, "backbone") },
    run:assign { optimizer = head, hypers = hypers, parameters = support.by_role(model, "head") },
  }
end

function support.same_bits(a, b)
  local shape = table.concat(a:shape(), "x")
  if shape ~= table.concat(b:shape(), "x") then return false end
  return a:eq(b):min() == 1
end

-- Run Lua text in a process of its own, under stock lua5.4 with this build; returns its output and
-- how it ended ("exit" or "signal", number). `environment`: "NAME=value ..." for that process.
function support.process(text, environment)
  local file = support.folder() .. "/script.lua"
  assert(core.fs.write(file, ("package.cpath = %q\npackage.path = %q\n%s"):format(
    support.build .. "/lib/?.so", "./lua/?.lua;./lua/?/init.lua;./tests/?.lua", text)))
  local pipe = assert(io.popen((environment or "") .. " lua5.4 " .. file .. " 2>&1"))
  local output = pipe:read "a"
  local _, how, code = pipe:close()
  return output, how, code
end

return support
