/* What attention.c and its twin on tiles, attention_amx.c, share. */
#ifndef PG_CPU_ATTENTION_H
#define PG_CPU_ATTENTION_H

#include "bf16.h"

/* A call's shape and tensors; NULL where the direction has none. */
typedef struct pg_attention {
  pg_dtype type;
  const void *query, *key, *value, *dout, *out;
  void *result, *dquery, *dkey, *dvalue;
  float *lse;
  int64_t batch, time, heads, head_dim, width; /* head_dim with padding */
  float scale;
} pg_attention;

/* One head of one sequence: where its first row is, and its statistics. */
typedef struct pg_attention_head {
  int64_t at, ld; /* elements */
  float *lse;
} pg_attention_head;

static inline pg_attention_head pg_attention_at(const pg_attention *a, int64_t index) {
  const int64_t ld = a->heads * a->head_dim;
  return (pg_attention_head){.at = index / a->heads * a->time * ld + index % a->heads * a->head_dim,
                             .ld = ld,
                             .lse = a->lse + index * a->time};
}

/* Whether calls of this type and head_dim run on tiles; what a thread then needs, in floats. */
bool PG_CPU(attention_on_tiles)(pg_dtype type, int64_t head_dim);
int64_t PG_CPU(attention_tile_scratch)(int64_t time, int64_t head_dim, bool backward);
int PG_CPU(attention_tiles)(pg_queue *q, const pg_attention *a);

#endif
