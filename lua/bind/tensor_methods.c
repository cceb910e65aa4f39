/* Tensor methods and operators, with PyTorch's names; a trailing _ works in place and returns the
 * tensor. Failures raise, since these are parts of expressions. The result is pushed before
 * arguments are looked at: pushing may run finalisers, and those may close tensors. */
#include "bind.h"
#include <string.h>

/* Finish an operation that made t->tensor, which is at the top. */
static int made(lua_State *L, pgl_tensor *t, pg_context *ctx, int status) {
  if (status < 0) return luaL_error(L, "%s", pg_context_message(ctx));
  pgl_tensor_made(L, t);
  return 1;
}

/* Finish an in-place operation on argument 1. */
static int changed(lua_State *L, pg_context *ctx, int status) {
  if (status < 0) return luaL_error(L, "%s", pg_context_message(ctx));
  lua_settop(L, 1);
  return 1;
}

static void check_same_context(lua_State *L, const pgl_tensor *a, const pgl_tensor *b) {
  if (a->context != b->context) luaL_error(L, "the tensors belong to different contexts");
}

static const char *operation(lua_State *L) {
  return lua_tostring(L, lua_upvalueindex(1));
}

/* ---- arithmetic: upvalues are the operation's name and whether it works in place ------------ */
static int tensor_binary(lua_State *L) {
  const char *op = operation(L);
  const bool in_place = lua_toboolean(L, lua_upvalueindex(2));
  lua_settop(L, 2);
  pgl_tensor *r = in_place ? NULL : pgl_push_tensor(L);
  /* Operators put the number first in 2 - t. */
  const bool reversed = !in_place && lua_type(L, 1) == LUA_TNUMBER;
  pgl_tensor *a = pgl_check_tensor(L, reversed ? 2 : 1);
  pg_context *ctx = pgl_context(a->context);
  if (r) pgl_tensor_bind(r, a->context, NULL);
  pg_tensor *out = in_place ? a->tensor : NULL, **result = r ? &r->tensor : NULL;
  int status;
  if (reversed || lua_type(L, 2) == LUA_TNUMBER) {
    const double number = lua_tonumber(L, reversed ? 1 : 2);
    if (r && strcmp(op, "mul") == 0 && pgl_scale_later(r, a, number)) return made(L, r, ctx, 0);
    status = pg_tensor_scalar(op, a->tensor, number, reversed, out, result);
  } else {
    pgl_tensor *b = pgl_test_tensor(L, 2);
    if (!b)
      return luaL_error(L, "%s: a tensor or a number expected, got %s", op, pgl_describe(L, 2));
    check_same_context(L, a, b);
    status = pg_tensor_binary(op, a->tensor, b->tensor, out, result);
  }
  return in_place ? changed(L, ctx, status) : made(L, r, ctx, status);
}

static int tensor_unary(lua_State *L) {
  const char *op = operation(L);
  const bool in_place = lua_toboolean(L, lua_upvalueindex(2));
  lua_settop(L, 1);
  pgl_tensor *r = in_place ? NULL : pgl_push_tensor(L);
  pgl_tensor *a = pgl_check_tensor(L, 1);
  pg_context *ctx = pgl_context(a->context);
  if (in_place) return changed(L, ctx, pg_tensor_unary(op, a->tensor, a->tensor, NULL));
  pgl_tensor_bind(r, a->context, NULL);
  return made(L, r, ctx, pg_tensor_unary(op, a->tensor, NULL, &r->tensor));
}

/* mul_rows and the like: one number of the vector per row. */
static int tensor_rows_op(lua_State *L) {
  const char *op = operation(L);
  const bool in_place = lua_toboolean(L, lua_upvalueindex(2));
  lua_settop(L, 2);
  pgl_tensor *r = in_place ? NULL : pgl_push_tensor(L);
  pgl_tensor *a = pgl_check_tensor(L, 1), *v = pgl_check_tensor(L, 2);
  pg_context *ctx = pgl_context(a->context);
  check_same_context(L, a, v);
  if (in_place)
    return changed(L, ctx, pg_tensor_rows_op(op, a->tensor, v->tensor, a->tensor, NULL));
  pgl_tensor_bind(r, a->context, NULL);
  return made(L, r, ctx, pg_tensor_rows_op(op, a->tensor, v->tensor, NULL, &r->tensor));
}

