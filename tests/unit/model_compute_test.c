/* A model in bf16 beside the same model in fp32: copies that follow the weights, gradients, memory,
 * and what must stay fp32. */
#include "core/tensor_ops.h"
#include "model_support.h"

#include <unistd.h>

static const shape medium = {2, 48, 3, 16, 96, 97, 3, 24};
#define N (3 * 24)

typedef struct models {
  pg_context *ctx;
  pg_model_config config;
  pg_model *exact, *rounded;
  pg_activations *exact_a, *rounded_a;
  int32_t *tokens, *targets;
} models;

static void open_models(models *m) {
  m->ctx = open_context(2);
  m->config = make_config(&medium);
  m->config.logit_scale = 0.5;
  m->exact = make_model(m->ctx, &m->config, 8);
  MUST(m->ctx, pg_model_new(m->ctx, &m->config, &m->rounded));
  MUST(m->ctx, pg_model_set_compute(m->rounded, PG_BF16));
  MUST(m->ctx, pg_model_copy(m->rounded, m->exact));
  MUST(m->ctx, pg_activations_new(m->ctx, &m->config, PG_F32, 3, 24, PG_KEEP_ALL, &m->exact_a));
  MUST(m->ctx, pg_activations_new(m->ctx, &m->config, PG_BF16, 3, 24, PG_KEEP_ALL, &m->rounded_a));
  m->tokens = make_ids(N, 97, 1);
  m->targets = make_ids(N, 97, 2);
}

static void close_models(models *m) {
  drop_gradients(m->exact), drop_gradients(m->rounded);
  pg_activations_free(m->exact_a), pg_activations_free(m->rounded_a);
  pg_model_free(m->exact), pg_model_free(m->rounded);
  free(m->tokens), free(m->targets);
  pg_context_free(m->ctx);
}

