/* Codes of rows: signs from counter-based random bits. A thread takes 32 columns, a word of a draw;
 * the three others of the draw are made again by its neighbours. */
#include "../philox.h"
#include "cuda.cuh"

static __global__ void signs(uint64_t seed, uint64_t stream, int64_t first, int64_t rows,
                             int64_t columns, float *out) {
  const int64_t parts = (columns + 31) / 32, draws = (columns + 127) / 128;
  for (PG_STRIDE(part, rows * parts)) {
    const int64_t i = part / parts, from = part % parts * 32;
    uint32_t words[4];
    pg_philox_words(seed, stream, (uint64_t)((first + i) * draws + from / 128), words);
    const uint32_t word = words[from / 32 % 4];
    for (int64_t j = from; j < columns && j < from + 32; j++)
      out[i * columns + j] = word >> (j - from) & 1 ? -1.0f : 1.0f;
  }
}

int pg_cuda_signs(pg_queue *q, uint64_t seed, uint64_t stream, int64_t first, int64_t rows,
                  int64_t columns, float *out) {
  const int64_t parts = rows * pg_blocks(columns, 32);
  if (parts == 0) return 0;
  PG_CUDA_LAUNCH(q, signs, pg_stride_grid(q, parts), dim3(PG_CUDA_BLOCK), 0, seed, stream, first,
                 rows, columns, out);
  return 0;
}
