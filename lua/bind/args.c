/* Failures, strict arguments and option tables. */
#include "bind.h"
#include <string.h>

void pgl_scratch(struct pg_context *ctx) {
  memset(ctx, 0, sizeof *ctx);
}

int pgl_fail_text(lua_State *L, int status, const char *text) {
  const char *name = pg_error_name(status);
  if (!text || !*text) text = pg_error_meaning(status);
  if (status == PG_EINVAL || status == PG_ESTATE) return luaL_error(L, "%s", text);
  lua_pushnil(L);
  lua_pushfstring(L, "%s: %s", name, text);
  lua_pushstring(L, name);
  return 3;
}

int pgl_fail(lua_State *L, pg_context *ctx, int status) {
  return pgl_fail_text(L, status, pg_context_message(ctx));
}

int pgl_fail_errno(lua_State *L, int error, const char *action, const char *path) {
  struct pg_context scratch;
  pgl_scratch(&scratch);
  return pgl_fail(L, &scratch, pg__fail_errno(&scratch, action, path, error));
}

const char *pgl_describe(lua_State *L, int index) {
  switch (lua_type(L, index)) {
  case LUA_TNUMBER:
    lua_pushvalue(L, index);
    lua_pushfstring(L, "number %s", lua_tostring(L, -1));
    lua_remove(L, -2);
    break;
  case LUA_TBOOLEAN: lua_pushstring(L, lua_toboolean(L, index) ? "true" : "false"); break;
  case LUA_TSTRING: {
    size_t size;
    const char *text = lua_tolstring(L, index, &size);
    if (size <= 60 && strlen(text) == size)
      lua_pushfstring(L, "string \"%s\"", text);
    else
      lua_pushfstring(L, "a string of %I bytes", (LUAI_UACINT)size);
    break;
  }
  case LUA_TUSERDATA: {
    int type = luaL_getmetafield(L, index, "__name");
    if (type == LUA_TSTRING) break;
    lua_pop(L, type != LUA_TNIL);
    lua_pushstring(L, "userdata");
    break;
  }
  default: lua_pushstring(L, luaL_typename(L, index)); break;
  }
  return lua_tostring(L, -1);
}

/* What is wrong with `value` as an integer in [min, max]; NULL when nothing is. */
static const char *integer_range(lua_State *L, int index, int64_t min, int64_t max,
                                 int64_t *value) {
  int exact = 0;
  if (lua_type(L, index) == LUA_TNUMBER) *value = lua_tointegerx(L, index, &exact);
  if (exact && *value >= min && *value <= max) return NULL;
  const char *got = pgl_describe(L, index);
  if (min == INT64_MIN && max == INT64_MAX)
    return lua_pushfstring(L, "an integer expected, got %s", got);
  if (max == INT64_MAX)
    return lua_pushfstring(L, "an integer of at least %I expected, got %s", (LUAI_UACINT)min, got);
  return lua_pushfstring(L, "an integer from %I to %I expected, got %s", (LUAI_UACINT)min,
                         (LUAI_UACINT)max, got);
}

static int argument_error(lua_State *L, int arg, const char *name, const char *problem) {
  return luaL_argerror(L, arg, lua_pushfstring(L, "%s: %s", name, problem));
}

double pgl_number(lua_State *L, int arg, const char *name) {
  if (lua_type(L, arg) != LUA_TNUMBER)
    argument_error(L, arg, name,
                   lua_pushfstring(L, "a number expected, got %s", pgl_describe(L, arg)));
  return lua_tonumber(L, arg);
}

int64_t pgl_integer(lua_State *L, int arg, const char *name, int64_t min, int64_t max) {
  int64_t value = 0;
  const char *problem = integer_range(L, arg, min, max, &value);
  if (problem) argument_error(L, arg, name, problem);
  return value;
}

bool pgl_boolean(lua_State *L, int arg, const char *name) {
  if (lua_type(L, arg) != LUA_TBOOLEAN)
    argument_error(L, arg, name,
                   lua_pushfstring(L, "true or false expected, got %s", pgl_describe(L, arg)));
  return lua_toboolean(L, arg);
}

const char *pgl_bytes(lua_State *L, int arg, const char *name, size_t *size) {
  if (lua_type(L, arg) != LUA_TSTRING)
    argument_error(L, arg, name,
                   lua_pushfstring(L, "a string expected, got %s", pgl_describe(L, arg)));
  return lua_tolstring(L, arg, size);
}

