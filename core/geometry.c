/* The exact row diameter: checks around the kernel, which does the work (kernels/cpu/diameter.c),
 * and the search for the place of a non-finite number. */
#include "finite.h"
#include "geometry.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

int pg__check_row_finite(const pg_tensor *t, int64_t row, const char *what) {
  pg_context *ctx = t->context;
  int64_t columns = t->shape[1];
  pg_tensor *view = NULL;
  float *values = NULL;
  int status = 0;
  PG_TRY(pg_tensor_view(t, row * t->stride[0], 1, &t->shape[1], &t->stride[1], &view));
  values = malloc((size_t)columns * sizeof *values);
  if (!values) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for a row of %lld numbers", (long long)columns);
    goto fail;
  }
  PG_TRY(pg_tensor_read(view, values));
  for (int64_t j = 0; j < columns; j++)
    if (!isfinite(values[j]))
      PG_TRY(pg_fail(ctx, PG_ENONFINITE, "%s: row %lld, column %lld (counted from 0) is %g", what,
                     (long long)row, (long long)j, (double)values[j]));
fail:
  free(values);
  pg_tensor_free(view);
  return status;
}

int pg__surely_finite(const pg_tensor *t, double factor, bool *sure) {
  pg_context *ctx = t->context;
  void *device = NULL;
  double squares = 0; /* in fp64, where they cannot overflow */
  int status;
  *sure = false;
  PG_TRY(pg__alloc(ctx, sizeof squares, "a sum", &device));
  PG_LAUNCH(ctx, sum, t->data, pg_tensor_elements(t), true, device);
  PG_LAUNCH(ctx, download, &squares, device, sizeof squares);
  *sure = sqrt(squares) * fabs(factor) <= (double)FLT_MAX;
fail:
  if (device) pg__release(ctx, device, sizeof squares);
  return status;
}

int pg__check_finite(const pg_tensor *t, const char *what) {
  pg_context *ctx = t->context;
  int64_t rows = t->shape[0], columns = t->shape[1];
  size_t bytes = (size_t)rows * sizeof(float);
  void *device = NULL;
  float *norms = NULL;
  int status = 0;
  PG_TRY(pg__alloc(ctx, bytes, "row norms", &device));
  norms = malloc(bytes ? bytes : 1);
  if (!norms) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for %lld row norms", (long long)rows);
    goto fail;
  }
  /* A norm can also overflow fp32 over finite elements: the row itself decides. */
  pg_view view = {t->data, t->stride[0], t->stride[1]};
  PG_LAUNCH(ctx, reduce, PG_NORM, view, rows, columns, 1, device);
  PG_LAUNCH(ctx, download, norms, device, bytes);
  for (int64_t i = 0; i < rows; i++)
    if (!isfinite(norms[i])) PG_TRY(pg__check_row_finite(t, i, what));
fail:
  free(norms);
  if (device) pg__release(ctx, device, bytes);
  return status;
}

int pg__check_cloud(const pg_tensor *t, int64_t rows, const char *what) {
  pg_context *ctx = t->context;
  char shape[128];
  if (t->dtype != PG_F32 || t->ndim != 2)
    return pg_fail(ctx, PG_EINVAL, "%s: an F32 matrix expected, not %s %s", what,
                   pg_dtype_name(t->dtype), pg__shape_text(t->ndim, t->shape, shape, sizeof shape));
  if (t->shape[0] < rows || t->shape[1] < 1)
    return pg_fail(ctx, PG_EINVAL, "%s: at least %lld rows and a column expected, the shape is %s",
                   what, (long long)rows, pg__shape_text(t->ndim, t->shape, shape, sizeof shape));
  return 0;
}

int pg_geometry_diameter(const pg_tensor *matrix, pg_diameter *out) {
  pg_context *ctx = matrix->context;
  pg_tensor *copy = NULL;
  const pg_tensor *x = matrix;
  pg_farthest found = {.first = -1, .second = -1, .bad_row = -1};
  double start = pg__now();
  int status = 0;

  if (matrix->dtype != PG_F32)
    return pg_fail(ctx, PG_EINVAL, "the diameter needs a matrix of F32, not of %s",
                   pg_dtype_name(matrix->dtype));
  if (matrix->ndim != 2)
    return pg_fail(ctx, PG_EINVAL, "the diameter needs a matrix of 2 dimensions, not of %d",
                   matrix->ndim);
  if (matrix->shape[0] < 1 || matrix->shape[1] < 1)
    return pg_fail(ctx, PG_EINVAL, "the diameter of an empty matrix [%lld, %lld] is not defined",
                   (long long)matrix->shape[0], (long long)matrix->shape[1]);
  if (!pg_tensor_contiguous(matrix)) {
    PG_TRY(pg_tensor_clone(matrix, &copy));
    x = copy;
  }
  pg__begin(ctx, PG__PART_BY_OPERATION, "diameter");
  status =
      ctx->kernels->diameter(ctx->queue, x->data, x->shape[0], x->shape[1], &ctx->cancel, &found);
  pg__end(ctx);
  if (pg_context_cancelled(ctx)) PG_TRY(pg_fail(ctx, PG_ECANCELED, "the diameter was cancelled"));
  PG_TRY(pg__kernel_status(ctx, status, "diameter"));
  if (found.bad_row >= 0) {
    PG_TRY(pg__check_row_finite(x, found.bad_row, "diameter"));
    PG_TRY(pg_fail(ctx, PG_ENONFINITE, "diameter: row %lld (counted from 0) is not finite",
                   (long long)found.bad_row));
  }
  /* A mean of V numbers and a norm of d of them in fp64. */
  const double rounding = (double)(x->shape[0] + x->shape[1] + 64) * 0x1p-52;
  *out = (pg_diameter){.value = found.value,
                       .first = found.first,
                       .second = found.second,
                       .lower = found.radius * (1 - rounding),
                       .upper = 2 * found.radius * (1 + rounding),
                       .multiply_adds = found.multiply_adds,
                       .seconds = pg__now() - start};
fail:
  pg_tensor_free(copy);
  return status;
}
