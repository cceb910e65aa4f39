/* Element-wise operations on matrix views: what Lua tensors and Lua optimizers compute with. One
 * fp32 rounding per operation, no contraction, so that an optimizer written from them can equal one
 * written in C bit for bit. */
#include "cpu.h"
#include <math.h>

/* A run of n elements out[k] = a[k] op b[k] with a stride each. Unit and zero strides, the common
 * ones, have loops of their own, so that they vectorise. */
typedef void binary_run(const float *a, int64_t sa, const float *b, int64_t sb, float *out,
                        int64_t so, int64_t n);
typedef void unary_run(const float *a, int64_t sa, float *out, int64_t so, int64_t n);

#define BINARY_RUN(name, expression)                                                               \
  static void name(const float *a, int64_t sa, const float *b, int64_t sb, float *out, int64_t so, \
                   int64_t n) {                                                                    \
    if (so == 1 && sa == 1 && sb == 1) {                                                           \
      _Pragma("omp simd") for (int64_t k = 0; k < n; k++) {                                        \
        float x = a[k], y = b[k];                                                                  \
        out[k] = (expression);                                                                     \
      }                                                                                            \
    } else if (so == 1 && sa == 1 && sb == 0) {                                                    \
      float y = *b;                                                                                \
      _Pragma("omp simd") for (int64_t k = 0; k < n; k++) {                                        \
        float x = a[k];                                                                            \
        out[k] = (expression);                                                                     \
      }                                                                                            \
    } else if (so == 1 && sa == 0 && sb == 1) {                                                    \
      float x = *a;                                                                                \
      _Pragma("omp simd") for (int64_t k = 0; k < n; k++) {                                        \
        float y = b[k];                                                                            \
        out[k] = (expression);                                                                     \
      }                                                                                            \
    } else {                                                                                       \
      for (int64_t k = 0; k < n; k++) {                                                            \
        float x = a[k * sa], y = b[k * sb];                                                        \
        out[k * so] = (expression);                                                                \
      }                                                                                            \
    }                                                                                              \
  }
#define UNARY_RUN(name, expression)                                                                \
  static void name(const float *a, int64_t sa, float *out, int64_t so, int64_t n) {                \
    if (so == 1 && sa == 1) {                                                                      \
      _Pragma("omp simd") for (int64_t k = 0; k < n; k++) {                                        \
        float x = a[k];                                                                            \
        out[k] = (expression);                                                                     \
      }                                                                                            \
    } else {                                                                                       \
      for (int64_t k = 0; k < n; k++) {                                                            \
        float x = a[k * sa];                                                                       \
        out[k * so] = (expression);                                                                \
      }                                                                                            \
    }                                                                                              \
  }
/* A function of the mathematical library, element by element. */
#define CALL_RUN(name, function)                                                                   \
  static void name(const float *a, int64_t sa, float *out, int64_t so, int64_t n) {                \
    for (int64_t k = 0; k < n; k++) out[k * so] = function(a[k * sa]);                             \
  }

BINARY_RUN(run_add, x + y)
BINARY_RUN(run_sub, x - y)
BINARY_RUN(run_mul, x *y)
BINARY_RUN(run_div, x / y)
/* NaN wins, as in NumPy's minimum and maximum. */
BINARY_RUN(run_min, x != x || x < y ? x : y)
BINARY_RUN(run_max, x != x || x > y ? x : y)
static void run_pow(const float *a, int64_t sa, const float *b, int64_t sb, float *out, int64_t so,
                    int64_t n) {
  for (int64_t k = 0; k < n; k++) out[k * so] = powf(a[k * sa], b[k * sb]);
}
BINARY_RUN(run_lt, x < y ? 1.0f : 0.0f)
BINARY_RUN(run_le, x <= y ? 1.0f : 0.0f)
BINARY_RUN(run_gt, x > y ? 1.0f : 0.0f)
BINARY_RUN(run_ge, x >= y ? 1.0f : 0.0f)
BINARY_RUN(run_eq, x == y ? 1.0f : 0.0f)
BINARY_RUN(run_ne, x != y ? 1.0f : 0.0f)
BINARY_RUN(run_masked, y != 0 ? x : -0.0f)

UNARY_RUN(run_neg, -x)
UNARY_RUN(run_abs, fabsf(x))
UNARY_RUN(run_sqrt, sqrtf(x))
UNARY_RUN(run_square, x *x)
CALL_RUN(run_exp, expf)
CALL_RUN(run_log, logf)
UNARY_RUN(run_sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x) /* keeps zeros and NaN */
UNARY_RUN(run_reciprocal, 1.0f / x)
CALL_RUN(run_tanh, tanhf)
UNARY_RUN(run_isfinite, x - x == 0 ? 1.0f : 0.0f)
UNARY_RUN(run_floor, floorf(x))
UNARY_RUN(run_ceil, ceilf(x))
UNARY_RUN(run_round, rintf(x))

