/* The upper bound at the scale of a vocabulary: the scalar dual over clusters of rows. In cluster
 * c, of mass A = sum ||g_i|| and g_c = sum g_i, rows share the cluster's weights by alpha_i =
 * ||g_i||/A, t_ij = t_cc' alpha_i alpha_j,  and  s_c alpha_i alpha_j  inside it (the self-tension),
 * so that psi_i = psi_c + (g_i / alpha_i - g_c) / D_c,  L psi_c = g_c,  D_c = s_c + sum_c' t_cc'.
 * The mean of ||psi_i - psi_j||^2 over two clusters is ||psi_c - psi_c'||^2 + sigma_c^2 +
 * sigma_c'^2, sigma_c^2 = (A^2 - ||g_c||^2) / D_c^2, and inside one 2 sigma_c^2 / (1 - sum
 * alpha^2): weights grow where that is more than 1, as for single rows (oracle_warm.c). */
#include "oracle_internal.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 1024

/* ---- clusters ---------------------------------------------------------------------------------
 */
/* means [c, d] <- the mean direction of every cluster by ||g_i||, half[c] <- half its square. */
static void means_of(const pg__oracle *p, const float *u, const int32_t *cluster, int64_t c,
                     double *sum, float *means, float *half) {
  const int64_t d = p->d;
  memset(sum, 0, (size_t)(c * (d + 1)) * sizeof *sum);
  double *mass = sum + c * d;
  for (int64_t i = 0; i < p->n; i++) {
    double *s = sum + cluster[i] * d;
    mass[cluster[i]] += p->norm[i];
    for (int64_t k = 0; k < d; k++) s[k] += p->norm[i] * u[i * d + k];
  }
  for (int64_t a = 0; a < c; a++) {
    double square = 0;
    if (mass[a] == 0) continue; /* stays where it was */
    for (int64_t k = 0; k < d; k++) {
      means[a * d + k] = (float)(sum[a * d + k] / mass[a]);
      square += (double)means[a * d + k] * means[a * d + k];
    }
    half[a] = (float)(square / 2);
  }
}

/* Lloyd's steps on the directions u, from the c heaviest rows: what a cluster loses is
 * A^2 - ||g_c||^2 = A sum ||g_i|| ||u_i - mean||^2. Returns how many clusters have rows, numbered
 * anew. */
static int64_t cluster_rows(const pg__oracle *p, const float *u, const int64_t *order, int64_t c,
                            int rounds, int32_t *cluster, double *sum, float *means, float *half,
                            float *products) {
  const int64_t n = p->n, d = p->d;
  for (int64_t a = 0; a < c; a++) {
    memcpy(means + a * d, u + order[a] * d, (size_t)d * sizeof *means);
    half[a] = .5f;
  }
  for (int round = 0; round < rounds; round++) {
    if (round) means_of(p, u, cluster, c, sum, means, half);
    for (int64_t from = 0; from < n; from += BLOCK) {
      const int64_t rows = pg__min(BLOCK, n - from);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)c, (int)d, 1,
                  u + from * d, (int)d, means, (int)d, 0, products, (int)c);
#pragma omp parallel for
      for (int64_t i = 0; i < rows; i++) {
        const float *x = products + i * c;
        int64_t best = 0;
        for (int64_t a = 1; a < c; a++)
          if (x[a] - half[a] > x[best] - half[best]) best = a;
        cluster[from + i] = (int32_t)best;
      }
    }
  }
  /* products is free now: the new numbers. */
  int32_t *number = (int32_t *)products;
  int64_t count = 0;
  for (int64_t a = 0; a < c; a++) number[a] = -1;
  for (int64_t i = 0; i < n; i++) {
    if (number[cluster[i]] < 0) number[cluster[i]] = (int32_t)count++;
    cluster[i] = number[cluster[i]];
  }
  return count;
}

/* ---- weights ----------------------------------------------------------------------------------
 */
typedef struct quantised {
  int64_t c;
  double *mass, *sum, *loss, *pairs; /* A; [, d] g_c; A^2 - ||g_c||^2; 1 - sum alpha^2 */
  double *tension, *spread;          /* D; sigma^2 */
  double *t, *factor, *d2, *psi;     /* [c, c] thrice; [c, d] */
} quantised;

static void quantised_free(quantised *q) {
  free(q->mass), free(q->sum), free(q->loss), free(q->pairs), free(q->tension), free(q->spread);
  free(q->t), free(q->factor), free(q->d2), free(q->psi);
}

