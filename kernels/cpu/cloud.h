/* What the searches for the farthest and for the nearest pair of rows share (diameter.c,
 * separation.c): rows brought to fp32 around their mean, and how far a squared distance computed
 * from those can be off.
 *
 * Distances do not change under a common shift or (but for the factor) under scaling, so a search
 * runs on fp32 rows z_i = fl32(2^e (x_i - c)): c is a reference row plus the mean of the rows
 * relative to it, differences are taken in fp64 (relative error 2^-53 of the difference, so a large
 * common offset costs nothing), and the power of two brings the largest element into [1/2, 1): no
 * square under- or overflows that could matter. With n_i = |z_i|^2 in fp64, r_i = sqrt(n_i), and a
 * product computed in fp32,
 *     d2_ij = n_i + n_j - 2 z_i.z_j
 * differs from the true squared distance times 4^e by less than
 *     slack = 4 g r_i r_j + (8u + (d+64) 2^-52) (r_i + r_j)^2,
 *     u = 2^-24, g = (d+4) u / (1 - (d+4) u):
 * 2 g r_i r_j for the product in any order of summation, 2u (r_i + r_j)^2 for rounding z, at most
 * 3u (r_i + r_j)^2 for the three fp32 operations on n and d2, and the last term for everything in
 * fp64 and for elements of z below 2^-126, which are set to 0. So the pair that is sought is among
 * those whose d2 comes within the slack of the best one known; each of them is evaluated in fp64 by
 * direct subtraction of the original rows, and the best such value wins, the smallest pair among
 * equals. */
#ifndef PG_CPU_CLOUD_H
#define PG_CPU_CLOUD_H

#include "small_product.h"
#include "vector.h"
#include <limits.h>
#include <stdlib.h>

#define PG_PANEL 16                        /* rows that lie interleaved, [d, PG_PANEL] */
#define PG_BLOCK ((PG_PANEL) * (PG_PANEL)) /* distances of two panels */

typedef struct pg_ranked {
  double n;
  int64_t row;
} pg_ranked;

typedef struct pg_cloud {
  const float *x; /* [rows, d] */
  int64_t rows, d, panels;
  double radius;    /* max |x_i - mean| */
  double scale;     /* z is this times the centred rows; 0: all rows are equal */
  pg_ranked *order; /* by decreasing norm of the centred rows, n in the units of x */
  float *z;         /* [panels, d, PG_PANEL], in that order; rows that fill the last panel are 0 */
  float *n;         /* [panels * PG_PANEL], |z_i|^2 rounded to fp32; they lose every comparison */
  double *r;        /* |z_i| in fp64, likewise; of those rows the last one's */
} pg_cloud;

/* Fill c for x [rows, columns]; sign as of search_pairs. 0, or -1 with a text; *bad_row >= 0: that
 * row is not finite, and there is no cloud. Free it in any case. */
int PG_CPU(cloud_new)(pg_queue *q, const float *x, int64_t rows, int64_t columns, double sign,
                      pg_cloud *c, int64_t *bad_row);
void PG_CPU(cloud_free)(pg_cloud *c);
/* Bytes that it takes. */
int64_t PG_CPU(cloud_bytes)(int64_t rows, int64_t columns);

/* A pair of original rows, first < second, and its squared distance. */
typedef struct pg_pair {
  double square;
  int64_t first, second;
} pg_pair;

/* Whether a is to be preferred: the larger square for sign 1, the smaller one for -1, then the
 * smaller pair. */
static inline bool pg_pair_beats(pg_pair a, pg_pair b, double sign) {
  if (a.square != b.square) return sign * a.square > sign * b.square;
  return a.first != b.first ? a.first < b.first : a.second < b.second;
}

/* |x_i - x_j|^2 in fp64 of original rows: eight lanes, added in halves, at every CPU level. */
static inline pg_pair pg_cloud_evaluate(const pg_cloud *c, int64_t i, int64_t j) {
  const float *a = c->x + i * c->d, *b = c->x + j * c->d;
  double lane[8] = {0};
  int64_t k = 0;
  for (; k + 8 <= c->d; k += 8)
    for (int l = 0; l < 8; l++) {
      double difference = (double)a[k + l] - (double)b[k + l];
      lane[l] += difference * difference;
    }
  for (; k < c->d; k++) {
    double difference = (double)a[k] - (double)b[k];
    lane[k % 8] += difference * difference;
  }
  for (int width = 4; width; width /= 2)
    for (int l = 0; l < width; l++) lane[l] += lane[l + width];
  return (pg_pair){lane[0], i < j ? i : j, i < j ? j : i};
}

