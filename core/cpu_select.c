/* Which CPU level's kernel table serves this process. */
#include "../kernels/kernels.h"
#include <stdlib.h>
#include <string.h>

#if defined(PG_HAVE_CPU_AVX512) || defined(PG_HAVE_CPU_AVX2)
#define RUNS(feature) __builtin_cpu_supports(feature)
#endif

#ifdef PG_HAVE_CPU_AVX512
static int runs_avx512(void) {
  return RUNS("avx512f") && RUNS("avx512bw") && RUNS("avx512cd") && RUNS("avx512dq") &&
         RUNS("avx512vl") && RUNS("avx2") && RUNS("fma") && RUNS("bmi") && RUNS("bmi2");
}
#endif
#ifdef PG_HAVE_CPU_AVX2
static int runs_avx2(void) {
  return RUNS("avx2") && RUNS("fma") && RUNS("bmi") && RUNS("bmi2");
}
#endif

const pg_kernels *pg_cpu_kernels(const char *level) {
  /* PG_CPU in the environment stands in for an unnamed level: for tests and for finding faults. */
  if (!level) level = getenv("PG_CPU");
  if (level && !*level) level = NULL;
#ifdef PG_HAVE_CPU_AVX512
  if ((!level || !strcmp(level, "avx512")) && runs_avx512()) return &pg_cpu_avx512_kernels;
#endif
#ifdef PG_HAVE_CPU_AVX2
  if ((!level || !strcmp(level, "avx2")) && runs_avx2()) return &pg_cpu_avx2_kernels;
#endif
  return !level || !strcmp(level, "base") ? &pg_cpu_base_kernels : NULL;
}
