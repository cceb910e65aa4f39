/* Causal attention in blocks of queries and keys, so that time x time scores are never stored
 * (Dao et al. 2022, without its recomputed normalisation in the backward pass).
 *
 * A block of QUERIES rows of one head meets its keys in blocks of KEYS; KEYS is a multiple of
 * QUERIES, so that every block of keys holds at least the first row's own key. Head vectors of one
 * head lie heads*head_dim apart, which is the leading dimension of all small products. */
#include "vector.h"
#include <cblas.h>
#include <stdlib.h>

#define QUERIES 64
#define KEYS 256

/* C [m,n] = alpha op(A) op(B) + beta C with leading dimensions lda, ldb, ldc. */
static void product(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a,
                    int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
  cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, (int)m,
              (int)n, (int)k, alpha, a, (int)lda, b, (int)ldb, beta, c, (int)ldc);
}

/* p[j] = exp(p[j] - shift) for j < valid, 0 up to n; returns the sum. */
static float exponential_row(float *p, int64_t valid, int64_t n, float shift) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < valid; j++) {
    p[j] = pg_expf(p[j] - shift);
    sum += p[j];
  }
  for (int64_t j = valid; j < n; j++) p[j] = 0;
  return sum;
}

/* Queries [i0,i1) of one head; query, key, value, out point at its first row, lse at its row. */
static void forward_block(const float *query, const float *key, const float *value, int64_t i0,
                          int64_t i1, int64_t head_dim, int64_t ld, float *scores, float *out,
                          float *lse) {
  float max[QUERIES], sum[QUERIES], scale = (float)(1.0 / sqrt((double)head_dim));
  int64_t m = i1 - i0;
  float *o = out + i0 * ld;
  for (int64_t j0 = 0; j0 < i1; j0 += KEYS) {
    int64_t n = pg_min64(KEYS, i1 - j0);
    product(false, true, m, n, head_dim, scale, query + i0 * ld, ld, key + j0 * ld, ld, 0, scores,
            KEYS);
    for (int64_t r = 0; r < m; r++) {
      float *p = scores + r * KEYS;
      int64_t valid = pg_min64(n, i0 + r + 1 - j0);
      float top = pg_max_run(p, valid);
      if (j0 == 0) {
        max[r] = top;
        sum[r] = exponential_row(p, valid, n, top);
        continue;
      }
      /* Rows whose maximum grew are brought to the new one. */
      float shrink = 1;
      if (top > max[r]) {
        shrink = pg_expf(max[r] - top);
        max[r] = top;
        for (int64_t j = 0; j < head_dim; j++) o[r * ld + j] *= shrink;
      }
      sum[r] = sum[r] * shrink + exponential_row(p, valid, n, max[r]);
    }
    product(false, false, m, head_dim, n, 1, scores, KEYS, value + j0 * ld, ld, j0 > 0, o, ld);
  }
  for (int64_t r = 0; r < m; r++) {
    float inverse = 1.0f / sum[r];
    for (int64_t j = 0; j < head_dim; j++) o[r * ld + j] *= inverse;
    lse[i0 + r] = (float)((double)max[r] + log((double)sum[r]));
  }
}

int PG_CPU(attention_forward)(pg_queue *q, const float *query, const float *key, const float *value,
                              int64_t batch, int64_t time, int64_t heads, int64_t head_dim,
                              float *out, float *lse) {
  int64_t blocks = (time + QUERIES - 1) / QUERIES, ld = heads * head_dim;
  int failed = 0;
#pragma omp parallel num_threads(pg_team(q, batch *heads *time *head_dim))
  {
    pg_float_mode mode = pg_float_mode_set(true);
    float *scores = aligned_alloc(64, QUERIES * KEYS * sizeof *scores);
    if (!scores) {
#pragma omp atomic write
      failed = 1;
    }
    /* Late queries meet more keys, so the longest blocks go first. */
#pragma omp for schedule(dynamic)
    for (int64_t t = 0; t < batch * heads * blocks; t++) {
      int64_t head = t % (batch * heads), i0 = (blocks - 1 - t / (batch * heads)) * QUERIES;
      int64_t at = head / heads * time * ld + head % heads * head_dim;
      if (scores)
        forward_block(query + at, key + at, value + at, i0, pg_min64(time, i0 + QUERIES), head_dim,
                      ld, scores, out + at, lse + head * time);
    }
    free(scores);
    pg_float_mode_restore(mode);
  }
  return failed ? pg_refuse(q, "no memory for attention scores") : 0;
}

