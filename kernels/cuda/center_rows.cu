/* Subtracting the mean row. */
#include "column.cuh"

static __global__ void sum_row_blocks(const float *x, int64_t rows, int64_t columns,
                                      const float *reference, int64_t size, double *sums) {
  const int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t begin = (int64_t)blockIdx.y * size, end = min(rows, begin + size);
  if (j >= columns) return;
  const double from = reference ? (double)reference[j] : 0.0;
  double sum = 0;
  for (int64_t i = begin; i < end; i++) sum += (double)x[i * columns + j] - from;
  sums[(int64_t)blockIdx.y * columns + j] = sum;
}

static __global__ void average_blocks(const double *sums, int64_t blocks, int64_t columns,
                                      int64_t rows, double *mean) {
  const int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= columns) return;
  double total = 0;
  for (int64_t b = 0; b < blocks; b++) total += sums[b * columns + j];
  mean[j] = total / (double)rows;
}

int pg_cuda_column_means(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                         const float *reference, double **mean) {
  const int64_t size = pg_column_block_rows(rows), blocks = pg_blocks(rows, size);
  const dim3 across((unsigned)pg_blocks(columns, PG_CUDA_BLOCK));
  void *scratch;
  if (pg_cuda_scratch(q, (size_t)((blocks + 1) * columns) * sizeof(double), &scratch) < 0)
    return -1;
  *mean = (double *)scratch;
  double *sums = *mean + columns;
  PG_CUDA_LAUNCH(q, sum_row_blocks, dim3(across.x, (unsigned)blocks), dim3(PG_CUDA_BLOCK), 0, x,
                 rows, columns, reference, size, sums);
  PG_CUDA_LAUNCH(q, average_blocks, across, dim3(PG_CUDA_BLOCK), 0, (const double *)sums, blocks,
                 columns, rows, *mean);
  return 0;
}

/* A block takes rows blockIdx.y, blockIdx.y + gridDim.y, ... of its columns. */
static __global__ void subtract_mean(const float *x, int64_t rows, int64_t columns,
                                     const double *mean, float *y) {
  const int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= columns) return;
  const double m = mean[j];
  for (int64_t i = blockIdx.y; i < rows; i += gridDim.y)
    y[i * columns + j] = (float)((double)x[i * columns + j] - m);
}

/* y = x - mean row, the difference taken in fp64 and rounded once; y may be x. */
int pg_cuda_center_rows(pg_queue *q, const float *x, int64_t rows, int64_t columns, float *y) {
  const unsigned across = (unsigned)pg_blocks(columns, PG_CUDA_BLOCK);
  const unsigned down = (unsigned)(rows < 1024 ? rows : 1024);
  double *mean;
  if (rows == 0 || columns == 0) return 0;
  if (pg_cuda_column_means(q, x, rows, columns, NULL, &mean) < 0) return -1;
  PG_CUDA_LAUNCH(q, subtract_mean, dim3(across, down), dim3(PG_CUDA_BLOCK), 0, x, rows, columns,
                 (const double *)mean, y);
  return 0;
}
