/* JSON for Lua values through the core's rules (core/json.h). Objects are tables with string keys,
 * written in sorted order, or first the keys listed in the metatable field __order. Arrays are
 * sequences; an empty table is an object unless core.json.array marked it. */
#include "bind.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PGL_ARRAY "perigee.json.array" /* metatable of marked arrays */

void pgl_json_release(void *value) {
  json_decref(value);
}

/* Where a new value goes: the box of the root, the end of an array, or a key of an object. It is
 * attached as soon as it exists, so that the root's box frees everything after an error. */
typedef struct place {
  void **box;
  json_t *array, *object;
  const char *key;
} place;

static void put(lua_State *L, const place *to, json_t *value) {
  int status = 0;
  if (value && to->box)
    *to->box = value;
  else if (value && to->array)
    status = json_array_append_new(to->array, value);
  else if (value)
    status = json_object_set_new(to->object, to->key, value);
  if (!value || status != 0) luaL_error(L, "json: out of memory");
}

static void build(lua_State *L, const place *to, int depth);

static void build_string(lua_State *L, const place *to) {
  size_t size;
  const char *text = lua_tolstring(L, -1, &size);
  json_t *value = json_stringn(text, size);
  if (!value) luaL_error(L, "json: a string is not valid UTF-8");
  put(L, to, value);
}

/* Length of the table at the top as a sequence; -1 when it has string keys. */
static int64_t sequence_length(lua_State *L) {
  int64_t count = 0, largest = 0, strings = 0;
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    if (lua_type(L, -2) == LUA_TSTRING) {
      strings++;
    } else if (lua_isinteger(L, -2) && lua_tointeger(L, -2) >= 1) {
      count++;
      if (lua_tointeger(L, -2) > largest) largest = lua_tointeger(L, -2);
    } else {
      lua_pushvalue(L, -2);
      luaL_error(L, "json: a table key must be a string or a position from 1, got %s",
                 pgl_describe(L, -1));
    }
  }
  if (strings && count) luaL_error(L, "json: a table has both string keys and positions");
  if (largest != count)
    luaL_error(L, "json: a list of %I elements reaches to position %I", (LUAI_UACINT)count,
               (LUAI_UACINT)largest);
  if (strings) return -1;
  if (count) return count;
  bool array = false;
  if (lua_getmetatable(L, -1)) {
    luaL_getmetatable(L, PGL_ARRAY);
    array = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
  }
  return array ? 0 : -1;
}

static int by_bytes(const void *a, const void *b) {
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Add the member `key` of the table at the top unless it is absent or already there. */
static void build_member(lua_State *L, json_t *object, const char *key, int depth) {
  if (json_object_get(object, key)) return;
  if (pgl_raw(L, -1, key)) {
    place to = {.object = object, .key = key};
    build(L, &to, depth + 1);
    lua_pop(L, 1);
  }
}

static void build_object(lua_State *L, json_t *object, int depth) {
  size_t count = 0;
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) count++;
  const char **keys = lua_newuserdatauv(L, sizeof *keys * count + 1, 0);
  lua_insert(L, -2); /* below the table, which keeps the strings */
  count = 0;
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    size_t size;
    keys[count] = lua_tolstring(L, -2, &size);
    json_t *check = json_stringn(keys[count], size);
    json_decref(check);
    if (!check || strlen(keys[count]) != size)
      luaL_error(L, "json: a key is not valid UTF-8 without zero bytes");
    count++;
  }
  qsort(keys, count, sizeof *keys, by_bytes);
  const int type = luaL_getmetafield(L, -1, "__order"); /* pushes nothing when absent */
  if (type == LUA_TTABLE) {
    const int order = lua_gettop(L), table = order - 1;
    for (int64_t i = 1; i <= (int64_t)lua_rawlen(L, order); i++) {
      if (lua_rawgeti(L, order, i) == LUA_TSTRING) {
        lua_pushvalue(L, table);
        build_member(L, object, lua_tostring(L, -2), depth);
        lua_pop(L, 1);
      }
      lua_pop(L, 1);
    }
  }
  if (type != LUA_TNIL) lua_pop(L, 1);
  for (size_t i = 0; i < count; i++) build_member(L, object, keys[i], depth);
  lua_remove(L, -2);
}

static void build_table(lua_State *L, const place *to, int depth) {
  if (depth > PG_JSON_DEPTH)
    luaL_error(L, "json: tables nested deeper than %d levels (or one that contains itself)",
               PG_JSON_DEPTH);
  luaL_checkstack(L, 12, "json");
  const int64_t length = sequence_length(L);
  json_t *value = length < 0 ? json_object() : json_array();
  put(L, to, value);
  if (length < 0) {
    build_object(L, value, depth);
    return;
  }
  for (int64_t i = 1; i <= length; i++) {
    place element = {.array = value};
    lua_rawgeti(L, -1, i);
    build(L, &element, depth + 1);
    lua_pop(L, 1);
  }
}

