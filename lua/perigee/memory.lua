-- What a run will need of its device's memory, before anything of it is allocated: the estimate,
-- the refusal, and both as text.
local core = require "perigee.core"
local diagnostics = require "perigee.diagnostics"
local errors = require "perigee.errors"
local keepers = require "perigee.keepers"

local memory = {}

-- Parts of an estimate, as core.estimate and the dry run call them.
memory.parts = { "weights", "copies", "gradients", "slots", "increments", "activations", "scratch",
  "hooks", "workspace" }

-- "12.5 GiB"; math.maxinteger stands for more than can be counted.
function memory.text(bytes)
  if bytes == math.maxinteger then return "more than can be counted" end
  for _, unit in ipairs { { "GiB", 2 ^ 30 }, { "MiB", 2 ^ 20 } } do
    if bytes >= unit[2] then return ("%.2f %s"):format(bytes / unit[2], unit[1]) end
  end
  return ("%.0f KiB"):format(bytes / 1024)
end

local function measures_diameter(run)
  for _, hook in ipairs(run.spec.hooks) do
    local name = diagnostics.is(hook.action) and hook.action.name
    if name == "head_diameter" or name == "head_geometry" then return true end
  end
  return false
end

-- Bytes by part and in total, of this rank. `changes` may have another micro, recompute, compute.
function memory.estimate(run, changes)
  changes = changes or {}
  local options = {}
  for key, value in pairs(run.core_options) do options[key] = value end
  options.micro = changes.micro or options.micro
  options.recompute = changes.recompute or options.recompute
  local entries = {}
  for _, entry in ipairs(run.spec.entries) do
    if #entry.parameters > 0 then
      local list = { entry.optimizer:core_optimizer(), hypers = {} }
      for name, value in pairs(entry.optimizer.hypers) do
        if type(value) ~= "function" then list.hypers[name] = value end
      end
      for i, parameter in ipairs(entry.parameters) do list[i + 1] = parameter.index end
      entries[#entries + 1] = list
    end
  end
  local need = errors.try(core.estimate(run.ctx, run.model_config, changes.compute or run.compute,
    options, entries, measures_diameter(run)))
  need.hooks = keepers.bytes(run)
  if need.total ~= math.maxinteger then need.total = need.total + need.hooks end
  return need
end

-- Whether `need` fits what could be had before the ranks of this machine began to allocate; those
-- on a CPU share it.
function memory.sharers(run) return run.ctx:device() == "cpu" and run.launch.local_size or 1 end
function memory.fits(run, need)
  return not run.available or need.total <= run.available // memory.sharers(run)
end

-- The largest smaller micro-batch that fits, else one sequence.
local function smaller_micro(run)
  local batch, micros = run.spec.batch, {}
  for micro = 1, batch.micro - 1 do
    if batch.sequences % (micro * run.world) == 0 then micros[#micros + 1] = micro end
  end
  if #micros == 0 then return nil end
  -- What is needed grows with the micro-batch.
  local fitting, over, need = 1, #micros + 1, nil
  while over - fitting > 1 do
    local middle = (fitting + over) // 2
    local needed = memory.estimate(run, { micro = micros[middle] })
    if memory.fits(run, needed) then
      fitting, need = middle, needed
    else
      over = middle
    end
  end
  return micros[fitting], need or memory.estimate(run, { micro = micros[fitting] })
end

-- What a user could change, each with what would then be needed, and the sum of it.
local function remedies(run, need)
  local list, all = {}, {}
  local function try(text, changes, changed)
    changed = changed or memory.estimate(run, changes)
    if changed.total >= need.total then return end
    list[#list + 1] = ("%s needs %s"):format(text, memory.text(changed.total))
    for key, value in pairs(changes) do all[key] = value end
  end
  local micro, changed = smaller_micro(run)
  if micro then try(("batch.micro = %d"):format(micro), { micro = micro }, changed) end
  if run.spec.recompute == "none" then try('recompute = "block"', { recompute = "block" }) end
  if run.compute == "fp32" then try('compute = "bf16"', { compute = "bf16" }) end
  if #list > 1 then
    list[#list + 1] = ("all together need %s"):format(memory.text(memory.estimate(run, all).total))
  end
  return list
end

-- One line, before anything is allocated, when the device cannot hold the run.
function memory.refuse(run)
  local need = run.need
  if memory.fits(run, need) then return end
  local sharers = memory.sharers(run)
  local list = remedies(run, need)
  errors.world(('ENOMEM: the run needs %s%s on device "%s", %s are free: %s'):format(
    memory.text(need.total), sharers > 1 and (" for each of the %d ranks of this machine")
    :format(sharers) or "", run.ctx:device(), memory.text(run.available),
    #list > 0 and table.concat(list, ", ") or "expected a smaller model"), "ENOMEM")
end

return memory
