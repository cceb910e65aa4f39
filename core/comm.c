/* Communicators as the core sees them: that of a single process, the loading of the plugins, and
 * the functions that turn a plugin's failure into an error of the context. */
#include "comm_internal.h"
#include "internal.h"
#include "plugin.h"

#include <stdlib.h>
#include <string.h>

pg_comm *pg_comm_self(void) {
  static pg_comm self = {.name = "self", .world = 1, .timeout = PG_COMM_TIMEOUT, .failed_rank = -1};
  return &self;
}

static int open_plugin(const char *file, const pg_comm_options *options, pg_comm *boot,
                       pg_comm **out, char *message, size_t size) {
  void *symbol = NULL;
  char text[512];
  if (pg__plugin_symbol(file, PG__COMM_PLUGIN_SYMBOL, &symbol, text, sizeof text) < 0) {
    snprintf(message, size, "%d ranks on device \"%s\" need %s: %s", options->launch->world,
             options->device, file, text);
    return PG_EUNSUPPORTED;
  }
  pg__comm_open_fn *open = NULL;
  memcpy(&open, &symbol, sizeof open); /* ISO C has no cast from an object to a function pointer */
  return open(options, boot, out, message, size);
}

/* An emulated device has the communicator in the library of its kernels: they share the device. */
static const char *nccl_plugin(void) {
  char path[4096];
  return pg__plugin_path("perigee_nccl.so", path, sizeof path) ? "perigee_nccl.so" : PG_CUDA_PLUGIN;
}

/* Ranks on CPUs and on GPUs have no communicator in common: told before either makes one. */
static int compare_devices(pg_comm *boot, bool cuda, char *message, size_t size) {
  char list[400] = "";
  size_t used = 0;
  int first = -1;
  double *gpu = calloc((size_t)boot->world, sizeof *gpu);
  if (!gpu) {
    snprintf(message, size, "no memory for %d ranks", boot->world);
    return PG_ENOMEM;
  }
  gpu[boot->rank] = cuda;
  if (boot->ops->all_reduce(boot, NULL, gpu, boot->world, PG__COMM_F64, PG__COMM_SUM) < 0) {
    snprintf(message, size, "%s", boot->failure);
    free(gpu);
    return PG_EPEER;
  }
  for (int r = 0; r < boot->world; r++) {
    if (first < 0 && gpu[r] != gpu[0]) first = r;
    if (r < 16)
      used += (size_t)snprintf(list + used, sizeof list - used, "%srank %d: %s", r ? ", " : "", r,
                               gpu[r] != 0 ? "cuda" : "cpu");
  }
  free(gpu);
  if (first < 0) return 0;
  snprintf(message, size, "the ranks chose different devices (%s%s): expected one kind", list,
           boot->world > 16 ? ", ..." : "");
  return PG_EPEER;
}

int pg_comm_open(const pg_comm_options *options, pg_comm **out, char *message, size_t size) {
  const pg_launcher *launch = options->launch;
  const bool cuda = strcmp(options->device, "cuda") == 0;
  const bool mpi = strcmp(launch->by, "mpirun") == 0 || (!cuda && strcmp(launch->by, "srun") == 0);
  pg_comm *boot = NULL;
  int status = 0;
  pg_comm_options resolved = *options;
  *out = pg_comm_self();
  if (launch->world <= 1) return 0;
  *out = NULL;
  if (!(resolved.timeout > 0)) resolved.timeout = PG_COMM_TIMEOUT;
  if (!mpi && !cuda) {
    snprintf(message, size,
             "WORLD_SIZE = %d on the cpu: ranks on CPUs are started by mpirun or srun; RANK and "
             "WORLD_SIZE alone start ranks on GPUs",
             launch->world);
    return PG_EUNSUPPORTED;
  }
  if (mpi) {
    status = open_plugin("perigee_mpi.so", &resolved, NULL, &boot, message, size);
    if (status < 0) return status;
    if ((status = compare_devices(boot, cuda, message, size)) < 0) {
      pg__comm_note(boot, boot->rank, message); /* all know: nobody is told */
      pg_comm_close(boot);
      return status;
    }
  }
  if (!cuda) {
    *out = boot;
    return 0;
  }
  if (!mpi && (status = pg__rendezvous_open(&resolved, &boot, message, size)) < 0) return status;
  status = open_plugin(nccl_plugin(), &resolved, boot, out, message, size);
  if (status < 0) {
    char line[sizeof boot->failure];
    snprintf(line, sizeof line, "rank %d failed: %s", boot->rank, message);
    pg__comm_note(boot, boot->rank, line);
    boot->ops->report(boot);
    pg_comm_close(boot);
  }
  return status;
}

void pg_comm_excuse(const pg_comm_options *options, const char *text) {
  char line[sizeof((pg_comm *)0)->failure];
  if (options->launch->world <= 1 || strcmp(options->launch->by, "mpirun") == 0) return;
  snprintf(line, sizeof line, "rank %d failed: %s", options->launch->rank, text);
  pg__rendezvous_fail(options, line);
}

void pg_comm_close(pg_comm *comm) {
  if (comm && comm->ops) comm->ops->close(comm);
}

int pg_comm_rank(const pg_comm *comm) {
  return comm->rank;
}
int pg_comm_world(const pg_comm *comm) {
  return comm->world;
}
const char *pg_comm_name(const pg_comm *comm) {
  return comm->name;
}
const char *pg_comm_failure(const pg_comm *comm, int *rank) {
  if (rank) *rank = comm->failed_rank;
  return comm->failed_rank < 0 ? "" : comm->failure;
}

