-- The tables of a report as cells, and cells as text, Markdown, LaTeX, CSV or HTML.
local collect = require "perigee.report.collect"
local columns = require("perigee.repl.report").columns
local console = require "perigee.console"
local statistics = require "perigee.statistics"

local tables = {}

-- Finite values of a measure over finished runs.
local function values_of(runs, key)
  local list = {}
  for _, run in ipairs(runs) do
    if run.final[key] then list[#list + 1] = run.final[key] end
  end
  return list
end

-- "3.1588 ± 0.0027": one sample deviation; without it when there is one run.
local function spread(list, format)
  local mean = statistics.mean(list)
  if not mean then return "–" end
  local deviation = statistics.deviation(list)
  return format:format(mean) .. (deviation and " ± " .. format:format(deviation) or "")
end

-- Final values by group: mean ± sample standard deviation over the seeds.
function tables.final(groups)
  local head = { "runs", "n" }
  for _, measure in ipairs(collect.measures) do head[#head + 1] = measure.title end
  head[#head + 1] = "time"
  local rows = {}
  for i, group in ipairs(groups) do
    local row = { group.key, #group.finished == #group.runs and tostring(#group.finished)
      or ("%d of %d"):format(#group.finished, #group.runs) }
    for _, measure in ipairs(collect.measures) do
      row[#row + 1] = spread(values_of(group.finished, measure.key), measure.format)
    end
    local seconds = {}
    for _, run in ipairs(group.finished) do seconds[#seconds + 1] = run.seconds end
    row[#row + 1] = #seconds > 0 and console.duration(statistics.mean(seconds)) or "–"
    rows[i] = row
  end
  return { title = "Final values, mean ± one sample standard deviation over seeds", head = head,
    rows = rows }
end

-- Pairs of groups that differ in the parameter `name` alone: { a, b, rest }.
local function pairs_of(groups, names, name)
  local by_rest, order = {}, {}
  for _, group in ipairs(groups) do
    local parts = {}
    for _, other in ipairs(names) do
      if other ~= name then
        parts[#parts + 1] = ("%s=%s"):format(other, tostring(group.point[other]))
      end
    end
    local rest = table.concat(parts, " ")
    if not by_rest[rest] then
      by_rest[rest] = {}
      order[#order + 1] = rest
    end
    table.insert(by_rest[rest], group)
  end
  return by_rest, order
end

-- Values of two groups on the seeds that both have.
local function matched(a, b, key)
  local by_seed, x, y = {}, {}, {}
  for _, run in ipairs(a.finished) do by_seed[tostring(run.params.seed)] = run end
  for _, run in ipairs(b.finished) do
    local other = by_seed[tostring(run.params.seed)]
    if other and other.final[key] and run.final[key] then
      x[#x + 1], y[#y + 1] = other.final[key], run.final[key]
    end
  end
  return x, y
end

-- Differences from the baseline by seed, for every varying parameter of words; for numbers, curves
-- say more. With several methods the p-values are Holm's.
function tables.paired(groups, names, baseline)
  local rows = {}
  for _, name in ipairs(names) do
    local by_rest, order = pairs_of(groups, names, name)
    for _, rest in ipairs(order) do
      local set = by_rest[rest]
      local words = type(set[1].point[name]) == "string"
      if #set > 1 and words then
        local base = set[1]
        for _, group in ipairs(set) do
          if baseline and tostring(group.point[name]) == baseline then base = group end
        end
        for _, measure in ipairs(collect.measures) do
          local found, p = {}, {}
          for _, group in ipairs(set) do
            if group ~= base then
              local x, y = matched(base, group, measure.key)
              if #x > 0 then
                local result = statistics.paired(x, y)
                found[#found + 1] = { group = group, result = result }
                if result.p then p[#p + 1] = result.p end
              end
            end
          end
          local adjusted, k = statistics.holm(p), 0
          for _, entry in ipairs(found) do
            local r = entry.result
            if r.p then k = k + 1 end
            rows[#rows + 1] = {
              ("%s − %s%s"):format(tostring(entry.group.point[name]), tostring(base.point[name]),
                rest ~= "" and ", " .. rest or ""),
              measure.title, tostring(r.n),
              measure.format:format(r.mean)
                .. (r.deviation and " ± " .. measure.format:format(r.deviation) or ""),
              r.low and ("%s … %s"):format(measure.format:format(r.low),
                measure.format:format(r.high)) or "–",
              r.p and ("%.3g"):format(adjusted[k]) or "–",
              r.ratio and ("%.4g"):format(r.ratio) or "–" }
          end
        end
      end
    end
  end
  if #rows == 0 then return nil end
  return { title = "Paired differences by seed: mean ± one sample standard deviation, 95 % "
    .. "interval of paired t, p by Holm over the methods of a group, geometric mean of the ratios",
    head = { "difference", "measure", "n", "mean", "95 % interval", "p (Holm)", "ratio" },
    rows = rows }
end

-- When each group reached `target`: the first validation at or below it, in updates and seconds.
function tables.target(groups, target)
  local rows = {}
  for i, group in ipairs(groups) do
    local updates, seconds, missed = {}, {}, 0
    for _, run in ipairs(group.finished) do
      local hit
      for _, line in ipairs(run.lines) do
        local loss = line["validation/loss"]
        if type(loss) == "number" and loss <= target then
          hit = line
          break
        end
      end
      if hit then
        updates[#updates + 1] = hit["progress/update"]
        seconds[#seconds + 1] = hit["performance/elapsed_seconds"]
      else
        missed = missed + 1
      end
    end
    rows[i] = { group.key, ("%d of %d"):format(#updates, #updates + missed),
      spread(updates, "%.0f"), spread(seconds, "%.1f") }
  end
  return { title = ("First validation loss at or below %g"):format(target),
    head = { "runs", "reached", "updates", "seconds" }, rows = rows }
end

-- Where the best rate lies: for each group of runs alike but for `lr`, and whether it is at an edge
-- of the grid, where the best may lie beyond.
function tables.rates(groups, names, lr)
  local by_rest, order = pairs_of(groups, names, lr)
  local rows = {}
  for _, rest in ipairs(order) do
    local best, least, most
    for _, group in ipairs(by_rest[rest]) do
      local loss = statistics.mean(values_of(group.finished, "loss"))
      local rate = group.point[lr]
      least, most = math.min(least or rate, rate), math.max(most or rate, rate)
      if loss and (not best or loss < best.loss) then best = { loss = loss, rate = rate } end
    end
    if best then
      rows[#rows + 1] = { rest == "" and "all" or rest, ("%.4g"):format(best.rate),
        ("%.4f"):format(best.loss), (best.rate == least or best.rate == most)
        and "at the edge of the grid: the best may lie beyond" or "inside the grid" }
    end
  end
  return { title = "Best " .. lr, head = { "runs", lr, "validation loss", "where" }, rows = rows }
end

-- Runs that are not in the averages, and why.
function tables.left_out(runs)
  local rows = {}
  for _, run in ipairs(runs) do
    if run.status ~= "finished" then
      rows[#rows + 1] = { run.name, run.status, run.reason or "" }
    end
  end
  if #rows == 0 then return nil end
  return { title = "Not in the averages", head = { "run", "state", "reason" }, rows = rows }
end

-- Table 3 of the paper, beside the runs of its recipe.
local published = {
  ["190m adamw"] = { "3.1588 ± 0.0027", "2.870e-02 ± 1.40e-03", "9.076e-02 ± 6.05e-03" },
  ["190m rownorm"] = { "3.1741 ± 0.0031", "6.369e-04 ± 9.00e-07", "7.506e-03 ± 1.70e-05" },
  ["380m adamw"] = { "2.9403 ± 0.0019", "2.303e-02 ± 3.24e-03", "7.732e-02 ± 8.74e-03" },
  ["380m rownorm"] = { "2.9494 ± 0.0024", "4.241e-04 ± 1.50e-06", "5.667e-03 ± 2.40e-05" },
  ["640m adamw"] = { "2.8156 ± 0.0024", "1.895e-02 ± 3.68e-03", "7.555e-02 ± 3.82e-03" },
  ["640m rownorm"] = { "2.8213 ± 0.0033", "3.186e-04 ± 2.90e-07", "4.955e-03 ± 2.50e-05" },
}
local paper_updates = { ["190m"] = 7083, ["380m"] = 14464, ["640m"] = 24406 }

function tables.paper(runs)
  local by_key, rows = {}, {}
  for _, run in ipairs(runs) do
    local p = run.params
    local model = run.config and tostring(run.config.name):match "^paper%-(%w+)$"
    if model and run.status == "finished" and run.update == paper_updates[model]
      and p.backbone == "muon" and published[model .. " " .. tostring(p.head)] then
      local key = model .. " " .. p.head
      by_key[key] = by_key[key] or {}
      table.insert(by_key[key], run)
    end
  end
  for _, key in ipairs { "190m adamw", "190m rownorm", "380m adamw", "380m rownorm", "640m adamw",
    "640m rownorm" } do
    if by_key[key] then
      local row = { key, tostring(#by_key[key]) }
      for i, measure in ipairs(collect.measures) do
        row[#row + 1] = spread(values_of(by_key[key], measure.key), measure.format)
        row[#row + 1] = published[key][i]
      end
      rows[#rows + 1] = row
    end
  end
  if #rows == 0 then return nil end
  local head = { "model, head", "n" }
  for _, measure in ipairs(collect.measures) do
    head[#head + 1] = measure.title
    head[#head + 1] = "published"
  end
  return { title = "Table 3 of the paper", head = head, rows = rows }
end

-- ---- formats ------------------------------------------------------------------------------------
function tables.text(t)
  local rows, left = { t.head, table.unpack(t.rows) }, {}
  for i in ipairs(t.head) do left[i] = true end
  return t.title .. "\n" .. columns(rows, left) .. "\n"
end

function tables.markdown(t)
  local function line(cells)
    local out = {}
    for i, cell in ipairs(cells) do out[i] = cell:gsub("|", "\\|"):gsub("\n", " ") end
    return "| " .. table.concat(out, " | ") .. " |"
  end
  local lines = { "**" .. t.title .. "**", "", line(t.head), "|" .. ("---|"):rep(#t.head) }
  for _, row in ipairs(t.rows) do lines[#lines + 1] = line(row) end
  return table.concat(lines, "\n") .. "\n"
end

function tables.csv(t)
  local function line(cells)
    local out = {}
    for i, cell in ipairs(cells) do
      out[i] = cell:find '[",\n]' and '"' .. cell:gsub('"', '""') .. '"' or cell
    end
    return table.concat(out, ",")
  end
  local lines = { line(t.head) }
  for _, row in ipairs(t.rows) do lines[#lines + 1] = line(row) end
  return table.concat(lines, "\n") .. "\n"
end

function tables.latex(t)
  local function cell(text)
    text = text:gsub("\\", "\1"):gsub("[&%%$#_{}~^]", { ["&"] = "\\&", ["%"] = "\\%", ["$"] = "\\$",
      ["#"] = "\\#", ["_"] = "\\_", ["{"] = "\\{", ["}"] = "\\}", ["~"] = "\\textasciitilde{}",
      ["^"] = "\\textasciicircum{}" }):gsub("\1", "\\textbackslash{}")
    text = text:gsub("(%-?%d%.?%d*)e([+-]%d+)", function(m, e)
      return ("$%s\\times10^{%d}$"):format(m, tonumber(e))
    end)
    return (text:gsub("±", "$\\pm$"):gsub("−", "$-$"):gsub("…", "\\ldots{}"):gsub("–", "--"))
  end
  local function line(cells)
    local out = {}
    for i, text in ipairs(cells) do out[i] = cell(text) end
    return table.concat(out, " & ") .. " \\\\"
  end
  local lines = { "% needs booktabs", "\\begin{table}", "  \\caption{" .. cell(t.title) .. "}",
    "  \\begin{tabular}{" .. ("l"):rep(#t.head) .. "}", "    \\toprule", "    " .. line(t.head),
    "    \\midrule" }
  for _, row in ipairs(t.rows) do lines[#lines + 1] = "    " .. line(row) end
  lines[#lines + 1] = "    \\bottomrule\n  \\end{tabular}\n\\end{table}"
  return table.concat(lines, "\n") .. "\n"
end

function tables.escape(text)
  return (text:gsub("[&<>\"']", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;",
    ['"'] = "&quot;", ["'"] = "&#39;" }))
end

function tables.html(t)
  local lines = { '<div class="scroll" tabindex="0"><table>', "<caption>" .. tables.escape(t.title)
    .. "</caption>", "<thead><tr>" }
  for _, cell in ipairs(t.head) do
    lines[#lines + 1] = ('<th scope="col">%s</th>'):format(tables.escape(cell))
  end
  lines[#lines + 1] = "</tr></thead><tbody>"
  for _, row in ipairs(t.rows) do
    local cells = {}
    for i, cell in ipairs(row) do
      cells[i] = i == 1 and ('<th scope="row">%s</th>'):format(tables.escape(cell))
        or ("<td>%s</td>"):format(tables.escape(cell))
    end
    lines[#lines + 1] = "<tr>" .. table.concat(cells) .. "</tr>"
  end
  lines[#lines + 1] = "</tbody></table></div>"
  return table.concat(lines, "\n") .. "\n"
end

return tables
