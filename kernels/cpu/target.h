/* Increments on their way to a pg_target, in runs of at most PG_RUN elements that stay in the
 * first-level cache: a kernel computes a run where pg_target_run says and hands it to
 * pg_target_apply. Both expect flush-to-zero mode. */
#ifndef PG_CPU_TARGET_H
#define PG_CPU_TARGET_H

#include "bf16.h"

/* Where to compute the increments from element `at` on; `scratch` has room for a run. */
static inline float *pg_target_run(const pg_target *to, int64_t at, float *scratch) {
  return to->increment ? to->increment + at : scratch;
}
static inline void pg_target_apply(const pg_target *to, int64_t at, int64_t n, const float *s) {
  if (!to->value) return;
  float keep = (float)to->keep, *w = to->value + at;
  if (to->cautious) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) w[i] = (s[i] * w[i] < 0 ? keep * w[i] : w[i]) + s[i];
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) w[i] = keep * w[i] + s[i];
  }
  if (to->copy) pg_narrow(w, n, to->copy + at);
}

#endif
