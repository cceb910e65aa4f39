/* The smallest distance between two rows: checks around the kernel (kernels/cpu/separation.c). */
#include "finite.h"
#include "geometry.h"
#include "internal.h"
#include "rows.h"

#include <stdlib.h>

/* The listed rows, one below the other, in a new tensor. */
static int gather(const pg_tensor *t, const int64_t *rows, int64_t count, pg_tensor **out) {
  pg_context *ctx = t->context;
  const int64_t columns = t->shape[1], shape[2] = {count, columns};
  pg_tensor *from = NULL, *to = NULL;
  int status;
  *out = NULL;
  PG_TRY(pg_tensor_new(ctx, PG_F32, 2, shape, out));
  for (int64_t k = 0; k < count; k++) {
    if (rows[k] < 0 || rows[k] >= t->shape[0])
      PG_TRY(pg_fail(ctx, PG_EINVAL, "separation: row %lld of %lld (counted from 0)",
                     (long long)rows[k], (long long)t->shape[0]));
    PG_TRY(pg_tensor_view(t, rows[k] * t->stride[0], 1, &columns, &t->stride[1], &from));
    PG_TRY(pg_tensor_view(*out, k * columns, 1, &columns, &(*out)->stride[1], &to));
    PG_TRY(pg_tensor_copy(to, from));
    pg_tensor_free(from);
    pg_tensor_free(to);
    from = to = NULL;
  }
fail:
  pg_tensor_free(from);
  pg_tensor_free(to);
  return status;
}

int pg_rows_separation(const pg_tensor *matrix, const int64_t *rows, int64_t count,
                       pg_separation *out) {
  pg_context *ctx = matrix->context;
  pg_farthest found = {.first = -1, .second = -1, .bad_row = -1};
  const double start = pg__now();
  const pg_tensor *x = matrix;
  pg_tensor *copy = NULL;
  pg_diameter whole;
  int status;

  PG_TRY(pg__check_cloud(matrix, 2, "separation"));
  if (rows && count < 2)
    PG_TRY(pg_fail(ctx, PG_EINVAL, "separation: at least 2 rows expected, not %lld",
                   (long long)count));
  if (rows) {
    PG_TRY(gather(matrix, rows, count, &copy));
    x = copy;
  } else if (!pg_tensor_contiguous(matrix)) {
    PG_TRY(pg_tensor_clone(matrix, &copy));
    x = copy;
  }
  pg__begin(ctx, PG__PART_BY_OPERATION, "separation");
  status =
      ctx->kernels->separation(ctx->queue, x->data, x->shape[0], x->shape[1], &ctx->cancel, &found);
  pg__end(ctx);
  if (pg_context_cancelled(ctx)) PG_TRY(pg_fail(ctx, PG_ECANCELED, "the search was cancelled"));
  PG_TRY(pg__kernel_status(ctx, status, "separation"));
  if (found.bad_row >= 0)
    PG_TRY(pg__check_row_finite(matrix, rows ? rows[found.bad_row] : found.bad_row, "separation"));
  PG_TRY(pg_geometry_diameter(x, &whole));
  *out = (pg_separation){.value = found.value,
                         .diameter = whole.value,
                         .first = rows ? rows[found.first] : found.first,
                         .second = rows ? rows[found.second] : found.second,
                         .multiply_adds = found.multiply_adds + whole.multiply_adds,
                         .seconds = pg__now() - start};
  if (out->first > out->second) {
    const int64_t first = out->second;
    out->second = out->first;
    out->first = first;
  }
fail:
  pg_tensor_free(copy);
  return status;
}