/* out [PG_PANEL, PG_PANEL] = products of the rows of two panels [steps, PG_PANEL]. */
static inline void pg_panel_products(const float *a, const float *b, int64_t steps, float *out) {
#if PG_WIDTH == PG_PANEL
  enum { ROWS = PG_PANEL, COLUMNS = 1 };
#else
  enum { ROWS = 4, COLUMNS = PG_COLUMNS };
#endif
  for (int i = 0; i < PG_PANEL; i += ROWS)
    for (int j = 0; j < PG_PANEL; j += COLUMNS * PG_WIDTH)
      pg_register_tile(ROWS, COLUMNS, steps, a + i, 1, PG_PANEL, b + j, PG_PANEL,
                       out + i * PG_PANEL + j, PG_PANEL, false);
}

/* out becomes the keys sign * d2 of the rows of panels i and j from their products, with d2 =
 * n_i + n_j - 2 out; gives the largest. Of a panel and itself only pairs p < o count. */
static inline float pg_panel_keys(const pg_cloud *c, int64_t i, int64_t j, float sign, float *out) {
  const float *ni = c->n + i * PG_PANEL, *nj = c->n + j * PG_PANEL;
  float lane[PG_PANEL];
  for (int b = 0; b < PG_PANEL; b++) lane[b] = -INFINITY;
  for (int a = 0; a < PG_PANEL; a++) {
    float *row = out + a * PG_PANEL;
    const float own = sign * ni[a];
#pragma omp simd
    for (int b = 0; b < PG_PANEL; b++) row[b] = PG_FMA(-2.0f * sign, row[b], sign * nj[b]) + own;
    if (i == j)
      for (int b = 0; b <= a; b++) row[b] = -INFINITY;
#pragma omp simd
    for (int b = 0; b < PG_PANEL; b++) lane[b] = row[b] > lane[b] ? row[b] : lane[b];
  }
  for (int width = PG_PANEL / 2; width; width /= 2)
    for (int b = 0; b < width; b++) lane[b] = lane[b + width] > lane[b] ? lane[b + width] : lane[b];
  return lane[0];
}

/* Upper bounds of distances in fewer dimensions: sieve.c. Level l has w[l], panels
 * [steps[l], PG_PANEL] of the first `panels` ones: the products of one with another, whose last
 * step counts negative, take the place of the products of z. */
enum { PG_SIEVE_LEVELS = 2, PG_SIEVE_MOST = 96, PG_SIEVE_ROWS = 2048 /* of fewer, none is made */ };
typedef struct pg_sieve {
  int levels; /* 0: it does not pay */
  int64_t panels, steps[PG_SIEVE_LEVELS];
  float *w[PG_SIEVE_LEVELS];
} pg_sieve;

/* Fill s for the search of the farthest pair, when `best` is known. Adds its multiply-adds to
 * *work. Never fails: without memory there are no levels. Free it in any case. */
void PG_CPU(sieve_new)(pg_queue *q, const pg_cloud *c, const pg_pair *best, pg_sieve *s,
                       double *work);
void PG_CPU(sieve_free)(pg_sieve *s);
/* Bytes that it takes at most. */
int64_t PG_CPU(sieve_bytes)(int64_t rows, int64_t columns);

/* What r_i + r_j must reach when the farthest pair has this square. r is off by less than 2^-23 of
 * itself for rounding z: 1e-6 covers that. */
static inline double pg_cloud_reach(const pg_cloud *c, double square) {
  return sqrt(square) * c->scale * (1 - 1e-6);
}

/* Where a search begins: a pair with its square, or what every pair beats. 0, or -1 with a text.
 * *work: multiply-adds, added to. */
typedef int pg_start_fn(pg_queue *q, const pg_cloud *c, pg_pair *best, double *work);

/* The best pair of all. sign 1: the farthest one, and pairs whose r_i + r_j shows that they are
 * nearer than the start are left out; sign -1: the nearest one, the same with |r_i - r_j|. Rows are
 * taken in panels; candidates are evaluated and never stored, so that a cloud of near ties costs
 * time, not memory. 0, or -1 with a text. (pairs.c) */
int PG_CPU(search_pairs)(pg_queue *q, const float *x, int64_t rows, int64_t columns, double sign,
                         pg_start_fn *start, const volatile int *cancel, pg_farthest *out);

/* Infinite when the bound says nothing: then every pair has to be evaluated. */
static inline double pg_cloud_slack(int64_t d, double ri, double rj) {
  const double u = 0x1p-24, steps = ((double)d + 4) * u;
  if (steps >= 0.5) return INFINITY;
  return 4 * steps / (1 - steps) * ri * rj +
         (8 * u + ((double)d + 64) * 0x1p-52) * (ri + rj) * (ri + rj);
}

#endif
