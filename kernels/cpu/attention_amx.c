/* Causal attention in bf16 on tiles (Intel AMX). As attention.c, in blocks of BLOCK queries and
 * keys whose scores are kept transposed, [keys, queries]; but probabilities and their gradients are
 * rounded to bf16 before they are multiplied, as operands of products are everywhere. Statistics
 * and sums are fp32.
 *
 * A left operand is bf16 rows; a right one, panels of pairs (gemm_pack.h). A head's keys and values
 * are copied once, padded to whole blocks with zeros, and what is multiplied from the left in its
 * transposed form, [head_dim, keys], is packed once. */
#include "attention.h"
#include <string.h>

#ifdef __AMX_BF16__
#include "tiles.h"
#include "vector.h"

#define BLOCK 64
#define SCORES (BLOCK * BLOCK)

bool PG_CPU(attention_on_tiles)(pg_dtype type, int64_t head_dim) {
  return type == PG_BF16 && head_dim % PAIRS == 0;
}

static int64_t padded(int64_t time) {
  return (time + BLOCK - 1) / BLOCK * BLOCK;
}

/* ---- products ---------------------------------------------------------------------------- */
/* A left operand: the distance of its rows, of its groups of 16 rows, and of its steps of 32 along
 * k, in elements. */
typedef struct left {
  const uint16_t *at;
  int64_t row, group, step;
} left;

/* Rows of `width` elements. */
static left rows_of(const uint16_t *at, int64_t width) {
  return (left){at, width, SIDE * width, PAIRS};
}
/* Panels of `steps` tiles, turned. */
static left panels_of(const uint32_t *at, int64_t steps) {
  return (left){(const uint16_t *)at, PAIRS, steps * 2 * TILE, 2 * TILE};
}

/* c [16 m, 16 n] (+)= left times panels of `steps` tiles; m and n are even. */
static void product(int64_t m, int64_t n, int64_t steps, left a, const uint32_t *b, float *c,
                    int64_t ldc, bool add) {
  for (int64_t i = 0; i < m; i += 2)
    for (int64_t j = 0; j < n; j += 2) {
      float *c0 = c + i * SIDE * ldc + j * SIDE, *c2 = c0 + SIDE * ldc;
      const uint16_t *a0 = a.at + i * a.group, *a1 = a0 + a.group;
      const uint32_t *b0 = b + j * steps * TILE, *b1 = b0 + steps * TILE;
      if (add) {
        PG_TILE_LOAD(0, c0, 4 * ldc);
        PG_TILE_LOAD(1, c0 + SIDE, 4 * ldc);
        PG_TILE_LOAD(2, c2, 4 * ldc);
        PG_TILE_LOAD(3, c2 + SIDE, 4 * ldc);
      } else {
        PG_TILE_CLEAR(0);
        PG_TILE_CLEAR(1);
        PG_TILE_CLEAR(2);
        PG_TILE_CLEAR(3);
      }
      for (int64_t s = 0; s < steps; s++) {
        PG_TILE_LOAD(6, b0 + s * TILE, 64);
        PG_TILE_LOAD(4, a0 + s * a.step, 2 * a.row);
        PG_TILE_MULTIPLY(0, 4, 6);
        PG_TILE_LOAD(7, b1 + s * TILE, 64);
        PG_TILE_MULTIPLY(1, 4, 7);
        PG_TILE_LOAD(5, a1 + s * a.step, 2 * a.row);
        PG_TILE_MULTIPLY(2, 5, 6);
        PG_TILE_MULTIPLY(3, 5, 7);
      }
      PG_TILE_STORE(0, c0, 4 * ldc);
      PG_TILE_STORE(1, c0 + SIDE, 4 * ldc);
      PG_TILE_STORE(2, c2, 4 * ldc);
      PG_TILE_STORE(3, c2 + SIDE, 4 * ldc);
    }
}

/* ---- operands ---------------------------------------------------------------------------- */
/* Rows [i, i + m) of a head, as `n` >= m rows side by side; those past the end are 0. */
static void copy_rows(const pg_attention *a, const pg_attention_head *h, const void *x, int64_t i,
                      int64_t m, int64_t n, uint16_t *to) {
  const uint16_t *from = (const uint16_t *)x + h->at + i * h->ld;
  const size_t bytes = (size_t)a->head_dim * sizeof *to;
  for (int64_t r = 0; r < n; r++, to += a->head_dim)
    if (r < m)
      memcpy(to, from + r * h->ld, bytes);
    else
      memset(to, 0, bytes);
}

