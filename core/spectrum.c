/* Singular values of a matrix from the eigenvalues of its smaller Gram matrix. */
#include "finite.h"
#include "gram.h"
#include "internal.h"
#include "rows.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>

int pg_rows_spectrum(const pg_tensor *matrix, double **values, int64_t *count) {
  pg_context *ctx = matrix->context;
  double *gram = NULL, *w = NULL;
  int status;

  PG_TRY(pg__check_cloud(matrix, 1, "spectrum"));
  PG_TRY(pg__check_finite(matrix, "spectrum"));
  const int64_t n = pg__min(matrix->shape[0], matrix->shape[1]);
  if (n > 1 << 15 || matrix->shape[1] > INT_MAX)
    PG_TRY(pg_fail(ctx, PG_EINVAL, "spectrum: [%lld, %lld]; at most %d of the smaller side",
                   (long long)matrix->shape[0], (long long)matrix->shape[1], 1 << 15));
  gram = malloc((size_t)n * (size_t)n * sizeof *gram);
  w = malloc((size_t)n * sizeof *w);
  if (!gram || !w)
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for a Gram matrix of %lld rows", (long long)n));
  PG_TRY(pg__gram(matrix, matrix->shape[0] < matrix->shape[1], gram));
  PG_TRY(pg__eigen(ctx, false, gram, n, w));
  if (status > 0) PG_TRY(pg_fail(ctx, PG_EDEVICE, "LAPACK's dsyevd gave up: info = %d", status));
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
  free(gram);
  free(w);
  return status;
}
