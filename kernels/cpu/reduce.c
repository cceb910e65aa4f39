/* Reductions of matrix views along rows, along columns, or of everything.
 *
 * The fp64 sum of a run has the order of pg_sum_run. Squares of fp32 numbers are exact in fp64, so
 * `norm` has one rounding per addition, one of the root and one to fp32. Reducing along columns
 * adds rows in order inside fixed blocks of rows, then the blocks in order. Neither depends on
 * threads or CPU level. */
#include "vector.h"
#include <stdlib.h>

#define MAX_BLOCKS 64 /* of rows, when reducing along columns */
#define MIN_ROWS 64
#define COLUMNS 512 /* columns a task handles */

/* What has been seen of a set of elements: a sum, or the extreme and where it is. */
typedef struct partial {
  double value;
  int64_t index;
} partial;

static bool is_sum(pg_reduce_op op) {
  return op == PG_SUM || op == PG_MEAN || op == PG_NORM;
}
static bool is_max(pg_reduce_op op) {
  return op == PG_RMAX || op == PG_ARGMAX;
}

static partial empty(pg_reduce_op op) {
  return (partial){is_sum(op) ? 0.0 : is_max(op) ? -INFINITY : INFINITY, 0};
}

/* a then b; NaN beats every number and the earlier of equals stays. */
static partial join(pg_reduce_op op, partial a, partial b) {
  if (is_sum(op)) return (partial){a.value + b.value, 0};
  if (isnan(a.value)) return a;
  bool better = isnan(b.value) || (is_max(op) ? b.value > a.value : b.value < a.value);
  return better ? b : a;
}

static float finish(pg_reduce_op op, partial p, int64_t count) {
  switch (op) {
  case PG_MEAN: return (float)(p.value / (double)count);
  case PG_NORM: return (float)sqrt(p.value);
  case PG_ARGMAX:
  case PG_ARGMIN: return (float)p.index;
  default: return (float)p.value;
  }
}

/* The extreme of a run and its first position, or those of its first NaN. */
static partial extreme_run(const float *x, int64_t stride, int64_t n, bool max, bool locate) {
  float best = max ? -INFINITY : INFINITY;
  int nan = 0;
  if (stride == 1) {
    best = max ? pg_max_run(x, n) : pg_min_run(x, n);
#pragma omp simd reduction(| : nan)
    for (int64_t k = 0; k < n; k++) nan |= x[k] != x[k];
  } else {
    for (int64_t k = 0; k < n; k++) {
      float value = x[k * stride];
      best = (max ? value > best : value < best) ? value : best;
      nan |= value != value;
    }
  }
  partial p = {nan ? NAN : best, 0};
  if (locate)
    while (p.index < n - 1 && !(nan ? isnan(x[p.index * stride]) : x[p.index * stride] == best))
      p.index++;
  return p;
}

static partial reduce_run(pg_reduce_op op, const float *x, int64_t stride, int64_t n) {
  if (is_sum(op)) return (partial){pg_sum_run(x, stride, n, op == PG_NORM), 0};
  return extreme_run(x, stride, n, is_max(op), op == PG_ARGMAX || op == PG_ARGMIN);
}

static void along_rows(pg_queue *q, pg_reduce_op op, pg_view a, int64_t rows, int64_t columns,
                       float *out) {
#pragma omp parallel for num_threads(pg_team(q, rows *columns)) schedule(static)
  for (int64_t i = 0; i < rows; i++)
    out[i] =
        finish(op, reduce_run(op, a.data + i * a.row_stride, a.column_stride, columns), columns);
}

/* Rows [i0,i1) of columns [j0,j1): values and, for args, rows (as fp64, exact) from j0 on. */
static void column_block(pg_reduce_op op, pg_view a, int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                         double *value, double *row) {
  int64_t n = j1 - j0, stride = a.column_stride;
  for (int64_t j = 0; j < n; j++) value[j] = empty(op).value;
  for (int64_t i = i0; i < i1; i++) {
    const float *x = a.data + i * a.row_stride + j0 * stride;
    if (row) {
      for (int64_t j = 0; j < n; j++) {
        partial seen = {value[j], (int64_t)row[j]}, next = {(double)x[j * stride], i};
        seen = i == i0 ? next : join(op, seen, next);
        value[j] = seen.value;
        row[j] = (double)seen.index;
      }
    } else if (op == PG_NORM) {
#pragma omp simd
      for (int64_t j = 0; j < n; j++) value[j] += (double)x[j * stride] * (double)x[j * stride];
    } else if (is_sum(op)) {
#pragma omp simd
      for (int64_t j = 0; j < n; j++) value[j] += (double)x[j * stride];
    } else if (is_max(op)) {
      /* A NaN replaces anything and nothing replaces it. */
#pragma omp simd
      for (int64_t j = 0; j < n; j++) {
        double v = (double)x[j * stride];
        value[j] = ((v > value[j]) | (v != v)) ? v : value[j];
      }
    } else {
#pragma omp simd
      for (int64_t j = 0; j < n; j++) {
        double v = (double)x[j * stride];
        value[j] = ((v < value[j]) | (v != v)) ? v : value[j];
      }
    }
  }
}

