/* The size of a matrix: blocks of rows come down and are summed in fp64. */
#include "weight_size.h"
#include "finite.h"

#include <math.h>
#include <stdlib.h>

#define BLOCK ((int64_t)1 << 20) /* elements */

/* A row of W, of which sums[d] and squares[d] keep the columns. */
static void add_row(const float *w, const float *s, int64_t d, double *sums, double *squares,
                    pg_weight_size *out) {
  double square = 0;
  for (int64_t j = 0; j < d; j++) {
    const double x = (double)w[j];
    square += x * x;
    sums[j] += x;
    squares[j] += x * x;
    out->largest = fmax(out->largest, fabs(x));
  }
  if (s)
    for (int64_t j = 0; j < d; j++) out->product += (double)w[j] * (double)s[j];
  out->norm += square;
  out->row_min = fmin(out->row_min, sqrt(square));
  out->row_max = fmax(out->row_max, sqrt(square));
}

int pg_weight_measure(const pg_tensor *w, const pg_tensor *s, const char *what, double *mean,
                      pg_weight_size *out) {
  pg_context *ctx = w->context;
  const double start = pg__now();
  double *sums = NULL;
  float *block = NULL;
  int status;
  PG_TRY(pg__check_cloud(w, 1, what));
  if (s && (s->context != ctx || s->dtype != PG_F32 || s->ndim != 2 || s->shape[0] != w->shape[0] ||
            s->shape[1] != w->shape[1]))
    return pg_fail(ctx, PG_EINVAL, "the change of %s must be F32 [%lld, %lld] like it", what,
                   (long long)w->shape[0], (long long)w->shape[1]);
  PG_TRY(pg__check_finite(w, what));
  if (s) PG_TRY(pg__check_finite(s, "its change"));
  const int64_t rows = w->shape[0], d = w->shape[1], step = pg__max(1, BLOCK / d);
  const size_t most = (size_t)(pg__min(step, rows) * d);
  double *squares;
  sums = calloc(2 * (size_t)d, sizeof *sums);
  block = malloc((s ? 2 : 1) * most * sizeof *block);
  if (!sums || !block) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for blocks of rows"));
  squares = sums + d;
  *out = (pg_weight_size){.row_min = INFINITY, .product = s ? 0 : (double)NAN};
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t count = pg__min(step, rows - first);
    if (pg_context_cancelled(ctx)) PG_TRY(pg_fail(ctx, PG_ECANCELED, "%s: cancelled", what));
    PG_TRY(pg__read_rows(w, first, count, block));
    if (s) PG_TRY(pg__read_rows(s, first, count, block + most));
    for (int64_t i = 0; i < count; i++)
      add_row(block + i * d, s ? block + most + (size_t)(i * d) : NULL, d, sums, squares, out);
  }
  for (int64_t j = 0; j < d; j++) {
    const double x = sums[j] / (double)rows;
    out->mean_row += x * x;
    out->column_max = fmax(out->column_max, squares[j]);
    if (mean) mean[j] = x;
  }
  out->norm = sqrt(out->norm);
  out->mean_row = sqrt(out->mean_row);
  out->column_max = sqrt(out->column_max);
  out->seconds = pg__now() - start;
fail:
  free(sums);
  free(block);
  return status;
}
