/* Arithmetic on tensors: shapes are checked and broadcast here, the kernels compute.
 *
 * Every operand becomes a matrix view [rows, columns] in the result's size: a scalar is [1,1], a
 * vector [n] one row [1,n], and a size of 1 that has to stretch gets stride 0. */
#include "tensor_ops.h"
#include "internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct op_name {
  const char *name;
  int op;
} op_name;
static const op_name binary_names[] = {
    {"add", PG_ADD},     {"sub", PG_SUB},       {"mul", PG_MUL},     {"div", PG_DIV},
    {"minimum", PG_MIN}, {"pow", PG_POW},       {"maximum", PG_MAX}, {"lt", PG_LT},
    {"le", PG_LE},       {"gt", PG_GT},         {"ge", PG_GE},       {"eq", PG_EQ},
    {"ne", PG_NE},       {"masked", PG_MASKED},
};
static const op_name unary_names[] = {
    {"neg", PG_NEG},           {"abs", PG_ABS},     {"sqrt", PG_SQRT},
    {"exp", PG_EXP},           {"log", PG_LOG},     {"square", PG_SQUARE},
    {"sign", PG_SIGN},         {"tanh", PG_TANH},   {"reciprocal", PG_RECIPROCAL},
    {"isfinite", PG_ISFINITE}, {"floor", PG_FLOOR}, {"ceil", PG_CEIL},
    {"round", PG_ROUND},
};
static const op_name reduce_names[] = {
    {"sum", PG_SUM},   {"mean", PG_MEAN},     {"max", PG_RMAX},      {"min", PG_RMIN},
    {"norm", PG_NORM}, {"argmax", PG_ARGMAX}, {"argmin", PG_ARGMIN},
};

static int find_op(pg_context *ctx, const op_name *names, size_t count, const char *name,
                   int *out) {
  for (size_t i = 0; i < count; i++)
    if (strcmp(names[i].name, name) == 0) {
      *out = names[i].op;
      return 0;
    }
  return pg_fail(ctx, PG_EINVAL, "there is no such operation as \"%.40s\"", name);
}
#define FIND_OP(ctx, list, name, out) find_op((ctx), (list), PG_COUNT(list), (name), (out))

int pg__tensor_check_f32(const char *op, const pg_tensor *t) {
  char text[128];
  if (t->dtype != PG_F32)
    return pg_fail(t->context, PG_EINVAL, "%s: a tensor has type %s; F32 is needed", op,
                   pg_dtype_name(t->dtype));
  if (t->ndim > 2)
    return pg_fail(t->context, PG_EINVAL,
                   "%s: a tensor has shape %s; at most two dimensions are "
                   "allowed",
                   op, pg__shape_text(t->ndim, t->shape, text, sizeof text));
  return 0;
}

static int fail_shapes(const char *op, const pg_tensor *a, const pg_tensor *b, const char *why) {
  char text_a[128], text_b[128];
  return pg_fail(a->context, PG_EINVAL, "%s: shapes %s and %s %s", op,
                 pg__shape_text(a->ndim, a->shape, text_a, sizeof text_a),
                 pg__shape_text(b->ndim, b->shape, text_b, sizeof text_b), why);
}

static int64_t rows_of(const pg_tensor *t) {
  return t->ndim == 2 ? t->shape[0] : 1;
}
static int64_t columns_of(const pg_tensor *t) {
  return t->ndim == 0 ? 1 : t->shape[t->ndim - 1];
}

/* t as a view of [rows, columns], which it has or stretches to. */
static pg_view stretch(const pg_tensor *t, int64_t rows, int64_t columns) {
  pg_view view = {.data = t->data};
  if (t->ndim == 2 && !(t->shape[0] == 1 && rows != 1)) view.row_stride = t->stride[0];
  if (t->ndim >= 1 && !(columns_of(t) == 1 && columns != 1))
    view.column_stride = t->stride[t->ndim - 1];
  return view;
}

/* NumPy's rule for one dimension; false when neither size is 1 and they differ. */
static bool join_size(int64_t a, int64_t b, int64_t *out) {
  *out = a == 1 ? b : a;
  return a == b || a == 1 || b == 1;
}

static bool writable(const pg_tensor *t) {
  for (int i = 0; i < t->ndim; i++)
    if (t->stride[i] == 0 && t->shape[i] > 1) return false;
  return true;
}

