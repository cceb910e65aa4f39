-- What the program says about its own commands, for readers of other formats; the build writes it.
--   perigee run tools/packaging/manual.lua man     the manual page, for man(1)
--   perigee run tools/packaging/manual.lua bash    completion for bash
--   perigee run tools/packaging/manual.lua zsh     completion for zsh
local cli = require "perigee.cli"
local commands = require "perigee.commands"
local core = require "perigee.core"

-- All commands, those of several parts ("data prepare") part by part.
local all = {}
for _, entry in ipairs(commands) do
  local command = require("perigee.commands." .. entry[1])
  for _, part in ipairs(command.commands or { command }) do all[#all + 1] = part end
end

local help_option = { name = "help", help = "what the command does and its options" }

local function options_of(command)
  local list = table.move(command.options, 1, #command.options, 1, {})
  list[#list + 1] = help_option
  return list
end

-- ---- man ------------------------------------------------------------------------------------
-- Text for roff: a leading point or quote would be a request, a plain - a hyphen.
local function roff(text)
  text = text:gsub("\\", "\\e"):gsub("%-", "\\-"):gsub("…", "...")
  return (text:gsub("^([.'])", "\\&%1"):gsub("\n([.'])", "\n\\&%1"))
end

local environment = {
  { "PERIGEE_TRACE", "1 adds the stack to an error's line" },
  { "PERIGEE_JOB", "a name, alike on all ranks of a job: strangers at its port are refused" },
  { "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
    "set by a launcher of several ranks; mpirun and srun need none of them" },
  { "OMP_NUM_THREADS, OMP_WAIT_POLICY, GOMP_SPINCOUNT", "OpenMP's; see doctor" },
}

local function man()
  local lines = { ('.TH PERIGEE 1 "" "perigee %s" "User commands"'):format(core.version),
    ".SH NAME", "perigee \\- a trainer for language models, driven from Lua", ".SH SYNOPSIS",
    ".B perigee", "COMMAND [options]", ".br", ".B perigee", "COMMAND \\-\\-help", ".br",
    ".B perigee", "\\-\\-version", ".SH DESCRIPTION",
    "A C core owns the transformer, the data loader and the optimizers.",
    "Recipes are written in Lua.",
    ".SH COMMANDS" }
  local function add(...) for _, line in ipairs { ... } do lines[#lines + 1] = line end end
  for _, command in ipairs(all) do
    add(".SS perigee " .. roff(command.usage), roff(command.description))
    for _, option in ipairs(command.options) do
      add(".TP", ".B " .. roff(cli.written(option))
        .. (option.value and "\\fR" .. roff(cli.value(option)) or ""), roff(option.help))
    end
  end
  add(".SH EXIT STATUS", ".TP", ".B 0", "done", ".TP", ".B 1", "error: one line on standard error",
    ".TP", ".B 2", "a command line or value that is not allowed", ".TP", ".B 75",
    "stopped by SIGINT, SIGTERM or \\-\\-max\\-time with a checkpoint to resume from",
    ".SH ENVIRONMENT")
  for _, entry in ipairs(environment) do add(".TP", ".B " .. roff(entry[1]), roff(entry[2])) end
  add(".SH SEE ALSO", "The reference, in the folder doc of the Lua module and from help() at the",
    "prompt of", ".BR \"perigee repl\" .")
  return table.concat(lines, "\n") .. "\n"
end

-- ---- completion -----------------------------------------------------------------------------
local devices = { "auto", "cpu", "cuda" }
-- What may follow an option: a list of words, "file", "directory", or nil where nobody can guess.
local function values(option)
  if option.kind == "device" then return devices end
  if option.choices then return option.choices end
  if option.value == "FILE" then return "file" end
  if option.value == "DIR" then return "directory" end
end

local function parts_of(name)
  local parts = {}
  for _, command in ipairs(all) do
    parts[#parts + 1] = command.name:match("^" .. name .. " (%S+)$")
  end
  return parts
end

local function bash()
  local cases = {}
  local function case(pattern, action)
    cases[#cases + 1] = ("    %s) %s ;;"):format(pattern, action)
  end
  local function reply(words) return ("words='%s'"):format(table.concat(words, " ")) end
  for _, command in ipairs(all) do
    for _, option in ipairs(command.options) do
      if option.value and not option.optional then
        local what = values(option)
        case(("'%s %s'"):format(command.name, cli.written(option)),
          type(what) == "table" and reply(what) or what == "directory" and "files=-d"
          or what == "file" and "files=-f" or ":")
      end
    end
  end
  for _, command in ipairs(all) do
    local words = {}
    for i, option in ipairs(options_of(command)) do words[i] = cli.written(option) end
    case(("'%s '*"):format(command.name),
      ('[[ $cur == -* ]] && %s || files=-f'):format(reply(words)))
  end
  local first, of_parts = {}, {}
  for i, entry in ipairs(commands) do
    local parts = parts_of(entry[1])
    if parts[1] then
      of_parts[#of_parts + 1] = entry[1]
      case(("'%s '*"):format(entry[1]), reply(parts))
    end
    first[i] = entry[1]
  end
  case("*", reply(first))
  return ([[
# Completion of the perigee program for bash.
_perigee() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} words= files=
  local command=${COMP_WORDS[1]}
  [ "$COMP_CWORD" -gt 2 ] && case $command in %s) command+=" ${COMP_WORDS[2]}" ;; esac
  [ "$COMP_CWORD" -gt 1 ] || command=
  case "$command $prev" in
%s
  esac
  if [ -n "$files" ]; then
    compopt -o filenames
    mapfile -t COMPREPLY < <(compgen $files -- "$cur")
  else
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
  fi
}
complete -F _perigee perigee
]]):format(table.concat(of_parts, "|"), table.concat(cases, "\n"))
end

local function zsh()
  local function quoted(text)
    return (text:gsub("'", "'\\''"):gsub("([%[%]:])", "\\%1"))
  end
  local function action(what)
    if type(what) == "table" then return "(" .. table.concat(what, " ") .. ")" end
    return what == "file" and "_files" or what == "directory" and "_files -/" or " "
  end
  local function arguments(command)
    local specs = {}
    for _, option in ipairs(options_of(command)) do
      local name = cli.written(option)
      specs[#specs + 1] = ("'%s%s[%s]%s'"):format(option.many and "*" or "",
        option.value and #name > 2 and name .. (option.optional and "=-" or "=") or name,
        quoted(option.help), option.value and (option.optional and "::%s:%s" or ":%s:%s"):format(
          quoted(option.value), action(values(option))) or "")
    end
    specs[#specs + 1] = "'*:file:_files'"
    return "_arguments -S " .. table.concat(specs, " \\\n          ")
  end
  local cases, first = {}, {}
  for i, entry in ipairs(commands) do
    first[i] = ("'%s:%s'"):format(entry[1], quoted(entry[2]))
    local parts = parts_of(entry[1])
    if parts[1] then
      local inner = {}
      for _, part in ipairs(parts) do
        for _, command in ipairs(all) do
          if command.name == entry[1] .. " " .. part then
            inner[#inner + 1] = ("        %s) %s ;;"):format(part, arguments(command))
          end
        end
      end
      cases[#cases + 1] = ([[
      %s)
        if (( CURRENT == 2 )); then compadd -- %s; return; fi
        shift words; (( CURRENT-- ))
        case $words[1] in
%s
        esac ;;]]):format(entry[1], table.concat(parts, " "), table.concat(inner, "\n"))
    else
      for _, command in ipairs(all) do
        if command.name == entry[1] then
          cases[#cases + 1] = ("      %s) %s ;;"):format(entry[1], arguments(command))
        end
      end
    end
  end
  return ([[
#compdef perigee
# Completion of the perigee program for zsh.
_perigee() {
  local -a commands=(%s)
  if (( CURRENT == 2 )); then _describe command commands; return; fi
  shift words; (( CURRENT-- ))
  case $words[1] in
%s
  esac
}
_perigee "$@"
]]):format(table.concat(first, "\n    "), table.concat(cases, "\n"))
end

local formats = { man = man, bash = bash, zsh = zsh }
local format = formats[arg[1]]
if not format then
  io.stderr:write("usage: perigee run tools/packaging/manual.lua man|bash|zsh\n")
  return 2
end
io.stdout:write(format())
