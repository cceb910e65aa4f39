/* The communicator over NCCL, for one GPU per rank. Collectives run on a stream of their own:
 * sums of gradients wait for the queue's stream where they were started, and run beside what the
 * backward pass queues later. Waits are polled on the host, so that they can end when another rank
 * fails or does not come; `boot` tells of that, and passes NCCL's id from rank 0 to the others.
 * NCCL gives all ranks the same bits. */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <sched.h>

#include "../../kernels/cuda/cuda.cuh"
#include <nccl.h>
extern "C" {
#include "../comm_internal.h"
}

#define STAGING ((int64_t)64 << 10) /* bytes of one exchange of host memory */
#define MOST_GROUPED 1024           /* NCCL takes 2048 operations in a group */

struct nccl_comm {
  pg_comm base; /* first */
  pg_comm *boot;
  ncclComm_t nccl;
  int device;
  cudaStream_t stream;
  cudaEvent_t before, after;
  void *device_staging, *host_staging;
  int64_t sequence;
  const char *operation;
  bool grouping; /* ncclGroupStart without its end */
  int grouped;   /* operations since */
};

static double now() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* End NCCL's work, so that nobody waits for its stream any more. */
static int give_up(nccl_comm *c) {
  if (c->grouping) ncclGroupEnd();
  c->grouping = false;
  if (c->nccl) ncclCommAbort(c->nccl);
  c->nccl = NULL;
  return -1;
}

static void report(pg_comm *comm) {
  nccl_comm *c = (nccl_comm *)comm;
  pg__comm_note(c->boot, comm->failed_rank, comm->failure);
  c->boot->ops->report(c->boot);
  give_up(c);
}

/* This rank's own failure. */
static int refuse(nccl_comm *c, const char *what, const char *why) {
  char text[sizeof c->base.failure];
  if (c->base.failed_rank >= 0) return -1;
  snprintf(text, sizeof text, "rank %d failed: %s, %s: %s", c->base.rank, c->operation, what, why);
  pg__comm_note(&c->base, c->base.rank, text);
  report(&c->base);
  return -1;
}

static int listen_to_others(nccl_comm *c, double waited) {
  if (c->base.failed_rank >= 0) return -1;
  if (c->boot->ops->poll(c->boot, c->sequence, c->operation, waited) == 0) return 0;
  pg__comm_note(&c->base, c->boot->failed_rank, c->boot->failure);
  return give_up(c);
}

#define CUDA_TRY(c, call)                                                                          \
  do {                                                                                             \
    cudaError_t error_ = (call);                                                                   \
    if (error_ != cudaSuccess) return refuse(c, "CUDA", cudaGetErrorString(error_));               \
  } while (0)

/* NCCL's calls return before they are done, since its communicator does not block. */
static int settle(nccl_comm *c, ncclResult_t result) {
  double start = now();
  while (result == ncclInProgress) {
    if (listen_to_others(c, now() - start) < 0) return -1;
    sched_yield();
    ncclResult_t asked = ncclCommGetAsyncError(c->nccl, &result);
    if (asked != ncclSuccess) result = asked;
  }
  return result == ncclSuccess ? 0 : refuse(c, "NCCL", ncclGetErrorString(result));
}

static int begin(nccl_comm *c, const char *operation) {
  c->sequence++;
  c->operation = operation;
  cudaSetDevice(c->device);
  return listen_to_others(c, 0);
}

/* Until the stream is done. */
static int wait_for_stream(nccl_comm *c) {
  double start = now(), listened = start;
  CUDA_TRY(c, cudaEventRecord(c->after, c->stream));
  for (;;) {
    cudaError_t error = cudaEventQuery(c->after);
    if (error == cudaSuccess) return 0;
    if (error != cudaErrorNotReady) return refuse(c, "CUDA", cudaGetErrorString(error));
    double t = now();
    if (t - listened > 1e-3) {
      ncclResult_t result = ncclSuccess;
      listened = t;
      if (listen_to_others(c, t - start) < 0) return -1;
      ncclCommGetAsyncError(c->nccl, &result);
      if (result != ncclSuccess && result != ncclInProgress)
        return refuse(c, "NCCL", ncclGetErrorString(result));
    }
    if (t - start > 1e-3) sched_yield();
  }
}

