/* Tokenizers. Token ids count from 0, as in every tokenizer. */
#include "bind.h"
#include <limits.h>
#include <stdlib.h>

static void release_tokenizer(pgl_object *o) {
  pg_tokenizer_free(o->resource);
}

const pgl_kind pgl_tokenizer_kind = {"perigee.tokenizer", "tokenizer", 0, release_tokenizer};

static pg_tokenizer *check(lua_State *L) {
  return pgl_check(L, 1, &pgl_tokenizer_kind)->resource;
}

/* core.tokenizer(ctx, path) */
static int tokenizer_new(lua_State *L) {
  pgl_object *context = pgl_check(L, 1, &pgl_context_kind);
  const char *path = pgl_string(L, 2, "path");
  pgl_object *o = pgl_new(L, &pgl_tokenizer_kind, context);
  pg_tokenizer *t = NULL;
  int status = pg_tokenizer_load(context->resource, path, &t);
  if (status < 0) return pgl_fail(L, context->resource, status);
  o->resource = t;
  return 1;
}

/* tok:encode(text [, allow_special]) -> list of ids */
static int tokenizer_encode(lua_State *L) {
  size_t size;
  const char *text = pgl_bytes(L, 2, "text", &size);
  const bool special = !lua_isnoneornil(L, 3) && pgl_boolean(L, 3, "allow_special");
  void **box = pgl_own(L, free);
  int32_t *ids = NULL;
  int64_t count = 0;
  int status = pg_tokenizer_encode(check(L), text, size, special, &ids, &count);
  *box = ids;
  if (status < 0) return pgl_fail(L, pgl_context(pgl_check(L, 1, &pgl_tokenizer_kind)), status);
  lua_createtable(L, (int)pg__min(count, 1 << 26), 0);
  for (int64_t i = 0; i < count; i++) {
    lua_pushinteger(L, ids[i]);
    lua_rawseti(L, -2, i + 1);
  }
  pgl_disown(box);
  return 1;
}

/* The bytes of token `id`; raises when it is outside the vocabulary. */
static const char *token_bytes(lua_State *L, const pg_tokenizer *t, int64_t id, size_t *size) {
  const char *bytes = id < 0 || id > INT32_MAX ? NULL : pg_tokenizer_bytes(t, (int32_t)id, size);
  if (!bytes)
    luaL_error(L, "token %I is not in the vocabulary of %I", (LUAI_UACINT)id,
               (LUAI_UACINT)pg_tokenizer_vocab(t));
  return bytes;
}

/* tok:decode(ids) -> bytes */
static int tokenizer_decode(lua_State *L) {
  luaL_Buffer text;
  luaL_checktype(L, 2, LUA_TTABLE);
  const int64_t count = (int64_t)lua_rawlen(L, 2);
  luaL_buffinit(L, &text);
  for (int64_t i = 1; i <= count; i++) {
    int exact = 0;
    size_t size = 0;
    /* Buffers want a balanced stack when they grow. */
    lua_rawgeti(L, 2, i);
    lua_Integer id = lua_type(L, -1) == LUA_TNUMBER ? lua_tointegerx(L, -1, &exact) : 0;
    if (!exact)
      return luaL_error(L, "decode: id %I must be an integer, got %s", (LUAI_UACINT)i,
                        pgl_describe(L, -1));
    lua_pop(L, 1);
    const char *bytes = token_bytes(L, check(L), id, &size);
    luaL_addlstring(&text, bytes, size);
  }
  luaL_pushresult(&text);
  return 1;
}

static int tokenizer_bytes(lua_State *L) {
  size_t size = 0;
  const char *bytes =
      token_bytes(L, check(L), pgl_integer(L, 2, "id", INT64_MIN, INT64_MAX), &size);
  lua_pushlstring(L, bytes, size);
  return 1;
}

/* tok:find(bytes) -> the id of the token with exactly these bytes, or nil */
static int tokenizer_find(lua_State *L) {
  size_t size;
  const char *bytes = pgl_bytes(L, 2, "bytes", &size);
  int32_t id = pg_tokenizer_find(check(L), bytes, size);
  if (id < 0)
    lua_pushnil(L);
  else
    lua_pushinteger(L, id);
  return 1;
}

static int tokenizer_vocab(lua_State *L) {
  lua_pushinteger(L, pg_tokenizer_vocab(check(L)));
  return 1;
}

static int tokenizer_end_of_text(lua_State *L) {
  int32_t id = pg_tokenizer_end_of_text(check(L));
  if (id < 0)
    lua_pushnil(L);
  else
    lua_pushinteger(L, id);
  return 1;
}

static int tokenizer_save(lua_State *L) {
  pgl_object *o = pgl_check(L, 1, &pgl_tokenizer_kind);
  int status = pg_tokenizer_save(o->resource, pgl_string(L, 2, "path"));
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  lua_pushboolean(L, true);
  return 1;
}

static const luaL_Reg methods[] = {
    {"encode", tokenizer_encode}, {"decode", tokenizer_decode},
    {"bytes", tokenizer_bytes},   {"find", tokenizer_find},
    {"vocab", tokenizer_vocab},   {"end_of_text", tokenizer_end_of_text},
    {"save", tokenizer_save},     {NULL, NULL}};
static const luaL_Reg functions[] = {{"tokenizer", tokenizer_new}, {NULL, NULL}};

void pgl_open_tokenizer(lua_State *L) {
  pgl_define(L, &pgl_tokenizer_kind, methods);
  luaL_setfuncs(L, functions, 0);
}
