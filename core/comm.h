/* Communication between the ranks of one run. There is always a communicator, if only of one;
 * the run calls it where several ranks would have to agree. */
#ifndef PG_COMM_H
#define PG_COMM_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_comm {
  int rank, world;
  /* In place over all ranks; device memory, fp32. Buckets come in backward order. */
  int (*all_reduce_sum)(struct pg_comm *comm, pg_context *ctx, float *data, int64_t count);
  /* Host memory. */
  int (*all_reduce_sum_f64)(struct pg_comm *comm, pg_context *ctx, double *data, int64_t count);
  int (*all_reduce_max_f64)(struct pg_comm *comm, pg_context *ctx, double *data, int64_t count);
  int (*all_reduce_sum_u64)(struct pg_comm *comm, pg_context *ctx, uint64_t *data, int64_t count);
  void (*close)(struct pg_comm *comm);
} pg_comm;

/* The communicator of one process: every operation is the identity. Static; closing is a no-op. */
pg_comm *pg_comm_self(void);

#ifdef __cplusplus
}
#endif
#endif
