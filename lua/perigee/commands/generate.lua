-- perigee generate DIR --prompt "…"
local cli = require "perigee.cli"
local check = require "perigee.check"
local checkpoints = require "perigee.checkpoints"
local core = require "perigee.core"
local errors = require "perigee.errors"
local open = require "perigee.open"

local command = {
  name = "generate", usage = "generate DIR --prompt TEXT [--tokens N] [--temperature X]",
  description = "Continue a prompt with the model of a checkpoint (or the latest one of a run "
    .. "directory). The text is written as it is made and depends only on the seed.",
  positional = { 1, 1 },
  options = {
    { name = "prompt", value = "TEXT", help = "text to continue (default: empty)" },
    { name = "tokens", value = "N", kind = "integer", min = 1,
      help = "tokens to make (default 100); the end-of-text token ends earlier" },
    { name = "temperature", value = "X", kind = "number",
      help = "0 always takes the most likely token (default 0.8)" },
    { name = "top-k", value = "K", kind = "integer", min = 0,
      help = "draw from the K most likely tokens; 0 from all (default 50)" },
    { name = "seed", value = "N", kind = "integer", min = 0, help = "seed of the draws" },
    cli.device_option, cli.compute_option,
    cli.threads_option,
  },
}

function command.run(options, positional)
  local device, device_index = check.device(nil, "--device", options.device or "auto")
  local ctx <close> = errors.try(core.context { device = device, device_index = device_index,
    threads = options.threads })
  local path = checkpoints.resolve(ctx, positional[1])
  local file = path .. "/tokenizer.json"
  if core.fs.kind(file) ~= "file" then
    errors.world(("ENOENT: %s has no tokenizer.json: text needs one"):format(path), "ENOENT")
  end
  local tokenizer <close> = errors.try(core.tokenizer(ctx, file))
  local model <close> = errors.try(core.model(ctx, errors.try(core.checkpoint_config(ctx, path)),
    open.compute(ctx, options.compute or "auto")))
  errors.try(model:load(path .. "/model.safetensors"))
  local prompt = options.prompt or ""
  local tokens = prompt ~= "" and errors.try(tokenizer:encode(prompt)) or {}
  local stop = tokenizer:end_of_text()
  -- Documents follow an end-of-text token, so that an empty prompt is the start of one.
  if #tokens == 0 then
    if not stop then
      errors.usage("--prompt is empty and the tokenizer has no end-of-text token")
    end
    tokens = { stop }
  end
  io.stdout:write(prompt)
  for index = 0, (options.tokens or 100) - 1 do
    local id = errors.try(core.generate(model, tokens, {
      temperature = options.temperature or 0.8, top_k = options.top_k or 50,
      seed = options.seed or 0, index = index }))
    if id == stop then break end
    tokens[#tokens + 1] = id
    io.stdout:write(tokenizer:bytes(id) or "")
    io.stdout:flush()
  end
  io.stdout:write("\n")
  return 0
end

return command
