-- perigee bench
local cli = require "perigee.cli"
local core = require "perigee.core"
local check = require "perigee.check"
local directory = require "perigee.directory"
local errors = require "perigee.errors"
local kernels = require "perigee.bench.kernels"
local open = require "perigee.open"
local peak = require "perigee.bench.peak"
local peer = require "perigee.bench.peer"
local updates = require "perigee.bench.updates"

local function size(name, min, help)
  return { name = name, value = "N", kind = "integer", min = min, help = help }
end

local command = {
  name = "bench",
  usage = "bench [--kernels] [--model NAME] [--layers N …] [--head NAME]… [--json]",
  description = "How fast this machine trains: whole updates on random tokens in a temporary "
    .. "folder, with AdamW on the embedding and Muon on the blocks; with --kernels also every "
    .. "kernel against its floor, the time for its bytes at the rate of a copy or for its "
    .. "arithmetic at the peak. Utilisation counts " .. updates.formula .. " FLOP for a token, "
    .. "forward and backward, over the peak, which is measured as well. Other work on the machine "
    .. "disturbs the figures.",
  positional = { 0, 0 },
  options = {
    { name = "kernels", help = "time every kernel at the sizes of the model and a micro-batch" },
    { name = "model", value = "NAME", help = "a preset (190m, 380m, 640m) instead of the default, "
      .. "8 layers of width 256, 4 heads, vocabulary 50257, context 256; the next options change "
      .. "single sizes" },
    size("layers", 0, "blocks"), size("width", 1, "d"), size("heads", 1, "attention heads"),
    size("head-dim", 1, "width of an attention head"),
    size("mlp", 1, "inner width of SwiGLU"), size("vocab", 2, "vocabulary, at most 65536"),
    size("context", 1, "tokens per sequence"),
    size("sequences", 1, "sequences per update (default 8)"),
    size("micro", 1, "sequences per micro-batch (default: all)"),
    size("updates", 0, "measured updates, of which the median counts (default 3); 0: none"),
    size("warmup", 0, "updates before them (default 1)"),
    { name = "head", value = "NAME", many = true, choices = { "rownorm", "adamw" },
      help = "the head's optimizer: rownorm (default) or adamw; several give a case each" },
    cli.device_option, cli.compute_option, cli.recompute_option,
    cli.threads_option,
    { name = "peer", value = "NAME", choices = { "torch" },
      help = "the same updates in PyTorch as well (python3 with torch): its best mode beside ours, "
        .. "in fp32 and, unless --compute says which, bf16" },
    size("rounds", 1, "with --peer: how often both are measured, in turns (default 1)"),
    { name = "json", help = "one JSON object instead of tables: lua/doc/program.md" },
  },
}

local function model_config(options)
  local model = { preset = options.model }
  local default = { layers = 8, width = 256, heads = 4, vocab = 50257, context = 256 }
  for _, name in ipairs { "layers", "width", "heads", "head_dim", "mlp", "vocab", "context" } do
    model[name] = options[name] or not options.model and default[name] or nil
  end
  if options.model and options.width and not options.mlp then model.mlp = 4 * options.width end
  local ok, config = pcall(core.model_config, model)
  if not ok then errors.usage("%s", errors.text(config)) end
  if config.vocab > 65536 then
    errors.usage("--vocab %d is not allowed: expected 2 to 65536, what shards hold", config.vocab)
  end
  return config
end

local function cases(ctx, options)
  local config = model_config(options)
  local sequences = options.sequences or 8
  local micro = options.micro or sequences
  if sequences % micro ~= 0 then
    errors.usage("--micro %d is not allowed: expected a divisor of --sequences %d", micro,
      sequences)
  end
  local list = {}
  for _, head in ipairs(options.head or { "rownorm" }) do
    local compute = open.compute(ctx, options.compute or "auto")
    list[#list + 1] = { config = config, compute = compute, head = head, sequences = sequences,
      micro = micro, recompute = options.recompute or "none", updates = options.updates or 3,
      warmup = options.warmup or 1,
      threads = ctx:device() == "cpu" and ctx:threads() or nil,
      label = ("%s, %s head"):format(options.model or ("d=%d L=%d V=%d T=%d"):format(
        config.width, config.layers, config.vocab, config.context), head) }
  end
  return list
end

local function machine(ctx)
  local host, device = core.host(), errors.try(ctx:describe())
  return directory.object {
    { "device", ctx:device() }, { "name", device.name }, { "cpu", host.cpu },
    { "cores", host.cores }, { "threads", ctx:threads() }, { "memory_bytes", host.memory_bytes },
    { "device_memory_bytes", device.memory_total },
    { "cache_bytes", device.cache_bytes }, { "os", host.os },
    { "perigee", core.version },
  }
end

