/* Tensors in files: safetensors, which hold several by name, and NumPy's .npy. */
#include "../../core/numbers.h"
#include "bind.h"
#include <string.h>

static void release_safetensors(void *file) {
  pg_safetensors_close(file);
}

/* core.load_tensor(ctx, path, name): floats become F32, integers I32. */
static int tensor_load(lua_State *L) {
  pgl_object *context = pgl_check(L, 1, &pgl_context_kind);
  pg_context *ctx = context->resource;
  const char *path = pgl_string(L, 2, "path"), *name = pgl_string(L, 3, "name");
  void **box = pgl_own(L, release_safetensors);
  pgl_tensor *t = pgl_push_tensor(L);
  pgl_check_open(L, context, "context");
  pgl_tensor_bind(t, context, NULL);
  pg_safetensors *file = NULL;
  int status = pg_safetensors_open(ctx, path, &file);
  if (status < 0) return pgl_fail(L, ctx, status);
  *box = file;
  const pg_safetensors_entry *e = pg_safetensors_find(file, name);
  if (!e)
    status = pg_fail(ctx, PG_ENOENT, "%s holds no tensor '%s'", path, name);
  else if (e->ndim > PG_MAX_DIMS)
    status = pg_fail(ctx, PG_EUNSUPPORTED, "%s: '%s' has %d dimensions, at most %d are supported",
                     path, name, e->ndim, PG_MAX_DIMS);
  if (status == 0)
    status = pg_tensor_new(ctx, pg__number_is_integer(pg__number_named(e->dtype)) ? PG_I32 : PG_F32,
                           e->ndim, e->shape, &t->tensor);
  if (status == 0) status = pg_safetensors_read_tensor(file, name, t->tensor);
  pgl_disown(box);
  if (status < 0) return pgl_fail(L, ctx, status);
  pgl_tensor_made(L, t);
  return 1;
}

/* core.tensors(ctx, path) -> list of { name, dtype, shape } in file order */
static int tensor_list(lua_State *L) {
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  const char *path = pgl_string(L, 2, "path");
  void **box = pgl_own(L, release_safetensors);
  pg_safetensors *file = NULL;
  int status = pg_safetensors_open(ctx, path, &file);
  if (status < 0) return pgl_fail(L, ctx, status);
  *box = file;
  lua_newtable(L);
  for (size_t i = 0; i < pg_safetensors_count(file); i++) {
    const pg_safetensors_entry *e = pg_safetensors_at(file, i);
    lua_createtable(L, 0, 3);
    pgl_set_string(L, "name", e->name);
    pgl_set_string(L, "dtype", e->dtype);
    lua_createtable(L, e->ndim, 0);
    for (int k = 0; k < e->ndim; k++) {
      lua_pushinteger(L, e->shape[k]);
      lua_rawseti(L, -2, k + 1);
    }
    lua_setfield(L, -2, "shape");
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  pgl_disown(box);
  return 1;
}

pg_named_tensor *pgl_named_tensors(lua_State *L, int index, const char *what, size_t *count) {
  luaL_checktype(L, index, LUA_TTABLE);
  *count = (size_t)lua_rawlen(L, index);
  pg_named_tensor *list = lua_newuserdatauv(L, sizeof *list * *count + 1, 0);
  luaL_checkstack(L, 8, NULL);
  for (size_t i = 0; i < *count; i++) {
    if (lua_rawgeti(L, index, (lua_Integer)i + 1) != LUA_TTABLE)
      luaL_error(L, "%s: entry %I must be a table {name, tensor}, got %s", what, (LUAI_UACINT)i + 1,
                 pgl_describe(L, -1));
    if (lua_rawgeti(L, -1, 1) != LUA_TSTRING)
      luaL_error(L, "%s: the name of entry %I must be a string, got %s", what, (LUAI_UACINT)i + 1,
                 pgl_describe(L, -1));
    const char *name = lua_tostring(L, -1);
    lua_rawgeti(L, -2, 2);
    pgl_tensor *t = pgl_test_tensor(L, -1);
    if (!t) luaL_error(L, "%s: '%s' must be a tensor, got %s", what, name, pgl_describe(L, -1));
    list[i] = (pg_named_tensor){.name = name, .tensor = t->tensor};
    lua_pop(L, 3);
  }
  return list;
}

/* core.save_tensors(ctx, path, { {name, tensor}, ... }, { key = text }) */
static int tensor_save(lua_State *L) {
  pgl_object *context = pgl_check(L, 1, &pgl_context_kind);
  const char *path = pgl_string(L, 2, "path");
  luaL_checktype(L, 3, LUA_TTABLE);
  lua_settop(L, 4);
  const char **metadata = NULL;
  if (!lua_isnil(L, 4)) {
    size_t n = 0;
    luaL_checktype(L, 4, LUA_TTABLE);
    for (lua_pushnil(L); lua_next(L, 4); lua_pop(L, 1)) n++;
    metadata = lua_newuserdatauv(L, sizeof *metadata * (2 * n + 1), 0);
    n = 0;
    for (lua_pushnil(L); lua_next(L, 4); lua_pop(L, 1)) {
      if (lua_type(L, -2) != LUA_TSTRING || lua_type(L, -1) != LUA_TSTRING)
        return luaL_error(L, "save_tensors: metadata keys and values must be strings");
      metadata[n++] = lua_tostring(L, -2);
      metadata[n++] = lua_tostring(L, -1);
    }
    metadata[n] = NULL;
  }
  /* Last, since nothing may run finalisers while the list holds plain pointers. */
  size_t count;
  const pg_named_tensor *list = pgl_named_tensors(L, 3, "save_tensors", &count);
  int status = pg_safetensors_write(context->resource, path, list, count, metadata);
  if (status < 0) return pgl_fail(L, context->resource, status);
  lua_pushboolean(L, true);
  return 1;
}

/* core.save_tensor(t, path): alone, by the name "tensor" */
static int tensor_save_one(lua_State *L) {
  const char *path = pgl_string(L, 2, "path");
  pgl_tensor *t = pgl_check_tensor(L, 1);
  pg_context *ctx = pgl_context(t->context);
  const pg_named_tensor item = {.name = "tensor", .tensor = t->tensor};
  int status = pg_safetensors_write(ctx, path, &item, 1, NULL);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_pushboolean(L, true);
  return 1;
}

/* core.load_npy(ctx, path) */
static int npy_load(lua_State *L) {
  pgl_object *context = pgl_check(L, 1, &pgl_context_kind);
  const char *path = pgl_string(L, 2, "path");
  pgl_tensor *t = pgl_push_tensor(L);
  pgl_check_open(L, context, "context");
  pgl_tensor_bind(t, context, NULL);
  int status = pg_npy_read(context->resource, path, &t->tensor);
  if (status < 0) return pgl_fail(L, context->resource, status);
  pgl_tensor_made(L, t);
  return 1;
}

/* core.save_npy(t, path) */
static int npy_save(lua_State *L) {
  const char *path = pgl_string(L, 2, "path");
  pgl_tensor *t = pgl_check_tensor(L, 1);
  pg_context *ctx = pgl_context(t->context);
  int status = pg_npy_write(ctx, path, t->tensor);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_pushboolean(L, true);
  return 1;
}

static const luaL_Reg functions[] = {{"load_tensor", tensor_load},
                                     {"tensors", tensor_list},
                                     {"save_tensors", tensor_save},
                                     {"save_tensor", tensor_save_one},
                                     {"load_npy", npy_load},
                                     {"save_npy", npy_save},
                                     {NULL, NULL}};

void pgl_tensor_files(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
}
