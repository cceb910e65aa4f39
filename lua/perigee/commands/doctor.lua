-- perigee doctor
local core = require "perigee.core"
local errors = require "perigee.errors"
local open = require "perigee.open"

local command = {
  name = "doctor", usage = "doctor",
  description = "What this machine and this build can do: device, CPU features, libraries, "
    .. "threads, limits. Ends with the things that cost speed or may fail.",
  positional = { 0, 0 }, options = {},
}

local function limits()
  local file = io.open("/proc/self/limits")
  if not file then return {} end
  local found = {}
  for line in file:lines() do
    for name, key in pairs { ["Max open files"] = "open files", ["Max address space"] =
      "address space", ["Max file size"] = "file size", ["Max locked memory"] = "locked memory" } do
      local soft = line:match("^" .. name .. "%s+(%S+)")
      if soft then found[#found + 1] = ("%s %s"):format(key, soft) end
    end
  end
  file:close()
  table.sort(found)
  return found
end

local function line(name, value) print(("%-16s %s"):format(name, tostring(value))) end

-- Memory of the GPU in use, or why there is none.
local function cuda_line(ctx, device)
  if ctx:device() == "cuda" then
    return ("device %d of %d, %.1f of %.1f GiB free"):format(device.index, device.count,
      (device.memory_free or 0) / 2 ^ 30, (device.memory_total or 0) / 2 ^ 30)
  end
  local other, message = core.context { device = "cuda" }
  if other then other:close() end
  return other and "works when asked for" or message:match("not available: (.*)") or message
end

local purposes = { mpi = "ranks on CPUs", nccl = "ranks on GPUs" }
local remedies = { mpi = "install libopenmpi-dev and build again",
  nccl = "install NCCL beside CUDA and build again" }

-- Whether the build can connect several ranks.
local function ranks_line(kind)
  return core.build[kind] and purposes[kind]
    or ("no %s: %s"):format(purposes[kind], remedies[kind])
end

function command.run()
  local host = core.host()
  local ctx <close> = errors.try(core.context {})
  local advice = {}
  line("perigee", core.version)
  line("lua", _VERSION)
  line("system", host.os or "?")
  line("cpu", ("%s, %s cores"):format(host.cpu or "?", host.cores or "?"))
  line("cpu level", ("%s (built: %s)"):format(ctx:cpu_level(),
    table.concat(core.build.cpu_levels or {}, ", ")))
  line("memory", host.memory_bytes and ("%.1f GiB"):format(host.memory_bytes / 2 ^ 30) or "?")
  local device = errors.try(ctx:describe())
  line("device", ("%s: %s"):format(ctx:device(), device.name))
  line("cuda", cuda_line(ctx, device))
  local compute = open.compute(ctx, "auto")
  line("compute", ("%s (auto)"):format(compute))
  -- Of a common shape; a run's config.json says it of its own.
  local attention, message = ctx:attention { compute = compute, batch = 8, time = 1024, heads = 8,
    head_dim = 64 }
  if attention ~= "" then
    line("attention", attention or message:match("failed: (.*)") or message)
  end
  line("threads", ctx:threads())
  for _, kind in ipairs { "mpi", "nccl" } do line(kind, ranks_line(kind)) end
  line("openblas", host.openblas or "?")
  line("openblas mode", host.openblas_parallel or "?")
  local gnuplot = io.popen("gnuplot --version 2>/dev/null")
  local plots = gnuplot and gnuplot:read("l")
  if gnuplot then gnuplot:close() end
  line("plots", plots or "none: install gnuplot-nox")
  line("limits", table.concat(limits(), ", "))
  line("free here", ("%.1f GiB"):format((core.fs.free(".") or 0) / 2 ^ 30))
  for _, name in ipairs { "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT", "OMP_PROC_BIND" } do
    local value = os.getenv(name)
    if value then line(name, value) end
  end
  local mode = tostring(host.openblas_parallel or ""):lower()
  if mode ~= "openmp" and mode ~= "2" then
    advice[#advice + 1] = "OpenBLAS is not the OpenMP build: install libopenblas0-openmp"
  end
  if ctx:cpu_level() == "base" then
    advice[#advice + 1] = "no AVX2: expect a tenth of the usual speed"
  end
  local cores = tonumber(host.cores)
  if cores and ctx:threads() > cores then
    advice[#advice + 1] = ("%d threads on %d cores: threads will wait for each other"):format(
      ctx:threads(), cores)
  end
  if #advice == 0 then
    print("everything looks fine")
  else
    for _, text in ipairs(advice) do print("note: " .. text) end
  end
  return 0
end

return command
