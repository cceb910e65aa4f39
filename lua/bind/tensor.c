/* Tensors: the userdata, constructors, files, and element access. Arithmetic is in
 * tensor_methods.c. Rows and columns count from 1. */
#include "bind.h"
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What one tensor costs beside its elements: structs and allocator overhead, bytes. */
#define TENSOR_OVERHEAD 512

pgl_tensor *pgl_push_tensor(lua_State *L) {
  pgl_tensor *t = lua_newuserdatauv(L, sizeof *t, 0);
  memset(t, 0, sizeof *t);
  luaL_setmetatable(L, PGL_TENSOR);
  return t;
}

void pgl_tensor_bind(pgl_tensor *t, pgl_object *context, pgl_object *owner) {
  pgl_hold(context);
  t->context = context;
  if (owner) pgl_watch(owner);
  t->owner = owner;
}

static void tensor_release(pgl_tensor *t) {
  pgl_object *context = t->context, *owner = t->owner;
  pg_tensor_free(t->tensor);
  memset(t, 0, sizeof *t);
  if (owner) pgl_unwatch(owner);
  if (context) pgl_drop(context);
}

/* Lua sees 24 bytes where a tensor may be 100 MB. When the tensors made since the last time pass
 * a limit, the collector advances as if that memory had been Lua's own. The count is per thread
 * because the limit is a matter of pace only. */
static _Thread_local int64_t pressure;
void pgl_tensor_made(lua_State *L, const pgl_tensor *t) {
  const int64_t bytes = pg_tensor_elements(t->tensor) * (int64_t)pg_dtype_size(t->tensor->dtype);
  const int64_t limit = 8 << 20;
  pressure += bytes + TENSOR_OVERHEAD;
  if (pressure < limit + pg_context_bytes(pgl_context(t->context)) / 8) return;
  if (!lua_gc(L, LUA_GCISRUNNING)) return;
  const int64_t kilobytes = pg__min(pressure / 1024, INT_MAX / 1024);
  pressure = 0;
  lua_gc(L, LUA_GCSTEP, (int)kilobytes);
}

/* Where allocating waits for the device, an update of Lua optimizers starts with the memory that
 * the one before had, so that it takes nothing new. Collecting costs the host some milliseconds,
 * during which the device works on what the update queued. */
void pgl_tensors_begin(void) {
  pressure = 0;
}
void pgl_tensors_end(lua_State *L, const pg_context *ctx) {
  if (strcmp(pg_context_device(ctx), "cpu") != 0 && lua_gc(L, LUA_GCISRUNNING))
    lua_gc(L, LUA_GCCOLLECT);
}

pgl_tensor *pgl_check_tensor(lua_State *L, int arg) {
  pgl_tensor *t = luaL_checkudata(L, arg, PGL_TENSOR);
  if (!t->tensor) luaL_error(L, "this tensor is closed");
  if (t->tensor->storage->recalled)
    luaL_error(L, "this tensor was lent for one call of an optimizer, which is over");
  pgl_check_open(L, t->context, "tensor");
  if (t->owner) pgl_check_open(L, t->owner, "tensor");
  return t;
}

pgl_tensor *pgl_test_tensor(lua_State *L, int arg) {
  return luaL_testudata(L, arg, PGL_TENSOR) ? pgl_check_tensor(L, arg) : NULL;
}

int pgl_push_view(lua_State *L, const pg_tensor *t, pgl_object *context, pgl_object *owner) {
  if (!t) {
    lua_pushnil(L);
    return 1;
  }
  pgl_tensor *view = pgl_push_tensor(L);
  pgl_tensor_bind(view, context, owner);
  int status = pg_tensor_view(t, 0, t->ndim, t->shape, t->stride, &view->tensor);
  return status < 0 ? luaL_error(L, "%s", pg_context_message(t->context)) : 1;
}

