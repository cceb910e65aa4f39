/* The farthest and the nearest pair of rows, exactly. The method, its error bound and the order of
 * sums are those of kernels/cpu/cloud.h, diameter.c and pairs.c: centred rows in fp32, sorted by
 * norm and scaled by a power of two; sweeps for a lower bound; tiles of squared distances in fp32
 * (plain multiply-adds, no TF32); pairs within the error bound of the best are evaluated in fp64 on
 * the original rows.
 *
 * Tiles run in batches. A batch whose candidates do not fit is repeated in halves, and one tile
 * always fits, so a cloud of near ties costs time, not memory. The best of a batch raises the bar
 * of the following ones; within a batch only a tile's own maximum does, so what is computed does
 * not depend on the order of blocks. */
#include "diameter.cuh"

#include <algorithm>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CAPACITY (16 * PG_TILE * PG_TILE) /* candidates, of 16 bytes */
#define MAX_BATCH 16384                   /* tiles */
#define BATCH_WORK 0x1p36 /* multiply-adds: some milliseconds, then *cancel counts */

struct ranked {
  double square;
  int row;
};

/* Device memory, of one allocation, and the host's copies. */
struct cloud {
  const float *x;
  int64_t rows, d, depth; /* depth: d rounded up to whole slices of a tile */
  float sign;             /* 1: the farthest pair is sought, -1: the nearest */
  double scale, reach;    /* reach: max |x_i - mean| */
  void *memory;
  float *z, *n, *far;
  double *r, *square, *squares;
  int *order, *seeds;
  pg_tile *tiles;
  pg_candidate *candidates;
  pg_found *found;
  ranked *ranking; /* host */
  double *radius;  /* host copy of r */
  int *host_order;
  pg_tile *batch; /* host */
};

/* A pair of original rows, first < second, and its squared distance. */
struct best_pair {
  double square;
  int64_t first, second;
};

/* Device memory of the parts of a cloud, in bytes; returns their sum. */
static size_t lay_out(size_t rows, size_t depth, size_t offsets[10]) {
  const size_t sizes[10] = {rows * depth * sizeof(float),
                            rows * sizeof(float),
                            rows * PG_SEEDS * sizeof(float),
                            rows * sizeof(double),
                            rows * sizeof(double),
                            CAPACITY * sizeof(double),
                            rows * sizeof(int),
                            PG_SEEDS * sizeof(int),
                            MAX_BATCH * sizeof(pg_tile),
                            CAPACITY * sizeof(pg_candidate)};
  size_t total = 0;
  for (int i = 0; i < 10; i++) {
    offsets[i] = total;
    total += (sizes[i] + 255) / 256 * 256;
  }
  return total;
}

static int64_t depth_of(int64_t d) {
  return pg_blocks(d, PG_TILE_DEPTH) * PG_TILE_DEPTH;
}

int64_t pg_cuda_diameter_bytes(int64_t rows, int64_t columns) {
  size_t offsets[10];
  return (int64_t)(lay_out((size_t)rows, (size_t)depth_of(columns), offsets) + sizeof(pg_found));
}

static int set_up(pg_queue *q, cloud *c) {
  const size_t rows = (size_t)c->rows;
  size_t offsets[10];
  const size_t total = lay_out(rows, (size_t)c->depth, offsets);
  void **const parts[10] = {(void **)&c->z,         (void **)&c->n,      (void **)&c->far,
                            (void **)&c->r,         (void **)&c->square, (void **)&c->squares,
                            (void **)&c->order,     (void **)&c->seeds,  (void **)&c->tiles,
                            (void **)&c->candidates};
  c->ranking = (ranked *)malloc(rows * sizeof *c->ranking);
  c->radius = (double *)malloc(rows * sizeof *c->radius);
  c->host_order = (int *)malloc(rows * sizeof *c->host_order);
  c->batch = (pg_tile *)malloc(MAX_BATCH * sizeof *c->batch);
  if (!c->ranking || !c->radius || !c->host_order || !c->batch)
    return pg_cuda_refuse(q, "no host memory to sort %lld rows", (long long)c->rows);
  if (pg_cuda_take(q, total + sizeof(pg_found), &c->memory) < 0)
    return pg_cuda_refuse(q, "no memory for a centred copy of [%lld, %lld]", (long long)c->rows,
                          (long long)c->d);
  for (int i = 0; i < 10; i++) *parts[i] = (char *)c->memory + offsets[i];
  c->found = (pg_found *)((char *)c->memory + total);
  return 0;
}

