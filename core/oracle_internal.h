/* What the oracle's files share: the problem, its certificates so far, and linear algebra in fp64
 * on host memory. */
#ifndef PG_ORACLE_INTERNAL_H
#define PG_ORACLE_INTERNAL_H

#include "internal.h"
#include "oracle.h"

#include <float.h>

#define PG__ORACLE_EXACT_ROWS 1536 /* dense matrices over pairs of rows up to here */

/* Rounding of the bounds. Every sum here has at most rows + columns terms, so that its relative
 * error is below (rows + columns) 2^-53 of the sum of the terms' moduli (Higham, Accuracy and
 * Stability, section 3.1). The moduli add up to no more than sum ||g_i|| ||phi_i||, ||phi_i|| <= 1,
 * below, and to the bound itself, above, so that PG__ORACLE_MARGIN (rows + columns) of either
 * covers the few sums that enter a bound; it is 1e-10 of the bound at 50257 rows. */
#define PG__ORACLE_MARGIN (32 * DBL_EPSILON)

typedef struct pg__oracle {
  pg_context *ctx;
  int64_t n, d;     /* rows of G that are not zero; columns */
  double *g, *norm; /* [n, d] centred and scaled; [n] */
  double total;     /* sum of norm */
  double rownorm;   /* half the sum over all rows */
  double jung;      /* sqrt(k / (2 (k + 1))), k = min(d, n - 1): a ball of this radius holds any
                       set of diameter 1 */
  double slack;     /* how far rounding in the centring can have moved T */
  double gap, start, deadline;
  int64_t iterations, most_iterations;
  /* the best certificates so far, in fp32 as they are handed out, and what they prove */
  double lower, upper;
  float *potential; /* [n, d] */
  int64_t clusters;
  int32_t *cluster; /* [n] */
  float *weights;   /* [clusters, clusters] */
  float *centres;   /* [clusters, d] */
} pg__oracle;

static inline double pg__oracle_gap(const pg__oracle *p) {
  return p->upper > 0 ? (p->upper - p->lower) / p->upper : 0;
}
static inline bool pg__oracle_done(const pg__oracle *p) {
  return pg__oracle_gap(p) <= p->gap || p->iterations >= p->most_iterations ||
         pg__now() >= p->deadline;
}

/* malloc with PG_ENOMEM naming `what`; at least one byte. */
int pg__oracle_alloc(pg_context *ctx, size_t count, size_t size, const char *what, void *out);
#define PG__NEW(ctx, pointer, count, what)                                                         \
  PG_TRY(pg__oracle_alloc((ctx), (size_t)(count), sizeof *(pointer), (what), &(pointer)))

/* Squared distances of the rows of x [n, d] into d2 [n, n], from Gram matrices in fp64. */
void pg__oracle_distances(const double *x, int64_t n, int64_t d, double *d2);
/* A <- the Cholesky factor (lower, by rows) of the symmetric A [n, n], of which the lower triangle
 * is read. 0, or -1 when A is not positive definite. */
int pg__cholesky(double *a, int64_t n);
/* The factor <- A^-1, both triangles. */
int pg__cholesky_invert(double *factor, int64_t n);
/* b [n, m] <- A^-1 b, with the factor. */
void pg__cholesky_solve(const double *factor, int64_t n, double *b, int64_t m);

/* x [n, d] <- L_t^+ g up to a common row, t [n, n] symmetric, its diagonal not read, g's columns
 * summing to zero; factor [n, n] is scratch. -1: L_t is not definite. */
int pg__laplacian_solve(const double *t, const double *g, int64_t n, int64_t d, double *factor,
                        double *x);

/* Take a potential x [n, d] when it proves more than the best one: it is scaled to diameter 1 and
 * rounded to fp32 first. d2 [n, n] is scratch. */
int pg__oracle_offer_potential(pg__oracle *p, const double *x, double *d2);
/* Take the flow t_ij (psi_i - psi_j), t [n, n] symmetric with a diagonal of zeros, likewise. */
int pg__oracle_offer_flow(pg__oracle *p, const double *t, const double *psi);

/* Take the flow of clusters of rows: t [clusters, clusters], self-tensions on the diagonal, psi
 * [clusters, d]. */
int pg__oracle_offer_clusters(pg__oracle *p, int64_t clusters, const int32_t *cluster,
                              const double *t, const double *psi);

/* ---- n <= PG__ORACLE_EXACT_ROWS ---- */
/* Multiplicative updates of the dense weights t [n, n] from the product weights, up to `rounds` of
 * them or a gap of `gap`. x [n, d] is the last potential L_t^+ G. */
int pg__oracle_warm(pg__oracle *p, double *t, double *x, int rounds, double gap);
/* The interior point from there. */
int pg__oracle_newton(pg__oracle *p, const double *t, const double *x);
/* ---- more ---- */
/* order [n] <- the rows by falling norm. */
int pg__oracle_order(const pg__oracle *p, int64_t *order);
int pg__oracle_large(pg__oracle *p);
/* The quantised dual: clusters of rows, their weights improved until `deadline`. psi [n, d], in
 * fp32, is the potential of the best flow, row by row. */
int pg__oracle_quantise(pg__oracle *p, int64_t clusters, double deadline, float *psi);
/* phi_i = s_i w_i of diameter 1 but for rounding, lengths s by the greedy pass: see
 * oracle_greedy.c. w [n, d], unit rows; caps [n] the longest that s may be. The best of the caps'
 * multiples is taken as a potential when it proves more than the best one. */
int pg__oracle_greedy(pg__oracle *p, const float *w, const float *caps, const double *multiples,
                      int count);
/* The same along the rows' own directions from several radii: what greedy_radial does. */
int pg__oracle_radial(pg__oracle *p);

#endif
