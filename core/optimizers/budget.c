/* Increments brought to a given diameter. */
#include "../comm.h"
#include "compose.h"

#include <math.h>

static bool shared(const pg_increment_group *group) {
  return group->rows != group->all_rows;
}

/* All rows, where ranks share them, and what the backend takes to measure. */
int64_t pg__budget_bytes(const pg_increment_group *group) {
  pg_context *ctx = group->context;
  pg_workload work = {.type = PG_F32, .rows = group->all_rows, .columns = group->columns};
  int64_t without = 0, with = 0;
  ctx->kernels->workspace(ctx->queue, &work, &without);
  work.cloud_columns = group->columns;
  ctx->kernels->workspace(ctx->queue, &work, &with);
  return with - without +
         (shared(group) ? group->all_rows * group->columns * (int64_t)sizeof(float) : 0);
}

int pg__use_budget(const pg_increment_group *group, double budget, float *x) {
  pg_context *ctx = group->context;
  const int64_t all = group->all_rows * group->columns, part = group->rows * group->columns;
  const pg_view view = pg__matrix_view(x, group->columns);
  const size_t bytes = (size_t)all * sizeof(float);
  void *gathered = NULL;
  pg_farthest found;
  int status;
  if (shared(group)) {
    PG_TRY(pg__alloc(ctx, bytes, "an increment of all ranks", &gathered));
    PG_LAUNCH(ctx, zero, gathered, bytes);
    PG_LAUNCH(ctx, copy, (float *)gathered + group->first_row * group->columns, x,
              (size_t)part * sizeof(float));
    PG_TRY(pg_comm_sum(group->comm, ctx, gathered, all));
    PG_TRY(pg_comm_finish(group->comm, ctx));
  }
  PG_LAUNCH(ctx, diameter, gathered ? gathered : x, group->all_rows, group->columns, NULL, &found);
  if (found.bad_row >= 0) {
    status = pg_fail(ctx, PG_ENONFINITE, "row %lld of an increment is not finite",
                     (long long)found.bad_row);
    goto fail;
  }
  if (found.value > 0)
    PG_LAUNCH(ctx, scalar, PG_MUL, view, budget / found.value, false, group->rows, group->columns,
              view);
fail:
  if (gathered) pg__release(ctx, gathered, bytes);
  return status;
}
