/* All pairs of a cloud, panel by panel, for the farthest or the nearest one: see cloud.h. */
#include "cloud.h"

#define TILE 24 /* panels of one side of what a thread takes at once: at d = 512 they fit in L2 */
#define FEW 8   /* candidates of a block that cost less by themselves than its d dimensions */

/* What the threads share. Keys are sign * squared distance: the largest one is sought. */
typedef struct search {
  const pg_cloud *c;
  const pg_sieve *sieve;
  double sign;
  double bound; /* that r_i + r_j must reach, or |r_i - r_j| not exceed; it does not move */
  double floor; /* the start's key in the units of z; nor does this, so that what is left out does
                   not depend on who finds what first */
  double best;  /* largest key found by any thread, in the units of x */
} search;

/* What a thread has. */
typedef struct part {
  pg_pair best;
  double work;
  float key[PG_BLOCK];
  float left[PG_SIEVE_LEVELS][(PG_SIEVE_MOST + 1) * PG_PANEL]; /* the sieve's panel i */
} part;

static double current_best(const search *s) {
  double best;
#pragma omp atomic read
  best = s->best;
  return best;
}

static void consider(search *s, int64_t p, int64_t o, part *mine) {
  const pg_pair found = pg_cloud_evaluate(s->c, s->c->order[p].row, s->c->order[o].row);
  const double key = s->sign * found.square;
  if (!pg_pair_beats(found, mine->best, s->sign)) return;
  mine->best = found;
  if (key <= current_best(s)) return;
#pragma omp critical(pg_pairs)
  {
    if (key > current_best(s)) {
#pragma omp atomic write
      s->best = key;
    }
  }
}

/* The candidates among the keys of panels i and j, the largest first: it raises the bar for the
 * others. */
static void take(search *s, int64_t i, int64_t j, double widest, float largest, part *mine) {
  const pg_cloud *c = s->c;
  const double unit = c->scale * c->scale;
  int first = 0;
  while (mine->key[first] != largest) first++;
  consider(s, i * PG_PANEL + first / PG_PANEL, j * PG_PANEL + first % PG_PANEL, mine);
  for (int e = 0; e < PG_BLOCK; e++) {
    const int64_t p = i * PG_PANEL + e / PG_PANEL, o = j * PG_PANEL + e % PG_PANEL;
    const double d2 = (double)mine->key[e], bar = current_best(s) * unit;
    if (e != first && d2 > -INFINITY && d2 >= bar - widest &&
        d2 >= bar - pg_cloud_slack(c->d, c->r[p], c->r[o]))
      consider(s, p, o, mine);
  }
}

/* Whether the sieve leaves nothing of panels i and j, or so little that it is done here. */
static bool sieved(search *s, int64_t i, int64_t j, double widest, part *mine) {
  const double least = s->floor - widest;
  for (int l = 0; l < s->sieve->levels; l++) {
    const int64_t steps = s->sieve->steps[l];
    pg_panel_products(mine->left[l], s->sieve->w[l] + j * steps * PG_PANEL, steps, mine->key);
    mine->work += PG_BLOCK * (double)steps;
    if (!((double)pg_panel_keys(s->c, i, j, 1, mine->key) >= least)) return true;
  }
  if (s->sieve->levels == 0) return false;
  int few[FEW] = {0}, count = 0;
  for (int e = 0; e < PG_BLOCK; e++)
    if ((double)mine->key[e] >= least) {
      if (count == FEW) return false;
      few[count++] = e;
    }
  for (int f = 0; f < count; f++)
    consider(s, i * PG_PANEL + few[f] / PG_PANEL, j * PG_PANEL + few[f] % PG_PANEL, mine);
  mine->work += count * (double)s->c->d;
  return true;
}

