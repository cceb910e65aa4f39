-- A report as one page that loads nothing: tables, and figures as SVG inside it.
local core = require "perigee.core"
local errors = require "perigee.errors"
local gnuplot = require "perigee.repl.gnuplot"
local tables = require "perigee.report.tables"

local page = {}

local style = [[
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fdfdfb; --rule: #c9c9c4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e3; --paper: #17181a; --rule: #45474b; }
}
body { color: var(--ink); background: var(--paper); font: 1rem/1.5 Georgia, serif;
  max-width: 62rem; margin: 0 auto; padding: 1rem; }
.scroll { overflow-x: auto; margin: 1.5rem 0; }
table { border-collapse: collapse; border-top: 2px solid; border-bottom: 2px solid;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .4rem; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; white-space: nowrap; }
thead th { border-bottom: 1px solid var(--rule); }
tbody th { font-weight: normal; }
figure { margin: 2rem 0; }
figure svg { width: 100%; height: auto; background: white; border-radius: 4px; }
]]

-- gnuplot's SVG as it stands inside a page. Its ids are made unique: all figures have the same.
local function inline(figure, i)
  local name = os.tmpname()
  os.remove(name)
  name = name .. ".svg"
  local _ <close> = setmetatable({}, { __close = function() os.remove(name) end })
  local drawing = setmetatable({ file = name }, { __index = figure.drawing })
  gnuplot.draw(drawing)
  local text = errors.try(core.fs.read(name))
  text = text:match "<svg.*</svg>"
  text = text:gsub("id=(['\"])", ("id=%%1f%d-"):format(i)):gsub("url%(#", ("url(#f%d-"):format(i))
    :gsub("href=(['\"])#", ("href=%%1#f%d-"):format(i)):gsub("<title>.-</title>", "")
    :gsub("<script.-</script>", "")
  return (text:gsub("^<svg", ('<svg role="img" aria-label="%s"'):format(
    (tables.escape(figure.alt):gsub("%%", "%%%%"))), 1))
end

function page.html(report)
  local title = tables.escape("Report: " .. report.title)
  local parts = { '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    "<title>" .. title .. "</title>\n<style>\n" .. style .. "</style>\n</head>\n<body>\n<main>",
    "<h1>" .. title .. "</h1>" }
  for _, t in ipairs(report.tables) do parts[#parts + 1] = tables.html(t) end
  for i, figure in ipairs(report.figures) do
    parts[#parts + 1] = ("<figure>\n%s\n<figcaption>%s</figcaption>\n</figure>"):format(
      inline(figure, i), tables.escape(figure.alt))
  end
  parts[#parts + 1] = "</main>\n</body>\n</html>\n"
  return table.concat(parts, "\n")
end

return page
