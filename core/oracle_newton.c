/* The oracle's end game: a primal-dual interior point on the weights t of candidate pairs. With
 * psi = L_t^+ G and delta_e = psi_i - psi_j, the optimum has t_e s_e = 0, s_e = (1 - |delta_e|^2)/2
 * and t, s >= 0. Newton's step for t_e s_e = mu solves
 *   (K + diag(s/t)) dt = mu/t - (1 - |delta|^2)/2,   K = (B L^+ B^T) o (delta delta^T),
 * ds = mu/t - s - (s/t) dt, with B the incidence matrix of the pairs and o the product by elements
 * (s is a variable of its own: it need not equal its definition on the way). Predictor and
 * corrector after Mehrotra.
 *
 * At the optimum few pairs carry flow (about 15 a row at 512 x 64). The system is solved by
 * conjugate gradients; the preconditioner is the exact Cholesky factor over the pairs where s/t
 * does not dominate K, and the diagonal over the others, so that the factor has the size of the
 * flow's support and the candidates may be generous. K itself is applied in O(n^2 d + E d). */
#include "oracle_internal.h"

#include <cblas.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define MANY 2000    /* pairs from which several threads help */
#define BLOCK 256    /* rows of K made at once */
#define DOMINANT 0.5 /* a pair is in the factor when K's diagonal is more than this of s/t */

typedef struct pair_set {
  pg__oracle *p;
  int64_t count, room; /* candidate pairs */
  int32_t *first, *second;
  double *t, *s;
  double *delta, *diagonal; /* [count, d]; K's diagonal */
  double *inverse;          /* [n, n], L^+ up to what differences of rows do not see */
  double *x;                /* [n, d], psi */
  double *moved, *solved;   /* [n, d], scratch of apply */
  int64_t core, core_room;  /* pairs in the factor */
  int64_t *chosen;          /* [core] */
  double *factor;
} pair_set;

static void pairs_free(pair_set *c) {
  free(c->first), free(c->second), free(c->t), free(c->s), free(c->delta), free(c->diagonal);
  free(c->inverse), free(c->x), free(c->moved), free(c->solved), free(c->chosen), free(c->factor);
}

/* Room for `room` candidates; those there are stay. */
static int pairs_grow(pair_set *c, int64_t room) {
  pg_context *ctx = c->p->ctx;
  int32_t *first = NULL, *second = NULL;
  double *t = NULL, *s = NULL, *delta = NULL, *diagonal = NULL;
  int64_t *chosen = NULL;
  int status = 0;
  if (room <= c->room) return 0;
  PG__NEW(ctx, first, room, "candidate pairs");
  PG__NEW(ctx, second, room, "candidate pairs");
  PG__NEW(ctx, t, room, "candidate pairs");
  PG__NEW(ctx, s, room, "candidate pairs");
  PG__NEW(ctx, delta, room * c->p->d, "differences of candidate pairs");
  PG__NEW(ctx, diagonal, room, "candidate pairs");
  PG__NEW(ctx, chosen, room, "candidate pairs");
  if (c->count) {
    memcpy(first, c->first, (size_t)c->count * sizeof *first);
    memcpy(second, c->second, (size_t)c->count * sizeof *second);
    memcpy(t, c->t, (size_t)c->count * sizeof *t);
    memcpy(s, c->s, (size_t)c->count * sizeof *s);
  }
#define SWAP(type, name)                                                                           \
  do {                                                                                             \
    type *old = c->name;                                                                           \
    c->name = name;                                                                                \
    name = old;                                                                                    \
  } while (0)
  SWAP(int32_t, first);
  SWAP(int32_t, second);
  SWAP(double, t);
  SWAP(double, s);
  SWAP(double, delta);
  SWAP(double, diagonal);
  SWAP(int64_t, chosen);
#undef SWAP
  c->room = room;
fail:
  free(first), free(second), free(t), free(s), free(delta), free(diagonal), free(chosen);
  return status;
}

