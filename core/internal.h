/* Shared inside the core and the bindings, not installed: the context's fields, storage, and the
 * macros that keep error handling to one line. Cross-file internals carry the prefix pg__. */
#ifndef PG_INTERNAL_H
#define PG_INTERNAL_H

#include "../kernels/kernels.h"
#include "context.h"
#include "tensor.h"

struct pg_context {
  const pg_kernels *kernels; /* the backend's table */
  pg_queue *queue;           /* the one queue all work of this context goes through */
  int threads;
  int64_t bytes, peak_bytes, live_tensors;
  volatile int cancel; /* set asynchronously */
  char message[1024];
};

struct pg_storage {
  pg_context *context;
  void *memory;
  size_t bytes;
  int64_t references;
};

/* Device memory with accounting; zero bytes give a valid pointer. PG_ENOMEM names `what`. */
int pg__alloc(pg_context *ctx, size_t bytes, const char *what, void **out);
void pg__release(pg_context *ctx, void *memory, size_t bytes);

/* Turns a kernel's -1 into PG_EDEVICE with the queue's text. */
int pg__kernel_status(pg_context *ctx, int status, const char *operation);

/* PG_LAUNCH(ctx, gemm, &g): call a kernel of the context's backend, jump to `fail` with `status`
 * set when it fails. PG_TRY does the same for any call that returns a status. Both expect
 * `int status` in scope. */
#define PG_TRY(call)                                                                               \
  do {                                                                                             \
    if ((status = (call)) < 0) goto fail;                                                          \
  } while (0)
#define PG_LAUNCH(ctx, op, ...)                                                                    \
  PG_TRY(pg__kernel_status((ctx), (ctx)->kernels->op((ctx)->queue, __VA_ARGS__), #op))

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