static int tensor_lerp(lua_State *L) {
  double w = pgl_number(L, 3, "w");
  pgl_tensor *a = pgl_check_tensor(L, 1), *b = pgl_check_tensor(L, 2);
  check_same_context(L, a, b);
  return changed(L, pgl_context(a->context), pg_tensor_lerp(a->tensor, b->tensor, w));
}

static int tensor_fill(lua_State *L) {
  double value = pgl_number(L, 2, "value");
  pgl_tensor *a = pgl_check_tensor(L, 1);
  return changed(L, pgl_context(a->context), pg_tensor_fill(a->tensor, value));
}

static int tensor_zero(lua_State *L) {
  pgl_tensor *a = pgl_check_tensor(L, 1);
  return changed(L, pgl_context(a->context), pg_tensor_fill(a->tensor, 0));
}

static int tensor_copy(lua_State *L) {
  pgl_tensor *a = pgl_check_tensor(L, 1), *b = pgl_check_tensor(L, 2);
  check_same_context(L, a, b);
  return changed(L, pgl_context(a->context), pg_tensor_copy(a->tensor, b->tensor));
}

static int tensor_clone(lua_State *L) {
  lua_settop(L, 1);
  pgl_tensor *r = pgl_push_tensor(L), *a = pgl_check_tensor(L, 1);
  pgl_tensor_bind(r, a->context, NULL);
  return made(L, r, pgl_context(a->context), pg_tensor_clone(a->tensor, &r->tensor));
}

static int tensor_matmul(lua_State *L) {
  lua_settop(L, 2);
  pgl_tensor *r = pgl_push_tensor(L);
  pgl_tensor *a = pgl_check_tensor(L, 1), *b = pgl_check_tensor(L, 2);
  check_same_context(L, a, b);
  pgl_tensor_bind(r, a->context, NULL);
  return made(L, r, pgl_context(a->context), pg_tensor_matmul(a->tensor, b->tensor, &r->tensor));
}

/* x minus its mean row, in a new contiguous tensor. */
static int tensor_center_rows(lua_State *L) {
  lua_settop(L, 1);
  pgl_tensor *r = pgl_push_tensor(L), *a = pgl_check_tensor(L, 1);
  pg_context *ctx = pgl_context(a->context);
  if (a->tensor->dtype != PG_F32 || a->tensor->ndim != 2)
    return luaL_error(L, "center_rows: an F32 matrix expected, got %s %s",
                      pg_dtype_name(a->tensor->dtype), pgl_push_shape(L, a->tensor));
  pgl_tensor_bind(r, a->context, NULL);
  int status;
  PG_TRY(pg_tensor_clone(a->tensor, &r->tensor));
  if (a->tensor->shape[0] > 0)
    PG_LAUNCH(ctx, center_rows, r->tensor->data, r->tensor->shape[0], r->tensor->shape[1],
              r->tensor->data);
fail:
  return made(L, r, ctx, status);
}

/* ---- reductions ---------------------------------------------------------------------------- */
/* Reduce to one number. */
static int reduce_all(const char *op, const pg_tensor *a, float *value) {
  pg_tensor *scalar = NULL;
  int status = pg_tensor_reduce(op, a, -1, &scalar);
  if (status == 0) status = pg_tensor_read(scalar, value);
  pg_tensor_free(scalar);
  return status;
}

/* The core's axis of argument 2: from 1, or from the end from -1. None, and the only one of a
 * vector, are all elements: -1. */
static int axis_argument(lua_State *L, const pg_tensor *a) {
  if (lua_isnil(L, 2)) return -1;
  const int64_t dimensions = a->ndim < 1 ? 1 : a->ndim > 2 ? 2 : a->ndim;
  const int64_t axis = pgl_integer(L, 2, "axis", -dimensions, dimensions);
  if (axis == 0) luaL_argerror(L, 2, "axis: axes count from 1, or from the end from -1; got 0");
  if (dimensions == 1) return -1;
  return (int)(axis < 0 ? dimensions + axis : axis - 1);
}