static void tear_down(pg_queue *q, cloud *c) {
  pg_cuda_release(q, c->memory);
  free(c->ranking);
  free(c->radius);
  free(c->host_order);
  free(c->batch);
}

static dim3 warp_per_row(int64_t rows) {
  return dim3((unsigned)pg_blocks(rows, PG_CUDA_BLOCK / PG_WARP));
}

/* *row = first row that is not finite, or -1. */
static int bad_row(pg_queue *q, const float *x, int64_t rows, int64_t d, int64_t *row) {
  void *scratch;
  unsigned long long bad = ULLONG_MAX;
  *row = -1;
  if (rows == 0 || d == 0) return 0;
  if (pg_cuda_scratch(q, sizeof bad, &scratch) < 0) return -1;
  PG_CUDA(q, cudaMemsetAsync(scratch, 0xff, sizeof bad, q->stream));
  PG_CUDA_LAUNCH(q, find_bad_row, warp_per_row(rows), dim3(PG_CUDA_BLOCK), 0, x, rows, d,
                 (unsigned long long *)scratch);
  if (pg_cuda_download(q, &bad, scratch, sizeof bad) < 0) return -1;
  if (bad != ULLONG_MAX) *row = (int64_t)bad;
  return 0;
}

/* Fills order, scale, z, n and r. *spread is false when all rows are equal. */
static int centre(pg_queue *q, cloud *c, bool *spread) {
  double *mean, largest;
  int exponent;
  if (pg_cuda_column_means(q, c->x, c->rows, c->d, c->x, &mean) < 0) return -1;
  PG_CUDA(q, cudaMemsetAsync(c->found, 0, sizeof *c->found, q->stream));
  PG_CUDA_LAUNCH(q, measure_rows, warp_per_row(c->rows), dim3(PG_CUDA_BLOCK), 0, c->x, c->rows,
                 c->d, (const double *)mean, c->square, &c->found->best);
  if (pg_cuda_download(q, &largest, &c->found->best, sizeof largest) < 0) return -1;
  *spread = largest > 0;
  if (!*spread) return 0;
  frexp(largest, &exponent);
  c->scale = ldexp(1.0, -exponent);
  if (pg_cuda_download(q, c->radius, c->square, (size_t)c->rows * sizeof *c->radius) < 0) return -1;
  for (int64_t i = 0; i < c->rows; i++) {
    c->ranking[i].square = c->radius[i];
    c->ranking[i].row = (int)i;
  }
  std::sort(c->ranking, c->ranking + c->rows, [](const ranked &a, const ranked &b) {
    return a.square != b.square ? a.square > b.square : a.row < b.row;
  });
  c->reach = sqrt(c->ranking[0].square);
  for (int64_t p = 0; p < c->rows; p++) c->host_order[p] = c->ranking[p].row;
  if (pg_cuda_upload(q, c->order, c->host_order, (size_t)c->rows * sizeof *c->order) < 0) return -1;
  PG_CUDA_LAUNCH(q, centre_rows, warp_per_row(c->rows), dim3(PG_CUDA_BLOCK), 0, c->x, c->rows, c->d,
                 (const double *)mean, c->scale, c->order, c->depth, c->z, c->n, c->r);
  return pg_cuda_download(q, c->radius, c->r, (size_t)c->rows * sizeof *c->radius);
}

