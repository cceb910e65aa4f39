/* core.oracle and core.check_oracle: the optimum under the row diameter and its certificates, as
 * tables of tensors. */
#include "../../core/oracle.h"
#include "bind.h"
#include <stdlib.h>
#include <string.h>

static void release_oracle(void *o) {
  pg_oracle_free(o);
  free(o);
}

/* A new tensor from host memory, as field `key` of the table below it on the stack. */
static int set_tensor(lua_State *L, pgl_object *context, const char *key, pg_dtype dtype, int ndim,
                      const int64_t *shape, const void *values) {
  pgl_tensor *t = pgl_push_tensor(L);
  pgl_check_open(L, context, "context");
  pgl_tensor_bind(t, context, NULL);
  int status = pg_tensor_new(context->resource, dtype, ndim, shape, &t->tensor);
  if (status == 0 && pg_tensor_elements(t->tensor)) status = pg_tensor_write(t->tensor, values);
  if (status == 0) pgl_tensor_made(L, t);
  lua_setfield(L, -2, key);
  return status;
}

/* core.oracle(gradient [, { gap, seconds }]) */
static int oracle(lua_State *L) {
  static const char *const keys[] = {"gap", "seconds", NULL};
  pg_oracle_options options = {0};
  lua_settop(L, 2);
  if (!lua_isnil(L, 2)) {
    pgl_table(L, 2, "oracle", keys);
    if (pgl_get_number(L, 2, "oracle", "gap", &options.gap) &&
        !(options.gap > 0 && options.gap <= 1))
      return luaL_error(L, "oracle.gap: a number above 0, up to 1, expected, got %f", options.gap);
    if (pgl_get_number(L, 2, "oracle", "seconds", &options.seconds) && !(options.seconds > 0))
      return luaL_error(L, "oracle.seconds: a number above 0 expected, got %f", options.seconds);
  }
  void **box = pgl_own(L, release_oracle);
  pg_oracle *o = calloc(1, sizeof *o);
  if (!o) return luaL_error(L, "oracle: no memory");
  *box = o;
  pgl_tensor *g = pgl_check_tensor(L, 1);
  pgl_object *context = pgl_root(g->context);
  pg_context *ctx = context->resource;
  int status = pg_oracle_solve(g->tensor, &options, o);
  if (status < 0) return pgl_fail(L, ctx, status);
  /* Cluster numbers count from 1 in Lua; 0: no cluster. */
  for (int64_t i = 0; i < o->rows; i++) o->cluster[i]++;
  lua_createtable(L, 0, 10);
  pgl_set_number(L, "lower", o->lower);
  pgl_set_number(L, "upper", o->upper);
  pgl_set_number(L, "gap", o->upper > 0 ? (o->upper - o->lower) / o->upper : 0);
  pgl_set_number(L, "rownorm", o->rownorm);
  pgl_set_integer(L, "iterations", o->iterations);
  pgl_set_number(L, "seconds", o->seconds);
  PG_TRY(set_tensor(L, context, "potential", PG_F32, 2, (int64_t[]){o->rows, o->columns},
                    o->potential));
  lua_createtable(L, 0, 4);
  pgl_set_number(L, "scale", o->scale);
  PG_TRY(set_tensor(L, context, "clusters", PG_I32, 1, &o->rows, o->cluster));
  PG_TRY(set_tensor(L, context, "weights", PG_F32, 2, (int64_t[]){o->clusters, o->clusters},
                    o->weights));
  PG_TRY(set_tensor(L, context, "centres", PG_F32, 2, (int64_t[]){o->clusters, o->columns},
                    o->centres));
  lua_setfield(L, -2, "flow");
  pgl_disown(box);
  return 1;
fail:
  return pgl_fail(L, ctx, status);
}

