-- perigee eval CHECKPOINT…
local cli = require "perigee.cli"
local check = require "perigee.check"
local checkpoints = require "perigee.checkpoints"
local core = require "perigee.core"
local data = require "perigee.data"
local directory = require "perigee.directory"
local errors = require "perigee.errors"
local open = require "perigee.open"
local weights = require "perigee.weights"

local command = {
  name = "eval",
  usage = "eval CHECKPOINT… [--data DIR] [--split val|test] [--tokens N] [--panel N] [--json]",
  description = "Validation loss of checkpoints (or of the latest one of run directories), the "
    .. "row diameter of the head's last increment, and its Hilbert RMS on one panel.",
  positional = { 1, math.huge },
  options = {
    { name = "data", value = "DIR", help = "data folder (default: that of the first run)" },
    { name = "split", value = "NAME", help = "val or test, as the first run's recipe names the "
      .. "shards (default val)" },
    { name = "val", value = "GLOB", help = "these shards instead" },
    { name = "tokens", value = "N", kind = "integer", min = 1,
      help = "validation tokens (default 65536, or what the split holds)" },
    { name = "micro", value = "N", kind = "integer", min = 1,
      help = "sequences per batch (default: the first run's micro-batch)" },
    { name = "panel", value = "N", kind = "integer", min = 1,
      help = "positions of the Hilbert panel (default 2048, or what the split holds)" },
    { name = "ranks", value = "N", kind = "integer", min = 1,
      help = "panel as if split over N ranks (default 1)" },
    cli.device_option, cli.compute_option,
    cli.threads_option,
    { name = "json", help = "one JSON object a line instead of a table" },
  },
}

-- What the run of a checkpoint recorded; an empty table for a checkpoint from elsewhere.
local function recorded(path)
  local ok, host = pcall(checkpoints.host_state, path)
  return ok and type(host) == "table" and host or {}
end

-- The data folder of a checkpoint.
local function data_of(path, host)
  local stated = host.paths and host.paths.data
  if not stated or core.fs.kind(stated) ~= "directory" then
    errors.world(("ENOENT: %s does not say where its data is: expected --data DIR"):format(path),
      "ENOENT")
  end
  return stated
end

local function evaluate(ctx, path, shared)
  local model_config = errors.try(core.checkpoint_config(ctx, path))
  local model <close> = errors.try(core.model(ctx, model_config,
    shared.compute))
  errors.try(model:load(path .. "/model.safetensors"))
  local validation = errors.try(core.model_validate(model, { data = shared.data,
    val = shared.val, micro = shared.micro, tokens = shared.tokens }))
  local row = { checkpoint = path, update = math.tointeger(tonumber(path:match("(%d+)/*$"))),
    loss = validation.loss, tokens = validation.tokens }
  local increment <close> = weights.saved_head_step(ctx, model, path)
  if increment then
    row.diameter = errors.try(core.diameter(increment)).value
    row.hilbert = errors.try(core.hilbert(model, shared.panel, increment))
  end
  return row
end

local function print_json(row, shared)
  print(core.json.encode(directory.object {
    { "checkpoint", row.checkpoint }, { "update", row.update },
    { "validation/loss", row.loss }, { "validation/perplexity", math.exp(row.loss) },
    { "validation/tokens", row.tokens },
    { "diagnostics/lm_head_step/diameter_exact", row.diameter },
    { "validation/hilbert_step/rms", row.hilbert },
    { "validation/hilbert_step/tokens", row.hilbert and shared.panel:tokens() },
    { "validation/hilbert_step/panel", row.hilbert and shared.panel:hash() },
  }))
end

-- What all checkpoints share: the data, the panel, and sizes that the split can serve.
local function prepare(ctx, paths, options)
  local first = errors.try(core.checkpoint_config(ctx, paths[1]))
  local host = recorded(paths[1])
  local split = options.split or "val"
  if split ~= "val" and split ~= "test" then
    errors.usage("--split %s is not allowed: expected val or test", check.show(split))
  end
  local pattern = options.val or (host.splits or {})[split]
  if split == "test" and not pattern then
    errors.world(("ENOENT: --split test: the recipe of %s names no test shards (data.test): "
      .. "expected --val GLOB"):format(paths[1]), "ENOENT")
  end
  local source = data.shards { path = options.data or data_of(paths[1], host), val = pattern }
  source.where = nil
  source:require_folder()
  local micro = options.micro or host.micro or 8
  local groups = source:validation_groups(ctx, first.context, micro)
  local held = groups * micro * first.context
  local tokens = options.tokens or math.min(65536, held)
  local wanted = options.panel
    or math.min(2048, (source:validation_groups(ctx, first.context, 1)) * first.context)
  if tokens < 1 or math.max(1, tokens // (micro * first.context)) > groups then
    errors.world(("EDATA: validation tokens = %d: the split %s in %s holds %d in batches of %d x "
      .. "%d"):format(options.tokens or 1, source.val, source.path, held, micro, first.context),
      "EDATA")
  end
  return {
    data = source.path, val = source.val, tokens = tokens, context = first.context, micro = micro,
    compute = open.compute(ctx, options.compute or "auto"),
    panel = errors.try(core.panel(ctx, { data = source.path, val = source.val,
      time = first.context, vocab = first.vocab, tokens = wanted, ranks = options.ranks or 1,
      micro = micro })),
  }
end

function command.run(options, positional)
  local device, index = check.device(nil, "--device", options.device or "auto")
  local ctx <close> = errors.try(core.context { device = device, device_index = index,
    threads = options.threads })
  local paths = {}
  for i, path in ipairs(positional) do paths[i] = checkpoints.resolve(ctx, path) end
  local shared = prepare(ctx, paths, options)
  local panel <close> = shared.panel
  local width = 10
  for _, path in ipairs(paths) do width = math.max(width, #path) end
  if not options.json then
    print(("data %s, %d validation tokens, panel of %d positions, hash %s"):format(shared.data,
      shared.tokens, panel:tokens(), panel:hash()))
    print(("%-" .. width .. "s  %8s  %10s  %12s  %12s"):format("checkpoint", "update", "val loss",
      "diameter", "Hilbert RMS"))
  end
  for _, path in ipairs(paths) do
    local row = evaluate(ctx, path, shared)
    if options.json then
      print_json(row, shared)
    else
      print(("%-" .. width .. "s  %8s  %10.5f  %12s  %12s"):format(path, check.show(row.update),
        row.loss, row.diameter and ("%.5e"):format(row.diameter) or "-",
        row.hilbert and ("%.5e"):format(row.hilbert) or "-"))
    end
    io.stdout:flush()
  end
  return 0
end

return command
