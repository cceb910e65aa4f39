/* Flush-to-zero for compute. Denormal operands slow matrix products down by up to 30 times, and
 * nothing in training is decided by numbers below 1.2e-38, so kernels run with denormal inputs and
 * results taken as zero. The mode belongs to a thread:
 *  - The calling thread has it only during a launch; its own mode comes back afterwards, so a host
 *    program's arithmetic is not changed.
 *  - OpenMP's workers keep it between launches. Workers started within a launch inherit it from the
 *    calling thread; those that exist already are set by one parallel region, at a thread's first
 *    launch and whenever the mode wanted differs from the last one. (A host that runs its own
 *    OpenMP loops from the same thread shares these workers.)
 * The geometry of tiny increments and plain copies ask for denormals: PG_LAUNCH_EXACT. */
#include "internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* MXCSR bit 15 flushes results, bit 6 takes denormal inputs as zero. */
#define FLUSH ((uint64_t)0x8040)
static uint64_t mode_get(void) {
  return _mm_getcsr();
}
static void mode_set(uint64_t mode) {
  _mm_setcsr((unsigned)mode);
}
#elif defined(__aarch64__)
/* FPCR.FZ: both, for fp32 and fp64. */
#define FLUSH ((uint64_t)1 << 24)
static uint64_t mode_get(void) {
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
static void mode_set(uint64_t mode) {
  __asm__ volatile("msr fpcr, %0" : : "r"(mode));
}
#else
#define FLUSH ((uint64_t)0)
static uint64_t mode_get(void) {
  return 0;
}
static void mode_set(uint64_t mode) {
  (void)mode;
}
#endif

/* What this thread's OpenMP workers were last set to. */
static _Thread_local struct {
  int threads; /* 0: never set */
  bool denormals;
} pool;

uint64_t pg__float_begin(const pg_context *ctx, bool denormals) {
  const uint64_t saved = mode_get();
  const uint64_t mode = denormals ? saved & ~FLUSH : saved | FLUSH;
  if (mode != saved) mode_set(mode);
  if (pool.threads < ctx->threads || pool.denormals != denormals) {
    pool.threads = ctx->threads;
    pool.denormals = denormals;
#pragma omp parallel num_threads(ctx->threads)
    mode_set(denormals ? mode_get() & ~FLUSH : mode_get() | FLUSH);
  }
  return saved;
}

void pg__float_end(uint64_t saved) {
  if (mode_get() != saved) mode_set(saved);
}
