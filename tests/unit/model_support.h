/* What the tests of the model share: small models, tokens, gradients. Failures here abort. */
#ifndef PG_MODEL_SUPPORT_H
#define PG_MODEL_SUPPORT_H

#include "core/internal.h"
#include "core/model.h"
#include "core/random.h"
#include "unit.h"

/* Half the spacing of fp32 at 1: the relative error of one rounding. */
#define UNIT_ROUNDOFF 0x1p-24

#define MUST(ctx, call)                                                                            \
  do {                                                                                             \
    int status_ = (call);                                                                          \
    if (status_ < 0) {                                                                             \
      printf("%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call, pg_error_name(status_),             \
             (ctx) ? pg_context_message(ctx) : "");                                                \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

static inline pg_context *open_context(int threads) {
  pg_context *ctx;
  char message[256];
  pg_context_options options = {.device = unit_device(), .threads = threads};
  if (pg_context_new(&options, &ctx, message, sizeof message) < 0) {
    printf("no context: %s\n", message);
    exit(1);
  }
  return ctx;
}

typedef struct shape {
  int64_t layers, width, heads, head_dim, mlp, vocab, batch, time;
} shape;

/* Weights well above the usual 0.02, so that softmaxes and gates are far from linear. */
static inline pg_model_config make_config(const shape *s) {
  pg_model_config c;
  pg_model_config_default(&c);
  c.layers = s->layers;
  c.width = s->width;
  c.heads = s->heads;
  c.head_dim = s->head_dim;
  c.mlp = s->mlp;
  c.vocab = s->vocab;
  c.context = s->time;
  c.init_std[PG_EMBEDDING] = 1;
  c.init_std[PG_BACKBONE] = c.init_std[PG_HEAD] = 1 / sqrt((double)s->width);
  return c;
}

static inline pg_model *make_model(pg_context *ctx, const pg_model_config *c, uint64_t seed) {
  pg_model *model;
  MUST(ctx, pg_model_new(ctx, c, &model));
  MUST(ctx, pg_model_init(model, seed));
  return model;
}

/* n ids below vocab. */
static inline int32_t *make_ids(int64_t n, int64_t vocab, uint64_t stream) {
  int32_t *ids = malloc((size_t)n * sizeof *ids);
  if (!ids) abort();
  for (int64_t i = 0; i < n; i++) {
    uint32_t words[4];
    pg_philox(77, stream, (uint64_t)i, words);
    ids[i] = (int32_t)(words[0] % (uint32_t)vocab);
  }
  return ids;
}

static inline void add_gradient(pg_parameter *p) {
  int64_t dims[2] = {p->rows, p->columns};
  MUST(p->value->context, pg_tensor_new(p->value->context, PG_F32, 2, dims, &p->gradient));
}

static inline void add_gradients(pg_model *model) {
  for (size_t i = 0; i < pg_model_count(model); i++) add_gradient(pg_model_parameter(model, i));
}

static inline void drop_gradients(pg_model *model) {
  for (size_t i = 0; i < pg_model_count(model); i++) {
    pg_parameter *p = pg_model_parameter(model, i);
    pg_tensor_free(p->gradient);
    p->gradient = NULL;
  }
}

static inline pg_tensor *make_matrix(pg_context *ctx, const float *x, int64_t rows,
                                     int64_t columns) {
  pg_tensor *t;
  MUST(ctx, pg_tensor_new(ctx, PG_F32, 2, (int64_t[]){rows, columns}, &t));
  MUST(ctx, pg_tensor_write(t, x));
  return t;
}

static inline float *read_floats(const pg_tensor *t) {
  float *values = malloc((size_t)pg_tensor_elements(t) * sizeof *values);
  if (!values) abort();
  MUST(t->context, pg_tensor_read(t, values));
  return values;
}

/* The sum of the losses; with scale != 0 gradients are added up. */
static inline double pass(const pg_model *model, pg_activations *a, const int32_t *tokens,
                          const int32_t *targets, int64_t batch, int64_t time, double scale) {
  const void *hidden;
  double loss;
  pg_context *ctx = pg_model_context(model);
  MUST(ctx, pg_model_forward(model, a, tokens, batch, time, &hidden));
  MUST(ctx, pg_head_loss(model, a, targets, scale, &loss, NULL));
  if (scale != 0) MUST(ctx, pg_model_backward(model, a));
  return loss;
}

/* All gradients one after another, NaN where there is none; *count floats. */
static inline float *all_gradients(const pg_model *model, int64_t *count) {
  int64_t n = pg_model_config_weights(pg_model_get_config(model)), at = 0;
  float *all = malloc((size_t)n * sizeof *all);
  if (!all) abort();
  for (size_t i = 0; i < pg_model_count(model); i++) {
    const pg_parameter *p = pg_model_parameter(model, i);
    int64_t size = p->rows * p->columns;
    if (p->gradient)
      MUST(p->gradient->context, pg_tensor_read(p->gradient, all + at));
    else
      for (int64_t j = 0; j < size; j++) all[at + j] = NAN;
    at += size;
  }
  *count = n;
  return all;
}

static inline double norm_of(const float *x, int64_t n) {
  double squares = 0;
  for (int64_t i = 0; i < n; i++) squares += (double)x[i] * x[i];
  return sqrt(squares);
}

/* ||a - b|| / ||b|| */
static inline double distance(const float *a, const float *b, int64_t n) {
  double squares = 0;
  for (int64_t i = 0; i < n; i++) squares += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
  return sqrt(squares) / norm_of(b, n);
}

#endif
