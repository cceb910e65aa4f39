/* metrics.jsonl: one line per call of write. */
#include "bind.h"
#include <stdlib.h>

static void release_metrics(pgl_object *o) {
  pg_metrics_close(o->resource);
}

const pgl_kind pgl_metrics_kind = {"perigee.metrics", "metrics file", 0, release_metrics};

/* core.metrics(ctx, path) */
static int metrics_open(lua_State *L) {
  pgl_object *context = pgl_check(L, 1, &pgl_context_kind);
  const char *path = pgl_string(L, 2, "path");
  pgl_object *o = pgl_new(L, &pgl_metrics_kind, context);
  pg_metrics *m = NULL;
  int status = pg_metrics_open(context->resource, path, &m);
  if (status < 0) return pgl_fail(L, context->resource, status);
  o->resource = m;
  return 1;
}

/* Replace tables among the fields' values by their JSON text in `texts`, so that nothing that can
 * raise is left once the line is begun. Both are stack indices. */
static void check_fields(lua_State *L, int list, int texts) {
  for (int64_t i = 1; i <= (int64_t)lua_rawlen(L, list); i++) {
    if (lua_rawgeti(L, list, i) != LUA_TTABLE || lua_rawgeti(L, -1, 1) != LUA_TSTRING)
      luaL_error(L, "write: entry %I must be {name, value} with a string as name", (LUAI_UACINT)i);
    const char *name = lua_tostring(L, -1);
    switch (lua_rawgeti(L, -2, 2)) {
    case LUA_TNUMBER:
    case LUA_TSTRING:
    case LUA_TBOOLEAN: break;
    case LUA_TTABLE:
    case LUA_TLIGHTUSERDATA: {
      void **root = pgl_own(L, pgl_json_release), **text = pgl_own(L, free);
      pgl_json_build(L, -3, root);
      if (!(*text = pg__json_print(*root, 0))) luaL_error(L, "write: out of memory");
      lua_pushstring(L, *text);
      lua_rawseti(L, texts, i);
      lua_closeslot(L, -1); /* lua_pop alone can crash Lua 5.4.4 on a slot that it closes */
      lua_closeslot(L, -2);
      lua_pop(L, 2);
      break;
    }
    default:
      luaL_error(L, "write: '%s' must be a number, string, boolean or table, got %s", name,
                 pgl_describe(L, -1));
    }
    lua_pop(L, 3);
  }
}

/* Add field i of the list; its name and value are at the top. */
static int add_field(lua_State *L, pg_metrics *m, int texts, int64_t i) {
  const char *name = lua_tostring(L, -2);
  size_t size;
  int status;
  switch (lua_type(L, -1)) {
  case LUA_TNUMBER:
    if (lua_isinteger(L, -1)) return pg_metrics_integer(m, name, lua_tointeger(L, -1));
    return pg_metrics_real(m, name, lua_tonumber(L, -1));
  case LUA_TSTRING: {
    const char *text = lua_tolstring(L, -1, &size);
    return pg_metrics_string(m, name, text, size);
  }
  case LUA_TBOOLEAN: return pg_metrics_json(m, name, lua_toboolean(L, -1) ? "true" : "false");
  default:
    lua_rawgeti(L, texts, i);
    status = pg_metrics_json(m, name, lua_tostring(L, -1));
    lua_pop(L, 1);
    return status;
  }
}

/* metrics:write{ {name, value}, ... } */
static int metrics_write(lua_State *L) {
  luaL_checktype(L, 2, LUA_TTABLE);
  lua_settop(L, 2);
  lua_newtable(L);
  check_fields(L, 2, 3);
  pgl_object *o = pgl_check(L, 1, &pgl_metrics_kind);
  int status = 0;
  for (int64_t i = 1; status == 0 && i <= (int64_t)lua_rawlen(L, 2); i++) {
    lua_rawgeti(L, 2, i);
    lua_rawgeti(L, -1, 1);
    lua_rawgeti(L, -2, 2);
    status = add_field(L, o->resource, 3, i);
    lua_pop(L, 3);
  }
  if (status == 0) status = pg_metrics_flush(o->resource);
  if (status < 0) return pgl_fail(L, pgl_context(o), status);
  lua_pushboolean(L, true);
  return 1;
}

static const luaL_Reg methods[] = {{"write", metrics_write}, {NULL, NULL}};
static const luaL_Reg functions[] = {{"metrics", metrics_open}, {NULL, NULL}};

void pgl_open_metrics(lua_State *L) {
  pgl_define(L, &pgl_metrics_kind, methods);
  luaL_setfuncs(L, functions, 0);
}
