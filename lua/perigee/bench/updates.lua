-- Whole updates on synthetic data: time, memory, and where the time goes.
local core = require "perigee.core"
local data = require "perigee.bench.data"
local directory = require "perigee.directory"
local errors = require "perigee.errors"
local optim = require "perigee.optim"
local peaks = require "perigee.bench.peak"

local updates = {}

-- FLOP of one token, forward and backward. The second term is attention's, causal: half of T.
function updates.flops_per_token(config)
  local embedding = config.vocab * config.width
  return 6 * (config.weights - embedding)
    + 12 * config.layers * config.heads * config.head_dim * config.context / 2
end
updates.formula = "6 (parameters - embedding) + 12 layers heads head_dim context / 2"

function updates.median(values)
  local sorted = table.move(values, 1, #values, 1, {})
  table.sort(sorted)
  local middle = #sorted // 2
  if #sorted % 2 == 1 then return sorted[middle + 1] end
  return (sorted[middle] + sorted[middle + 1]) / 2
end

local function optimizers(head)
  return {
    embedding = optim.public.adamw { lr = 1e-3 },
    backbone = optim.public.muon { lr = 1e-3 },
    head = head == "adamw" and optim.public.adamw { lr = 1e-3 }
      or optim.public[head] { lr = 1e-3 },
  }
end

-- A run of the core: model, data, and who updates what.
local function new_run(ctx, folder, case)
  local model = errors.try(core.model(ctx, case.config, case.compute))
  model:init(0)
  local run = errors.try(core.run(model, { data = folder, sequences = case.sequences,
    micro = case.micro, recompute = case.recompute }))
  local roles = { embedding = {}, backbone = {}, head = {} }
  local head
  for _, parameter in ipairs(model:parameters()) do
    table.insert(roles[parameter.role], parameter)
    if parameter.role == "head" then head = parameter end
  end
  for role, optimizer in pairs(optimizers(case.head)) do
    if #roles[role] > 0 then
      errors.try(run:assign { optimizer = optimizer:core_optimizer(),
        hypers = optimizer:values(0, 1), parameters = roles[role] })
    end
  end
  return model, run, head
end

local function seconds_of(f, ...)
  local start = core.clock()
  local result = errors.try(f(...))
  return core.clock() - start, result
end

-- What each part took, did, and could have taken: the sum over its operations of the larger of
-- bytes at the rate of a copy and FLOP at the peak of `compute`; the optimizers compute in fp32.
local function parts(profile, compute, peak)
  local found, measured = {}, 0
  for part, seconds in pairs(profile.parts) do
    found[part] = directory.object { { "share", seconds / profile.seconds },
      { "seconds", seconds }, { "flops", 0.0 }, { "bytes", 0.0 }, { "floor_seconds", 0.0 } }
    measured = measured + seconds
  end
  for _, row in ipairs(profile.operations) do
    local part = found[row.part]
    part.flops, part.bytes = part.flops + row.flops, part.bytes + row.bytes
    part.floor_seconds = part.floor_seconds + math.max(row.bytes / peak.bytes_per_second,
      row.flops / peaks.flops(peak, row.part == "optimizer" and "fp32" or compute))
  end
  local rest = profile.seconds - measured
  found.between = directory.object { { "share", rest / profile.seconds }, { "seconds", rest } }
  return found
end

-- One more update, recorded; it is a little slower than the others.
local function profiled(ctx, run, compute, peak)
  errors.try(ctx:profile_start())
  local ok, message, name = run:step()
  local profile, unread = ctx:profile_stop()
  errors.try(ok, message, name) -- what failed first is told first
  errors.try(profile, unread)
  profile.parts = parts(profile, compute, peak)
  profile.newton_schulz = 0.0
  for _, row in ipairs(profile.operations) do
    if row.caller == "muon" and row.operation == "gemm" then
      profile.newton_schulz = profile.newton_schulz + row.seconds
    end
  end
  return profile
end

-- A measurement ends between two updates, so that its folder is removed.
local function check_signal()
  local signal = core.signals.pending()
  if signal then errors.world("ECANCELED: the measurement was ended by " .. signal, "ECANCELED") end
end

-- What all pairs of rows cost: the diameter of unit rows, where nothing can be left out.
local function all_pairs(ctx, like)
  local rows, columns = like:shape()[1], like:shape()[2]
  local cloud <close> = core.zeros(ctx, rows, columns)
  core.fill_random(cloud, true, 0, 0, 0, 0, 1)
  cloud:div_rows_(cloud:row_norms())
  return errors.try(core.diameter(cloud))
end

-- What was multiplied, over rows (rows - 1) / 2 pairs: looking for what could be left out included.
local function all_pairs_work(whole, like)
  local rows, columns = like:shape()[1], like:shape()[2]
  return whole.multiply_adds / (rows * (rows - 1) / 2 * columns)
end

-- case: { label, config, compute, recompute, head, sequences, micro, updates, warmup }. Returns
-- what --json prints for it. `peak` is what bench.peak measured.
function updates.measure(ctx, case, peak)
  core.signals.install()
  local folder = data.make(case.config, case.sequences, math.min(8, case.warmup + case.updates))
  local model, run
  local ok, result = pcall(function()
    local head
    model, run, head = new_run(ctx, folder, case)
    for _ = 1, case.warmup do
      check_signal()
      errors.try(run:step())
    end
    local times, wait = {}, 0
    for i = 1, case.updates do
      check_signal()
      local step
      times[i], step = seconds_of(run.step, run)
      wait = wait + step.wait_seconds
    end
    check_signal()
    local memory = ctx:peak_bytes()
    local profile = profiled(ctx, run, case.compute, peak)
    local diameters = {}
    for i = 1, 3 do diameters[i] = seconds_of(core.diameter, head.increment) end
    local seconds, diameter = updates.median(times), updates.median(diameters)
    local work = core.diameter(head.increment).multiply_adds
    local whole = all_pairs(ctx, head.increment)
    local tokens = case.sequences * case.config.context
    local flops = updates.flops_per_token(case.config)
    return directory.object {
      { "name", ("%s, %s"):format(case.label, case.compute) }, { "compute", case.compute },
      { "head", case.head },
      { "model", case.config }, { "sequences", case.sequences }, { "micro", case.micro },
      { "recompute", case.recompute },
      { "updates", case.updates }, { "warmup", case.warmup },
      { "tokens_per_second", tokens / seconds }, { "seconds_per_update", seconds },
      { "flops_per_token", flops },
      { "flops_per_second", flops * tokens / seconds },
      { "utilisation", flops * tokens / seconds / peaks.flops(peak, case.compute) },
      { "peak_memory_bytes", memory },
      { "parts", profile.parts }, { "profile_seconds", profile.seconds },
      { "newton_schulz_seconds", profile.newton_schulz },
      { "operations", profile.operations },
      { "data_wait_seconds", wait / case.updates },
      { "diameter_seconds", diameter },
      { "diameter_share", diameter / (diameter + 10 * seconds) },
      { "diameter_work", work / whole.multiply_adds },
      { "all_pairs_work", all_pairs_work(whole, head.increment) },
      { "all_pairs_seconds", whole.seconds },
      { "all_pairs_utilisation", 2 * whole.multiply_adds / whole.seconds
        / peaks.flops(peak, "fp32") },
    }
  end)
  if run then run:close() end
  if model then model:close() end
  core.fs.remove(folder)
  core.signals.uninstall()
  if not ok then error(result, 0) end
  return result
end

return updates
