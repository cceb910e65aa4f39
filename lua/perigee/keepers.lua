-- Actions of hooks that keep tensors of their own: an average of weights, slots of an optimizer.
-- They look on: nothing of the run depends on them. Their tensors are part of a checkpoint
-- (host.safetensors), so that a resume continues them exactly. A fork continues what belongs to
-- parameters of the roles whose slots it keeps, and starts the rest anew.
--
-- A keeper has a name, prepare(run) (before update 1, or after a checkpoint was loaded), saved(run)
-- -> plain state, list of { name, tensor }; restore(run, state, load, kept) with
-- load(name) -> tensor and kept(parameter) -> whether what belongs to it goes on; tensors(run) ->
-- { parameter's name = tensor }; bytes(parameters) -> device memory at most, from descriptions of
-- all parameters; forget(run).
local core = require "perigee.core"
local errors = require "perigee.errors"

local keepers = {}

local file = "/host.safetensors"

-- Those of a run in hook order, once each.
function keepers.of(run)
  local list, seen, named = {}, {}, {}
  for _, hook in ipairs(run.spec and run.spec.hooks or {}) do
    local action = hook.action
    if type(action) == "table" and action.is_keeper and not seen[action] then
      seen[action] = true
      if named[action.name] then
        errors.at(action.where, "hooks: two of them keep tensors as %q: expected a name = … for "
          .. "one", action.name)
      end
      named[action.name] = true
      list[#list + 1] = action
    end
  end
  return list
end

-- Device memory that they take at most; their copies for a checkpoint come in turn.
function keepers.bytes(run)
  local bytes, most = 0, 0
  for _, keeper in ipairs(keepers.of(run)) do
    local held, passing = keeper:bytes(run.parameters)
    bytes, most = bytes + held, most + passing
  end
  return bytes + most
end

-- For a checkpoint: the tensors, and what goes into state.json.
function keepers.collect(run)
  local tensors, states = {}, {}
  for _, keeper in ipairs(keepers.of(run)) do
    local state, list = keeper:saved(run.handle)
    states[keeper.name] = state
    for _, item in ipairs(list) do
      tensors[#tensors + 1] = { keeper.name .. "." .. item[1], item[2] }
    end
  end
  return tensors, states
end

-- Note where a keeper that is prepared later finds its state. `roles` (role -> boolean) limits a
-- fork to those whose slots it keeps.
function keepers.resume(run, path, states, roles)
  run.kept_from = { path = path, states = states or {}, roles = roles }
end

-- Called by keepers: continue from the checkpoint that was loaded; false when it holds nothing.
function keepers.continue(run, keeper)
  local from = run.kept_from
  local state = from and from.states[keeper.name]
  if not state then return false end
  keeper:restore(run.handle, state, function(name)
    return errors.try(core.load_tensor(run.ctx, from.path .. file, keeper.name .. "." .. name))
  end, function(parameter) return not from.roles or from.roles[parameter.role] end)
  return true
end

function keepers.release(run)
  for _, keeper in ipairs(keepers.of(run)) do keeper:forget(run.handle) end
end

return keepers
