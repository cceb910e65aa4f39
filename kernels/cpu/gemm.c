/* Dense products on OpenBLAS, fp32.
 *
 * The product is divided here, not by OpenBLAS: C is cut into a grid of one block per thread and
 * every thread runs the single-threaded routine on its block. That is as fast as OpenBLAS's own
 * division or faster (it loses on tall, narrow products), keeps one team of threads, and makes the
 * result depend on the queue's thread count alone. */
#include "cpu.h"
#include <cblas.h>
#include <limits.h>

/* Multiply-adds below which one thread is faster. */
#define SMALL_PRODUCT (48 * 48 * 48)

static void block(const pg_gemm *g, int64_t entry, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  const float *a = (const float *)g->a + entry * g->stride_a + (g->transpose_a ? i0 : i0 * g->lda);
  const float *b = (const float *)g->b + entry * g->stride_b + (g->transpose_b ? j0 * g->ldb : j0);
  float *c = (float *)g->c + entry * g->stride_c + i0 * g->ldc + j0;
  if (i1 <= i0 || j1 <= j0) return;
  if (i1 - i0 == 1 && !g->transpose_a && g->transpose_b)
    cblas_sgemv(CblasRowMajor, CblasNoTrans, (int)(j1 - j0), (int)g->k, g->alpha, b, (int)g->ldb, a,
                1, g->beta, c, 1);
  else
    cblas_sgemm(CblasRowMajor, g->transpose_a ? CblasTrans : CblasNoTrans,
                g->transpose_b ? CblasTrans : CblasNoTrans, (int)(i1 - i0), (int)(j1 - j0),
                (int)g->k, g->alpha, a, (int)g->lda, b, (int)g->ldb, g->beta, c, (int)g->ldc);
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
  if (g->type_a != PG_F32 || g->type_b != PG_F32 || g->type_c != PG_F32)
    return pg_refuse(q, "CPU products are fp32 only");
  if (g->m > INT_MAX || g->n > INT_MAX || g->k > INT_MAX || g->lda > INT_MAX || g->ldb > INT_MAX ||
      g->ldc > INT_MAX)
    return pg_refuse(q, "a matrix side exceeds %d", INT_MAX);
  if (g->m <= 0 || g->n <= 0) return 0;
  double work = (double)g->m * (double)g->n * (double)pg_max64(g->k, 1);
  int threads = work * (double)batch < SMALL_PRODUCT ? 1 : q->threads;
  /* Whole products to each thread when there are enough of them. */
  int per_product = batch >= threads ? 1 : threads;
  int rows = grid_rows(g->m, g->n, per_product), columns = per_product / rows;
  int64_t blocks = batch * per_product;
#pragma omp parallel num_threads(threads)
  {
    pg_float_mode mode = pg_float_mode_set(true);
    pg_blas_on_this_thread();
#pragma omp for schedule(static)
    for (int64_t t = 0; t < blocks; t++) {
      int r = (int)(t % per_product) / columns, c = (int)(t % per_product) % columns;
      /* Multiples of 16 rows and columns keep the routine's register blocks whole. */
      int64_t mu = (g->m + 15) / 16, nu = (g->n + 15) / 16;
      block(g, t / per_product, pg_min64(g->m, mu * r / rows * 16),
            pg_min64(g->m, mu * (r + 1) / rows * 16), pg_min64(g->n, nu * c / columns * 16),
            pg_min64(g->n, nu * (c + 1) / columns * 16));
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
