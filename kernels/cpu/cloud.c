/* The rows of a matrix around their mean: see cloud.h. */
#include "cloud.h"
#include <float.h>

/* The first row with an element that is not finite, or -1. */
static int64_t find_bad_row(const pg_queue *q, const float *x, int64_t rows, int64_t d) {
  int64_t bad = INT64_MAX;
#pragma omp parallel for num_threads(pg_team(q, rows *d)) reduction(min : bad)
  for (int64_t i = 0; i < rows; i++) {
    if (isnan(pg_not_finite(x + i * d, d))) bad = pg_min64(bad, i);
  }
  return bad == INT64_MAX ? -1 : bad;
}

static int by_norm(const void *left, const void *right) {
  const pg_ranked *a = left, *b = right;
  if (a->n != b->n) return a->n < b->n ? 1 : -1;
  return a->row < b->row ? -1 : a->row > b->row;
}

/* Fills order, radius, scale, z, n and r. */
static void centre(pg_queue *q, pg_cloud *c, double sign, const double *mean) {
  int64_t d = c->d;
  double largest = 0;
#pragma omp parallel for num_threads(pg_team(q, c->rows *d)) reduction(max : largest)
  for (int64_t i = 0; i < c->rows; i++) {
    double square = 0, lane[8] = {0};
    for (int64_t k = 0; k < d; k++) {
      double v = ((double)c->x[i * d + k] - (double)c->x[k]) - mean[k];
      square += v * v;
      lane[k % 8] = fabs(v) > lane[k % 8] ? fabs(v) : lane[k % 8];
    }
    c->order[i] = (pg_ranked){square, i};
    for (int l = 0; l < 8; l++) largest = lane[l] > largest ? lane[l] : largest;
  }
  if (largest == 0) return;
  int exponent;
  frexp(largest, &exponent);
  c->scale = ldexp(1.0, -exponent);
  qsort(c->order, (size_t)c->rows, sizeof *c->order, by_norm);
  c->radius = sqrt(c->order[0].n);
#pragma omp parallel for num_threads(pg_team(q, c->rows *d)) schedule(static)
  for (int64_t p = 0; p < c->panels * PG_PANEL; p++) {
    float *z = c->z + p / PG_PANEL * PG_PANEL * d + p % PG_PANEL;
    const float *row = c->x + c->order[pg_min64(p, c->rows - 1)].row * d;
    double lane[8] = {0};
    for (int64_t k = 0; k < d; k++) {
      const double v = (((double)row[k] - (double)c->x[k]) - mean[k]) * c->scale;
      const float kept = fabs(v) < (double)FLT_MIN ? 0.0f : (float)v;
      z[k * PG_PANEL] = p < c->rows ? kept : 0;
      lane[k % 8] += (double)kept * (double)kept;
    }
    for (int width = 4; width; width /= 2)
      for (int l = 0; l < width; l++) lane[l] += lane[l + width];
    c->n[p] = p < c->rows ? (float)lane[0] : (float)(-sign * INFINITY);
    c->r[p] = sqrt(lane[0]);
  }
}

/* Rows of whole panels. */
static int64_t filled(int64_t rows) {
  return (rows + PG_PANEL - 1) / PG_PANEL * PG_PANEL;
}

int64_t PG_CPU(cloud_bytes)(int64_t rows, int64_t columns) {
  const pg_cloud *c = NULL;
  return rows * (int64_t)sizeof *c->order +
         filled(rows) * (columns * (int64_t)sizeof *c->z + (int64_t)(sizeof *c->n + sizeof *c->r));
}

int PG_CPU(cloud_new)(pg_queue *q, const float *x, int64_t rows, int64_t columns, double sign,
                      pg_cloud *c, int64_t *bad_row) {
  const size_t whole = (size_t)filled(rows), elements = whole * (size_t)columns;
  double *mean = NULL;
  int status = -1;
  *c = (pg_cloud){.x = x, .rows = rows, .d = columns, .panels = (int64_t)whole / PG_PANEL};
  *bad_row = -1;
  if (columns > INT_MAX)
    return pg_refuse(q, "rows of %lld elements; at most %d", (long long)columns, INT_MAX);
  *bad_row = find_bad_row(q, x, rows, columns);
  if (*bad_row >= 0 || rows < 2 || columns < 1) return 0;
  mean = malloc((size_t)columns * sizeof *mean);
  c->order = malloc((size_t)rows * sizeof *c->order);
  c->z = elements <= SIZE_MAX / sizeof *c->z ? aligned_alloc(64, elements * sizeof *c->z) : NULL;
  c->n = malloc(whole * sizeof *c->n);
  c->r = malloc(whole * sizeof *c->r);
  if (!mean || !c->order || !c->z || !c->n || !c->r) {
    pg_refuse(q, "no memory for a centred copy of [%lld, %lld]", (long long)rows,
              (long long)columns);
    goto fail;
  }
  pg_note_held(q, (size_t)PG_CPU(cloud_bytes)(rows, columns));
  if (PG_CPU(column_means)(q, x, rows, columns, x, mean) < 0) goto fail;
  centre(q, c, sign, mean);
  status = 0;
fail:
  free(mean);
  return status;
}

void PG_CPU(cloud_free)(pg_cloud *c) {
  free(c->order);
  free(c->z);
  free(c->n);
  free(c->r);
}
