/* The lower bound at the scale of a vocabulary: lengths s_i along given directions w_i, one row
 * after the other from the heaviest on, s_i = min(cap_i, min_{j<i} c_ij + sqrt(c_ij^2 + 1 -
 * s_j^2)),  c_ij = <w_i, s_j w_j>, at least 0, the longest with ||s_i w_i - s_j w_j|| <= 1 to all
 * before. w_i = g_i / ||g_i|| and caps of 1/2 are RowNorm. One pass is n^2 d / 2 multiply-adds for
 * all multiples of the caps at once. It computes in fp32: the exact diameter of the result decides
 * what is proved. */
#include "geometry.h"
#include "oracle_internal.h"

#include <cblas.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 256
#define COLUMNS 4096
#define MOST 4 /* multiples */
#define LANES 16

typedef struct pass {
  const pg__oracle *p;
  int count;
  const int64_t *order;
  float *w;                    /* [n, d] in order */
  float *s[MOST], *rest[MOST]; /* [n] in order: lengths; 1 - s^2 */
  float *products;             /* [ROWS, COLUMNS] */
  float *least;                /* [MOST, ROWS] */
} pass;

/* least <- min(least, c + sqrt(c^2 + rest)), c = x s, over `count` rows before. */
static float bound(const float *restrict x, const float *restrict s, const float *restrict rest,
                   int64_t count, float least) {
  float m[LANES];
  int64_t j = 0;
  for (int l = 0; l < LANES; l++) m[l] = least;
  for (; j + LANES <= count; j += LANES)
    for (int l = 0; l < LANES; l++) {
      const float c = x[j + l] * s[j + l], b = c + sqrtf(c * c + rest[j + l]);
      m[l] = b < m[l] ? b : m[l];
    }
  for (; j < count; j++) {
    const float c = x[j] * s[j], b = c + sqrtf(c * c + rest[j]);
    m[0] = b < m[0] ? b : m[0];
  }
  for (int l = 0; l < LANES; l++) least = m[l] < least ? m[l] : least;
  return least;
}

/* The rows [from, from + rows) in order; least holds their caps. */
static void block(pass *a, int64_t from, int64_t rows) {
  const int64_t d = a->p->d;
  const float *w = a->w + from * d;
  for (int64_t at = 0; at < from; at += COLUMNS) {
    const int64_t columns = pg__min(COLUMNS, from - at);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)columns, (int)d, 1, w,
                (int)d, a->w + at * d, (int)d, 0, a->products, COLUMNS);
#pragma omp parallel for
    for (int64_t i = 0; i < rows; i++)
      for (int k = 0; k < a->count; k++)
        a->least[k * ROWS + i] = bound(a->products + i * COLUMNS, a->s[k] + at, a->rest[k] + at,
                                       columns, a->least[k * ROWS + i]);
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)rows, (int)d, 1, w, (int)d,
              w, (int)d, 0, a->products, COLUMNS);
  for (int k = 0; k < a->count; k++)
    for (int64_t i = 0; i < rows; i++) {
      float *s = a->s[k] + from, *rest = a->rest[k] + from;
      s[i] = fmaxf(0, bound(a->products + i * COLUMNS, s, rest, i, a->least[k * ROWS + i]));
      rest[i] = 1 - s[i] * s[i];
    }
}

