/* Device memory that only kernels may touch. Included in front of a test that uses contexts, it
 * gives every context a kernel table whose memory is inaccessible outside kernels: core code that
 * dereferences a tensor, as would work on the CPU and nowhere else, ends in a segmentation fault.
 */
#ifndef PG_GUARD_H
#define PG_GUARD_H

#include "core/internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

/* One range of addresses, handed out from the bottom; a release gives its pages back and the last
 * one starts anew. */
#define GUARD_RANGE ((size_t)1 << 36)
static struct {
  char *memory;
  size_t used;
  int64_t live;
  struct {
    char *at;
    size_t bytes;
  } blocks[1 << 16];
  size_t count;
} guard;
static const pg_kernels *guard_cpu; /* the backend behind */

static void guard_protect(int protection) {
  if (guard.used && mprotect(guard.memory, guard.used, protection) != 0) abort();
}

static int guard_alloc(pg_queue *q, size_t bytes, void **out) {
  (void)q;
  *out = NULL;
  if (!guard.memory) {
    void *memory =
        mmap(NULL, GUARD_RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    guard.memory = memory;
  }
  if (bytes > GUARD_RANGE - guard.used - 8192 || guard.count == PG_COUNT(guard.blocks)) return -1;
  bytes = (bytes + 4095) / 4096 * 4096 + 4096;
  *out = guard.memory + guard.used;
  guard.blocks[guard.count].at = *out;
  guard.blocks[guard.count++].bytes = bytes;
  guard.used += bytes;
  guard.live++;
  return 0;
}

static void guard_release(pg_queue *q, void *memory) {
  size_t i = 0;
  (void)q;
  if (!memory) return;
  while (i < guard.count && guard.blocks[i].at != memory) i++;
  if (i == guard.count) abort(); /* not ours, or released twice */
  if (madvise(memory, guard.blocks[i].bytes, MADV_DONTNEED) != 0) abort();
  guard.blocks[i] = guard.blocks[--guard.count];
  if (--guard.live == 0) guard.used = 0;
}

#define GUARD(op, parameters, ...)                                                                 \
  static int guard_##op parameters {                                                               \
    guard_protect(PROT_READ | PROT_WRITE);                                                         \
    int status = guard_cpu->op(__VA_ARGS__);                                                       \
    guard_protect(PROT_NONE);                                                                      \
    return status;                                                                                 \
  }
/* clang-format off */
GUARD(upload, (pg_queue *q, void *to, const void *from, size_t n), q, to, from, n)
GUARD(upload_beside, (pg_queue *q, void *to, const void *from, size_t n), q, to, from, n)
GUARD(join, (pg_queue *q), q)
GUARD(download, (pg_queue *q, void *to, const void *from, size_t n), q, to, from, n)
GUARD(copy, (pg_queue *q, void *to, const void *from, size_t n), q, to, from, n)
GUARD(zero, (pg_queue *q, void *memory, size_t n), q, memory, n)
GUARD(synchronize, (pg_queue *q), q)
GUARD(workspace, (pg_queue *q, const pg_workload *w, int64_t *bytes), q, w, bytes)
GUARD(device_info, (pg_queue *q, pg_device_info *out), q, out)
GUARD(timestamp, (pg_queue *q, int64_t i), q, i)
GUARD(elapsed, (pg_queue *q, int64_t n, double *seconds), q, n, seconds)
GUARD(peak, (pg_queue *q, pg_dtype t, double *flops), q, t, flops)
GUARD(gemm, (pg_queue *q, const pg_gemm *g), q, g)
GUARD(embedding_forward, (pg_queue *q, pg_dtype t, const int32_t *tokens, int64_t n,
      const void *w, int64_t d, void *out), q, t, tokens, n, w, d, out)
GUARD(embedding_backward, (pg_queue *q, pg_dtype t, const int32_t *tokens, int64_t n,
      const void *dout, int64_t d, int64_t v, float *dw), q, t, tokens, n, dout, d, v, dw)
GUARD(rmsnorm_forward, (pg_queue *q, pg_dtype t, const void *x, int64_t n, int64_t d, float eps,
      void *y, float *rstd), q, t, x, n, d, eps, y, rstd)
GUARD(rmsnorm_backward, (pg_queue *q, pg_dtype t, const void *dy, const void *x, const float *rstd,
      int64_t n, int64_t d, bool add, void *dx), q, t, dy, x, rstd, n, d, add, dx)
GUARD(qk_norm_rope_forward, (pg_queue *q, pg_dtype t, const void *x, int64_t b, int64_t time,
      int64_t h, int64_t d, float eps, const float *c, const float *s, void *y, float *rstd),
      q, t, x, b, time, h, d, eps, c, s, y, rstd)
GUARD(qk_norm_rope_backward, (pg_queue *q, pg_dtype t, const void *dy, const void *x,
      const float *rstd, int64_t b, int64_t time, int64_t h, int64_t d, const float *c,
      const float *s, void *dx), q, t, dy, x, rstd, b, time, h, d, c, s, dx)