typedef struct gradients {
  const float *dout, *query, *key, *value, *out, *lse;
  float *dquery, *dkey, *dvalue;
  int64_t time, head_dim, ld;
} gradients;

/* The block of queries [i0,i0+m) against keys [j0,j0+n): with P = exp(scale QK' - lse),
 * dV += P' dO, dS = scale P o (dO V' - rowsum(dO o O)), dQ += dS K, dK += dS' Q. */
static void backward_block(const gradients *g, int64_t i0, int64_t m, int64_t j0, int64_t n,
                           bool first_query, float *p, float *ds) {
  int64_t ld = g->ld, hd = g->head_dim, i = i0 * ld, j = j0 * ld;
  float scale = (float)(1.0 / sqrt((double)hd));
  product(false, true, m, n, hd, scale, g->query + i, ld, g->key + j, ld, 0, p, KEYS);
  product(false, true, m, n, hd, 1, g->dout + i, ld, g->value + j, ld, 0, ds, KEYS);
  for (int64_t r = 0; r < m; r++) {
    float *pr = p + r * KEYS, *dsr = ds + r * KEYS, shift = g->lse[i0 + r];
    int64_t valid = pg_min64(n, i0 + r + 1 - j0);
    float delta = (float)pg_dot(g->dout + i + r * ld, g->out + i + r * ld, hd);
#pragma omp simd
    for (int64_t c = 0; c < valid; c++) {
      pr[c] = pg_expf(pr[c] - shift);
      dsr[c] = scale * pr[c] * (dsr[c] - delta);
    }
    for (int64_t c = valid; c < n; c++) pr[c] = dsr[c] = 0;
  }
  product(true, false, n, hd, m, 1, p, KEYS, g->dout + i, ld, !first_query, g->dvalue + j, ld);
  product(true, false, n, hd, m, 1, ds, KEYS, g->query + i, ld, !first_query, g->dkey + j, ld);
  product(false, false, m, hd, n, 1, ds, KEYS, g->key + j, ld, j0 > 0, g->dquery + i, ld);
}

int PG_CPU(attention_backward)(pg_queue *q, const float *dout, const float *query, const float *key,
                               const float *value, const float *out, const float *lse,
                               int64_t batch, int64_t time, int64_t heads, int64_t head_dim,
                               float *dquery, float *dkey, float *dvalue) {
  int64_t ld = heads * head_dim;
  int failed = 0;
#pragma omp parallel num_threads(pg_team(q, batch *heads *time *head_dim))
  {
    pg_float_mode mode = pg_float_mode_set(true);
    float *buffer = aligned_alloc(64, 2 * QUERIES * KEYS * sizeof *buffer);
    if (!buffer) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic)
    for (int64_t head = 0; head < batch * heads; head++) {
      int64_t at = head / heads * time * ld + head % heads * head_dim;
      gradients g = {dout + at,   query + at, key + at,    value + at, out + at, lse + head * time,
                     dquery + at, dkey + at,  dvalue + at, time,       head_dim, ld};
      for (int64_t j0 = 0; buffer && j0 < time; j0 += KEYS)
        for (int64_t i0 = j0; i0 < time; i0 += QUERIES) {
          /* Keys after the last query of the block are masked: leave them out, except that the
           * first block of queries must write all rows of dkey and dvalue. */
          int64_t m = pg_min64(QUERIES, time - i0), n = pg_min64(KEYS, time - j0);
          if (i0 > j0) n = pg_min64(n, i0 + m - j0);
          backward_block(&g, i0, m, j0, n, i0 == j0, buffer, buffer + QUERIES * KEYS);
        }
    }
    free(buffer);
    pg_float_mode_restore(mode);
  }
  return failed ? pg_refuse(q, "no memory for attention scores") : 0;
}