static int pairs_add(pair_set *c, int64_t i, int64_t j, double t, double s) {
  int status = 0;
  if (c->count == c->room) PG_TRY(pairs_grow(c, c->room + c->room / 2 + 64));
  c->first[c->count] = (int32_t)i;
  c->second[c->count] = (int32_t)j;
  c->t[c->count] = t;
  c->s[c->count] = s;
  c->count++;
fail:
  return status;
}

/* ---- the state of the present weights ---------------------------------------------------------
 */
/* dense [n, n] <- t as a matrix; inverse, x, delta, diagonal follow. -1: L is not definite. */
static int state(pair_set *c, double *dense) {
  const pg__oracle *p = c->p;
  const int64_t n = p->n, d = p->d;
  double *sum = c->moved, total = 0;
  memset(dense, 0, (size_t)(n * n) * sizeof *dense);
  memset(sum, 0, (size_t)n * sizeof *sum);
  for (int64_t e = 0; e < c->count; e++) {
    const int64_t i = c->first[e], j = c->second[e];
    dense[i * n + j] = dense[j * n + i] = c->t[e];
    sum[i] += c->t[e];
    sum[j] += c->t[e];
    total += 2 * c->t[e];
  }
  /* As in the first-order start: L + w w^T. */
  double *factor = c->inverse;
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j < n; j++) factor[i * n + j] = sum[i] * sum[j] / total - dense[i * n + j];
    factor[i * n + i] += sum[i];
  }
  if (pg__cholesky(factor, n) < 0 || pg__cholesky_invert(factor, n) < 0) return -1;
  cblas_dsymm(CblasRowMajor, CblasLeft, CblasLower, (int)n, (int)d, 1, c->inverse, (int)n, p->g,
              (int)d, 0, c->x, (int)d);
#pragma omp parallel for
  for (int64_t e = 0; e < c->count; e++) {
    const int64_t i = c->first[e], j = c->second[e];
    double square = 0;
    for (int64_t k = 0; k < d; k++) {
      const double v = c->x[i * d + k] - c->x[j * d + k];
      c->delta[e * d + k] = v;
      square += v * v;
    }
    const double *r = c->inverse;
    c->diagonal[e] = (r[i * n + i] + r[j * n + j] - 2 * r[i * n + j]) * square;
  }
  return 0;
}

static double square_of(const pair_set *c, int64_t e) {
  const double *v = c->delta + e * c->p->d;
  return cblas_ddot((int)c->p->d, v, 1, v, 1);
}

/* y <- (K + diag(s/t)) v */
static void apply(const pair_set *c, const double *v, double *y) {
  const int64_t n = c->p->n, d = c->p->d;
  memset(c->moved, 0, (size_t)(n * d) * sizeof *c->moved);
  /* Every thread adds up columns of its own. */
#pragma omp parallel for schedule(static)
  for (int64_t part = 0; part < (d + 7) / 8; part++) {
    const int64_t from = part * 8, to = pg__min(d, from + 8);
    for (int64_t e = 0; e < c->count; e++) {
      double *a = c->moved + c->first[e] * d, *b = c->moved + c->second[e] * d;
      const double *delta = c->delta + e * d;
      const double w = v[e];
      for (int64_t k = from; k < to; k++) {
        a[k] += w * delta[k];
        b[k] -= w * delta[k];
      }
    }
  }
  cblas_dsymm(CblasRowMajor, CblasLeft, CblasLower, (int)n, (int)d, 1, c->inverse, (int)n, c->moved,
              (int)d, 0, c->solved, (int)d);
#pragma omp parallel for schedule(static)
  for (int64_t e = 0; e < c->count; e++) {
    const double *a = c->solved + c->first[e] * d, *b = c->solved + c->second[e] * d;
    const double *delta = c->delta + e * d;
    double sum = 0;
    for (int64_t k = 0; k < d; k++) sum += (a[k] - b[k]) * delta[k];
    y[e] = sum + c->s[e] / c->t[e] * v[e];
  }
}

/* ---- the preconditioner -----------------------------------------------------------------------
 */
typedef struct share {
  double value;
  int64_t pair;
} share;

static int by_share(const void *a, const void *b) {
  const share *x = a, *y = b;
  if (x->value != y->value) return x->value < y->value ? 1 : -1;
  return (x->pair > y->pair) - (x->pair < y->pair);
}

