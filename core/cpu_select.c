/* Which CPU level's kernel table serves this process. */
#include "../kernels/kernels.h"
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#if defined(PG_HAVE_CPU_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(PG_HAVE_CPU_AVX512) || defined(PG_HAVE_CPU_AVX2)
#define RUNS(feature) __builtin_cpu_supports(feature)
#endif

#ifdef PG_HAVE_CPU_AVX2
static bool runs_avx2(void) {
  return RUNS("avx2") && RUNS("fma") && RUNS("bmi") && RUNS("bmi2");
}
#endif
#ifdef PG_HAVE_CPU_AVX512
static bool runs_avx512(void) {
  return RUNS("avx512f") && RUNS("avx512bw") && RUNS("avx512cd") && RUNS("avx512dq") &&
         RUNS("avx512vl") && RUNS("avx2") && RUNS("fma") && RUNS("bmi") && RUNS("bmi2");
}
#endif
#ifdef PG_HAVE_CPU_AMX
/* Linux gives a process the tiles' registers when it asks for them. It says no where a thread's
 * stack for signals could not hold them. */
static bool may_use_tiles(void) {
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
static bool runs_amx(void) {
  unsigned a, b, c, d;
  if (!runs_avx512() || !RUNS("avx512bf16") || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
    return false;
  const unsigned tiles = 1u << 24, bf16 = 1u << 22; /* AMX-TILE, AMX-BF16 */
  return (d & tiles) && (d & bf16) && may_use_tiles();
}
#endif

const char *const pg_cpu_levels[PG_CPU_LEVELS] = {"base", "avx2", "avx512", "amx"};

static const pg_kernels *table(const char *level) {
#ifdef PG_HAVE_CPU_AMX
  if (!strcmp(level, "amx")) return runs_amx() ? &pg_cpu_amx_kernels : NULL;
#endif
#ifdef PG_HAVE_CPU_AVX512
  if (!strcmp(level, "avx512")) return runs_avx512() ? &pg_cpu_avx512_kernels : NULL;
#endif
#ifdef PG_HAVE_CPU_AVX2
  if (!strcmp(level, "avx2")) return runs_avx2() ? &pg_cpu_avx2_kernels : NULL;
#endif
  return !strcmp(level, "base") ? &pg_cpu_base_kernels : NULL;
}

const pg_kernels *pg_cpu_kernels(const char *level) {
  /* PG_CPU in the environment stands in for an unnamed level: for tests and for finding faults. */
  if (!level) level = getenv("PG_CPU");
  if (level && *level) return table(level);
  for (int i = PG_CPU_LEVELS - 1; i > 0; i--) {
    const pg_kernels *kernels = table(pg_cpu_levels[i]);
    if (kernels) return kernels;
  }
  return &pg_cpu_base_kernels;
}

const char *pg_cpu_level(const pg_kernels *kernels) {
  for (int i = 0; i < PG_CPU_LEVELS; i++)
    if (table(pg_cpu_levels[i]) == kernels) return pg_cpu_levels[i];
  return "unknown";
}
