/* All pairs of a cloud, tile by tile, for the farthest or the nearest one: see cloud.h. */
#include "cloud.h"

#define TILE PG_CLOUD_TILE

/* What the threads share. Keys are sign * squared distance: the largest one is sought. */
typedef struct search {
  const pg_cloud *c;
  double sign;
  double bound; /* that r_i + r_j must reach, or |r_i - r_j| not exceed; it does not move */
  double best;  /* largest key found by any thread, in the units of x */
} search;

static double current_best(const search *s) {
  double best;
#pragma omp atomic read
  best = s->best;
  return best;
}

static void consider(search *s, int64_t p, int64_t o, pg_pair *mine) {
  const pg_pair found = pg_cloud_evaluate(s->c, s->c->order[p].row, s->c->order[o].row);
  const double key = s->sign * found.square;
  if (!pg_pair_beats(found, *mine, s->sign)) return;
  *mine = found;
  if (key <= current_best(s)) return;
#pragma omp critical(pg_pairs)
  {
    if (key > current_best(s)) {
#pragma omp atomic write
      s->best = key;
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

/* How many first rows of the tiles at i and j >= i can matter. */
static void trim(const search *s, int64_t i, int64_t j, int64_t *m, int64_t *n) {
  const pg_cloud *c = s->c;
  const int64_t i_end = pg_min64(c->rows, i + TILE), j_end = pg_min64(c->rows, j + TILE);
  if (s->sign > 0) {
    *m = count_reaching(c, i, i_end, s->bound - c->r[j]);
    *n = count_reaching(c, j, j_end, s->bound - c->r[i]);
  } else {
    *m = c->r[i_end - 1] - s->bound > c->r[j] ? 0 : i_end - i;
    *n = count_reaching(c, j, j_end, c->r[i_end - 1] - s->bound);
  }
}

/* Rows [i, i+m) against [j, j+n), j >= i, m, n > 0; only pairs p < o. `key` [TILE, TILE] becomes
 * the keys of d2. */
static void search_tile(search *s, int64_t i, int64_t m, int64_t j, int64_t n, float *key,
                        pg_pair *mine) {
  const pg_cloud *c = s->c;
  const float sign = (float)s->sign, *nj = c->n + j;
  float top[TILE] = {0};
  double unit = c->scale * c->scale, widest = pg_cloud_slack(c->d, c->r[i], c->r[j]);
  int64_t best_row = 0;
  pg_cloud_products(c, i, m, j, n, key, TILE);
  for (int64_t a = 0; a < m; a++) {
    float *row = key + a * TILE, ni = sign * c->n[i + a];
    /* On the diagonal the pairs o <= p are repeats. */
    int64_t from = j == i ? a + 1 : 0;
#pragma omp simd
    for (int64_t b = 0; b < n; b++) row[b] = PG_FMA(-2.0f * sign, row[b], sign * nj[b]) + ni;
    top[a] = from < n ? pg_max_run(row + from, n - from) : -INFINITY;
    if (top[a] > top[best_row]) best_row = a;
  }
  /* The most promising pair first: it raises the bar for the others. */
  double bar = current_best(s) * unit;
  if (top[best_row] > -INFINITY && (double)top[best_row] >= bar - widest) {
    const float *row = key + best_row * TILE;
    int64_t b = j == i ? best_row + 1 : 0;
    while (b < n - 1 && row[b] != top[best_row]) b++;
    consider(s, i + best_row, j + b, mine);
  }
  for (int64_t a = 0; a < m; a++) {
    bar = current_best(s) * unit;
    if (!((double)top[a] >= bar - widest)) continue;
    for (int64_t b = j == i ? a + 1 : 0; b < n; b++) {
      double d2 = (double)key[a * TILE + b];
      if (!(d2 >= bar - widest) || !(d2 >= bar - pg_cloud_slack(c->d, c->r[i + a], c->r[j + b])))
        continue;
      consider(s, i + a, j + b, mine);
      bar = current_best(s) * unit;
    }
  }
}

int PG_CPU(search_pairs)(pg_queue *q, const pg_cloud *c, double sign, const volatile int *cancel,
                         pg_pair *best, double *work) {
  /* r is off by less than 2^-23 of itself for rounding z. Relative to r_i + r_j, or to the bound
   * that it has to reach, 1e-6 covers that. */
  const double reach = sqrt(fmax(best->square, 0)) * c->scale, longest = 2 * c->r[0];
  search s = {c, sign, sign > 0 ? reach * (1 - 1e-6) : reach + 1e-6 * longest, sign * best->square};
  const int64_t tiles = (c->rows + TILE - 1) / TILE;
  double total = 0;
  int failed = 0, cancelled = 0;
  pg_pair winner = *best;
#pragma omp parallel num_threads(q->threads)
  {
    float *key = aligned_alloc(64, TILE * TILE * sizeof *key);
    pg_pair mine = {sign > 0 ? -1 : INFINITY, INT64_MAX, INT64_MAX};
    double done = 0;
    pg_blas_on_this_thread();
    if (!key) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic) nowait
    for (int64_t t = 0; t < tiles * tiles; t++) {
      int64_t i = t / tiles * TILE, j = t % tiles * TILE, m, n;
      if (j < i || !key) continue;
      if (cancel && *cancel) {
#pragma omp atomic write
        cancelled = 1;
        continue;
      }
      trim(&s, i, j, &m, &n);
      if (m == 0 || n == 0) continue;
      search_tile(&s, i, m, j, n, key, &mine);
      done += (double)m * (double)n * (double)c->d;
    }
    free(key);
#pragma omp critical(pg_pairs)
    {
      if (pg_pair_beats(mine, winner, sign)) winner = mine;
      total += done;
    }
  }
  *best = winner;
  *work += total;
  if (failed) return pg_refuse(q, "no memory for a tile of distances");
  return cancelled ? pg_refuse(q, "canceled") : 0;
}