local function print_machine(result)
  local m, p = result.machine, result.peak
  print(("%s, %d threads; copies at %.1f GB/s (%s)"):format(m.device == "cpu" and m.cpu or m.name,
    m.threads, 1e-9 * p.bytes_per_second, p.bytes_by))
  for _, type in ipairs { "fp32", "bf16" } do
    print(("%s peak %.1f GFLOP/s (%s)"):format(type, 1e-9 * peak.flops(p, type), p[type .. "_by"]))
  end
end

local function print_kernels(list)
  local function rate(value) return value and ("%.1f"):format(1e-9 * value) or "" end
  print(("%-22s %-40s %-4s %10s %9s %9s %10s %6s"):format("kernel", "shape", "type", "ms", "GB/s",
    "GFLOP/s", "floor ms", "ratio"))
  for _, k in ipairs(list) do
    print(("%-22s %-40s %-4s %10.4f %9s %9s %10.4f %6.1f"):format(k.name, k.shape, k.type,
      1e3 * k.seconds, rate(k.bytes_per_second), rate(k.flops_per_second), 1e3 * k.floor_seconds,
      k.ratio))
  end
end

-- Where the time went, longest first; "floor" is the least it could take, "of it" how much of the
-- time that is.
local function print_parts(parts)
  local names = {}
  for part, one in pairs(parts) do
    if one.seconds > 0 then names[#names + 1] = part end
  end
  table.sort(names, function(a, b) return parts[a].seconds > parts[b].seconds end)
  print(("  %-14s %10s %7s %9s %9s %10s %7s"):format("part", "ms", "share", "GB/s", "GFLOP/s",
    "floor ms", "of it"))
  for _, part in ipairs(names) do
    local one = parts[part]
    local line = ("  %-14s %10.3f %5.1f %%"):format(part, 1e3 * one.seconds, 100 * one.share)
    if one.floor_seconds and one.floor_seconds > 0 then
      line = line .. (" %9.1f %9.1f %10.3f %5.1f %%"):format(1e-9 * one.bytes / one.seconds,
        1e-9 * one.flops / one.seconds, 1e3 * one.floor_seconds,
        100 * one.floor_seconds / one.seconds)
    end
    print(line)
  end
end

local function print_case(case)
  print(case.name)
  print(("  %.0f tokens/s, %.4f s per update of %d tokens; %.1f %% of the peak; %.2f GiB"):format(
    case.tokens_per_second, case.seconds_per_update, case.sequences * case.model.context,
    100 * case.utilisation, case.peak_memory_bytes / 2 ^ 30))
  if case.peer then
    print(("  %.2f times the peer's %.0f tokens/s (%s, %s)"):format(case.ratio_to_peer,
      case.peer_tokens_per_second, case.peer.name, case.peer.compute))
  end
  print_parts(case.parts)
  print(("  exact head diameter %.4f s, every 10 updates %.2f %% of the time"):format(
    case.diameter_seconds, 100 * case.diameter_share))
  print(("    %.2f %% of the arithmetic of all pairs, which take %.4f s, %.1f times as long, at "
    .. "%.1f %% of the fp32 peak"):format(100 * case.diameter_work, case.all_pairs_seconds,
    case.all_pairs_seconds / case.diameter_seconds, 100 * case.all_pairs_utilisation))
  print(("    all pairs multiply %.2f %% of what rows (rows - 1) / 2 d need"):format(
    100 * case.all_pairs_work))
end

local function measure_kernels(context, case, peak_of_machine)
  local ctx <close> = context()
  return kernels.measure(ctx, case, peak_of_machine)
end

function command.run(options)
  local device, index = check.device(nil, "device", options.device or "auto")
  local function context() -- a new one for each part: it counts its own memory only
    return errors.try(core.context { device = device, device_index = index,
      threads = options.threads })
  end
  local result = { kernels = core.json.array {}, cases = core.json.array {} }
  local list
  do
    local ctx <close> = context()
    list = cases(ctx, options)
    result.machine, result.peak = machine(ctx), peak.measure(ctx)
  end
  if not options.json then print_machine(result) end
  if options.kernels then
    result.kernels = measure_kernels(context, list[1], result.peak)
    if not options.json then print_kernels(result.kernels) end
  end
  local function measure(case)
    local ctx <close> = context()
    return updates.measure(ctx, case, result.peak)
  end
  for _, case in ipairs(options.updates ~= 0 and list or {}) do
    local measured = {}
    if options.peer then
      local wanted = options.compute or "auto"
      measured = peer.compare(case, wanted == "auto" and { "fp32", "bf16" } or { wanted },
        options.rounds or 1, result.machine.device, measure)
    else
      measured[1] = measure(case)
    end
    for _, one in ipairs(measured) do
      table.insert(result.cases, one)
      if not options.json then print_case(one) end
    end
  end
  if options.json then
    print(core.json.encode(directory.object { { "machine", result.machine },
      { "peak", result.peak }, { "kernels", result.kernels }, { "cases", result.cases } }, 2))
  end
  return 0
end

return command
