/* Causal attention in blocks of queries and keys, so that time x time scores are never stored
 * (Dao et al. 2022).
 *
 * Scores of a block are kept transposed, [BLOCK keys, BLOCK queries]: then every product reads its
 * right factor in rows and its left factor by broadcasts, and nothing but the queries (and dout)
 * of a block is packed; and softmax statistics lie along vectors. Blocks on the diagonal are done
 * in strips of STRIP keys or queries, which leave out most of what is masked.
 *
 * Head vectors of one head lie ld = heads*head_dim apart. head_dim must be a multiple of
 * PG_COLUMN_UNIT; others are copied into padded tensors first. */
#include "small_product.h"
#include "vector.h"
#include <stdlib.h>

#define BLOCK 64
#define STRIP 16

/* One head of one sequence: pointers to its first row. */
typedef struct head {
  const float *query, *key, *value, *dout, *out;
  float *result, *lse, *dquery, *dkey, *dvalue;
  int64_t head_dim, ld;
  float scale;
} head;

/* to [head_dim, BLOCK] = factor * rows [m, head_dim] transposed; columns from m on are 0. */
static void pack_transposed(const float *rows, int64_t m, const head *h, float factor, float *to) {
  for (int64_t j = 0; j < h->head_dim; j++) {
    for (int64_t r = 0; r < m; r++) to[j * BLOCK + r] = factor * rows[r * h->ld + j];
    for (int64_t r = m; r < BLOCK; r++) to[j * BLOCK + r] = 0;
  }
}

/* products [n, BLOCK] = rows [n, head_dim] times packed [head_dim, BLOCK]. On the diagonal only
 * queries from a strip's first key on. */
static void key_products(const head *h, const float *rows, int64_t n, const float *packed,
                         bool diagonal, float *products) {
  if (!diagonal) {
    pg_small_product(n, BLOCK, h->head_dim, rows, h->ld, 1, packed, BLOCK, products, BLOCK, false);
    return;
  }
  for (int64_t c = 0; c < n; c += STRIP)
    pg_small_product(pg_min64(STRIP, n - c), BLOCK - c, h->head_dim, rows + c * h->ld, h->ld, 1,
                     packed + c, BLOCK, products + c * BLOCK + c, BLOCK, false);
}

/* to [m, head_dim] (+)= weights' [m, n] rows [n, head_dim], weights [n, BLOCK]: sums over keys. */
static void sum_over_keys(const head *h, const float *weights, int64_t m, int64_t n,
                          const float *rows, bool diagonal, bool add, float *to, int64_t ld) {
  for (int64_t r = 0; r < m; r += diagonal ? STRIP : m)
    pg_small_product(diagonal ? pg_min64(STRIP, m - r) : m, h->head_dim,
                     diagonal ? pg_min64(n, r + STRIP) : n, weights + r, 1, BLOCK, rows, h->ld,
                     to + r * ld, ld, add);
}

