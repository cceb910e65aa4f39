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

#endif
