/* The oracle's checker. It reads a claimed interval with its certificates and the gradient, and
 * shares nothing with the solver: sums are written out, rows are balanced one by one, and the
 * diameter is the exact one of core/geometry.h.
 *
 * Rounding: every sum has at most rows + columns terms, hence a relative error below
 * (rows + columns) 2^-53 of the sum of moduli; ALLOWED (rows + columns) covers those that enter one
 * bound, and is taken off what they prove. */
#include "geometry.h"
#include "internal.h"
#include "oracle.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ALLOWED (8 * DBL_EPSILON)

typedef struct checked {
  const pg_oracle *claimed;
  int64_t rows, columns, clusters;
  double *g;     /* [rows, columns], centred */
  double *norm;  /* [rows] */
  double total;  /* sum of norm */
  double common; /* what rounding of the centring is worth */
  double *mass, *sum, *tension, *towards, *spread, *squares;
  /* of clusters: sum ||g_i||, [, columns] sum g_i, D_c, [, columns] sum t psi, sigma^2, sum alpha^2
   */
} checked;

static double dot(const double *a, const double *b, int64_t n) {
  double sum = 0;
  for (int64_t k = 0; k < n; k++) sum += a[k] * b[k];
  return sum;
}

__attribute__((format(printf, 2, 3))) static void note(pg_oracle_verdict *v, const char *format,
                                                       ...) {
  const size_t used = strlen(v->problem);
  va_list list;
  if (used + 3 >= sizeof v->problem) return;
  if (used) strcpy(v->problem + used, "; ");
  va_start(list, format);
  vsnprintf(v->problem + strlen(v->problem), sizeof v->problem - strlen(v->problem), format, list);
  va_end(list);
}

static int centre(const pg_tensor *gradient, checked *c) {
  pg_context *ctx = gradient->context;
  const int64_t rows = c->rows, columns = c->columns;
  float *values = malloc((size_t)(rows * columns) * sizeof *values);
  double means = 0;
  int status = 0;
  c->g = malloc((size_t)(rows * columns) * sizeof *c->g);
  c->norm = malloc((size_t)rows * sizeof *c->norm);
  if (!values || !c->g || !c->norm)
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "check_oracle: no memory for the gradient"));
  PG_TRY(pg_tensor_read(gradient, values));
  for (int64_t k = 0; k < columns; k++) {
    long double sum = 0;
    for (int64_t i = 0; i < rows; i++) {
      const float x = values[i * columns + k];
      if (!isfinite(x))
        PG_TRY(pg_fail(ctx, PG_ENONFINITE,
                       "check_oracle: row %lld, column %lld (counted from 0) is %g", (long long)i,
                       (long long)k, (double)x));
      sum += x;
    }
    const double mean = (double)(sum / rows);
    means += mean * mean;
    for (int64_t i = 0; i < rows; i++) c->g[i * columns + k] = values[i * columns + k] - mean;
  }
  for (int64_t i = 0; i < rows; i++) {
    c->norm[i] = sqrt(dot(c->g + i * columns, c->g + i * columns, columns));
    c->total += c->norm[i];
  }
  c->common = DBL_EPSILON * (c->total + (double)rows * sqrt(means));
fail:
  free(values);
  return status;
}

/* ---- the lower bound --------------------------------------------------------------------------
 */
