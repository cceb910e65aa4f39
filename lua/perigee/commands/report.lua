-- perigee report DIR…
local errors = require "perigee.errors"
local report = require "perigee.report"

local command = {
  name = "report",
  usage = "report DIR… [--html|--markdown|--latex|--csv] [--out DIR]",
  description = "Tables and figures of finished runs. DIR is a run, a sweep's folder, or a folder "
    .. "of runs. The tables are printed, as text or in the format that is given; with --out they "
    .. "are written there in all formats, with the figures as SVG, PDF and PNG, and their data as "
    .. "CSV.",
  positional = { 1, math.maxinteger },
  options = {
    { name = "html", help = "one self-contained page, with the figures" },
    { name = "markdown", help = "tables in Markdown" },
    { name = "latex", help = "tables in LaTeX, for booktabs" },
    { name = "csv", help = "tables as comma-separated values" },
    { name = "out", value = "DIR", help = "write everything into this folder" },
    { name = "bundle", value = "FILE",
      help = "with --out: pack the report and its runs, without checkpoints, into a .tar.gz" },
    { name = "target", value = "LOSS", kind = "number",
      help = "also when each run first validated at or below this loss" },
    { name = "baseline", value = "VALUE", help = "the value that the others are compared with" },
    { name = "mixed", help = "accept runs of several recipes, models or data sets" },
  },
}

function command.run(options, positional)
  local format
  for _, name in ipairs { "html", "markdown", "latex", "csv" } do
    if options[name] then
      if format then errors.usage("--%s and --%s: expected one format", format, name) end
      format = name
    end
  end
  if options.bundle and not options.out then errors.usage("--bundle: expected with --out") end
  local made = report.make { dirs = positional, mixed = options.mixed, target = options.target,
    baseline = options.baseline, out = options.out, bundle = options.bundle }
  if format or not options.out then
    io.stdout:write(made[format or "text"](made))
  else
    print("written to " .. made.out)
  end
  return 0
end

return command
