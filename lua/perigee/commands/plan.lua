-- perigee train --dry-run: who would compute what, in how much memory, without taking any.
local core = require "perigee.core"
local config = require "perigee.config"
local console = require "perigee.console"
local errors = require "perigee.errors"
local memory = require "perigee.memory"
local rate = require "perigee.rate"
local session = require "perigee.session"

local mib = 2.0 ^ 20

-- Two rows of cells: who it is, and its memory.
local function describe_rank(run)
  local host = core.host()
  local device = run.planned_for and run.planned_for.device .. " (not here)" or run.ctx:device()
  local place = { tostring(run.rank), host.hostname or "?", tostring(run.launch.local_rank), device,
    tostring(run.ctx:threads()), ("%d"):format(host.pid) }
  local need = { tostring(run.rank) }
  for _, part in ipairs(memory.parts) do
    need[#need + 1] = run.need[part] == math.maxinteger and "?"
      or ("%.1f"):format(run.need[part] / mib)
  end
  need[#need + 1] = run.need.total == math.maxinteger and "?"
    or ("%.1f"):format(run.need.total / mib)
  local known = run.available and not run.planned_for
  need[#need + 1] = known and ("%.1f"):format(run.available / mib) or "?"
  need[#need + 1] = not known and "?" or memory.fits(run, run.need) and "yes" or "no"
  return core.json.encode { place = place, need = need }
end

local function print_plan(run, ranks, speed)
  local places = { { "rank", "host", "local", "device", "threads", "process" } }
  local needs = { { "rank", table.unpack(memory.parts) } }
  for _, title in ipairs { "total", "free", "fits" } do table.insert(needs[1], title) end
  for i, text in ipairs(ranks) do
    local rank = errors.try(core.json.decode(text))
    places[i + 1], needs[i + 1] = rank.place, rank.need
  end
  local batch = run.spec.batch
  local sharded = run.world > 1 and run.spec.shard_optimizer
  print(config.header(run))
  for _, line in ipairs(console.columns(places)) do print(line) end
  print(("%d rank%s%s: %d sequences each per update, in %d micro-batch%s of %d; gradients summed "
    .. "in fp32%s"):format(run.world, run.world == 1 and "" or "s",
    run.launch.by ~= "" and (" (%s, %s)"):format(run.launch.by, run.comm:name()) or "",
    batch.sequences // run.world, batch.sequences // (batch.micro * run.world),
    batch.sequences // (batch.micro * run.world) == 1 and "" or "es", batch.micro,
    run.world == 1 and "" or sharded and "; optimizer work and slots split over the ranks"
    or "; every rank updates everything"))
  print(rate.line(speed, run.compute, run.model_config, run.tokens_per_update * run.last))
  print "\nmemory at the peak, MiB:"
  for _, line in ipairs(console.columns(needs)) do print(line) end
  if run.planned_for then
    print(("planned without the device: its own workspace is not counted (%s)"):format(
      run.planned_for.message))
  end
  print(("a chunk of logits takes %s of the activations; nothing was allocated, trained or written")
    :format(memory.text(run.need.logits)))
end

-- text: that of --rate, or nil.
return function(recipe, options, text)
  local _, run = session.plan(recipe, options)
  local ok, e = pcall(function()
    local ranks = errors.try(run.comm:gather(describe_rank(run)))
    if run.rank == 0 then
      local device = run.planned_for and run.planned_for.device or run.ctx:device()
      print_plan(run, ranks, rate.from(text, device, run.ctx:threads(), run.world))
    end
    errors.try(run.comm:leave())
  end)
  if not ok then run.comm:fail(errors.text(e)) end
  run:release()
  if not ok then error(e, 0) end
  return 0
end
