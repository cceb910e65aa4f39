/* Rows of a table by token, and the gradient of the table. */
#include "bf16.h"
#include <omp.h>

/* out[i,:] = weight[tokens[i],:]; tokens [n], weight [V,d], out [n,d]. */
int PG_CPU(embedding_forward)(pg_queue *q, pg_dtype type, const int32_t *tokens, int64_t n,
                              const void *weight, int64_t d, void *out) {
  size_t bytes = (size_t)d * pg_type_size(type);
#pragma omp parallel for num_threads(pg_team(q, n *d)) schedule(static)
  for (int64_t i = 0; i < n; i++)
    memcpy((char *)out + (size_t)i * bytes, (const char *)weight + (size_t)tokens[i] * bytes,
           bytes);
  return 0;
}

/* dweight[tokens[i],:] += dout[i,:]. Every thread reads all tokens and adds those that are its own
 * (token modulo threads), so that each row is summed in increasing i whatever the thread count;
 * n comparisons cost far less than the n*d additions. */
int PG_CPU(embedding_backward)(pg_queue *q, pg_dtype type, const int32_t *tokens, int64_t n,
                               const void *dout, int64_t d, int64_t vocab, float *dweight) {
  (void)vocab;
#pragma omp parallel num_threads(pg_team(q, n *d))
  {
    int parts = omp_get_num_threads(), t = omp_get_thread_num();
    pg_float_mode mode = pg_float_mode_set(true);
    float scratch[PG_RUN];
    for (int64_t i = 0; i < n; i++) {
      if (tokens[i] % parts != t) continue;
      for (int64_t first = 0; first < d; first += PG_RUN) {
        int64_t count = pg_min64(PG_RUN, d - first);
        const float *from = pg_run_in(type, dout, i * d + first, count, scratch);
        float *to = dweight + (int64_t)tokens[i] * d + first;
#pragma omp simd
        for (int64_t j = 0; j < count; j++) to[j] += from[j];
      }
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}
