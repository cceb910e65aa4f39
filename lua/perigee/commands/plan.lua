-- perigee train --dry-run: who would compute what, without training.
local core = require "perigee.core"
local config = require "perigee.config"
local errors = require "perigee.errors"
local session = require "perigee.session"

local mib = 2.0 ^ 20

-- Lines of cells, columns aligned.
local function aligned(rows)
  local widths, lines = {}, {}
  for _, row in ipairs(rows) do
    for i, cell in ipairs(row) do widths[i] = math.max(widths[i] or 0, #cell) end
  end
  for n, row in ipairs(rows) do
    local cells = {}
    for i, cell in ipairs(row) do cells[i] = cell .. (" "):rep(widths[i] - #cell) end
    lines[n] = (table.concat(cells, "  "):gsub("%s+$", ""))
  end
  return lines
end

local function describe_rank(run)
  local host = core.host()
  local here = run.core:slot_bytes()
  return core.json.encode { tostring(run.rank), host.hostname or "?",
    tostring(run.launch.local_rank), run.ctx:device(), tostring(run.ctx:threads()),
    ("%d"):format(host.pid), ("%.1f MiB"):format(here / mib) }
end

local function print_plan(run, ranks)
  local rows = { { "rank", "host", "local", "device", "threads", "process", "optimizer slots" } }
  for i, text in ipairs(ranks) do rows[i + 1] = errors.try(core.json.decode(text)) end
  local batch = run.spec.batch
  local sharded = run.world > 1 and run.spec.shard_optimizer
  print(config.header(run))
  for _, line in ipairs(aligned(rows)) do print(line) end
  print(("%d rank%s%s: %d sequences each per update, in %d micro-batch%s of %d; gradients summed "
    .. "in fp32%s"):format(run.world, run.world == 1 and "" or "s",
    run.launch.by ~= "" and (" (%s, %s)"):format(run.launch.by, run.comm:name()) or "",
    batch.sequences // run.world, batch.sequences // (batch.micro * run.world),
    batch.sequences // (batch.micro * run.world) == 1 and "" or "es", batch.micro,
    run.world == 1 and "" or sharded and "; optimizer work and slots split over the ranks"
    or "; every rank updates everything"))
  print(("allocated %.1f MiB on rank 0 before the first update; nothing was trained or written")
    :format(run.ctx:bytes() / mib))
end

return function(recipe, options)
  local _, run = session.plan(recipe, options)
  local ok, e = pcall(function()
    local ranks = errors.try(run.comm:gather(describe_rank(run)))
    if run.rank == 0 then print_plan(run, ranks) end
    errors.try(run.comm:leave())
  end)
  if not ok then run.comm:fail(errors.text(e)) end
  run:release()
  if not ok then error(e, 0) end
  return 0
end
