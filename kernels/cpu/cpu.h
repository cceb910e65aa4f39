/* Shared by the CPU kernels: names per CPU level, the queue, and small helpers.
 *
 * Each file here is compiled once per CPU level (base, avx2, avx512; CMakeLists.txt) and the level
 * is chosen when a context is made, so every external name carries its level.
 *
 * Denormals: fp32 kernels run with flush-to-zero (a slot that decays towards 0 would otherwise
 * slow every later update down), so inputs and results below 2^-126 count as 0, consistently in
 * the C optimizers and in the element-wise operations from which a Lua optimizer is made.
 * `reduce`, `sum` and `diameter` work in fp64 and keep them. The mode belongs to a thread: every
 * parallel region sets it on entry and restores what it found.
 *
 * Contraction is off for all files; a kernel whose bits need not equal another's asks for fused
 * multiply-adds with PG_FMA. */
#ifndef PG_CPU_H
#define PG_CPU_H

#include "../kernels.h"
#include <omp.h>
#include <stdarg.h>
#include <stdio.h>

#ifndef PG_CPU_LEVEL
#define PG_CPU_LEVEL base
#endif
#define PG_CPU_PASTE_(level, name) pg_cpu_##level##_##name
#define PG_CPU_PASTE(level, name) PG_CPU_PASTE_(level, name)
/* The level's name of an external function or object: PG_CPU(gemm) is pg_cpu_avx2_gemm. */
#define PG_CPU(name) PG_CPU_PASTE(PG_CPU_LEVEL, name)

#define PG_CPU_DECLARE(op) pg_##op##_fn PG_CPU(op);
PG_KERNELS(PG_CPU_DECLARE)
int PG_CPU(queue_new)(const pg_queue_options *options, pg_queue **out, char *message, size_t size);
void PG_CPU(queue_free)(pg_queue *q);
const char *PG_CPU(message)(const pg_queue *q);
int64_t PG_CPU(held)(pg_queue *q);

/* Shared by center_rows.c and diameter.c. */
int PG_CPU(column_means)(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                         const float *reference, double *mean);

struct pg_queue {
  int threads;
  char message[256];
  float *scratch; /* of the kernel that runs; kept for the next one */
  size_t scratch_bytes;
  size_t most_held; /* since the last call of `held` */
  double *stamps;   /* time stamps (timing.c) */
  int64_t stamp_capacity;
};
/* Notes that the kernel that runs holds so many bytes beside its scratch. */
static inline void pg_note_held(pg_queue *q, size_t bytes) {
  if (q->scratch_bytes + bytes > q->most_held) q->most_held = q->scratch_bytes + bytes;
}

/* `floats` floats for each of the queue's threads, part t at pg_scratch_of(q, floats, t). Takes
 * memory when the largest request so far grows. 0, or -1 with a text. Not for nested calls. */
int PG_CPU(scratch)(pg_queue *q, int64_t floats);
static inline float *pg_scratch_of(const pg_queue *q, int64_t floats, int t) {
  return q->scratch + (floats + 15) / 16 * 16 * t;
}

/* What the kernels with the largest needs ask of it, for pg_workspace_fn: floats per thread. */
int64_t PG_CPU(attention_scratch)(int64_t time, int64_t head_dim);
int64_t PG_CPU(gemm_scratch)(pg_dtype type);
/* Bytes that the diameter takes. */
int64_t PG_CPU(diameter_bytes)(int64_t rows, int64_t columns);

/* Leave a text in the queue; gives -1. */
static inline int pg_refuse(pg_queue *q, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static inline int pg_refuse(pg_queue *q, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(q->message, sizeof q->message, format, arguments);
  va_end(arguments);
  return -1;
}

#ifdef __FMA__
#define PG_FMA(a, b, c) __builtin_fmaf(a, b, c)
#else
#define PG_FMA(a, b, c) ((a) * (b) + (c))
#endif

#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned pg_float_mode;
#define PG_FLUSH_BITS 0x8040u /* FTZ | DAZ in MXCSR */
static inline pg_float_mode pg_float_mode_set(bool flush) {
  unsigned old = _mm_getcsr();
  unsigned wanted = flush ? old | PG_FLUSH_BITS : old & ~PG_FLUSH_BITS;
  if (wanted != old) _mm_setcsr(wanted);
  return old;
}
static inline void pg_float_mode_restore(pg_float_mode old) {
  if (old != _mm_getcsr()) _mm_setcsr(old);
}
#elif defined(__aarch64__)
typedef uint64_t pg_float_mode;
static inline void pg_float_mode_restore(pg_float_mode old) {
  __asm__ volatile("msr fpcr, %0" ::"r"(old) : "memory");
}
static inline pg_float_mode pg_float_mode_set(bool flush) {
  uint64_t old;
  __asm__ volatile("mrs %0, fpcr" : "=r"(old));
  uint64_t bit = (uint64_t)1 << 24; /* FZ */
  pg_float_mode_restore(flush ? old | bit : old & ~bit);
  return old;
}
#else
typedef int pg_float_mode;
static inline pg_float_mode pg_float_mode_set(bool flush) {
  return (void)flush, 0;
}
static inline void pg_float_mode_restore(pg_float_mode old) {
  (void)old;
}
#endif

static inline int64_t pg_min64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static inline int64_t pg_max64(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* Inside a parallel region: OpenBLAS calls of this thread stay on it until the region ends. A team
 * of one is no active region to OpenBLAS, which would then start threads of its own. */
static inline void pg_blas_on_this_thread(void) {
  omp_set_num_threads(1);
}

/* Threads worth waking for `work` element operations: below ~16k the region costs more. */
static inline int pg_team(const pg_queue *q, int64_t work) {
  int64_t useful = work / 16384 + 1;
  return useful < q->threads ? (int)useful : q->threads;
}
/* Where part t of n elements begins when `parts` threads share them: multiples of 64 elements, so
 * that no cache line is written by two. */
static inline int64_t pg_part(int64_t n, int t, int parts) {
  if (t >= parts) return n;
  int64_t lines = (n + 63) / 64;
  return pg_min64(n, lines / parts * 64 * t + pg_min64(t, lines % parts) * 64);
}

#endif
