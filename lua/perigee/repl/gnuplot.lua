-- A drawing through gnuplot: as text for a terminal, or into a file whose name says the format.
local check = require "perigee.check"
local core = require "perigee.core"
local errors = require "perigee.errors"
local show = require "perigee.repl.print"

local gnuplot = {}

local formats = {
  svg = "svg size 900,560 dynamic background rgb 'white' noenhanced",
  pdf = "pdfcairo size 6in,3.7in noenhanced",
  png = "pngcairo size 1200,750 noenhanced",
}

-- Text inside single quotes.
local function quoted(text)
  text = show.quoted(text, 200):sub(2, -2):gsub('\\"', '"')
  return "'" .. text:gsub("'", "''") .. "'"
end

-- What stands between tabs in a block of data.
local function field(value)
  if type(value) == "number" then return ("%.9g"):format(value):gsub(",", ".") end
  return (show.quoted(value, 60):sub(2, -2):gsub('\\"', "'"):gsub("^ ", "␣"))
end

local function data_block(name, rows)
  local lines = { ("$%s << END_OF_DATA"):format(name) }
  for _, row in ipairs(rows) do
    local fields = {}
    for i, value in ipairs(row) do fields[i] = field(value) end
    lines[#lines + 1] = table.concat(fields, "\t")
  end
  lines[#lines + 1] = "END_OF_DATA"
  return table.concat(lines, "\n")
end

local function terminal(drawing)
  if not drawing.file then
    return ("set terminal dumb size %d,%d noenhanced"):format(drawing.width, drawing.height)
  end
  local format = drawing.file:match("%.(%w+)$")
  if not formats[format or ""] then
    check.fail(nil, "plot file", drawing.file, "a name that ends in .svg, .pdf or .png")
  end
  return "set terminal " .. formats[format]
end

-- Styles with more than two columns: texts at points, and the area between two curves.
local styles = {
  labels = { columns = "1:2:3", with = "labels offset 0,0.6" },
  band = { columns = "1:2:3", with = "filledcurves fillstyle transparent solid 0.2 noborder" },
}

-- The commands of a drawing: { file or width and height, title, xlabel, ylabel, log, key, counts,
-- series = { { title, style, color, rows = { { x, y [, label] } or { x, low, high }, … } }, … },
-- inset = { x from, to, y from, to }, whose axes are not logarithmic }.
function gnuplot.script(drawing)
  local lines = { "set encoding utf8", "set datafile separator '\\t'",
    "set colorsequence podo", terminal(drawing) }
  local plots = {}
  for i, series in ipairs(drawing.series) do
    lines[#lines + 1] = data_block("series" .. i, series.rows)
    local kind = styles[series.style]
    plots[i] = ("$series%d using %s with %s%s %s"):format(i, kind and kind.columns or "1:2",
      kind and kind.with or series.style,
      series.color and (" linecolor %d"):format(series.color) or "",
      series.title and "title " .. quoted(series.title) or "notitle")
  end
  if drawing.title then lines[#lines + 1] = "set title " .. quoted(drawing.title) end
  if drawing.xlabel then lines[#lines + 1] = "set xlabel " .. quoted(drawing.xlabel) end
  if drawing.ylabel then lines[#lines + 1] = "set ylabel " .. quoted(drawing.ylabel) end
  if drawing.log then lines[#lines + 1] = "set logscale " .. drawing.log end
  if drawing.boxes then
    lines[#lines + 1] = "set boxwidth 1 relative\nset style fill solid 0.6\nset yrange [0:*]"
  end
  -- 100M, 1G: counts with the letters of powers of 1000.
  if drawing.counts then lines[#lines + 1] = "set format x '%.0s%c'\nset xtics nomirror" end
  if drawing.inset or drawing.counts then lines[#lines + 1] = "set autoscale xfix" end
  if drawing.key then lines[#lines + 1] = "set key " .. drawing.key end
  if drawing.inset then lines[#lines + 1] = "set multiplot" end
  lines[#lines + 1] = "plot " .. table.concat(plots, ", ")
  local inset = drawing.inset
  if inset then
    lines[#lines + 1] = ("unset title\nunset xlabel\nunset ylabel\nunset key\nunset logscale\n"
      .. "set origin 0.55,0.46\nset size 0.43,0.49\nset tics font ',9'\nset format x '%%.1s%%c'\n"
      .. "set xrange [%.9g:%.9g]\nset yrange [%.9g:%.9g]\n"):format(table.unpack(inset))
      .. "plot " .. table.concat(plots, ", ") .. "\nunset multiplot"
  end
  return table.concat(lines, "\n") .. "\n"
end

-- Draw. Returns the text of the terminal, or the name of the file. gnuplot writes beside its
-- script: the file may have any name, and is there whole or not at all.
function gnuplot.draw(drawing)
  local script = os.tmpname()
  local image = script .. ".image"
  local _ <close> = setmetatable({}, { __close = function()
    os.remove(script)
    os.remove(image)
  end })
  errors.try(core.fs.write(script, gnuplot.script(drawing)))
  local pipe = assert(io.popen(("command -v gnuplot >/dev/null || { echo missing; exit 127; }; "
    .. "gnuplot %s 2>&1 %s"):format(script, drawing.file and ">" .. image or "")))
  local output = pipe:read("a")
  local ok, _, code = pipe:close()
  if code == 127 then
    errors.world("ENOENT: plots are drawn by gnuplot, which is not installed: Debian's package is "
      .. "gnuplot-nox", "ENOENT")
  elseif not ok then
    errors.world("EIO: gnuplot: " .. output:gsub("%s*\n%s*", " | "), "EIO")
  end
  if drawing.file then
    local text = errors.try(core.fs.read(image))
    if text == "" then
      errors.world(("EIO: gnuplot did not draw %s: %s"):format(drawing.file, output), "EIO")
    end
    errors.try(core.fs.write(drawing.file, text))
    return drawing.file
  end
  return (output:gsub("\f", ""):gsub("^%s*\n", ""):gsub("%s+\n", "\n"):gsub("%s+$", ""))
end

return gnuplot
