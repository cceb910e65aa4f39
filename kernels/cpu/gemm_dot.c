/* Products of bf16 operands on instructions that multiply pairs and add in fp32 (VDPBF16PS); found
 * at run time, since the level is not compiled for them. AMD's CPUs have them at twice the rate of
 * fp32; Intel's at half of it, so there operands are widened. bf16 inputs below 2^-126 count as 0,
 * in every float mode.
 *
 * Both operands are packed the same way, in panels. One word of A, repeated, times
 * SIDE words of B is SIDE pairs of one row of C, so a tile of SIDE x SIDE sums stays in registers
 * over a slice of DEPTH. A block of C is cut into BLOCK x BLOCK, whose two packed slices fit the
 * second-level cache; a panel of B fits the first. Every element of C is the same sum whatever the
 * cut between threads is. */
#include "gemm_dot.h"

#if defined(__AMX_BF16__)
/* gemm_amx.c */
#elif defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__x86_64__)
#include "gemm_pack.h"

#define DEPTH 512
#define BLOCK 512
#define PACKED (BLOCK * DEPTH / 2) /* words of a packed slice */

bool PG_CPU(gemm_dots)(void) {
  return __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel");
}
int64_t PG_CPU(gemm_dot_scratch)(void) {
  return 2 * PACKED + BLOCK * BLOCK;
}

/* A panel of `count` <= SIDE columns of x, whose rows are k. */
static void pack_across(const uint16_t *x, int64_t ld, int64_t count, int64_t k, uint32_t *to) {
  const __mmask16 mask = (__mmask16)(0xffffu >> (SIDE - count));
  const __m512i zip = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  for (int64_t at = 0; at < k; at += 2) {
    __m256i even = _mm256_maskz_loadu_epi16(mask, x + at * ld), odd = _mm256_setzero_si256();
    if (at + 1 < k) odd = _mm256_maskz_loadu_epi16(mask, x + (at + 1) * ld);
    _mm512_store_si512(
        to + at / 2 * SIDE,
        _mm512_permutex2var_epi16(_mm512_castsi256_si512(even), zip, _mm512_castsi256_si512(odd)));
  }
}

/* Rows [first, first + count) of op(A), or columns of op(B), over [k, k + depth), in panels. */
static void pack(const uint16_t *x, bool along, int64_t ld, int64_t first, int64_t count, int64_t k,
                 int64_t depth, uint32_t *to) {
  for (int64_t i = 0; i < count; i += SIDE, to += (depth + 1) / 2 * SIDE) {
    const int64_t rows = pg_min64(SIDE, count - i);
    if (along)
      pack_along(x + (first + i) * ld + k, ld, rows, depth, to);
    else
      pack_across(x + k * ld + first + i, ld, rows, depth, to);
  }
}

DOT static inline void store(part x, int64_t row, int64_t column, __mmask16 mask, __m512 value) {
  const int64_t at = row * x.ld + column;
  if (x.narrow)
    _mm256_mask_storeu_epi16((uint16_t *)x.at + at, mask, (__m256i)_mm512_cvtneps_pbh(value));
  else
    _mm512_mask_storeu_ps((float *)x.at + at, mask, value);
}

/* The tile of C at [row, column]: alpha times the products of two panels, plus beta times what is
 * in `from` unless beta = 0. */
DOT static void tile(const uint32_t *a, const uint32_t *b, int64_t pairs, int64_t row, int64_t rows,
                     int64_t column, int64_t columns, float alpha, float beta, part from, part to) {
  const __mmask16 mask = (__mmask16)(0xffffu >> (SIDE - columns));
  __m512 sum[SIDE];
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; i++) sum[i] = _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; p++) {
    const __m512bh right = (__m512bh)_mm512_load_si512(b + p * SIDE);
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++)
      sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_set1_epi32((int)a[p * SIDE + i]), right);
  }
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; i++) {
    if (i >= rows) continue;
    __m512 value = _mm512_mul_ps(sum[i], _mm512_set1_ps(alpha));
    if (beta != 0)
      value = _mm512_fmadd_ps(load(from, row + i, column, mask), _mm512_set1_ps(beta), value);
    store(to, row + i, column, mask, value);
  }
}

/* Rows [i, i + rows) and columns [j, j + columns) of C, at most BLOCK each. */
static void block(const pg_gemm *g, const uint16_t *a, const uint16_t *b, part c, part d, int64_t i,
                  int64_t rows, int64_t j, int64_t columns, float *work) {
  uint32_t *left = (uint32_t *)work, *right = left + PACKED;
  /* Sums that wait for the next slice are in fp32. */
  const part sums = c.narrow ? (part){work + 2 * PACKED, BLOCK, false} : c;
  int64_t k = 0;
  do {
    const int64_t depth = pg_min64(DEPTH, g->k - k), pairs = (depth + 1) / 2;
    const bool last = k + depth >= g->k;
    const float beta = k ? 1 : g->beta;
    const part from = k ? sums : d, to = last ? c : sums;
    pack(a, !g->transpose_a, g->lda, i, rows, k, depth, left);
    pack(b, g->transpose_b, g->ldb, j, columns, k, depth, right);
    for (int64_t y = 0; y < columns; y += SIDE)
      for (int64_t x = 0; x < rows; x += SIDE)
        tile(left + x * pairs, right + y * pairs, pairs, x, pg_min64(SIDE, rows - x), y,
             pg_min64(SIDE, columns - y), g->alpha, beta, from, to);
    k += DEPTH;
  } while (k < g->k);
}

void PG_CPU(gemm_dot)(const pg_gemm *g, int64_t entry, int64_t i0, int64_t i1, int64_t j0,
                      int64_t j1, float *work) {
  const uint16_t *a = (const uint16_t *)g->a + entry * g->stride_a;
  const uint16_t *b = (const uint16_t *)g->b + entry * g->stride_b;
  for (int64_t j = j0; j < j1; j += BLOCK)
    for (int64_t i = i0; i < i1; i += BLOCK) {
      const int64_t at = entry * g->stride_c + i * g->ldc + j;
      block(g, a, b, part_at(g->c, g->type_c, g->ldc, at),
            part_at(g->addend ? g->addend : g->c, g->type_c, g->ldc, at), i,
            pg_min64(BLOCK, i1 - i), j, pg_min64(BLOCK, j1 - j), work);
    }
}

DOT float PG_CPU(dot_rounds)(float start) {
  const __m512bh factor = (__m512bh)_mm512_set1_epi16(0x3f00); /* 0.5 */
  __m512 sum[SIDE], all = _mm512_setzero_ps();
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; i++) sum[i] = _mm512_set1_ps(start + (float)i);
  for (int r = 0; r < PG_DOT_ROUNDS; r++) {
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) sum[i] = _mm512_dpbf16_ps(sum[i], factor, factor);
  }
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; i++) all = _mm512_add_ps(all, sum[i]);
  return _mm512_reduce_add_ps(all);
}

#else

bool PG_CPU(gemm_dots)(void) {
  return false;
}
int64_t PG_CPU(gemm_dot_scratch)(void) {
  return 0;
}
void PG_CPU(gemm_dot)(const pg_gemm *g, int64_t entry, int64_t i0, int64_t i1, int64_t j0,
                      int64_t j1, float *work) {
  (void)g, (void)entry, (void)i0, (void)i1, (void)j0, (void)j1, (void)work;
}
float PG_CPU(dot_rounds)(float start) {
  return start;
}
#endif