static int by_number(const void *a, const void *b) {
  const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

/* The factor <- the lower triangle of K + diag(s/t) over the chosen pairs, the diagonal times
 * 1 + shift. gather [core, d], block [BLOCK, n]. */
static void assemble(pair_set *c, double shift, double *gather, double *block) {
  const int64_t n = c->p->n, d = c->p->d, m = c->core;
  for (int64_t k = 0; k < m; k++)
    memcpy(gather + k * d, c->delta + c->chosen[k] * d, (size_t)d * sizeof *gather);
  for (int64_t from = 0; from < m; from += BLOCK) {
    const int64_t height = pg__min(BLOCK, m - from), width = from + height;
    double *rows = c->factor + from * m;
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)height, (int)width, (int)d, 1,
                gather + from * d, (int)d, gather, (int)d, 0, rows, (int)m);
#pragma omp parallel for schedule(static)
    for (int64_t a = 0; a < height; a++) {
      const int64_t e = c->chosen[from + a];
      const double *ri = c->inverse + c->first[e] * n, *rj = c->inverse + c->second[e] * n;
      double *r = block + a * n, *out = rows + a * m;
      for (int64_t k = 0; k < n; k++) r[k] = ri[k] - rj[k];
      for (int64_t b = 0; b <= from + a; b++) {
        const int64_t f = c->chosen[b];
        out[b] *= r[c->first[f]] - r[c->second[f]];
      }
      out[from + a] = (out[from + a] + c->s[e] / c->t[e]) * (1 + shift);
    }
  }
}

/* Choose the pairs of the factor, at most `most` of them, and compute it. */
static int factorise(pair_set *c, int64_t most) {
  pg_context *ctx = c->p->ctx;
  share *shares = NULL;
  double *gather = NULL, *block = NULL;
  int64_t m = 0;
  int status = 0;
  PG__NEW(ctx, shares, c->count, "candidate pairs");
  for (int64_t e = 0; e < c->count; e++) shares[e] = (share){c->diagonal[e] * c->t[e] / c->s[e], e};
  qsort(shares, (size_t)c->count, sizeof *shares, by_share);
  while (m < c->count && m < most && shares[m].value > DOMINANT) m++;
  for (int64_t k = 0; k < m; k++) c->chosen[k] = shares[k].pair;
  qsort(c->chosen, (size_t)m, sizeof *c->chosen, by_number);
  c->core = 0;
  if (m > c->core_room) {
    const int64_t room = pg__min(most, m + m / 8);
    free(c->factor);
    c->factor = NULL;
    c->core_room = 0;
    PG__NEW(ctx, c->factor, room * room, "the factor over pairs");
    c->core_room = room;
  }
  if (m == 0) goto fail;
  PG__NEW(ctx, gather, m * c->p->d, "differences of pairs");
  PG__NEW(ctx, block, BLOCK * c->p->n, "rows of an inverse");
  c->core = m;
  /* At a degenerate optimum the weights are not unique and K is singular: rounding may leave it
   * indefinite. A larger diagonal is a preconditioner too; without any factor, the diagonal is. */
  for (double shift = 1e-13; shift < 1e-3; shift *= 1e3) {
    assemble(c, shift, gather, block);
    if (pg__cholesky(c->factor, m) == 0) goto fail;
  }
  c->core = 0;
fail:
  free(shares);
  free(gather);
  free(block);
  return status;
}

/* z <- M^-1 r; `work` [core] */
static void precondition(const pair_set *c, const double *r, double *z, double *work) {
  for (int64_t e = 0; e < c->count; e++) z[e] = r[e] / (c->diagonal[e] + c->s[e] / c->t[e]);
  for (int64_t k = 0; k < c->core; k++) work[k] = r[c->chosen[k]];
  if (c->core) {
    cblas_dtrsv(CblasRowMajor, CblasLower, CblasNoTrans, CblasNonUnit, (int)c->core, c->factor,
                (int)c->core, work, 1);
    cblas_dtrsv(CblasRowMajor, CblasLower, CblasTrans, CblasNonUnit, (int)c->core, c->factor,
                (int)c->core, work, 1);
  }
  for (int64_t k = 0; k < c->core; k++) z[c->chosen[k]] = work[k];
}

