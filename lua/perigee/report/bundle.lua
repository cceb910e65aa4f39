-- What others need to check a report and to train its runs again: recipes, configurations, metrics,
-- the report, and SHA-256 sums of all, in one archive that depends on nothing else: names are
-- sorted, and times and owners are left out.
local core = require "perigee.core"
local errors = require "perigee.errors"

local bundle = {}

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local function copy(from, to)
  for _, name in ipairs(errors.try(core.fs.list(from))) do
    local path = from .. "/" .. name
    local kind = core.fs.kind(path)
    if kind == "directory" then
      errors.try(core.fs.make(to .. "/" .. name))
      copy(path, to .. "/" .. name)
    elseif kind == "file" then
      errors.try(core.fs.write(to .. "/" .. name, errors.try(core.fs.read(path))))
    end
  end
end

-- Files of a run directory; checkpoints are left out, a run can be trained again.
local function copy_run(run, to)
  errors.try(core.fs.make(to))
  for _, name in ipairs(errors.try(core.fs.list(run.dir))) do
    local path = run.dir .. "/" .. name
    if name == "recipe" and core.fs.kind(path) == "directory" then
      errors.try(core.fs.make(to .. "/recipe"))
      copy(path, to .. "/recipe")
    elseif name:find "^recipe.*%.lua$" or name == "config.json" or name == "state.json"
      or name == "summary.json" or name == "metrics.jsonl" then
      errors.try(core.fs.write(to .. "/" .. name, errors.try(core.fs.read(path))))
    end
  end
end

-- Pack the report, written into the folder `out`, and its runs into the file `path`.
function bundle.write(report, out, path)
  local folder = os.tmpname()
  os.remove(folder)
  errors.try(core.fs.make_exclusive(folder))
  local _ <close> = setmetatable({}, { __close = function() core.fs.remove(folder) end })
  errors.try(core.fs.make(folder .. "/report"))
  for _, name in ipairs(report.files) do
    errors.try(core.fs.write(folder .. "/report/" .. name, errors.try(core.fs.read(out .. "/"
      .. name))))
  end
  for i, run in ipairs(report.runs) do
    if core.fs.kind(run.dir) == "directory" then
      copy_run(run, ("%s/runs/%03d-%s"):format(folder, i,
        run.name:sub(1, 200):gsub("[^%w=,._-]", "_")))
    end
  end
  local archive = folder .. ".tar.gz" -- and then copied: `path` is whole or as it was
  local _ <close> = setmetatable({}, { __close = function() os.remove(archive) end })
  local pipe = assert(io.popen(("{ cd %s && find . -type f ! -name SHA256SUMS -print0 "
    .. "| LC_ALL=C sort -z | xargs -0 sha256sum >SHA256SUMS && LC_ALL=C tar --sort=name "
    .. "--mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX -cf - report runs "
    .. "SHA256SUMS | gzip -n; } 2>&1 >%s"):format(quoted(folder), quoted(archive))))
  local output = pipe:read "a"
  if not pipe:close() or output ~= "" then
    errors.world(("EIO: %s: %s"):format(path, output:gsub("%s*\n%s*", " | ")), "EIO")
  end
  errors.try(core.fs.write(path, errors.try(core.fs.read(archive))))
end

return bundle
