/* Causal attention in blocks of queries and keys, so that time x time scores are never stored
 * (Dao et al. 2022).
 *
 * Scores of a block are kept transposed, [BLOCK keys, BLOCK queries]: then every product reads its
 * right factor in rows and its left factor by broadcasts, and nothing but the queries (and dout)
 * of a block is packed; and softmax statistics lie along vectors. Blocks on the diagonal are done
 * in strips of STRIP keys or queries, which leave out most of what is masked.
 *
 * Rows of a head lie heads*head_dim elements apart in the tensors, in either compute type. A block
 * is read as fp32 rows of `width` floats, head_dim rounded up to PG_COLUMN_UNIT with zeros that
 * change no product; in F32 with nothing to round up it is read where it lies. */
#include "attention.h"
#include "small_product.h"
#include "vector.h"
#include <stdlib.h>

#define BLOCK 64
#define STRIP 16

typedef pg_attention call;

/* One head of one sequence. */
typedef struct head {
  const call *call;
  int64_t at, ld; /* elements */
  float *lse;
} head;

/* Rows [i, i+m) of a tensor for products; their distance goes to *ld. scratch [m, width]. */
static const float *load(const head *h, const void *x, int64_t i, int64_t m, float *scratch,
                         int64_t *ld) {
  const call *a = h->call;
  int64_t at = h->at + i * h->ld, d = a->head_dim;
  if (a->type == PG_F32 && d == a->width) {
    *ld = h->ld;
    return (const float *)x + at;
  }
  *ld = a->width;
  for (int64_t r = 0; r < m; r++) {
    float *to = scratch + r * a->width;
    const float *row = pg_run_in(a->type, x, at + r * h->ld, d, to);
    for (int64_t j = 0; row != to && j < d; j++) to[j] = row[j];
    for (int64_t j = d; j < a->width; j++) to[j] = 0;
  }
  return scratch;
}

/* Rows [i, i+m) of a tensor from fp32 rows [m, width]. */
static void store(const head *h, const float *rows, int64_t i, int64_t m, void *x) {
  const call *a = h->call;
  for (int64_t r = 0; r < m; r++) {
    const float *row = rows + r * a->width;
    int64_t at = h->at + (i + r) * h->ld;
    if (a->type == PG_F32)
      memcpy((float *)x + at, row, (size_t)a->head_dim * sizeof *row);
    else
      pg_narrow(row, a->head_dim, (uint16_t *)x + at);
  }
}

/* to [width, BLOCK] = factor * rows [m, width] transposed; columns from m on are 0. */
static void pack_transposed(const float *rows, int64_t ld, int64_t m, int64_t width, float factor,
                            float *to) {
  for (int64_t j = 0; j < width; j++) {
    for (int64_t r = 0; r < m; r++) to[j * BLOCK + r] = factor * rows[r * ld + j];
    for (int64_t r = m; r < BLOCK; r++) to[j * BLOCK + r] = 0;
  }
}

/* products [n, BLOCK] = rows [n, width] times packed [width, BLOCK]. On the diagonal only
 * queries from a strip's first key on. */
static void key_products(int64_t width, const float *rows, int64_t ld, int64_t n,
                         const float *packed, bool diagonal, float *products) {
  if (!diagonal) {
    pg_small_product(n, BLOCK, width, rows, ld, 1, packed, BLOCK, products, BLOCK, false);
    return;
  }
  for (int64_t c = 0; c < n; c += STRIP)
    pg_small_product(pg_min64(STRIP, n - c), BLOCK - c, width, rows + c * ld, ld, 1, packed + c,
                     BLOCK, products + c * BLOCK + c, BLOCK, false);
}

/* to [m, width] (+)= weights' [m, n] rows [n, width], weights [n, BLOCK]: sums over keys. */
static void sum_over_keys(int64_t width, const float *weights, int64_t m, int64_t n,
                          const float *rows, int64_t ld, bool diagonal, bool add, float *to) {
  for (int64_t r = 0; r < m; r += diagonal ? STRIP : m)
    pg_small_product(diagonal ? pg_min64(STRIP, m - r) : m, width,
                     diagonal ? pg_min64(n, r + STRIP) : n, weights + r, 1, BLOCK, rows, ld,
                     to + r * width, width, add);
}

/* to [n, width] (+)= weights [n, m] rows [m, width]: sums over queries. */
static void sum_over_queries(int64_t width, const float *weights, int64_t m, int64_t n,
                             const float *rows, int64_t ld, bool diagonal, float *to) {
  /* The diagonal is the first block of queries that a block of keys meets. */
  for (int64_t c = 0; c < n; c += diagonal ? STRIP : n) {
    int64_t from = diagonal ? c : 0;
    pg_small_product(diagonal ? pg_min64(STRIP, n - c) : n, width, m - from,
                     weights + c * BLOCK + from, BLOCK, 1, rows + from * ld, ld, to + c * width,
                     width, !diagonal);
  }
}