/* dt <- (K + diag(s/t))^-1 rhs to `tolerance` in the preconditioner's norm; returns how many
 * steps. work [4 count + core]. */
static int conjugate(const pair_set *c, const double *rhs, double *dt, double tolerance, int most,
                     double *work) {
  const int64_t m = c->count;
  double *r = work, *z = r + m, *v = z + m, *q = v + m, *small = q + m;
  memset(dt, 0, (size_t)m * sizeof *dt);
  memcpy(r, rhs, (size_t)m * sizeof *r);
  precondition(c, r, z, small);
  memcpy(v, z, (size_t)m * sizeof *v);
  double rz = cblas_ddot((int)m, r, 1, z, 1);
  const double first = rz;
  int k = 0;
  while (k < most && rz > tolerance * tolerance * first) {
    apply(c, v, q);
    const double curvature = cblas_ddot((int)m, v, 1, q, 1);
    if (!(curvature > 0)) break;
    cblas_daxpy((int)m, rz / curvature, v, 1, dt, 1);
    cblas_daxpy((int)m, -rz / curvature, q, 1, r, 1);
    precondition(c, r, z, small);
    const double next = cblas_ddot((int)m, r, 1, z, 1);
    if (!(next >= 0)) break;
    for (int64_t e = 0; e < m; e++) v[e] = z[e] + next / rz * v[e];
    rz = next;
    k++;
  }
  return k;
}

/* ---- steps ------------------------------------------------------------------------------------
 */
/* The longest step <= 1 that keeps x + step dx >= 0. */
static double longest(const double *x, const double *dx, int64_t m) {
  double step = 1;
  for (int64_t e = 0; e < m; e++)
    if (dx[e] < -x[e] * (1 / step)) step = -x[e] / dx[e];
  return step;
}

static double complementarity(const pair_set *c) {
  return cblas_ddot((int)c->count, c->t, 1, c->s, 1) / (double)c->count;
}

/* One predictor and corrector. work [8 count + core]. */
static void step(pair_set *c, double *work) {
  const int64_t m = c->count;
  double *dt = work, *ds = dt + m, *second = ds + m, *rhs = second + m, *rest = rhs + m;
  const double mu = complementarity(c);
  double target = 0, after = 0;
  for (int pass = 0; pass < 2; pass++) {
    for (int64_t e = 0; e < m; e++) {
      const double want = (target - (pass ? dt[e] * ds[e] : 0)) / c->t[e];
      second[e] = want - c->s[e];
      rhs[e] = want - 0.5 * (1 - square_of(c, e));
    }
    conjugate(c, rhs, dt, pass ? 1e-8 : 1e-3, pass ? 200 : 60, rest);
    for (int64_t e = 0; e < m; e++) ds[e] = second[e] - c->s[e] / c->t[e] * dt[e];
    const double a = longest(c->t, dt, m), b = longest(c->s, ds, m);
    if (pass == 0) {
      for (int64_t e = 0; e < m; e++) after += (c->t[e] + a * dt[e]) * (c->s[e] + b * ds[e]);
      const double ratio = after / (double)m / mu;
      target = ratio * ratio * ratio * mu;
    } else {
      for (int64_t e = 0; e < m; e++) {
        c->t[e] += (a < 1 ? 0.99 * a : 1) * dt[e];
        c->s[e] += (b < 1 ? 0.99 * b : 1) * ds[e];
      }
    }
  }
}

/* ---- candidates -------------------------------------------------------------------------------
 */
/* The first candidates: pairs nearly at the full distance, and those of a flow that carries all but
 * a thousandth of the cost (a flow cut further is too far from any optimum to start from); also a
 * star around the first row, so that all rows hang together. */