/* Panel i against panels [from, end), from >= i. */
static void search_panels(search *s, int64_t i, int64_t from, int64_t end, part *mine) {
  const pg_cloud *c = s->c;
  const int64_t d = c->d, top = i * PG_PANEL;
  for (int l = 0; l < s->sieve->levels && i < s->sieve->panels; l++) {
    const int64_t size = s->sieve->steps[l] * PG_PANEL;
    memcpy(mine->left[l], s->sieve->w[l] + i * size, (size_t)size * sizeof *mine->left[l]);
    for (int64_t e = size - PG_PANEL; e < size; e++) mine->left[l][e] = -mine->left[l][e];
  }
  for (int64_t j = from; j < end; j++) {
    const double rj = c->r[j * PG_PANEL], widest = pg_cloud_slack(d, c->r[top], rj);
    /* Norms decrease: nor can the panels that follow. */
    if (s->sign > 0 ? c->r[top] + rj < s->bound : c->r[top + PG_PANEL - 1] - rj > s->bound) return;
    if (sieved(s, i, j, widest, mine)) continue;
    pg_panel_products(c->z + top * d, c->z + j * PG_PANEL * d, d, mine->key);
    mine->work += PG_BLOCK * (double)d;
    const float largest = pg_panel_keys(c, i, j, (float)s->sign, mine->key);
    if (largest > -INFINITY && (double)largest >= current_best(s) * c->scale * c->scale - widest)
      take(s, i, j, widest, largest, mine);
  }
}

/* At least as good as *best. */
static int search_all(pg_queue *q, search *s, const volatile int *cancel, pg_pair *best,
                      double *work) {
  const int64_t panels = s->c->panels, tiles = (panels + TILE - 1) / TILE;
  double total = 0;
  int cancelled = 0;
  pg_pair winner = *best;
#pragma omp parallel num_threads(q->threads)
  {
    part mine = {.best = {s->sign > 0 ? -1 : INFINITY, INT64_MAX, INT64_MAX}};
#pragma omp for schedule(dynamic) nowait
    for (int64_t t = 0; t < tiles * tiles; t++) {
      const int64_t begin = t / tiles * TILE, other = t % tiles * TILE;
      if (other < begin) continue;
      if (cancel && *cancel) {
#pragma omp atomic write
        cancelled = 1;
        continue;
      }
      for (int64_t i = begin; i < pg_min64(begin + TILE, panels); i++)
        search_panels(s, i, pg_max64(i, other), pg_min64(other + TILE, panels), &mine);
    }
#pragma omp critical(pg_pairs)
    {
      if (pg_pair_beats(mine.best, winner, s->sign)) winner = mine.best;
      total += mine.work;
    }
  }
  *best = winner;
  *work += total;
  return cancelled ? pg_refuse(q, "canceled") : 0;
}

int PG_CPU(search_pairs)(pg_queue *q, const float *x, int64_t rows, int64_t columns, double sign,
                         pg_start_fn *start, const volatile int *cancel, pg_farthest *out) {
  int status = -1;
  pg_cloud c;
  pg_sieve sieve = {0};
  pg_pair best = {0, -1, -1};
  pg_farthest result = {.first = -1, .second = -1, .bad_row = -1};
  pg_float_mode mode = pg_float_mode_set(false);
  if (PG_CPU(cloud_new)(q, x, rows, columns, sign, &c, &result.bad_row) < 0) goto fail;
  if (c.scale > 0) {
    if (start(q, &c, &best, &result.multiply_adds) < 0) goto fail;
    if (sign > 0) PG_CPU(sieve_new)(q, &c, &best, &sieve, &result.multiply_adds);
    const double unit = c.scale * c.scale, longest = 2 * c.r[0];
    search s = {.c = &c,
                .sieve = &sieve,
                .sign = sign,
                .bound = sign > 0 ? pg_cloud_reach(&c, best.square)
                                  : sqrt(best.square) * c.scale + 1e-6 * longest,
                .floor = best.square * unit,
                .best = sign * best.square};
    const bool alike = sign < 0 && best.square == 0; /* nothing is nearer */
    if (!alike && search_all(q, &s, cancel, &best, &result.multiply_adds) < 0) goto fail;
    result.radius = c.radius;
    result.value = sqrt(best.square);
    result.first = best.first;
    result.second = best.second;
  } else if (sign < 0 && result.bad_row < 0 && rows >= 2) {
    result.first = 0; /* all rows are equal: the first two are the nearest, and none is far */
    result.second = 1;
  }
  *out = result;
  status = 0;
fail:
  PG_CPU(sieve_free)(&sieve);
  PG_CPU(cloud_free)(&c);
  pg_float_mode_restore(mode);
  return status;
}