/* What was queued before is there for NCCL. */
static int after_queue(nccl_comm *c, pg_queue *queue) {
  CUDA_TRY(c, cudaEventRecord(c->before, queue->stream));
  CUDA_TRY(c, cudaStreamWaitEvent(c->stream, c->before, 0));
  return 0;
}

static int all_reduce(pg_comm *comm, pg_queue *queue, void *data, int64_t count, pg__comm_type type,
                      pg__comm_op op) {
  static const ncclDataType_t types[] = {ncclFloat32, ncclFloat64};
  nccl_comm *c = (nccl_comm *)comm;
  const int64_t size = type == PG__COMM_F32 ? 4 : 8;
  const ncclRedOp_t how = op == PG__COMM_SUM ? ncclSum : ncclMax;
  if (queue) {
    if (begin(c, "a sum of gradients") < 0 || after_queue(c, queue) < 0) return -1;
    return settle(c,
                  ncclAllReduce(data, data, (size_t)count, types[type], how, c->nccl, c->stream));
  }
  for (int64_t first = 0; first < count; first += STAGING / size) {
    const int64_t n = count - first < STAGING / size ? count - first : STAGING / size;
    char *here = (char *)data + first * size;
    if (begin(c, "an exchange of numbers") < 0) return -1;
    memcpy(c->host_staging, here, (size_t)(n * size));
    CUDA_TRY(c, cudaMemcpyAsync(c->device_staging, c->host_staging, (size_t)(n * size),
                                cudaMemcpyHostToDevice, c->stream));
    if (settle(c, ncclAllReduce(c->device_staging, c->device_staging, (size_t)n, types[type], how,
                                c->nccl, c->stream)) < 0)
      return -1;
    CUDA_TRY(c, cudaMemcpyAsync(c->host_staging, c->device_staging, (size_t)(n * size),
                                cudaMemcpyDeviceToHost, c->stream));
    if (wait_for_stream(c) < 0) return -1;
    memcpy(here, c->host_staging, (size_t)(n * size));
  }
  return 0;
}

/* Started at the group's end, so that is what has to wait for the queue's stream. */
static int end_group(nccl_comm *c, pg_queue *queue) {
  if (after_queue(c, queue) < 0) return -1;
  c->grouping = false;
  return settle(c, ncclGroupEnd());
}

static int start_group(nccl_comm *c) {
  const ncclResult_t result = ncclGroupStart();
  if (result != ncclSuccess) return refuse(c, "NCCL", ncclGetErrorString(result));
  c->grouping = true;
  c->grouped = 0;
  return 0;
}

static int group(pg_comm *comm, pg_queue *queue, bool start) {
  nccl_comm *c = (nccl_comm *)comm;
  cudaSetDevice(c->device);
  if (!start) return end_group(c, queue);
  return begin(c, "an exchange of weights") < 0 ? -1 : start_group(c);
}

static int broadcast_in_group(nccl_comm *c, pg_queue *queue, void *data, int64_t bytes, int root) {
  if (c->grouped == MOST_GROUPED && (end_group(c, queue) < 0 || start_group(c) < 0)) return -1;
  const ncclResult_t result =
      ncclBroadcast(data, data, (size_t)bytes, ncclUint8, root, c->nccl, c->stream);
  c->grouped++;
  if (result == ncclSuccess || result == ncclInProgress) return 0;
  return refuse(c, "NCCL", ncclGetErrorString(result));
}

static int broadcast(pg_comm *comm, pg_queue *queue, void *data, int64_t bytes, int root) {
  nccl_comm *c = (nccl_comm *)comm;
  if (c->grouping) return broadcast_in_group(c, queue, data, bytes, root);
  if (queue) {
    if (begin(c, "an exchange of weights") < 0 || after_queue(c, queue) < 0) return -1;
    return settle(c, ncclBroadcast(data, data, (size_t)bytes, ncclUint8, root, c->nccl, c->stream));
  }
  for (int64_t first = 0; first < bytes; first += STAGING) {
    const int64_t n = bytes - first < STAGING ? bytes - first : STAGING;
    if (begin(c, "an exchange of data") < 0) return -1;
    memcpy(c->host_staging, (char *)data + first, (size_t)n);
    CUDA_TRY(c, cudaMemcpyAsync(c->device_staging, c->host_staging, (size_t)n,
                                cudaMemcpyHostToDevice, c->stream));
    if (settle(c, ncclBroadcast(c->device_staging, c->device_staging, (size_t)n, ncclUint8, root,
                                c->nccl, c->stream)) < 0)
      return -1;
    CUDA_TRY(c, cudaMemcpyAsync(c->host_staging, c->device_staging, (size_t)n,
                                cudaMemcpyDeviceToHost, c->stream));
    if (wait_for_stream(c) < 0) return -1;
    memcpy((char *)data + first, c->host_staging, (size_t)n);
  }
  return 0;
}