const char *pgl_string(lua_State *L, int arg, const char *name) {
  size_t size;
  const char *text = pgl_bytes(L, arg, name, &size);
  if (strlen(text) != size) argument_error(L, arg, name, "a string without zero bytes expected");
  return text;
}

/* ---- option tables ------------------------------------------------------------------------- */
static void push_keys(lua_State *L, const char *const *keys) {
  luaL_Buffer b;
  luaL_buffinit(L, &b);
  for (size_t i = 0; keys[i]; i++) {
    if (i) luaL_addstring(&b, ", ");
    luaL_addstring(&b, keys[i]);
  }
  luaL_pushresult(&b);
}

void pgl_table(lua_State *L, int index, const char *what, const char *const *keys) {
  index = lua_absindex(L, index);
  if (lua_type(L, index) != LUA_TTABLE)
    luaL_error(L, "%s: a table expected, got %s", what, pgl_describe(L, index));
  lua_pushnil(L);
  while (lua_next(L, index)) {
    lua_pop(L, 1);
    bool known = false;
    if (lua_type(L, -1) == LUA_TSTRING)
      for (size_t i = 0; keys[i] && !known; i++) known = strcmp(keys[i], lua_tostring(L, -1)) == 0;
    if (known) continue;
    push_keys(L, keys);
    const char *allowed = lua_tostring(L, -1);
    lua_pushvalue(L, -2);
    if (lua_type(L, -1) == LUA_TSTRING)
      luaL_error(L, "%s: unknown key '%s'; the keys are %s", what, lua_tostring(L, -1), allowed);
    luaL_error(L, "%s: unknown key %s; the keys are %s", what, pgl_describe(L, -1), allowed);
  }
}

bool pgl_raw(lua_State *L, int index, const char *key) {
  index = lua_absindex(L, index);
  lua_pushstring(L, key);
  if (lua_rawget(L, index) != LUA_TNIL) return true;
  lua_pop(L, 1);
  return false;
}

bool pgl_get_number(lua_State *L, int index, const char *what, const char *key, double *value) {
  if (!pgl_raw(L, index, key)) return false;
  if (lua_type(L, -1) != LUA_TNUMBER)
    luaL_error(L, "%s.%s: a number expected, got %s", what, key, pgl_describe(L, -1));
  *value = lua_tonumber(L, -1);
  lua_pop(L, 1);
  return true;
}

bool pgl_get_integer(lua_State *L, int index, const char *what, const char *key, int64_t min,
                     int64_t max, int64_t *value) {
  if (!pgl_raw(L, index, key)) return false;
  int64_t got = 0;
  const char *problem = integer_range(L, -1, min, max, &got);
  if (problem) luaL_error(L, "%s.%s: %s", what, key, problem);
  *value = got;
  lua_pop(L, 1);
  return true;
}

bool pgl_get_boolean(lua_State *L, int index, const char *what, const char *key, bool *value) {
  if (!pgl_raw(L, index, key)) return false;
  if (lua_type(L, -1) != LUA_TBOOLEAN)
    luaL_error(L, "%s.%s: true or false expected, got %s", what, key, pgl_describe(L, -1));
  *value = lua_toboolean(L, -1);
  lua_pop(L, 1);
  return true;
}

bool pgl_get_string(lua_State *L, int index, const char *what, const char *key,
                    const char **value) {
  if (!pgl_raw(L, index, key)) return false;
  size_t size = 0;
  const char *text = lua_type(L, -1) == LUA_TSTRING ? lua_tolstring(L, -1, &size) : NULL;
  if (!text || strlen(text) != size)
    luaL_error(L, "%s.%s: a string expected, got %s", what, key, pgl_describe(L, -1));
  *value = text;
  lua_pop(L, 1);
  return true;
}

void pgl_need(lua_State *L, bool found, const char *what, const char *key) {
  if (!found) luaL_error(L, "%s.%s is required", what, key);
}

void pgl_set_number(lua_State *L, const char *key, double value) {
  lua_pushnumber(L, value);
  lua_setfield(L, -2, key);
}

void pgl_set_integer(lua_State *L, const char *key, int64_t value) {
  lua_pushinteger(L, value);
  lua_setfield(L, -2, key);
}

void pgl_set_string(lua_State *L, const char *key, const char *value) {
  lua_pushstring(L, value);
  lua_setfield(L, -2, key);
}

void pgl_set_boolean(lua_State *L, const char *key, bool value) {
  lua_pushboolean(L, value);
  lua_setfield(L, -2, key);
}
