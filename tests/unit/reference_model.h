/* The model of SPEC §1 once more, independent of the core: double precision, plain loops, one
 * position after another. Weights w[p] are row-major matrices in the model's parameter order
 * (embedding; per block q k v o gate up down; head). */
#ifndef PG_REFERENCE_MODEL_H
#define PG_REFERENCE_MODEL_H

#include "core/model.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* y[rows] = W[rows, columns] x */
static inline void reference_product(const double *w, int64_t rows, int64_t columns,
                                     const double *x, double *y) {
  for (int64_t i = 0; i < rows; i++) {
    y[i] = 0;
    for (int64_t j = 0; j < columns; j++) y[i] += w[i * columns + j] * x[j];
  }
}

static inline void reference_norm(const double *x, int64_t n, double eps, double *y) {
  double squares = 0;
  for (int64_t i = 0; i < n; i++) squares += x[i] * x[i];
  for (int64_t i = 0; i < n; i++) y[i] = x[i] / sqrt(squares / (double)n + eps);
}

/* Norm over the head dimension, then the half-split rotation, in place. */
static inline void reference_norm_rotate(double *x, int64_t heads, int64_t size, int64_t position,
                                         double eps, double base) {
  int64_t half = size / 2;
  for (double *head = x; head < x + heads * size; head += size) {
    reference_norm(head, size, eps, head);
    for (int64_t i = 0; i < half; i++) {
      double angle = (double)position * pow(base, -2.0 * (double)i / (double)size);
      double left = head[i], right = head[i + half];
      head[i] = left * cos(angle) - right * sin(angle);
      head[i + half] = right * cos(angle) + left * sin(angle);
    }
  }
}

static inline double *reference_alloc(int64_t n) {
  double *memory = calloc((size_t)(n > 0 ? n : 1), sizeof *memory);
  if (!memory) abort();
  return memory;
}

/* out[position] = causal attention of one sequence, q k v [time, heads * size]. */
static inline void reference_attention(const double *q, const double *k, const double *v,
                                       int64_t time, int64_t heads, int64_t size, double *out) {
  int64_t inner = heads * size;
  double *p = reference_alloc(time);
  for (int64_t t = 0; t < time; t++)
    for (int64_t h = 0; h < heads; h++) {
      double largest = -INFINITY, sum = 0;
      for (int64_t s = 0; s <= t; s++) {
        p[s] = 0;
        for (int64_t i = 0; i < size; i++)
          p[s] += q[t * inner + h * size + i] * k[s * inner + h * size + i];
        p[s] /= sqrt((double)size);
        largest = fmax(largest, p[s]);
      }
      for (int64_t s = 0; s <= t; s++) sum += p[s] = exp(p[s] - largest);
      for (int64_t i = 0; i < size; i++) {
        double total = 0;
        for (int64_t s = 0; s <= t; s++) total += p[s] / sum * v[s * inner + h * size + i];
        out[t * inner + h * size + i] = total;
      }
    }
  free(p);
}

/* One block on one sequence x [time, width], in place. w: the block's seven matrices. */
static inline void reference_block(const pg_model_config *c, double *const *w, int64_t time,
                                   double *x) {
  int64_t d = c->width, inner = c->heads * c->head_dim, f = c->mlp;
  double *q = reference_alloc(4 * time * inner), *k = q + time * inner, *v = k + time * inner;
  double *attended = v + time * inner;
  double *y = reference_alloc(2 * d + 2 * f), *sum = y + d, *gate = sum + d, *up = gate + f;
  for (int64_t t = 0; t < time; t++) {
    reference_norm(x + t * d, d, c->norm_eps, y);
    reference_product(w[0], inner, d, y, q + t * inner);
    reference_product(w[1], inner, d, y, k + t * inner);
    reference_product(w[2], inner, d, y, v + t * inner);
    reference_norm_rotate(q + t * inner, c->heads, c->head_dim, t, c->norm_eps, c->rope_base);
    reference_norm_rotate(k + t * inner, c->heads, c->head_dim, t, c->norm_eps, c->rope_base);
  }
  reference_attention(q, k, v, time, c->heads, c->head_dim, attended);
  for (int64_t t = 0; t < time; t++) {
    reference_product(w[3], d, inner, attended + t * inner, sum);
    for (int64_t i = 0; i < d; i++) x[t * d + i] += sum[i];
    reference_norm(x + t * d, d, c->norm_eps, y);
    reference_product(w[4], f, d, y, gate);
    reference_product(w[5], f, d, y, up);
    for (int64_t i = 0; i < f; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    reference_product(w[6], d, f, gate, sum);
    for (int64_t i = 0; i < d; i++) x[t * d + i] += sum[i];
  }
  free(q);
  free(y);
}

/* Sum of the cross entropies of batch sequences. `logits` [batch*time, vocab] may be NULL. */
static inline double reference_loss(const pg_model_config *c, double *const *w,
                                    const int32_t *tokens, const int32_t *targets, int64_t batch,
                                    int64_t time, double *logits) {
  int64_t d = c->width;
  double *const *head = w + 1 + 7 * c->layers;
  double *x = reference_alloc(time * d), *h = reference_alloc(d), *z = reference_alloc(c->vocab);
  double loss = 0;
  for (int64_t b = 0; b < batch; b++) {
    for (int64_t t = 0; t < time; t++)
      memcpy(x + t * d, w[0] + tokens[b * time + t] * d, (size_t)d * sizeof *x);
    for (int64_t layer = 0; layer < c->layers; layer++)
      reference_block(c, w + 1 + 7 * layer, time, x);
    for (int64_t t = 0; t < time; t++) {
      double largest = -INFINITY, sum = 0;
      reference_norm(x + t * d, d, c->norm_eps, h);
      reference_product(*head, c->vocab, d, h, z);
      for (int64_t i = 0; i < c->vocab; i++) largest = fmax(largest, z[i] *= c->logit_scale);
      for (int64_t i = 0; i < c->vocab; i++) sum += exp(z[i] - largest);
      loss += largest + log(sum) - z[targets[b * time + t]];
      if (logits) memcpy(logits + (b * time + t) * c->vocab, z, (size_t)c->vocab * sizeof *z);
    }
  }
  free(x);
  free(h);
  free(z);
  return loss;
}

#endif