static binary_run *const binary_runs[] = {
    [PG_ADD] = run_add, [PG_SUB] = run_sub,       [PG_MUL] = run_mul, [PG_DIV] = run_div,
    [PG_MIN] = run_min, [PG_MAX] = run_max,       [PG_POW] = run_pow, [PG_LT] = run_lt,
    [PG_LE] = run_le,   [PG_GT] = run_gt,         [PG_GE] = run_ge,   [PG_EQ] = run_eq,
    [PG_NE] = run_ne,   [PG_MASKED] = run_masked,
};
static unary_run *const unary_runs[] = {
    [PG_NEG] = run_neg,     [PG_ABS] = run_abs,
    [PG_SQRT] = run_sqrt,   [PG_SQUARE] = run_square,
    [PG_EXP] = run_exp,     [PG_LOG] = run_log,
    [PG_SIGN] = run_sign,   [PG_RECIPROCAL] = run_reciprocal,
    [PG_TANH] = run_tanh,   [PG_ISFINITE] = run_isfinite,
    [PG_FLOOR] = run_floor, [PG_CEIL] = run_ceil,
    [PG_ROUND] = run_round,
};

#define CHUNK 16384

/* Whether a view walks memory as one run of rows*columns elements at stride 1, or stays at one. */
static bool is_flat(pg_view v, int64_t columns) {
  return (v.column_stride == 1 && v.row_stride == columns) ||
         (v.column_stride == 0 && v.row_stride == 0);
}

/* Longer runs for the shapes that allow them: one row when every view is flat or a column. */
static void merge_rows(pg_view *views, int count, int64_t *rows, int64_t *columns) {
  bool flat = true;
  for (int i = 0; i < count; i++) flat = flat && is_flat(views[i], *columns);
  if (*columns != 1 && !flat) return;
  if (*columns == 1)
    for (int i = 0; i < count; i++) views[i].column_stride = views[i].row_stride;
  *columns *= *rows;
  *rows = 1;
}

static const float *at(pg_view v, int64_t row, int64_t column) {
  return v.data + row * v.row_stride + column * v.column_stride;
}

static void run_binary(pg_queue *q, binary_run *run, pg_view a, pg_view b, int64_t rows,
                       int64_t columns, pg_view out) {
  pg_view views[] = {a, b, out};
  merge_rows(views, 3, &rows, &columns);
  a = views[0], b = views[1], out = views[2];
  int64_t chunks = (columns + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(pg_team(q, rows *columns))
  {
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < rows * chunks; t++) {
      int64_t i = t / chunks, j = t % chunks * CHUNK;
      run(at(a, i, j), a.column_stride, at(b, i, j), b.column_stride, (float *)at(out, i, j),
          out.column_stride, pg_min64(CHUNK, columns - j));
    }
    pg_float_mode_restore(mode);
  }
}

int PG_CPU(binary)(pg_queue *q, pg_binary_op op, pg_view a, pg_view b, int64_t rows,
                   int64_t columns, pg_view out) {
  run_binary(q, binary_runs[op], a, b, rows, columns, out);
  return 0;
}

int PG_CPU(scalar)(pg_queue *q, pg_binary_op op, pg_view a, double scalar, bool reversed,
                   int64_t rows, int64_t columns, pg_view out) {
  float value = (float)scalar;
  pg_view s = {&value, 0, 0};
  run_binary(q, binary_runs[op], reversed ? s : a, reversed ? a : s, rows, columns, out);
  return 0;
}

int PG_CPU(unary)(pg_queue *q, pg_unary_op op, pg_view a, int64_t rows, int64_t columns,
                  pg_view out) {
  unary_run *run = unary_runs[op];
  pg_view views[] = {a, out};
  merge_rows(views, 2, &rows, &columns);
  a = views[0], out = views[1];
  int64_t chunks = (columns + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(pg_team(q, rows *columns))
  {
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < rows * chunks; t++) {
      int64_t i = t / chunks, j = t % chunks * CHUNK;
      run(at(a, i, j), a.column_stride, (float *)at(out, i, j), out.column_stride,
          pg_min64(CHUNK, columns - j));
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}

static void lerp_run(float *x, int64_t sx, const float *y, int64_t sy, int64_t n, float keep,
                     float take) {
  if (sx == 1 && sy == 1) {
#pragma omp simd
    for (int64_t k = 0; k < n; k++) x[k] = keep * x[k] + take * y[k];
  } else {
    for (int64_t k = 0; k < n; k++) x[k * sx] = keep * x[k * sx] + take * y[k * sy];
  }
}

/* x <- (float)(1-w) x + (float)w y: 1-w is taken in fp64, each product and the sum round once. */
int PG_CPU(lerp)(pg_queue *q, pg_view x, pg_view y, double w, int64_t rows, int64_t columns) {
  float keep = (float)(1 - w), take = (float)w;
  pg_view views[] = {x, y};
  merge_rows(views, 2, &rows, &columns);
  x = views[0], y = views[1];
  int64_t chunks = (columns + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(pg_team(q, rows *columns))
  {
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < rows * chunks; t++) {
      int64_t i = t / chunks, j = t % chunks * CHUNK;
      lerp_run((float *)at(x, i, j), x.column_stride, at(y, i, j), y.column_stride,
               pg_min64(CHUNK, columns - j), keep, take);
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
