/* Tensors: the userdata and constructors. Arithmetic is in tensor_methods.c, element access in
 * tensor_access.c. Rows and columns count from 1. */
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
  pgl_scale_never(t);
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
void pgl_tensors_begin(pg_context *ctx) {
  pressure = 0;
  ctx->keep_spares = strcmp(pg_context_device(ctx), "cpu") == 0;
}
void pgl_tensors_end(lua_State *L, const pg_context *ctx) {
  if (strcmp(pg_context_device(ctx), "cpu") != 0 && lua_gc(L, LUA_GCISRUNNING))
    lua_gc(L, LUA_GCCOLLECT);
}

pgl_tensor *pgl_check_multiple(lua_State *L, int arg) {
  pgl_tensor *t = luaL_checkudata(L, arg, PGL_TENSOR);
  if (!t->tensor) luaL_error(L, "this tensor is closed");
  if (t->tensor->storage->recalled)
    luaL_error(L, "this tensor was lent for one call of an optimizer, which is over");
  pgl_check_open(L, t->context, "tensor");
  if (t->owner) pgl_check_open(L, t->owner, "tensor");
  return t;
}

pgl_tensor *pgl_check_tensor(lua_State *L, int arg) {
  pgl_tensor *t = pgl_check_multiple(L, arg);
  if (t->tensor->storage->scaled) pgl_scale_now(L, t->tensor->storage->scaled);
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

/* A nested table being read: where in it, from 1, and where the next number goes. */
typedef struct nested {
  int ndim;
  int64_t shape[PG_MAX_DIMS], at[PG_MAX_DIMS];
  float *out;
} nested;

/* "[2][1]": the place at `level`, pushed. */
static const char *push_place(lua_State *L, const nested *n, int level) {
  lua_pushstring(L, level ? "" : "the table");
  for (int i = 0; i < level; i++) {
    lua_pushfstring(L, "[%I]", (LUAI_UACINT)n->at[i]);
    lua_concat(L, 2);
  }
  return lua_tostring(L, -1);
}

/* Copy level `level` of the table at the top. */
static void nested_read(lua_State *L, int level, nested *n) {
  if (level == n->ndim) {
    if (lua_type(L, -1) != LUA_TNUMBER) {
      const char *got = pgl_describe(L, -1);
      luaL_error(L, "tensor: %s: a number expected, got %s", push_place(L, n, level), got);
    }
    *n->out++ = (float)lua_tonumber(L, -1);
    return;
  }
  const int64_t size = n->shape[level];
  if (lua_type(L, -1) != LUA_TTABLE) {
    const char *got = pgl_describe(L, -1);
    luaL_error(L, "tensor: %s: a table of %I elements expected, got %s", push_place(L, n, level),
               (LUAI_UACINT)size, got);
  }
  if ((int64_t)lua_rawlen(L, -1) != size) {
    const int64_t own = (int64_t)lua_rawlen(L, -1);
    luaL_error(L, "tensor: %s has %I elements, the tables before it at its level have %I",
               push_place(L, n, level), (LUAI_UACINT)own, (LUAI_UACINT)size);
  }
  for (int64_t i = 1; i <= size; i++) {
    n->at[level] = i;
    lua_rawgeti(L, -1, i);
    nested_read(L, level + 1, n);
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
  float *values = lua_newuserdatauv(L, sizeof(float) * (size_t)elements + 1, 0);
  nested n = {.ndim = ndim, .out = values};
  memcpy(n.shape, shape, sizeof(int64_t) * (size_t)ndim);
  lua_pushvalue(L, 2);
  nested_read(L, 0, &n);
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

static const luaL_Reg meta[] = {{"__gc", pgl_tensor_close},
                                {"__close", pgl_tensor_close},
                                {"__tostring", tensor_tostring},
                                {NULL, NULL}};
static const luaL_Reg functions[] = {
    {"zeros", tensor_zeros}, {"tensor", tensor_from_table}, {NULL, NULL}};

void pgl_open_tensor(lua_State *L) {
  luaL_newmetatable(L, PGL_TENSOR);
  luaL_setfuncs(L, meta, 0);
  pgl_tensor_methods(L);
  lua_pop(L, 1);
  luaL_setfuncs(L, functions, 0);
  pgl_tensor_files(L);
  pgl_tensor_order(L);
  lua_getfield(L, LUA_REGISTRYINDEX, PGL_TENSOR_METHODS);
  lua_setfield(L, -2, "tensor_methods");
}
