/* The oracle's first-order start. Of the scalar dual
 *   T(G) = min_{t >= 0} 1/2 [tr(G^T L_t^+ G) + sum t_e]
 * the stationary points have ||phi_i - phi_j|| = 1 wherever t_ij > 0, phi = L_t^+ G: weights of
 * pairs farther apart than 1 grow, the others shrink,
 *   t_ij <- t_ij ||phi_i - phi_j||^(3/2).
 * Exponent 2 is the majorisation's own and may cycle with period two (G = (10,0), (-9,1), (-1,-1));
 * both bounds are valid at every step. */
#include "oracle_internal.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Rows that have one farther away than 1 are drawn to the mean: y. far[i] is that distance. */
static void draw_in(const double *x, const double *d2, int64_t n, int64_t d, double *mean,
                    double *y) {
  memset(mean, 0, (size_t)d * sizeof *mean);
  for (int64_t i = 0; i < n; i++)
    for (int64_t k = 0; k < d; k++) mean[k] += x[i * d + k] / (double)n;
  for (int64_t i = 0; i < n; i++) {
    double far = 0;
    for (int64_t j = 0; j < n; j++) far = fmax(far, d2[i * n + j]);
    const double scale = far > 1 ? 1 / sqrt(far) : 1;
    for (int64_t k = 0; k < d; k++) y[i * d + k] = mean[k] + (x[i * d + k] - mean[k]) * scale;
  }
}

int pg__oracle_warm(pg__oracle *p, double *t, double *x, int rounds, double gap) {
  const int64_t n = p->n, d = p->d;
  double *factor = NULL, *d2 = NULL, *y = NULL, *mean = NULL;
  int status = 0;
  PG__NEW(p->ctx, factor, n * n, "a Laplacian");
  PG__NEW(p->ctx, d2, n * n, "distances");
  PG__NEW(p->ctx, y, n * d, "a potential");
  PG__NEW(p->ctx, mean, d, "a mean row");
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < n; j++) t[i * n + j] = i == j ? 0 : p->norm[i] * p->norm[j] / p->total;
  /* RowNorm itself, so that the answer is never worse. */
  for (int64_t i = 0; i < n; i++)
    for (int64_t k = 0; k < d; k++) y[i * d + k] = p->g[i * d + k] / p->norm[i];
  PG_TRY(pg__oracle_offer_potential(p, y, d2));
  for (int round = 0; round < rounds; round++) {
    if (pg_context_cancelled(p->ctx))
      PG_TRY(pg_fail(p->ctx, PG_ECANCELED, "the oracle was cancelled"));
    if (pg__laplacian_solve(t, p->g, n, d, factor, x) < 0) break;
    p->iterations++;
    pg__oracle_distances(x, n, d, d2);
    if (round % 16 == 15 || round + 1 == rounds || round == 0) {
      PG_TRY(pg__oracle_offer_flow(p, t, x));
      memcpy(y, x, (size_t)(n * d) * sizeof *y);
      memcpy(factor, d2, (size_t)(n * n) * sizeof *factor);
      for (int k = 0; k < 3; k++) {
        draw_in(y, factor, n, d, mean, y);
        PG_TRY(pg__oracle_offer_potential(p, y, factor));
        if (k < 2) pg__oracle_distances(y, n, d, factor);
      }
      if (pg__oracle_done(p) || pg__oracle_gap(p) <= gap || round + 1 == rounds) break;
    }
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = 0; j < n; j++) {
        const double e = sqrt(d2[i * n + j]);
        const double floor = 1e-12 * p->norm[i] * p->norm[j] / p->total;
        if (i != j) t[i * n + j] = fmax(t[i * n + j] * e * sqrt(e), floor);
      }
  }
fail:
  free(factor);
  free(d2);
  free(y);
  free(mean);
  return status;
}
