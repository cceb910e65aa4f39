-- Command lines: options are declared, abbreviations and unknown names refused.
--
-- A command is { name, usage, description, options, positional = { min, max }, run }, where
-- run(options, positional) returns the exit code, or { name, commands } of several.
-- An option is { name (of one letter: -e), value = "META" or nil for a switch, optional = true (a
-- switch that may also be --name=META), many = true (repeatable), spread = true (words after its
-- value are values too), kind = "integer" | "number" | "duration" | "device", choices, min, max,
-- help }.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local keys = require "perigee.keys"
local params = require "perigee.params"

local cli = {}

-- "90", "90s", "10m", "1h30m", "01:30:00" -> seconds; nil when malformed.
function cli.duration(text)
  local h, m, s = text:match("^(%d+):(%d%d):(%d%d)$")
  if h then return h * 3600 + m * 60 + s end
  if text:match("^%d+%.?%d*$") then return tonumber(text) end
  local total, rest = 0, text
  for _, unit in ipairs { { "d", 86400 }, { "h", 3600 }, { "m", 60 }, { "s", 1 } } do
    local count, after = rest:match("^(%d+%.?%d*)" .. unit[1] .. "(.*)$")
    if count then total, rest = total + tonumber(count) * unit[2], after end
  end
  if rest ~= "" or text == "" then return nil end
  return total
end

