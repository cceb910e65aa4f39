/* Shared by the CPU kernels: names per CPU level, the queue, and small helpers.
 *
 * Each file here is compiled once per CPU level (base, avx2, avx512; CMakeLists.txt) and the level
 * is chosen when a context is made, so every external name carries its level. */
#ifndef PG_CPU_H
#define PG_CPU_H

#include "../kernels.h"

#ifndef PG_CPU_LEVEL
#define PG_CPU_LEVEL base
#endif
#define PG_CPU_PASTE_(level, name) pg_cpu_##level##_##name
#define PG_CPU_PASTE(level, name) PG_CPU_PASTE_(level, name)
/* The level's name of an external function or object: PG_CPU(gemm) is pg_cpu_avx2_gemm. */
#define PG_CPU(name) PG_CPU_PASTE(PG_CPU_LEVEL, name)

#define PG_CPU_DECLARE(op) pg_##op##_fn PG_CPU(op);
PG_KERNELS(PG_CPU_DECLARE)

struct pg_queue {
  int threads;
  char message[256];
};

#endif
