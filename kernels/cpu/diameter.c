/* The farthest pair of rows, exactly: cloud.h says what is computed and with which error bound, and
 * so why no pair that could win is missed. A few farthest point sweeps come first: what they find
 * leaves pairs out by their norms (d_ij <= r_i + r_j) and by the sieve. */
#include "cloud.h"

#define SEEDS PG_PANEL     /* rows swept at once, at most */
#define ROUNDS 4           /* of sweeps, at most */
#define ROWS_PER_SWEEP 600 /* each is 2 in `rows` of all pairs: all are 1 in 300 */
#define RUN 24             /* panels that a thread takes at once */

/* The row farthest from each of `count` rows, `seed` [d, PG_PANEL]. */
static void farthest_from(pg_queue *q, const pg_cloud *c, int count, const float *seed,
                          int64_t *next) {
  float far[SEEDS];
  for (int s = 0; s < count; s++) far[s] = -1, next[s] = 0;
#pragma omp parallel for num_threads(q->threads) schedule(dynamic)
  for (int64_t begin = 0; begin < c->panels; begin += RUN) {
    float dot[PG_BLOCK], most[SEEDS];
    int64_t at[SEEDS];
    for (int s = 0; s < count; s++) most[s] = -1, at[s] = 0;
    for (int64_t j = begin; j < pg_min64(begin + RUN, c->panels); j++) {
      pg_small_product(count, PG_PANEL, c->d, seed, 1, PG_PANEL, c->z + j * c->d * PG_PANEL,
                       PG_PANEL, dot, PG_PANEL, false);
      for (int s = 0; s < count; s++)
        for (int64_t k = 0; k < PG_PANEL; k++) {
          const float v = c->n[j * PG_PANEL + k] - 2 * dot[s * PG_PANEL + k];
          if (v > most[s]) most[s] = v, at[s] = j * PG_PANEL + k;
        }
    }
#pragma omp critical(pg_sweep)
    for (int s = 0; s < count; s++) {
      /* Equal values take the smaller row, whichever thread comes first. */
      if (most[s] > far[s] || (most[s] == far[s] && at[s] < next[s]))
        far[s] = most[s], next[s] = at[s];
    }
  }
}

/* From the longest rows to the row farthest from each, then from those, and so on: a lower bound
 * that is usually the diameter itself. */
static int sweep(pg_queue *q, const pg_cloud *c, pg_pair *best, double *work) {
  const int64_t sweeps = c->rows / ROWS_PER_SWEEP;
  const int rounds = (int)pg_min64(ROUNDS, sweeps);
  const int count = rounds ? (int)pg_min64(SEEDS, sweeps / rounds) : 0;
  int64_t seeds[SEEDS], next[SEEDS];
  float *seed = count > 0 ? calloc(PG_PANEL * (size_t)c->d, sizeof *seed) : NULL;
  *best = (pg_pair){0, -1, -1};
  if (!seed) return 0; /* only a start: the search finds everything */
  for (int s = 0; s < count; s++) seeds[s] = s;
  for (int round = 0; round < rounds; round++) {
    for (int s = 0; s < count; s++) {
      const float *z = c->z + seeds[s] / PG_PANEL * PG_PANEL * c->d + seeds[s] % PG_PANEL;
      for (int64_t k = 0; k < c->d; k++) seed[k * PG_PANEL + s] = z[k * PG_PANEL];
    }
    farthest_from(q, c, count, seed, next);
    for (int s = 0; s < count; s++) {
      if (next[s] == seeds[s]) continue;
      const pg_pair found = pg_cloud_evaluate(c, c->order[seeds[s]].row, c->order[next[s]].row);
      if (pg_pair_beats(found, *best, 1)) *best = found;
    }
    memcpy(seeds, next, sizeof seeds);
    *work += (double)count * (double)c->rows * (double)c->d;
  }
  free(seed);
  return 0;
}

int64_t PG_CPU(diameter_bytes)(int64_t rows, int64_t columns) {
  return PG_CPU(cloud_bytes)(rows, columns) + PG_CPU(sieve_bytes)(rows, columns);
}

int PG_CPU(diameter)(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                     const volatile int *cancel, pg_farthest *out) {
  return PG_CPU(search_pairs)(q, x, rows, columns, 1, sweep, cancel, out);
}
