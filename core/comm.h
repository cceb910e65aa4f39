/* Communication between the ranks of one run. There is always a communicator, if only of one; the
 * run calls it where several ranks would have to agree.
 *
 * All ranks make the same calls in the same order. Operations on device memory are started and may
 * return early; pg_comm_finish makes everything that was started complete for later work of the
 * context's queue. Operations on host memory wait. A wait ends with PG_EPEER when another rank
 * reported a failure or did not come within `timeout` seconds; the text names the first failing
 * rank, and every later call fails with the same text. */
#ifndef PG_COMM_H
#define PG_COMM_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- how the process was started ------------------------------------------------------- */
typedef struct pg_launcher {
  const char *by; /* "mpirun", "environment", "srun"; "" for a single process */
  int rank, world;
  int local_rank, local_size; /* among the ranks of this machine */
  char master[256];           /* host of rank 0; "" unknown */
  int port;
  int listener;  /* for rank 0: a descriptor that listens at `port` already; 0: none */
  char job[256]; /* alike on all ranks of a job and on no others; "" unknown */
} pg_launcher;
/* Read OMPI_COMM_WORLD_*, else RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, else SLURM_* of an
 * srun step; MASTER_ADDR and MASTER_PORT, else the first host of the Slurm job; PERIGEE_LISTENER, a
 * descriptor that whoever started rank 0 left it; PERIGEE_JOB, else TORCHELASTIC_RUN_ID and the
 * Slurm job and step as the job's name. PG_EINVAL with a text in
 * message[size] when they contradict each other. */
int pg_launcher_read(pg_launcher *out, char *message, size_t size);
/* This rank's share of `cpus` compute threads: all of them when the launcher bound the process to
 * fewer CPUs than the machine has, else cpus / local_size, at least 1. */
int pg_launcher_threads(const pg_launcher *launch, int cpus);

/* ---- communicators --------------------------------------------------------------------- */
typedef struct pg_comm pg_comm;

typedef struct pg_comm_options {
  const pg_launcher *launch;
  const char *device; /* "cpu": MPI; "cuda": NCCL */
  int device_index;
  double timeout; /* seconds to wait for other ranks; 0: PG_COMM_TIMEOUT */
} pg_comm_options;
/* Longer than writing a large checkpoint, during which the other ranks wait for rank 0. */
#define PG_COMM_TIMEOUT 600.0

/* The communicator of one process: every operation is the identity. Static; closing is a no-op. */
pg_comm *pg_comm_self(void);
/* Join the ranks of the launch: pg_comm_self() for a single process. Message as in
 * pg_context_new. */
int pg_comm_open(const pg_comm_options *options, pg_comm **out, char *message, size_t size);
/* For a rank that fails before it could join: tell the ranks that wait for it, for at most 10 s.
 * Those of mpirun are ended by it. */
void pg_comm_excuse(const pg_comm_options *options, const char *text);
/* After a failure waits briefly until the other ranks have heard of it. NULL is legal. */
void pg_comm_close(pg_comm *comm);

int pg_comm_rank(const pg_comm *comm);
int pg_comm_world(const pg_comm *comm);
const char *pg_comm_name(const pg_comm *comm); /* "self", "mpi", "nccl" */
/* The failure that ended this communicator, "" while all is well, and the rank that failed first
 * (-1: none). */
const char *pg_comm_failure(const pg_comm *comm, int *rank);

/* In place over all ranks; device memory, fp32. */
int pg_comm_sum(pg_comm *comm, pg_context *ctx, float *data, int64_t count);
/* From rank `root` to all; device memory. */
int pg_comm_broadcast(pg_comm *comm, pg_context *ctx, void *data, int64_t bytes, int root);
/* Broadcasts of device memory between begin and end start together, at the end: many small ones
 * then cost little more than one. No other operation comes between. After a failure in between
 * there is no end. */
int pg_comm_group_begin(pg_comm *comm, pg_context *ctx);
int pg_comm_group_end(pg_comm *comm, pg_context *ctx);
int pg_comm_finish(pg_comm *comm, pg_context *ctx);

/* Host memory, in place. */
int pg_comm_sum_f64(pg_comm *comm, pg_context *ctx, double *data, int64_t count);
int pg_comm_max_f64(pg_comm *comm, pg_context *ctx, double *data, int64_t count);
int pg_comm_broadcast_host(pg_comm *comm, pg_context *ctx, void *data, int64_t bytes, int root);
/* Wait until every rank is at the call that `what` names ("the end of update 3"). Of `values` each
 * rank gets the largest of all ranks; at most PG_COMM_VALUES, NULL for none. When a rank is at
 * another such call (a hook that only one rank runs, say) it is PG_EPEER on all of them, with both
 * names. Whatever hooks can start that takes all ranks begins with it. */
int pg_comm_meet(pg_comm *comm, pg_context *ctx, const char *what, double *values, int count);
#define PG_COMM_VALUES 14

/* Tell the other ranks that this one cannot go on. Their present or next call fails with "rank R
 * failed: TEXT". Only the first failure counts. */
void pg_comm_fail(pg_comm *comm, const char *text);

#ifdef __cplusplus
}
#endif
#endif
