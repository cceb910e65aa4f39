/* The communicator of a single process. */
#include "comm.h"

static int same_f32(pg_comm *comm, pg_context *ctx, float *data, int64_t count) {
  (void)comm, (void)ctx, (void)data, (void)count;
  return 0;
}
static int same_f64(pg_comm *comm, pg_context *ctx, double *data, int64_t count) {
  (void)comm, (void)ctx, (void)data, (void)count;
  return 0;
}
static int same_u64(pg_comm *comm, pg_context *ctx, uint64_t *data, int64_t count) {
  (void)comm, (void)ctx, (void)data, (void)count;
  return 0;
}
static void close_nothing(pg_comm *comm) {
  (void)comm;
}

pg_comm *pg_comm_self(void) {
  static pg_comm self = {.rank = 0,
                         .world = 1,
                         .all_reduce_sum = same_f32,
                         .all_reduce_sum_f64 = same_f64,
                         .all_reduce_max_f64 = same_f64,
                         .all_reduce_sum_u64 = same_u64,
                         .close = close_nothing};
  return &self;
}