static int choose(pair_set *c, const double *t, const double *d2) {
  const int64_t n = c->p->n;
  share *shares = NULL;
  double total = 0, sum = 0, least = 0;
  int64_t count = 0;
  int status = 0;
  PG__NEW(c->p->ctx, shares, n * (n - 1) / 2, "all pairs");
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < i; j++) {
      const double value = t[i * n + j] * sqrt(d2[i * n + j]);
      shares[count++] = (share){value, i * n + j};
      total += value;
    }
  qsort(shares, (size_t)count, sizeof *shares, by_share);
  for (int64_t k = 0; k < count && sum < 0.999 * total; k++) {
    sum += shares[k].value;
    least = shares[k].value;
  }
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < i; j++) {
      const double far = d2[i * n + j], w = t[i * n + j];
      if (j == 0 || far > 0.99 * 0.99 || w * sqrt(far) >= least)
        PG_TRY(pairs_add(c, j, i, w, fmax(0.02, 0.5 * (1 - far))));
    }
fail:
  free(shares);
  return status;
}

/* Pairs that are no candidates and farther apart than 1, the farthest first, a few for every row.
 * has [n, n] as of state(): the candidates' weights. */
static int add_violated(pair_set *c, const double *has, const double *d2, double mu) {
  const int64_t n = c->p->n;
  share *shares = NULL;
  int64_t count = 0;
  int status = 0;
  PG__NEW(c->p->ctx, shares, n * (n - 1) / 2, "all pairs");
  for (int64_t i = 1; i < n; i++)
    for (int64_t j = 0; j < i; j++)
      if (has[i * n + j] == 0 && d2[i * n + j] > 1 + 1e-7)
        shares[count++] = (share){d2[i * n + j], i * n + j};
  qsort(shares, (size_t)count, sizeof *shares, by_share);
  for (int64_t k = 0; k < count && k < 2 * n; k++)
    PG_TRY(pairs_add(c, shares[k].pair % n, shares[k].pair / n, mu / 0.01, 0.01));
fail:
  free(shares);
  return status;
}

int pg__oracle_newton(pg__oracle *p, const double *t, const double *x) {
  const int64_t n = p->n, d = p->d;
  pg_context *ctx = p->ctx;
  pair_set c = {.p = p};
  double *d2 = NULL, *dense = NULL, *work = NULL, lasted = 0;
  int64_t work_size = 0;
  int status = 0;
  /* A quarter of the memory there is for the factor. */
  const double memory = (double)pg__host_memory("");
  const int64_t most = (int64_t)sqrt((memory > 0 ? memory : 0x1p33) / 32);
  PG__NEW(ctx, d2, n * n, "distances");
  PG__NEW(ctx, dense, n * n, "weights of pairs");
  PG__NEW(ctx, c.inverse, n * n, "an inverse");
  PG__NEW(ctx, c.x, n * d, "a potential");
  PG__NEW(ctx, c.moved, n * pg__max(d, 1), "a potential");
  PG__NEW(ctx, c.solved, n * d, "a potential");
  pg__oracle_distances(x, n, d, d2);
  PG_TRY(choose(&c, t, d2));
  if (c.count > MANY) omp_set_num_threads(ctx->threads); /* as the caller found it, afterwards */
  for (int round = 0; round < 100; round++) {
    const double began = pg__now();
    if (pg_context_cancelled(ctx)) PG_TRY(pg_fail(ctx, PG_ECANCELED, "the oracle was cancelled"));
    if (state(&c, dense) < 0) break;
    p->iterations++;
    PG_TRY(pg__oracle_offer_flow(p, dense, c.x));
    PG_TRY(pg__oracle_offer_potential(p, c.x, d2));
    if (pg__oracle_done(p) || began + lasted > p->deadline) break;
    pg__oracle_distances(c.x, n, d, d2);
    const int64_t before = c.count;
    if (round) PG_TRY(add_violated(&c, dense, d2, complementarity(&c)));
    if (c.count > before && state(&c, dense) < 0) break;
    PG_TRY(factorise(&c, most));
    if (9 * c.room + c.core > work_size) {
      free(work);
      work = NULL;
      work_size = 9 * c.room + c.core;
      PG__NEW(ctx, work, work_size, "a step's vectors");
    }
    step(&c, work);
    lasted = pg__now() - began;
  }
fail:
  pairs_free(&c);
  free(d2);
  free(dense);
  free(work);
  return status;
}
