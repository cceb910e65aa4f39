-- tests/session.lua PROGRAM FOLDER full|short: replay the session at the prompt that README.md
-- shows, in FOLDER, which has the quickstart's runs. With `full` these are as long as the README's;
-- its words must come again, and its numbers within a tenth: another CPU rounds otherwise, which
-- 300 updates amplify to a few percent; the oracle's bounds depend on what its time allows. Times
-- and its gap are not compared. With `short` the runs are a few updates long: every line must
-- answer without an error.
local program, folder, mode = table.unpack(arg)

local function read(path)
  local file <close> = assert(io.open(path))
  return file:read("a")
end

local session = assert(read("README.md"):match("\n```text\n(%$ build/perigee repl .-)\n```\n"),
  "README.md has lost its session")
local directories = session:match("^%$ build/perigee repl ([^\n]*)")
local commands, expected = {}, {}
for line in session:gmatch("\n([^\n]*)") do
  local command = line:match("^> (.*)")
  if command then commands[#commands + 1] = command else expected[#expected + 1] = line end
end
assert(#commands > 5 and #expected > 5)

local input = os.tmpname()
local file = assert(io.open(input, "w"))
file:write(table.concat(commands, "\n"), "\n")
file:close()
local pipe = assert(io.popen(("cd '%s' && '%s' repl %s <'%s' 2>&1"):format(folder, program,
  directories, input)))
local shown = {}
for line in pipe:lines() do shown[#shown + 1] = line end
local ok = pipe:close()
os.remove(input)
local text = table.concat(shown, "\n")
assert(ok, text)
assert(#shown == #expected, ("%d lines, not %d:\n%s"):format(#shown, #expected, text))

local function words(line)
  local list = {}
  line = line:gsub("[;,] ?i?n? ?[%d.e-]+ s$", ""):gsub(", gap [%d.e-]+", "")
  for word in line:gmatch("[^%s,;%[%]]+") do
    list[#list + 1] = word
  end
  return list
end

for i = 1, mode == "full" and #expected or 0 do
  local want, have = words(expected[i]), words(shown[i])
  assert(#want == #have, shown[i])
  for n, word in ipairs(want) do
    local a, b = tonumber(word), tonumber(have[n])
    assert(a and b and math.abs(a - b) <= 0.1 * math.abs(a) or word == have[n],
      ("'%s', not '%s', in: %s"):format(have[n], word, shown[i]))
  end
end
print(("unit: %d passed, 0 failed"):format(#commands))
