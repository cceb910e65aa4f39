/* The nearest pair of rows, exactly: cloud.h says what is computed and with which error bound.
 * Equal rows are found beforehand, by a hash: thousands of them would otherwise all be candidates.
 * The distances between rows of adjacent norms then leave tiles out (|r_i - r_j| <= d_ij). */
#include "cloud.h"

typedef struct hashed {
  uint64_t hash;
  int64_t row;
} hashed;

static int by_hash(const void *left, const void *right) {
  const hashed *a = left, *b = right;
  if (a->hash != b->hash) return a->hash < b->hash ? -1 : 1;
  return a->row < b->row ? -1 : a->row > b->row;
}

/* Equal rows have equal hashes (FNV-1a by elements); 0 and -0 are equal. */
static uint64_t hash_of(const float *x, int64_t d) {
  uint64_t hash = 14695981039346656037u;
  for (int64_t k = 0; k < d; k++) {
    const float value = x[k] + 0.0f;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    hash = (hash ^ bits) * 1099511628211u;
  }
  return hash;
}

static bool equal_rows(const pg_cloud *c, int64_t i, int64_t j) {
  const float *a = c->x + i * c->d, *b = c->x + j * c->d;
  for (int64_t k = 0; k < c->d; k++)
    if (a[k] != b[k]) return false;
  return true;
}

/* The smallest pair of equal rows; *best is left alone when there is none. -1 out of memory. */
static int find_equal(pg_queue *q, const pg_cloud *c, pg_pair *best) {
  hashed *list = malloc((size_t)c->rows * sizeof *list);
  if (!list) return pg_refuse(q, "no memory to compare %lld rows", (long long)c->rows);
#pragma omp parallel for num_threads(pg_team(q, c->rows * c->d)) schedule(static)
  for (int64_t i = 0; i < c->rows; i++) list[i] = (hashed){hash_of(c->x + i * c->d, c->d), i};
  qsort(list, (size_t)c->rows, sizeof *list, by_hash);
  for (int64_t k = 1; k < c->rows; k++)
    for (int64_t l = k - 1; l >= 0 && list[l].hash == list[k].hash; l--) {
      const pg_pair found = {0, list[l].row, list[k].row};
      if (!equal_rows(c, found.first, found.second)) continue;
      if (pg_pair_beats(found, *best, -1)) *best = found;
      break; /* the nearest one in the list: of three alike, the first two come first */
    }
  free(list);
  return 0;
}

/* The nearest of the rows that are adjacent in the order. */
static pg_pair adjacent(pg_queue *q, const pg_cloud *c) {
  pg_pair best = {INFINITY, INT64_MAX, INT64_MAX};
#pragma omp parallel num_threads(pg_team(q, c->rows * c->d))
  {
    pg_pair mine = best;
#pragma omp for schedule(static) nowait
    for (int64_t p = 1; p < c->rows; p++) {
      const pg_pair found = pg_cloud_evaluate(c, c->order[p - 1].row, c->order[p].row);
      if (pg_pair_beats(found, mine, -1)) mine = found;
    }
#pragma omp critical(pg_adjacent)
    if (pg_pair_beats(mine, best, -1)) best = mine;
  }
  return best;
}

/* Nothing is nearer than equal rows: the search then leaves out all but rows of equal norms. */
static int start(pg_queue *q, const pg_cloud *c, pg_pair *best, double *work) {
  *best = (pg_pair){INFINITY, INT64_MAX, INT64_MAX};
  if (find_equal(q, c, best) < 0) return -1;
  if (best->square == 0) return 0;
  *best = adjacent(q, c);
  *work += (double)c->rows * (double)c->d;
  return 0;
}

int PG_CPU(separation)(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                       const volatile int *cancel, pg_farthest *out) {
  return PG_CPU(search_pairs)(q, x, rows, columns, -1, start, cancel, out);
}
