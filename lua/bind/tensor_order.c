/* What lua/perigee/tensors.lua builds methods from: sorting, gathering rows, random numbers, and
 * new tensors beside one. */
#include "bind.h"

/* core.sort(t, k, descending) -> values, indices from 1: the first k of each row, or of a vector */
static int order_sort(lua_State *L) {
  const int64_t k = pgl_integer(L, 2, "k", 0, INT64_MAX);
  const bool descending = pgl_boolean(L, 3, "descending");
  pgl_tensor *values = pgl_push_tensor(L), *indices = pgl_push_tensor(L);
  pgl_tensor *t = pgl_check_tensor(L, 1);
  pg_context *ctx = pgl_context(t->context);
  pgl_tensor_bind(values, t->context, NULL);
  pgl_tensor_bind(indices, t->context, NULL);
  int status = pg_tensor_sort(t->tensor, k, descending, &values->tensor, &indices->tensor);
  if (status == 0)
    status = pg_tensor_scalar("add", indices->tensor, 1, false, indices->tensor, NULL);
  if (status < 0) return luaL_error(L, "%s", pg_context_message(ctx));
  pgl_tensor_made(L, values);
  pgl_tensor_made(L, indices);
  return 2;
}

/* core.gather_rows(t, list): rows (elements of a vector) by a list of indices from 1, negative ones
 * from the end */
static int order_gather_rows(lua_State *L) {
  lua_settop(L, 2);
  luaL_checktype(L, 2, LUA_TTABLE);
  const int64_t n = (int64_t)lua_rawlen(L, 2);
  pg_tensor *t = pgl_check_tensor(L, 1)->tensor;
  const int64_t size = t->ndim ? t->shape[0] : 0;
  int32_t *rows = lua_newuserdatauv(L, sizeof *rows * (size_t)n + 1, 0);
  for (int64_t i = 0; i < n; i++) {
    int exact = 0;
    lua_rawgeti(L, 2, i + 1);
    const int64_t row = lua_tointegerx(L, -1, &exact);
    if (lua_type(L, -1) != LUA_TNUMBER || !exact || row == 0 || row > size || row < -size ||
        row > INT32_MAX)
      return luaL_error(L,
                        "index_select: entry %I is %s; indices from 1 to %I are allowed, or "
                        "from -%I on from the end",
                        (LUAI_UACINT)i + 1, pgl_describe(L, -1), (LUAI_UACINT)size,
                        (LUAI_UACINT)size);
    rows[i] = (int32_t)(row < 0 ? row + size : row - 1);
    lua_pop(L, 1);
  }
  pgl_tensor *r = pgl_push_tensor(L), *a = pgl_check_tensor(L, 1);
  pgl_tensor_bind(r, a->context, NULL);
  if (pg_tensor_gather_rows(a->tensor, rows, n, &r->tensor) < 0)
    return luaL_error(L, "%s", pg_context_message(pgl_context(a->context)));
  pgl_tensor_made(L, r);
  return 1;
}

/* core.fill_random(t, normal, seed, stream, first, a, b): see pg_tensor_random */
static int order_fill_random(lua_State *L) {
  const bool normal = pgl_boolean(L, 2, "normal");
  const uint64_t seed = (uint64_t)pgl_integer(L, 3, "seed", INT64_MIN, INT64_MAX);
  const uint64_t stream = (uint64_t)pgl_integer(L, 4, "stream", INT64_MIN, INT64_MAX);
  const uint64_t first = (uint64_t)pgl_integer(L, 5, "first", 0, INT64_MAX);
  const double a = pgl_number(L, 6, "a"), b = pgl_number(L, 7, "b");
  pgl_tensor *t = pgl_check_tensor(L, 1);
  if (pg_tensor_random(t->tensor, normal, seed, stream, first, a, b) < 0)
    return luaL_error(L, "%s", pg_context_message(pgl_context(t->context)));
  lua_settop(L, 1);
  return 1;
}

/* t:new_zeros(sizes): in t's context */
static int order_new_zeros(lua_State *L) {
  const int ndim = lua_gettop(L) - 1;
  int64_t shape[PG_MAX_DIMS];
  if (ndim > PG_MAX_DIMS)
    return luaL_error(L, "new_zeros: at most %d sizes, got %d", PG_MAX_DIMS, ndim);
  for (int i = 0; i < ndim; i++) shape[i] = pgl_integer(L, i + 2, "size", 0, INT64_MAX);
  pgl_tensor *r = pgl_push_tensor(L), *t = pgl_check_tensor(L, 1);
  pg_context *ctx = pgl_context(t->context);
  pgl_tensor_bind(r, t->context, NULL);
  if (pg_tensor_new(ctx, PG_F32, ndim, shape, &r->tensor) < 0)
    return luaL_error(L, "%s", pg_context_message(ctx));
  pgl_tensor_made(L, r);
  return 1;
}

/* t:float(): in F32, a new tensor */
static int order_float(lua_State *L) {
  lua_settop(L, 1);
  pgl_tensor *r = pgl_push_tensor(L), *t = pgl_check_tensor(L, 1);
  pg_context *ctx = pgl_context(t->context);
  pgl_tensor_bind(r, t->context, NULL);
  if (pg_tensor_float(t->tensor, &r->tensor) < 0)
    return luaL_error(L, "%s", pg_context_message(ctx));
  pgl_tensor_made(L, r);
  return 1;
}

static const luaL_Reg methods[] = {
    {"new_zeros", order_new_zeros}, {"float", order_float}, {NULL, NULL}};
static const luaL_Reg functions[] = {{"sort", order_sort},
                                     {"gather_rows", order_gather_rows},
                                     {"fill_random", order_fill_random},
                                     {NULL, NULL}};

void pgl_tensor_order(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
  lua_getfield(L, LUA_REGISTRYINDEX, PGL_TENSOR_METHODS);
  luaL_setfuncs(L, methods, 0);
  lua_pop(L, 1);
}
