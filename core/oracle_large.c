/* The oracle where pairs of rows are too many to be held: bounds in a given time. */
#include "oracle_internal.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>

#define CLUSTERS 1500

/* upper = the flow's cost as in oracle_check.c + J sum_c ||R_c||: row i of cluster c is out of
 * balance by alpha_i R_c, R_c = g_c - sum_b t_cb (psi_c - psi_b). */
int pg__oracle_offer_clusters(pg__oracle *p, int64_t clusters, const int32_t *cluster,
                              const double *t, const double *psi) {
  const int64_t n = p->n, d = p->d, c = clusters;
  double *memory = NULL, *weights = NULL, *x = NULL, *towards = NULL, cost = 0, left = 0;
  float *keep_weights = NULL, *keep_x = NULL;
  int status = 0;
  PG__NEW(p->ctx, memory, c * (5 + d), "clusters");
  PG__NEW(p->ctx, weights, c * c, "a flow's weights");
  PG__NEW(p->ctx, x, c * d, "a flow's potential");
  PG__NEW(p->ctx, towards, c * d, "a flow's rows");
  double *mass = memory, *tension = mass + c, *squares = tension + c, *spread = squares + c;
  double *paid = spread + c, *sum = paid + c;
  for (int64_t k = 0; k < c * (5 + d); k++) memory[k] = 0;
  for (int64_t k = 0; k < c * c; k++) weights[k] = (float)t[k];
  for (int64_t k = 0; k < c * d; k++) x[k] = (float)psi[k];
  for (int64_t i = 0; i < n; i++) {
    mass[cluster[i]] += p->norm[i];
    squares[cluster[i]] += p->norm[i] * p->norm[i];
    cblas_daxpy((int)d, 1, p->g + i * d, 1, sum + cluster[i] * d, 1);
  }
  for (int64_t a = 0; a < c; a++)
    for (int64_t b = 0; b < c; b++) tension[a] += weights[a * c + b];
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)c, (int)d, (int)c, 1, weights, (int)c,
              x, (int)d, 0, towards, (int)d);
  for (int64_t a = 0; a < c; a++) {
    const double *g = sum + a * d, length = cblas_dnrm2((int)d, g, 1);
    double r = 0;
    spread[a] = fmax(0, mass[a] * mass[a] - length * length) / (tension[a] * tension[a]);
    squares[a] /= mass[a] * mass[a];
    for (int64_t k = 0; k < d; k++) {
      const double e = g[k] - (tension[a] * x[a * d + k] - towards[a * d + k]);
      r += e * e;
    }
    left += sqrt(r);
  }
#pragma omp parallel for schedule(dynamic, 16)
  for (int64_t a = 0; a < c; a++) {
    paid[a] = weights[a * c + a] * sqrt(spread[a] * fmax(0, 1 - squares[a]) / 2);
    for (int64_t b = 0; b < a; b++) {
      double square = spread[a] + spread[b];
      for (int64_t k = 0; k < d; k++) {
        const double e = x[a * d + k] - x[b * d + k];
        square += e * e;
      }
      paid[a] += weights[a * c + b] * sqrt(square);
    }
  }
  for (int64_t a = 0; a < c; a++) cost += paid[a];
  const double upper =
      (cost + p->jung * left) * (1 + PG__ORACLE_MARGIN * (double)(n + d)) + p->slack;
  if (isfinite(upper) && upper < p->upper) {
    PG__NEW(p->ctx, keep_weights, c * c, "the flow's weights");
    PG__NEW(p->ctx, keep_x, c * d, "the flow's potential");
    for (int64_t k = 0; k < c * c; k++) keep_weights[k] = (float)weights[k];
    for (int64_t k = 0; k < c * d; k++) keep_x[k] = (float)x[k];
    free(p->weights);
    free(p->centres);
    p->weights = keep_weights;
    p->centres = keep_x;
    keep_weights = keep_x = NULL;
    for (int64_t i = 0; i < n; i++) p->cluster[i] = cluster[i];
    p->clusters = c;
    p->upper = upper;
  }
