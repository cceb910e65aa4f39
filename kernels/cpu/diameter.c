/* The farthest pair of rows, exactly.
 *
 * Distances do not change under a common shift or (but for the factor) under scaling, so the search
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
 * fp64 and for elements of z below 2^-126, which are set to 0. So every pair whose distance reaches
 * the best found so far has d2 >= best - slack; each of those is evaluated in fp64 by direct
 * subtraction of the original rows, and the largest such value wins, the smallest pair among
 * equals. Candidates are evaluated tile by tile and never stored, so a cloud of near ties costs
 * time, not memory.
 *
 * Rows are sorted by decreasing r_i: pairs with r_i + r_j below the distance that a few farthest
 * point sweeps found are left out (d_ij <= r_i + r_j). */
#include "vector.h"
#include <cblas.h>
#include <float.h>
#include <limits.h>
#include <omp.h>
#include <stdlib.h>

#define TILE 384
#define SEEDS 8        /* rows swept at once */
#define SWEEPS 4       /* rounds of sweeps */
#define SWEEP_ROWS 512 /* smaller clouds go straight to the tiles */

typedef struct ranked {
  double n;
  int64_t row;
} ranked;

typedef struct cloud {
  const float *x; /* [rows, d] */
  int64_t rows, d;
  double scale;  /* z is this times the centred rows */
  ranked *order; /* by decreasing norm of the centred rows */
  float *z;      /* [rows, d], in that order */
  float *n;      /* |z_i|^2 rounded to fp32 */
  double *r;     /* |z_i| in fp64 */
} cloud;

/* A pair of original rows, first < second, and its squared distance. */
typedef struct pair {
  double square;
  int64_t first, second;
} pair;

static bool beats(pair a, pair b) {
  if (a.square != b.square) return a.square > b.square;
  return a.first != b.first ? a.first < b.first : a.second < b.second;
}

/* |x_i - x_j|^2 in fp64 of original rows: eight lanes, added in halves, at every CPU level. */
static pair evaluate(const cloud *c, int64_t i, int64_t j) {
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
  return (pair){lane[0], i < j ? i : j, i < j ? j : i};
}

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
  const ranked *a = left, *b = right;
  if (a->n != b->n) return a->n < b->n ? 1 : -1;
  return a->row < b->row ? -1 : a->row > b->row;
}

/* Fills order, scale, z, n and r. Returns 0 when all rows are equal. */
static int centre(pg_queue *q, cloud *c, const double *mean) {
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
    c->order[i] = (ranked){square, i};
    for (int l = 0; l < 8; l++) largest = lane[l] > largest ? lane[l] : largest;
  }
  if (largest == 0) return 0;
  int exponent;
  frexp(largest, &exponent);
  c->scale = ldexp(1.0, -exponent);
  qsort(c->order, (size_t)c->rows, sizeof *c->order, by_norm);
#pragma omp parallel for num_threads(pg_team(q, c->rows *d)) schedule(static)
  for (int64_t p = 0; p < c->rows; p++) {
    const float *row = c->x + c->order[p].row * d;
    float *z = c->z + p * d;
#pragma omp simd
    for (int64_t k = 0; k < d; k++) {
      double v = (((double)row[k] - (double)c->x[k]) - mean[k]) * c->scale;
      z[k] = fabs(v) < (double)FLT_MIN ? 0.0f : (float)v;
    }
    double square = pg_square_sum(z, d);
    c->n[p] = (float)square;
    c->r[p] = sqrt(square);
  }
  return 1;
}

/* c [m,n] = rows [i, i+m) of z times rows [j, j+n). */
static void products(const cloud *c, int64_t i, int64_t m, int64_t j, int64_t n, float *out,
                     int64_t ld) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)m, (int)n, (int)c->d, 1,
              c->z + i * c->d, (int)c->d, c->z + j * c->d, (int)c->d, 0, out, (int)ld);
}

static double slack(const cloud *c, double ri, double rj) {
  const double u = 0x1p-24;
  double steps = ((double)c->d + 4) * u;
  if (steps >= 0.5) return INFINITY; /* the bound says nothing: evaluate every pair */
  return 4 * steps / (1 - steps) * ri * rj +
         (8 * u + ((double)c->d + 64) * 0x1p-52) * (ri + rj) * (ri + rj);
}

/* From the SEEDS longest rows to the row farthest from each, then from those, and so on: a lower
 * bound that is usually the diameter itself. */
