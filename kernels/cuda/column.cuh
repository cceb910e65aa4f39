/* Sums over the rows of a matrix, column by column, shared by reduce.cu, center_rows.cu and
 * diameter.cu: rows are cut into at most 64 blocks by their number alone, added in order inside a
 * block, and the blocks in order. The CPU kernels add in the same order, so the sums are the same
 * bits. */
#ifndef PG_CUDA_COLUMN_CUH
#define PG_CUDA_COLUMN_CUH

#include "cuda.cuh"

static inline int64_t pg_column_block_rows(int64_t rows) {
  const int64_t size = pg_blocks(rows, 64);
  return size < 64 ? 64 : size;
}

/* (*mean)[j] = mean_i (x_ij - reference_j) in fp64 (reference NULL: 0), in the queue's scratch:
 * center_rows.cu. */
int pg_cuda_column_means(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                         const float *reference, double **mean);

#endif