/* The place results go to: `out`, which must have this shape, or a new tensor in *made. */
static int prepare(const char *op, pg_context *ctx, int ndim, const int64_t *shape, pg_tensor *out,
                   pg_tensor **made) {
  char text_out[128], text_need[128];
  *made = NULL;
  if (!out) return pg__tensor_new_raw(ctx, PG_F32, ndim, shape, made);
  const int status = pg__tensor_check_f32(op, out);
  if (status < 0) return status;
  if (out->context != ctx)
    return pg_fail(ctx, PG_EINVAL, "%s: the tensors belong to different contexts", op);
  if (out->ndim != ndim || memcmp(out->shape, shape, (size_t)ndim * sizeof *shape) != 0)
    return pg_fail(ctx, PG_EINVAL, "%s: a result of shape %s does not fit in place into shape %s",
                   op, pg__shape_text(ndim, shape, text_need, sizeof text_need),
                   pg__shape_text(out->ndim, out->shape, text_out, sizeof text_out));
  if (!writable(out))
    return pg_fail(ctx, PG_EINVAL, "%s: the tensor written to repeats elements", op);
  return 0;
}

/* An operand that can be read while `out` is written: itself, or a copy (in *copy) when the two
 * overlap in any other way than element by element. */
static int unalias(const pg_tensor *out, const pg_tensor **operand, pg_tensor **copy) {
  *copy = NULL;
  if (!out || pg__tensor_same_view(out, *operand) || !pg__tensor_overlap(out, *operand)) return 0;
  const int status = pg_tensor_clone(*operand, copy);
  if (status == 0) *operand = *copy;
  return status;
}

int pg_tensor_binary(const char *op, const pg_tensor *a, const pg_tensor *b, pg_tensor *out,
                     pg_tensor **result) {
  pg_context *ctx = a->context;
  pg_tensor *made = NULL, *copy_a = NULL, *copy_b = NULL;
  int status, code = 0;
  int64_t rows, columns;

  if (result) *result = NULL;
  PG_TRY(FIND_OP(ctx, binary_names, op, &code));
  PG_TRY(pg__tensor_check_f32(op, a));
  PG_TRY(pg__tensor_check_f32(op, b));
  if (b->context != ctx) {
    status = pg_fail(ctx, PG_EINVAL, "%s: the tensors belong to different contexts", op);
    goto fail;
  }
  if (!join_size(rows_of(a), rows_of(b), &rows) ||
      !join_size(columns_of(a), columns_of(b), &columns)) {
    status = fail_shapes(op, a, b, "do not broadcast");
    goto fail;
  }
  const int ndim = a->ndim > b->ndim ? a->ndim : b->ndim;
  const int64_t shape[2] = {ndim == 2 ? rows : columns, columns};
  PG_TRY(prepare(op, ctx, ndim, shape, out, &made));
  PG_TRY(unalias(out, &a, &copy_a));
  PG_TRY(unalias(out, &b, &copy_b));
  if (rows > 0 && columns > 0)
    PG_LAUNCH(ctx, binary, (pg_binary_op)code, stretch(a, rows, columns), stretch(b, rows, columns),
              rows, columns, stretch(out ? out : made, rows, columns));
  if (result) {
    *result = made;
    made = NULL;
  }
fail:
  pg_tensor_free(copy_a);
  pg_tensor_free(copy_b);
  pg_tensor_free(made);
  return status;
}

int pg_tensor_scalar(const char *op, const pg_tensor *a, double scalar, bool reversed,
                     pg_tensor *out, pg_tensor **result) {
  pg_context *ctx = a->context;
  pg_tensor *made = NULL, *copy = NULL;
  int status, code = 0;

  if (result) *result = NULL;
  PG_TRY(FIND_OP(ctx, binary_names, op, &code));
  PG_TRY(pg__tensor_check_f32(op, a));
  PG_TRY(prepare(op, ctx, a->ndim, a->shape, out, &made));
  PG_TRY(unalias(out, &a, &copy));
  const int64_t rows = rows_of(a), columns = columns_of(a);
  if (rows > 0 && columns > 0)
    PG_LAUNCH(ctx, scalar, (pg_binary_op)code, stretch(a, rows, columns), scalar, reversed, rows,
              columns, stretch(out ? out : made, rows, columns));
  if (result) {
    *result = made;
    made = NULL;
  }
fail:
  pg_tensor_free(copy);
  pg_tensor_free(made);
  return status;
}

int pg_tensor_unary(const char *op, const pg_tensor *a, pg_tensor *out, pg_tensor **result) {
  pg_context *ctx = a->context;
  pg_tensor *made = NULL, *copy = NULL;
  int status, code = 0;

  if (result) *result = NULL;
  PG_TRY(FIND_OP(ctx, unary_names, op, &code));
  PG_TRY(pg__tensor_check_f32(op, a));
  PG_TRY(prepare(op, ctx, a->ndim, a->shape, out, &made));
  PG_TRY(unalias(out, &a, &copy));
  const int64_t rows = rows_of(a), columns = columns_of(a);
  if (rows > 0 && columns > 0)
    PG_LAUNCH(ctx, unary, (pg_unary_op)code, stretch(a, rows, columns), rows, columns,
              stretch(out ? out : made, rows, columns));
  if (result) {
    *result = made;
    made = NULL;
  }
fail:
  pg_tensor_free(copy);
  pg_tensor_free(made);
  return status;
}

