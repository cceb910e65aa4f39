/* Dense products on OpenBLAS, fp32; operands in bf16 are widened tile by tile where the CPU does
 * not multiply them itself (gemm_dot.c).
 *
 * The product is divided here, not by OpenBLAS: C is cut into a grid of one block per thread and
 * every thread runs the single-threaded routine on its block. That is as fast as OpenBLAS's own
 * division or faster (it loses on tall, narrow products), keeps one team of threads, and makes the
 * result depend on the queue's thread count alone. */
#include "bf16.h"
#include "gemm_dot.h"
#include <cblas.h>
#include <limits.h>
#include <string.h>

/* Multiply-adds below which one thread is faster. */
#define SMALL_PRODUCT (48 * 48 * 48)

/* Sides of the tiles of bf16 operands: every element widened serves TILE multiply-adds. */
#define TILE 384
#define TILE_FLOATS ((int64_t)3 * TILE * TILE)

int64_t PG_CPU(gemm_scratch)(pg_dtype type) {
  if (type == PG_F32) return 0;
  return PG_CPU(gemm_dots)() ? PG_CPU(gemm_dot_scratch)() : TILE_FLOATS;
}

/* What C becomes the sum of: its type's element `at` of D. */
static const void *addend(const pg_gemm *g, int64_t at) {
  return (const char *)(g->addend ? g->addend : g->c) + (size_t)at * pg_type_size(g->type_c);
}
/* OpenBLAS adds to what is in C: rows of fp32 from D, where D is somewhere else. */
static void take_addend(const pg_gemm *g, int64_t at, int64_t rows, int64_t columns) {
  float *c = (float *)g->c + at;
  const float *d = addend(g, at);
  for (int64_t r = 0; c != d && g->beta != 0 && r < rows; r++)
    memcpy(c + r * g->ldc, d + r * g->ldc, (size_t)columns * sizeof *c);
}

static void block(const pg_gemm *g, int64_t entry, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  const float *a = (const float *)g->a + entry * g->stride_a + (g->transpose_a ? i0 : i0 * g->lda);
  const float *b = (const float *)g->b + entry * g->stride_b + (g->transpose_b ? j0 * g->ldb : j0);
  float *c = (float *)g->c + entry * g->stride_c + i0 * g->ldc + j0;
  if (i1 <= i0 || j1 <= j0) return;
  take_addend(g, entry * g->stride_c + i0 * g->ldc + j0, i1 - i0, j1 - j0);
  if (i1 - i0 == 1 && !g->transpose_a && g->transpose_b)
    cblas_sgemv(CblasRowMajor, CblasNoTrans, (int)(j1 - j0), (int)g->k, g->alpha, b, (int)g->ldb, a,
                1, g->beta, c, 1);
  else
    cblas_sgemm(CblasRowMajor, g->transpose_a ? CblasTrans : CblasNoTrans,
                g->transpose_b ? CblasTrans : CblasNoTrans, (int)(i1 - i0), (int)(j1 - j0),
                (int)g->k, g->alpha, a, (int)g->lda, b, (int)g->ldb, g->beta, c, (int)g->ldc);
}

/* Side of the blocks in which a half is mirrored: two of them fit the first-level cache. */
#define MIRROR 32

/* A whole symmetric product in fp32: the half below the diagonal, and its mirror image. */
static void half(const pg_gemm *g, int64_t entry) {
  const float *a = (const float *)g->a + entry * g->stride_a;
  const float *d = addend(g, entry * g->stride_c);
  float *c = (float *)g->c + entry * g->stride_c;
  const int64_t n = g->n;
  for (int64_t i = 0; i < n; i++) {
    float *row = c + i * g->ldc;
    if (g->beta == 0)
      memset(row, 0, (size_t)(i + 1) * sizeof *c); /* whatever a library makes of 0 times NaN */
    else if (c != d)
      memcpy(row, d + i * g->ldc, (size_t)(i + 1) * sizeof *c);
  }
  cblas_ssyrk(CblasRowMajor, CblasLower, g->transpose_a ? CblasTrans : CblasNoTrans, (int)n,
              (int)g->k, g->alpha, a, (int)g->lda, g->beta, c, (int)g->ldc);
  for (int64_t i = 0; i < n; i += MIRROR)
    for (int64_t j = 0; j <= i; j += MIRROR)
      for (int64_t x = i; x < pg_min64(n, i + MIRROR); x++)
        for (int64_t y = j; y < pg_min64(x, j + MIRROR); y++) c[y * g->ldc + x] = c[x * g->ldc + y];
}

/* Rows [i0, i1) and columns [j0, j1) of an operand, stored transposed or not, as fp32 in the order
 * of the store. Returns the leading dimension, the number of elements in a stored row. */
static int64_t widen_tile(const uint16_t *x, bool transposed, int64_t ld, int64_t i0, int64_t i1,
                          int64_t j0, int64_t j1, float *to) {
  int64_t first = transposed ? j0 : i0, last = transposed ? j1 : i1;
  int64_t from = transposed ? i0 : j0, count = (transposed ? i1 : j1) - from;
  for (int64_t r = first; r < last; r++)
    pg_widen(x + r * ld + from, count, to + (r - first) * count);
  return count;
}

/* The block of a product of bf16 operands, from tiles in work[TILE_FLOATS]. C in bf16 is rounded
 * once: its tile is complete in fp32 before it is stored. */
