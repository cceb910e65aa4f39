-- What the files of pg.geometry share.
--
-- A result is a table with a text (tostring). Its fields have the same meaning everywhere: `value`
-- is the measured number, `bracket = { lower, upper }` holds certified bounds, rounded outwards,
-- `rows` the rows concerned, counted from 1, `multiply_adds` and `seconds` what it cost.
local check = require "perigee.check"
local report = require "perigee.repl.report"

local support = {}

support.number = report.number

function support.result(fields, render) return report.new(fields, render) end

-- The tensor of an argument that may be a tensor or a parameter.
function support.matrix(value, label)
  local meta = debug.getmetatable(value)
  local kind = type(value) == "userdata" and type(meta) == "table" and meta.__name
  if kind == "perigee.parameter" then return value.value end
  if kind ~= "perigee.tensor" then check.fail(nil, label, value, "a tensor or a parameter") end
  return value
end

-- A row number; a token object stands for its row.
function support.row(value, label, rows)
  local row = type(value) == "table" and rawget(value, "row") or value
  return check.integer(nil, label, row, 1, rows)
end

return support
