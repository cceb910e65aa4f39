-- perigee repl [DIR|CHECKPOINT]…
local cli = require "perigee.cli"
local check = require "perigee.check"
local console = require "perigee.repl.console"
local core = require "perigee.core"
local errors = require "perigee.errors"

local command = {
  name = "repl", usage = "repl [DIR|CHECKPOINT]… [--head FILE]… [-e CODE]… [--json]",
  description = "A Lua prompt with `pg` at hand and what is opened: run, model, head, inc (the "
    .. "head's last increment), parameters, tok. Nothing is written to what is opened. Ctrl-C ends "
    .. "a calculation, Ctrl-D the prompt; help() is a start. Without a terminal it reads lines.",
  positional = { 0, math.huge },
  options = {
    { name = "e", value = "CODE", many = true,
      help = "run this and leave: exit code 0, or 1 after an error" },
    { name = "json", help = "each result as one JSON line; what the code prints goes to standard "
      .. "error" },
    { name = "head", value = "FILE", many = true, help = "a head without its model, as `head`: a "
      .. ".safetensors file of U, hidden and targets, or U.npy, hidden.npy and targets.npy, each "
      .. "with a --head of its own" },
    { name = "data", value = "DIR", help = "data folder, when the recorded one has moved" },
    cli.device_option, cli.compute_option,
    cli.threads_option,
  },
}

function command.run(options, positional)
  if core.launch().world > 1 then
    errors.usage("repl: one process is expected, this is one of %d ranks", core.launch().world)
  end
  local view = require "perigee.repl.view"
  local workspace = require "perigee.repl.workspace"
  local device, index = check.device(nil, "--device", options.device or "auto")
  local ctx = errors.try(core.context { device = device, device_index = index,
    threads = options.threads })
  local stream = options.json and io.stderr or io.stdout
  local host = workspace.new { ctx = ctx, data = options.data, compute = options.compute,
    functions = options.head and { head = require("perigee.head").of_files(options.head,
      { context = ctx, compute = options.compute }) } or nil,
    out = function(text) stream:write(text) end }
  for _, path in ipairs(positional) do
    host:add(view.open(ctx, path, { data = options.data, compute = options.compute }))
  end
  function host:banner()
    local lines = { ("perigee %s on %s; help() is a start, Ctrl-D leaves"):format(core.version,
      ctx:device()) }
    for i, opened in ipairs(self.views) do
      local name = #self.views > 1 and string.char(96 + i) .. ": " or ""
      lines[#lines + 1] = name .. tostring(opened)
    end
    if options.head then lines[#lines + 1] = "head: " .. tostring(self.functions.head) end
    return table.concat(lines, "\n") .. "\n"
  end
  return console.talk(host, { code = options.e, json = options.json })
end

return command
