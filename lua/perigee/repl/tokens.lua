-- Tokens as objects: { id, text, row }. Ids count from 0 as in every tokenizer, rows from 1 as
-- everything in Lua; a token object indexes rows of a tensor or parameter correctly by itself.
local core = require "perigee.core"
local check = require "perigee.check"
local errors = require "perigee.errors"
local show = require "perigee.repl.print"
local tensors = require "perigee.tensors"

local tokens = {}

local Token = { __name = "a token" }
Token.__index = function(_, key)
  if key == "text" then return nil end
  errors.misuse("a token has no '%s' (known: id, row, text)", tostring(key))
end
Token.__names = function() return { "id", "row", "text" } end
Token.__tostring = function(t)
  return ("%s  id %d, row %d"):format(t.text and show.quoted(t.text) or "(no text)", t.id, t.row)
end
Token.__eq = function(a, b) return a.id == b.id end

function tokens.is(value) return getmetatable(value) == Token end

-- Bytes as valid UTF-8: others as \xNN.
local function readable(bytes)
  if utf8.len(bytes) then return bytes end
  return (bytes:gsub("[\128-\255]", function(c) return ("\\x%02x"):format(c:byte()) end))
end

-- The tokens of one vocabulary. `tokenizer` may be nil: then ids have no text.
local Tokens = {}
Tokens.__index = Tokens

function tokens.new(tokenizer, vocab)
  return setmetatable({ tokenizer = tokenizer, vocab = vocab }, Tokens)
end

-- Valid UTF-8; nil without a tokenizer, or when the model has more rows than tokens.
function Tokens:text(id)
  if not self.tokenizer or id >= self.tokenizer:vocab() then return nil end
  return readable(self.tokenizer:bytes(id))
end

function Tokens:by_id(id)
  check.integer(nil, "token id", id, 0, self.vocab - 1)
  id = math.tointeger(id)
  return setmetatable({ id = id, row = id + 1, text = self:text(id) }, Token)
end

function Tokens:by_row(row)
  return self:by_id(check.integer(nil, "row", row, 1, self.vocab) - 1)
end

-- A token by its text, its id, or a token object.
function Tokens:token(value)
  if tokens.is(value) then return value end
  if type(value) == "number" then return self:by_id(value) end
  if type(value) ~= "string" then
    check.fail(nil, "tok", value, 'a text such as " king", or an id')
  end
  if not self.tokenizer then errors.misuse("tok: this model has no tokenizer: give an id") end
  local id = self.tokenizer:find(value)
  if id then return self:by_id(id) end
  local pieces = {}
  for i, piece in ipairs(errors.try(self.tokenizer:encode(value))) do
    pieces[i] = ("%s (%d)"):format(show.quoted(self:text(piece)), piece)
  end
  errors.misuse("tok: %s is %d tokens: %s", show.quoted(value), #pieces,
    table.concat(pieces, ", "))
end

-- Ids of a list of tokens and ids, or of a tensor of ids: of a vector, or of a matrix row by row.
function Tokens:ids(label, list)
  if tensors.is(list) then
    list = list:reshape(list:elements()):to_table()
  elseif type(list) ~= "table" or tokens.is(list) then
    check.fail(nil, label, list, "a list of ids or tokens, or a tensor of ids")
  end
  local ids = {}
  for i, entry in ipairs(list) do
    ids[i] = tokens.is(entry) and entry.id
      or check.integer(nil, ("%s[%d]"):format(label, i), entry, 0, self.vocab - 1)
    ids[i] = math.tointeger(ids[i])
  end
  return ids
end

-- A list of ids as text.
function Tokens:decode(ids)
  if not self.tokenizer then return table.concat(ids, " ") end
  local parts = {}
  for i, id in ipairs(ids) do parts[i] = self:text(id) or ("<%d>"):format(id) end
  return table.concat(parts)
end

-- The texts of all tokens, made once.
function Tokens:texts()
  if not self.all then
    self.all = {}
    for id = 0, self.tokenizer and self.tokenizer:vocab() - 1 or -1 do
      self.all[#self.all + 1] = self:text(id)
    end
  end
  return self.all
end

-- The tokenizer of a checkpoint or data folder; nil when neither has one.
function tokens.load(ctx, ...)
  for _, folder in ipairs { ... } do
    local path = folder .. "/tokenizer.json"
    if core.fs.kind(path) == "file" then return errors.try(core.tokenizer(ctx, path)) end
  end
end

return tokens
