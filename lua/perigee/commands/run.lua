-- perigee run SCRIPT.lua [arguments]
local errors = require "perigee.errors"
local check = require "perigee.check"

local command = {
  name = "run", usage = "run SCRIPT.lua [arguments]",
  description = "Run a Lua script with `require \"perigee\"` at hand; the arguments are in `arg`.",
  positional = { 1, math.huge }, rest = true, options = {},
}

function command.run(_, positional)
  local path = positional[1]
  local file, message = io.open(path, "rb")
  if not file then
    errors.world(("ENOENT: cannot read script %s: %s"):format(check.show(path), message), "ENOENT")
  end
  local text = file:read("a"):gsub("^#[^\n]*", "")
  file:close()
  local chunk, problem = load(text, "@" .. path, "t")
  if not chunk then error(problem, 0) end
  -- luacheck: push ignore 121
  arg = { [0] = path, table.unpack(positional, 2) }
  -- luacheck: pop
  package.path = (path:match("^(.*/)") or "./") .. "?.lua;" .. package.path
  local result = chunk(table.unpack(positional, 2))
  return math.type(result) == "integer" and result or 0
end

return command
