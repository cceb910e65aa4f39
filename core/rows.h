/* A matrix as a cloud of points, its rows: how near two of them come, the smallest ball around all,
 * and the spectrum. Every matrix is fp32 with two dimensions, on any device, and is only read.
 * What is not finite is PG_ENONFINITE with the place. The diameter is in geometry.h. */
#ifndef PG_ROWS_H
#define PG_ROWS_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* min_{i<j} ||x_i - x_j||, exactly: evaluated in fp64, the smallest pair of several; and the
 * diameter of the same rows. The cost is that of both. */
typedef struct pg_separation {
  double value, diameter;
  int64_t first, second; /* 0-based rows, first < second */
  double multiply_adds, seconds;
} pg_separation;
/* Among all rows, or the `count` rows listed (0-based, each once; NULL: all); two at least. */
int pg_rows_separation(const pg_tensor *matrix, const int64_t *rows, int64_t count,
                       pg_separation *out);

/* The radius R of the smallest ball that holds all rows. Every ball around a `centre` that holds
 * them gives R <= upper = max_i ||x_i - c||; weights w_i >= 0 on some rows, of sum 1, give
 * R >= lower = sqrt(sum_i w_i ||x_i - sum_j w_j x_j||^2). Both are rounded outwards. */
typedef struct pg_ball {
  double lower, upper;
  double *centre;  /* [columns] */
  int64_t *rows;   /* [count], 0-based, of weight > 0 */
  double *weights; /* [count] */
  int64_t count;
  int64_t passes; /* over all rows */
  double seconds;
} pg_ball;
/* Until (upper - lower) / upper <= gap, 0 < gap < 1, or nothing improves. Polls cancellation. */
int pg_rows_ball(const pg_tensor *matrix, double gap, pg_ball *out);
void pg_ball_free(pg_ball *ball); /* its arrays */

/* All min(rows, columns) singular values, decreasing: square roots of the eigenvalues of the
 * smaller Gram matrix, in fp64 (LAPACK). An eigenvalue is off by some 1e-15 of the largest one, so
 * a singular value below 1e-7 of the largest is 0 within that. The caller frees *values. */
int pg_rows_spectrum(const pg_tensor *matrix, double **values, int64_t *count);

#ifdef __cplusplus
}
#endif
#endif
