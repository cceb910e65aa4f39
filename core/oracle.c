/* The oracle's entry: the problem in fp64, the certificates that solvers offer, and the answer. */
#include "oracle_internal.h"
#include "finite.h"

#include <cblas.h>
#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define ONE_THREAD 400 /* rows, up to which it is the faster */

/* ---- potentials ------------------------------------------------------------------------------ */
/* lower = <G, Phi> / D(Phi). D comes from Gram matrices: the computed ||x_i - x_j||^2 is off by at
 * most 4 (d + 4) u (||x_i|| + ||x_j||)^2 <= 16 (d + 4) u max ||x_i||^2 (u = 2^-53). */
static double prove_lower(const pg__oracle *p, const double *x, double *d2) {
  const int64_t n = p->n, d = p->d;
  double far = 0, most = 0, value = 0, size = 0;
  pg__oracle_distances(x, n, d, d2);
  for (int64_t k = 0; k < n * n; k++) far = fmax(far, d2[k]);
  for (int64_t i = 0; i < n; i++) {
    const double norm = cblas_dnrm2((int)d, x + i * d, 1);
    value += cblas_ddot((int)d, p->g + i * d, 1, x + i * d, 1);
    size += p->norm[i] * norm;
    most = fmax(most, norm);
  }
  far = sqrt(far + 8 * (double)(d + 4) * DBL_EPSILON * most * most);
  if (far == 0) return 0;
  return (value - PG__ORACLE_MARGIN * (double)(n + d) * size) / far - p->slack;
}

int pg__oracle_offer_potential(pg__oracle *p, const double *x, double *d2) {
  const int64_t n = p->n, d = p->d;
  double *y = NULL, far = 0, mean;
  int status = 0;
  PG__NEW(p->ctx, y, n * d, "a potential");
  pg__oracle_distances(x, n, d, d2);
  for (int64_t k = 0; k < n * n; k++) far = fmax(far, d2[k]);
  if (!(far > 0) || !isfinite(far)) goto fail;
  /* The factor keeps the rounded potential's diameter below 1: its rows are not longer than 1, so
   * that rounding moves two of them apart by at most 2^-23. */
  far = sqrt(far) * (1 + 0x1p-21);
  for (int64_t j = 0; j < d; j++) {
    mean = 0;
    for (int64_t i = 0; i < n; i++) mean += x[i * d + j];
    mean /= (double)n;
    for (int64_t i = 0; i < n; i++) y[i * d + j] = (float)((x[i * d + j] - mean) / far);
  }
  const double lower = prove_lower(p, y, d2);
  if (lower > p->lower) {
    p->lower = lower;
    for (int64_t k = 0; k < n * d; k++) p->potential[k] = (float)y[k];
  }
fail:
  free(y);
  return status;
}

/* ---- flows ------------------------------------------------------------------------------------
 */
/* upper = sum_{i<j} ||y_ij|| + J sum_i ||r_i||, r_i = g_i - sum_j y_ij: what is left of G has
 * itself a flow of no more than J sum ||r_i|| (Jung), but for the sum of all r_i, which is in the
 * slack. */
int pg__oracle_offer_flow(pg__oracle *p, const double *t, const double *psi) {
  const int64_t n = p->n, d = p->d;
  double *weights = NULL, *x = NULL, *row = NULL, cost = 0, left = 0;
  int status = 0;
  PG__NEW(p->ctx, weights, n * n, "a flow's weights");
  PG__NEW(p->ctx, x, n * d, "a flow's potential");
  PG__NEW(p->ctx, row, n * d, "a flow's rows");
  for (int64_t k = 0; k < n * n; k++) weights[k] = (float)t[k];
  for (int64_t k = 0; k < n * d; k++) x[k] = (float)psi[k];
  /* sum_j t_ij (psi_i - psi_j) for all rows at once */
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n, (int)d, (int)n, 1, weights, (int)n,
              x, (int)d, 0, row, (int)d);
  for (int64_t i = 0; i < n; i++) {
    double sum = 0, r = 0;
    for (int64_t j = 0; j < n; j++) sum += weights[i * n + j];
    for (int64_t k = 0; k < d; k++) {
      const double e = p->g[i * d + k] - (sum * x[i * d + k] - row[i * d + k]);
      r += e * e;
    }
    left += sqrt(r);
  }
  /* A sum per row, so that threads do not change the order. */
#pragma omp parallel for schedule(dynamic, 16)
  for (int64_t i = 0; i < n; i++) {
    double paid = 0;
    for (int64_t j = 0; j < i; j++) {
      if (weights[i * n + j] == 0) continue;
      double sum = 0;
      for (int64_t k = 0; k < d; k++) {
        const double e = x[i * d + k] - x[j * d + k];
        sum += e * e;
      }
      paid += weights[i * n + j] * sqrt(sum);
    }
    row[i] = paid;
  }
  for (int64_t i = 0; i < n; i++) cost += row[i];
  const double upper =
      (cost + p->jung * left) * (1 + PG__ORACLE_MARGIN * (double)(n + d)) + p->slack;
  if (isfinite(upper) && upper < p->upper) {
    p->upper = upper;
    p->clusters = n;
    for (int64_t i = 0; i < n; i++) p->cluster[i] = (int32_t)i;
    for (int64_t k = 0; k < n * n; k++) p->weights[k] = (float)weights[k];
    for (int64_t k = 0; k < n * d; k++) p->centres[k] = (float)x[k];
  }
