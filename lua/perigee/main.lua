-- The program: perigee COMMAND …. The module is a function of the words of the command line (a
-- table like `arg`) that returns the exit code: 0 done, 1 error, 2 usage, 75 stopped by a
-- signal or --max-time with a checkpoint to resume from.
--
-- Errors are one line on standard error; PERIGEE_TRACE=1 adds the stack.
local cli = require "perigee.cli"
local commands = require "perigee.commands"
local core = require "perigee.core"
local errors = require "perigee.errors"
local keys = require "perigee.keys"

local function overview()
  local lines = { "perigee " .. core.version .. ": a trainer for language models, driven from Lua",
    "", "usage: perigee COMMAND [options]", "" }
  for _, entry in ipairs(commands) do
    lines[#lines + 1] = ("  %-10s %s"):format(entry[1], entry[2])
  end
  lines[#lines + 1] = ""
  lines[#lines + 1] = "perigee COMMAND --help describes a command; perigee --version its version."
  return table.concat(lines, "\n") .. "\n"
end

local function find(name)
  local known = {}
  for _, entry in ipairs(commands) do
    if entry[1] == name then return require("perigee.commands." .. name) end
    known[#known + 1] = entry[1]
  end
  errors.usage("unknown command %s%s", name, keys.suggestion(name, known))
end

local function main(words)
  local name = words[1]
  if name == nil then
    io.stderr:write(overview())
    return 2
  elseif name == "--version" or name == "-V" then
    print("perigee " .. core.version)
    return 0
  elseif name == "--help" or name == "-h" or (name == "help" and not words[2]) then
    io.stdout:write(overview())
    return 0
  elseif name == "help" then
    return cli.run(find(words[2]), { words[3] or "--help", "--help" })
  elseif name:sub(1, 1) == "-" then
    errors.usage("unknown option %s (known: --help, --version)", name)
  end
  return cli.run(find(name), { table.unpack(words, 2) })
end

-- The words are those after the program's name.
local function protected(words)
  local trace
  local ok, result = xpcall(main, function(e)
    trace = debug.traceback(errors.text(e), 2)
    return e
  end, words)
  if ok then return result or 0 end
  local text = errors.text(result)
  local launch = core.launch()
  if launch and launch.world > 1 then text = ("rank %d: %s"):format(launch.rank, text) end
  io.stdout:flush()
  io.stderr:write("perigee: " .. text .. "\n") -- at once: other ranks write to the same place
  if os.getenv("PERIGEE_TRACE") == "1" then
    local session = package.loaded["perigee.session"]
    io.stderr:write(session and session.trace or trace or "", "\n")
  end
  return errors.is_failure(result) and result.usage and 2 or 1
end

return function(words) return protected({ table.unpack(words or arg or {}, 1) }) end
