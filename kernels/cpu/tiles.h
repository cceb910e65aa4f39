/* Intel's tiles (AMX) of bf16: registers of 16 rows of 64 bytes, and what packs operands for them.
 * For files that are compiled for them. */
#ifndef PG_CPU_TILES_H
#define PG_CPU_TILES_H

#include "gemm_pack.h"
#include <string.h>

#define TILE 256 /* words of a tile */
#define PAIRS (2 * SIDE)

/* The compiler's own intrinsics do not say that they touch memory. */
#define PG_TILE_LOAD(t, from, row)                                                                 \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"((int64_t)(row)) : "memory")
#define PG_TILE_STORE(t, to, row)                                                                  \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(row)) : "memory")
#define PG_TILE_CLEAR(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
#define PG_TILE_MULTIPLY(to, a, b)                                                                 \
  __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #to ::: "memory")

static inline void tiles_begin(void) {
  _Alignas(64) struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int t = 0; t < 8; t++) config.bytes[t] = 64, config.rows[t] = 16;
  __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
static inline void tiles_end(void) {
  __asm__ volatile("tilerelease" ::: "memory");
}

/* A pair of panels of `count` <= PAIRS columns of x, whose rows are k. */
static inline void pack_columns(const uint16_t *x, int64_t ld, int64_t count, int64_t k,
                                uint32_t *to) {
  const int64_t panel = (k + PAIRS - 1) / PAIRS * TILE, filled = (k + 1) / 2 * SIDE;
  const __mmask32 mask = (__mmask32)(0xffffffffu >> (PAIRS - count));
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t at = 0; at < k; at += 2, to += SIDE) {
    const __m512i even = _mm512_maskz_loadu_epi16(mask, x + at * ld);
    const __m512i odd =
        at + 1 < k ? _mm512_maskz_loadu_epi16(mask, x + (at + 1) * ld) : _mm512_setzero_si512();
    _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
    _mm512_store_si512(to + panel, _mm512_permutex2var_epi16(even, high, odd));
  }
  memset(to, 0, (size_t)(panel - filled) * sizeof *to);
  memset(to + panel, 0, (size_t)(panel - filled) * sizeof *to);
}

/* Every tile of a panel, turned: the words of a row of op(A) side by side. */
static inline void turn(uint32_t *to, int64_t steps) {
  for (; steps > 0; steps--, to += TILE) {
    __m512i row[SIDE];
    for (int r = 0; r < SIDE; r++) row[r] = _mm512_load_si512(to + r * SIDE);
    transpose(row);
    for (int r = 0; r < SIDE; r++) _mm512_store_si512(to + r * SIDE, row[r]);
  }
}

#endif