/* to [n, head_dim] (+)= weights [n, m] rows [m, head_dim]: sums over queries. */
static void sum_over_queries(const head *h, const float *weights, int64_t m, int64_t n,
                             const float *rows, bool diagonal, float *to) {
  /* The diagonal is the first block of queries that a block of keys meets. */
  for (int64_t c = 0; c < n; c += diagonal ? STRIP : n) {
    int64_t from = diagonal ? c : 0;
    pg_small_product(diagonal ? pg_min64(STRIP, n - c) : n, h->head_dim, m - from,
                     weights + c * BLOCK + from, BLOCK, 1, rows + from * h->ld, h->ld,
                     to + c * h->ld, h->ld, !diagonal);
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
 * [head_dim, BLOCK], scores [BLOCK, BLOCK], output [BLOCK, head_dim]. */
static void forward_block(const head *h, int64_t i, int64_t m, float *work) {
  float *packed = work, *scores = packed + h->head_dim * BLOCK, *o = scores + BLOCK * BLOCK;
  float max[BLOCK], sum[BLOCK], shrink[BLOCK];
  int64_t d = h->head_dim;
  for (int r = 0; r < BLOCK; r++) max[r] = -INFINITY, sum[r] = 0;
  pack_transposed(h->query + i * h->ld, m, h, h->scale, packed);
  for (int64_t j = 0; j <= i; j += BLOCK) {
    bool diagonal = j == i;
    int64_t n = diagonal ? m : BLOCK;
    key_products(h, h->key + j * h->ld, n, packed, diagonal, scores);
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
    sum_over_keys(h, scores, m, n, h->value + j * h->ld, diagonal, j > 0, o, d);
  }
  for (int64_t r = 0; r < m; r++) {
    float inverse = 1.0f / sum[r], *to = h->result + (i + r) * h->ld;
#pragma omp simd
    for (int64_t l = 0; l < d; l++) to[l] = o[r * d + l] * inverse;
    h->lse[i + r] = (float)((double)max[r] + log((double)sum[r]));
  }
}

/* Queries [i, i+m) against all their keys: with P = exp(scale QK' - lse), dV += P' dO,
 * dS = scale P o (dO V' - rowsum(dO o O)), dQ += dS K, dK += dS' Q. work: packed queries and dout
 * [head_dim, BLOCK], P and dS [BLOCK, BLOCK]. */
static void backward_block(const head *h, int64_t i, int64_t m, float *work) {
  int64_t d = h->head_dim, ld = h->ld;
  float *queries = work, *douts = queries + d * BLOCK, *p = douts + d * BLOCK;
  float *ds = p + BLOCK * BLOCK, lse[BLOCK], delta[BLOCK], scale = h->scale;
  const float *dout = h->dout + i * ld;
  pack_transposed(h->query + i * ld, m, h, scale, queries);
  pack_transposed(dout, m, h, 1, douts);
  for (int64_t r = 0; r < BLOCK; r++) {
    /* Probabilities of the queries past the end come out 0. */
    lse[r] = r < m ? h->lse[i + r] : INFINITY;
    delta[r] = r < m ? (float)pg_dot(dout + r * ld, h->out + (i + r) * ld, d) : 0;
  }
  for (int64_t j = 0; j <= i; j += BLOCK) {
    bool diagonal = j == i;
    int64_t n = diagonal ? m : BLOCK;
    key_products(h, h->key + j * ld, n, queries, diagonal, p);
    key_products(h, h->value + j * ld, n, douts, diagonal, ds);
    for (int64_t c = 0; c < n; c++) {
      float *pc = p + c * BLOCK, *dsc = ds + c * BLOCK;
      int64_t from = mask(p, c, diagonal);
#pragma omp simd
      for (int64_t r = from; r < BLOCK; r++) {
        pc[r] = pg_expf(pc[r] - lse[r]);
        dsc[r] = scale * pc[r] * (dsc[r] - delta[r]);
      }
    }
    sum_over_queries(h, p, m, n, dout, diagonal, h->dvalue + j * ld);
    sum_over_queries(h, ds, m, n, h->query + i * ld, diagonal, h->dkey + j * ld);
    sum_over_keys(h, ds, m, n, h->key + j * ld, diagonal, j > 0, h->dquery + i * ld, ld);
  }
}

/* The shape and the tensors of a call; results NULL where the direction has none. */
typedef struct call {
  const float *query, *key, *value, *dout, *out;
  float *result, *lse, *dquery, *dkey, *dvalue;
  int64_t batch, time, heads, head_dim;
  float scale;
} call;

static head head_at(const call *a, int64_t index) {
  int64_t ld = a->heads * a->head_dim;
  int64_t at = index / a->heads * a->time * ld + index % a->heads * a->head_dim;
  head h = {.query = a->query + at,
            .key = a->key + at,
            .value = a->value + at,
            .lse = a->lse + index * a->time,
            .head_dim = a->head_dim,
            .ld = ld,
            .scale = a->scale};
  if (a->dout) {
    h.dout = a->dout + at, h.out = a->out + at;
    h.dquery = a->dquery + at, h.dkey = a->dkey + at, h.dvalue = a->dvalue + at;
  } else {
    h.result = a->result + at;
  }
  return h;
}

/* Forward, the tasks are blocks of queries; backward they are heads, since the blocks of a head add
 * to the same dkey and dvalue. */
static int run(pg_queue *q, const call *a) {
  int64_t all = a->batch * a->heads, blocks = (a->time + BLOCK - 1) / BLOCK;
  int64_t tasks = a->dout ? all : all * blocks;
  size_t floats = (size_t)(2 * a->head_dim * BLOCK + 2 * BLOCK * BLOCK);
  int failed = 0;
#pragma omp parallel num_threads(pg_team(q, all * a->time * a->head_dim))
  {
    pg_float_mode mode = pg_float_mode_set(true);
    float *work = aligned_alloc(64, floats * sizeof *work);
    if (!work) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic)
    for (int64_t t = 0; t < tasks; t++) {
      head h = head_at(a, t % all);
      if (!work) continue;
      if (a->dout) {
        for (int64_t i = 0; i < a->time; i += BLOCK)
          backward_block(&h, i, pg_min64(BLOCK, a->time - i), work);
      } else {
        /* Late queries meet more keys, so the longest blocks go first. */
        int64_t i = (blocks - 1 - t / all) * BLOCK;
        forward_block(&h, i, pg_min64(BLOCK, a->time - i), work);
      }
    }
    free(work);
    pg_float_mode_restore(mode);
  }
  return failed ? pg_refuse(q, "no memory for attention scores") : 0;
}

/* Copies vectors of `from` elements to vectors of `to` elements, cutting or adding zeros. */
static void repack(pg_queue *q, const float *x, int64_t from, int64_t vectors, int64_t to,
                   float *y) {
#pragma omp parallel for num_threads(pg_team(q, vectors *to)) schedule(static)
  for (int64_t i = 0; i < vectors; i++)
    for (int64_t j = 0; j < to; j++) y[i * to + j] = j < from ? x[i * from + j] : 0;
}

/* Runs the call on head vectors padded with zeros, which change no product. */
static int run_padded(pg_queue *q, call a) {
  int64_t d = a.head_dim, padded = (d + PG_COLUMN_UNIT - 1) / PG_COLUMN_UNIT * PG_COLUMN_UNIT;
  int64_t vectors = a.batch * a.time * a.heads, n = vectors * padded;
  const float **inputs[] = {&a.query, &a.key, &a.value, &a.dout, &a.out};
  float **outputs[] = {&a.result, &a.dquery, &a.dkey, &a.dvalue};
  float *originals[4], *memory, *next;
  int status;
  if (padded == d) return run(q, &a);
  memory = next = aligned_alloc(64, (size_t)n * 8 * sizeof *memory);
  if (!memory) return pg_refuse(q, "no memory for padded heads");
  for (int i = 0; i < 5; i++) {
    if (!*inputs[i]) continue;
    repack(q, *inputs[i], d, vectors, padded, next);
    *inputs[i] = next;
    next += n;
  }
  for (int i = 0; i < 4; i++) {
    originals[i] = *outputs[i];
    if (!originals[i]) continue;
    *outputs[i] = next;
    next += n;
  }
  a.head_dim = padded;
  status = run(q, &a);
  for (int i = 0; i < 4 && status == 0; i++)
    if (originals[i]) repack(q, *outputs[i], padded, vectors, d, originals[i]);
  free(memory);
  return status;
}

int PG_CPU(attention_forward)(pg_queue *q, const float *query, const float *key, const float *value,
                              int64_t batch, int64_t time, int64_t heads, int64_t head_dim,
                              float *out, float *lse) {
  return run_padded(q, (call){.query = query,
                              .key = key,
                              .value = value,
                              .result = out,
                              .lse = lse,
                              .batch = batch,
                              .time = time,
                              .heads = heads,
                              .head_dim = head_dim,
                              .scale = (float)(1.0 / sqrt((double)head_dim))});
}

int PG_CPU(attention_backward)(pg_queue *q, const float *dout, const float *query, const float *key,
                               const float *value, const float *out, const float *lse,
                               int64_t batch, int64_t time, int64_t heads, int64_t head_dim,
                               float *dquery, float *dkey, float *dvalue) {
  return run_padded(q, (call){.query = query,
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
                              .scale = (float)(1.0 / sqrt((double)head_dim))});
}
