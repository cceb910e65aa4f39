/* Shared by the products of bf16 operands: panels of operands, and parts of results. For files that
 * are compiled for AVX-512.
 *
 * A panel is SIDE rows of op(A), or columns of op(B), over a slice of k: word [p][r] holds elements
 * 2p and 2p + 1 along k of row r. */
#ifndef PG_CPU_GEMM_PACK_H
#define PG_CPU_GEMM_PACK_H

#include "cpu.h"
#include <immintrin.h>

/* Of functions that round or multiply pairs: AVX-512 itself does not have that. */
#define DOT __attribute__((target("avx512bf16")))
#define SIDE 16

/* 16 x 16 words, transposed. */
static inline void transpose(__m512i row[SIDE]) {
  __m512i t[SIDE];
  for (int i = 0; i < SIDE; i += 2) {
    t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < SIDE; i += 4)
    for (int j = 0; j < 2; j++) {
      row[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      row[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  /* row[4 q + c] holds in lane l column 4 l + c of rows 4 q to 4 q + 3. */
  for (int c = 0; c < 4; c++) {
    __m512i low = _mm512_shuffle_i32x4(row[c], row[4 + c], 0x44);
    __m512i high = _mm512_shuffle_i32x4(row[c], row[4 + c], 0xee);
    __m512i low2 = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0x44);
    __m512i high2 = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0xee);
    t[c] = _mm512_shuffle_i32x4(low, low2, 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    t[8 + c] = _mm512_shuffle_i32x4(high, high2, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
  for (int i = 0; i < SIDE; i++) row[i] = t[i];
}

/* A panel of `count` <= SIDE rows of x, which k runs along; rows and elements past the end are 0.
 */
static inline void pack_along(const uint16_t *x, int64_t ld, int64_t count, int64_t k,
                              uint32_t *to) {
  for (int64_t at = 0; at < k; at += 2 * SIDE) {
    const int64_t left = pg_min64(2 * SIDE, k - at), pairs = (left + 1) / 2;
    const __mmask32 mask = (__mmask32)(0xffffffffu >> (32 - left));
    __m512i row[SIDE];
    for (int r = 0; r < SIDE; r++)
      row[r] = r < count ? _mm512_maskz_loadu_epi16(mask, x + r * ld + at) : _mm512_setzero_si512();
    transpose(row);
    for (int64_t p = 0; p < pairs; p++) _mm512_store_si512(to + (at / 2 + p) * SIDE, row[p]);
  }
}

/* A part of C or D, from its first element on. */
typedef struct part {
  void *at;
  int64_t ld;
  bool narrow; /* bf16 */
} part;

static inline __m512 load(part x, int64_t row, int64_t column, __mmask16 mask) {
  const int64_t at = row * x.ld + column;
  if (!x.narrow) return _mm512_maskz_loadu_ps(mask, (const float *)x.at + at);
  const __m256i bits = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x.at + at);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

static inline part part_at(const void *x, pg_dtype type, int64_t ld, int64_t at) {
  const size_t size = type == PG_BF16 ? 2 : 4;
  return (part){(char *)(uintptr_t)x + (size_t)at * size, ld, type == PG_BF16};
}

#endif