/* First query of key c's strip, and masking of the queries before the key within it. */
static int64_t mask(float *scores, int64_t c, bool diagonal) {
  if (!diagonal) return 0;
  int64_t from = c / STRIP * STRIP;
  for (int64_t r = from; r < c; r++) scores[c * BLOCK + r] = -INFINITY;
  return from;
}

/* Queries [i, i+m): the maximum and the sum of exponentials are carried from block to block of
 * keys, and what has been summed shrinks when the maximum grows. work: packed queries
 * [width, BLOCK], scores [BLOCK, BLOCK], output and loaded rows [BLOCK, width]. */
static void forward_block(const head *h, int64_t i, int64_t m, float *work) {
  const call *a = h->call;
  int64_t d = a->width, ld;
  float *packed = work, *scores = packed + d * BLOCK, *o = scores + BLOCK * BLOCK;
  float *loaded = o + BLOCK * d, max[BLOCK], sum[BLOCK], shrink[BLOCK];
  for (int r = 0; r < BLOCK; r++) max[r] = -INFINITY, sum[r] = 0;
  const float *rows = load(h, a->query, i, m, loaded, &ld);
  pack_transposed(rows, ld, m, d, a->scale, packed);
  for (int64_t j = 0; j <= i; j += BLOCK) {
    bool diagonal = j == i;
    int64_t n = diagonal ? m : BLOCK;
    rows = load(h, a->key, j, n, loaded, &ld);
    key_products(d, rows, ld, n, packed, diagonal, scores);
    memcpy(shrink, max, sizeof max);
    for (int64_t c = 0; c < n; c++) {
      const float *s = scores + c * BLOCK;
      int64_t from = mask(scores, c, diagonal);
#pragma omp simd
      for (int64_t r = from; r < BLOCK; r++) max[r] = s[r] > max[r] ? s[r] : max[r];
    }
#pragma omp simd
    for (int64_t r = 0; r < BLOCK; r++) {
      shrink[r] = pg_expf(shrink[r] - max[r]);
      sum[r] *= shrink[r];
    }
    for (int64_t c = 0; c < n; c++) {
      float *s = scores + c * BLOCK;
#pragma omp simd
      for (int64_t r = diagonal ? c / STRIP * STRIP : 0; r < BLOCK; r++) {
        s[r] = pg_expf(s[r] - max[r]);
        sum[r] += s[r];
      }
    }
    for (int64_t r = 0; j > 0 && r < m; r++) {
      if (shrink[r] == 1) continue;
#pragma omp simd
      for (int64_t l = 0; l < d; l++) o[r * d + l] *= shrink[r];
    }
    rows = load(h, a->value, j, n, loaded, &ld);
    sum_over_keys(d, scores, m, n, rows, ld, diagonal, j > 0, o);
  }
  for (int64_t r = 0; r < m; r++) {
    float inverse = 1.0f / sum[r];
#pragma omp simd
    for (int64_t l = 0; l < d; l++) o[r * d + l] *= inverse;
    h->lse[i + r] = (float)((double)max[r] + log((double)sum[r]));
  }
  store(h, o, i, m, a->result);
}

/* Queries [i, i+m) against all their keys: with P = exp(scale QK' - lse), dV += P' dO,
 * dS = scale P o (dO V' - rowsum(dO o O)), dQ += dS K, dK += dS' Q. dkey and dvalue [time, width]
 * are the head's sums so far. work: packed queries and dout [width, BLOCK], P and dS [BLOCK,
 * BLOCK], sums of dquery and loaded rows of query, dout and the present block [BLOCK, width]. */
static void backward_block(const head *h, int64_t i, int64_t m, float *dkey, float *dvalue,
                           float *work) {
  const call *a = h->call;
  int64_t d = a->width, ldq, ldo, ld;
  float *queries = work, *douts = queries + d * BLOCK, *p = douts + d * BLOCK;
  float *ds = p + BLOCK * BLOCK, *dquery = ds + BLOCK * BLOCK, *loaded = dquery + BLOCK * d;
  float lse[BLOCK], delta[BLOCK], scale = a->scale;
  const float *rows = load(h, a->out, i, m, loaded, &ld);
  const float *query = load(h, a->query, i, m, loaded + BLOCK * d, &ldq);
  const float *dout = load(h, a->dout, i, m, loaded + 2 * BLOCK * d, &ldo);
  pack_transposed(query, ldq, m, d, scale, queries);
  pack_transposed(dout, ldo, m, d, 1, douts);
  for (int64_t r = 0; r < BLOCK; r++) {
    /* Probabilities of the queries past the end come out 0. */
    lse[r] = r < m ? h->lse[i + r] : INFINITY;
    delta[r] = r < m ? (float)pg_dot(dout + r * ldo, rows + r * ld, d) : 0;
  }
  for (int64_t j = 0; j <= i; j += BLOCK) {
    bool diagonal = j == i;
    int64_t n = diagonal ? m : BLOCK;
    rows = load(h, a->value, j, n, loaded, &ld);
    key_products(d, rows, ld, n, douts, diagonal, ds);
    rows = load(h, a->key, j, n, loaded, &ld);
    key_products(d, rows, ld, n, queries, diagonal, p);
    for (int64_t c = 0; c < n; c++) {
      float *pc = p + c * BLOCK, *dsc = ds + c * BLOCK;
      int64_t from = mask(p, c, diagonal);
#pragma omp simd
      for (int64_t r = from; r < BLOCK; r++) {
        pc[r] = pg_expf(pc[r] - lse[r]);
        dsc[r] = scale * pc[r] * (dsc[r] - delta[r]);
      }
    }
    sum_over_queries(d, p, m, n, dout, ldo, diagonal, dvalue + j * d);
    sum_over_queries(d, ds, m, n, query, ldq, diagonal, dkey + j * d);
    sum_over_keys(d, ds, m, n, rows, ld, diagonal, j > 0, dquery);
  }
  store(h, dquery, i, m, a->dquery);
}

