/* Subtracting the mean row. */
#include "cpu.h"
#include <stdlib.h>

#define MAX_BLOCKS 64
#define MIN_ROWS 64

/* mean[j] = mean_i (x_ij - reference_j) in fp64 (reference NULL: 0). Rows are cut into at most
 * MAX_BLOCKS blocks by their number alone and the blocks' sums added in order, so the result does
 * not depend on the thread count. */
int PG_CPU(column_means)(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                         const float *reference, double *mean) {
  int64_t size = pg_max64(MIN_ROWS, (rows + MAX_BLOCKS - 1) / MAX_BLOCKS);
  int64_t blocks = (rows + size - 1) / size;
  double *sums = calloc((size_t)(blocks * columns) + 1, sizeof *sums);
  if (!sums) return pg_refuse(q, "no memory for the sums of %lld columns", (long long)columns);
#pragma omp parallel for num_threads(pg_team(q, rows *columns)) schedule(dynamic)
  for (int64_t b = 0; b < blocks; b++) {
    double *sum = sums + b * columns;
    for (int64_t i = b * size; i < pg_min64(rows, (b + 1) * size); i++) {
      const float *row = x + i * columns;
      if (reference) {
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) sum[j] += (double)row[j] - (double)reference[j];
      } else {
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) sum[j] += (double)row[j];
      }
    }
  }
  for (int64_t j = 0; j < columns; j++) {
    double total = 0;
    for (int64_t b = 0; b < blocks; b++) total += sums[b * columns + j];
    mean[j] = total / (double)rows;
  }
  free(sums);
  return 0;
}

/* y = x - mean row, the difference taken in fp64 and rounded once; x, y [rows, columns], y may be
 * x. */
int PG_CPU(center_rows)(pg_queue *q, const float *x, int64_t rows, int64_t columns, float *y) {
  double *mean = malloc((size_t)columns * sizeof *mean + 1);
  if (!mean) return pg_refuse(q, "no memory for a mean row of %lld columns", (long long)columns);
  int status = PG_CPU(column_means)(q, x, rows, columns, NULL, mean);
  if (status == 0) {
#pragma omp parallel for num_threads(pg_team(q, rows *columns)) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
#pragma omp simd
      for (int64_t j = 0; j < columns; j++)
        y[i * columns + j] = (float)((double)x[i * columns + j] - mean[j]);
    }
  }
  free(mean);
  return status;
}
