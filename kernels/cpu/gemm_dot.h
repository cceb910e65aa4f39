/* bf16 products on instructions for them, where the CPU has these: gemm_amx.c, or gemm_dot.c. */
#ifndef PG_CPU_GEMM_DOT_H
#define PG_CPU_GEMM_DOT_H

#include "cpu.h"

bool PG_CPU(gemm_dots)(void);
/* Floats of scratch that a thread needs. */
int64_t PG_CPU(gemm_dot_scratch)(void);
/* Rows [i0, i1) and columns [j0, j1) of entry `entry` of a product of bf16 operands; only where
 * gemm_dots says so. `work` is 64-byte aligned. */
void PG_CPU(gemm_dot)(const pg_gemm *g, int64_t entry, int64_t i0, int64_t i1, int64_t j0,
                      int64_t j1, float *work);

/* Operations of that kind in registers, PG_DOT_FLOPS a call, which the result depends on. */
float PG_CPU(dot_rounds)(float start);
#define PG_DOT_ROUNDS 4096
#ifdef __AMX_BF16__
#define PG_DOT_FLOPS (PG_DOT_ROUNDS * 4.0 * 16 * 16 * 64)
#else
#define PG_DOT_FLOPS (PG_DOT_ROUNDS * 16.0 * 64)
#endif

#endif
