/* Products of bf16 operands on tiles (Intel AMX): one instruction multiplies 16 x 32 elements of A
 * by 32 x 16 of B into 16 x 16 sums in fp32, at many times the rate of fp32. bf16 inputs below
 * 2^-126 count as 0.
 *
 * Operands are packed tile after tile: of A 16 rows of 32 elements, of B panels (gemm_pack.h) of 16
 * pairs. A block of C is ROWS x COLUMNS, whose panels over a slice of k wait in the second-level
 * cache, and so do the sums where there are several slices; two panels of A stay in the first while
 * those of B pass. The vector unit stores finished sums while the next are made. Every element of C
 * is the same sum whatever the cut between threads is. */
#include "gemm_dot.h"
#include <string.h>

#ifdef __AMX_BF16__
#include "tiles.h"

/* Measured: panels over 256 fit the first-level cache best (66 against 54 % of the peak over 512),
 * but sums that wait cost as much, so a k up to 512 is one slice. */
#define DEPTH 256
#define WHOLE 512
#define STREAMED 0x1p22 /* elements of C from which on it is stored past the caches */
#define ROWS 512
#define COLUMNS 512

bool PG_CPU(gemm_dots)(void) {
  return true;
}
/* Panels of A and B, and sums. */
#define PACKED_A (ROWS * WHOLE / 2)
#define PACKED_B (COLUMNS * WHOLE / 2)
int64_t PG_CPU(gemm_dot_scratch)(void) {
  return PACKED_A + PACKED_B + ROWS * COLUMNS;
}

/* ---- operands --------------------------------------------------------------------------- */
/* Tiles of `count` rows of x, at most SIDE of them, which k runs along; what is past the end is 0.
 */
static void tiles_along(const uint16_t *x, int64_t ld, int64_t count, int64_t k, uint32_t *to) {
  for (int64_t at = 0; at < k; at += PAIRS)
    for (int64_t r = 0; r < SIDE; r++, to += SIDE) {
      const int64_t left = pg_min64(PAIRS, k - at);
      const __mmask32 mask = r < count ? (__mmask32)(0xffffffffu >> (32 - left)) : 0;
      _mm512_store_si512(to, _mm512_maskz_loadu_epi16(mask, x + r * ld + at));
    }
}

/* Pairs of panels of `count` rows of op(A) over [k, k + depth), from row `first` on. */
static void pack_a(const pg_gemm *g, const uint16_t *a, int64_t first, int64_t count, int64_t k,
                   int64_t depth, uint32_t *to) {
  const int64_t steps = (depth + PAIRS - 1) / PAIRS, panel = steps * TILE;
  for (int64_t i = 0; i < count; i += PAIRS, to += 2 * panel) {
    const int64_t rows = pg_min64(PAIRS, count - i);
    if (g->transpose_a) {
      pack_columns(a + k * g->lda + first + i, g->lda, rows, depth, to);
      turn(to, 2 * steps);
    } else {
      const uint16_t *from = a + (first + i) * g->lda + k;
      tiles_along(from, g->lda, rows, depth, to);
      tiles_along(from + SIDE * g->lda, g->lda, rows - SIDE, depth, to + panel);
    }
  }
}

/* A pair of panels of `count` <= PAIRS columns of op(B), from column `first` on. */
static void pack_b(const pg_gemm *g, const uint16_t *b, int64_t first, int64_t count, int64_t k,
                   int64_t depth, uint32_t *to) {
  if (!g->transpose_b) {
    pack_columns(b + k * g->ldb + first, g->ldb, count, depth, to);
    return;
  }
  const int64_t panel = (depth + PAIRS - 1) / PAIRS * TILE, filled = (depth + 1) / 2 * SIDE;
  for (int64_t j = 0; j < PAIRS; j += SIDE, to += panel) {
    const int64_t kept = count > j ? filled : 0;
    if (kept)
      pack_along(b + (first + j) * g->ldb + k, g->ldb, pg_min64(SIDE, count - j), depth, to);
    memset(to + kept, 0, (size_t)(panel - kept) * sizeof *to);
  }
}

/* ---- results ---------------------------------------------------------------------------- */
/* A part of C that waits to be stored: alpha times 2 x 2 tiles of sums, plus beta times the same
 * part of D unless beta = 0. */