const char *pgl_push_shape(lua_State *L, const pg_tensor *t) {
  char text[PG_MAX_DIMS * 24 + 4] = "[", *at = text + 1;
  for (int i = 0; i < t->ndim; i++)
    at += sprintf(at, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
  strcpy(at, "]");
  return lua_pushstring(L, text);
}

int pgl_tensor_close(lua_State *L) {
  tensor_release(luaL_checkudata(L, 1, PGL_TENSOR));
  return 0;
}

static int tensor_tostring(lua_State *L) {
  pgl_tensor *t = luaL_checkudata(L, 1, PGL_TENSOR);
  if (!t->tensor)
    lua_pushstring(L, "tensor (closed)");
  else
    lua_pushfstring(L, "tensor %s %s", pg_dtype_name(t->tensor->dtype),
                    pgl_push_shape(L, t->tensor));
  return 1;
}

/* ---- constructors -------------------------------------------------------------------------- */
/* core.zeros(ctx, size...) */
static int tensor_zeros(lua_State *L) {
  pgl_object *context = pgl_check(L, 1, &pgl_context_kind);
  const int ndim = lua_gettop(L) - 1;
  int64_t shape[PG_MAX_DIMS];
  if (ndim > PG_MAX_DIMS)
    return luaL_error(L, "zeros: at most %d sizes, got %d", PG_MAX_DIMS, ndim);
  for (int i = 0; i < ndim; i++) shape[i] = pgl_integer(L, i + 2, "size", 0, INT64_MAX);
  pgl_tensor *t = pgl_push_tensor(L);
  pgl_check_open(L, context, "context");
  pgl_tensor_bind(t, context, NULL);
  int status = pg_tensor_new(context->resource, PG_F32, ndim, shape, &t->tensor);
  if (status < 0) return pgl_fail(L, context->resource, status);
  pgl_tensor_made(L, t);
  return 1;
}

/* Shape of a nested table along its first elements; every level must be a table or a number. */
static int nested_shape(lua_State *L, int index, int64_t shape[PG_MAX_DIMS]) {
  int ndim = 0;
  lua_pushvalue(L, index);
  while (lua_type(L, -1) == LUA_TTABLE) {
    if (ndim == PG_MAX_DIMS)
      luaL_error(L, "tensor: tables nested deeper than %d levels", PG_MAX_DIMS);
    shape[ndim] = (int64_t)lua_rawlen(L, -1);
    if (shape[ndim++] == 0) break;
    lua_rawgeti(L, -1, 1);
    lua_remove(L, -2);
  }
  lua_pop(L, 1);
  return ndim;
}

/* Copy level `level` of the table at the top into *out, advancing it. */
static void nested_read(lua_State *L, int level, int ndim, const int64_t *shape, float **out) {
  if (level == ndim) {
    if (lua_type(L, -1) != LUA_TNUMBER)
      luaL_error(L, "tensor: a number expected in the table, got %s", pgl_describe(L, -1));
    *(*out)++ = (float)lua_tonumber(L, -1);
    return;
  }
  if (lua_type(L, -1) != LUA_TTABLE)
    luaL_error(L, "tensor: a table of %I elements expected at level %d, got %s",
               (LUAI_UACINT)shape[level], level + 1, pgl_describe(L, -1));
  if ((int64_t)lua_rawlen(L, -1) != shape[level])
    luaL_error(L, "tensor: tables at level %d have %I and %I elements", level + 1,
               (LUAI_UACINT)shape[level], (LUAI_UACINT)lua_rawlen(L, -1));
  for (int64_t i = 1; i <= shape[level]; i++) {
    lua_rawgeti(L, -1, i);
    nested_read(L, level + 1, ndim, shape, out);
    lua_pop(L, 1);
  }
}

/* core.tensor(ctx, nested table or number) */
static int tensor_from_table(lua_State *L) {
  pgl_object *context = pgl_check(L, 1, &pgl_context_kind);
  int64_t shape[PG_MAX_DIMS], elements = 1;
  lua_settop(L, 2);
  if (lua_type(L, 2) != LUA_TTABLE && lua_type(L, 2) != LUA_TNUMBER)
    return luaL_error(L, "tensor: a table or a number expected, got %s", pgl_describe(L, 2));
  const int ndim = nested_shape(L, 2, shape);
  for (int i = 0; i < ndim; i++) {
    /* Nested tables may share rows, so a small table can ask for a very large tensor. */
    if (shape[i] && elements > ((int64_t)1 << 32) / shape[i])
      return luaL_error(L, "tensor: more than 2^32 elements in a table");
    elements *= shape[i];
  }
  float *values = lua_newuserdatauv(L, sizeof(float) * (size_t)elements + 1, 0), *end = values;
  lua_pushvalue(L, 2);
  nested_read(L, 0, ndim, shape, &end);
  lua_pop(L, 1);

  pgl_tensor *t = pgl_push_tensor(L);
  pgl_check_open(L, context, "context");
  pgl_tensor_bind(t, context, NULL);
  int status = pg_tensor_new(context->resource, PG_F32, ndim, shape, &t->tensor);
  if (status == 0 && elements) status = pg_tensor_write(t->tensor, values);
  if (status < 0) return pgl_fail(L, context->resource, status);
  pgl_tensor_made(L, t);
  return 1;
}

/* ---- files --------------------------------------------------------------------------------- */
static void release_safetensors(void *file) {
  pg_safetensors_close(file);
}

/* core.load_tensor(ctx, path, name): 16-bit floats and F64 become F32. */
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
    status = pg_tensor_new(ctx, strcmp(e->dtype, "I32") == 0 ? PG_I32 : PG_F32, e->ndim, e->shape,
                           &t->tensor);
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
  const size_t count = (size_t)lua_rawlen(L, 3);
  pg_named_tensor *list = lua_newuserdatauv(L, sizeof *list * count + 1, 0);
  luaL_checkstack(L, 8, NULL);
  for (size_t i = 0; i < count; i++) {
    if (lua_rawgeti(L, 3, (lua_Integer)i + 1) != LUA_TTABLE)
      return luaL_error(L, "save_tensors: entry %I must be a table {name, tensor}, got %s",
                        (LUAI_UACINT)i + 1, pgl_describe(L, -1));
    if (lua_rawgeti(L, -1, 1) != LUA_TSTRING)
      return luaL_error(L, "save_tensors: the name of entry %I must be a string, got %s",
                        (LUAI_UACINT)i + 1, pgl_describe(L, -1));
    const char *name = lua_tostring(L, -1);
    lua_rawgeti(L, -2, 2);
    pgl_tensor *t = pgl_test_tensor(L, -1);
    if (!t)
      return luaL_error(L, "save_tensors: '%s' must be a tensor, got %s", name,
                        pgl_describe(L, -1));
    list[i] = (pg_named_tensor){.name = name, .tensor = t->tensor};
    lua_pop(L, 3);
  }
  int status = pg_safetensors_write(context->resource, path, list, count, metadata);
  if (status < 0) return pgl_fail(L, context->resource, status);
  lua_pushboolean(L, true);
  return 1;
}

static const luaL_Reg meta[] = {{"__gc", pgl_tensor_close},
                                {"__close", pgl_tensor_close},
                                {"__tostring", tensor_tostring},
                                {NULL, NULL}};
static const luaL_Reg functions[] = {{"zeros", tensor_zeros},       {"tensor", tensor_from_table},
                                     {"load_tensor", tensor_load},  {"tensors", tensor_list},
                                     {"save_tensors", tensor_save}, {NULL, NULL}};

void pgl_open_tensor(lua_State *L) {
  luaL_newmetatable(L, PGL_TENSOR);
  luaL_setfuncs(L, meta, 0);
  pgl_tensor_methods(L);
  lua_pop(L, 1);
  luaL_setfuncs(L, functions, 0);
  lua_getfield(L, LUA_REGISTRYINDEX, PGL_TENSOR_METHODS);
  lua_setfield(L, -2, "tensor_methods");
}
