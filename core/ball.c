/* The smallest ball around the rows of a matrix, with its certificate.
 *
 * R^2 = max over weights w of f(w) = sum_i w_i ||x_i - c||^2, c = sum_i w_i x_i, so every w bounds
 * R from below and the distance of the farthest row from any c bounds it from above. A few rows
 * carry the weights: each pass over all rows adds those that are farthest from the present centre,
 * and the problem on the rows taken so far is solved by moving weight between two rows at a time,
 * with their Gram matrix (sequential minimal optimisation). All in fp64 on the rows as they are. */
#include "finite.h"
#include "internal.h"
#include "rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ADDED 24       /* rows taken in a pass, at most */
#define MOST_ROWS 4096 /* that carry weights */
#define MOVES 2000     /* of weight, for each row taken, in one solution */

typedef struct ball {
  pg_context *ctx;
  const float *x; /* host copy, [rows, d] */
  int64_t rows, d;
  double *distance; /* [rows] from the centre, squared */
  double *centre;
  int64_t taken, capacity;
  int64_t *row;
  double *weight, *norm, *slope; /* of the rows taken: |y|^2, and slope_i = sum_j w_j y_i.y_j */
  double *gram;                  /* [capacity, capacity] of y = x - x_0 */
} ball;

/* |x_i - c|^2 in eight lanes. */
static double square_from(const ball *b, int64_t i, const double *c) {
  const float *x = b->x + i * b->d;
  double lane[8] = {0}, sum = 0;
  int64_t k = 0;
  for (; k + 8 <= b->d; k += 8)
    for (int l = 0; l < 8; l++) {
      const double v = (double)x[k + l] - c[k + l];
      lane[l] += v * v;
    }
  for (; k < b->d; k++) {
    const double v = (double)x[k] - c[k];
    lane[k % 8] += v * v;
  }
  for (int l = 0; l < 8; l++) sum += lane[l];
  return sum;
}

static double dot(const ball *b, int64_t i, int64_t j) {
  const float *x = b->x + i * b->d, *y = b->x + j * b->d;
  double lane[8] = {0}, sum = 0;
  for (int64_t k = 0; k < b->d; k++)
    lane[k % 8] += ((double)x[k] - (double)b->x[k]) * ((double)y[k] - (double)b->x[k]);
  for (int l = 0; l < 8; l++) sum += lane[l];
  return sum;
}

static int grow(ball *b) {
  const int64_t capacity = b->capacity ? 2 * b->capacity : 128;
  double *gram = malloc((size_t)(capacity * capacity) * sizeof *gram);
  if (!gram) return pg_fail(b->ctx, PG_ENOMEM, "no memory for %lld rows", (long long)capacity);
  for (int64_t i = 0; i < b->taken; i++)
    memcpy(gram + i * capacity, b->gram + i * b->capacity, (size_t)b->taken * sizeof *gram);
  free(b->gram);
  b->gram = gram;
  b->capacity = capacity;
  return 0;
}

static int take(ball *b, int64_t row) {
  const int64_t k = b->taken;
  int status = 0;
  if (k == b->capacity) PG_TRY(grow(b));
  b->row[k] = row;
  b->weight[k] = 0;
  b->slope[k] = 0;
  b->taken = k + 1;
  for (int64_t i = 0; i <= k; i++) {
    const double product = dot(b, row, b->row[i]);
    b->gram[k * b->capacity + i] = b->gram[i * b->capacity + k] = product;
    b->slope[k] += b->weight[i] * product;
  }
  b->norm[k] = b->gram[k * b->capacity + k];
fail:
  return status;
}

/* Weights on the rows taken such that no one of them is farther than (1 + gap) f in squares, or
 * what MOVES give. */
static void solve(ball *b, double gap) {
  for (int64_t move = 0; move < MOVES * b->taken; move++) {
    int64_t up = -1, down = -1;
    double high = -INFINITY, low = INFINITY, mean = 0, square = 0;
    for (int64_t i = 0; i < b->taken; i++) {
      const double gain = b->norm[i] - 2 * b->slope[i];
      mean += b->weight[i] * b->norm[i];
      square += b->weight[i] * b->slope[i];
      if (gain > high) high = gain, up = i;
      if (b->weight[i] > 0 && gain < low) low = gain, down = i;
    }
    if (up == down || high + square - (mean - square) <= gap * (mean - square)) return;
    const double *a = b->gram + up * b->capacity, *z = b->gram + down * b->capacity;
    const double between = a[up] + z[down] - 2 * a[down];
    double step = between > 0 ? (high - low) / (2 * between) : b->weight[down];
    if (step >= b->weight[down]) {
      step = b->weight[down];
      b->weight[down] = 0;
    } else {
      b->weight[down] -= step;
    }
    b->weight[up] += step;
    for (int64_t i = 0; i < b->taken; i++) b->slope[i] += step * (a[i] - z[i]);
  }
}

/* centre and *lower from the weights, which get the sum 1 exactly enough: f is evaluated with them.
 */
