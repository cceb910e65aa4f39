#include "gram.h"
#include "lapack.h"

#include <cblas.h>
#include <limits.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>

#define CHUNK ((int64_t)1 << 20) /* elements that are widened at a time */

/* BLAS takes the threads of the context; returns what to set back. */
static int take_threads(const pg_context *ctx) {
  const int before = omp_get_max_threads();
  if (ctx->threads > 0) omp_set_num_threads(ctx->threads);
  return before;
}

int pg__gram(const pg_tensor *t, bool of_rows, double *gram) {
  pg_context *ctx = t->context;
  const int64_t lines = t->shape[0], columns = t->shape[1], n = of_rows ? lines : columns;
  /* Products of rows need the whole matrix. */
  const int64_t step = of_rows ? lines : pg__max(1, CHUNK / columns);
  const size_t most = (size_t)(pg__min(step, lines) * columns);
  const int threads = take_threads(ctx);
  float *narrow = malloc(most * sizeof *narrow);
  double *wide = malloc(most * sizeof *wide);
  pg_tensor *part = NULL;
  int status = 0;
  if (!narrow || !wide) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory to widen %zu numbers", most));
  for (int64_t i = 0; i < lines; i += step) {
    const int64_t shape[2] = {pg__min(step, lines - i), columns};
    if (pg_context_cancelled(ctx))
      PG_TRY(pg_fail(ctx, PG_ECANCELED, "a Gram matrix was cancelled"));
    PG_TRY(pg_tensor_view(t, i * t->stride[0], 2, shape, t->stride, &part));
    PG_TRY(pg_tensor_read(part, narrow));
    pg_tensor_free(part);
    part = NULL;
    for (int64_t k = 0; k < shape[0] * columns; k++) wide[k] = (double)narrow[k];
    cblas_dsyrk(CblasRowMajor, CblasLower, of_rows ? CblasNoTrans : CblasTrans, (int)n,
                (int)(of_rows ? columns : shape[0]), 1, wide, (int)columns, i > 0, gram, (int)n);
  }
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < i; j++) gram[j * n + i] = gram[i * n + j];
fail:
  omp_set_num_threads(threads);
  pg_tensor_free(part);
  free(narrow);
  free(wide);
  return status;
}

int pg__gram_factor(pg_context *ctx, double *gram, int64_t n, const char *what, double *condition) {
  const int threads = take_threads(ctx), side = (int)n;
  double *work = malloc(3 * (size_t)n * sizeof *work);
  int *iwork = malloc((size_t)n * sizeof *iwork);
  int status = 0, info = 0;
  if (!work || !iwork) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for a factor of %d rows", side));
  /* The lower triangle by rows is the upper one by columns. */
  const double norm = dlansy_("1", "U", &side, gram, &side, work);
  dpotrf_("U", &side, gram, &side, &info);
  double reciprocal = 0;
  if (info == 0) dpocon_("U", &side, gram, &side, &norm, &reciprocal, work, iwork, &info);
  if (info != 0 || !(reciprocal > (double)n * 0x1p-52))
    PG_TRY(pg_fail(ctx, PG_EINVAL,
                   "%s: its %d columns are linearly dependent to rounding, and what they span is "
                   "not defined",
                   what, side));
  if (condition) *condition = 1 / reciprocal;
fail:
  omp_set_num_threads(threads);
  free(work);
  free(iwork);
  return status;
}

void pg__gram_divide(const pg_context *ctx, const double *factor, int64_t n, double *x, int64_t m) {
  const int threads = take_threads(ctx);
  cblas_dtrsm(CblasRowMajor, CblasRight, CblasLower, CblasTrans, CblasNonUnit, (int)m, (int)n, 1,
              factor, (int)n, x, (int)n);
  omp_set_num_threads(threads);
}

void pg__gram_solve(const pg_context *ctx, const double *factor, int64_t n, double *x, int64_t m) {
  const int threads = take_threads(ctx);
  cblas_dtrsm(CblasRowMajor, CblasLeft, CblasLower, CblasNoTrans, CblasNonUnit, (int)n, (int)m, 1,
              factor, (int)n, x, (int)m);
  cblas_dtrsm(CblasRowMajor, CblasLeft, CblasLower, CblasTrans, CblasNonUnit, (int)n, (int)m, 1,
              factor, (int)n, x, (int)m);
  omp_set_num_threads(threads);
}

/* Rows are columns to LAPACK: x is the n x m matrix of which Q R is wanted. */
int pg__orthonormal_rows(pg_context *ctx, double *x, int64_t m, int64_t n) {
  const int threads = take_threads(ctx), rows = (int)n, columns = (int)m;
  double *tau = malloc((size_t)m * sizeof *tau), *work = NULL, size = 0;
  int status = 0, info = 0, lwork = -1;
  if (!tau) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for %d orthonormal rows", columns));
  dgeqrf_(&rows, &columns, x, &rows, tau, &size, &lwork, &info);
  lwork = (int)fmax(size, 1);
  work = malloc((size_t)lwork * sizeof *work);
  if (!work) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for %d orthonormal rows", columns));
  dgeqrf_(&rows, &columns, x, &rows, tau, work, &lwork, &info);
  if (info == 0) { /* its workspace is never the larger: dorgqr takes blocks of the same width */
    dorgqr_(&rows, &columns, &columns, x, &rows, tau, work, &lwork, &info);
  }
  if (info != 0)
    PG_TRY(pg_fail(ctx, PG_EINVAL, "LAPACK refused %d rows of %d: info = %d", columns, rows, info));
fail:
  omp_set_num_threads(threads);
  free(tau);
  free(work);
  return status;
}

int pg__eigen(pg_context *ctx, bool vectors, double *a, int64_t n, double *w) {
  const int threads = take_threads(ctx), side = (int)n;
  double size = 0, *work = NULL;
  int isize = 0, lwork = -1, liwork = -1, info = 0, status = 0, *iwork = NULL;
  const char *job = vectors ? "V" : "N";
  dsyevd_(job, "U", &side, a, &side, w, &size, &lwork, &isize, &liwork, &info);
  lwork = (int)size;
  liwork = isize;
  work = malloc((size_t)pg__max(lwork, 1) * sizeof *work);
  iwork = malloc((size_t)pg__max(liwork, 1) * sizeof *iwork);
  if (!work || !iwork) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for %d eigenvalues", side));
  dsyevd_(job, "U", &side, a, &side, w, work, &lwork, iwork, &liwork, &info);
  status = info;
fail:
  omp_set_num_threads(threads);
  free(work);
  free(iwork);
  return status;
}
