/* Shared inside the core and the bindings, not installed: the context's fields, storage, and the
 * macros that keep error handling to one line. Cross-file internals carry the prefix pg__. */
#ifndef PG_INTERNAL_H
#define PG_INTERNAL_H

#include "../kernels/cost.h"
#include "../kernels/kernels.h"
#include "context.h"
#include "profile.h"
#include "tensor.h"

/* What operations are called for now: see pg__enter. */
typedef struct pg__place {
  const char *name;
  int64_t number;        /* -1: none */
  const char *parameter; /* NULL: none in particular */
  size_t others;         /* parameters beside it */
  int span;              /* of the profile, -1 */
} pg__place;
#define PG__PLACES 8

/* Large memory that was given back, for the next of the same size: taking it from the system anew
 * costs more than filling it. */
typedef struct pg__spare {
  void *memory;
  size_t bytes;
} pg__spare;
#define PG__SPARES 2
#define PG__SPARE_LEAST ((size_t)4 << 20)

struct pg_context {
  const pg_kernels *kernels; /* the backend's table */
  pg_queue *queue;           /* the one queue all work of this context goes through */
  int threads, device_index;
  int64_t bytes, peak_bytes, live_tensors;
  pg_profile *profile; /* NULL: nothing is recorded */
  int64_t update;      /* the one in progress, from 1; 0: none */
  pg__place places[PG__PLACES];
  int depth; /* of places */
  pg__spare spares[PG__SPARES];
  bool keep_spares;    /* while optimizers written in Lua make increments anew in every update */
  volatile int cancel; /* set asynchronously */
  char message[1024];
};

/* Rows [first, first + count) of an fp32 matrix to the host. */
int pg__read_rows(const pg_tensor *t, int64_t first, int64_t count, float *host);
/* A monotonic clock, seconds. */
double pg__now(void);

struct pg_storage {
  pg_context *context;
  void *memory;
  size_t bytes;
  int64_t references;
  bool lent;     /* the memory is someone else's */
  bool recalled; /* and its owner has taken it back: no kernel may see it */
  void *scaled;  /* of the Lua binding: the tensor that stands for a multiple of this memory */
};

/* The kernel table of the CUDA plugin; NULL with a text in message[size] when there is none or it
 * does not load. */
const pg_kernels *pg__cuda_kernels(char *message, size_t size);
/* Whether there is a plugin, and where. */
bool pg__cuda_plugin(char *path, size_t size);

/* Device memory with accounting; zero bytes give a valid pointer. PG_ENOMEM names `what`. */
int pg__alloc(pg_context *ctx, size_t bytes, const char *what, void **out);
void pg__release(pg_context *ctx, void *memory, size_t bytes);
void pg__drop_spares(pg_context *ctx);
/* Brings ctx->peak_bytes up to date, before ctx->bytes changes. */
void pg__note_peak(pg_context *ctx);

/* Bytes of host memory that this process can still get; 0: unknown. `root` stands before the paths
 * of system files: "" but in tests. */
int64_t pg__host_memory(const char *root);

/* pg_tensor_new without the zeros: for results that are written completely. */
int pg__tensor_new_raw(pg_context *ctx, pg_dtype dtype, int ndim, const int64_t *shape,
                       pg_tensor **out);
/* A contiguous tensor over device memory of someone else. pg__tensor_recall frees it and marks what
 * views are left of it, in a host program's hands, as not to be used (NULL is legal). */
int pg__tensor_lend(pg_context *ctx, void *data, pg_dtype dtype, int ndim, const int64_t *shape,
                    pg_tensor **out);
void pg__tensor_recall(pg_tensor *lent);

/* "[3,4]" into text, for messages; returns text. */
const char *pg__shape_text(int ndim, const int64_t *shape, char *text, size_t size);
/* Whether the address ranges of two tensors meet; whether both address the same elements alike. */
bool pg__tensor_overlap(const pg_tensor *a, const pg_tensor *b);
bool pg__tensor_same_view(const pg_tensor *a, const pg_tensor *b);

/* PG_EINVAL, in the name of an operation, unless t is fp32 of at most two dimensions. */
int pg__tensor_check_f32(const char *op, const pg_tensor *t);

/* Turns a kernel's -1 into PG_EDEVICE with the queue's text. */
int pg__kernel_status(pg_context *ctx, int status, const char *operation);

/* Fail with "cannot ACTION 'PATH': REASON" and the PG_E* code that stands for the system's `error`
 * number (ENOSPC, EDQUOT and EFBIG are PG_ENOSPC; what has no code of its own is PG_EIO). */
int pg__fail_errno(pg_context *ctx, const char *action, const char *path, int error);

