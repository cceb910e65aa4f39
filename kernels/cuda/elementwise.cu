/* Element-wise operations on matrix views: what Lua tensors and Lua optimizers compute with. The
 * arithmetic is that of flush.cuh. One kernel pair serves all: an operation is a functor of two
 * numbers, and an operand without memory is a number. */
#include "flush.cuh"

/* ---- operations ---------------------------------------------------------------------------- */
#define OPERATION(name, expression)                                                                \
  struct name {                                                                                    \
    __device__ float operator()(float x, float y) const {                                          \
      (void)y;                                                                                     \
      return expression;                                                                           \
    }                                                                                              \
  };
#define COMPARISON(name, op) OPERATION(name, pg_flush(x) op pg_flush(y) ? 1.0f : 0.0f)
OPERATION(op_add, pg_add(x, y))
OPERATION(op_sub, pg_sub(x, y))
OPERATION(op_mul, pg_mul(x, y))
OPERATION(op_div, pg_div(x, y))
/* NaN wins, as in NumPy's minimum and maximum. */
OPERATION(op_min, x != x || pg_flush(x) < pg_flush(y) ? x : y)
OPERATION(op_max, x != x || pg_flush(x) > pg_flush(y) ? x : y)
OPERATION(op_pow, pg_flush(powf(pg_flush(x), pg_flush(y))))
COMPARISON(op_lt, <)
COMPARISON(op_le, <=)
COMPARISON(op_gt, >)
COMPARISON(op_ge, >=)
COMPARISON(op_eq, ==)
COMPARISON(op_ne, !=)
OPERATION(op_masked, pg_flush(y) != 0 ? x : -0.0f)

OPERATION(op_neg, __uint_as_float(__float_as_uint(x) ^ 0x80000000u))
OPERATION(op_abs, __uint_as_float(__float_as_uint(x) & 0x7fffffffu))
OPERATION(op_sqrt, pg_root(x))
OPERATION(op_square, pg_mul(x, x))
OPERATION(op_exp, pg_flush(expf(pg_flush(x))))
OPERATION(op_log, logf(pg_flush(x)))
OPERATION(op_sign, pg_flush(x) > 0 ? 1.0f : pg_flush(x) < 0 ? -1.0f : x) /* keeps zeros and NaN */
OPERATION(op_reciprocal, pg_div(1.0f, x))
OPERATION(op_tanh, pg_flush(tanhf(pg_flush(x))))
OPERATION(op_isfinite, isfinite(x) ? 1.0f : 0.0f)
OPERATION(op_floor, floorf(pg_flush(x)))
OPERATION(op_ceil, ceilf(pg_flush(x)))
OPERATION(op_round, rintf(pg_flush(x)))

struct op_lerp {
  float keep, take;
  __device__ float operator()(float x, float y) const {
    return pg_add(pg_mul(keep, x), pg_mul(take, y));
  }
};

/* ---- kernels ------------------------------------------------------------------------------- */
/* Element (i,j) of an operand lies at i*row + j*column; without memory it is `value`. */
struct layout {
  int64_t row, column;
  float value, unused; /* no padding: its bits could look like a pointer to the emulation */
};

static __device__ inline float element(const float *x, const layout &at, int64_t i, int64_t j) {
  return x ? x[i * at.row + j * at.column] : at.value;
}

template <class Op>
__global__ void each_element(Op op, const float *a, layout at_a, const float *b, layout at_b,
                             int64_t rows, int64_t columns, float *out, layout at_out) {
  for (PG_STRIDE(t, rows * columns)) {
    const int64_t i = rows == 1 ? 0 : pg_quotient(t, columns), j = t - i * columns;
    out[i * at_out.row + j * at_out.column] = op(element(a, at_a, i, j), element(b, at_b, i, j));
  }
}

/* Four elements of a row at a time; operands lie at stride 1 or 0. */
static __device__ inline void load_quad(const float *x, const layout &at, int64_t i, int64_t j,
                                        float (&to)[4]) {
  if (x && at.column) {
    pg_load_wide(x + i * at.row + j, to);
  } else {
    to[0] = to[1] = to[2] = to[3] = element(x, at, i, j);
  }
}

template <class Op>
__global__ void each_quad(Op op, const float *a, layout at_a, const float *b, layout at_b,
                          int64_t rows, int64_t columns, float *out, layout at_out) {
  const int64_t quads = (columns + 3) / 4;
  for (PG_STRIDE(t, rows * quads)) {
    const int64_t i = rows == 1 ? 0 : pg_quotient(t, quads), j = (t - i * quads) * 4;
    if (j + 4 <= columns) {
      float x[4], y[4];
      load_quad(a, at_a, i, j, x);
      load_quad(b, at_b, i, j, y);
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] = op(x[e], y[e]);
      pg_store_wide(out + i * at_out.row + j, x);
    } else {
      for (int64_t l = j; l < columns; l++)
        out[i * at_out.row + l] = op(element(a, at_a, i, l), element(b, at_b, i, l));
    }
  }
}

/* ---- launches ------------------------------------------------------------------------------ */
static bool has_quads(pg_view v, int64_t rows) {
  return !v.data || v.column_stride == 0 ||
         (v.column_stride == 1 && pg_wide_aligned(v.data) && (rows == 1 || v.row_stride % 4 == 0));
}