fail:
  free(memory);
  free(weights);
  free(x);
  free(towards);
  free(keep_weights);
  free(keep_x);
  return status;
}

/* RowNorm: rows of norm 1/2 have a diameter of no more than 1, whatever it is. And all rows as one
 * cluster of self-tension t: y_ij = t alpha_i alpha_j (psi_i - psi_j) costs
 * sqrt((A^2 - sum ||g_i||^2) / 2), for any t. */
static int first_bounds(pg__oracle *p) {
  const int64_t n = p->n, d = p->d;
  double value = 0, *origin = NULL;
  int status = 0;
  for (int64_t i = 0; i < n; i++) {
    const double scale = (0.5 - 0x1p-24) / p->norm[i];
    for (int64_t k = 0; k < d; k++) {
      p->potential[i * d + k] = (float)(p->g[i * d + k] * scale);
      value += p->g[i * d + k] * p->potential[i * d + k];
    }
  }
  p->lower = value - PG__ORACLE_MARGIN * (double)(n + d) * p->total / 2 - p->slack;
  PG__NEW(p->ctx, origin, d, "a potential");
  for (int64_t k = 0; k < d; k++) origin[k] = 0;
  PG_TRY(pg__oracle_offer_clusters(p, 1, p->cluster, &p->total, origin));
fail:
  free(origin);
  return status;
}

typedef struct heavy {
  double norm;
  int64_t row;
} heavy;

static int heaviest_first(const void *a, const void *b) {
  const heavy *x = a, *y = b;
  if (x->norm != y->norm) return x->norm > y->norm ? -1 : 1;
  return (x->row > y->row) - (x->row < y->row);
}

int pg__oracle_order(const pg__oracle *p, int64_t *order) {
  heavy *rows = NULL;
  int status = 0;
  PG__NEW(p->ctx, rows, p->n, "an order of rows");
  for (int64_t i = 0; i < p->n; i++) rows[i] = (heavy){p->norm[i], i};
  qsort(rows, (size_t)p->n, sizeof *rows, heaviest_first);
  for (int64_t i = 0; i < p->n; i++) order[i] = rows[i].row;
fail:
  free(rows);
  return status;
}

/* Directions and lengths of the rows of x, which become unit rows; a zero row stays. */
static void unit_rows(float *x, int64_t n, int64_t d, float *lengths) {
  for (int64_t i = 0; i < n; i++) {
    double square = 0;
    for (int64_t k = 0; k < d; k++) square += (double)x[i * d + k] * x[i * d + k];
    lengths[i] = (float)sqrt(square);
    for (int64_t k = 0; k < d && square > 0; k++)
      x[i * d + k] = (float)(x[i * d + k] / sqrt(square));
  }
}

/* Half the time goes to the upper bound, whose potential then gives the directions of a greedy
 * pass; the rows' own directions get another one. */
int pg__oracle_large(pg__oracle *p) {
  static const double shrink[] = {0.9, 0.95, 1, 1.05};
  const int64_t n = p->n, d = p->d;
  float *w = NULL, *caps = NULL;
  int status = 0;
  PG_TRY(first_bounds(p));
  PG__NEW(p->ctx, w, n * d, "directions");
  PG__NEW(p->ctx, caps, n, "lengths");
  const double half = p->start + (p->deadline - p->start) / 2;
  PG_TRY(pg__oracle_quantise(p, CLUSTERS, half, w));
  if (pg__oracle_done(p)) goto fail;
  unit_rows(w, n, d, caps);
  const double began = pg__now();
  PG_TRY(pg__oracle_greedy(p, w, caps, shrink, PG_COUNT(shrink)));
  p->iterations++;
  const double lasted = pg__now() - began;
  if (pg__oracle_done(p) || pg__now() + lasted > p->deadline) goto fail;
  PG_TRY(pg__oracle_radial(p));
  p->iterations++;
fail:
  free(w);
  free(caps);
  return status;
}