static int check_lower(pg_context *ctx, const checked *c, pg_oracle_verdict *v) {
  const int64_t rows = c->rows, columns = c->columns;
  const float *phi = c->claimed->potential;
  pg_tensor *tensor = NULL;
  pg_diameter d = {0};
  double value = 0, size = 0;
  int status = 0;
  v->lower = NAN;
  for (int64_t k = 0; k < rows * columns; k++)
    if (!isfinite(phi[k])) {
      note(v, "lower bound: the potential's row %lld is not finite", (long long)(k / columns));
      return 0;
    }
  PG_TRY(pg_tensor_new(ctx, PG_F32, 2, (int64_t[]){rows, columns}, &tensor));
  PG_TRY(pg_tensor_write(tensor, phi));
  PG_TRY(pg_geometry_diameter(tensor, &d));
  for (int64_t i = 0; i < rows; i++) {
    double row = 0, square = 0;
    for (int64_t k = 0; k < columns; k++) {
      row += c->g[i * columns + k] * phi[i * columns + k];
      square += (double)phi[i * columns + k] * phi[i * columns + k];
    }
    value += row;
    size += c->norm[i] * sqrt(square);
  }
  v->diameter = d.value;
  v->lower = d.value > 0 ? (value - ALLOWED * (double)(rows + columns) * size) / d.value : 0;
  v->lower -= v->lower != 0 ? c->common : 0;
  v->lower = fmax(v->lower, 0); /* T is never negative: the potential 0 */
  v->lower_holds = c->claimed->lower <= v->lower;
  if (!v->lower_holds)
    note(v, "lower bound: %.10g is claimed, the potential proves %.10g (%.3g less)",
         c->claimed->lower, v->lower, c->claimed->lower - v->lower);
  if (d.value > 1) {
    v->lower_holds = false;
    note(v, "lower bound: the potential's diameter is %.10g, more than 1", d.value);
  }
fail:
  pg_tensor_free(tensor);
  return status;
}

/* ---- the upper bound --------------------------------------------------------------------------
 */
/* Sums over clusters; what is wrong with the flow, or NULL. */
static const char *read_flow(checked *c) {
  const pg_oracle *o = c->claimed;
  const int64_t columns = c->columns, clusters = c->clusters;
  for (int64_t a = 0; a < clusters; a++)
    for (int64_t b = 0; b < clusters; b++) {
      const float t = o->weights[a * clusters + b];
      if (!(t >= 0) || !isfinite(t)) return "a weight is negative or not finite";
      if (t != o->weights[b * clusters + a]) return "the weights are not symmetric";
    }
  for (int64_t k = 0; k < clusters * columns; k++)
    if (!isfinite(o->centres[k])) return "a centre is not finite";
  if (!(o->scale > 0) || !isfinite(o->scale)) return "the scale is not a positive number";
  for (int64_t i = 0; i < c->rows; i++) {
    const int64_t a = o->cluster[i];
    if (a < -1 || a >= clusters) return "a row's cluster does not exist";
    if (a < 0) continue;
    c->mass[a] += c->norm[i];
    for (int64_t k = 0; k < columns; k++) c->sum[a * columns + k] += c->g[i * columns + k];
  }
  for (int64_t a = 0; a < clusters; a++)
    for (int64_t b = 0; b < clusters; b++) {
      const double t = o->scale * o->weights[a * clusters + b];
      c->tension[a] += t;
      for (int64_t k = 0; k < columns; k++)
        c->towards[a * columns + k] += t * o->centres[b * columns + k];
    }
  return NULL;
}

/* Row i of cluster a: psi_i - psi_a into `psi`, and r_i = g_i - alpha_i (D_a psi_i - sum_b t_ab
 * psi_b), since the alpha-mean of psi_j over the rows of b is psi_b. Returns ||r_i||; r is added to
 * `net`. */
static double balance(checked *c, int64_t i, double *psi, double *net) {
  const int64_t columns = c->columns, a = c->claimed->cluster[i];
  const double *g = c->g + i * columns;
  double sum = 0, spread = 0;
  if (a < 0 || c->norm[i] == 0) {
    for (int64_t k = 0; k < columns; k++) net[k] += g[k];
    return c->norm[i];
  }
  const double alpha = c->norm[i] / c->mass[a];
  for (int64_t k = 0; k < columns; k++) {
    psi[k] = (g[k] / alpha - c->sum[a * columns + k]) / c->tension[a];
    const double at = c->claimed->centres[a * columns + k] + psi[k];
    const double r = g[k] - alpha * (c->tension[a] * at - c->towards[a * columns + k]);
    net[k] += r;
    sum += r * r;
    spread += psi[k] * psi[k];
  }
  c->spread[a] += alpha * spread;
  c->squares[a] += alpha * alpha;
  return sqrt(sum);
}

/* By Cauchy and Schwarz, over the rows i of a and j of b,
 *   sum t alpha_i alpha_j ||psi_i - psi_j|| <= t sqrt(||psi_a - psi_b||^2 + sigma_a^2 + sigma_b^2),
 * and over the pairs i < j of one cluster t sigma sqrt((1 - sum alpha^2) / 2). */