/* Whether a view walks memory as one run of rows*columns elements at stride 1, or stays at one. */
static bool is_flat(pg_view v, int64_t columns) {
  return (v.column_stride == 1 && v.row_stride == columns) ||
         (v.column_stride == 0 && v.row_stride == 0);
}

static layout layout_of(pg_view v, float value) {
  layout at = {v.row_stride, v.column_stride, value, 0};
  return at;
}

/* out = op(a, b); a view without data is the number `value`. */
template <class Op>
static int run(pg_queue *q, Op op, pg_view a, pg_view b, float value, int64_t rows, int64_t columns,
               pg_view out) {
  pg_view *const views[3] = {&a, &b, &out};
  if (rows == 0 || columns == 0) return 0;
  if (columns == 1 || (out.row_stride == 1 && out.column_stride != 1 && rows > 1)) {
    /* One row instead of a column; results that lie along columns are written along rows. */
    const int64_t swap = rows;
    rows = columns, columns = swap;
    for (pg_view *v : views) {
      const int64_t stride = v->row_stride;
      v->row_stride = v->column_stride, v->column_stride = stride;
    }
  }
  if (is_flat(a, columns) && is_flat(b, columns) && is_flat(out, columns)) {
    columns *= rows;
    rows = 1;
  }
  const layout at_a = layout_of(a, value), at_b = layout_of(b, value), at_out = layout_of(out, 0);
  if (out.column_stride == 1 && has_quads(a, rows) && has_quads(b, rows) && has_quads(out, rows)) {
    PG_CUDA_LAUNCH(q, each_quad<Op>, pg_stride_grid(q, rows * pg_blocks(columns, 4)),
                   dim3(PG_CUDA_BLOCK), 0, op, a.data, at_a, b.data, at_b, rows, columns, out.data,
                   at_out);
  } else {
    PG_CUDA_LAUNCH(q, each_element<Op>, pg_stride_grid(q, rows * columns), dim3(PG_CUDA_BLOCK), 0,
                   op, a.data, at_a, b.data, at_b, rows, columns, out.data, at_out);
  }
  return 0;
}

static int run_binary(pg_queue *q, pg_binary_op op, pg_view a, pg_view b, float value, int64_t rows,
                      int64_t columns, pg_view out) {
  switch (op) {
#define CASE(NAME, name)                                                                           \
  case NAME: return run(q, name(), a, b, value, rows, columns, out);
    CASE(PG_ADD, op_add)
    CASE(PG_SUB, op_sub)
    CASE(PG_MUL, op_mul)
    CASE(PG_DIV, op_div)
    CASE(PG_MIN, op_min)
    CASE(PG_MAX, op_max)
    CASE(PG_POW, op_pow)
    CASE(PG_LT, op_lt)
    CASE(PG_LE, op_le)
    CASE(PG_GT, op_gt)
    CASE(PG_GE, op_ge)
    CASE(PG_EQ, op_eq)
    CASE(PG_NE, op_ne)
    CASE(PG_MASKED, op_masked)
#undef CASE
  }
  return pg_cuda_refuse(q, "no operation %d", (int)op);
}

int pg_cuda_binary(pg_queue *q, pg_binary_op op, pg_view a, pg_view b, int64_t rows,
                   int64_t columns, pg_view out) {
  return run_binary(q, op, a, b, 0, rows, columns, out);
}

int pg_cuda_scalar(pg_queue *q, pg_binary_op op, pg_view a, double scalar, bool reversed,
                   int64_t rows, int64_t columns, pg_view out) {
  const pg_view number = {NULL, 0, 0};
  return run_binary(q, op, reversed ? number : a, reversed ? a : number, (float)scalar, rows,
                    columns, out);
}

int pg_cuda_unary(pg_queue *q, pg_unary_op op, pg_view a, int64_t rows, int64_t columns,
                  pg_view out) {
  const pg_view none = {NULL, 0, 0};
  switch (op) {
#define CASE(NAME, name)                                                                           \
  case NAME: return run(q, name(), a, none, 0, rows, columns, out);
    CASE(PG_NEG, op_neg)
    CASE(PG_ABS, op_abs)
    CASE(PG_SQRT, op_sqrt)
    CASE(PG_SQUARE, op_square)
    CASE(PG_EXP, op_exp)
    CASE(PG_LOG, op_log)
    CASE(PG_SIGN, op_sign)
    CASE(PG_RECIPROCAL, op_reciprocal)
    CASE(PG_TANH, op_tanh)
    CASE(PG_ISFINITE, op_isfinite)
    CASE(PG_FLOOR, op_floor)
    CASE(PG_CEIL, op_ceil)
    CASE(PG_ROUND, op_round)
#undef CASE
  }
  return pg_cuda_refuse(q, "no operation %d", (int)op);
}

/* x <- (float)(1-w) x + (float)w y: 1-w is taken in fp64, each product and the sum round once. */
int pg_cuda_lerp(pg_queue *q, pg_view x, pg_view y, double w, int64_t rows, int64_t columns) {
  const op_lerp op = {(float)(1 - w), (float)w};
  return run(q, op, x, y, 0, rows, columns, x);
}