/* The tensor field `key` of the table at the top, read into new memory at *out, with its shape. */
static void *read_field(lua_State *L, const char *what, const char *key, pg_dtype dtype, int ndim,
                        int64_t *shape) {
  lua_getfield(L, -1, key);
  pgl_tensor *t = pgl_test_tensor(L, -1);
  if (!t || t->tensor->dtype != dtype || t->tensor->ndim != ndim)
    luaL_error(L, "check_oracle: %s.%s must be a tensor %s of %d dimensions, got %s", what, key,
               pg_dtype_name(dtype), ndim, pgl_describe(L, -1));
  for (int i = 0; i < ndim; i++) shape[i] = t->tensor->shape[i];
  const size_t size = (size_t)pg_tensor_elements(t->tensor) * pg_dtype_size(dtype);
  void *memory = malloc(size ? size : 1);
  if (!memory) luaL_error(L, "check_oracle: no memory");
  if (size && pg_tensor_read(t->tensor, memory) < 0) {
    free(memory);
    luaL_error(L, "%s", pg_context_message(pgl_context(t->context)));
  }
  lua_pop(L, 1);
  return memory;
}

static double number_field(lua_State *L, const char *key) {
  if (lua_getfield(L, -1, key) != LUA_TNUMBER)
    luaL_error(L, "check_oracle: %s must be a number, got %s", key, pgl_describe(L, -1));
  const double value = lua_tonumber(L, -1);
  lua_pop(L, 1);
  return value;
}

/* core.check_oracle(gradient, result) -> { ok, lower_holds, upper_holds, lower, upper, … } */
static int check_oracle(lua_State *L) {
  lua_settop(L, 2);
  if (lua_type(L, 2) != LUA_TTABLE)
    return luaL_error(L, "check_oracle: the oracle's result expected, got %s", pgl_describe(L, 2));
  void **box = pgl_own(L, release_oracle);
  pg_oracle *o = calloc(1, sizeof *o);
  if (!o) return luaL_error(L, "check_oracle: no memory");
  *box = o;
  int64_t shape[2], rows, clusters[2];
  lua_pushvalue(L, 2);
  o->lower = number_field(L, "lower");
  o->upper = number_field(L, "upper");
  o->potential = read_field(L, "result", "potential", PG_F32, 2, shape);
  o->rows = shape[0];
  o->columns = shape[1];
  if (lua_getfield(L, -1, "flow") != LUA_TTABLE)
    return luaL_error(L, "check_oracle: result.flow must be a table, got %s", pgl_describe(L, -1));
  o->scale = number_field(L, "scale");
  o->cluster = read_field(L, "flow", "clusters", PG_I32, 1, &rows);
  o->weights = read_field(L, "flow", "weights", PG_F32, 2, clusters);
  o->centres = read_field(L, "flow", "centres", PG_F32, 2, shape);
  o->clusters = clusters[0];
  if (rows != o->rows || clusters[1] != o->clusters || shape[0] != o->clusters ||
      shape[1] != o->columns)
    return luaL_error(L,
                      "check_oracle: shapes do not belong together: potential [%I, %I], clusters "
                      "[%I], weights [%I, %I], centres [%I, %I]",
                      (LUAI_UACINT)o->rows, (LUAI_UACINT)o->columns, (LUAI_UACINT)rows,
                      (LUAI_UACINT)clusters[0], (LUAI_UACINT)clusters[1], (LUAI_UACINT)shape[0],
                      (LUAI_UACINT)shape[1]);
  for (int64_t i = 0; i < rows; i++)
    if (o->cluster[i] > INT32_MIN) o->cluster[i]--;
  pgl_tensor *g = pgl_check_tensor(L, 1);
  pg_oracle_verdict v;
  int status = pg_oracle_check(g->tensor, o, &v);
  if (status < 0) return pgl_fail(L, pgl_context(g->context), status);
  pgl_disown(box);
  lua_createtable(L, 0, 9);
  pgl_set_boolean(L, "ok", v.lower_holds && v.upper_holds);
  pgl_set_boolean(L, "lower_holds", v.lower_holds);
  pgl_set_boolean(L, "upper_holds", v.upper_holds);
  pgl_set_number(L, "lower", v.lower);
  pgl_set_number(L, "upper", v.upper);
  pgl_set_number(L, "diameter", v.diameter);
  pgl_set_number(L, "residual", v.residual);
  if (v.residual_row >= 0) pgl_set_integer(L, "residual_row", v.residual_row + 1);
  if (v.problem[0]) pgl_set_string(L, "problem", v.problem);
  return 1;
}

static const luaL_Reg functions[] = {
    {"oracle", oracle}, {"check_oracle", check_oracle}, {NULL, NULL}};

void pgl_open_oracle(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
}