static pair sweep(pg_queue *q, const cloud *c, double *work) {
  pair best = {0, -1, -1};
  int64_t seeds[SEEDS], next[SEEDS];
  float *seed = malloc(SEEDS * (size_t)c->d * sizeof *seed);
  if (!seed) return best; /* only a start: the tiles find everything */
  for (int s = 0; s < SEEDS; s++) seeds[s] = s;
  for (int round = 0; round < SWEEPS; round++) {
    float far[SEEDS];
    for (int s = 0; s < SEEDS; s++) {
      memcpy(seed + s * c->d, c->z + seeds[s] * c->d, (size_t)c->d * sizeof *seed);
      far[s] = -1;
      next[s] = 0;
    }
#pragma omp parallel for num_threads(q->threads) schedule(dynamic)
    for (int64_t j = 0; j < c->rows; j += TILE) {
      float dot[SEEDS * TILE];
      pg_blas_on_this_thread();
      int64_t n = pg_min64(TILE, c->rows - j);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, SEEDS, (int)n, (int)c->d, 1, seed,
                  (int)c->d, c->z + j * c->d, (int)c->d, 0, dot, TILE);
#pragma omp critical(pg_diameter)
      for (int s = 0; s < SEEDS; s++)
        for (int64_t k = 0; k < n; k++) {
          float v = c->n[j + k] - 2 * dot[s * TILE + k];
          /* Equal values take the smaller row, whichever thread comes first. */
          if (v > far[s] || (v == far[s] && j + k < next[s])) far[s] = v, next[s] = j + k;
        }
    }
    for (int s = 0; s < SEEDS; s++) {
      if (next[s] == seeds[s]) continue;
      pair found = evaluate(c, c->order[seeds[s]].row, c->order[next[s]].row);
      if (beats(found, best)) best = found;
    }
    memcpy(seeds, next, sizeof seeds);
    *work += (double)SEEDS * (double)c->rows * (double)c->d;
  }
  free(seed);
  return best;
}

/* What the threads share while they search the tiles. */
typedef struct search {
  const cloud *c;
  double bound; /* r_i + r_j of a pair must reach it: from the sweeps, so it does not move */
  double best;  /* largest squared distance found by any thread, in the units of x */
} search;

static double current_best(const search *s) {
  double best;
#pragma omp atomic read
  best = s->best;
  return best;
}

static void consider(search *s, int64_t p, int64_t o, pair *mine) {
  pair found = evaluate(s->c, s->c->order[p].row, s->c->order[o].row);
  if (!beats(found, *mine)) return;
  *mine = found;
  if (found.square <= current_best(s)) return;
#pragma omp critical(pg_diameter)
  {
    if (found.square > current_best(s)) {
#pragma omp atomic write
      s->best = found.square;
    }
  }
}

/* Rows of [begin, end) whose r reaches `least`: they come first. */
static int64_t count_reaching(const cloud *c, int64_t begin, int64_t end, double least) {
  int64_t low = begin, high = end;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (c->r[middle] >= least)
      low = middle + 1;
    else
      high = middle;
  }
  return low - begin;
}

/* Rows [i, i+m) against [j, j+n), j >= i, m, n > 0; only pairs p < o. `dot` [TILE, TILE] becomes
 * the squared distances. */
static void search_tile(search *s, int64_t i, int64_t m, int64_t j, int64_t n, float *dot,
                        pair *mine) {
  const cloud *c = s->c;
  const float *nj = c->n + j;
  float top[TILE] = {0};
  double unit = c->scale * c->scale, widest = slack(c, c->r[i], c->r[j]);
  int64_t best_row = 0;
  products(c, i, m, j, n, dot, TILE);
  for (int64_t a = 0; a < m; a++) {
    float *row = dot + a * TILE, ni = c->n[i + a];
    /* On the diagonal the pairs o <= p are repeats. */
    int64_t from = j == i ? a + 1 : 0;
#pragma omp simd
    for (int64_t b = 0; b < n; b++) row[b] = PG_FMA(-2.0f, row[b], nj[b]) + ni;
    top[a] = from < n ? pg_max_run(row + from, n - from) : -INFINITY;
    if (top[a] > top[best_row]) best_row = a;
  }
  /* The most promising pair first: it raises the bar for the others. */
  double bar = current_best(s) * unit;
  if (top[best_row] > -INFINITY && (double)top[best_row] >= bar - widest) {
    const float *row = dot + best_row * TILE;
    int64_t b = j == i ? best_row + 1 : 0;
    while (b < n - 1 && row[b] != top[best_row]) b++;
    consider(s, i + best_row, j + b, mine);
  }
  for (int64_t a = 0; a < m; a++) {
    bar = current_best(s) * unit;
    if (!((double)top[a] >= bar - widest)) continue;
    for (int64_t b = j == i ? a + 1 : 0; b < n; b++) {
      double d2 = (double)dot[a * TILE + b];
      if (!(d2 >= bar - widest) || !(d2 >= bar - slack(c, c->r[i + a], c->r[j + b]))) continue;
      consider(s, i + a, j + b, mine);
      bar = current_best(s) * unit;
    }
  }
}

