#include "eigen.h"
#include "../gram.h"

#include <cblas.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>

/* Work goes to as many threads as the context has; back to `threads` afterwards. */
static int threads_for(const pg_context *ctx) {
  const int threads = omp_get_max_threads();
  omp_set_num_threads(ctx->threads > 0 ? ctx->threads : threads);
  return threads;
}

static int no_memory(pg_context *ctx, int64_t n) {
  return pg_fail(ctx, PG_ENOMEM, "out of memory for a factor of %lld rows", (long long)n);
}
/* [n, n] from the device, in fp64; the caller frees it. */
static int fetch(pg_context *ctx, const float *a, int64_t n, double **out) {
  float *narrow = malloc((size_t)(n * n) * sizeof *narrow);
  double *wide = malloc((size_t)(n * n) * sizeof *wide);
  int status;
  *out = NULL;
  if (!narrow || !wide) {
    status = no_memory(ctx, n);
    goto fail;
  }
  PG_LAUNCH(ctx, download, narrow, a, (size_t)(n * n) * sizeof *narrow);
  for (int64_t i = 0; i < n * n; i++) {
    wide[i] = (double)narrow[i];
    /* LAPACK may not return from what is no number. */
    if (!isfinite(wide[i])) {
      status = pg_fail(ctx, PG_ENONFINITE, "a second moment is not finite");
      goto fail;
    }
  }
  *out = wide;
  wide = NULL;
fail:
  free(narrow);
  free(wide);
  return status;
}

static int send(pg_context *ctx, const double *a, int64_t n, float *to) {
  float *narrow = malloc((size_t)(n * n) * sizeof *narrow);
  int status;
  if (!narrow) {
    status = no_memory(ctx, n);
    goto fail;
  }
  for (int64_t i = 0; i < n * n; i++) narrow[i] = (float)a[i];
  PG_LAUNCH(ctx, upload, to, narrow, (size_t)(n * n) * sizeof *narrow);
fail:
  free(narrow);
  return status;
}

/* a [n, n] <- its eigenvectors, as rows in C's order; w [n] increasing. */
static int decompose(pg_context *ctx, double *a, int64_t n, double *w) {
  const int status = pg__eigen(ctx, true, a, n, w);
  if (status <= 0) return status;
  return pg_fail(ctx, PG_ENONFINITE, "LAPACK's dsyevd gave up: info = %d", status);
}

int pg__inverse_power(pg_context *ctx, const float *a, int64_t n, double floor, double shift,
                      double power, float *out) {
  const int threads = threads_for(ctx), side = (int)n;
  double *q = NULL, *scaled = malloc((size_t)(n * n) * sizeof *scaled);
  double *w = malloc((size_t)n * sizeof *w), *result = malloc((size_t)(n * n) * sizeof *result);
  int status;
  if (!scaled || !w || !result) {
    status = no_memory(ctx, n);
    goto fail;
  }
  PG_TRY(fetch(ctx, a, n, &q));
  PG_TRY(decompose(ctx, q, n, w));
  const double largest = w[n - 1];
  double mean = 0;
  for (int64_t k = 0; k < n; k++) mean += w[k] / (double)n;
  for (int64_t k = 0; k < n; k++) {
    const double f = largest > 0 ? pow(fmax(w[k], floor * largest) + shift * mean, -power) : 0;
    for (int64_t i = 0; i < n; i++) scaled[k * n + i] = f * q[k * n + i];
  }
  cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, side, side, side, 1, q, side, scaled, side,
              0, result, side);
  PG_TRY(send(ctx, result, n, out));
fail:
  omp_set_num_threads(threads);
  free(q);
  free(scaled);
  free(w);
  free(result);
  return status;
}

int pg__eigenvectors(pg_context *ctx, const float *a, int64_t n, float *q) {
  const int threads = threads_for(ctx);
  double *vectors = NULL, *w = malloc((size_t)n * sizeof *w);
  double *falling = malloc((size_t)(n * n) * sizeof *falling);
  int status;
  if (!w || !falling) {
    status = no_memory(ctx, n);
    goto fail;
  }
  PG_TRY(fetch(ctx, a, n, &vectors));
  PG_TRY(decompose(ctx, vectors, n, w));
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < n; j++) falling[i * n + j] = vectors[(n - 1 - j) * n + i];
  PG_TRY(send(ctx, falling, n, q));