/* To nearest even, for finite numbers. */
static uint16_t rounded(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* How many weights have a copy that is not their rounded value. */
static size_t stale(const pg_model *model) {
  size_t wrong = 0;
  for (size_t i = 0; i < pg_model_count(model); i++) {
    const pg_parameter *p = pg_model_parameter(model, i);
    int64_t n = p->rows * p->columns;
    float *w = read_floats(p->value);
    uint16_t *copy = malloc((size_t)n * sizeof *copy);
    MUST(p->copy->context, pg_tensor_read(p->copy, copy));
    for (int64_t j = 0; j < n; j++) wrong += copy[j] != rounded(w[j]);
    free(w);
    free(copy);
  }
  return wrong;
}

TEST(copies_follow_the_weights) {
  models m;
  char path[] = "/tmp/perigee-XXXXXX";
  open_models(&m);
  CHECK(pg_model_compute(m.exact) == PG_F32 && !pg_model_head(m.exact)->copy, "fp32 has copies");
  CHECK(pg_model_compute(m.rounded) == PG_BF16);
  CHECK(stale(m.rounded) == 0, "after pg_model_copy");
  MUST(m.ctx, pg_model_init(m.rounded, 9));
  CHECK(stale(m.rounded) == 0, "after pg_model_init");
  int file = mkstemp(path);
  CHECK(file >= 0, "%s", path);
  close(file);
  MUST(m.ctx, pg_model_save(m.exact, path));
  MUST(m.ctx, pg_model_load(m.rounded, path));
  unlink(path);
  CHECK(stale(m.rounded) == 0, "after pg_model_load");
  pg_parameter *head = pg_model_head(m.rounded), *first = pg_model_embedding(m.rounded);
  MUST(m.ctx, pg_tensor_fill(head->value, 1e3));  /* no weight rounds to it */
  MUST(m.ctx, pg_tensor_fill(first->value, 1e3)); /* no weight rounds to it */
  CHECK(stale(m.rounded) > 0, "a fill alone refreshes nothing, so this test can fail");
  MUST(m.ctx, pg_model_refresh(m.rounded, head));
  CHECK(stale(m.rounded) == (size_t)(97 * 48), "one parameter is refreshed, %zu are stale",
        stale(m.rounded));
  MUST(m.ctx, pg_model_refresh(m.rounded, NULL));
  CHECK(stale(m.rounded) == 0, "after pg_model_refresh of all");
  close_models(&m);
}

TEST(types_must_agree) {
  models m;
  open_models(&m);
  CHECK(pg_model_forward(m.rounded, m.exact_a, m.tokens, 3, 24, NULL) == PG_EINVAL);
  CHECK(strstr(pg_context_message(m.ctx), "F32") && strstr(pg_context_message(m.ctx), "BF16"), "%s",
        pg_context_message(m.ctx));
  CHECK(pg_model_set_compute(m.rounded, PG_F64) == PG_EINVAL, "%s", pg_context_message(m.ctx));
  CHECK(pg_model_compute(m.rounded) == PG_BF16, "a refusal changes the type");
  pg_activations *a;
  CHECK(pg_activations_new(m.ctx, &m.config, PG_I32, 3, 24, PG_KEEP_NOTHING, &a) == PG_EINVAL &&
        !a);
  close_models(&m);
}

/* Back in fp32 it is the fp32 model, and holds no more memory than before. */
TEST(back_to_fp32) {
  models m;
  float a[97], b[97];
  open_models(&m);
  int64_t held = pg_context_bytes(m.ctx), weights = pg_model_config_weights(&m.config);
  MUST(m.ctx, pg_model_set_compute(m.exact, PG_BF16));
  CHECK(pg_context_bytes(m.ctx) - held >= 2 * weights, "copies take memory");
  MUST(m.ctx, pg_model_set_compute(m.exact, PG_F32));
  CHECK(pg_context_bytes(m.ctx) == held, "copies are freed");
  MUST(m.ctx, pg_model_set_compute(m.rounded, PG_F32));
  MUST(m.ctx, pg_model_forward(m.exact, m.exact_a, m.tokens, 3, 24, NULL));
  MUST(m.ctx, pg_head_logits(m.exact, m.exact_a, 70, a));
  MUST(m.ctx, pg_model_forward(m.rounded, m.exact_a, m.tokens, 3, 24, NULL));
  MUST(m.ctx, pg_head_logits(m.rounded, m.exact_a, 70, b));
  CHECK(!memcmp(a, b, sizeof a), "logits differ");
  close_models(&m);
}

/* Some 20 tensors a block are rounded on the way there and as many back, by 2^-9.24 each in the
 * mean (tests/unit/kernels_bf16_test.c): sqrt(80) 2^-9.24 = 1.5e-2 for two blocks if nothing
 * amplified them. Three times that leaves room for the softmaxes of these large weights; a term of
 * the gradient that is missing or doubled shows as 0.1 and more in its parameter. */
TEST(gradients_are_near_those_of_fp32) {
  models m;
  int64_t count, at = 0;
  open_models(&m);
  add_gradients(m.exact), add_gradients(m.rounded);
  double exact = pass(m.exact, m.exact_a, m.tokens, m.targets, 3, 24, 1.0 / N);
  double loss = pass(m.rounded, m.rounded_a, m.tokens, m.targets, 3, 24, 1.0 / N);
  float *want = all_gradients(m.exact, &count), *got = all_gradients(m.rounded, &count);
  printf("  loss off by %.2g, gradients by %.2g\n", fabs(loss / exact - 1),
         distance(got, want, count));
  CHECK_CLOSE(loss, exact, 5e-3);
  CHECK(distance(got, want, count) < 4.5e-2, "gradients are off by %g", distance(got, want, count));
  CHECK(distance(got, want, count) > 1e-4, "nothing was rounded");
  for (size_t i = 0; i < pg_model_count(m.exact); i++) {
    const pg_parameter *p = pg_model_parameter(m.exact, i);
    int64_t n = p->rows * p->columns;
    double error = distance(got + at, want + at, n);
    CHECK(error < 9e-2, "%s: the gradient is off by %g", p->name, error);
    at += n;
  }
  /* They accumulate: a second micro-batch of the same tokens doubles the sums, to the rounding of
   * one fp32 addition, not of a bf16 one. */
  pass(m.rounded, m.rounded_a, m.tokens, m.targets, 3, 24, 1.0 / N);
  float *twice = all_gradients(m.rounded, &count);
  for (int64_t i = 0; i < count; i++) twice[i] *= 0.5f;
  CHECK(distance(twice, got, count) < 2e-6, "accumulated gradients are off by %g",
        distance(twice, got, count));
  free(want), free(got), free(twice);
  close_models(&m);
}

/* The range of an increment far below bf16's resolution of the head is the fp32 product of the
 * rounded hidden states. */
TEST(ranges_are_fp32_products) {
  models m;
  const void *hidden;
  uint16_t features[N * 48];
  float range[N];
  open_models(&m);
  pg_tensor *s = pg_model_head(m.exact)->value;
  float *matrix = read_floats(s);
  MUST(m.ctx, pg_model_forward(m.rounded, m.rounded_a, m.tokens, 3, 24, &hidden));
  MUST(m.ctx, pg_head_ranges(m.rounded, m.rounded_a, s, 0, N, range));
  MUST(m.ctx, m.ctx->kernels->download(m.ctx->queue, features, hidden, sizeof features));
  for (int i = 0; i < N; i++) {
    double most = -INFINITY, least = INFINITY;
    for (int v = 0; v < 97; v++) {
      double z = 0;
      for (int j = 0; j < 48; j++) {
        uint32_t bits = (uint32_t)features[i * 48 + j] << 16;
        float h;
        memcpy(&h, &bits, 4);
        z += 0.5 * h * matrix[v * 48 + j];
      }
      most = fmax(most, z);
      least = fmin(least, z);
    }
    /* Sums of 48 products whose sizes reach the range's: 48 u; bf16 weights would give 1e-3. */
    CHECK_CLOSE(range[i], most - least, 48 * UNIT_ROUNDOFF);
  }
  free(matrix);
  close_models(&m);
}

TEST(activations_take_half) {
  pg_model_config c = make_config(&medium);
  c.width = 512, c.heads = 8, c.head_dim = 64, c.mlp = 2048, c.layers = 8, c.context = 512;
  int64_t whole = pg_activations_bytes(&c, PG_F32, 8, 512, PG_KEEP_ALL);
  int64_t half = pg_activations_bytes(&c, PG_BF16, 8, 512, PG_KEEP_ALL);
  printf("  %.1f MB in fp32, %.1f MB in bf16\n", 1e-6 * (double)whole, 1e-6 * (double)half);
  /* Statistics and the chunk of logits stay: a few percent. */
  CHECK(half > whole / 2 && (double)half < 0.53 * (double)whole, "%lld of %lld", (long long)half,
        (long long)whole);
}

/* ---- what a product's operands look like to a backend ----------------------------------------
 */
static const pg_kernels *behind;
static int64_t products, misaligned;

static bool aligned(const void *p, int64_t ld, pg_dtype type) {
  return (((uintptr_t)p | (uintptr_t)(ld * (int64_t)pg_dtype_size(type))) & 15) == 0;
}
static int watched_gemm(pg_queue *q, const pg_gemm *g) {
  products++;
  misaligned += !aligned(g->a, g->lda, g->type_a) || !aligned(g->b, g->ldb, g->type_b) ||
                !aligned(g->c, g->ldc, g->type_c) ||
                !aligned(g->addend ? g->addend : g->c, g->ldc, g->type_c);
  return behind->gemm(q, g);
}

/* Fast products on a GPU want every row of every operand at a multiple of 16 bytes. With a width,
 * heads and MLP that are multiples of 8 only the vocabulary could prevent it: logits and their
 * gradients have padded rows, in both types. Several chunks, training and diagnostics. */
TEST(odd_vocabularies_keep_rows_aligned) {
  for (int which = 0; which < 4; which++) {
    const int64_t vocab = which & 1 ? 50257 : 97;
    const shape s = {1, 24, 1, 8, 40, vocab, 2, which & 1 ? 300 : 24};
    const pg_dtype type = which & 2 ? PG_BF16 : PG_F32;
    pg_context *ctx = open_context(2);
    const pg_model_config c = make_config(&s);
    pg_model *model = make_model(ctx, &c, 4);
    pg_activations *a;
    pg_kernels watched = *ctx->kernels;
    const int64_t n = s.batch * s.time;
    int32_t *tokens = make_ids(n, vocab, 1), *targets = make_ids(n, vocab, 2);
    float *range = malloc((size_t)n * sizeof *range), *logits = malloc((size_t)vocab * 4);
    MUST(ctx, pg_model_set_compute(model, type));
    MUST(ctx, pg_activations_new(ctx, &c, type, s.batch, s.time, PG_KEEP_ALL, &a));
    add_gradients(model);
    behind = ctx->kernels;
    watched.gemm = watched_gemm;
    ctx->kernels = &watched;
    products = misaligned = 0;
    pass(model, a, tokens, targets, s.batch, s.time, 1);
    MUST(ctx, pg_head_ranges(model, a, pg_model_head(model)->value, 0, n, range));
    MUST(ctx, pg_head_logits(model, a, 0, logits));
    ctx->kernels = behind;
    /* 7 matrices three times, the head three times and once more per chunk, one row. */
    CHECK(products == 21 + 4 * ((n + 511) / 512) + 1, "%lld products", (long long)products);
    CHECK(misaligned == 0, "V %lld, %s: %lld of %lld products have rows at odd places",
          (long long)vocab, pg_dtype_name(type), (long long)misaligned, (long long)products);
    free(tokens), free(targets), free(range), free(logits);
    drop_gradients(model);
    pg_activations_free(a);
    pg_model_free(model);
    pg_context_free(ctx);
  }
}

int main(void) {
  RUN(copies_follow_the_weights);
  RUN(types_must_agree);
  RUN(back_to_fp32);
  RUN(gradients_are_near_those_of_fp32);
  RUN(ranges_are_fp32_products);
  RUN(activations_take_half);
  RUN(odd_vocabularies_keep_rows_aligned);
  return unit_report();
}