typedef struct result {
  const float *sums;
  int64_t row, rows, column, columns, done; /* rows stored so far */
  float alpha, beta;
  part from, to;
  bool stream; /* whole lines, past the caches */
} result;

/* Fetch what will be written. */
static inline void expect(const result *r) {
  const int64_t size = r->to.narrow ? 2 : 4;
  for (int64_t i = 0; i < r->rows; i++) {
    const char *at = (const char *)r->to.at + ((r->row + i) * r->to.ld + r->column) * size;
    __builtin_prefetch(at, 1);
    __builtin_prefetch(at + 63, 1); /* rows need not begin with a line */
    if (!r->to.narrow) __builtin_prefetch(at + 127, 1);
  }
}

/* Store the next `count` rows. */
DOT static inline void store_rows(result *r, int64_t count) {
  const __m512 scale = _mm512_set1_ps(r->alpha), share = _mm512_set1_ps(r->beta);
  const __mmask32 mask = (__mmask32)(0xffffffffu >> (PAIRS - r->columns));
  const __mmask16 low = (__mmask16)mask, high = (__mmask16)(mask >> SIDE);
  for (const int64_t end = pg_min64(r->rows, r->done + count); r->done < end; r->done++) {
    const float *sum = r->sums + r->done / SIDE * 2 * TILE + r->done % SIDE * SIDE;
    const int64_t row = r->row + r->done, at = row * r->to.ld + r->column;
    __m512 left = _mm512_mul_ps(_mm512_load_ps(sum), scale);
    __m512 right = _mm512_mul_ps(_mm512_load_ps(sum + TILE), scale);
    if (r->beta != 0) {
      left = _mm512_fmadd_ps(load(r->from, row, r->column, low), share, left);
      right = _mm512_fmadd_ps(load(r->from, row, r->column + SIDE, high), share, right);
    }
    if (r->to.narrow) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(right, left);
      _mm512_mask_storeu_epi16((uint16_t *)r->to.at + at, mask, both);
    } else if (r->stream) {
      _mm512_stream_ps((float *)r->to.at + at, left);
      _mm512_stream_ps((float *)r->to.at + at + SIDE, right);
    } else {
      _mm512_mask_storeu_ps((float *)r->to.at + at, low, left);
      _mm512_mask_storeu_ps((float *)r->to.at + at + SIDE, high, right);
    }
  }
}

/* ---- products --------------------------------------------------------------------------- */
/* 2 x 2 tiles of sums: two panels of A times two of B over `steps` tiles; on top of what is in
 * `sums`, or of 0. Meanwhile the vector unit stores the result before, if any. */
static void multiply(const uint32_t *a, const uint32_t *b, int64_t steps, bool more, float *sums,
                     result *before) {
  const uint32_t *a2 = a + steps * TILE, *b2 = b + steps * TILE;
  const int64_t share = steps ? (before->rows + steps - 1) / steps : before->rows;
  if (more) {
    PG_TILE_LOAD(0, sums, 64);
    PG_TILE_LOAD(1, sums + TILE, 64);
    PG_TILE_LOAD(2, sums + 2 * TILE, 64);
    PG_TILE_LOAD(3, sums + 3 * TILE, 64);
  } else {
    PG_TILE_CLEAR(0);
    PG_TILE_CLEAR(1);
    PG_TILE_CLEAR(2);
    PG_TILE_CLEAR(3);
  }
  for (int64_t s = 0; s < steps * TILE; s += TILE) {
    PG_TILE_LOAD(6, b + s, 64);
    PG_TILE_LOAD(4, a + s, 64);
    PG_TILE_MULTIPLY(0, 4, 6);
    PG_TILE_LOAD(7, b2 + s, 64);
    PG_TILE_MULTIPLY(1, 4, 7);
    PG_TILE_LOAD(5, a2 + s, 64);
    PG_TILE_MULTIPLY(2, 5, 6);
    PG_TILE_MULTIPLY(3, 5, 7);
    store_rows(before, share);
  }
  store_rows(before, share);
  PG_TILE_STORE(0, sums, 64);
  PG_TILE_STORE(1, sums + TILE, 64);
  PG_TILE_STORE(2, sums + 2 * TILE, 64);
  PG_TILE_STORE(3, sums + 3 * TILE, 64);
}

