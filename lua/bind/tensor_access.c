/* Looking into tensors: shape, elements, rows, columns and views. Indices count from 1, negative
 * ones from the end. */
#include "bind.h"
#include <stdlib.h>
#include <string.h>

static pg_tensor *check(lua_State *L) {
  return pgl_check_tensor(L, 1)->tensor;
}

/* A token object, { id, text, row }, stands for its row. */
static void resolve_token(lua_State *L, int arg) {
  if (lua_type(L, arg) != LUA_TTABLE || !pgl_raw(L, arg, "row")) return;
  lua_replace(L, arg);
}

/* The index at `arg` into `size` elements, from 0. */
static int64_t check_index(lua_State *L, int arg, const char *name, int64_t size) {
  resolve_token(L, arg);
  int64_t given = pgl_integer(L, arg, name, INT64_MIN, INT64_MAX), i = given;
  if (i < 0 && i >= -size) i += size + 1;
  if (i < 1 || i > size)
    luaL_error(L, "%s %I is outside 1 to %I", name, (LUAI_UACINT)given, (LUAI_UACINT)size);
  return i - 1;
}

/* Push a view of argument 1 with the owner and context of it. */
static int push_view(lua_State *L, int64_t offset, int ndim, const int64_t *shape,
                     const int64_t *stride) {
  int64_t own_shape[PG_MAX_DIMS] = {0}, own_stride[PG_MAX_DIMS] = {0};
  for (int i = 0; i < ndim; i++) {
    own_shape[i] = shape[i]; /* the arguments may lie in a tensor that a finaliser closes */
    own_stride[i] = stride[i];
  }
  pgl_tensor *view = pgl_push_tensor(L), *a = pgl_check_tensor(L, 1);
  pgl_tensor_bind(view, a->context, a->owner);
  if (pg_tensor_view(a->tensor, offset, ndim, own_shape, own_stride, &view->tensor) < 0)
    return luaL_error(L, "%s", pg_context_message(pgl_context(a->context)));
  return 1;
}

static void check_matrix(lua_State *L, const pg_tensor *t, const char *method) {
  if (t->ndim != 2)
    luaL_error(L, "%s: a matrix expected, the shape is %s", method, pgl_push_shape(L, t));
}

