-- What a run writes for TensorBoard beside metrics.jsonl: numbers, histograms of the head's row
-- norms, and the recipe.
local core = require "perigee.core"
local errors = require "perigee.errors"

local board = {}

-- A file each time the run starts or goes on. It holds from the update after its first state.
function board.open(run)
  if not run.spec.log.tensorboard then return end
  run.board = errors.try(core.events(run.ctx, run.out, run.update > 0 and run.update + 1 or 0))
  -- Indented by four, Markdown shows a text as it is.
  local text = ("\n" .. run.reading.text):gsub("\n", "\n    ")
  errors.try(run.board:write(run.update, { { "recipe", text } }))
end

-- Row norms of the head as a list; nil where the head is not one matrix.
local function row_norms(run)
  local head = run.head
  if not head or not head.value then return nil end
  local norms <close> = head.value:row_norms()
  return norms:to_table()
end

-- The line of a report: { {name, value}, … }.
function board.write(run, line, due)
  local values = {}
  for _, entry in ipairs(line) do
    local value = entry[2]
    if type(value) == "number" then values[#values + 1] = { entry[1], value + 0.0 } end
  end
  if due then
    local norms = row_norms(run)
    if norms then values[#values + 1] = { "head/row_norms", norms } end
  end
  errors.try(run.board:write(run.update, values))
end

return board