int pg_tensor_lerp(pg_tensor *x, const pg_tensor *y, double w) {
  pg_context *ctx = x->context;
  pg_tensor *copy = NULL, *none;
  int status;
  int64_t rows, columns;

  PG_TRY(pg__tensor_check_f32("lerp", x));
  PG_TRY(pg__tensor_check_f32("lerp", y));
  if (!join_size(rows_of(x), rows_of(y), &rows) ||
      !join_size(columns_of(x), columns_of(y), &columns) || rows != rows_of(x) ||
      columns != columns_of(x) || y->ndim > x->ndim) {
    status = fail_shapes("lerp", x, y, "do not fit: the second must broadcast to the first");
    goto fail;
  }
  PG_TRY(prepare("lerp", y->context, x->ndim, x->shape, x, &none));
  PG_TRY(unalias(x, &y, &copy));
  if (rows > 0 && columns > 0)
    PG_LAUNCH(ctx, lerp, stretch(x, rows, columns), stretch(y, rows, columns), w, rows, columns);
fail:
  pg_tensor_free(copy);
  return status;
}

int pg_tensor_reduce(const char *op, const pg_tensor *a, int axis, pg_tensor **result) {
  pg_context *ctx = a->context;
  pg_tensor *made = NULL;
  int status, code = 0;
  char text[128];

  *result = NULL;
  PG_TRY(FIND_OP(ctx, reduce_names, op, &code));
  PG_TRY(pg__tensor_check_f32(op, a));
  pg__shape_text(a->ndim, a->shape, text, sizeof text);
  if (axis < -1 || axis > 1 || (axis >= 0 && a->ndim != 2)) {
    status = pg_fail(ctx, PG_EINVAL,
                     "%s: axis %d of a tensor of shape %s; -1 (all) is allowed, and 0 (over rows) "
                     "or 1 (within rows) for a matrix",
                     op, axis, text);
    goto fail;
  }
  const int64_t rows = rows_of(a), columns = columns_of(a);
  const int64_t results = axis < 0 ? 1 : axis == 0 ? columns : rows;
  const int64_t each = axis < 0 ? rows * columns : axis == 0 ? rows : columns;
  const bool index = code == PG_ARGMAX || code == PG_ARGMIN;
  if (each == 0 && results > 0 && code != PG_SUM && code != PG_NORM) {
    status = pg_fail(ctx, PG_EINVAL, "%s of no elements (shape %s) is not defined", op, text);
    goto fail;
  }
  if (index && each > 1 << 24) {
    status =
        pg_fail(ctx, PG_EUNSUPPORTED, "%s over %lld elements: fp32 holds indices up to %d exactly",
                op, (long long)each, 1 << 24);
    goto fail;
  }
  /* Sums of nothing stay the zeros of a new tensor. */
  PG_TRY((each > 0 ? pg__tensor_new_raw : pg_tensor_new)(ctx, PG_F32, axis < 0 ? 0 : 1, &results,
                                                         &made));
  if (each > 0 && results > 0)
    PG_LAUNCH(ctx, reduce, (pg_reduce_op)code, stretch(a, rows, columns), rows, columns, axis,
              made->data);
  *result = made;
  made = NULL;
fail:
  pg_tensor_free(made);
  return status;
}

/* A matrix operand [rows, columns] as gemm takes it: row-major with a leading dimension of at least
 * its row length, or the transpose of such. False when its strides allow neither. */
static bool gemm_operand(pg_view view, int64_t rows, int64_t columns, bool *transpose,
                         int64_t *leading) {
  if ((view.column_stride == 1 || columns == 1) && (view.row_stride >= columns || rows == 1)) {
    *transpose = false;
    *leading = pg__max(rows == 1 ? columns : view.row_stride, 1);
    return true;
  }
  if ((view.row_stride == 1 || rows == 1) && (view.column_stride >= rows || columns == 1)) {
    *transpose = true;
    *leading = pg__max(columns == 1 ? rows : view.column_stride, 1);
    return true;
  }
  return false;
}

