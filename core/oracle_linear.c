/* The oracle's linear algebra: LAPACK and BLAS in fp64 on host memory. */
#include "lapack.h"
#include "oracle_internal.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

int pg__oracle_alloc(pg_context *ctx, size_t count, size_t size, const char *what, void *out) {
  void *memory = count > SIZE_MAX / size ? NULL : malloc(count > 0 ? count * size : 1);
  if (!memory)
    return pg_fail(ctx, PG_ENOMEM, "oracle: no memory for %s (%zu numbers of %zu bytes)", what,
                   count, size);
  *(void **)out = memory;
  return 0;
}

void pg__oracle_distances(const double *x, int64_t n, int64_t d, double *d2) {
  cblas_dsyrk(CblasRowMajor, CblasLower, CblasNoTrans, (int)n, (int)d, -2, x, (int)d, 0, d2,
              (int)n);
  for (int64_t i = 0; i < n; i++) {
    const double a = -0.5 * d2[i * n + i];
    for (int64_t j = 0; j < i; j++)
      d2[i * n + j] = fmax(0, d2[i * n + j] + a - 0.5 * d2[j * n + j]);
  }
  for (int64_t i = 0; i < n; i++) {
    d2[i * n + i] = 0;
    for (int64_t j = 0; j < i; j++) d2[j * n + i] = d2[i * n + j];
  }
}

int pg__cholesky(double *a, int64_t n) {
  const int size = (int)n;
  int info = 0;
  dpotrf_("U", &size, a, &size, &info); /* the upper one by columns is the lower one by rows */
  return info == 0 ? 0 : -1;
}

void pg__cholesky_solve(const double *factor, int64_t n, double *b, int64_t m) {
  cblas_dtrsm(CblasRowMajor, CblasLeft, CblasLower, CblasNoTrans, CblasNonUnit, (int)n, (int)m, 1,
              factor, (int)n, b, (int)m);
  cblas_dtrsm(CblasRowMajor, CblasLeft, CblasLower, CblasTrans, CblasNonUnit, (int)n, (int)m, 1,
              factor, (int)n, b, (int)m);
}

int pg__cholesky_invert(double *factor, int64_t n) {
  const int size = (int)n;
  int info = 0;
  dpotri_("U", &size, factor, &size, &info);
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < i; j++) factor[j * n + i] = factor[i * n + j];
  return info == 0 ? 0 : -1;
}

/* With w = D / sqrt(sum D), D the row sums of t, L + w w^T is definite, of the rows' own scales,
 * and solves L x = g because both sides sum to zero. */
int pg__laplacian_solve(const double *t, const double *g, int64_t n, int64_t d, double *factor,
                        double *x) {
  double total = 0;
  for (int64_t i = 0; i < n; i++) {
    double sum = 0;
    for (int64_t j = 0; j < n; j++) sum += i == j ? 0 : t[i * n + j];
    x[i] = sum;
    total += sum;
  }
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j < i; j++) factor[i * n + j] = x[i] * x[j] / total - t[i * n + j];
    factor[i * n + i] = x[i] + x[i] * x[i] / total;
  }
  if (pg__cholesky(factor, n) < 0) return -1;
  memcpy(x, g, (size_t)(n * d) * sizeof *x);
  pg__cholesky_solve(factor, n, x, d);
  return 0;
}