fail:
  omp_set_num_threads(threads);
  free(vectors);
  free(w);
  free(falling);
  return status;
}

typedef struct estimate {
  double value;
  int64_t column;
} estimate;

static int largest_first(const void *a, const void *b) {
  const estimate *x = a, *y = b;
  if (x->value != y->value) return x->value > y->value ? -1 : 1;
  return (x->column > y->column) - (x->column < y->column);
}

/* The orthogonal factor of x [n, n], by columns in C's order: of x^T by rows, which LAPACK takes by
 * columns. Signs as they come. */
static int orthogonalise(pg_context *ctx, double *x, int64_t n) {
  double *by_column = malloc((size_t)(n * n) * sizeof *by_column);
  int status;
  if (!by_column) {
    status = no_memory(ctx, n);
    goto fail;
  }
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < n; j++) by_column[j * n + i] = x[i * n + j];
  PG_TRY(pg__orthonormal_rows(ctx, by_column, n, n));
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < n; j++) x[i * n + j] = by_column[j * n + i];
fail:
  free(by_column);
  return status;
}

int pg__power_step(pg_context *ctx, const float *a, int64_t n, float *q, float *permutation) {
  const int threads = threads_for(ctx), side = (int)n;
  const size_t square = (size_t)(n * n) * sizeof(double);
  double *moment = NULL, *basis = NULL, *product = malloc(square), *sorted = calloc(1, square);
  estimate *order = malloc((size_t)n * sizeof *order);
  int status;
  if (!product || !sorted || !order) {
    status = no_memory(ctx, n);
    goto fail;
  }
  PG_TRY(fetch(ctx, a, n, &moment));
  PG_TRY(fetch(ctx, q, n, &basis));
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, side, side, side, 1, moment, side, basis,
              side, 0, product, side);
  for (int64_t j = 0; j < n; j++) {
    order[j] = (estimate){0, j};
    for (int64_t i = 0; i < n; i++) order[j].value += basis[i * n + j] * product[i * n + j];
  }
  qsort(order, (size_t)n, sizeof *order, largest_first);
  for (int64_t j = 0; j < n; j++) sorted[order[j].column * n + j] = 1;
  PG_TRY(send(ctx, sorted, n, permutation));
  for (int64_t j = 0; j < n; j++)
    for (int64_t i = 0; i < n; i++) sorted[i * n + j] = product[i * n + order[j].column];
  PG_TRY(orthogonalise(ctx, sorted, n));
  PG_TRY(send(ctx, sorted, n, q));
fail:
  omp_set_num_threads(threads);
  free(moment);
  free(basis);
  free(product);
  free(sorted);
  free(order);
  return status;
}

pg_sides pg__sides(const pg_increment_group *group, size_t i, bool one_sided, int left, int right) {
  return (pg_sides){.left =
                        group->rows <= PG_FACTOR_LIMIT && !one_sided ? group->slots[i][left] : NULL,
                    .right = group->columns <= PG_FACTOR_LIMIT ? group->slots[i][right] : NULL};
}

int pg__side_moments(const pg_increment_group *group, size_t i, pg_sides moments, double beta) {
  const int64_t m = group->rows, n = group->columns;
  const float *g = group->gradients[i];
  int status = 0;
  if (moments.left) PG_TRY(pg__second_moment(group->context, g, m, n, true, beta, moments.left));
  if (moments.right) PG_TRY(pg__second_moment(group->context, g, m, n, false, beta, moments.right));
fail:
  return status;
}

int pg__between_sides(const pg_increment_group *group, pg_sides by, bool left_transposed,
                      bool right_transposed, float **x, float **y) {
  pg_context *ctx = group->context;
  const int64_t m = group->rows, n = group->columns;
  float *swap;
  int status = 0;
  if (by.left) {
    PG_TRY(pg__matmul(ctx, by.left, left_transposed, *x, false, m, m, n, *y));
    swap = *x, *x = *y, *y = swap;
  }
  if (by.right) {
    PG_TRY(pg__matmul(ctx, *x, false, by.right, right_transposed, m, n, n, *y));
    swap = *x, *x = *y, *y = swap;
  }
fail:
  return status;
}