/* sum([axis]) and the like: no axis gives a Lua number; axis 1 reduces over rows and gives a
 * tensor of the columns; axis 2 within rows. */
static int tensor_reduce(lua_State *L) {
  const char *op = operation(L);
  lua_settop(L, 2);
  pgl_tensor *a = pgl_check_tensor(L, 1);
  const int axis = axis_argument(L, a->tensor);
  if (axis < 0) {
    float value = 0;
    if (reduce_all(op, a->tensor, &value) < 0)
      return luaL_error(L, "%s", pg_context_message(pgl_context(a->context)));
    lua_pushnumber(L, value);
    return 1;
  }
  pgl_tensor *r = pgl_push_tensor(L);
  pgl_tensor_bind(r, a->context, NULL);
  return made(L, r, pgl_context(a->context), pg_tensor_reduce(op, a->tensor, axis, &r->tensor));
}

/* row_norms(), row_sums(), column_sums(): upvalues are the operation and the core's axis. */
static int tensor_reduce_axis(lua_State *L) {
  const int axis = (int)lua_tointeger(L, lua_upvalueindex(2));
  lua_settop(L, 1);
  pgl_tensor *r = pgl_push_tensor(L), *a = pgl_check_tensor(L, 1);
  pgl_tensor_bind(r, a->context, NULL);
  return made(L, r, pgl_context(a->context),
              pg_tensor_reduce(operation(L), a->tensor, axis, &r->tensor));
}

/* Position (0-based) of the extreme element; fp32 indices stay exact because each step counts
 * along one dimension only. */
static int arg_all(const char *op, const pg_tensor *a, int64_t position[2]) {
  pg_tensor *extremes = NULL, *row = NULL;
  float found = 0;
  int status;
  const char *argop = strcmp(op, "max") == 0 ? "argmax" : "argmin";
  position[0] = position[1] = 0;
  if (a->ndim == 2) {
    PG_TRY(pg_tensor_reduce(op, a, 1, &extremes));
    PG_TRY(reduce_all(argop, extremes, &found));
    position[0] = (int64_t)found;
    PG_TRY(pg_tensor_view(a, position[0] * a->stride[0], 1, a->shape + 1, a->stride + 1, &row));
    PG_TRY(reduce_all(argop, row, &found));
    position[1] = (int64_t)found;
  } else {
    PG_TRY(reduce_all(argop, a, &found));
    position[0] = (int64_t)found;
  }
fail:
  pg_tensor_free(extremes);
  pg_tensor_free(row);
  return status;
}

/* argmax(): row and column (or one index of a vector). argmax(axis): a tensor of indices. All
 * count from 1. Upvalue: "max" or "min". */
static int tensor_arg(lua_State *L) {
  const char *op = operation(L);
  lua_settop(L, 2);
  pgl_tensor *a = pgl_check_tensor(L, 1);
  const int axis = axis_argument(L, a->tensor);
  if (axis < 0) {
    int64_t position[2];
    if (pg_tensor_elements(a->tensor) == 0) return luaL_error(L, "arg%s of an empty tensor", op);
    if (arg_all(op, a->tensor, position) < 0)
      return luaL_error(L, "%s", pg_context_message(pgl_context(a->context)));
    lua_pushinteger(L, position[0] + 1);
    if (a->tensor->ndim != 2) return 1;
    lua_pushinteger(L, position[1] + 1);
    return 2;
  }
  pgl_tensor *r = pgl_push_tensor(L);
  pgl_tensor_bind(r, a->context, NULL);
  int status =
      pg_tensor_reduce(strcmp(op, "max") == 0 ? "argmax" : "argmin", a->tensor, axis, &r->tensor);
  if (status == 0) status = pg_tensor_scalar("add", r->tensor, 1, false, r->tensor, NULL);
  return made(L, r, pgl_context(a->context), status);
}

