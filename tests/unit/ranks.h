/* Several ranks in one test, without MPI: processes forked from it, with a communicator over shared
 * memory. Sums are taken in the order of the ranks. */
#ifndef PG_RANKS_H
#define PG_RANKS_H

#include "core/comm_internal.h"
#include "unit.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS_MAX 8
#define RANKS_ROOM ((size_t)4 << 20) /* bytes of one exchange */

typedef struct ranks {
  pthread_barrier_t barrier;
  int64_t elements; /* that sums over gradients have covered so far, rank 0 */
  int sums;         /* and their number */
  _Alignas(64) char result[RANKS_MAX][1024]; /* for the tests: each rank writes its own */
  _Alignas(64) char data[RANKS_MAX][RANKS_ROOM];
} ranks;

typedef struct shared_comm {
  pg_comm public;
  ranks *all;
} shared_comm;

static inline int shared_all_reduce(pg_comm *comm, pg_queue *queue, void *data, int64_t count,
                                    pg__comm_type type, pg__comm_op op) {
  ranks *all = ((shared_comm *)comm)->all;
  const size_t size = type == PG__COMM_F32 ? 4 : 8;
  if ((size_t)count * size > RANKS_ROOM) abort();
  if (queue && comm->rank == 0) all->sums++, all->elements += count;
  memcpy(all->data[comm->rank], data, (size_t)count * size);
  pthread_barrier_wait(&all->barrier);
  for (int64_t i = 0; i < count; i++) {
    float f = ((float *)(void *)all->data[0])[type == PG__COMM_F32 ? i : 0];
    double d = ((double *)(void *)all->data[0])[type == PG__COMM_F64 ? i : 0];
    for (int r = 1; r < comm->world; r++) {
      if (type == PG__COMM_F32) f += ((float *)(void *)all->data[r])[i];
      if (type == PG__COMM_F64) {
        double x = ((double *)(void *)all->data[r])[i];
        d = op == PG__COMM_SUM ? d + x : fmax(d, x);
      }
    }
    if (type == PG__COMM_F32) ((float *)data)[i] = f;
    if (type == PG__COMM_F64) ((double *)data)[i] = d;
  }
  pthread_barrier_wait(&all->barrier);
  return 0;
}

static inline int shared_broadcast(pg_comm *comm, pg_queue *queue, void *data, int64_t bytes,
                                   int root) {
  ranks *all = ((shared_comm *)comm)->all;
  (void)queue;
  if ((size_t)bytes > RANKS_ROOM) abort();
  if (comm->rank == root) memcpy(all->data[0], data, (size_t)bytes);
  pthread_barrier_wait(&all->barrier);
  if (comm->rank != root) memcpy(data, all->data[0], (size_t)bytes);
  pthread_barrier_wait(&all->barrier);
  return 0;
}

static inline int shared_finish(pg_comm *comm, pg_queue *queue) {
  (void)comm, (void)queue;
  return 0;
}

static inline int shared_poll(pg_comm *comm, int64_t sequence, const char *operation,
                              double waited) {
  (void)comm, (void)sequence, (void)operation, (void)waited;
  return 0;
}

/* A rank that fails ends the test: the others wait at the barrier until the parent ends them. */
static inline void shared_report(pg_comm *comm) {
  printf("  rank %d: %s\n", comm->rank, comm->failure);
}
static inline void shared_close(pg_comm *comm) {
  (void)comm;
}

static const pg__comm_ops shared_ops = {.all_reduce = shared_all_reduce,
                                        .broadcast = shared_broadcast,
                                        .finish = shared_finish,
                                        .poll = shared_poll,
                                        .report = shared_report,
                                        .close = shared_close};

static inline shared_comm make_rank(ranks *all, int rank, int world) {
  return (shared_comm){.public = {.name = "shared",
                                  .ops = &shared_ops,
                                  .rank = rank,
                                  .world = world,
                                  .timeout = 60,
                                  .failed_rank = -1},
                       .all = all};
}

/* Call f(comm, self) in `world` processes; the results are in the returned memory, which the caller
 * unmaps with ranks_free. CHECKs inside count: a process with failed ones exits with 1. */
static inline ranks *run_ranks(int world, void (*f)(pg_comm *comm, void *self), void *self) {
  ranks *all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pthread_barrierattr_t shared;
  pid_t children[RANKS_MAX];
  if (all == MAP_FAILED || world > RANKS_MAX) abort();
  pthread_barrierattr_init(&shared);
  pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&all->barrier, &shared, (unsigned)world);
  fflush(stdout);
  for (int r = 0; r < world; r++) {
    if ((children[r] = fork()) != 0) continue;
    alarm(120); /* a rank whose peers are gone must not wait for ever */
    shared_comm comm = make_rank(all, r, world);
    unit_bad = 0;
    f(&comm.public, self);
    fflush(stdout);
    _exit(unit_bad != 0);
  }
  for (int r = 0; r < world; r++) {
    int status = 0;
    waitpid(children[r], &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %d ended with %x", r,
          (unsigned)status);
  }
  return all;
}

static inline void ranks_free(ranks *all) {
  munmap(all, sizeof *all);
}

#endif
