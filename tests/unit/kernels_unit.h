/* Shared by the kernel tests: the backends that run here (every CPU level with one and two
 * threads), random fp32 vectors, buffers poisoned with NaN, and error measures. */
#ifndef PG_KERNELS_UNIT_H
#define PG_KERNELS_UNIT_H

#include "kernels/kernels.h"
#include "unit.h"

/* The backend under test. */
static const pg_kernels *k;
static pg_queue *q;
static const char *unit_level;
static int unit_threads;

#define UNIT_ULP 0x1p-24 /* u, the unit roundoff of fp32 */

static inline int unit_backend(int which) {
  if (q) k->queue_free(q);
  q = NULL;
  unit_level = pg_cpu_levels[which / 2];
  unit_threads = which % 2 + 1;
  k = pg_cpu_kernels(unit_level);
  if (!k) {
    printf("# level %s does not run here\n", unit_level);
    return 0;
  }
  const pg_queue_options options = {.threads = unit_threads};
  char why[64];
  if (k->queue_new(&options, &q, why, sizeof why) < 0) abort();
  printf("# level %s, %d threads\n", unit_level, unit_threads);
  return 1;
}
/* FOR_EACH_BACKEND { RUN(a); RUN(b); } */
#define FOR_EACH_BACKEND                                                                           \
  for (int backend_ = 0; backend_ < 2 * PG_CPU_LEVELS; backend_++)                                 \
    if (unit_backend(backend_))
static inline int unit_kernels_report(void) {
  if (q) k->queue_free(q);
  q = NULL;
  return unit_report();
}

#define KERNEL(op, ...)                                                                            \
  CHECK(k->op(q, __VA_ARGS__) == 0, #op " said: %s (%s, %d threads)", k->message(q), unit_level,   \
        unit_threads)

static uint64_t unit_state = 1;
static inline void unit_seed(uint64_t seed) {
  unit_state = seed * 0x9e3779b97f4a7c15u + 1;
}
static inline double unit_uniform(void) { /* [0,1) */
  unit_state ^= unit_state << 13;
  unit_state ^= unit_state >> 7;
  unit_state ^= unit_state << 17;
  return (double)(unit_state >> 11) * 0x1p-53;
}
static inline float unit_normal(void) {
  double a = 1 - unit_uniform(), b = unit_uniform();
  return (float)(sqrt(-2 * log(a)) * cos(6.283185307179586 * b));
}
/* All buffers are malloc'ed at their exact size, so that a sanitizer sees a step outside. */
static inline float *unit_floats(int64_t n) {
  float *x = malloc((size_t)n * sizeof *x + 1);
  if (!x) abort();
  return x;
}
static inline float *unit_normals(int64_t n, double scale) {
  float *x = unit_floats(n);
  for (int64_t i = 0; i < n; i++) x[i] = (float)(scale * unit_normal());
  return x;
}
static inline float *unit_poisoned(int64_t n) {
  float *x = unit_floats(n);
  for (int64_t i = 0; i < n; i++) x[i] = NAN;
  return x;
}
static inline float *unit_clone(const float *x, int64_t n) {
  float *y = unit_floats(n);
  memcpy(y, x, (size_t)n * sizeof *y);
  return y;
}
static inline double *unit_doubles(int64_t n) {
  double *x = calloc((size_t)n + 1, sizeof *x);
  if (!x) abort();
  return x;
}

/* ||got - want|| / ||want||; infinite when an element is not finite. */
static inline double unit_error(const float *got, const double *want, int64_t n) {
  double difference = 0, size = 0;
  for (int64_t i = 0; i < n; i++) {
    double e = (double)got[i] - want[i];
    if (!isfinite(e)) return INFINITY;
    difference += e * e;
    size += want[i] * want[i];
  }
  return size > 0 ? sqrt(difference / size) : sqrt(difference);
}
static inline int unit_same_bits(const float *a, const float *b, int64_t n) {
  return memcmp(a, b, (size_t)n * sizeof *a) == 0;
}
/* Prints the error beside its bound, which the caller derives. */
#define CHECK_ERROR(name, got, want, n, bound)                                                     \
  do {                                                                                             \
    double error_ = unit_error(got, want, n);                                                      \
    printf("# %-28s error %.2e (bound %.1e)\n", name, error_, (double)(bound));                    \
    CHECK(error_ <= (bound), "%s: error %.3g above %.3g", name, error_, (double)(bound));          \
  } while (0)

#endif
