/* Singular values of a matrix from the eigenvalues of its smaller Gram matrix. */
#include "finite.h"
#include "internal.h"
#include "rows.h"

#include <cblas.h>
#include <limits.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>

/* LAPACK, Fortran's calling convention: all eigenvalues of a symmetric matrix, increasing. */
extern void dsyevd_(const char *job, const char *triangle, const int *n, double *a, const int *lda,
                    double *w, double *work, const int *lwork, int *iwork, const int *liwork,
                    int *info);

#define CHUNK ((int64_t)1 << 20) /* elements of the matrix that are widened at a time */

/* gram [side, side], its lower triangle in C's order: x^T x over the rows, or x x^T. */
static int make_gram(const pg_tensor *t, bool of_rows, int64_t side, double *gram) {
  pg_context *ctx = t->context;
  const int64_t lines = t->shape[0], columns = t->shape[1];
  /* x x^T needs the whole matrix beside each of its parts; it has no more rows than columns. */
  const int64_t step = of_rows ? lines : pg__max(1, CHUNK / columns);
  const size_t most = (size_t)(pg__min(step, lines) * columns);
  float *narrow = malloc(most * sizeof *narrow);
  double *wide = malloc(most * sizeof *wide);
  pg_tensor *part = NULL;
  int status = 0;
  if (!narrow || !wide) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory to widen %zu numbers", most));
  for (int64_t i = 0; i < lines; i += step) {
    const int64_t shape[2] = {pg__min(step, lines - i), columns};
    if (pg_context_cancelled(ctx)) PG_TRY(pg_fail(ctx, PG_ECANCELED, "the spectrum was cancelled"));
    PG_TRY(pg_tensor_view(t, i * t->stride[0], 2, shape, t->stride, &part));
    PG_TRY(pg_tensor_read(part, narrow));
    pg_tensor_free(part);
    part = NULL;
    for (int64_t k = 0; k < shape[0] * columns; k++) wide[k] = (double)narrow[k];
    cblas_dsyrk(CblasRowMajor, CblasLower, of_rows ? CblasNoTrans : CblasTrans, (int)side,
                (int)(of_rows ? columns : shape[0]), 1, wide, (int)columns, i > 0, gram, (int)side);
  }
fail:
  pg_tensor_free(part);
  free(narrow);
  free(wide);
  return status;
}

int pg_rows_spectrum(const pg_tensor *matrix, double **values, int64_t *count) {
  pg_context *ctx = matrix->context;
  const int threads = omp_get_max_threads();
  double *gram = NULL, *w = NULL, *work = NULL, size = 0;
  int *iwork = NULL, isize = 0, lwork = -1, liwork = -1, info = 0, side;
  int status;

  omp_set_num_threads(ctx->threads > 0 ? ctx->threads : threads);
  PG_TRY(pg__check_cloud(matrix, 1, "spectrum"));
  PG_TRY(pg__check_finite(matrix, "spectrum"));
  const int64_t n = pg__min(matrix->shape[0], matrix->shape[1]);
  if (n > 1 << 15 || matrix->shape[1] > INT_MAX)
    PG_TRY(pg_fail(ctx, PG_EINVAL, "spectrum: [%lld, %lld]; at most %d of the smaller side",
                   (long long)matrix->shape[0], (long long)matrix->shape[1], 1 << 15));
  side = (int)n;
  gram = malloc((size_t)n * (size_t)n * sizeof *gram);
  w = malloc((size_t)n * sizeof *w);
  if (!gram || !w)
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for a Gram matrix of %lld rows", (long long)n));
  PG_TRY(make_gram(matrix, matrix->shape[0] < matrix->shape[1], n, gram));
  /* The lower triangle by rows is the upper one by columns. */
  dsyevd_("N", "U", &side, gram, &side, w, &size, &lwork, &isize, &liwork, &info);
  lwork = (int)size;
  liwork = isize;
  work = malloc((size_t)pg__max(lwork, 1) * sizeof *work);
  iwork = malloc((size_t)pg__max(liwork, 1) * sizeof *iwork);
  if (!work || !iwork) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for %d eigenvalues", side));
  dsyevd_("N", "U", &side, gram, &side, w, work, &lwork, iwork, &liwork, &info);
  if (info != 0) PG_TRY(pg_fail(ctx, PG_EDEVICE, "LAPACK's dsyevd gave up: info = %d", info));
  for (int64_t i = 0; i < n - 1 - i; i++) {
    const double swap = w[i];
    w[i] = w[n - 1 - i];
    w[n - 1 - i] = swap;
  }
  for (int64_t i = 0; i < n; i++) w[i] = sqrt(fmax(w[i], 0));
  *values = w;
  *count = n;
  w = NULL;
fail:
  omp_set_num_threads(threads);
  free(gram);
  free(w);
  free(work);
  free(iwork);
  return status;
}