/* Evaluates `count` candidates and takes their best pair if it is better. */
static int take_candidates(pg_queue *q, const cloud *c, int64_t count, best_pair *best) {
  pg_found found;
  best_pair mine;
  const dim3 eighths((unsigned)pg_blocks(count * 8, PG_CUDA_BLOCK));
  PG_CUDA_LAUNCH(q, evaluate, eighths, dim3(PG_CUDA_BLOCK), 0, c->x, c->d, c->order, c->candidates,
                 count, c->sign, c->squares, c->found);
  PG_CUDA_LAUNCH(q, choose_pair, dim3((unsigned)pg_blocks(count, PG_CUDA_BLOCK)),
                 dim3(PG_CUDA_BLOCK), 0, c->order, c->rows, c->candidates, count, c->sign,
                 c->squares, c->found);
  if (pg_cuda_download(q, &found, c->found, sizeof found) < 0) return -1;
  found.best = pg_key(found.best, c->sign);
  memcpy(&mine.square, &found.best, sizeof mine.square);
  mine.first = (int64_t)(found.pair / (unsigned long long)c->rows);
  mine.second = (int64_t)(found.pair % (unsigned long long)c->rows);
  const double gain = (mine.square - best->square) * (double)c->sign;
  if (gain > 0 ||
      (gain == 0 && (c->sign < 0 || mine.square > 0) &&
       (mine.first != best->first ? mine.first < best->first : mine.second < best->second)))
    *best = mine;
  return 0;
}

static int reset_found(pg_queue *q, const cloud *c) {
  PG_CUDA(q, cudaMemsetAsync(c->found, 0, 2 * sizeof c->found->count, q->stream));
  PG_CUDA(q, cudaMemsetAsync(&c->found->pair, 0xff, sizeof c->found->pair, q->stream));
  return 0;
}

/* From the PG_SEEDS longest rows to the row farthest from each, then from those, and so on: a lower
 * bound that is usually the diameter itself. */
static int sweep(pg_queue *q, const cloud *c, best_pair *best, double *work) {
  int seeds[PG_SEEDS];
  for (int s = 0; s < PG_SEEDS; s++) seeds[s] = s;
  if (pg_cuda_upload(q, c->seeds, seeds, sizeof seeds) < 0 || reset_found(q, c) < 0) return -1;
  for (int round = 0; round < PG_SWEEPS; round++) {
    PG_CUDA_LAUNCH(q, sweep_rows, warp_per_row(c->rows), dim3(PG_CUDA_BLOCK), 0, c->z, c->n,
                   c->rows, c->depth, c->seeds, c->far);
    PG_CUDA_LAUNCH(q, next_seeds, dim3(PG_SEEDS), dim3(PG_CUDA_BLOCK), 0, c->far, c->rows, c->seeds,
                   c->candidates + round * PG_SEEDS);
    *work += (double)PG_SEEDS * (double)c->rows * (double)c->d;
  }
  return take_candidates(q, c, PG_SWEEPS * PG_SEEDS, best);
}

/* Rows of the tile's side from `begin` on whose r reaches `least`: they come first. */
static int count_reaching(const cloud *c, int64_t begin, double least) {
  int64_t low = begin, high = std::min(c->rows, begin + PG_TILE);
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (c->radius[middle] >= least)
      low = middle + 1;
    else
      high = middle;
  }
  return (int)(low - begin);
}

/* Where the walk through the tiles i <= j stands. */
struct walk {
  int64_t i, j;
};

/* How many first rows of a tile can matter, and so whether it does: those whose r_i + r_j reaches
 * `bound`, or whose |r_i - r_j| does not exceed it. */
static void trim(const cloud *c, double bound, pg_tile *t) {
  const int64_t i_end = std::min(c->rows, (int64_t)t->i + PG_TILE);
  if (c->sign > 0) {
    t->m = count_reaching(c, t->i, bound - c->radius[t->j]);
    t->n = count_reaching(c, t->j, bound - c->radius[t->i]);
  } else {
    t->n = count_reaching(c, t->j, c->radius[i_end - 1] - bound);
    t->m = t->n ? (int)(i_end - t->i) : 0;
  }
}

/* Fills the batch with at most `limit` tiles that may hold a pair, and moves on behind them. */
static int64_t next_batch(const cloud *c, double bound, int64_t limit, walk *at) {
  int64_t count = 0;
  while (at->i < c->rows && count < limit) {
    pg_tile t = {(int)at->i, (int)at->j, 0, 0};
    trim(c, bound, &t);
    if (t.m && t.n) c->batch[count++] = t;
    at->j += PG_TILE;
    /* Rows get shorter: when nothing counts from here, nothing behind does. */
    if (at->j >= c->rows || !t.m || !t.n) at->i += PG_TILE, at->j = at->i;
  }
  return count;
}

