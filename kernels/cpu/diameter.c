/* The farthest pair of rows, exactly: cloud.h says what is computed and with which error bound, and
 * so why no pair that could win is missed. Candidates are evaluated tile by tile and never stored,
 * so a cloud of near ties costs time, not memory.
 *
 * Rows are sorted by decreasing r_i: pairs with r_i + r_j below the distance that a few farthest
 * point sweeps found are left out (d_ij <= r_i + r_j). */
#include "cloud.h"

#define SEEDS 8        /* rows swept at once */
#define SWEEPS 4       /* rounds of sweeps */
#define SWEEP_ROWS 512 /* smaller clouds go straight to the tiles */

static bool beats(pg_pair a, pg_pair b) {
  return a.square != b.square ? a.square > b.square : pg_comes_before(a, b);
}

/* From the SEEDS longest rows to the row farthest from each, then from those, and so on: a lower
 * bound that is usually the diameter itself. */
static pg_pair sweep(pg_queue *q, const pg_cloud *c, double *work) {
  pg_pair best = {0, -1, -1};
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
    for (int64_t j = 0; j < c->rows; j += PG_CLOUD_TILE) {
      float dot[SEEDS * PG_CLOUD_TILE];
      pg_blas_on_this_thread();
      int64_t n = pg_min64(PG_CLOUD_TILE, c->rows - j);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, SEEDS, (int)n, (int)c->d, 1, seed,
                  (int)c->d, c->z + j * c->d, (int)c->d, 0, dot, PG_CLOUD_TILE);
#pragma omp critical(pg_diameter)
      for (int s = 0; s < SEEDS; s++)
        for (int64_t k = 0; k < n; k++) {
          float v = c->n[j + k] - 2 * dot[s * PG_CLOUD_TILE + k];
          /* Equal values take the smaller row, whichever thread comes first. */
          if (v > far[s] || (v == far[s] && j + k < next[s])) far[s] = v, next[s] = j + k;
        }
    }
    for (int s = 0; s < SEEDS; s++) {
      if (next[s] == seeds[s]) continue;
      pg_pair found = pg_cloud_evaluate(c, c->order[seeds[s]].row, c->order[next[s]].row);
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
  const pg_cloud *c;
  double bound; /* r_i + r_j of a pair must reach it: from the sweeps, so it does not move */
  double best;  /* largest squared distance found by any thread, in the units of x */
} search;

static double current_best(const search *s) {
  double best;
#pragma omp atomic read
  best = s->best;
  return best;
}

static void consider(search *s, int64_t p, int64_t o, pg_pair *mine) {
  pg_pair found = pg_cloud_evaluate(s->c, s->c->order[p].row, s->c->order[o].row);
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
static int64_t count_reaching(const pg_cloud *c, int64_t begin, int64_t end, double least) {
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

/* Rows [i, i+m) against [j, j+n), j >= i, m, n > 0; only pairs p < o. `dot` [PG_CLOUD_TILE,
 * PG_CLOUD_TILE] becomes the squared distances. */
static void search_tile(search *s, int64_t i, int64_t m, int64_t j, int64_t n, float *dot,
                        pg_pair *mine) {
  const pg_cloud *c = s->c;
  const float *nj = c->n + j;
  float top[PG_CLOUD_TILE] = {0};
  double unit = c->scale * c->scale, widest = pg_cloud_slack(c->d, c->r[i], c->r[j]);
  int64_t best_row = 0;
  pg_cloud_products(c, i, m, j, n, dot, PG_CLOUD_TILE);
  for (int64_t a = 0; a < m; a++) {
    float *row = dot + a * PG_CLOUD_TILE, ni = c->n[i + a];
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
    const float *row = dot + best_row * PG_CLOUD_TILE;
    int64_t b = j == i ? best_row + 1 : 0;
    while (b < n - 1 && row[b] != top[best_row]) b++;
    consider(s, i + best_row, j + b, mine);
  }
  for (int64_t a = 0; a < m; a++) {
    bar = current_best(s) * unit;
    if (!((double)top[a] >= bar - widest)) continue;
    for (int64_t b = j == i ? a + 1 : 0; b < n; b++) {
      double d2 = (double)dot[a * PG_CLOUD_TILE + b];
      if (!(d2 >= bar - widest) || !(d2 >= bar - pg_cloud_slack(c->d, c->r[i + a], c->r[j + b])))
        continue;
      consider(s, i + a, j + b, mine);
      bar = current_best(s) * unit;
    }
  }
}

/* All tiles that may hold the farthest pair. Returns -1 out of memory, 1 when cancelled. */
static int search_tiles(pg_queue *q, const pg_cloud *c, const volatile int *cancel, pg_pair *best,
                        double *work) {
  /* A relative margin of 1e-6 on r_i + r_j covers the rounding of z and r. */
  search s = {c, sqrt(fmax(best->square, 0)) * c->scale * (1 - 1e-6), best->square};
  int64_t tiles = (c->rows + PG_CLOUD_TILE - 1) / PG_CLOUD_TILE;
  double total = 0;
  int failed = 0, cancelled = 0;
  pg_pair winner = *best;
#pragma omp parallel num_threads(q->threads)
  {
    float *dot = aligned_alloc(64, PG_CLOUD_TILE * PG_CLOUD_TILE * sizeof *dot);
    pg_pair mine = {-1, INT64_MAX, INT64_MAX};
    double done = 0;
    pg_blas_on_this_thread();
    if (!dot) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic) nowait
    for (int64_t t = 0; t < tiles * tiles; t++) {
      int64_t i = t / tiles * PG_CLOUD_TILE, j = t % tiles * PG_CLOUD_TILE;
      if (j < i || !dot) continue;
      if (cancel && *cancel) {
#pragma omp atomic write
        cancelled = 1;
        continue;
      }
      int64_t m = count_reaching(c, i, pg_min64(c->rows, i + PG_CLOUD_TILE), s.bound - c->r[j]);
      int64_t n = count_reaching(c, j, pg_min64(c->rows, j + PG_CLOUD_TILE), s.bound - c->r[i]);
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
  return PG_CPU(cloud_bytes)(rows, columns);
}

int PG_CPU(diameter)(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                     const volatile int *cancel, pg_farthest *out) {
  int status = -1;
  pg_cloud c;
  pg_farthest result = {.first = -1, .second = -1, .bad_row = -1};
  pg_float_mode mode = pg_float_mode_set(false);
  if (PG_CPU(cloud_new)(q, x, rows, columns, &c, &result.bad_row) < 0) goto fail;
  if (c.scale == 0) goto done;
  pg_pair best = {0, -1, -1};
  result.radius = c.radius;
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
  PG_CPU(cloud_free)(&c);
  pg_float_mode_restore(mode);
  return status;
}
