-- Results of the prompt's functions: plain tables of numbers and lists that a script can use, with
-- a text for people.
local report = {}

local Report = { __name = "a result" }

-- render(fields) -> text
function report.new(fields, render)
  local meta = { __name = Report.__name, __tostring = render, report = true }
  return setmetatable(fields, meta)
end

-- Rows of cells, the first one the header; numbers to the right. `left`: columns that are text.
function report.columns(rows, left)
  local widths = {}
  local function width(text) return utf8.len(text) or #text end
  for _, row in ipairs(rows) do
    for i, cell in ipairs(row) do widths[i] = math.max(widths[i] or 0, width(cell)) end
  end
  local lines = {}
  for r, row in ipairs(rows) do
    local cells = {}
    for i, cell in ipairs(row) do
      local space = (" "):rep(widths[i] - width(cell))
      cells[i] = left and left[i] and cell .. space or space .. cell
    end
    lines[r] = ("  " .. table.concat(cells, "  ")):gsub("%s+$", "")
  end
  return table.concat(lines, "\n")
end

-- A measured number: five digits.
function report.number(x)
  if x == nil then return "-" end
  if math.type(x) == "integer" then return tostring(x) end
  return ("%.5g"):format(x)
end

-- Quantile q of a sorted list: the smallest element with at least the share q below or at it.
function report.quantile(sorted, q)
  return sorted[math.max(1, math.min(#sorted, math.ceil(q * #sorted)))]
end

return report