/* Panels of BLOCK rows [BLOCK, d]: of the rows, which k = d runs along, ... */
static void pack_rows(const uint16_t *rows, int64_t d, uint32_t *to) {
  for (int64_t r = 0; r < BLOCK; r += SIDE) pack_along(rows + r * d, d, SIDE, d, to + r * d / 2);
}
/* ... and of the columns, k being the rows. */
static void pack_elements(const uint16_t *rows, int64_t d, uint32_t *to) {
  for (int64_t j = 0; j < d; j += PAIRS)
    pack_columns(rows + j, d, PAIRS, BLOCK, to + j * BLOCK / 2);
}

/* x [BLOCK keys, BLOCK queries] rounded, as panels of queries, k being the keys. */
DOT static void pack_scores(const float *x, uint32_t *to) {
  for (int64_t q = 0; q < BLOCK; q += SIDE)
    for (int64_t c = 0; c < BLOCK; c += 2, to += SIDE) {
      const __m256i even = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + c * BLOCK + q));
      const __m256i odd = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + (c + 1) * BLOCK + q));
      const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16);
      _mm512_storeu_si512(to, _mm512_or_si512(_mm512_cvtepu16_epi32(even), high));
    }
}
/* The same as rows of keys. */
DOT static void round_scores(const float *x, uint16_t *to) {
  for (int64_t i = 0; i < SCORES; i += PAIRS)
    _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + SIDE),
                                                             _mm512_loadu_ps(x + i)));
}

/* Rows [i, i + m) of a head from sums [d, BLOCK], column r times factor[r]. */
DOT static void store_turned(const pg_attention *a, const pg_attention_head *h, const float *sums,
                             const float *factor, int64_t i, int64_t m, void *x) {
  for (int64_t r = 0; r < m; r += SIDE)
    for (int64_t l = 0; l < a->head_dim; l += SIDE) {
      __m512i row[SIDE];
      const __m512 times = _mm512_loadu_ps(factor + r);
      for (int k = 0; k < SIDE; k++)
        row[k] = (__m512i)_mm512_mul_ps(_mm512_loadu_ps(sums + (l + k) * BLOCK + r), times);
      transpose(row);
      uint16_t *to = (uint16_t *)x + h->at + (i + r) * h->ld + l;
      for (int64_t k = 0; k < SIDE && r + k < m; k++)
        _mm256_storeu_si256((__m256i *)(to + k * h->ld),
                            (__m256i)_mm512_cvtneps_pbh((__m512)row[k]));
    }
}

/* Key c does not belong to the queries before it. */
static void mask_diagonal(float *scores) {
  for (int64_t c = 0; c < BLOCK; c++)
    for (int64_t r = 0; r < c; r++) scores[c * BLOCK + r] = -INFINITY;
}

/* ---- memory ------------------------------------------------------------------------------ */
/* A thread's memory; the parts of one direction follow each other. */
typedef struct memory {
  uint16_t *keys, *values, *rows, *douts, *rounded, *drounded; /* bf16 rows */
  uint32_t *turned; /* [d, keys] of every block of keys */
  uint32_t *queries, *packed_douts, *elements, *dout_elements; /* panels of a block of queries */
  uint32_t *packed;                                            /* panels of scores */
  float *scores, *dscores, *sums, *dkey, *dvalue;
} memory;

static void *take(float **at, int64_t floats) {
  void *part = *at;
  *at += (floats + SIDE - 1) / SIDE * SIDE;
  return part;
}
/* Lays the parts out from `at` on, and returns how many floats they are. */
static int64_t lay_out(memory *w, float *at, int64_t time, int64_t d, bool backward) {
  const float *begin = at;
  const int64_t all = padded(time) * d, half = BLOCK * d / 2;
  w->keys = take(&at, all / 2), w->turned = take(&at, all / 2);
  w->rows = take(&at, half), w->queries = take(&at, half);
  w->packed = take(&at, SCORES / 2), w->scores = take(&at, SCORES), w->sums = take(&at, BLOCK * d);
  if (backward) {
    w->values = take(&at, all / 2), w->dkey = take(&at, all), w->dvalue = take(&at, all);
    w->douts = take(&at, half), w->packed_douts = take(&at, half);
    w->elements = take(&at, half), w->dout_elements = take(&at, half);
    w->rounded = take(&at, SCORES / 2), w->drounded = take(&at, SCORES / 2);
    w->dscores = take(&at, SCORES);
  }
  return at - begin;
}
int64_t PG_CPU(attention_tile_scratch)(int64_t time, int64_t head_dim, bool backward) {
  memory w;
  float origin;
  /* Only distances count here. */
  return head_dim % PAIRS ? 0 : lay_out(&w, &origin, time, head_dim, backward);
}