static void evaluate(ball *b, double *lower) {
  double sum = 0, f = 0;
  for (int64_t i = 0; i < b->taken; i++) sum += b->weight[i];
  for (int64_t k = 0; k < b->d; k++) b->centre[k] = 0;
  for (int64_t i = 0; i < b->taken; i++) {
    const float *x = b->x + b->row[i] * b->d;
    b->weight[i] /= sum;
    if (b->weight[i] == 0) continue;
    for (int64_t k = 0; k < b->d; k++)
      b->centre[k] += b->weight[i] * ((double)x[k] - (double)b->x[k]);
  }
  for (int64_t k = 0; k < b->d; k++) b->centre[k] += (double)b->x[k];
  for (int64_t i = 0; i < b->taken; i++)
    if (b->weight[i] > 0) f += b->weight[i] * square_from(b, b->row[i], b->centre);
  *lower = sqrt(f);
}

/* Squared distances of all rows from the centre; the largest one. */
static double survey(ball *b) {
  double most = 0;
  for (int64_t i = 0; i < b->rows; i++) {
    b->distance[i] = square_from(b, i, b->centre);
    most = fmax(most, b->distance[i]);
  }
  return most;
}

/* Take the farthest rows that are not taken; *added: how many. Those taken get distance -1. */
static int take_farthest(ball *b, double least, int64_t *added) {
  int status = 0;
  *added = 0;
  for (int64_t i = 0; i < b->taken; i++) b->distance[b->row[i]] = -1;
  while (*added < ADDED && b->taken < MOST_ROWS) {
    int64_t best = -1;
    double far = least;
    for (int64_t i = 0; i < b->rows; i++)
      if (b->distance[i] > far) far = b->distance[i], best = i;
    if (best < 0) break;
    PG_TRY(take(b, best));
    b->distance[best] = -1;
    (*added)++;
  }
fail:
  return status;
}

static int search(ball *b, double gap, pg_ball *out) {
  /* Sums of d + taken terms, all of one sign, and a centre rounded to fp64. */
  const double rounding = (double)(b->d + MOST_ROWS) * 0x1p-52;
  int64_t added;
  double before = -1;
  int status = 0;
  out->upper = INFINITY;
  for (int64_t k = 0; k < b->d; k++) b->centre[k] = (double)b->x[k];
  PG_TRY(take(b, 0));
  b->weight[0] = 1;
  for (;;) {
    double lower;
    if (pg_context_cancelled(b->ctx))
      PG_TRY(pg_fail(b->ctx, PG_ECANCELED, "the covering radius was cancelled"));
    evaluate(b, &lower);
    const double most = survey(b), upper = sqrt(most);
    out->passes++;
    out->lower = lower * (1 - rounding);
    if (upper * (1 + rounding) < out->upper) {
      out->upper = upper * (1 + rounding);
      memcpy(out->centre, b->centre, (size_t)b->d * sizeof *b->centre);
    }
    if (out->upper - out->lower <= gap * out->upper) break;
    PG_TRY(take_farthest(b, lower * lower * (1 + gap / 8), &added));
    if (added == 0 && lower <= before) break;
    before = lower;
    solve(b, gap / 2);
  }
fail:
  return status;
}

void pg_ball_free(pg_ball *ball) {
  if (!ball) return;
  free(ball->centre);
  free(ball->rows);
  free(ball->weights);
  *ball = (pg_ball){0};
}

int pg_rows_ball(const pg_tensor *matrix, double gap, pg_ball *out) {
  pg_context *ctx = matrix->context;
  ball b = {.ctx = ctx};
  float *x = NULL;
  const double start = pg__now();
  int status;
  *out = (pg_ball){0};
  PG_TRY(pg__check_cloud(matrix, 1, "radius"));
  PG_TRY(pg__check_finite(matrix, "radius"));
  b.rows = matrix->shape[0];
  b.d = matrix->shape[1];
  x = malloc((size_t)(b.rows * b.d) * sizeof *x);
  b.x = x;
  b.distance = malloc((size_t)b.rows * sizeof *b.distance);
  b.centre = malloc((size_t)b.d * sizeof *b.centre);
  b.row = malloc(MOST_ROWS * sizeof *b.row);
  b.weight = malloc(MOST_ROWS * sizeof *b.weight);
  b.norm = malloc(MOST_ROWS * sizeof *b.norm);
  b.slope = malloc(MOST_ROWS * sizeof *b.slope);
  out->centre = malloc((size_t)b.d * sizeof *out->centre);
  if (!x || !b.distance || !b.centre || !b.row || !b.weight || !b.norm || !b.slope || !out->centre)
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for a copy of [%lld, %lld]", (long long)b.rows,
                   (long long)b.d));
  PG_TRY(pg_tensor_read(matrix, x));
  PG_TRY(search(&b, gap, out));
  out->rows = malloc((size_t)b.taken * sizeof *out->rows);
  out->weights = malloc((size_t)b.taken * sizeof *out->weights);
  if (!out->rows || !out->weights)
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for %lld weights", (long long)b.taken));
  for (int64_t i = 0; i < b.taken; i++) {
    if (b.weight[i] == 0) continue;
    out->rows[out->count] = b.row[i];
    out->weights[out->count++] = b.weight[i];
  }
  out->seconds = pg__now() - start;
fail:
  free(x);
  free(b.distance);
  free(b.centre);
  free(b.row);
  free(b.weight);
  free(b.norm);
  free(b.slope);
  free(b.gram);
  if (status < 0) pg_ball_free(out);
  return status;
}
