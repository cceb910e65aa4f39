/* Products of blocks that fit in the cache, without packing: for attention, where the blocks are
 * too small for the general routine to earn its packing back. */
#ifndef PG_CPU_SMALL_PRODUCT_H
#define PG_CPU_SMALL_PRODUCT_H

#include "cpu.h"
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

/* A vector of the level, its fused multiply-add, and how many columns of vectors fit into the
 * registers beside four rows. */
#if defined(__AVX512F__)
#define PG_WIDTH 16
#define PG_COLUMNS 4
typedef __m512 pg_vector;
#define PG_VECTOR_SET(x) _mm512_set1_ps(x)
#define PG_VECTOR_FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#elif defined(__FMA__)
#define PG_WIDTH 8
#define PG_COLUMNS 2
typedef __m256 pg_vector;
#define PG_VECTOR_SET(x) _mm256_set1_ps(x)
#define PG_VECTOR_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#else
#define PG_WIDTH 4
#define PG_COLUMNS 2
typedef float pg_vector __attribute__((vector_size(16)));
#define PG_VECTOR_SET(x) ((pg_vector){x, x, x, x})
#define PG_VECTOR_FMA(a, b, c) ((a) * (b) + (c))
#endif
typedef float pg_loose_vector
    __attribute__((vector_size(4 * PG_WIDTH), aligned(4), may_alias)); /* anywhere in memory */

/* Columns come in multiples of this at every level. */
#define PG_COLUMN_UNIT 16

/* C [rows, columns*PG_WIDTH] = A B, or C += A B; A(i,l) at a[i*row_stride + l*column_stride], B and
 * C row-major. rows and columns are constants at every call, so that all loops over them unroll and
 * the accumulators stay in registers. */
static inline __attribute__((always_inline)) void
pg_register_tile(const int rows, const int columns, int64_t k, const float *a, int64_t row_stride,
                 int64_t column_stride, const float *b, int64_t ldb, float *c, int64_t ldc,
                 bool add) {
  pg_vector sum[16][PG_COLUMNS];
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < columns; j++) {
      if (add)
        sum[i][j] = (pg_vector) * (const pg_loose_vector *)(c + i * ldc + j * PG_WIDTH);
      else
        sum[i][j] = (pg_vector){0};
    }
  for (int64_t l = 0; l < k; l++) {
    pg_vector right[PG_COLUMNS];
    for (int j = 0; j < columns; j++)
      right[j] = (pg_vector) * (const pg_loose_vector *)(b + l * ldb + j * PG_WIDTH);
    for (int i = 0; i < rows; i++) {
      pg_vector left = PG_VECTOR_SET(a[i * row_stride + l * column_stride]);
      for (int j = 0; j < columns; j++) sum[i][j] = PG_VECTOR_FMA(left, right[j], sum[i][j]);
    }
  }
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < columns; j++)
      *(pg_loose_vector *)(c + i * ldc + j * PG_WIDTH) = (pg_loose_vector)sum[i][j];
}

/* The same for any m and k, n a multiple of PG_COLUMN_UNIT. Every element is summed in increasing
 * l, so the bits do not depend on how a product is divided. */
static inline void pg_small_product(int64_t m, int64_t n, int64_t k, const float *a,
                                    int64_t row_stride, int64_t column_stride, const float *b,
                                    int64_t ldb, float *c, int64_t ldc, bool add) {
  const int64_t wide = PG_COLUMNS * PG_WIDTH;
  for (int64_t j = 0; j < n;) {
    bool full = n - j >= wide;
    int64_t i = 0;
#define PG_TILE(r, w)                                                                              \
  pg_register_tile(r, w, k, a + i * row_stride, row_stride, column_stride, b + j, ldb,             \
                   c + i * ldc + j, ldc, add)
    if (full) {
      for (; i + 4 <= m; i += 4) PG_TILE(4, PG_COLUMNS);
      for (; i < m; i++) PG_TILE(1, PG_COLUMNS);
    } else {
      for (; i + 4 <= m; i += 4) PG_TILE(4, 1);
      for (; i < m; i++) PG_TILE(1, 1);
    }
#undef PG_TILE
    j += full ? wide : PG_WIDTH;
  }
}

#endif
