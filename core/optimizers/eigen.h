/* Symmetric matrices on the host, for optimizers with second moments of a side: LAPACK in fp64, on
 * matrices that live on the device. Each call brings its matrix to the host and waits; at n = 512
 * that is about a tenth of a second on a core, at 4096 half a minute, so that optimizers do it
 * every few updates. */
#ifndef PG_OPTIMIZERS_EIGEN_H
#define PG_OPTIMIZERS_EIGEN_H

#include "compose.h"

/* out <- a function of a, both [n, n] on the device: Q f(w) Q^T for a = Q diag(w) Q^T, with
 *   f(w) = (max(w, floor max_i w_i) + shift mean_i w_i)^-power, and 0 everywhere where a is 0. */
int pg__inverse_power(pg_context *ctx, const float *a, int64_t n, double floor, double shift,
                      double power, float *out);
/* q <- eigenvectors of a as columns, by falling eigenvalue. */
int pg__eigenvectors(pg_context *ctx, const float *a, int64_t n, float *q);
/* One step of power iteration from the orthogonal q: its columns in falling order of q_j^T a q_j,
 * then the orthogonal factor of a q. order[j]: the column that is j-th now, as a matrix for
 * products from the right, `permutation` [n, n]. */
int pg__power_step(pg_context *ctx, const float *a, int64_t n, float *q, float *permutation);

/* Matrices for the sides of a group's matrices: left [rows, rows], right [columns, columns]; NULL
 * for a side of more than PG_FACTOR_LIMIT, and left also with one_sided. */
typedef struct pg_sides {
  float *left, *right;
} pg_sides;
/* Those in the slots `left` and `right` of matrix i. */
pg_sides pg__sides(const pg_increment_group *group, size_t i, bool one_sided, int left, int right);
/* Second moments of G by side: left <- beta left + (1-beta) G G^T, right likewise with G^T G. */
int pg__side_moments(const pg_increment_group *group, size_t i, pg_sides moments, double beta);
/* *x <- left *x right, each transposed or not; *x and *y, [rows, columns], may change places. */
int pg__between_sides(const pg_increment_group *group, pg_sides by, bool left_transposed,
                      bool right_transposed, float **x, float **y);

#endif
