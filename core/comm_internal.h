/* What a communicator plugin and the core share. A plugin is a shared object that the core loads
 * with dlopen when it is first needed, so that a build or a machine without MPI or NCCL does
 * without; it uses nothing of the core. */
#ifndef PG_COMM_INTERNAL_H
#define PG_COMM_INTERNAL_H

#include "../kernels/kernels.h"
#include "comm.h"

#include <stdio.h>

typedef enum pg__comm_type { PG__COMM_F32, PG__COMM_F64 } pg__comm_type;
typedef enum pg__comm_op { PG__COMM_SUM, PG__COMM_MAX } pg__comm_op;

/* An operation returns 0 or -1; after -1, comm->failure says why. `queue` is NULL for data in host
 * memory, where the operation waits; otherwise it may be left running until `finish`. */
typedef struct pg__comm_ops {
  int (*all_reduce)(pg_comm *comm, pg_queue *queue, void *data, int64_t count, pg__comm_type type,
                    pg__comm_op op);
  int (*broadcast)(pg_comm *comm, pg_queue *queue, void *data, int64_t bytes, int root);
  /* Begin or end a group of broadcasts; NULL where starting one costs nothing. */
  int (*group)(pg_comm *comm, pg_queue *queue, bool begin);
  int (*finish)(pg_comm *comm, pg_queue *queue);
  /* This rank waits for operation number `sequence` and has done so for `waited` seconds: listen to
   * the others, and find out who is missing when that is longer than the timeout. -1: it is over.
   */
  int (*poll)(pg_comm *comm, int64_t sequence, const char *operation, double waited);
  /* Send comm->failure to the other ranks. */
  void (*report)(pg_comm *comm);
  void (*close)(pg_comm *comm);
} pg__comm_ops;

struct pg_comm {
  const char *name;
  const pg__comm_ops *ops; /* NULL: a single process */
  int rank, world;
  double timeout;
  int failed_rank; /* -1: all is well */
  char failure[900];
};

/* Ranks that only MASTER_ADDR and MASTER_PORT connect: enough to pass a few bytes from rank 0 to
 * all when they start (`broadcast`), and to hear of failures (`poll`, `report`). */
int pg__rendezvous_open(const pg_comm_options *options, pg_comm **out, char *message, size_t size);
#define PG__RENDEZVOUS_BYTES 800
/* Instead of opening it, for a rank that failed before: tell the others, for at most 10 s. */
void pg__rendezvous_fail(const pg_comm_options *options, const char *failure);

/* What a plugin exports, as pg__comm_plugin. `boot`: a communicator that can exchange host memory
 * (MPI's), or NULL. */
typedef int pg__comm_open_fn(const pg_comm_options *options, pg_comm *boot, pg_comm **out,
                             char *message, size_t size);
#define PG__COMM_PLUGIN_SYMBOL "pg__comm_plugin"

/* Keep the first failure. */
static inline void pg__comm_note(pg_comm *comm, int rank, const char *text) {
  if (comm->failed_rank >= 0) return;
  comm->failed_rank = rank;
  snprintf(comm->failure, sizeof comm->failure, "%s", text);
}

#endif
