/* Increment against gradient: two sweeps over both matrices in blocks of rows, on the host. */
#include "first_order.h"
#include "finite.h"
#include "geometry.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK ((int64_t)1 << 20) /* elements */

typedef struct sweep {
  int64_t rows, d;
  const pg_tensor *matrices[2]; /* G, S */
  float *block[2];
  double *means[2], *directions; /* [d]: mean rows, sum of the rows of RN(PG) */
  double squares[2], product;    /* ||.||^2, <G, S> */
  double norms, aligned;         /* sum ||(PG)_i||, <RN(PG), S> */
  int64_t directed;              /* rows of PG that are not 0 */
} sweep;

static void first_row(sweep *w, const float *g, const float *s) {
  for (int64_t j = 0; j < w->d; j++) {
    w->means[0][j] += g[j];
    w->means[1][j] += s[j];
    w->squares[0] += (double)g[j] * g[j];
    w->squares[1] += (double)s[j] * s[j];
    w->product += (double)g[j] * s[j];
  }
}

static void second_row(sweep *w, const float *g, const float *s) {
  double square = 0, product = 0;
  for (int64_t j = 0; j < w->d; j++) {
    const double x = g[j] - w->means[0][j];
    square += x * x;
    product += x * s[j];
  }
  if (square == 0) return;
  const double norm = sqrt(square);
  w->directed++;
  w->norms += norm;
  w->aligned += product / norm;
  for (int64_t j = 0; j < w->d; j++) w->directions[j] += (g[j] - w->means[0][j]) / norm;
}

static int run_sweep(sweep *w, void (*row)(sweep *, const float *, const float *)) {
  const int64_t step = pg__max(1, BLOCK / w->d);
  for (int64_t first = 0; first < w->rows; first += step) {
    const int64_t count = pg__min(step, w->rows - first);
    for (int k = 0; k < 2; k++) {
      int status = pg__read_rows(w->matrices[k], first, count, w->block[k]);
      if (status < 0) return status;
    }
    for (int64_t i = 0; i < count; i++) row(w, w->block[0] + i * w->d, w->block[1] + i * w->d);
  }
  return 0;
}

static double dot(const double *x, const double *y, int64_t n) {
  double sum = 0;
  for (int64_t j = 0; j < n; j++) sum += x[j] * y[j];
  return sum;
}

static void conclude(const sweep *w, double diameter, pg_first_order *out) {
  const double v = (double)w->rows;
  const double *g = w->means[0], *s = w->means[1];
  const double centred = w->squares[1] - v * dot(s, s, w->d);
  const double gradient = w->squares[0] - v * dot(g, g, w->d);
  const double product = w->product - v * dot(g, s, w->d);
  /* of P RN(PG): the directions' mean row is their sum over V */
  const double rownorm = (double)w->directed - dot(w->directions, w->directions, w->d) / v;
  const double aligned = w->aligned - dot(w->directions, s, w->d);
  out->gain = -w->product;
  out->row_norms = w->norms;
  out->diameter = diameter;
  out->oracle = diameter / 2 * w->norms;
  out->ratio = out->gain / out->oracle;
  out->cosine_gradient =
      centred > 0 && gradient > 0 ? -product / sqrt(centred * gradient) : (double)NAN;
  out->cosine_rownorm =
      centred > 0 && rownorm > 0 ? -aligned / sqrt(centred * rownorm) : (double)NAN;
  out->gradient_norm = sqrt(w->squares[0]);
  out->increment_norm = sqrt(w->squares[1]);
  out->common = v * sqrt(dot(g, g, w->d)) / out->gradient_norm;
}

int pg_first_order_measure(const pg_tensor *gradient, const pg_tensor *increment,
                           pg_first_order *out) {
  pg_context *ctx = gradient->context;
  sweep w = {.matrices = {gradient, increment}};
  const double start = pg__now();
  double *numbers = NULL;
  pg_diameter d;
  int status;
  for (int k = 0; k < 2; k++) {
    const pg_tensor *t = w.matrices[k];
    if (t->context != ctx || t->dtype != PG_F32 || t->ndim != 2 || t->shape[0] < 1 ||
        t->shape[1] < 1 || t->shape[0] != gradient->shape[0] || t->shape[1] != gradient->shape[1])
      return pg_fail(ctx, PG_EINVAL,
                     "a gradient and an increment must be F32 matrices [V, d] of one shape");
  }
  PG_TRY(pg__check_finite(gradient, "the gradient"));
  PG_TRY(pg__check_finite(increment, "the increment"));
  PG_TRY(pg_geometry_diameter(increment, &d));
  w.rows = gradient->shape[0];
  w.d = gradient->shape[1];
  numbers = calloc(3 * (size_t)w.d, sizeof *numbers);
  for (int k = 0; k < 2; k++) w.block[k] = malloc((size_t)pg__max(BLOCK, w.d) * sizeof *w.block[k]);
  if (!numbers || !w.block[0] || !w.block[1]) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for blocks of rows");
    goto fail;
  }
  w.means[0] = numbers, w.means[1] = numbers + w.d, w.directions = numbers + 2 * w.d;
  PG_TRY(run_sweep(&w, first_row));
  for (int64_t j = 0; j < 2 * w.d; j++) numbers[j] /= (double)w.rows;
  PG_TRY(run_sweep(&w, second_row));
  conclude(&w, d.value, out);
  out->seconds = pg__now() - start;
fail:
  free(numbers);
  free(w.block[0]);
  free(w.block[1]);
  return status;
}