static int ended(const pg_comm *comm, pg_context *ctx) {
  return pg_fail(ctx, PG_EPEER, "%s", comm->failure);
}

static int reduce(pg_comm *comm, pg_context *ctx, pg_queue *queue, void *data, int64_t count,
                  pg__comm_type type, pg__comm_op op) {
  if (!comm->ops) return 0;
  pg__begin(ctx, PG_PART_COMMUNICATION, "all_reduce");
  if (comm->failed_rank >= 0 || comm->ops->all_reduce(comm, queue, data, count, type, op) < 0)
    return ended(comm, ctx);
  pg__end(ctx);
  return 0;
}

int pg_comm_sum(pg_comm *comm, pg_context *ctx, float *data, int64_t count) {
  return reduce(comm, ctx, ctx->queue, data, count, PG__COMM_F32, PG__COMM_SUM);
}
int pg_comm_sum_f64(pg_comm *comm, pg_context *ctx, double *data, int64_t count) {
  return reduce(comm, ctx, NULL, data, count, PG__COMM_F64, PG__COMM_SUM);
}
int pg_comm_max_f64(pg_comm *comm, pg_context *ctx, double *data, int64_t count) {
  return reduce(comm, ctx, NULL, data, count, PG__COMM_F64, PG__COMM_MAX);
}

static int broadcast(pg_comm *comm, pg_context *ctx, pg_queue *queue, void *data, int64_t bytes,
                     int root) {
  if (!comm->ops || bytes <= 0) return 0;
  pg__begin(ctx, PG_PART_COMMUNICATION, "broadcast");
  if (comm->failed_rank >= 0 || comm->ops->broadcast(comm, queue, data, bytes, root) < 0)
    return ended(comm, ctx);
  pg__end(ctx);
  return 0;
}

int pg_comm_broadcast(pg_comm *comm, pg_context *ctx, void *data, int64_t bytes, int root) {
  return broadcast(comm, ctx, ctx->queue, data, bytes, root);
}
int pg_comm_broadcast_host(pg_comm *comm, pg_context *ctx, void *data, int64_t bytes, int root) {
  return broadcast(comm, ctx, NULL, data, bytes, root);
}

/* A name as a whole number that fp64 holds (FNV-1a). */
static double fingerprint(const char *name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (; *name; name++) hash = (hash ^ (unsigned char)*name) * 0x100000001b3u;
  return (double)(hash >> 12);
}

/* All ranks are in pg_comm_meet, but not for the same reason. */
static int name_apart(pg_comm *comm, pg_context *ctx, const char *what) {
  char here[256], first[sizeof here] = "", line[sizeof comm->failure] = "";
  int status, apart = -1;
  for (int r = 0; r < comm->world; r++) {
    snprintf(here, sizeof here, "%s", what);
    PG_TRY(pg_comm_broadcast_host(comm, ctx, here, sizeof here, r));
    if (r == 0) memcpy(first, here, sizeof first);
    if (apart >= 0 || strcmp(here, first) == 0) continue;
    apart = r;
    snprintf(line, sizeof line,
             "rank %d is at %s while rank 0 is at %s: what takes all ranks must not be called by "
             "some of them",
             r, here, first);
  }
  pg__comm_note(comm, apart, line);
  status = ended(comm, ctx);
fail:
  return status;
}

int pg_comm_meet(pg_comm *comm, pg_context *ctx, const char *what, double *values, int count) {
  double numbers[PG_COMM_VALUES + 2] = {fingerprint(what), -fingerprint(what)};
  int status;
  if (!comm->ops) return 0;
  for (int i = 0; i < count; i++) numbers[i + 2] = values[i];
  PG_TRY(pg_comm_max_f64(comm, ctx, numbers, PG_COMM_VALUES + 2));
  if (numbers[0] != -numbers[1]) return name_apart(comm, ctx, what);
  for (int i = 0; i < count; i++) values[i] = numbers[i + 2];
  return 0;
fail:
  return status;
}

static int group(pg_comm *comm, pg_context *ctx, bool start) {
  if (!comm->ops || !comm->ops->group) return 0;
  pg__begin(ctx, PG_PART_COMMUNICATION, "group");
  if (comm->failed_rank >= 0 || comm->ops->group(comm, ctx->queue, start) < 0)
    return ended(comm, ctx);
  pg__end(ctx);
  return 0;
}

int pg_comm_group_begin(pg_comm *comm, pg_context *ctx) {
  return group(comm, ctx, true);
}
int pg_comm_group_end(pg_comm *comm, pg_context *ctx) {
  return group(comm, ctx, false);
}

int pg_comm_finish(pg_comm *comm, pg_context *ctx) {
  if (!comm->ops) return 0;
  pg__begin(ctx, PG_PART_COMMUNICATION, "finish");
  if (comm->failed_rank >= 0 || comm->ops->finish(comm, ctx->queue) < 0) return ended(comm, ctx);
  pg__end(ctx);
  return 0;
}

void pg_comm_fail(pg_comm *comm, const char *text) {
  if (!comm->ops || comm->failed_rank >= 0) return;
  char line[sizeof comm->failure];
  snprintf(line, sizeof line, "rank %d failed: %s", comm->rank, text);
  pg__comm_note(comm, comm->rank, line);
  comm->ops->report(comm);
}