static int along_columns(pg_queue *q, pg_reduce_op op, pg_view a, int64_t rows, int64_t columns,
                         float *out) {
  int64_t size = pg_max64(MIN_ROWS, (rows + MAX_BLOCKS - 1) / MAX_BLOCKS);
  int64_t blocks = (rows + size - 1) / size, groups = (columns + COLUMNS - 1) / COLUMNS;
  bool locate = op == PG_ARGMAX || op == PG_ARGMIN;
  size_t count = (size_t)(blocks * columns);
  double *values = malloc((locate ? 2 : 1) * count * sizeof *values + 1);
  double *where = locate && values ? values + count : NULL;
  if (!values) return pg_refuse(q, "no memory to reduce %lld columns", (long long)columns);
#pragma omp parallel for num_threads(pg_team(q, rows *columns)) schedule(dynamic)
  for (int64_t t = 0; t < blocks * groups; t++) {
    int64_t b = t / groups, j0 = t % groups * COLUMNS, at = b * columns + j0;
    column_block(op, a, b * size, pg_min64(rows, (b + 1) * size), j0,
                 pg_min64(columns, j0 + COLUMNS), values + at, where ? where + at : NULL);
  }
  for (int64_t j = 0; j < columns; j++) {
    partial p = empty(op);
    for (int64_t b = 0; b < blocks; b++) {
      int64_t at = b * columns + j;
      partial next = {values[at], where ? (int64_t)where[at] : 0};
      p = b ? join(op, p, next) : next;
    }
    out[j] = finish(op, p, rows);
  }
  free(values);
  return 0;
}

static int everything(pg_queue *q, pg_reduce_op op, pg_view a, int64_t rows, int64_t columns,
                      float *out) {
  int64_t count = rows * columns;
  /* A column or a matrix without gaps is one long row. */
  if (columns == 1) a.column_stride = a.row_stride;
  if (columns == 1 || (a.column_stride == 1 && a.row_stride == columns)) {
    columns = count;
    rows = count ? 1 : 0;
  }
  int64_t runs = (columns + PG_SUM_RUN - 1) / PG_SUM_RUN;
  partial *partials = malloc((size_t)(rows * runs) * sizeof *partials + 1);
  if (!partials) return pg_refuse(q, "no memory to reduce %lld elements", (long long)count);
#pragma omp parallel for num_threads(pg_team(q, count)) schedule(static)
  for (int64_t t = 0; t < rows * runs; t++) {
    int64_t i = t / runs, j = t % runs * PG_SUM_RUN;
    partials[t] = reduce_run(op, a.data + i * a.row_stride + j * a.column_stride, a.column_stride,
                             pg_min64(PG_SUM_RUN, columns - j));
    partials[t].index += i * columns + j;
  }
  partial p = empty(op);
  for (int64_t t = 0; t < rows * runs; t++) p = join(op, p, partials[t]);
  *out = finish(op, p, count);
  free(partials);
  return 0;
}

int PG_CPU(reduce)(pg_queue *q, pg_reduce_op op, pg_view a, int64_t rows, int64_t columns, int axis,
                   float *out) {
  if (axis < 0) return everything(q, op, a, rows, columns, out);
  if (axis == 0 && a.row_stride == 1 && a.column_stride != 1) {
    /* A transposed view: its columns are runs. */
    along_rows(q, op, (pg_view){a.data, a.column_stride, a.row_stride}, columns, rows, out);
    return 0;
  }
  if (axis == 0) return along_columns(q, op, a, rows, columns, out);
  along_rows(q, op, a, rows, columns, out);
  return 0;
}