static void block_bf16(const pg_gemm *g, int64_t entry, int64_t i0, int64_t i1, int64_t j0,
                       int64_t j1, float *work) {
  const uint16_t *a = (const uint16_t *)g->a + entry * g->stride_a;
  const uint16_t *b = (const uint16_t *)g->b + entry * g->stride_b;
  float *wide_a = work, *wide_b = work + TILE * TILE, *wide_c = work + 2 * TILE * TILE;
  for (int64_t i = i0; i < i1; i += TILE)
    for (int64_t j = j0; j < j1; j += TILE) {
      int64_t rows = pg_min64(TILE, i1 - i), columns = pg_min64(TILE, j1 - j), k = 0;
      int64_t at = entry * g->stride_c + i * g->ldc + j;
      bool rounded = g->type_c == PG_BF16;
      float *c = rounded ? wide_c : (float *)g->c + at;
      int64_t ldc = rounded ? columns : g->ldc;
      if (rounded && g->beta != 0)
        for (int64_t r = 0; r < rows; r++)
          pg_widen((const uint16_t *)addend(g, at) + r * g->ldc, columns, c + r * ldc);
      if (!rounded) take_addend(g, at, rows, columns);
      do {
        int64_t depth = pg_min64(TILE, g->k - k);
        int64_t lda = widen_tile(a, g->transpose_a, g->lda, i, i + rows, k, k + depth, wide_a);
        int64_t ldb = widen_tile(b, g->transpose_b, g->ldb, k, k + depth, j, j + columns, wide_b);
        cblas_sgemm(CblasRowMajor, g->transpose_a ? CblasTrans : CblasNoTrans,
                    g->transpose_b ? CblasTrans : CblasNoTrans, (int)rows, (int)columns, (int)depth,
                    g->alpha, wide_a, (int)pg_max64(lda, 1), wide_b, (int)pg_max64(ldb, 1),
                    k ? 1 : g->beta, c, (int)ldc);
        k += TILE;
      } while (k < g->k);
      for (int64_t r = 0; rounded && r < rows; r++)
        pg_narrow(c + r * ldc, columns, (uint16_t *)g->c + at + r * g->ldc);
    }
}

/* Rows of the grid of `threads` blocks that packs least: every block packs its rows of op(A) and
 * its columns of op(B). */
static int grid_rows(int64_t m, int64_t n, int threads) {
  int best = 1;
  double best_cost = -1;
  for (int r = 1; r <= threads; r++) {
    if (threads % r) continue;
    double cost = (double)m * (threads / r) + (double)n * r;
    if (best_cost < 0 || cost < best_cost) best = r, best_cost = cost;
  }
  return best;
}

int PG_CPU(gemm)(pg_queue *q, const pg_gemm *g) {
  int64_t batch = pg_max64(g->batch, 1);
  bool narrow = g->type_a == PG_BF16;
  if (g->type_a != g->type_b || (!narrow && g->type_a != PG_F32) ||
      (g->type_c != PG_F32 && !(narrow && g->type_c == PG_BF16)))
    return pg_refuse(q, "operands are F32 with an F32 result, or both BF16");
  if (g->m > INT_MAX || g->n > INT_MAX || g->k > INT_MAX || g->lda > INT_MAX || g->ldb > INT_MAX ||
      g->ldc > INT_MAX)
    return pg_refuse(q, "a matrix side exceeds %d", INT_MAX);
  if (g->m <= 0 || g->n <= 0) return 0;
  const bool dots = narrow && PG_CPU(gemm_dots)();
  const int64_t floats = PG_CPU(gemm_scratch)(g->type_a);
  if (floats && PG_CPU(scratch)(q, floats) < 0) return -1;
  double work = (double)g->m * (double)g->n * (double)pg_max64(g->k, 1);
  int threads = work * (double)batch < SMALL_PRODUCT ? 1 : q->threads;
  /* Whole products to each thread when there are enough of them. */
  int per_product = batch >= threads ? 1 : threads;
  int rows = grid_rows(g->m, g->n, per_product), columns = per_product / rows;
  const bool halves = g->symmetric && !narrow && per_product == 1;
  int64_t blocks = batch * per_product;
#pragma omp parallel num_threads(threads)
  {
    pg_float_mode mode = pg_float_mode_set(true);
    float *work = floats ? pg_scratch_of(q, floats, omp_get_thread_num()) : NULL;
    pg_blas_on_this_thread();
#pragma omp for schedule(static)
    for (int64_t t = 0; t < blocks; t++) {
      if (halves) {
        half(g, t);
        continue;
      }
      int r = (int)(t % per_product) / columns, c = (int)(t % per_product) % columns;
      /* Multiples of 16 rows and columns keep the routine's register blocks whole. */
      int64_t mu = (g->m + 15) / 16, nu = (g->n + 15) / 16;
      int64_t i0 = pg_min64(g->m, mu * r / rows * 16), j0 = pg_min64(g->n, nu * c / columns * 16);
      int64_t i1 = pg_min64(g->m, mu * (r + 1) / rows * 16);
      int64_t j1 = pg_min64(g->n, nu * (c + 1) / columns * 16);
      if (dots)
        PG_CPU(gemm_dot)(g, t / per_product, i0, i1, j0, j1, work);
      else if (narrow)
        block_bf16(g, t / per_product, i0, i1, j0, j1, work);
      else
        block(g, t / per_product, i0, i1, j0, j1);
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
