/* Codes of rows: signs from counter-based random bits, 128 to a draw. */
#include "../philox.h"
#include "cpu.h"

int PG_CPU(signs)(pg_queue *q, uint64_t seed, uint64_t stream, int64_t first, int64_t rows,
                  int64_t columns, float *out) {
  const int64_t draws = (columns + 127) / 128;
#pragma omp parallel for num_threads(pg_team(q, rows *columns)) schedule(static)
  for (int64_t i = 0; i < rows; i++)
    for (int64_t k = 0; k < draws; k++) {
      float *x = out + i * columns + 128 * k;
      const int64_t n = pg_min64(columns - 128 * k, 128);
      uint32_t words[4];
      pg_philox_words(seed, stream, (uint64_t)((first + i) * draws + k), words);
      for (int64_t j = 0; j < n; j++) x[j] = words[j / 32] >> j % 32 & 1 ? -1.0f : 1.0f;
    }
  return 0;
}