/* Floats of a thread: a block's, and in the backward pass the sums of a head. */
static int64_t work_floats(int64_t width, bool backward) {
  return BLOCK * (backward ? 6 * width + 2 * BLOCK : 3 * width + BLOCK);
}
static int64_t width_of(int64_t head_dim) {
  return (head_dim + PG_COLUMN_UNIT - 1) / PG_COLUMN_UNIT * PG_COLUMN_UNIT;
}
int64_t PG_CPU(attention_scratch)(int64_t time, int64_t head_dim) {
  return pg_max64(work_floats(width_of(head_dim), true) + 2 * time * width_of(head_dim),
                  PG_CPU(attention_tile_scratch)(time, head_dim, true));
}

/* Forward, the tasks are blocks of queries; backward they are heads, since the blocks of a head add
 * to the same dkey and dvalue, which a thread holds in fp32 until the head is done. */
static int run(pg_queue *q, const call *a) {
  if (PG_CPU(attention_on_tiles)(a->type, a->head_dim)) return PG_CPU(attention_tiles)(q, a);
  int64_t all = a->batch * a->heads, blocks = (a->time + BLOCK - 1) / BLOCK;
  int64_t tasks = a->dout ? all : all * blocks, sums = a->dout ? a->time * a->width : 0;
  int64_t own = work_floats(a->width, a->dout), floats = own + 2 * sums;
  if (PG_CPU(scratch)(q, floats) < 0) return -1;
#pragma omp parallel num_threads(pg_team(q, all * a->time * a->head_dim))
  {
    pg_float_mode mode = pg_float_mode_set(true);
    float *work = pg_scratch_of(q, floats, omp_get_thread_num());
    float *dkey = work + own, *dvalue = dkey + sums;
#pragma omp for schedule(dynamic)
    for (int64_t t = 0; t < tasks; t++) {
      const pg_attention_head place = pg_attention_at(a, t % all);
      head h = {a, place.at, place.ld, place.lse};
      if (a->dout) {
        for (int64_t i = 0; i < a->time; i += BLOCK)
          backward_block(&h, i, pg_min64(BLOCK, a->time - i), dkey, dvalue, work);
        store(&h, dkey, 0, a->time, a->dkey);
        store(&h, dvalue, 0, a->time, a->dvalue);
      } else {
        /* Late queries meet more keys, so the longest blocks go first. */
        int64_t i = (blocks - 1 - t / all) * BLOCK;
        forward_block(&h, i, pg_min64(BLOCK, a->time - i), work);
      }
    }
    pg_float_mode_restore(mode);
  }
  return 0;
}

int PG_CPU(attention_forward)(pg_queue *q, pg_dtype type, const void *query, const void *key,
                              const void *value, int64_t batch, int64_t time, int64_t heads,
                              int64_t head_dim, void *out, float *lse) {
  return run(q, &(call){.type = type,
                        .query = query,
                        .key = key,
                        .value = value,
                        .result = out,
                        .lse = lse,
                        .batch = batch,
                        .time = time,
                        .heads = heads,
                        .head_dim = head_dim,
                        .width = width_of(head_dim),
                        .scale = (float)(1.0 / sqrt((double)head_dim))});
}

int PG_CPU(attention_backward)(pg_queue *q, pg_dtype type, const void *dout, const void *query,
                               const void *key, const void *value, const void *out,
                               const float *lse, int64_t batch, int64_t time, int64_t heads,
                               int64_t head_dim, void *dquery, void *dkey, void *dvalue) {
  return run(q, &(call){.type = type,
                        .query = query,
                        .key = key,
                        .value = value,
                        .dout = dout,
                        .out = out,
                        .lse = (float *)lse, /* only read */
                        .dquery = dquery,
                        .dkey = dkey,
                        .dvalue = dvalue,
                        .batch = batch,
                        .time = time,
                        .heads = heads,
                        .head_dim = head_dim,
                        .width = width_of(head_dim),
                        .scale = (float)(1.0 / sqrt((double)head_dim))});
}

int PG_CPU(attention_path)(pg_queue *q, pg_dtype type, int64_t batch, int64_t time, int64_t heads,
                           int64_t head_dim, char *text, size_t size) {
  (void)q, (void)type, (void)batch, (void)time, (void)heads, (void)head_dim;
  if (size) text[0] = 0;
  return 0;
}