/* The blocks of keys before `end`: rows as they are, and the rows of `turned`, transposed. */
static void begin_head(const pg_attention *a, const pg_attention_head *h, const void *turned,
                       int64_t end, memory *w) {
  const int64_t d = a->head_dim;
  copy_rows(a, h, a->key, 0, pg_min64(a->time, end), end, w->keys);
  for (int64_t j = 0; j < end; j += BLOCK) {
    copy_rows(a, h, turned, j, pg_min64(BLOCK, a->time - j), BLOCK, w->rows);
    pack_elements(w->rows, d, w->turned + j * d / 2);
    turn(w->turned + j * d / 2, d / SIDE * (BLOCK / PAIRS));
  }
}

/* ---- forward ----------------------------------------------------------------------------- */
/* Queries [i, i + m): the maximum and the sum of exponentials are carried from block to block of
 * keys, and what has been summed shrinks when the maximum grows. */
static void forward_block(const pg_attention *a, const pg_attention_head *h, int64_t i, int64_t m,
                          memory *w) {
  const int64_t d = a->head_dim, steps = d / PAIRS;
  const float scale = a->scale;
  float max[BLOCK], sum[BLOCK], shrink[BLOCK], *scores = w->scores;
  for (int r = 0; r < BLOCK; r++) max[r] = -INFINITY, sum[r] = 0;
  copy_rows(a, h, a->query, i, m, BLOCK, w->rows);
  pack_rows(w->rows, d, w->queries);
  for (int64_t j = 0; j <= i; j += BLOCK) {
    product(BLOCK / SIDE, BLOCK / SIDE, steps, rows_of(w->keys + j * d, d), w->queries, scores,
            BLOCK, false);
    if (j == i) mask_diagonal(scores);
    memcpy(shrink, max, sizeof max);
    for (int64_t c = 0; c < BLOCK; c++) {
      const float *s = scores + c * BLOCK;
#pragma omp simd
      for (int64_t r = 0; r < BLOCK; r++) max[r] = scale * s[r] > max[r] ? scale * s[r] : max[r];
    }
    bool shrinks = false;
#pragma omp simd reduction(| : shrinks)
    for (int64_t r = 0; r < BLOCK; r++) {
      shrink[r] = pg_expf(shrink[r] - max[r]);
      sum[r] *= shrink[r];
      shrinks |= shrink[r] != 1;
    }
    for (int64_t c = 0; c < BLOCK; c++) {
      float *s = scores + c * BLOCK;
#pragma omp simd
      for (int64_t r = 0; r < BLOCK; r++) {
        s[r] = pg_expf(scale * s[r] - max[r]);
        sum[r] += s[r];
      }
    }
    pack_scores(scores, w->packed);
    for (int64_t l = 0; j > 0 && shrinks && l < d; l++) {
      float *o = w->sums + l * BLOCK;
#pragma omp simd
      for (int64_t r = 0; r < BLOCK; r++) o[r] *= shrink[r];
    }
    product(d / SIDE, BLOCK / SIDE, BLOCK / PAIRS, panels_of(w->turned + j * d / 2, BLOCK / PAIRS),
            w->packed, w->sums, BLOCK, j > 0);
  }
  for (int64_t r = 0; r < m; r++) h->lse[i + r] = (float)((double)max[r] + log((double)sum[r]));
  for (int64_t r = 0; r < BLOCK; r++) sum[r] = 1.0f / sum[r];
  store_turned(a, h, w->sums, sum, i, m, a->result);
}

/* ---- backward ---------------------------------------------------------------------------- */
/* Queries [i, i + m) against all their keys: with P = exp(scale QK' - lse), dV += P' dO,
 * dS = scale P o (dO V' - rowsum(dO o O)), dQ += dS K, dK += dS' Q. */