/* The host waits too: a wait on the device for a rank that is gone would never end. */
static int finish(pg_comm *comm, pg_queue *queue) {
  nccl_comm *c = (nccl_comm *)comm;
  if (comm->failed_rank >= 0) return -1;
  cudaSetDevice(c->device);
  if (wait_for_stream(c) < 0) return -1;
  CUDA_TRY(c, cudaStreamWaitEvent(queue->stream, c->after, 0));
  return 0;
}

static int poll_others(pg_comm *comm, int64_t sequence, const char *operation, double waited) {
  nccl_comm *c = (nccl_comm *)comm;
  c->sequence = sequence;
  c->operation = operation;
  return listen_to_others(c, waited);
}

static void free_comm(nccl_comm *c) {
  if (c->after) cudaEventDestroy(c->after);
  if (c->before) cudaEventDestroy(c->before);
  if (c->stream) cudaStreamDestroy(c->stream);
  if (c->device_staging) cudaFree(c->device_staging);
  if (c->host_staging) cudaFreeHost(c->host_staging);
  free(c);
}

static void close_comm(pg_comm *comm) {
  nccl_comm *c = (nccl_comm *)comm;
  cudaSetDevice(c->device);
  c->operation = "the end";
  if (comm->failed_rank < 0 && settle(c, ncclCommFinalize(c->nccl)) == 0 && c->nccl)
    ncclCommDestroy(c->nccl);
  else
    give_up(c);
  c->boot->ops->close(c->boot);
  free_comm(c);
}

static const pg__comm_ops ops = {all_reduce,  broadcast, group,     finish,
                                 poll_others, report,    close_comm};

static int start(nccl_comm *c) {
  ncclUniqueId id = {};
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  c->operation = "the start";
  CUDA_TRY(c, cudaSetDevice(c->device));
  CUDA_TRY(c, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
  CUDA_TRY(c, cudaEventCreateWithFlags(&c->before, cudaEventDisableTiming));
  CUDA_TRY(c, cudaEventCreateWithFlags(&c->after, cudaEventDisableTiming));
  CUDA_TRY(c, cudaMalloc(&c->device_staging, (size_t)STAGING));
  CUDA_TRY(c, cudaMallocHost(&c->host_staging, (size_t)STAGING));
  if (c->base.rank == 0) {
    ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess) return refuse(c, "NCCL", ncclGetErrorString(result));
  }
  if (c->boot->ops->broadcast(c->boot, NULL, &id, (int64_t)sizeof id, 0) < 0)
    return listen_to_others(c, 0);
  return settle(c, ncclCommInitRankConfig(&c->nccl, c->base.world, id, c->base.rank, &config));
}

extern "C" __attribute__((visibility("default"))) int
pg__comm_plugin(const pg_comm_options *options, pg_comm *boot, pg_comm **out, char *message,
                size_t size) {
  nccl_comm *c = (nccl_comm *)calloc(1, sizeof *c);
  *out = NULL;
  if (!c) {
    snprintf(message, size, "no memory for a communicator");
    return PG_ENOMEM;
  }
  c->boot = boot;
  c->device = options->device_index;
  c->base.name = "nccl";
  c->base.ops = &ops;
  c->base.rank = boot->rank;
  c->base.world = boot->world;
  c->base.timeout = options->timeout;
  c->base.failed_rank = -1;
  if (start(c) < 0) {
    snprintf(message, size, "%s", c->base.failure);
    free_comm(c);
    return PG_EPEER;
  }
  *out = &c->base;
  return 0;
}