-- An option as it is written: --name, or -e.
function cli.written(option) return (#option.name == 1 and "-" or "--") .. option.name end

local function convert(option, text)
  local name = cli.written(option)
  if option.kind == "integer" then
    local value = math.tointeger(tonumber(text))
    if not value or value < (option.min or 0) or value > (option.max or math.maxinteger) then
      errors.usage("%s %s is not allowed: expected a whole number >= %d%s", name, check.show(text),
        option.min or 0, option.max and (" and <= %d"):format(option.max) or "")
    end
    return value
  elseif option.kind == "number" then
    local value = tonumber(text)
    if not value or value ~= value or value < (option.min or 0) or value > (option.max or 1e300)
    then
      errors.usage("%s %s is not allowed: expected a number >= %s%s", name, check.show(text),
        check.show(option.min or 0), option.max and " and <= " .. check.show(option.max) or "")
    end
    return value
  elseif option.kind == "duration" then
    local value = cli.duration(text)
    if not value or value <= 0 then
      errors.usage("%s %s is not allowed: expected seconds, 10m, 1h30m or HH:MM:SS", name,
        check.show(text))
    end
    return value
  elseif option.kind == "device" then
    local ok = pcall(check.device, nil, name, text)
    if not ok then
      errors.usage("%s %s is not allowed: expected auto, cpu, cuda or cuda:N", name,
        check.show(text))
    end
  elseif option.choices then
    for _, choice in ipairs(option.choices) do
      if text == choice then return text end
    end
    errors.usage("%s %s is not allowed: expected %s", name, check.show(text),
      table.concat(option.choices, " or "))
  elseif text == "" and (option.value == "FILE" or option.value == "DIR") then
    errors.usage("%s \"\" is not allowed: expected %s's name", name,
      option.value == "FILE" and "a file" or "a folder")
  end
  return text
end

-- list of words -> options by name (with _ for -), positional words.
local function parse(command, words)
  local by_name, known = {}, {}
  for _, option in ipairs(command.options or {}) do
    by_name[cli.written(option)] = option
    known[#known + 1] = cli.written(option)
  end
  known[#known + 1] = "--help"
  local found, positional = {}, {}
  local i, only_words, spread = 1, false, nil
  while i <= #words do
    local word = words[i]
    local plain = only_words or word == "-" or word:sub(1, 1) ~= "-"
    if plain and spread and not only_words then
      table.insert(found[spread.name], convert(spread, word))
    elseif plain then
      positional[#positional + 1] = word
      -- What follows a script's name belongs to the script.
      if command.rest and #positional == 1 then only_words = true end
    elseif word == "--" then
      only_words = true
    elseif word == "--help" or word == "-h" then
      found.help = true
    else
      spread = nil
      local name, value = word:match("^(%-%-[^=]+)=(.*)$")
      name = name or word
      local option = by_name[name]
      if not option then
        errors.usage("%s: unknown option %s%s", command.name, name,
          keys.suggestion(name, known))
      end
      local key = option.name:gsub("-", "_")
      if not option.value then
        if value then errors.usage("%s takes no value", name) end
        found[key] = true
      elseif option.optional and not value then
        found[key] = true
      else
        if not value then
          i = i + 1
          value = words[i]
          if value == nil then errors.usage("%s: expected %s after it", name, option.value) end
        end
        value = convert(option, value)
        if option.many then
          found[key] = found[key] or {}
          table.insert(found[key], value)
          if option.spread then spread = option end
        elseif found[key] ~= nil then
          errors.usage("%s is given twice", name)
        else
          found[key] = value
        end
      end
    end
    i = i + 1
  end
  if found.help then return found, positional end
  local least, most = command.positional[1], command.positional[2]
  if #positional < least or #positional > most then
    errors.usage("usage: perigee %s", command.usage)
  end
  return found, positional
end

-- { "k=v", … } -> table of settings.
function cli.settings(list)
  local set = {}
  for _, text in ipairs(list or {}) do
    local name, value = params.parse(text)
    if set[name] ~= nil then errors.usage("--set %s is given twice", name) end
    set[name] = value
  end
  return set
end

local function wrap(text, indent, width)
  local lines, line = {}, ""
  for word in text:gmatch("%S+") do
    if #line + #word + 1 > width - indent and line ~= "" then
      lines[#lines + 1] = line
      line = word
    else
      line = line == "" and word or line .. " " .. word
    end
  end
  lines[#lines + 1] = line
  return table.concat(lines, "\n" .. (" "):rep(indent))
end

-- What follows the option: " FILE", "[=FILE]", or nothing.
function cli.value(option)
  return option.value and (option.optional and "[=%s]" or " %s"):format(option.value) or ""
end

function cli.help(command)
  local lines = { "usage: perigee " .. command.usage, "", wrap(command.description, 0, 80) }
  if command.options and #command.options > 0 then
    lines[#lines + 1] = ""
    for _, option in ipairs(command.options) do
        local left = cli.written(option) .. cli.value(option)
      lines[#lines + 1] = ("  %-26s %s"):format(left, wrap(option.help, 29, 90))
    end
  end
  return table.concat(lines, "\n") .. "\n"
end

-- Run a command on its words; the exit code.
function cli.run(command, words)
  if command.commands then
    local names = {}
    for i, part in ipairs(command.commands) do
      if words[1] and part.name == command.name .. " " .. words[1] then
        return cli.run(part, { table.unpack(words, 2) })
      end
      names[i] = part.name:sub(#command.name + 2)
    end
    if words[1] ~= "--help" and words[1] ~= "-h" then
      errors.usage("usage: perigee %s %s … (perigee %s --help)", command.name,
        table.concat(names, "|"), command.name)
    end
    for i, part in ipairs(command.commands) do
      io.stdout:write(i > 1 and "\n" or "", cli.help(part))
    end
    return 0
  end
  local options, positional = parse(command, words)
  if options.help then
    io.stdout:write(cli.help(command))
    return 0
  end
  return command.run(options, positional)
end

-- Options shared by the commands that compute.
cli.device_option = { name = "device", value = "NAME", kind = "device",
  help = "auto (a GPU when there is one), cpu, cuda, or cuda:N for one of several" }
cli.compute_option = { name = "compute", value = "TYPE", choices = { "auto", "fp32", "bf16" },
  help = "auto (bf16 on cuda, fp32 on cpu), fp32 or bf16" }
cli.recompute_option = { name = "recompute", value = "WHAT", choices = { "none", "block" },
  help = "block: keep only every block's input and compute the rest again in the backward pass "
    .. "(less memory, more time, the same results)" }

cli.threads_option = { name = "threads", value = "N", kind = "integer", min = 1,
  max = core.max_threads,
  help = "compute threads (default: the CPUs this process may run on)" }

-- Options shared by the commands that train.
cli.training_options = {
  { name = "set", value = "NAME=VALUE", many = true,
    help = "give a value to a parameter that the recipe declares with pg.params" },
  { name = "max-time", value = "TIME", kind = "duration",
    help = "stop with a checkpoint (exit code 75) after seconds, 10m, 1h30m or HH:MM:SS" },
  { name = "max-updates", value = "N", kind = "integer", min = 1,
    help = "end the run after N updates; the schedule keeps its length" },
  cli.device_option, cli.compute_option, cli.recompute_option,
  cli.threads_option,
  { name = "profile", value = "FILE", optional = true,
    help = "record the third update, after a warm-up, as a trace for Perfetto or Chrome "
      .. "(default: profile.json in the run directory)" },
  { name = "rank-timeout", value = "TIME", kind = "duration",
    help = "with several ranks: how long to wait for another one (default 10m)" },
  { name = "no-attach", help = "let nobody attach: no socket" },
  { name = "quiet", help = "print nothing but errors" },
}

function cli.with_training(options)
  local all = {}
  for _, option in ipairs(options) do all[#all + 1] = option end
  for _, option in ipairs(cli.training_options) do all[#all + 1] = option end
  return all
end

return cli