/* open(2) with O_CLOEXEC and mode 0666, retried on EINTR; close(2), whose failure may be the only
 * report of a lost write. pg__open_regular opens for reading and refuses what is not a file.
 * pg__sync is fsync(2). */
int pg__open(pg_context *ctx, const char *path, int flags, int *fd);
int pg__close(pg_context *ctx, int fd, const char *path);
int pg__sync(pg_context *ctx, int fd, const char *path);
int pg__open_regular(pg_context *ctx, const char *path, int *fd, int64_t *size);
/* malloc'ed folder part of a path: "." for a bare name. NULL when out of memory. */
char *pg__parent(const char *path);

/* ---- profile (profile.c) ---- */
#define PG__PART_BY_OPERATION PG_PARTS
/* Record the work queued from begin to end; `end` gives the record's cost, to be added to. Only
 * while ctx->profile. */
void pg__profile_begin(pg_context *ctx, pg_part part, const char *operation);
pg_cost *pg__profile_end(pg_context *ctx);
/* The same for work that is no kernel. Not nested. */
static inline void pg__begin(pg_context *ctx, pg_part part, const char *operation) {
  if (ctx->profile) pg__profile_begin(ctx, part, operation);
}
static inline void pg__end(pg_context *ctx) {
  if (ctx->profile) pg__profile_end(ctx);
}
/* Operations from enter to leave belong to `part` (PG__PART_BY_OPERATION: as outside) and to a span
 * `name`, with its number unless that is negative; errors name the innermost, and the parameter
 * that pg__at gave last in it. Names have to stay valid. Nested; leave takes what enter gave, also
 * on failure, or -1 when enter was not reached. */
int pg__profile_enter(pg_context *ctx, pg_part part, const char *name, int64_t number);
void pg__profile_leave(pg_context *ctx, int span);
static inline int pg__enter(pg_context *ctx, pg_part part, const char *name, int64_t number) {
  if (ctx->depth == PG__PLACES) return -1;
  ctx->places[ctx->depth] =
      (pg__place){.name = name,
                  .number = number,
                  .span = ctx->profile ? pg__profile_enter(ctx, part, name, number) : -1};
  return ctx->depth++;
}
static inline void pg__leave(pg_context *ctx, int place) {
  if (place < 0) return;
  if (ctx->profile) pg__profile_leave(ctx, ctx->places[place].span);
  ctx->depth = place;
}
static inline void pg__at(pg_context *ctx, const char *parameter, size_t others) {
  if (ctx->depth == 0) return;
  ctx->places[ctx->depth - 1].parameter = parameter;
  ctx->places[ctx->depth - 1].others = others;
}

/* PG_LAUNCH(ctx, gemm, &g): call a kernel of the context's backend, jump to `fail` with `status`
 * set when it fails. PG_TRY does the same for any call that returns a status. Both expect
 * `int status` in scope. Arguments of PG_LAUNCH are evaluated again while a profile is recorded:
 * they have no side effects. */
#define PG_TRY(call)                                                                               \
  do {                                                                                             \
    if ((status = (call)) < 0) goto fail;                                                          \
  } while (0)
#define PG_LAUNCH(ctx, op, ...)                                                                    \
  do {                                                                                             \
    if ((ctx)->profile) pg__profile_begin((ctx), PG__PART_BY_OPERATION, #op);                      \
    status = (ctx)->kernels->op((ctx)->queue, __VA_ARGS__);                                        \
    if ((ctx)->profile) pg_cost_kernels.op(pg_cost_queue(pg__profile_end(ctx)), __VA_ARGS__);      \
    PG_TRY(pg__kernel_status((ctx), status, #op));                                                 \
  } while (0)

/* The kernels' `join`, which has no arguments. */
static inline int pg__join_uploads(pg_context *ctx) {
  return pg__kernel_status(ctx, ctx->kernels->join(ctx->queue), "join");
}

#define PG_COUNT(array) (sizeof(array) / sizeof((array)[0]))

static inline int64_t pg__min(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static inline int64_t pg__max(int64_t a, int64_t b) {
  return a > b ? a : b;
}
static inline int64_t pg__round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

/* A bump allocator over one device allocation, for buffers whose sizes are known beforehand: add
 * up sizes with pg__arena_size, create once, take in order, rewind to reuse. */
typedef struct pg_arena {
  pg_context *context;
  char *memory;
  size_t size, used;
} pg_arena;
static inline size_t pg__arena_size(size_t bytes) {
  return (bytes + 255) & ~(size_t)255;
}
int pg__arena_new(pg_context *ctx, size_t size, const char *what, pg_arena *out);
void pg__arena_free(pg_arena *arena);
/* NULL when it does not fit: callers sized the arena, so that is asserted. */
void *pg__arena_take(pg_arena *arena, size_t bytes);

#endif
