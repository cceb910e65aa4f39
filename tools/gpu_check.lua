-- The table of tools/gpu-check: perigee run tools/gpu_check.lua gpu-check.json
local core = require "perigee.core"

local result = core.json.decode(assert(core.fs.read(arg[1])))

-- A JSON null and a field that is not there are the same.
local function get(object, ...)
  for _, key in ipairs { ... } do
    object = type(object) == "table" and object[key] or nil
  end
  if object ~= core.json.null then return object end
end
local function number(format, x) return x and format:format(x) or "-" end
local function list(object, key) return get(object, key) or {} end

local machine = result.machine
print()
print(("%s%s%s, compute capability %s, %d MiB, driver %s, nvcc %s; commit %s"):format(machine.gpu,
  machine.gpus > 1 and (" (%d)"):format(machine.gpus) or "",
  machine.emulated and " (emulated: times mean nothing)" or "", machine.compute_capability,
  machine.memory_mib, machine.driver, machine.nvcc ~= "" and machine.nvcc or "-", result.commit))
if machine.attention ~= "" then print("attention: " .. machine.attention) end

-- ---- tests: one line per group of steps ------------------------------------------------------
local groups, order = {}, {}
for _, step in ipairs(result.steps) do
  local name = step.name:match("^(%w+):") or step.name:match("^(cuda)_") or
    step.name:match("^(unit)_") or step.name
  if not groups[name] then
    groups[name] = { passed = 0, failed = 0, skipped = 0, seconds = 0 }
    order[#order + 1] = name
  end
  local group = groups[name]
  group.passed, group.failed = group.passed + step.passed, group.failed + step.failed
  group.seconds = group.seconds + step.seconds
  if step.status == "skipped" then
    group.skipped = group.skipped + 1
    group.note = step.note
  end
end
print()
print(("%-18s %8s %8s %9s"):format("", "passed", "failed", "seconds"))
for _, name in ipairs(order) do
  local group = groups[name]
  print(("%-18s %8d %8d %9d%s"):format(name, group.passed, group.failed, group.seconds,
    group.note and ("  %d skipped: %s"):format(group.skipped, group.note) or ""))
end

-- ---- kernels against their floors ------------------------------------------------------------
local peak = get(result.kernels, "peak") or get(result.bench, "peak")
if peak then
  print()
  print(("measured peaks: %s GB/s, fp32 %s TFLOP/s, bf16 %s TFLOP/s"):format(
    number("%.0f", peak.bytes_per_second and peak.bytes_per_second / 1e9),
    number("%.1f", peak.fp32_flops_per_second and peak.fp32_flops_per_second / 1e12),
    number("%.1f", peak.bf16_flops_per_second and peak.bf16_flops_per_second / 1e12)))
end
if #list(result.kernels, "kernels") > 0 then
  print()
  print(("%-24s %-5s %-38s %12s %12s %7s"):format("kernel", "", "shape", "microseconds", "floor",
    "ratio"))
  for _, kernel in ipairs(result.kernels.kernels) do
    print(("%-24s %-5s %-38s %12s %12s %7s"):format(kernel.name, get(kernel, "type") or "",
      get(kernel, "shape") or "", number("%.1f", kernel.seconds and kernel.seconds * 1e6),
      number("%.1f", get(kernel, "floor_seconds") and kernel.floor_seconds * 1e6),
      number("%.2f", get(kernel, "ratio"))))
  end
end

-- ---- whole updates ---------------------------------------------------------------------------
local parts = { "head", "attention", "gemm", "elementwise", "optimizer", "data_wait", "between" }
local function print_update(name, case, utilisation)
  local shares = {}
  for i, part in ipairs(parts) do
    local share = get(case, "parts", part, "share")
    shares[i] = ("%10s"):format(number("%.1f %%", share and 100 * share))
  end
  print(("%-34s %10.0f %8s %8.2f %s"):format(name, case.tokens_per_second,
    number("%.1f %%", utilisation and 100 * utilisation), case.peak_memory_bytes / 2 ^ 30,
    table.concat(shares)))
end

local ours, theirs = list(result.bench, "cases"), {}
for _, run in ipairs(result.torch) do
  for _, case in ipairs(list(run, "cases")) do
    case.parts = nil
    case.utilisation = peak and peak.bf16_flops_per_second
      and case.tokens_per_second * run.flops_per_token / peak.bf16_flops_per_second
    theirs[#theirs + 1] = case
  end
end
if #ours + #theirs > 0 then
  print()
  local any = ours[1] or theirs[1]
  print(("whole updates of %d sequences in micro-batches of %d"):format(any.sequences, any.micro))
  print(("%-34s %10s %8s %8s %s"):format("", "tokens/s", "of peak", "GiB",
    ("%10s"):rep(#parts):format("head", "attention", "gemm", "elementw.", "optimizer", "data wait",
      "between")))
  for _, case in ipairs(ours) do
    print_update(("perigee, %s head, %s"):format(case.head, case.compute), case,
      get(case, "utilisation"))
  end
  for _, case in ipairs(list(result.plain, "cases")) do
    print_update("perigee without cuDNN", case, get(case, "utilisation"))
  end
  for _, case in ipairs(theirs) do
    local name = ("%s, %s head, %s"):format(case.name, case.head, case.compute)
    if ours[1] and case.micro ~= ours[1].micro then
      name = ("%s, micro-batch %d: more did not fit"):format(name, case.micro)
    end
    print_update(name, case, case.utilisation)
  end
  local best = theirs[1]
  for _, case in ipairs(theirs) do
    if case.tokens_per_second > best.tokens_per_second then best = case end
  end
  if best and ours[1] then
    print(("perigee / %s: %.2fx tokens/s, %.2fx memory"):format(best.name,
      ours[1].tokens_per_second / best.tokens_per_second,
      ours[1].peak_memory_bytes / best.peak_memory_bytes))
  end
  for _, case in ipairs(ours) do
    print(("exact diameter, %s head, d = %d: %.4f s; every 10 updates %.2f %% of the time"):format(
      case.head, case.model.width, case.diameter_seconds, 100 * case.diameter_share))
  end
end
for _, case in ipairs(list(result.diameter, "cases")) do
  print(("exact diameter, %s head, d = %d: %.4f s"):format(case.head, case.model.width,
    case.diameter_seconds))
end

print()
for _, step in ipairs(result.steps) do
  if step.status == "failed" then print(("FAILED %s: %s"):format(step.name, step.note)) end
end