static int tensor_shape(lua_State *L) {
  pg_tensor *t = check(L);
  lua_createtable(L, t->ndim, 0);
  for (int i = 0; i < t->ndim; i++) {
    lua_pushinteger(L, t->shape[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static int tensor_dtype(lua_State *L) {
  lua_pushstring(L, pg_dtype_name(check(L)->dtype));
  return 1;
}

static int tensor_length(lua_State *L) {
  pg_tensor *t = check(L);
  if (t->ndim == 0) return luaL_error(L, "a scalar has no length");
  lua_pushinteger(L, t->shape[0]);
  return 1;
}

static int tensor_elements(lua_State *L) {
  lua_pushinteger(L, pg_tensor_elements(check(L)));
  return 1;
}

/* ---- views ----------------------------------------------------------------------------------- */
/* t(): [columns, rows] of the same memory. */
static int tensor_transpose(lua_State *L) {
  pg_tensor *t = check(L);
  check_matrix(L, t, "t");
  int64_t shape[2] = {t->shape[1], t->shape[0]}, stride[2] = {t->stride[1], t->stride[0]};
  return push_view(L, 0, 2, shape, stride);
}

/* row(i): the i-th of the first dimension. */
static int tensor_row(lua_State *L) {
  pg_tensor *t = check(L);
  if (t->ndim < 2)
    return luaL_error(L, "row: a matrix expected, the shape is %s", pgl_push_shape(L, t));
  int64_t i = check_index(L, 2, "row", t->shape[0]);
  return push_view(L, i * t->stride[0], t->ndim - 1, t->shape + 1, t->stride + 1);
}

/* Rows or columns `first` to `last`, both included. */
static int slice(lua_State *L, int dimension, const char *name) {
  pg_tensor *t = check(L);
  if (dimension >= t->ndim)
    return luaL_error(L, "%ss: the shape is %s", name, pgl_push_shape(L, t));
  int64_t first = check_index(L, 2, name, t->shape[dimension]);
  int64_t last = check_index(L, 3, name, t->shape[dimension]);
  if (last < first)
    return luaL_error(L, "%ss: the last, %I, comes before the first, %I", name,
                      (LUAI_UACINT)last + 1, (LUAI_UACINT)first + 1);
  int64_t shape[PG_MAX_DIMS];
  memcpy(shape, t->shape, sizeof shape);
  shape[dimension] = last - first + 1;
  return push_view(L, first * t->stride[dimension], t->ndim, shape, t->stride);
}

static int tensor_rows(lua_State *L) {
  return slice(L, 0, "row");
}

static int tensor_columns(lua_State *L) {
  check_matrix(L, check(L), "columns");
  return slice(L, 1, "column");
}

/* column(i): the i-th of a matrix. */
static int tensor_column(lua_State *L) {
  pg_tensor *t = check(L);
  check_matrix(L, t, "column");
  int64_t i = check_index(L, 2, "column", t->shape[1]);
  return push_view(L, i * t->stride[1], 1, t->shape, t->stride);
}

/* diagonal(): the elements (i, i). */
static int tensor_diagonal(lua_State *L) {
  pg_tensor *t = check(L);
  check_matrix(L, t, "diagonal");
  int64_t shape = pg__min(t->shape[0], t->shape[1]), stride = t->stride[0] + t->stride[1];
  return push_view(L, 0, 1, &shape, &stride);
}

/* The sizes that the arguments from 2 name, one of which may be -1: what is left. */
static int read_sizes(lua_State *L, const pg_tensor *t, const char *method,
                      int64_t shape[PG_MAX_DIMS]) {
  const int ndim = lua_gettop(L) - 1;
  const int64_t elements = pg_tensor_elements(t);
  int64_t known = 1;
  int open = -1;
  if (ndim > PG_MAX_DIMS) luaL_error(L, "%s: at most %d sizes, got %d", method, PG_MAX_DIMS, ndim);
  for (int i = 0; i < ndim; i++) {
    shape[i] = pgl_integer(L, i + 2, "size", -1, INT64_MAX);
    if (shape[i] < 0 && open >= 0) luaL_error(L, "%s: only one size can be -1", method);
    if (shape[i] < 0)
      open = i;
    else if (__builtin_mul_overflow(known, shape[i], &known))
      luaL_error(L, "%s: more than 2^63 elements", method);
  }
  if (open >= 0 && known > 0 && elements % known == 0) known *= shape[open] = elements / known;
  if (known != elements || (open >= 0 && shape[open] < 0)) {
    pg_tensor wanted = {.ndim = ndim};
    memcpy(wanted.shape, shape, sizeof wanted.shape);
    luaL_error(L, "%s: %s of %I elements does not become %s", method, pgl_push_shape(L, t),
               (LUAI_UACINT)elements, pgl_push_shape(L, &wanted));
  }
  return ndim;
}

/* view(sizes): the same memory; reshape(sizes): that, or a copy where strides do not allow it. The
 * upvalue says which. */
static int tensor_reshape(lua_State *L) {
  const bool copies = lua_toboolean(L, lua_upvalueindex(1));
  const char *method = copies ? "reshape" : "view";
  int64_t shape[PG_MAX_DIMS] = {0}, stride[PG_MAX_DIMS] = {0}, next = 1;
  pg_tensor *t = check(L);
  const int ndim = read_sizes(L, t, method, shape);
  if (!pg_tensor_contiguous(t)) {
    if (!copies)
      return luaL_error(L, "view: %s is not contiguous; reshape copies it", pgl_push_shape(L, t));
    pgl_tensor *clone = pgl_push_tensor(L), *a = pgl_check_tensor(L, 1);
    pgl_tensor_bind(clone, a->context, NULL);
    if (pg_tensor_clone(a->tensor, &clone->tensor) < 0)
      return luaL_error(L, "%s", pg_context_message(pgl_context(a->context)));
    pgl_tensor_made(L, clone);
    lua_replace(L, 1);
  }
  for (int i = ndim - 1; i >= 0; i--) {
    stride[i] = next;
    next *= pg__max(shape[i], 1);
  }
  return push_view(L, 0, ndim, shape, stride);
}

/* expand(sizes): sizes of 1, and new ones in front, repeated without copies; -1 keeps a size. */
static int tensor_expand(lua_State *L) {
  pg_tensor *t = check(L);
  const int ndim = lua_gettop(L) - 1, added = ndim - t->ndim;
  int64_t shape[PG_MAX_DIMS] = {0}, stride[PG_MAX_DIMS] = {0};
  if (ndim > PG_MAX_DIMS || added < 0)
    return luaL_error(L, "expand: %d to %d sizes for the shape %s, got %d", t->ndim, PG_MAX_DIMS,
                      pgl_push_shape(L, t), ndim);
  for (int i = 0; i < ndim; i++) {
    const int64_t own = i < added ? 1 : t->shape[i - added];
    shape[i] = pgl_integer(L, i + 2, "size", -1, INT64_MAX);
    if (shape[i] < 0) shape[i] = own;
    if (own != 1 && shape[i] != own)
      return luaL_error(L, "expand: size %I of %s does not become %I", (LUAI_UACINT)own,
                        pgl_push_shape(L, t), (LUAI_UACINT)shape[i]);
    stride[i] = own == 1 ? 0 : t->stride[i - added];
    if (own == 1 && shape[i] == 1 && i >= added) stride[i] = t->stride[i - added];
  }
  return push_view(L, 0, ndim, shape, stride);
}

/* contiguous(): the tensor itself, or a copy without gaps. */
static int tensor_contiguous(lua_State *L) {
  lua_settop(L, 1);
  if (pg_tensor_contiguous(check(L))) return 1;
  lua_getfield(L, LUA_REGISTRYINDEX, PGL_TENSOR_METHODS);
  lua_getfield(L, -1, "clone");
  lua_pushvalue(L, 1);
  lua_call(L, 1, 1);
  return 1;
}

/* Entry k of the table at 2: an index, which drops the dimension, {} for all of it, or
 * {first, last [, step]}, both included. */
static void slice_entry(lua_State *L, const pg_tensor *t, int k, int64_t *offset, int64_t *size,
                        int64_t *step) {
  static const char *const names[PG_MAX_DIMS] = {"row", "column", "third index", "fourth index"};
  const char *name = names[k];
  const int at = lua_gettop(L) + 1;
  *size = t->shape[k];
  *step = 1;
  lua_rawgeti(L, 2, k + 1);
  resolve_token(L, at);
  if (lua_type(L, at) == LUA_TNIL) {
    /* dimensions that are not named are taken whole */
  } else if (lua_type(L, at) == LUA_TTABLE) {
    const int64_t given = (int64_t)lua_rawlen(L, at);
    if (given == 1 || given > 3)
      luaL_error(L, "%s: {}, {first, last} or {first, last, step} expected, got a table of %I",
                 name, (LUAI_UACINT)given);
    if (given >= 2) {
      for (int i = 1; i <= 3; i++) lua_rawgeti(L, at, i);
      const int64_t first = check_index(L, at + 1, name, t->shape[k]);
      const int64_t last = check_index(L, at + 2, name, t->shape[k]);
      if (given == 3) *step = pgl_integer(L, at + 3, "step", 1, INT64_MAX);
      if (last < first)
        luaL_error(L, "%s: the last, %I, comes before the first, %I", name, (LUAI_UACINT)last + 1,
                   (LUAI_UACINT)first + 1);
      *offset += first * t->stride[k];
      *size = (last - first) / *step + 1;
      if (*size == 1) *step = 1;
    }
  } else {
    *offset += check_index(L, at, name, t->shape[k]) * t->stride[k];
    *size = -1;
  }
  lua_settop(L, at - 1);
}

/* t[{i, {first, last}, …}]: a view. */
static int tensor_slice(lua_State *L) {
  /* A copy, since reading the entries may run finalisers that close the tensor. */
  const pg_tensor t = *check(L);
  int64_t offset = 0, shape[PG_MAX_DIMS] = {0}, stride[PG_MAX_DIMS] = {0};
  int ndim = 0;
  if ((int64_t)lua_rawlen(L, 2) > t.ndim)
    return luaL_error(L, "%I indices for the shape %s", (LUAI_UACINT)lua_rawlen(L, 2),
                      pgl_push_shape(L, &t));
  for (int k = 0; k < t.ndim; k++) {
    int64_t size, step;
    slice_entry(L, &t, k, &offset, &size, &step);
    if (size < 0) continue;
    shape[ndim] = size;
    stride[ndim++] = t.stride[k] * step;
  }
  return push_view(L, offset, ndim, shape, stride);
}

/* ---- elements ---------------------------------------------------------------------------------
 */
static int push_element(lua_State *L, pg_dtype dtype, const void *at, int64_t i) {
  switch (dtype) {
  case PG_F32: lua_pushnumber(L, ((const float *)at)[i]); return 1;
  case PG_F64: lua_pushnumber(L, ((const double *)at)[i]); return 1;
  case PG_I32: lua_pushinteger(L, ((const int32_t *)at)[i]); return 1;
  case PG_BF16: {
    uint32_t bits = (uint32_t)((const uint16_t *)at)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    lua_pushnumber(L, value);
    return 1;
  }
  }
  return 0;
}

/* Offset of the element that the arguments from 2 name. */
static int64_t element_offset(lua_State *L, const pg_tensor *t, const char *method) {
  static const char *const names[PG_MAX_DIMS] = {"row", "column", "third index", "fourth index"};
  const int given = lua_gettop(L) - 1;
  int64_t offset = 0;
  if (given != t->ndim)
    luaL_error(L, "%s: %d indices expected for the shape %s, got %d", method, t->ndim,
               pgl_push_shape(L, t), given);
  for (int i = 0; i < t->ndim; i++)
    offset += check_index(L, i + 2, names[i], t->shape[i]) * t->stride[i];
  return offset;
}

/* Read or write one element through a view of it. */
static int element(pg_tensor *t, int64_t offset, void *value, bool write) {
  pg_tensor *one = NULL;
  int status = pg_tensor_view(t, offset, 0, t->shape, t->stride, &one);
  if (status == 0) status = write ? pg_tensor_write(one, value) : pg_tensor_read(one, value);
  pg_tensor_free(one);
  return status;
}

static int get_at(lua_State *L, pg_tensor *t, int64_t offset) {
  double value;
  if (element(t, offset, &value, false) < 0)
    return luaL_error(L, "%s", pg_context_message(t->context));
  return push_element(L, t->dtype, &value, 0);
}

static void set_at(lua_State *L, pg_tensor *t, int64_t offset, double x) {
  float value = (float)x;
  if (t->dtype != PG_F32)
    luaL_error(L, "only F32 tensors can be changed, this is %s", pg_dtype_name(t->dtype));
  if (element(t, offset, &value, true) < 0) luaL_error(L, "%s", pg_context_message(t->context));
}

static int tensor_get(lua_State *L) {
  pg_tensor *t = check(L);
  return get_at(L, t, element_offset(L, t, "get"));
}

/* t:set(i, j, x) */
static int tensor_set(lua_State *L) {
  pg_tensor *t = check(L);
  double x = pgl_number(L, lua_gettop(L), "x");
  lua_pop(L, 1);
  set_at(L, t, element_offset(L, t, "set"), x);
  lua_settop(L, 1);
  return 1;
}

static int tensor_item(lua_State *L) {
  pg_tensor *t = check(L);
  if (pg_tensor_elements(t) != 1)
    return luaL_error(L, "item: one element expected, the shape is %s", pgl_push_shape(L, t));
  return get_at(L, t, 0);
}

/* Push dimension `level` of the host copy as nested tables. */
static void push_nested(lua_State *L, const pg_tensor *t, int level, const char *values,
                        int64_t *at) {
  if (level == t->ndim || level == PG_MAX_DIMS) {
    push_element(L, t->dtype, values, (*at)++);
    return;
  }
  lua_createtable(L, (int)pg__min(t->shape[level], 1 << 26), 0);
  for (int64_t i = 1; i <= t->shape[level]; i++) {
    push_nested(L, t, level + 1, values, at);
    lua_rawseti(L, -2, i);
  }
}

static int tensor_to_table(lua_State *L) {
  const size_t bytes = (size_t)pg_tensor_elements(check(L)) * pg_dtype_size(check(L)->dtype);
  void *values = lua_newuserdatauv(L, bytes + 1, 0);
  pgl_tensor *a = pgl_check_tensor(L, 1);
  int64_t at = 0;
  /* The tables take many times the tensor's memory and may run finalisers that close it. */
  pg_tensor shape = *a->tensor;
  if (pg_tensor_read(a->tensor, values) < 0)
    return luaL_error(L, "%s", pg_context_message(pgl_context(a->context)));
  luaL_checkstack(L, PG_MAX_DIMS + 2, NULL);
  push_nested(L, &shape, 0, values, &at);
  return 1;
}

/* ---- t[i], t.method, t[i] = x -----------------------------------------------------------------
 */
static int tensor_index(lua_State *L) {
  resolve_token(L, 2);
  if (lua_type(L, 2) == LUA_TTABLE) return tensor_slice(L);
  if (lua_type(L, 2) != LUA_TNUMBER) {
    lua_pushvalue(L, 2);
    lua_rawget(L, lua_upvalueindex(1));
    return 1;
  }
  pg_tensor *t = check(L);
  if (t->ndim == 1) return get_at(L, t, check_index(L, 2, "element", t->shape[0]) * t->stride[0]);
  return tensor_row(L);
}

/* t[i] = number for a vector; t[i] = number or tensor for the row of a matrix. */
static int tensor_newindex(lua_State *L) {
  pg_tensor *t = check(L);
  resolve_token(L, 2);
  const bool sliced = lua_type(L, 2) == LUA_TTABLE;
  if (!sliced && lua_type(L, 2) != LUA_TNUMBER)
    return luaL_error(L, "a tensor has no field %s that could be set", pgl_describe(L, 2));
  if (!sliced && t->ndim == 1) {
    double x = pgl_number(L, 3, "x");
    set_at(L, t, check_index(L, 2, "element", t->shape[0]) * t->stride[0], x);
    return 0;
  }
  lua_settop(L, 3);
  if (sliced)
    tensor_slice(L);
  else
    tensor_row(L);
  pgl_tensor *row = pgl_check_tensor(L, 4), *from = pgl_test_tensor(L, 3);
  int status;
  if (lua_type(L, 3) == LUA_TNUMBER)
    status = pg_tensor_fill(row->tensor, lua_tonumber(L, 3));
  else if (from && from->context == row->context)
    status = pg_tensor_copy(row->tensor, from->tensor);
  else
    return luaL_error(L, "a number or a tensor of this context expected, got %s",
                      pgl_describe(L, 3));
  return status < 0 ? luaL_error(L, "%s", pg_context_message(pgl_context(row->context))) : 0;
}

static const luaL_Reg methods[] = {{"shape", tensor_shape},
                                   {"dtype", tensor_dtype},
                                   {"elements", tensor_elements},
                                   {"t", tensor_transpose},
                                   {"row", tensor_row},
                                   {"rows", tensor_rows},
                                   {"columns", tensor_columns},
                                   {"column", tensor_column},
                                   {"diagonal", tensor_diagonal},
                                   {"expand", tensor_expand},
                                   {"contiguous", tensor_contiguous},
                                   {"get", tensor_get},
                                   {"set", tensor_set},
                                   {"item", tensor_item},
                                   {"to_table", tensor_to_table},
                                   {"close", pgl_tensor_close},
                                   {NULL, NULL}};

void pgl_tensor_access(lua_State *L) {
  luaL_setfuncs(L, methods, 0);
  for (int copies = 0; copies < 2; copies++) {
    lua_pushboolean(L, copies);
    lua_pushcclosure(L, tensor_reshape, 1);
    lua_setfield(L, -2, copies ? "reshape" : "view");
  }
  lua_pushvalue(L, -1);
  lua_setfield(L, LUA_REGISTRYINDEX, PGL_TENSOR_METHODS);
  lua_pushcclosure(L, tensor_index, 1);
  lua_setfield(L, -2, "__index");
  lua_pushcfunction(L, tensor_length);
  lua_setfield(L, -2, "__len");
  lua_pushcfunction(L, tensor_newindex);
  lua_setfield(L, -2, "__newindex");
}
