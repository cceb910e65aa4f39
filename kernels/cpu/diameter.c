/* The farthest pair of rows, exactly: cloud.h says what is computed and with which error bound, and
 * so why no pair that could win is missed. A few farthest point sweeps come first: what they find
 * leaves most tiles out (d_ij <= r_i + r_j). */
#include "cloud.h"

#define TILE PG_CLOUD_TILE
#define SEEDS 8            /* rows swept at once, at most */
#define SWEEPS 4           /* rounds of sweeps */
#define ROWS_PER_SEED 1600 /* SWEEPS * rows * d are 1 in 200 of the rows^2 d / 2 of all pairs */

/* From the `count` longest rows to the row farthest from each, then from those, and so on: a lower
 * bound that is usually the diameter itself. */
static pg_pair sweep(pg_queue *q, const pg_cloud *c, int count, double *work) {
  pg_pair best = {0, -1, -1};
  int64_t seeds[SEEDS], next[SEEDS];
  float *seed = malloc(SEEDS * (size_t)c->d * sizeof *seed);
  if (!seed) return best; /* only a start: the tiles find everything */
  for (int s = 0; s < count; s++) seeds[s] = s;
  for (int round = 0; round < SWEEPS; round++) {
    float far[SEEDS];
    for (int s = 0; s < count; s++) {
      memcpy(seed + s * c->d, c->z + seeds[s] * c->d, (size_t)c->d * sizeof *seed);
      far[s] = -1;
      next[s] = 0;
    }
#pragma omp parallel for num_threads(q->threads) schedule(dynamic)
    for (int64_t j = 0; j < c->rows; j += TILE) {
      float dot[SEEDS * TILE];
      pg_blas_on_this_thread();
      int64_t n = pg_min64(TILE, c->rows - j);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, count, (int)n, (int)c->d, 1, seed,
                  (int)c->d, c->z + j * c->d, (int)c->d, 0, dot, TILE);
#pragma omp critical(pg_sweep)
      for (int s = 0; s < count; s++)
        for (int64_t k = 0; k < n; k++) {
          float v = c->n[j + k] - 2 * dot[s * TILE + k];
          /* Equal values take the smaller row, whichever thread comes first. */
          if (v > far[s] || (v == far[s] && j + k < next[s])) far[s] = v, next[s] = j + k;
        }
    }
    for (int s = 0; s < count; s++) {
      if (next[s] == seeds[s]) continue;
      pg_pair found = pg_cloud_evaluate(c, c->order[seeds[s]].row, c->order[next[s]].row);
      if (pg_pair_beats(found, best, 1)) best = found;
    }
    memcpy(seeds, next, sizeof seeds);
    *work += (double)count * (double)c->rows * (double)c->d;
  }
  free(seed);
  return best;
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
  if (c.scale > 0) {
    pg_pair best = {0, -1, -1};
    result.radius = c.radius;
    const int seeds = (int)pg_min64(SEEDS, rows / ROWS_PER_SEED);
    if (seeds > 0) best = sweep(q, &c, seeds, &result.multiply_adds);
    if (PG_CPU(search_pairs)(q, &c, 1, cancel, &best, &result.multiply_adds) < 0) goto fail;
    if (best.square > 0) {
      result.value = sqrt(best.square);
      result.first = best.first;
      result.second = best.second;
    }
  }
  *out = result;
  status = 0;
fail:
  PG_CPU(cloud_free)(&c);
  pg_float_mode_restore(mode);
  return status;
}
