/* RowNorm: the momentum and its row norms in one pass over g and b, the steps in a second one over
 * the row that the first left in the cache: 20 bytes per weight, 2 more with a copy and 4 more
 * where the increment is kept.
 *
 * The operations and their order are those of the optimizer written over tensors,
 *   m:lerp_(g, 1 - beta);  m:div_rows(m:row_norms() + offset):mul(-lr),
 * so that both give the same bits. */
#include "target.h"
#include "vector.h"

static void lerp_row(float keep, float take, const float *g, int64_t n, float *b) {
#pragma omp simd
  for (int64_t j = 0; j < n; j++) b[j] = keep * b[j] + take * g[j];
}

static void steps(float norm, float step, const float *b, int64_t n, float *s) {
#pragma omp simd
  for (int64_t j = 0; j < n; j++) s[j] = b[j] / norm * step;
}

int PG_CPU(rownorm)(pg_queue *q, const pg_rownorm *h, const float *g, int64_t rows, int64_t columns,
                    float *b, const pg_target *to) {
  const double take = 1 - h->beta;
  const float offset = (float)h->offset, step = (float)-h->lr;
#pragma omp parallel num_threads(pg_team(q, rows *columns * 3))
  {
    float scratch[PG_RUN];
    pg_float_mode mode = pg_float_mode_set(true);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
      const int64_t at = i * columns;
      if (g)
        lerp_row((float)(1 - take), (float)take, g + at, columns, b + at);
      else
        pg_float_mode_set(
            false); /* like the reduction, the norm of what is given counts denormals */
      double squares = pg_sum_run(b + at, 1, columns, true);
      pg_float_mode_set(true);
      float norm = (float)sqrt(squares) + offset;
      for (int64_t j = 0; j < columns; j += PG_RUN) {
        int64_t run = pg_min64(columns - j, PG_RUN);
        float *s = pg_target_run(to, at + j, scratch);
        steps(norm, step, b + at + j, run, s);
        pg_target_apply(to, at + j, run, s);
      }
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
