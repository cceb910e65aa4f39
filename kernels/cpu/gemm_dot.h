/* bf16 products on dot-product instructions, where the CPU has them. */
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

/* PG_DOT_FLOPS operations of that kind in registers, which the result depends on. */
#define PG_DOT_ROUNDS 4096
#define PG_DOT_FLOPS (PG_DOT_ROUNDS * 16.0 * 64)
float PG_CPU(dot_rounds)(float start);

#endif
