-- What a run writes down: one merged line in metrics.jsonl per report, and summary.json.
local board = require "perigee.board"
local directory = require "perigee.directory"
local errors = require "perigee.errors"
local routing = require "perigee.routing"
local tracker = require "perigee.tracker"

local record = {}

function record.log_due(run)
  return run.update > 0 and (run.update % run.spec.log.every == 0 or run.update == run.last
    or run.stop_reason ~= nil)
end

local metric_roles = { "backbone", "embedding", "head" } -- the published order

local function progress_fields(run)
  local list = {
    { "progress/update", run.update },
    { "progress/tokens", run.tokens },
    { "progress/tpp", run.tokens / run.model_config.weights },
  }
  if run.update > 0 then
    list[#list + 1] = { "progress/epoch", run:epoch() }
    list[#list + 1] = { "optimizer/schedule_scale", run.scale or 0 }
    for _, role in ipairs(metric_roles) do
      local lr, peak = run:role_rates(role)
      if lr then
        local name = routing.metric_names[role]
        list[#list + 1] = { "optimizer/lr_" .. name, lr }
        list[#list + 1] = { "optimizer/peak_lr_" .. name, peak }
      end
    end
  end
  return list
end

-- Largest resident size of the process in bytes, or nil.
function record.peak_resident()
  local file = io.open("/proc/self/status")
  if not file then return nil end
  local text = file:read("a")
  file:close()
  local kib = text and text:match("VmHWM:%s*(%d+)")
  return kib and tonumber(kib) * 1024
end

local gib = 2.0 ^ 30

-- The line of the present update, if there is anything to say.
function record.write(run)
  local due = record.log_due(run)
  local entries = progress_fields(run)
  local said = #entries
  for _, entry in ipairs(run.entries) do entries[#entries + 1] = entry end
  local epoch = run.update > 0 and run:epoch() or 0
  if epoch ~= (run.reported_epoch or 0) then
    run.console:note(("update %d: epoch %d begins"):format(run.update, epoch))
    entries[#entries + 1] = { "events/epoch", epoch }
  end
  run.reported_epoch = epoch
  if due then
    for _, field in ipairs(run.tracker:fields() or {}) do entries[#entries + 1] = field end
    entries[#entries + 1] = { "performance/elapsed_seconds", run:elapsed() }
    local peak = run.peak_bytes or run.ctx:peak_bytes()
    entries[#entries + 1] = { "memory/peak_allocated_gib", peak / gib }
    local resident = run.peak_resident or record.peak_resident()
    if resident then entries[#entries + 1] = { "memory/peak_reserved_gib", resident / gib } end
    entries[#entries + 1] = { "data/batch_hash", run.batch_hash }
  end
  if run.update > 0 and run:checkpoint_due() and #run.pending == 0 then
    entries[#entries + 1] = { "events/checkpoint", 1 }
  end
  -- The save of this update comes after its line, so the line reports those before it.
  if #entries > said and run.checkpoint_seconds then
    entries[#entries + 1] = { "performance/checkpoint_seconds", run.checkpoint_seconds }
    run.checkpoint_seconds = nil
  end
  if #entries == said then return end
  local ordered = tracker.ordered(entries)
  if run.metrics then errors.try(run.metrics:write(ordered)) end
  if run.board then board.write(run, ordered, due) end
  -- What a later resume must be able to add to, when hooks are still pending.
  run.written = #run.pending > 0 and run.entries or nil
  local values = {}
  for _, entry in ipairs(ordered) do values[entry[1]] = entry[2] end
  if values["validation/loss"] then
    run.console:validation(run.update, values["validation/loss"],
      values["validation/hilbert_step/rms"])
  end
  for _, name in ipairs { "validation/loss", "validation/hilbert_step/rms",
    "validation/hilbert_step/tokens", "train/loss" } do
    if values[name] ~= nil then run.final[name] = values[name] end
  end
  if values["validation/loss"] then run.final["validation/update"] = run.update end
  if values["diagnostics/lm_head_step/diameter_exact"] then
    -- Together: a diameter of 0 has no pair.
    for _, name in ipairs { "diameter_exact", "diameter_tokens", "diameter_text" } do
      name = "diagnostics/lm_head_step/" .. name
      run.final[name] = values[name]
    end
  end
  run.entries = {}
  if due and #run.pending == 0 then run.tracker:reset() end
end

local function finite(x)
  if type(x) == "number" and (x ~= x or x == math.huge or x == -math.huge) then return nil end
  return x
end

-- summary.json: final values only when the run ended as planned.
function record.summary(run, exit_code)
  if run.rank ~= 0 or run.in_memory then return end
  local list = {
    { "exit_code", exit_code }, { "status", run.status }, { "reason", run.reason },
    { "update", run.update }, { "tokens", run.tokens }, { "updates", run.last },
  }
  local elapsed = run:elapsed()
  if exit_code == 0 then
    local final = run.final
    for _, entry in ipairs {
      { "final_update", run.update }, { "final_tokens", run.tokens },
      { "final_tpp", run.tokens / run.model_config.weights },
      { "elapsed_seconds", elapsed },
      { "end_to_end_tokens_per_second", finite(run.tokens / elapsed) },
      { "final_train_loss", finite(final["train/loss"]) },
      { "final_validation_loss", finite(final["validation/loss"]) },
      { "final_validation_hilbert_step_rms", finite(final["validation/hilbert_step/rms"]) },
      { "final_validation_hilbert_step_tokens", final["validation/hilbert_step/tokens"] },
      { "final_diameter_exact", finite(final["diagnostics/lm_head_step/diameter_exact"]) },
      { "final_diameter_tokens", final["diagnostics/lm_head_step/diameter_tokens"] },
      { "final_diameter_text", final["diagnostics/lm_head_step/diameter_text"] },
    } do
      list[#list + 1] = entry
    end
  end
  if run.last_checkpoint then
    list[#list + 1] = { "checkpoint", run.last_checkpoint:match("checkpoints/%d+$") }
  end
  directory.write_json(run.out .. "/summary.json", directory.object(list))
end

return record
