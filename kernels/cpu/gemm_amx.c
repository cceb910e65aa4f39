/* Products of bf16 operands on tiles (Intel AMX): one instruction multiplies 16 x 32 elements of A
 * by 32 x 16 of B into 16 x 16 sums in fp32, at many times the rate of fp32. bf16 inputs below
 * 2^-126 count as 0.
 *
 * Operands are packed tile after tile: of A 16 rows of 32 elements, of B panels (gemm_pack.h) of 16
 * pairs. A pair of panels of B, over a slice of DEPTH, stays in the first-level cache while those
 * of A pass it; the panels of A, and sums that wait for the next slice, in the second. Every
 * element of C is the same sum whatever the cut between threads is. */
#include "gemm_dot.h"
#include <string.h>

#ifdef __AMX_BF16__
#include "gemm_pack.h"

#define DEPTH 512
#define ROWS 512
#define WIDE 2048  /* columns of C at a time where one slice is all of k */
#define NARROW 512 /* where sums wait */
#define TILE 256   /* words of a tile */
#define PAIRS (2 * SIDE)

bool PG_CPU(gemm_dots)(void) {
  return true;
}
/* Panels of A; panels of B, or fewer and the sums; a pair of tiles' sums. */
#define PACKED_A (ROWS * DEPTH / 2)
#define PACKED_B (WIDE * DEPTH / 2)
#define FLUSHED (4 * TILE)
int64_t PG_CPU(gemm_dot_scratch)(void) {
  return PACKED_A + PACKED_B + FLUSHED;
}
_Static_assert(NARROW *DEPTH / 2 + ROWS * NARROW <= PACKED_B, "the sums fit beside the panels");

/* ---- tiles ------------------------------------------------------------------------------ */
/* The compiler's own intrinsics do not say that they touch memory. */
#define LOAD(t, from, stride)                                                                      \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define STORE(t, to)                                                                               \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"((int64_t)64) : "memory")
#define CLEAR(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
#define MULTIPLY(to, a, b)                                                                         \
  __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #to ::: "memory")

static void tiles_begin(void) {
  _Alignas(64) struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int t = 0; t < 8; t++) config.bytes[t] = 64, config.rows[t] = 16;
  __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
static void tiles_end(void) {
  __asm__ volatile("tilerelease" ::: "memory");
}

/* 2 x 2 tiles of sums: two panels of A times two of B over `steps` tiles; on top of what is in
 * `sums`, or of 0. */
static void multiply(const uint32_t *a, const uint32_t *b, int64_t steps, bool more, float *sums) {
  const uint32_t *a2 = a + steps * TILE, *b2 = b + steps * TILE;
  if (more) {
    LOAD(0, sums, 64);
    LOAD(1, sums + TILE, 64);
    LOAD(2, sums + 2 * TILE, 64);
    LOAD(3, sums + 3 * TILE, 64);
  } else {
    CLEAR(0);
    CLEAR(1);
    CLEAR(2);
    CLEAR(3);
  }
  for (int64_t s = 0; s < steps * TILE; s += TILE) {
    LOAD(6, b + s, 64);
    LOAD(4, a + s, 64);
    MULTIPLY(0, 4, 6);
    LOAD(7, b2 + s, 64);
    MULTIPLY(1, 4, 7);
    LOAD(5, a2 + s, 64);
    MULTIPLY(2, 5, 6);
    MULTIPLY(3, 5, 7);
  }
  STORE(0, sums);
  STORE(1, sums + TILE);
  STORE(2, sums + 2 * TILE);
  STORE(3, sums + 3 * TILE);
}

/* ---- operands --------------------------------------------------------------------------- */
/* Tiles of `count` <= SIDE rows of x, which k runs along; what is past the end is 0. */
static void tiles_along(const uint16_t *x, int64_t ld, int64_t count, int64_t k, uint32_t *to) {
  for (int64_t at = 0; at < k; at += PAIRS)
    for (int64_t r = 0; r < SIDE; r++, to += SIDE) {
      const int64_t left = pg_min64(PAIRS, k - at);
      const __mmask32 mask = r < count ? (__mmask32)(0xffffffffu >> (32 - left)) : 0;
      _mm512_store_si512(to, _mm512_maskz_loadu_epi16(mask, x + r * ld + at));
    }
}

/* Columns of x, whose rows are k, as tiles of rows: panels' tiles, turned. */
static void tiles_across(const uint16_t *x, int64_t ld, int64_t count, int64_t k, uint32_t *to) {
  for (int64_t at = 0; at < k; at += PAIRS, to += TILE) {
    const int64_t left = pg_min64(PAIRS, k - at);
    __m512i row[SIDE];
    pack_across(x + at * ld, ld, count, left, to);
    for (int64_t p = 0; p < SIDE; p++)
      row[p] = 2 * p < left ? _mm512_load_si512(to + p * SIDE) : _mm512_setzero_si512();
    transpose(row);
    for (int64_t r = 0; r < SIDE; r++) _mm512_store_si512(to + r * SIDE, row[r]);
  }
}

/* Rows [first, first + count) of op(A) over [k, k + depth), pairs of panels. */
static void pack_a(const pg_gemm *g, const uint16_t *a, int64_t first, int64_t count, int64_t k,
                   int64_t depth, uint32_t *to) {
  const int64_t panel = (depth + PAIRS - 1) / PAIRS * TILE;
  for (int64_t i = 0; i < (count + PAIRS - 1) / PAIRS * PAIRS; i += SIDE, to += panel) {
    const int64_t rows = pg_max64(0, pg_min64(SIDE, count - i));
    if (rows == 0)
      memset(to, 0, (size_t)panel * sizeof *to);
    else if (g->transpose_a)
      tiles_across(a + k * g->lda + first + i, g->lda, rows, depth, to);
    else
      tiles_along(a + (first + i) * g->lda + k, g->lda, rows, depth, to);
  }
}