int pg_tensor_matmul(const pg_tensor *a, const pg_tensor *b, pg_tensor **result) {
  pg_context *ctx = a->context;
  pg_tensor *made = NULL, *copy_a = NULL, *copy_b = NULL;
  int status;

  *result = NULL;
  PG_TRY(pg__tensor_check_f32("matmul", a));
  PG_TRY(pg__tensor_check_f32("matmul", b));
  if (b->context != ctx) {
    status = pg_fail(ctx, PG_EINVAL, "matmul: the tensors belong to different contexts");
    goto fail;
  }
  /* A vector is a row on the left and a column on the right; its dimension is then dropped. */
  const int64_t m = rows_of(a), k = columns_of(a);
  const int64_t inner = b->ndim == 2 ? b->shape[0] : columns_of(b);
  const int64_t n = b->ndim == 2 ? b->shape[1] : 1;
  if (a->ndim == 0 || b->ndim == 0 || k != inner) {
    char text_a[128], text_b[128], why[96] = "a scalar has no inner size";
    if (a->ndim && b->ndim)
      snprintf(why, sizeof why, "the inner sizes %lld and %lld differ", (long long)k,
               (long long)inner);
    status = pg_fail(ctx, PG_EINVAL, "matmul: %s x %s: %s",
                     pg__shape_text(a->ndim, a->shape, text_a, sizeof text_a),
                     pg__shape_text(b->ndim, b->shape, text_b, sizeof text_b), why);
    goto fail;
  }
  int ndim = 0;
  int64_t shape[2];
  if (a->ndim == 2) shape[ndim++] = m;
  if (b->ndim == 2) shape[ndim++] = n;
  PG_TRY((k > 0 ? pg__tensor_new_raw : pg_tensor_new)(ctx, PG_F32, ndim, shape, &made));
  if (m > 0 && n > 0 && k > 0) {
    pg_gemm g = {.m = m, .n = n, .k = k, .alpha = 1, .c = made->data, .ldc = n};
    if (!gemm_operand(stretch(a, m, k), m, k, &g.transpose_a, &g.lda)) {
      PG_TRY(pg_tensor_clone(a, &copy_a));
      a = copy_a;
      gemm_operand(stretch(a, m, k), m, k, &g.transpose_a, &g.lda);
    }
    pg_view right = stretch(b, 1, b->ndim == 1 ? k : n);
    if (b->ndim == 2)
      right.row_stride = b->stride[0];
    else
      right = (pg_view){right.data, right.column_stride, 1};
    if (!gemm_operand(right, k, n, &g.transpose_b, &g.ldb)) {
      PG_TRY(pg_tensor_clone(b, &copy_b));
      b = copy_b;
      right = (pg_view){b->data, n, 1};
      gemm_operand(right, k, n, &g.transpose_b, &g.ldb);
    }
    g.a = a->data;
    g.b = b->data;
    PG_LAUNCH(ctx, gemm, &g);
  }
  *result = made;
  made = NULL;
fail:
  pg_tensor_free(copy_a);
  pg_tensor_free(copy_b);
  pg_tensor_free(made);
  return status;
}

int pg_tensor_fill(pg_tensor *t, double value) {
  pg_context *ctx = t->context;
  pg_tensor *one = NULL, *none;
  int status;

  PG_TRY(pg__tensor_check_f32("fill", t));
  PG_TRY(prepare("fill", ctx, t->ndim, t->shape, t, &none));
  const int64_t rows = rows_of(t), columns = columns_of(t);
  if (rows == 0 || columns == 0) return 0;
  if (value == 0 && !signbit(value) && pg_tensor_contiguous(t)) {
    PG_LAUNCH(ctx, zero, t->data, (size_t)(rows * columns) * sizeof(float));
    return 0;
  }
  /* One element, stretched over the whole and copied as x * 1: any value but a denormal, which
   * element-wise kernels take as zero. */
  const float number = (float)value;
  PG_TRY(pg_tensor_new(ctx, PG_F32, 0, NULL, &one));
  PG_TRY(pg_tensor_write(one, &number));
  PG_LAUNCH(ctx, scalar, PG_MUL, stretch(one, rows, columns), 1.0, false, rows, columns,
            stretch(t, rows, columns));
fail:
  pg_tensor_free(one);
  return status;
}

int pg_tensor_rows_op(const char *op, const pg_tensor *a, const pg_tensor *v, pg_tensor *out,
                      pg_tensor **result) {
  pg_tensor *column = NULL;
  int status;

  if (result) *result = NULL;
  PG_TRY(pg__tensor_check_f32(op, a));
  PG_TRY(pg__tensor_check_f32(op, v));
  const bool vector = v->ndim == 1 || (v->ndim == 2 && v->shape[1] == 1);
  if (a->ndim != 2 || !vector || v->shape[0] != a->shape[0]) {
    status = fail_shapes(op, a, v, "do not fit: a matrix and one number per row are needed");
    goto fail;
  }
  const int64_t shape[2] = {v->shape[0], 1}, stride[2] = {v->stride[0], 1};
  PG_TRY(pg_tensor_view(v, 0, 2, shape, stride, &column));
  PG_TRY(pg_tensor_binary(op, a, column, out, result));
fail:
  pg_tensor_free(column);
  return status;
}