/* All tiles that may hold the farthest pair. Returns -1 out of memory, 1 when cancelled. */
static int search_tiles(pg_queue *q, const cloud *c, const volatile int *cancel, pair *best,
                        double *work) {
  /* A relative margin of 1e-6 on r_i + r_j covers the rounding of z and r. */
  search s = {c, sqrt(fmax(best->square, 0)) * c->scale * (1 - 1e-6), best->square};
  int64_t tiles = (c->rows + TILE - 1) / TILE;
  double total = 0;
  int failed = 0, cancelled = 0;
  pair winner = *best;
#pragma omp parallel num_threads(q->threads)
  {
    float *dot = aligned_alloc(64, TILE * TILE * sizeof *dot);
    pair mine = {-1, INT64_MAX, INT64_MAX};
    double done = 0;
    pg_blas_on_this_thread();
    if (!dot) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic) nowait
    for (int64_t t = 0; t < tiles * tiles; t++) {
      int64_t i = t / tiles * TILE, j = t % tiles * TILE;
      if (j < i || !dot) continue;
      if (cancel && *cancel) {
#pragma omp atomic write
        cancelled = 1;
        continue;
      }
      int64_t m = count_reaching(c, i, pg_min64(c->rows, i + TILE), s.bound - c->r[j]);
      int64_t n = count_reaching(c, j, pg_min64(c->rows, j + TILE), s.bound - c->r[i]);
      if (m == 0 || n == 0) continue;
      search_tile(&s, i, m, j, n, dot, &mine);
      done += (double)m * (double)n * (double)c->d;
    }
    free(dot);
#pragma omp critical(pg_diameter)
    {
      if (beats(mine, winner)) winner = mine;
      total += done;
    }
  }
  *best = winner;
  *work += total;
  return failed ? -1 : cancelled;
}

/* A tile of distances, 0.6 MB a thread, is not counted. */
int64_t PG_CPU(diameter_bytes)(int64_t rows, int64_t columns) {
  const cloud *c = NULL;
  return rows * (columns * (int64_t)sizeof *c->z +
                 (int64_t)(sizeof *c->order + sizeof *c->n + sizeof *c->r));
}

int PG_CPU(diameter)(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                     const volatile int *cancel, pg_farthest *out) {
  int status = -1;
  cloud c = {.x = x, .rows = rows, .d = columns};
  pg_farthest result = {0, -1, -1, -1, 0};
  double *mean = NULL;
  pg_float_mode mode = pg_float_mode_set(false);
  if (columns > INT_MAX) {
    pg_refuse(q, "rows of %lld elements; at most %d", (long long)columns, INT_MAX);
    goto fail;
  }
  result.bad_row = find_bad_row(q, x, rows, columns);
  if (result.bad_row >= 0 || rows < 2 || columns < 1) goto done;

  size_t elements = (size_t)rows * (size_t)columns;
  mean = malloc((size_t)columns * sizeof *mean);
  c.order = malloc((size_t)rows * sizeof *c.order);
  c.z = elements <= SIZE_MAX / sizeof *c.z ? malloc(elements * sizeof *c.z) : NULL;
  c.n = malloc((size_t)rows * sizeof *c.n);
  c.r = malloc((size_t)rows * sizeof *c.r);
  if (!mean || !c.order || !c.z || !c.n || !c.r) {
    pg_refuse(q, "no memory for a centred copy of [%lld, %lld]", (long long)rows,
              (long long)columns);
    goto fail;
  }
  pg_note_held(q, (size_t)PG_CPU(diameter_bytes)(rows, columns));
  if (PG_CPU(column_means)(q, x, rows, columns, x, mean) < 0) goto fail;
  if (!centre(q, &c, mean)) goto done;
  pair best = {0, -1, -1};
  if (rows >= SWEEP_ROWS) best = sweep(q, &c, &result.multiply_adds);
  int searched = search_tiles(q, &c, cancel, &best, &result.multiply_adds);
  if (searched) {
    pg_refuse(q, searched < 0 ? "no memory for a tile of distances" : "canceled");
    goto fail;
  }
  if (best.square > 0) {
    result.value = sqrt(best.square);
    result.first = best.first;
    result.second = best.second;
  }
done:
  *out = result;
  status = 0;
fail:
  free(mean);
  free(c.order);
  free(c.z);
  free(c.n);
  free(c.r);
  pg_float_mode_restore(mode);
  return status;
}