/* Columns of op(B), likewise. */
static void pack_b(const pg_gemm *g, const uint16_t *b, int64_t first, int64_t count, int64_t k,
                   int64_t depth, uint32_t *to) {
  const int64_t panel = (depth + PAIRS - 1) / PAIRS * TILE, filled = (depth + 1) / 2 * SIDE;
  for (int64_t j = 0; j < (count + PAIRS - 1) / PAIRS * PAIRS; j += SIDE, to += panel) {
    const int64_t columns = pg_max64(0, pg_min64(SIDE, count - j));
    const int64_t kept = columns ? filled : 0;
    if (columns && g->transpose_b)
      pack_along(b + (first + j) * g->ldb + k, g->ldb, columns, depth, to);
    else if (columns)
      pack_across(b + k * g->ldb + first + j, g->ldb, columns, depth, to);
    memset(to + kept, 0, (size_t)(panel - kept) * sizeof *to);
  }
}

/* ---- results ---------------------------------------------------------------------------- */
/* alpha times the sums of 2 x 2 tiles, plus beta times what is in `from` unless beta = 0. */
DOT static void finish(const float *sums, int64_t row, int64_t rows, int64_t column,
                       int64_t columns, float alpha, float beta, part from, part to) {
  const __m512 scale = _mm512_set1_ps(alpha), share = _mm512_set1_ps(beta);
  for (int64_t j = 0; j < columns; j += SIDE, sums += TILE) {
    const int64_t wide = pg_min64(SIDE, columns - j);
    const __mmask16 mask = (__mmask16)(0xffffu >> (SIDE - wide));
    for (int64_t i = 0; i < rows; i++) {
      const float *sum = sums + (i / SIDE) * 2 * TILE + i % SIDE * SIDE;
      __m512 value = _mm512_mul_ps(_mm512_load_ps(sum), scale);
      if (beta != 0) value = _mm512_fmadd_ps(load(from, row + i, column + j, mask), share, value);
      store(to, row + i, column + j, mask, value);
    }
  }
}

/* Rows [i, i + rows) and columns [j, j + columns) of C, whose corner `c` and `d` are. */
static void block(const pg_gemm *g, const uint16_t *a, const uint16_t *b, part c, part d, int64_t i,
                  int64_t rows, int64_t j, int64_t columns, float *work) {
  uint32_t *left = (uint32_t *)work, *right = left + PACKED_A;
  float *flushed = work + PACKED_A + PACKED_B, *sums = flushed - ROWS * NARROW;
  const bool slices = g->k > DEPTH;
  int64_t k = 0;
  do {
    const int64_t depth = pg_min64(DEPTH, g->k - k), steps = (depth + PAIRS - 1) / PAIRS;
    const bool last = k + depth >= g->k;
    pack_a(g, a, i, rows, k, depth, left);
    pack_b(g, b, j, columns, k, depth, right);
    float *wait = sums;
    for (int64_t y = 0; y < columns; y += PAIRS)
      for (int64_t x = 0; x < rows; x += PAIRS, wait += slices ? FLUSHED : 0) {
        float *to = slices ? wait : flushed;
        multiply(left + x / SIDE * steps * TILE, right + y / SIDE * steps * TILE, steps, k > 0, to);
        if (last)
          finish(to, x, pg_min64(PAIRS, rows - x), y, pg_min64(PAIRS, columns - y), g->alpha,
                 g->beta, d, c);
      }
    k += DEPTH;
  } while (k < g->k);
}

void PG_CPU(gemm_dot)(const pg_gemm *g, int64_t entry, int64_t i0, int64_t i1, int64_t j0,
                      int64_t j1, float *work) {
  const uint16_t *a = (const uint16_t *)g->a + entry * g->stride_a;
  const uint16_t *b = (const uint16_t *)g->b + entry * g->stride_b;
  const int64_t wide = g->k > DEPTH ? NARROW : WIDE;
  tiles_begin();
  for (int64_t j = j0; j < j1; j += wide)
    for (int64_t i = i0; i < i1; i += ROWS) {
      const int64_t at = entry * g->stride_c + i * g->ldc + j;
      block(g, a, b, part_at(g->c, g->type_c, g->ldc, at),
            part_at(g->addend ? g->addend : g->c, g->type_c, g->ldc, at), i, pg_min64(ROWS, i1 - i),
            j, pg_min64(wide, j1 - j), work);
    }
  tiles_end();
}

float PG_CPU(dot_rounds)(float start) {
  _Alignas(64) uint32_t half[TILE];
  _Alignas(64) float sums[TILE];
  for (int i = 0; i < TILE; i++) half[i] = 0x3c003c00, sums[i] = start + (float)i; /* 2^-7 */
  tiles_begin();
  LOAD(0, sums, 64);
  LOAD(1, sums, 64);
  LOAD(2, sums, 64);
  LOAD(3, sums, 64);
  LOAD(4, half, 64);
  LOAD(5, half, 64);
  for (int r = 0; r < PG_DOT_ROUNDS; r++) {
    MULTIPLY(0, 4, 5);
    MULTIPLY(1, 4, 5);
    MULTIPLY(2, 4, 5);
    MULTIPLY(3, 4, 5);
  }
  STORE(3, sums);
  tiles_end();
  return sums[0];
}
#endif