/* Take the rows s_i w_i as a potential. */
static int take(pg__oracle *p, const pass *a, int k) {
  const int64_t n = p->n, d = p->d;
  float *x = NULL;
  pg_tensor *tensor = NULL;
  pg_diameter far = {0};
  double value = 0;
  int status = 0;
  PG__NEW(p->ctx, x, n * d, "a potential");
  for (int64_t r = 0; r < n; r++)
    for (int64_t j = 0; j < d; j++) x[a->order[r] * d + j] = a->s[k][r] * a->w[r * d + j];
  PG_TRY(pg_tensor_new(p->ctx, PG_F32, 2, (int64_t[]){n, d}, &tensor));
  PG_TRY(pg_tensor_write(tensor, x));
  PG_TRY(pg_geometry_diameter(tensor, &far));
  if (!(far.value > 0)) goto fail;
  /* Rows are no longer than 1 and rounding moves two of them apart by at most 2^-23: the potential
   * handed out has a diameter of at most 1, and the bound divides by no less than that. */
  const double scale = 1 / (far.value * (1 + 0x1p-21));
  for (int64_t i = 0; i < n; i++) {
    double row = 0;
    for (int64_t j = 0; j < d; j++) {
      x[i * d + j] = (float)(x[i * d + j] * scale);
      row += p->g[i * d + j] * x[i * d + j];
    }
    value += row;
  }
  const double lower = value - PG__ORACLE_MARGIN * (double)(n + d) * p->total - p->slack;
  if (lower > p->lower) {
    p->lower = lower;
    memcpy(p->potential, x, (size_t)(n * d) * sizeof *x);
  }
fail:
  free(x);
  pg_tensor_free(tensor);
  return status;
}

int pg__oracle_greedy(pg__oracle *p, const float *w, const float *caps, const double *multiples,
                      int count) {
  const int64_t n = p->n, d = p->d;
  pass a = {.p = p, .count = count};
  int64_t *order = NULL;
  int status = 0, best = 0;
  double most = 0;
  PG__NEW(p->ctx, order, n, "an order of rows");
  PG__NEW(p->ctx, a.w, n * d, "directions");
  PG__NEW(p->ctx, a.products, ROWS * COLUMNS, "products");
  PG__NEW(p->ctx, a.least, MOST * ROWS, "lengths");
  for (int k = 0; k < count; k++) {
    PG__NEW(p->ctx, a.s[k], n, "lengths");
    PG__NEW(p->ctx, a.rest[k], n, "lengths");
  }
  PG_TRY(pg__oracle_order(p, order));
  a.order = order;
  for (int64_t r = 0; r < n; r++) memcpy(a.w + r * d, w + order[r] * d, (size_t)d * sizeof *w);
  for (int64_t from = 0; from < n; from += ROWS) {
    const int64_t rows = pg__min(ROWS, n - from);
    if (pg_context_cancelled(p->ctx))
      PG_TRY(pg_fail(p->ctx, PG_ECANCELED, "the oracle was cancelled"));
    for (int k = 0; k < count; k++)
      for (int64_t i = 0; i < rows; i++)
        a.least[k * ROWS + i] = (float)(multiples[k] * caps[order[from + i]]);
    block(&a, from, rows);
  }
  for (int k = 0; k < count; k++) {
    double value = 0;
    for (int64_t r = 0; r < n; r++) {
      double row = 0;
      for (int64_t j = 0; j < d; j++) row += p->g[order[r] * d + j] * a.w[r * d + j];
      value += row * a.s[k][r];
    }
    if (value > most) most = value, best = k;
  }
  if (most > p->lower) PG_TRY(take(p, &a, best));
fail:
  for (int k = 0; k < count; k++) free(a.s[k]), free(a.rest[k]);
  free(order), free(a.w), free(a.products), free(a.least);
  return status;
}

int pg__oracle_radial(pg__oracle *p) {
  static const double radii[MOST] = {0.5, 0.55, 0.6, 0.65};
  const int64_t n = p->n, d = p->d;
  float *w = NULL, *caps = NULL;
  int status = 0;
  PG__NEW(p->ctx, w, n * d, "directions");
  PG__NEW(p->ctx, caps, n, "lengths");
  for (int64_t i = 0; i < n; i++) {
    for (int64_t k = 0; k < d; k++) w[i * d + k] = (float)(p->g[i * d + k] / p->norm[i]);
    caps[i] = 1;
  }
  PG_TRY(pg__oracle_greedy(p, w, caps, radii, MOST));
fail:
  free(w);
  free(caps);
  return status;
}
