-- What the specs of sweeps share: the smallest recipe there is, and sweeps in a process.
local pg = require "perigee"
local look = require "perigee.sweep.look"
local support = require "lua_support"
local core = support.core

local sweeps = {}

sweeps.text = [[
local pg = require "perigee"
local p = pg.params { head = pg.choice { "rownorm", "adamw" }, lr = 1e-2, seed = 0, updates = 4,
  fail = 0, data = "%s", wait = 0.0, trunk = "" }
local optimizer = { rownorm = pg.optim.rownorm { lr = p.lr }, adamw = pg.optim.adamw { lr = p.lr } }
return pg.recipe {
  name = "little", seed = p.seed, updates = p.updates, log = { every = 1 },
  model = { layers = 1, width = 8, heads = 1, context = 8 },
  data = pg.data.shards { path = p.data }, batch = { sequences = 2 },
  fork = p.trunk ~= "" and { p.trunk } or nil,
  optimizers = { { role = "embedding", pg.optim.adamw { lr = 1e-2 } },
    { role = "backbone", pg.optim.muon { lr = 1e-2 } }, { role = "head", optimizer[p.head] } },
  hooks = {
    pg.every(1, function(run)
      if p.wait > 0 then pg.core.sleep(p.wait) end
      if p.fail == run.update then error("the hook gives up") end
    end),
    pg.every(2, pg.diagnostics.validation { tokens = 8, hilbert_panel = 8 }),
    pg.checkpoint { every = 2 },
  },
  sweep = { grid = { head = { "adamw", "rownorm" } } },
}
]]

-- For setup(): data and the recipe on it. Remove them with support.clean.
function sweeps.prepare()
  sweeps.data = support.data()
  sweeps.recipe = support.write(support.folder() .. "/little.lua", sweeps.text:format(sweeps.data))
end

-- "NAME STATUS; …"
function sweeps.names(result)
  local list = {}
  for i, run in ipairs(result.runs) do list[i] = run.name .. " " .. run.status end
  return table.concat(list, "; ")
end

function sweeps.run(options)
  options.recipe, options.threads = options.recipe or sweeps.recipe, 1
  return assert(pg.sweep(options))
end

-- The perigee program: its exit code and what it printed.
function sweeps.program(...)
  local words = { support.program }
  for i, word in ipairs { ... } do words[i + 1] = support.quote(word) end
  local out = support.folder() .. "/out"
  local _, _, code = os.execute(table.concat(words, " ") .. " >" .. out .. " 2>&1 </dev/null")
  return code, support.read(out)
end

-- `perigee sweep RECIPE …` as a process, and where it writes.
function sweeps.spawn(...)
  local log = support.folder() .. "/log"
  return assert(core.spawn { args = { support.program, "sweep", sweeps.recipe, "--threads", "1",
    ... }, env = core.environment(), output = log }), log
end

-- Its exit code and signal, when it has ended.
function sweeps.ended(process)
  for _ = 1, 1200 do
    local code, signal = process:poll()
    if code then return code, signal end
    core.sleep(0.05)
  end
  error "the process does not end"
end

-- Until the run `name` has reported an update.
function sweeps.started(out, name)
  for _ = 1, 600 do
    if look.tail(out .. "/" .. name):read()["progress/update"] then return end
    core.sleep(0.05)
  end
  error(name .. " never began")
end

return sweeps