static void backward_block(const pg_attention *a, const pg_attention_head *h, int64_t i, int64_t m,
                           memory *w) {
  static const float one[BLOCK] = {[0 ... BLOCK - 1] = 1};
  const int64_t d = a->head_dim, steps = d / PAIRS;
  const float scale = a->scale;
  float lse[BLOCK], delta[BLOCK], *p = w->scores, *ds = w->dscores;
  copy_rows(a, h, a->query, i, m, BLOCK, w->rows);
  copy_rows(a, h, a->dout, i, m, BLOCK, w->douts);
  pack_rows(w->rows, d, w->queries);
  pack_rows(w->douts, d, w->packed_douts);
  pack_elements(w->rows, d, w->elements);
  pack_elements(w->douts, d, w->dout_elements);
  for (int64_t r = 0; r < BLOCK; r++) {
    const uint16_t *out = (const uint16_t *)a->out + h->at + (i + r) * h->ld;
    double dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t l = 0; l < (r < m ? d : 0); l++)
      dot += (double)pg_from_bf16(out[l]) * pg_from_bf16(w->douts[r * d + l]);
    /* Probabilities of the queries past the end come out 0. */
    lse[r] = r < m ? h->lse[i + r] : INFINITY;
    delta[r] = (float)dot;
  }
  for (int64_t j = 0; j <= i; j += BLOCK) {
    product(BLOCK / SIDE, BLOCK / SIDE, steps, rows_of(w->values + j * d, d), w->packed_douts, ds,
            BLOCK, false);
    product(BLOCK / SIDE, BLOCK / SIDE, steps, rows_of(w->keys + j * d, d), w->queries, p, BLOCK,
            false);
    if (j == i) mask_diagonal(p);
    for (int64_t c = 0; c < BLOCK; c++) {
      float *pc = p + c * BLOCK, *dsc = ds + c * BLOCK;
#pragma omp simd
      for (int64_t r = 0; r < BLOCK; r++) {
        pc[r] = pg_expf(scale * pc[r] - lse[r]);
        dsc[r] = scale * pc[r] * (dsc[r] - delta[r]);
      }
    }
    round_scores(p, w->rounded);
    round_scores(ds, w->drounded);
    pack_scores(ds, w->packed);
    /* The diagonal is the first block of queries that a block of keys meets. */
    product(BLOCK / SIDE, d / SIDE, BLOCK / PAIRS, rows_of(w->rounded, BLOCK), w->dout_elements,
            w->dvalue + j * d, d, j < i);
    product(BLOCK / SIDE, d / SIDE, BLOCK / PAIRS, rows_of(w->drounded, BLOCK), w->elements,
            w->dkey + j * d, d, j < i);
    product(d / SIDE, BLOCK / SIDE, BLOCK / PAIRS, panels_of(w->turned + j * d / 2, BLOCK / PAIRS),
            w->packed, w->sums, BLOCK, j > 0);
  }
  store_turned(a, h, w->sums, one, i, m, a->dquery);
}

static void backward_head(const pg_attention *a, const pg_attention_head *h, memory *w) {
  const int64_t d = a->head_dim;
  begin_head(a, h, a->key, padded(a->time), w);
  copy_rows(a, h, a->value, 0, a->time, padded(a->time), w->values);
  for (int64_t i = 0; i < a->time; i += BLOCK)
    backward_block(a, h, i, pg_min64(BLOCK, a->time - i), w);
  for (int64_t t = 0; t < a->time; t++) {
    pg_narrow(w->dkey + t * d, d, (uint16_t *)a->dkey + h->at + t * h->ld);
    pg_narrow(w->dvalue + t * d, d, (uint16_t *)a->dvalue + h->at + t * h->ld);
  }
}

/* ---- all heads --------------------------------------------------------------------------- */
/* A task is a head, or in the forward pass every parts-th block of its queries where there are
 * fewer heads than threads to keep busy. */
int PG_CPU(attention_tiles)(pg_queue *q, const pg_attention *a) {
  const int64_t all = a->batch * a->heads, blocks = padded(a->time) / BLOCK;
  const int64_t parts = a->dout || all >= 2 * q->threads ? 1 : pg_min64(blocks, q->threads);
  const int64_t floats = PG_CPU(attention_tile_scratch)(a->time, a->head_dim, a->dout);
  if (PG_CPU(scratch)(q, floats) < 0) return -1;
#pragma omp parallel num_threads(pg_team(q, all * a->time * a->head_dim))
  {
    const pg_float_mode mode = pg_float_mode_set(true);
    memory w;
    lay_out(&w, pg_scratch_of(q, floats, omp_get_thread_num()), a->time, a->head_dim, a->dout);
    tiles_begin();
#pragma omp for schedule(dynamic)
    for (int64_t t = 0; t < all * parts; t++) {
      const pg_attention_head h = pg_attention_at(a, t % all);
      if (a->dout) {
        backward_head(a, &h, &w);
        continue;
      }
      const int64_t last = blocks - 1 - t / all;
      begin_head(a, &h, a->value, (last + 1) * BLOCK, &w);
      for (int64_t i = last * BLOCK; i >= 0; i -= parts * BLOCK)
        forward_block(a, &h, i, pg_min64(BLOCK, a->time - i), &w);
    }
    tiles_end();
    pg_float_mode_restore(mode);
  }
  return 0;
}

#else

bool PG_CPU(attention_on_tiles)(pg_dtype type, int64_t head_dim) {
  return (void)type, (void)head_dim, false;
}
int64_t PG_CPU(attention_tile_scratch)(int64_t time, int64_t head_dim, bool backward) {
  return (void)time, (void)head_dim, (void)backward, 0;
}
int PG_CPU(attention_tiles)(pg_queue *q, const pg_attention *a) {
  return (void)q, (void)a, -1;
}
#endif