static int quantised_new(const pg__oracle *p, const int32_t *cluster, int64_t c, quantised *q) {
  const int64_t d = p->d;
  int status = 0;
  q->c = c;
  PG__NEW(p->ctx, q->mass, c, "clusters");
  PG__NEW(p->ctx, q->sum, c * d, "clusters");
  PG__NEW(p->ctx, q->loss, c, "clusters");
  PG__NEW(p->ctx, q->pairs, c, "clusters");
  PG__NEW(p->ctx, q->tension, c, "clusters");
  PG__NEW(p->ctx, q->spread, c, "clusters");
  PG__NEW(p->ctx, q->t, c * c, "weights of clusters");
  PG__NEW(p->ctx, q->factor, c * c, "a Laplacian");
  PG__NEW(p->ctx, q->d2, c * c, "distances of clusters");
  PG__NEW(p->ctx, q->psi, c * d, "a potential");
  memset(q->mass, 0, (size_t)c * sizeof *q->mass);
  memset(q->pairs, 0, (size_t)c * sizeof *q->pairs);
  memset(q->sum, 0, (size_t)(c * d) * sizeof *q->sum);
  for (int64_t i = 0; i < p->n; i++) {
    const int64_t a = cluster[i];
    q->mass[a] += p->norm[i];
    q->pairs[a] += p->norm[i] * p->norm[i];
    for (int64_t k = 0; k < d; k++) q->sum[a * d + k] += p->g[i * d + k];
  }
  for (int64_t a = 0; a < c; a++) {
    const double g = cblas_dnrm2((int)d, q->sum + a * d, 1), mass = q->mass[a];
    q->pairs[a] = fmax(0, 1 - q->pairs[a] / (mass * mass));
    if (q->pairs[a] < 1e-12) q->pairs[a] = 0; /* a single row */
    q->loss[a] = q->pairs[a] > 0 ? fmax(0, mass * mass - g * g) : 0;
    for (int64_t b = 0; b < c; b++) q->t[a * c + b] = mass * q->mass[b] / p->total;
    if (q->pairs[a] == 0) q->t[a * c + a] = 0;
  }
fail:
  return status;
}

/* psi, its spread and distances of the present weights; -1: not definite. */
static int evaluate(const pg__oracle *p, quantised *q) {
  const int64_t c = q->c;
  if (pg__laplacian_solve(q->t, q->sum, c, p->d, q->factor, q->psi) < 0) return -1;
  pg__oracle_distances(q->psi, c, p->d, q->d2);
  for (int64_t a = 0; a < c; a++) {
    q->tension[a] = 0;
    for (int64_t b = 0; b < c; b++) q->tension[a] += q->t[a * c + b];
    q->spread[a] = q->loss[a] / (q->tension[a] * q->tension[a]);
  }
  return 0;
}

static void improve(quantised *q) {
  const int64_t c = q->c;
#pragma omp parallel for
  for (int64_t a = 0; a < c; a++)
    for (int64_t b = 0; b < c; b++) {
      const double square = a != b             ? q->d2[a * c + b] + q->spread[a] + q->spread[b]
                            : q->pairs[a] == 0 ? 0
                                               : 2 * q->spread[a] / q->pairs[a];
      /* square^(3/4): the exponent 3/2 of the distance */
      const double root = sqrt(square);
      q->t[a * c + b] *= root * sqrt(root);
    }
}

/* psi_i of every row, of the weights last evaluated. */
static void spread_out(const pg__oracle *p, const quantised *q, const int32_t *cluster,
                       float *psi) {
  const int64_t d = p->d;
  for (int64_t i = 0; i < p->n; i++) {
    const int64_t a = cluster[i];
    const double scale = q->mass[a] / p->norm[i];
    const bool single = q->pairs[a] == 0;
    for (int64_t k = 0; k < d; k++) {
      const double inner = single ? 0 : scale * p->g[i * d + k] - q->sum[a * d + k];
      psi[i * d + k] = (float)(q->psi[a * d + k] + inner / q->tension[a]);
    }
  }
}

int pg__oracle_quantise(pg__oracle *p, int64_t clusters, double deadline, float *psi) {
  const int64_t n = p->n, d = p->d;
  const int64_t most = pg__min(clusters, n);
  quantised q = {0};
  float *u = NULL, *means = NULL, *half = NULL, *products = NULL;
  double *sum = NULL, lasted = 0;
  int64_t *order = NULL;
  int32_t *cluster = NULL;
  int status = 0;
  PG__NEW(p->ctx, u, n * d, "directions");
  PG__NEW(p->ctx, means, most * d, "clusters");
  PG__NEW(p->ctx, half, most, "clusters");
  PG__NEW(p->ctx, products, BLOCK * most, "products");
  PG__NEW(p->ctx, sum, most * (d + 1), "clusters");
  PG__NEW(p->ctx, order, n, "an order of rows");
  PG__NEW(p->ctx, cluster, n, "clusters of rows");
  for (int64_t i = 0; i < n; i++)
    for (int64_t k = 0; k < d; k++) u[i * d + k] = (float)(p->g[i * d + k] / p->norm[i]);
  PG_TRY(pg__oracle_order(p, order));
  const int64_t c = cluster_rows(p, u, order, most, 3, cluster, sum, means, half, products);
  free(u), free(products);
  u = products = NULL;
  PG_TRY(quantised_new(p, cluster, c, &q));
  for (int round = 0;; round++) {
    const double began = pg__now();
    if (pg_context_cancelled(p->ctx))
      PG_TRY(pg_fail(p->ctx, PG_ECANCELED, "the oracle was cancelled"));
    if (evaluate(p, &q) < 0) break;
    p->iterations++;
    const bool last = round >= 400 || pg__now() + 3 * lasted > deadline;
    if (last || round % 50 == 0) PG_TRY(pg__oracle_offer_clusters(p, c, cluster, q.t, q.psi));
    if (last) break;
    improve(&q);
    lasted = pg__now() - began;
  }
  spread_out(p, &q, cluster, psi);
fail:
  quantised_free(&q);
  free(u), free(means), free(half), free(products), free(sum), free(order), free(cluster);
  return status;
}