static double cost(const checked *c) {
  const pg_oracle *o = c->claimed;
  const int64_t columns = c->columns, clusters = c->clusters;
  double all = 0;
  for (int64_t a = 0; a < clusters; a++) {
    double row = o->scale * o->weights[a * clusters + a] *
                 sqrt(c->spread[a] * fmax(0, 1 - c->squares[a]) / 2);
    for (int64_t b = 0; b < a; b++) {
      const double t = o->scale * o->weights[a * clusters + b];
      double square = c->spread[a] + c->spread[b];
      if (t == 0) continue;
      for (int64_t k = 0; k < columns; k++) {
        const double e = (double)o->centres[a * columns + k] - o->centres[b * columns + k];
        square += e * e;
      }
      row += t * sqrt(square);
    }
    all += row;
  }
  return all;
}

static int check_upper(pg_context *ctx, checked *c, pg_oracle_verdict *v) {
  const int64_t rows = c->rows, columns = c->columns, n = c->clusters;
  double *memory = calloc((size_t)(n * (4 + 2 * columns) + 2 * columns) + 1, sizeof *memory);
  double left = 0, net = 0;
  if (!memory)
    return pg_fail(ctx, PG_ENOMEM, "check_oracle: no memory for %lld clusters", (long long)n);
  double *at = memory;
  c->mass = at, at += n;
  c->tension = at, at += n;
  c->spread = at, at += n;
  c->squares = at, at += n;
  c->sum = at, at += n * columns;
  c->towards = at, at += n * columns;
  double *psi = at, *sum = at + columns;
  v->upper = NAN;
  v->residual_row = -1;
  const char *problem = read_flow(c);
  if (problem) {
    note(v, "upper bound: %s", problem);
    goto done;
  }
  for (int64_t i = 0; i < rows; i++) {
    const double r = balance(c, i, psi, sum);
    left += r;
    if (!(r <= v->residual)) v->residual = r, v->residual_row = i;
  }
  for (int64_t k = 0; k < columns; k++) net += sum[k] * sum[k];
  /* What is left over, less its mean row, has a flow of its own that costs no more than Jung's
   * radius times its row norms; the mean row is only rounding, since G and the flow sum to 0. */
  const double k = (double)pg__max(pg__min(columns, rows - 1), 1), jung = sqrt(k / (2 * (k + 1)));
  const double paid = cost(c);
  v->upper =
      (paid + jung * (left + sqrt(net))) * (1 + ALLOWED * (double)(rows + columns)) + c->common;
  v->upper_holds = c->claimed->upper >= v->upper;
  if (!v->upper_holds)
    note(
        v,
        "upper bound: %.10g is claimed, the flow proves %.10g (%.3g more); it costs %.10g, and its "
        "rows are out of balance by %.3g in all, row %lld by %.3g",
        c->claimed->upper, v->upper, v->upper - c->claimed->upper, paid, left,
        (long long)v->residual_row, v->residual);
done:
  free(memory);
  return 0;
}

int pg_oracle_check(const pg_tensor *gradient, const pg_oracle *claimed, pg_oracle_verdict *out) {
  pg_context *ctx = gradient->context;
  checked c = {.claimed = claimed, .clusters = claimed->clusters};
  int status = 0;
  *out = (pg_oracle_verdict){.residual_row = -1};
  if (gradient->dtype != PG_F32 || gradient->ndim != 2 || gradient->shape[0] != claimed->rows ||
      gradient->shape[1] != claimed->columns || claimed->rows < 1 || claimed->columns < 1)
    return pg_fail(ctx, PG_EINVAL,
                   "check_oracle: the gradient must be F32 [%lld, %lld] like the potential",
                   (long long)claimed->rows, (long long)claimed->columns);
  if (claimed->clusters < 0 || claimed->clusters > claimed->rows)
    return pg_fail(ctx, PG_EINVAL, "check_oracle: %lld clusters of %lld rows",
                   (long long)claimed->clusters, (long long)claimed->rows);
  c.rows = claimed->rows;
  c.columns = claimed->columns;
  PG_TRY(centre(gradient, &c));
  PG_TRY(check_lower(ctx, &c, out));
  PG_TRY(check_upper(ctx, &c, out));
fail:
  free(c.g);
  free(c.norm);
  return status;
}