static int64_t depth_of(const pg_gemm *g) {
  return g->k <= WHOLE ? WHOLE : DEPTH;
}

/* Rows [i, i + rows) and columns [j, j + columns) of C, whose corner `c` and `d` are. The panels of
 * A are there already where `packed`. */
static void block(const pg_gemm *g, const uint16_t *a, const uint16_t *b, part c, part d, int64_t i,
                  int64_t rows, int64_t j, int64_t columns, bool packed, float *work) {
  uint32_t *left = (uint32_t *)work, *right = left + PACKED_A;
  float *sums = work + PACKED_A + PACKED_B;
  const int64_t slice = depth_of(g);
  const bool slices = g->k > slice;
  /* A large C is not read again before it has left the caches. */
  const bool stream = (double)g->m * (double)g->n > STREAMED && g->beta == 0 && !c.narrow &&
                      c.ld % SIDE == 0 && (uintptr_t)c.at % 64 == 0;
  result before = {.columns = PAIRS}; /* no rows */
  int64_t k = 0;
  do {
    const int64_t depth = pg_min64(slice, g->k - k), steps = (depth + PAIRS - 1) / PAIRS;
    const bool last = k + depth >= g->k;
    float *to = sums;
    if (!packed) pack_a(g, a, i, rows, k, depth, left);
    for (int64_t y = 0; y < columns; y += PAIRS)
      pack_b(g, b, j + y, pg_min64(PAIRS, columns - y), k, depth, right + y / SIDE * steps * TILE);
    for (int64_t x = 0; x < rows; x += PAIRS)
      for (int64_t y = 0; y < columns; y += PAIRS) {
        const int64_t high = pg_min64(PAIRS, rows - x), wide = pg_min64(PAIRS, columns - y);
        result now = {to, x, high, y, wide, 0, g->alpha, g->beta, d, c, stream && wide == PAIRS};
        if (last && !now.stream) expect(&now);
        multiply(left + x / SIDE * steps * TILE, right + y / SIDE * steps * TILE, steps, k > 0, to,
                 &before);
        if (last) before = now;
        /* Without slices two places take turns. */
        to += slices || to == sums ? 4 * TILE : -4 * TILE;
      }
    k += slice;
  } while (k < g->k);
  store_rows(&before, PAIRS);
}

void PG_CPU(gemm_dot)(const pg_gemm *g, int64_t entry, int64_t i0, int64_t i1, int64_t j0,
                      int64_t j1, float *work) {
  const uint16_t *a = (const uint16_t *)g->a + entry * g->stride_a;
  const uint16_t *b = (const uint16_t *)g->b + entry * g->stride_b;
  tiles_begin();
  for (int64_t i = i0; i < i1; i += ROWS)
    for (int64_t j = j0; j < j1; j += COLUMNS) {
      const int64_t at = entry * g->stride_c + i * g->ldc + j;
      block(g, a, b, part_at(g->c, g->type_c, g->ldc, at),
            part_at(g->addend ? g->addend : g->c, g->type_c, g->ldc, at), i, pg_min64(ROWS, i1 - i),
            j, pg_min64(COLUMNS, j1 - j), g->k <= depth_of(g) && j > j0, work);
    }
  tiles_end();
  _mm_sfence(); /* streamed rows are there for other threads */
}

float PG_CPU(dot_rounds)(float start) {
  _Alignas(64) uint32_t half[TILE];
  _Alignas(64) float sums[TILE];
  for (int i = 0; i < TILE; i++) half[i] = 0x3c003c00, sums[i] = start + (float)i; /* 2^-7 */
  tiles_begin();
  PG_TILE_LOAD(0, sums, 64);
  PG_TILE_LOAD(1, sums, 64);
  PG_TILE_LOAD(2, sums, 64);
  PG_TILE_LOAD(3, sums, 64);
  PG_TILE_LOAD(4, half, 64);
  PG_TILE_LOAD(5, half, 64);
  for (int r = 0; r < PG_DOT_ROUNDS; r++) {
    PG_TILE_MULTIPLY(0, 4, 5);
    PG_TILE_MULTIPLY(1, 4, 5);
    PG_TILE_MULTIPLY(2, 4, 5);
    PG_TILE_MULTIPLY(3, 4, 5);
  }
  PG_TILE_STORE(3, sums, 64);
  tiles_end();
  return sums[0];
}
#endif
