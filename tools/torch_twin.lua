-- The Perigee half of tools/torch_twin.py: train a recipe to an update and keep all that it came
-- from and made.
--   perigee run tools/torch_twin.lua RECIPE OUT UPDATE [name=value …]
-- OUT is a run directory with the checkpoints before and after the update (all increments in the
-- second), gradients.safetensors (clipped) and twin.json, which says what each optimizer was told.
local core = require "perigee.core"
local directory = require "perigee.directory"
local params = require "perigee.params"
local pg = require "perigee"
local session = require "perigee.session"

local path, out, update = arg[1], arg[2], math.tointeger(tonumber(arg[3]))
if not (out and update and update >= 2) then
  io.stderr:write "usage: perigee run tools/torch_twin.lua RECIPE OUT UPDATE [name=value …], "
  io.stderr:write "UPDATE >= 2: the first update of a warmup moves nothing\n"
  os.exit(2)
end
local set = {}
for i = 4, #arg do
  local name, value = params.parse(arg[i])
  set[name] = value
end

local seen = {}
local function keep(run)
  local list = {}
  for _, parameter in ipairs(run.parameters) do
    if parameter.gradient then list[#list + 1] = { parameter.name, parameter.gradient } end
  end
  assert(core.save_tensors(run.context, run.out .. "/gradients.safetensors", list, {}))
  seen = { loss = run.loss, grad_norm = run.grad_norm, clip_factor = run.clip_factor }
end

-- Its own hooks measure, and change nothing that a twin would have to follow.
local recipe = assert(pg.load(path, set)):with { increments = "all", hooks = {
  pg.at({ update }, keep), pg.checkpoint { at = { update - 1, update }, keep = "all" } } }
local handle, run = session.new(recipe, { out = out, max_updates = update, device = "cpu",
  compute = "fp32", quiet = true })
for _ in handle:updates() do end -- luacheck: ignore 542

local parameters = {}
for _, entry in ipairs(run.spec.entries) do
  local hypers = {}
  local schedule = entry.schedule or run.spec.schedule
  for name, value in pairs(entry.optimizer:values(update - 1, run.total)) do
    hypers[#hypers + 1] = { name, type(value) == "table" and core.json.array(value) or value }
  end
  hypers = directory.object(hypers)
  if entry.optimizer.cautious or entry.optimizer.clip
    or (entry.weight_decay_scale or entry.optimizer.weight_decay_scale or "lr") ~= "lr" then
    error "torch_twin: cautious, clip and weight_decay_scale of an optimizer are not in the twin"
  end
  for _, parameter in ipairs(entry.parameters) do
    parameters[#parameters + 1] = directory.object { { "name", parameter.name },
      { "optimizer", entry.optimizer.name }, { "hypers", hypers },
      { "scale", schedule:scale(update - 1, run.total) }, { "updates", update } }
  end
end
local spec = run.spec
directory.write_json(out .. "/twin.json", directory.object {
  { "before", ("checkpoints/%08d"):format(update - 1) },
  { "after", ("checkpoints/%08d"):format(update) },
  { "data", spec.data.path }, { "train", spec.data.train }, { "data_seed", spec.seed.data },
  { "sequences", spec.batch.sequences }, { "context", run.model_config.context },
  { "update", update }, { "clip", spec.clip or core.json.null },
  { "loss", seen.loss }, { "grad_norm", seen.grad_norm }, { "clip_factor", seen.clip_factor },
  { "parameters", core.json.array(parameters) },
})
handle:close()