fail:
  free(weights);
  free(x);
  free(row);
  return status;
}

/* ---- the problem ------------------------------------------------------------------------------
 */
static int by_norm(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Rows whose norms add up to no more than a fiftieth of the gap (of 1e-5) are left out, like rows
 * of zeros: returns the largest norm that is. What they are worth is in the slack. */
static double negligible(const pg__oracle *p, const double *norm, double *sorted, int64_t rows) {
  double total = 0, sum = 0, last = 0;
  memcpy(sorted, norm, (size_t)rows * sizeof *sorted);
  qsort(sorted, (size_t)rows, sizeof *sorted, by_norm);
  for (int64_t i = 0; i < rows; i++) total += sorted[i];
  for (int64_t i = 0; i < rows; i++) {
    /* All rows of one norm stay or go together. */
    sum += sorted[i];
    if (sum > 0.02 * fmin(p->gap, 1e-5) * total) break;
    if (i + 1 < rows && sorted[i + 1] == sorted[i]) continue;
    last = sorted[i];
  }
  return last;
}

/* Centre `values` [rows, columns] into p->g, scaled by 2^-*exponent, without the rows that count
 * for nothing; kept[i] is the row of p's row i. */
static int pose(pg__oracle *p, const float *values, int64_t rows, int64_t *kept, int *exponent) {
  const int64_t d = p->d;
  double *g = NULL, *norm = NULL, *sorted = NULL, most = 0, common = 0, dropped = 0;
  int64_t n = 0;
  int status = 0;
  PG__NEW(p->ctx, g, rows * d, "the centred gradient");
  PG__NEW(p->ctx, norm, rows, "row norms");
  PG__NEW(p->ctx, sorted, rows, "row norms");
  for (int64_t k = 0; k < rows * d; k++) most = fmax(most, fabs((double)values[k]));
  frexp(most, exponent);
  for (int64_t j = 0; j < d; j++) {
    long double sum = 0;
    for (int64_t i = 0; i < rows; i++) sum += values[i * d + j];
    const double mean = ldexp((double)(sum / rows), -*exponent);
    common += mean * mean;
    for (int64_t i = 0; i < rows; i++)
      g[i * d + j] = ldexp((double)values[i * d + j], -*exponent) - mean;
  }
  for (int64_t i = 0; i < rows; i++) norm[i] = cblas_dnrm2((int)d, g + i * d, 1);
  const double floor = negligible(p, norm, sorted, rows);
  for (int64_t i = 0; i < rows; i++) {
    if (norm[i] <= floor) {
      dropped += norm[i];
      continue;
    }
    p->norm[n] = norm[i];
    p->total += norm[i];
    kept[n] = i;
    memmove(g + n * d, g + i * d, (size_t)d * sizeof *g);
    n++;
  }
  p->n = n;
  p->rownorm = (p->total + dropped) / 2;
  const double k = (double)pg__min(d, pg__max(rows - 1, 1));
  p->jung = sqrt(k / (2 * (k + 1)));
  /* Each element was rounded once or twice in the centring; without the rows left out, the others
   * no longer add up to zero, and their sum is taken from them. ||r_i|| of both is bounded. */
  p->slack = 2 * DBL_EPSILON * (p->total + 2 * (double)rows * sqrt(common)) + 2 * dropped;
  for (int64_t j = 0; j < d && n; j++) {
    double mean = 0;
    for (int64_t i = 0; i < n; i++) mean += g[i * d + j];
    mean /= (double)n;
    for (int64_t i = 0; i < n; i++) g[i * d + j] -= mean;
  }
  p->g = g;
  g = NULL;
fail:
  free(g);
  free(norm);
  free(sorted);
  return status;
}

/* ---- the answer -------------------------------------------------------------------------------
 */
/* Rows left out stand at the mean of the others: inside their hull, they are as far from all. */
static int answer(const pg__oracle *p, const int64_t *kept, int exponent, pg_oracle *out) {
  const int64_t n = p->n, d = p->d, rows = out->rows;
  int status = 0;
  PG__NEW(p->ctx, out->potential, rows * d, "the potential");
  PG__NEW(p->ctx, out->cluster, rows, "clusters of rows");
  PG__NEW(p->ctx, out->weights, p->clusters * p->clusters, "the flow's weights");
  PG__NEW(p->ctx, out->centres, p->clusters * d, "the flow's potential");
  for (int64_t j = 0; j < d; j++) {
    double mean = 0;
    for (int64_t i = 0; i < n; i++) mean += p->potential[i * d + j];
    for (int64_t i = 0; i < rows; i++)
      out->potential[i * d + j] = n ? (float)(mean / (double)n) : 0;
    for (int64_t i = 0; i < n; i++) out->potential[kept[i] * d + j] = p->potential[i * d + j];
  }
  for (int64_t i = 0; i < rows; i++) out->cluster[i] = -1;
  for (int64_t i = 0; i < n; i++) out->cluster[kept[i]] = p->cluster[i];
  if (p->clusters) {
    memcpy(out->weights, p->weights, (size_t)(p->clusters * p->clusters) * sizeof(float));
    memcpy(out->centres, p->centres, (size_t)(p->clusters * d) * sizeof(float));
  }
  out->clusters = p->clusters;
  out->scale = ldexp(1, exponent);
  out->lower = ldexp(fmax(p->lower, 0), exponent);
  out->upper = ldexp(p->upper, exponent);
  out->rownorm = ldexp(p->rownorm, exponent);
  out->iterations = p->iterations;
  out->seconds = pg__now() - p->start;
fail:
  return status;
}

static int solve(pg__oracle *p) {
  const int64_t n = p->n, d = p->d;
  double *t = NULL, *x = NULL;
  int status = 0;
  if (n < 2) {
    /* One row left is the sum of the others, which count for nothing. */
    p->lower = p->clusters = 0;
    p->upper = n ? 2 * p->slack : p->slack;
    goto fail;
  }
  p->upper = HUGE_VAL;
  if (n > PG__ORACLE_EXACT_ROWS) return pg__oracle_large(p);
  PG__NEW(p->ctx, p->weights, n * n, "the flow's weights");
  PG__NEW(p->ctx, p->centres, n * d, "the flow's potential");
  PG__NEW(p->ctx, t, n * n, "weights of pairs");
  PG__NEW(p->ctx, x, n * d, "a potential");
  PG_TRY(pg__oracle_warm(p, t, x, (int)pg__min(600, p->most_iterations), 5e-4));
  PG_TRY(pg__oracle_radial(p));
  if (!pg__oracle_done(p)) PG_TRY(pg__oracle_newton(p, t, x));
fail:
  free(t);
  free(x);
  return status;
}

int pg_oracle_solve(const pg_tensor *gradient, const pg_oracle_options *options, pg_oracle *out) {
  pg_context *ctx = gradient->context;
  pg__oracle p = {.ctx = ctx, .start = pg__now()};
  float *values = NULL;
  int64_t *kept = NULL;
  int status = 0, exponent = 0;
  const int threads = omp_get_max_threads();
  memset(out, 0, sizeof *out);
  if (gradient->dtype != PG_F32 || gradient->ndim != 2)
    return pg_fail(ctx, PG_EINVAL, "oracle: a matrix of F32 expected, got %d dimensions of %s",
                   gradient->ndim, pg_dtype_name(gradient->dtype));
  const int64_t rows = gradient->shape[0], d = gradient->shape[1];
  if (rows < 1 || d < 1 || rows > INT32_MAX / 2 || d > 1 << 20)
    return pg_fail(ctx, PG_EINVAL, "oracle: a matrix of [%lld, %lld] is too small or too large",
                   (long long)rows, (long long)d);
  const double gap = options ? options->gap : 0, seconds = options ? options->seconds : 0;
  if (!(gap >= 0 && gap <= 1))
    return pg_fail(ctx, PG_EINVAL, "oracle: gap must be from 0 (for 1e-6) to 1, got %g", gap);
  if (!(seconds >= 0))
    return pg_fail(ctx, PG_EINVAL, "oracle: seconds must be 0 (for 60) or more, got %g", seconds);
  PG_TRY(pg__check_finite(gradient, "oracle"));
  p.d = d;
  p.gap = gap > 0 ? gap : 1e-6;
  p.most_iterations = options && options->iterations > 0 ? options->iterations : INT64_MAX;
  p.deadline = p.start + (seconds > 0 ? seconds : 60);
  PG__NEW(ctx, values, rows * d, "the gradient");
  PG__NEW(ctx, kept, rows, "row numbers");
  PG__NEW(ctx, p.norm, rows, "row norms");
  PG_TRY(pg_tensor_read(gradient, values));
  omp_set_num_threads(ctx->threads); /* also OpenBLAS's */
  PG_TRY(pose(&p, values, rows, kept, &exponent));
  /* Waiting for each other in thousands of short products costs more than a thread brings. */
  if (p.n <= ONE_THREAD) omp_set_num_threads(1);
  p.potential = calloc((size_t)(p.n * d) + 1, sizeof *p.potential);
  p.cluster = calloc((size_t)p.n + 1, sizeof *p.cluster);
  if (!p.potential || !p.cluster)
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "oracle: no memory for %lld rows", (long long)p.n));
  PG_TRY(solve(&p));
  out->rows = rows;
  out->columns = d;
  PG_TRY(answer(&p, kept, exponent, out));
fail:
  omp_set_num_threads(threads);
  free(values);
  free(kept);
  free(p.g);
  free(p.norm);
  free(p.potential);
  free(p.cluster);
  free(p.weights);
  free(p.centres);
  if (status < 0) pg_oracle_free(out);
  return status;
}

void pg_oracle_free(pg_oracle *o) {
  if (!o) return;
  free(o->potential);
  free(o->cluster);
  free(o->weights);
  free(o->centres);
  memset(o, 0, sizeof *o);
}