/* The value at the top, which stays. */
static void build(lua_State *L, const place *to, int depth) {
  switch (lua_type(L, -1)) {
  case LUA_TNIL: put(L, to, json_null()); break;
  case LUA_TBOOLEAN: put(L, to, json_boolean(lua_toboolean(L, -1))); break;
  case LUA_TNUMBER:
    if (lua_isinteger(L, -1)) {
      put(L, to, json_integer(lua_tointeger(L, -1)));
    } else {
      if (!isfinite(lua_tonumber(L, -1)))
        luaL_error(L, "json: %f is not finite; JSON has no such number", lua_tonumber(L, -1));
      put(L, to, json_real(lua_tonumber(L, -1)));
    }
    break;
  case LUA_TSTRING: build_string(L, to); break;
  case LUA_TTABLE: build_table(L, to, depth); break;
  case LUA_TLIGHTUSERDATA:
    if (!lua_touserdata(L, -1)) {
      put(L, to, json_null());
      break;
    } /* fall through */
  default: luaL_error(L, "json: %s has no JSON form", pgl_describe(L, -1));
  }
}

void pgl_json_build(lua_State *L, int index, void **box) {
  place root = {.box = box};
  lua_pushvalue(L, index);
  build(L, &root, 1);
  lua_pop(L, 1);
}

void pgl_json_push(lua_State *L, const json_t *value) {
  luaL_checkstack(L, 4, "json");
  switch (json_typeof(value)) {
  case JSON_OBJECT: {
    json_t *members = (json_t *)value; /* iteration takes no const */
    lua_createtable(L, 0, (int)json_object_size(value));
    for (void *at = json_object_iter(members); at; at = json_object_iter_next(members, at)) {
      pgl_json_push(L, json_object_iter_value(at));
      lua_setfield(L, -2, json_object_iter_key(at));
    }
    break;
  }
  case JSON_ARRAY:
    lua_createtable(L, (int)json_array_size(value), 0);
    for (size_t i = 0; i < json_array_size(value); i++) {
      pgl_json_push(L, json_array_get(value, i));
      lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    if (json_array_size(value) == 0) luaL_setmetatable(L, PGL_ARRAY);
    break;
  case JSON_STRING: lua_pushlstring(L, json_string_value(value), json_string_length(value)); break;
  case JSON_INTEGER: lua_pushinteger(L, json_integer_value(value)); break;
  case JSON_REAL: lua_pushnumber(L, json_real_value(value)); break;
  case JSON_TRUE: lua_pushboolean(L, true); break;
  case JSON_FALSE: lua_pushboolean(L, false); break;
  case JSON_NULL: lua_pushlightuserdata(L, NULL); break;
  }
}

/* core.json.encode(value [, indent]) */
static int json_encode(lua_State *L) {
  luaL_checkany(L, 1);
  const int indent = lua_isnoneornil(L, 2) ? 0 : (int)pgl_integer(L, 2, "indent", 0, 16);
  lua_settop(L, 1);
  void **root = pgl_own(L, pgl_json_release), **text = pgl_own(L, free);
  pgl_json_build(L, 1, root);
  if (!(*text = pg__json_print(*root, indent))) return luaL_error(L, "json: out of memory");
  pgl_disown(root);
  lua_pushstring(L, *text);
  pgl_disown(text);
  return 1;
}

/* core.json.decode(text) -> value, or nil, text, name */
static int json_decode(lua_State *L) {
  size_t size;
  struct pg_context scratch;
  json_t *value = NULL;
  const char *text = pgl_bytes(L, 1, "text", &size);
  void **box = pgl_own(L, pgl_json_release);
  pgl_scratch(&scratch);
  int status = pg__json_parse_text(&scratch, text, size, "JSON text", &value);
  if (status < 0) return pgl_fail(L, &scratch, status);
  *box = value;
  pgl_json_push(L, value);
  pgl_disown(box);
  return 1;
}

/* core.json.array(t): mark t so that it is written as an array even when it is empty */
static int json_mark_array(lua_State *L) {
  lua_settop(L, 1);
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_setmetatable(L, PGL_ARRAY);
  return 1;
}

static const luaL_Reg functions[] = {
    {"encode", json_encode}, {"decode", json_decode}, {"array", json_mark_array}, {NULL, NULL}};

void pgl_open_json(lua_State *L) {
  luaL_newmetatable(L, PGL_ARRAY);
  lua_pop(L, 1);
  luaL_newlib(L, functions);
  lua_pushlightuserdata(L, NULL);
  lua_setfield(L, -2, "null");
  lua_setfield(L, -2, "json");
}