static int tensor_all_finite(lua_State *L) {
  lua_settop(L, 1);
  pgl_tensor *r = pgl_push_tensor(L), *a = pgl_check_tensor(L, 1);
  float least = 1;
  pgl_tensor_bind(r, a->context, NULL);
  int status = 0;
  if (pg_tensor_elements(a->tensor) > 0) {
    status = pg_tensor_unary("isfinite", a->tensor, NULL, &r->tensor);
    if (status == 0) status = reduce_all("min", r->tensor, &least);
  }
  if (status < 0) return luaL_error(L, "%s", pg_context_message(pgl_context(a->context)));
  lua_pushboolean(L, least != 0);
  return 1;
}

/* ---- registration --------------------------------------------------------------------------- */
/* Set NAME and, when `in_place` too, NAME_ in the table at the top. */
static void set_operation(lua_State *L, const char *name, const char *op, lua_CFunction f,
                          bool in_place) {
  for (int i = 0; i <= (in_place ? 1 : 0); i++) {
    lua_pushfstring(L, i ? "%s_" : "%s", name);
    lua_pushstring(L, op);
    lua_pushboolean(L, i);
    lua_pushcclosure(L, f, 2);
    lua_rawset(L, -3);
  }
}

static const char *const binary[] = {"add", "sub", "mul", "div", "minimum", "maximum", "pow",
                                     "lt",  "le",  "gt",  "ge",  "eq",      "ne"};
static const char *const unary[] = {"neg",   "abs",  "sqrt",       "square", "exp",
                                    "log",   "sign", "reciprocal", "tanh",   "isfinite",
                                    "floor", "ceil", "round"};
static const char *const reduce[] = {"sum", "mean", "max", "min", "norm"};
static const char *const rows[][2] = {
    {"add_rows", "add"}, {"sub_rows", "sub"}, {"mul_rows", "mul"}, {"div_rows", "div"}};
static const struct {
  const char *name, *op;
  int axis;
} axes[] = {{"row_norms", "norm", 1}, {"row_sums", "sum", 1}, {"column_sums", "sum", 0}};
static const char *const operators[][2] = {
    {"__add", "add"}, {"__sub", "sub"}, {"__mul", "mul"}, {"__div", "div"}, {"__pow", "pow"}};

static const luaL_Reg methods[] = {{"lerp_", tensor_lerp},
                                   {"fill_", tensor_fill},
                                   {"zero_", tensor_zero},
                                   {"copy_", tensor_copy},
                                   {"clone", tensor_clone},
                                   {"matmul", tensor_matmul},
                                   {"center_rows", tensor_center_rows},
                                   {"all_finite", tensor_all_finite},
                                   {NULL, NULL}};

void pgl_tensor_methods(lua_State *L) {
  for (size_t i = 0; i < PG_COUNT(operators); i++)
    set_operation(L, operators[i][0], operators[i][1], tensor_binary, false);
  set_operation(L, "__unm", "neg", tensor_unary, false);

  lua_newtable(L);
  luaL_setfuncs(L, methods, 0);
  for (size_t i = 0; i < PG_COUNT(binary); i++)
    set_operation(L, binary[i], binary[i], tensor_binary, true);
  set_operation(L, "masked", "masked", tensor_binary, false);
  for (size_t i = 0; i < PG_COUNT(unary); i++)
    set_operation(L, unary[i], unary[i], tensor_unary, true);
  for (size_t i = 0; i < PG_COUNT(reduce); i++)
    set_operation(L, reduce[i], reduce[i], tensor_reduce, false);
  for (size_t i = 0; i < PG_COUNT(rows); i++)
    set_operation(L, rows[i][0], rows[i][1], tensor_rows_op, true);
  set_operation(L, "argmax", "max", tensor_arg, false);
  set_operation(L, "argmin", "min", tensor_arg, false);
  for (size_t i = 0; i < PG_COUNT(axes); i++) {
    lua_pushstring(L, axes[i].op);
    lua_pushinteger(L, axes[i].axis);
    lua_pushcclosure(L, tensor_reduce_axis, 2);
    lua_setfield(L, -2, axes[i].name);
  }
  pgl_tensor_access(L);
}