/* All tiles that may hold the farthest pair. */
static int search(pg_queue *q, const cloud *c, const volatile int *cancel, best_pair *best,
                  double *work) {
  const double unit = c->scale * c->scale, tile = (double)PG_TILE * PG_TILE * (double)c->depth;
  const int64_t most = (int64_t)fmin(MAX_BATCH, fmax(1, BATCH_WORK / tile));
  int64_t limit = most, count;
  walk at = {0, 0};
  for (;;) {
    /* A margin of 1e-6 of what r_i + r_j reaches covers the rounding of z and r. */
    const double reach = sqrt(best->square) * c->scale;
    const double bound = c->sign > 0 ? reach * (1 - 1e-6) : reach + 2e-6 * c->radius[0];
    const walk begin = at;
    unsigned long long candidates;
    if (cancel && *cancel) return pg_cuda_refuse(q, "canceled");
    count = next_batch(c, bound, limit, &at);
    if (count == 0) return 0;
    if (pg_cuda_upload(q, c->tiles, c->batch, (size_t)count * sizeof *c->batch) < 0) return -1;
    if (reset_found(q, c) < 0) return -1;
    PG_CUDA_LAUNCH(q, search_tiles, dim3((unsigned)count), dim3(PG_CUDA_BLOCK), 0, c->z, c->n, c->r,
                   c->d, c->depth, c->sign, c->tiles, best->square * unit * (double)c->sign,
                   c->candidates, (int64_t)CAPACITY, c->found);
    for (int64_t t = 0; t < count; t++)
      *work += (double)c->batch[t].m * (double)c->batch[t].n * (double)c->d;
    if (pg_cuda_download(q, &candidates, &c->found->count, sizeof candidates) < 0) return -1;
    if (candidates > CAPACITY) {
      at = begin;
      limit = std::max((int64_t)1, count / 2);
      continue;
    }
    if (candidates && take_candidates(q, c, (int64_t)candidates, best) < 0) return -1;
    if (candidates < CAPACITY / 4) limit = std::min(most, limit * 2);
  }
}

static int find_pair(pg_queue *q, cloud *c, const volatile int *cancel, pg_farthest *result) {
  best_pair best = {0, -1, -1};
  bool spread;
  if (set_up(q, c) < 0 || centre(q, c, &spread) < 0) return -1;
  result->radius = c->reach;
  if (!spread) {
    if (c->sign < 0) result->first = 0, result->second = 1;
    return 0;
  }
  if (c->sign < 0) best.square = INFINITY;
  if (c->sign > 0 && c->rows > 2 * PG_TILE && sweep(q, c, &best, &result->multiply_adds) < 0)
    return -1;
  if (search(q, c, cancel, &best, &result->multiply_adds) < 0) return -1;
  if (c->sign < 0 || best.square > 0) {
    result->value = sqrt(best.square);
    result->first = best.first;
    result->second = best.second;
  }
  return 0;
}

static int extreme(pg_queue *q, float sign, const float *x, int64_t rows, int64_t columns,
                   const volatile int *cancel, pg_farthest *out) {
  pg_farthest result = {0, -1, -1, -1, 0, 0};
  cloud c = {};
  int status = 0;
  if (columns > INT_MAX || rows > INT_MAX)
    return pg_cuda_refuse(q, "a cloud of [%lld, %lld]; at most %d each", (long long)rows,
                          (long long)columns, INT_MAX);
  if (bad_row(q, x, rows, columns, &result.bad_row) < 0) return -1;
  if (result.bad_row < 0 && rows >= 2 && columns >= 1) {
    c.x = x, c.rows = rows, c.d = columns, c.sign = sign;
    c.depth = depth_of(columns);
    status = find_pair(q, &c, cancel, &result);
    tear_down(q, &c);
  } else if (result.bad_row < 0 && rows >= 2 && sign < 0) {
    result.first = 0, result.second = 1;
  }
  if (status == 0) *out = result;
  return status;
}

int pg_cuda_diameter(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                     const volatile int *cancel, pg_farthest *out) {
  return extreme(q, 1, x, rows, columns, cancel, out);
}

int pg_cuda_separation(pg_queue *q, const float *x, int64_t rows, int64_t columns,
                       const volatile int *cancel, pg_farthest *out) {
  return extreme(q, -1, x, rows, columns, cancel, out);
}
