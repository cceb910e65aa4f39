-- One chunk of Lua typed by somebody: whether it is complete, and what it gives or which error ends
-- it. A chunk that is an expression gives its values, as in the stock interpreter.
local core = require "perigee.core"
local errors = require "perigee.errors"

local evaluate = {}

local function unfinished(message) return message:find("<eof>$") ~= nil end

-- A function, or nil and "incomplete" | the message. Unlike the stock interpreter an expression may
-- continue on the next line too.
function evaluate.compile(text, env)
  local expression, no_expression = load("return " .. text, "=stdin", "t", env)
  if expression then return expression end
  local chunk, message = load(text, "=stdin", "t", env)
  if chunk then return chunk end
  if unfinished(message) or unfinished(no_expression) then return nil, "incomplete" end
  return nil, message
end

local most_frames = 6

-- The frames of the user's own code, innermost first; nil when the message says as much.
local function short_trace(trace)
  local frames = {}
  for frame in trace:gmatch("\n%s*([^\n]+)") do
    if frame:find("repl/evaluate.lua:", 1, true) then break end
    if not frame:find("^%[C%]") and not frame:find("lua/perigee/[%w_/]+%.lua:")
      and not frame:find("^%(?%.%.%.") and #frames < most_frames then
      frames[#frames + 1] = "  " .. frame
    end
  end
  if #frames < 2 then return nil end
  return table.concat(frames, "\n")
end

-- Call a compiled chunk. limits: { seconds, socket } of core.guard. Returns
-- { ok = true, values = { n = … } } or { ok = false, error, trace, reason }.
function evaluate.call(chunk, limits)
  -- A tail call would take the chunk's own frame off the stack.
  local results = table.pack(core.guard(limits or {}, chunk))
  if results[1] then
    return { ok = true, values = table.pack(table.unpack(results, 2, results.n)) }
  end
  local text = errors.text(results[2])
  local reason = results[4]
  if reason == "time limit" then
    text = ("cut off after %g s (%s)"):format(limits.seconds, text)
  elseif reason then
    text = reason
  end
  return { ok = false, error = text, trace = short_trace(results[3]), reason = reason }
end

return evaluate