GUARD(attention_forward, (pg_queue *q, pg_dtype t, const void *query, const void *key,
      const void *value, int64_t b, int64_t time, int64_t h, int64_t d, void *out, float *lse),
      q, t, query, key, value, b, time, h, d, out, lse)
GUARD(attention_backward, (pg_queue *q, pg_dtype t, const void *dout, const void *query,
      const void *key, const void *value, const void *out, const float *lse, int64_t b,
      int64_t time, int64_t h, int64_t d, void *dq, void *dk, void *dv),
      q, t, dout, query, key, value, out, lse, b, time, h, d, dq, dk, dv)
GUARD(attention_path, (pg_queue *q, pg_dtype t, int64_t b, int64_t time, int64_t h, int64_t d,
      char *text, size_t size), q, t, b, time, h, d, text, size)
GUARD(swiglu_forward, (pg_queue *q, pg_dtype t, const void *g, const void *u, int64_t n, void *y),
      q, t, g, u, n, y)
GUARD(swiglu_backward, (pg_queue *q, pg_dtype t, const void *dy, const void *g, const void *u,
      int64_t n, void *dg, void *du), q, t, dy, g, u, n, dg, du)
GUARD(cross_entropy, (pg_queue *q, pg_dtype t, float *z, int64_t n, int64_t v, int64_t ld,
      const int32_t *targets, float ls, float scale, bool gradient, float *loss),
      q, t, z, n, v, ld, targets, ls, scale, gradient, loss)
GUARD(row_range, (pg_queue *q, const float *z, int64_t n, int64_t v, int64_t ld, float *out),
      q, z, n, v, ld, out)
GUARD(sum, (pg_queue *q, const float *x, int64_t n, bool square, double *out), q, x, n, square, out)
GUARD(clip_factor, (pg_queue *q, const double *sums, int64_t n, double max, pg_clip *out),
      q, sums, n, max, out)
GUARD(clip_apply, (pg_queue *q, const pg_clip *clip, int64_t n, float *x), q, clip, n, x)
GUARD(apply, (pg_queue *q, double factor, pg_dtype t, const void *x, int64_t n, int64_t count,
      const pg_target *to), q, factor, t, x, n, count, to)
GUARD(adamw, (pg_queue *q, const pg_adamw *h, const float *g, int64_t n, float *m, float *v,
      const pg_target *to), q, h, g, n, m, v, to)
GUARD(rownorm, (pg_queue *q, const pg_rownorm *h, const float *g, int64_t rows, int64_t columns,
      float *b, const pg_target *to), q, h, g, rows, columns, b, to)
GUARD(momentum, (pg_queue *q, double mu, bool nesterov, int64_t count, const float *const *g,
      float *const *b, int64_t n, float *x, float *norm), q, mu, nesterov, count, g, b, n, x, norm)
GUARD(signs, (pg_queue *q, uint64_t seed, uint64_t stream, int64_t first, int64_t rows,
      int64_t columns, float *out), q, seed, stream, first, rows, columns, out)
GUARD(convert, (pg_queue *q, pg_dtype from_type, const void *from, pg_dtype to_type, void *to,
      int64_t n), q, from_type, from, to_type, to, n)
GUARD(binary, (pg_queue *q, pg_binary_op op, pg_view a, pg_view b, int64_t rows, int64_t columns,
      pg_view out), q, op, a, b, rows, columns, out)
GUARD(scalar, (pg_queue *q, pg_binary_op op, pg_view a, double s, bool reversed, int64_t rows,
      int64_t columns, pg_view out), q, op, a, s, reversed, rows, columns, out)
GUARD(unary, (pg_queue *q, pg_unary_op op, pg_view a, int64_t rows, int64_t columns, pg_view out),
      q, op, a, rows, columns, out)
GUARD(lerp, (pg_queue *q, pg_view x, pg_view y, double w, int64_t rows, int64_t columns),
      q, x, y, w, rows, columns)
GUARD(reduce, (pg_queue *q, pg_reduce_op op, pg_view a, int64_t rows, int64_t columns, int axis,
      float *out), q, op, a, rows, columns, axis, out)
GUARD(center_rows, (pg_queue *q, const float *x, int64_t rows, int64_t columns, float *y),
      q, x, rows, columns, y)
GUARD(diameter, (pg_queue *q, const float *x, int64_t rows, int64_t columns,
      const volatile int *cancel, pg_farthest *out), q, x, rows, columns, cancel, out)
GUARD(separation, (pg_queue *q, const float *x, int64_t rows, int64_t columns,
      const volatile int *cancel, pg_farthest *out), q, x, rows, columns, cancel, out)
/* clang-format on */

static int guarded_context_new(const pg_context_options *options, pg_context **out, char *message,
                               size_t size) {
  static pg_kernels table;
  int status = pg_context_new(options, out, message, size);
  if (status < 0) return status;
  guard_cpu = (*out)->kernels;
  table = *guard_cpu;
#define GUARD_ENTRY(op) table.op = guard_##op;
  PG_KERNELS(GUARD_ENTRY)
#undef GUARD_ENTRY
  (*out)->kernels = &table;
  return 0;
}
#define pg_context_new guarded_context_new

#endif
