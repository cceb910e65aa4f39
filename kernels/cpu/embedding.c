/* Rows of a table by token, and the gradient of the table. */
#include "cpu.h"
#include <omp.h>

/* out[i,:] = weight[tokens[i],:]; tokens [n], weight [V,d], out [n,d]. */
int PG_CPU(embedding_forward)(pg_queue *q, const int32_t *tokens, int64_t n, const float *weight,
                              int64_t d, float *out) {
#pragma omp parallel for num_threads(pg_team(q, n *d)) schedule(static)
  for (int64_t i = 0; i < n; i++) {
    const float *from = weight + (int64_t)tokens[i] * d;
    float *to = out + i * d;
#pragma omp simd
    for (int64_t j = 0; j < d; j++) to[j] = from[j];
  }
  return 0;
}

/* dweight[tokens[i],:] += dout[i,:]. Every thread reads all tokens and adds those that are its own
 * (token modulo threads), so that each row is summed in increasing i whatever the thread count;
 * n comparisons cost far less than the n*d additions. */
int PG_CPU(embedding_backward)(pg_queue *q, const int32_t *tokens, int64_t n, const float *dout,
                               int64_t d, int64_t vocab, float *dweight) {
  (void)vocab;
#pragma omp parallel num_threads(pg_team(q, n *d))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    pg_float_mode mode = pg_float_mode_set(true);
    for (int64_t i = 0; i < n; i++) {
      if (tokens[i] % parts != t) continue;
      const float *from = dout + i * d;
      float *to = dweight + (int64_t)tokens[i] * d;
#pragma omp simd
      for (int64_t j = 0; j < d; j++) to[j] += from[j];
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
