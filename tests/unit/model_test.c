/* The model as an object: sizes, names, initial weights, refusals; and what must not change
 * results: padding, threads, buffers of other sizes, frozen parameters. */
#include "model_support.h"

static const shape small = {2, 16, 2, 6, 24, 97, 3, 13};

/* Under AddressSanitizer, too, an allocation that cannot be served gives NULL. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) {
  return "allocator_may_return_null=1";
}

TEST(the_presets_have_the_published_counts) {
  pg_context *ctx = open_context(1);
  static const struct {
    const char *name;
    int64_t weights, width, heads;
  } presets[] = {
      {"190m", 185680896, 512, 8}, {"380M", 379184640, 768, 12}, {"6_40-m.", 639797248, 1024, 16}};
  pg_model_config c;
  for (size_t i = 0; i < PG_COUNT(presets); i++) {
    MUST(ctx, pg_model_config_preset(ctx, presets[i].name, &c));
    MUST(ctx, pg_model_config_resolve(ctx, &c));
    CHECK(pg_model_config_weights(&c) == presets[i].weights, "%s", presets[i].name);
    CHECK(c.width == presets[i].width && c.heads == presets[i].heads && c.layers == 32 &&
              c.head_dim == 64 && c.mlp == 4 * c.width && c.vocab == 50257 && c.context == 2048,
          "%s", presets[i].name);
  }
  CHECK(pg_model_config_preset(ctx, "190mm", &c) == PG_ENOENT, "190mm");
  CHECK(strstr(pg_context_message(ctx), "190m, 380m, 640m"), "%s", pg_context_message(ctx));
  CHECK(pg_model_config_preset(ctx, "", &c) == PG_ENOENT, "empty");
  const shape tiny = {1, 4, 2, 2, 16, 4, 1, 2};
  c = make_config(&tiny);
  CHECK(pg_model_config_weights(&c) == 288, "%lld", (long long)pg_model_config_weights(&c));
  pg_context_free(ctx);
}

TEST(defaults_are_filled_in_and_zero_layers_allowed) {
  pg_context *ctx = open_context(1);
  pg_model_config c;
  pg_model *model;
  pg_model_config_default(&c);
  c.width = 24;
  c.heads = 1;
  c.vocab = 5;
  c.context = 7;
  MUST(ctx, pg_model_new(ctx, &c, &model));
  CHECK(pg_model_get_config(model)->head_dim == 64 && pg_model_get_config(model)->mlp == 96,
        "not resolved");
  CHECK(pg_model_count(model) == 2, "%zu parameters", pg_model_count(model));
  CHECK(pg_model_parameter(model, 2) == NULL && !pg_model_find(model, "nothing"), "found");
  pg_model_free(model);
  pg_model_free(NULL);
  pg_context_free(ctx);
}

TEST(names_order_roles_and_shapes_are_those_of_hugging_face) {
  static const char *const names[] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                      "self_attn.o_proj", "mlp.gate_proj",    "mlp.up_proj",
                                      "mlp.down_proj"};
  static const int64_t dims[][2] = {{12, 16}, {12, 16}, {12, 16}, {16, 12},
                                    {24, 16}, {24, 16}, {16, 24}};
  pg_context *ctx = open_context(1);
  pg_model_config c = make_config(&small);
  pg_model *model = make_model(ctx, &c, 0);
  int64_t weights = 0;
  CHECK(pg_model_count(model) == 16, "%zu", pg_model_count(model));
  for (size_t i = 0; i < 16; i++) {
    const pg_parameter *p = pg_model_parameter(model, i);
    char name[64];
    if (i == 0 || i == 15)
      snprintf(name, sizeof name, "%s.weight", i ? "lm_head" : "model.embed_tokens");
    else
      snprintf(name, sizeof name, "model.layers.%d.%s.weight", (int)(i - 1) / 7,
               names[(i - 1) % 7]);
    CHECK(!strcmp(p->name, name), "%s, want %s", p->name, name);
    CHECK(p->role == (i == 0 ? PG_EMBEDDING : i == 15 ? PG_HEAD : PG_BACKBONE), "%s", name);
    CHECK(p->layer == (i == 0 || i == 15 ? -1 : (int64_t)(i - 1) / 7), "%s", name);
    CHECK(p->rows == (i == 0 || i == 15 ? 97 : dims[(i - 1) % 7][0]), "%s", name);
    CHECK(p->columns == (i == 0 || i == 15 ? 16 : dims[(i - 1) % 7][1]), "%s", name);
    CHECK(p->value->ndim == 2 && p->value->shape[0] == p->rows &&
              p->value->shape[1] == p->columns && pg_tensor_contiguous(p->value),
          "%s", name);
    CHECK(!p->gradient && !p->increment && !p->slots && p->assignment == -1, "%s", name);
    CHECK(pg_model_find(model, name) == p, "%s", name);
    weights += p->rows * p->columns;
  }
  CHECK(weights == pg_model_config_weights(&c), "%lld", (long long)weights);
  CHECK(pg_model_embedding(model) == pg_model_parameter(model, 0), "embedding");
  CHECK(pg_model_head(model) == pg_model_parameter(model, 15), "head");
  CHECK(!strcmp(pg_role_name(PG_BACKBONE), "backbone"), "role");
  pg_model_free(model);
  CHECK(pg_context_live_tensors(ctx) == 0 && pg_context_bytes(ctx) == 0, "left over");
  pg_context_free(ctx);
}

TEST(initial_weights_depend_on_seed_and_name_only) {
  pg_context *ctx = open_context(1), *two = open_context(2);
  const shape other = {5, 16, 2, 6, 24, 131, 1, 4};
  pg_model_config c = make_config(&small), wide = make_config(&other);
  c.init_std[PG_HEAD] = wide.init_std[PG_HEAD];
  c.init_std[PG_BACKBONE] = wide.init_std[PG_BACKBONE];
  pg_model *a = make_model(ctx, &c, 11), *b = make_model(two, &wide, 11);
  pg_model *d = make_model(ctx, &c, 12);
  for (size_t i = 0; i < pg_model_count(a); i++) {
    const pg_parameter *p = pg_model_parameter(a, i);
    float *x = read_floats(p->value), *y = read_floats(pg_model_find(b, p->name)->value);
    float *z = read_floats(pg_model_parameter(d, i)->value);
    size_t bytes = (size_t)(p->rows * p->columns) * sizeof *x; /* the first rows of the larger */
    CHECK(!memcmp(x, y, bytes), "%s differs", p->name);
    CHECK(memcmp(x, z, bytes), "%s is the same under another seed", p->name);
    free(x);
    free(y);
    free(z);
  }
  pg_model_free(a);
  pg_model_free(b);
  pg_model_free(d);
  pg_context_free(ctx);
  pg_context_free(two);
}

TEST(initial_weights_have_their_standard_deviation) {
  pg_context *ctx = open_context(2);
  const shape s = {1, 64, 2, 32, 96, 331, 1, 4};
  pg_model_config c = make_config(&s);
  c.init_std[PG_EMBEDDING] = 0.5;
  c.init_std[PG_BACKBONE] = 0.02;
  c.init_std[PG_HEAD] = 0;
  pg_model *model = make_model(ctx, &c, 3);
  for (size_t i = 0; i < pg_model_count(model); i++) {
    const pg_parameter *p = pg_model_parameter(model, i);
    int64_t n = p->rows * p->columns;
    double sum = 0, std = c.init_std[p->role];
    int zeros = 0;
    float *x = read_floats(p->value);
    for (int64_t j = 0; j < n; j++) {
      sum += x[j];
      zeros += x[j] == 0;
    }
    /* n >= 4096: the deviation of the estimate is at most std / sqrt(2 n) = 1.1 percent. */
    CHECK(fabs(norm_of(x, n) / sqrt((double)n) - std) <= 0.03 * std, "%s: %g, want %g", p->name,
          norm_of(x, n) / sqrt((double)n), std);
    CHECK(fabs(sum / (double)n) <= 5 * std / sqrt((double)n), "%s: mean %g", p->name,
          sum / (double)n);
    CHECK(zeros == (std == 0 ? n : 0), "%s has %d zeros", p->name, zeros);
    free(x);
  }
  pg_model_free(model);
  pg_context_free(ctx);
}

TEST(impossible_sizes_are_refused_by_name) {
  pg_context *ctx = open_context(1);
  const int64_t billion = 1000000000;
  const struct {
    const char *names; /* must be in the message */
    shape s;
    int status;
  } bad[] = {
      {"model.layers is -1; allowed: 0 to", {-1, 16, 2, 6, 24, 97, 1, 4}, PG_EINVAL},
      {"model.layers is 1000000000", {billion, billion, 2, 6, 24, 97, 1, 4}, PG_EINVAL},
      {"model.width is 0", {1, 0, 2, 6, 24, 97, 1, 4}, PG_EINVAL},
      {"model.width is 1000000000", {1, billion, 2, 6, 24, 97, 1, 4}, PG_EINVAL},
      {"model.heads is 0", {1, 16, 0, 6, 24, 97, 1, 4}, PG_EINVAL},
      {"model.head_dim is 7; it must be even", {1, 16, 2, 7, 24, 97, 1, 4}, PG_EINVAL},
      {"model.head_dim is -2", {1, 16, 2, -2, 24, 97, 1, 4}, PG_EINVAL},
      {"model.heads x model.head_dim", {1, 16, 1 << 20, 1 << 20, 24, 97, 1, 4}, PG_EINVAL},
      {"model.mlp is -5", {1, 16, 2, 6, -5, 97, 1, 4}, PG_EINVAL},
      {"model.vocab is 1;", {1, 16, 2, 6, 24, 1, 1, 4}, PG_EINVAL},
      {"model.vocab is 5000000000", {1, 16, 2, 6, 24, 5 * billion, 1, 4}, PG_EINVAL},
      {"model.context is 0", {1, 16, 2, 6, 24, 97, 1, 0}, PG_EINVAL},
      {"no memory for a model of 504403158468919296 weights",
       {4096, 1 << 20, 1 << 10, 1 << 14, 1 << 24, 97, 1, 4},
       PG_ENOMEM},
      {"no memory for a model of 6",
       {1000, 1 << 18, 1 << 10, 1 << 8, 1 << 19, 97, 1, 4},
       PG_ENOMEM},
  };
  for (size_t i = 0; i < PG_COUNT(bad); i++) {
    pg_model_config c = make_config(&bad[i].s);
    pg_model *model = (pg_model *)1;
    c.init_std[PG_BACKBONE] = c.init_std[PG_HEAD] = 0;
    int status = pg_model_new(ctx, &c, &model);
    CHECK(status == bad[i].status, "%zu: %s: %s", i, pg_error_name(status),
          pg_context_message(ctx));
    CHECK(!model && strstr(pg_context_message(ctx), bad[i].names), "%s", pg_context_message(ctx));
  }
  pg_model_config c = make_config(&small);
#define REFUSED(field, value)                                                                      \
  do {                                                                                             \
    pg_model_config copy = c;                                                                      \
    copy.field = (value);                                                                          \
    CHECK(pg_model_config_resolve(ctx, &copy) == PG_EINVAL, #field " " #value);                    \
    CHECK(!strncmp(pg_context_message(ctx), "model." #field, sizeof "model." #field - 4), "%s",    \
          pg_context_message(ctx));                                                                \
  } while (0)
  REFUSED(norm_eps, 0);
  REFUSED(norm_eps, NAN);
  REFUSED(rope_base, -1);
  REFUSED(rope_base, INFINITY);
  REFUSED(logit_scale, 0);
  REFUSED(logit_scale, NAN);
  REFUSED(init_std[1], -0.1);
  REFUSED(init_std[2], NAN);
#undef REFUSED
  CHECK(pg_context_live_tensors(ctx) == 0 && pg_context_bytes(ctx) == 0, "left over");
  pg_context_free(ctx);
}

TEST(impossible_batches_are_refused) {
  pg_context *ctx = open_context(1);
  pg_model_config c = make_config(&small);
  pg_activations *a;
  CHECK(pg_activations_new(ctx, &c, PG_F32, 0, 13, PG_KEEP_ALL, &a) == PG_EINVAL && !a, "batch 0");
  CHECK(pg_activations_new(ctx, &c, PG_F32, 1, 14, PG_KEEP_ALL, &a) == PG_EINVAL,
        "time above the context");
  CHECK(strstr(pg_context_message(ctx), "time is 14; allowed: 1 to the model's context 13"), "%s",
        pg_context_message(ctx));
  CHECK(pg_activations_new(ctx, &c, PG_F32, INT64_MAX / 2, 13, PG_KEEP_ALL, &a) == PG_EINVAL,
        "overflow");
  CHECK(pg_activations_bytes(&c, PG_F32, INT64_MAX / 2, 13, PG_KEEP_ALL) == INT64_MAX, "saturates");
  pg_model_config large = c;
  large.layers = 4096;
  large.width = large.mlp = 1 << 20;
  CHECK(pg_activations_new(ctx, &large, PG_F32, 100000000, 13, PG_KEEP_ALL, &a) == PG_ENOMEM,
        "too large");
  CHECK(strstr(pg_context_message(ctx), "100000000 sequences of 13 tokens"), "%s",
        pg_context_message(ctx));
  CHECK(pg_context_bytes(ctx) == 0, "left over");
  pg_context_free(ctx);
}

TEST(calls_out_of_order_and_bad_ids_are_refused) {
  pg_context *ctx = open_context(1);
  pg_model_config c = make_config(&small), other = c;
  other.mlp++;
  pg_model *model = make_model(ctx, &c, 1), *wrong = make_model(ctx, &other, 1);
  pg_activations *a, *plain;
  const void *hidden;
  double loss;
  float range[39], logits[97];
  int32_t *tokens = make_ids(39, 97, 1), *targets = make_ids(39, 97, 2);
  MUST(ctx, pg_activations_new(ctx, &c, PG_F32, 3, 13, PG_KEEP_ALL, &a));
  MUST(ctx, pg_activations_new(ctx, &c, PG_F32, 3, 13, PG_KEEP_NOTHING, &plain));
#define REFUSED(code, call)                                                                        \
  do {                                                                                             \
    int status_ = (call);                                                                          \
    CHECK(status_ == (code), "%s: %s", pg_error_name(status_), pg_context_message(ctx));           \
  } while (0)
  REFUSED(PG_ESTATE, pg_head_loss(model, a, targets, 0, &loss, NULL));
  REFUSED(PG_ESTATE, pg_head_logits(model, a, 0, logits));
  REFUSED(PG_ESTATE, pg_model_backward(model, a));
  REFUSED(PG_EINVAL, pg_model_forward(wrong, a, tokens, 3, 13, &hidden));
  REFUSED(PG_EINVAL, pg_model_forward(model, a, tokens, 4, 13, &hidden));
  REFUSED(PG_EINVAL, pg_model_forward(model, a, tokens, 1, 14, &hidden));
  REFUSED(PG_EINVAL, pg_model_forward(model, a, tokens, 0, 13, &hidden));
  for (int bad = 0; bad < 2; bad++) {
    int32_t kept = tokens[38];
    tokens[38] = bad ? -1 : 97;
    REFUSED(PG_EDATA, pg_model_forward(model, a, tokens, 3, 13, &hidden));
    CHECK(strstr(pg_context_message(ctx), bad ? "token 38 is -1" : "token 38 is 97; allowed: 0"),
          "%s", pg_context_message(ctx));
    CHECK(!hidden, "hidden states of a refused forward");
    tokens[38] = kept;
  }
  REFUSED(PG_ESTATE, pg_head_loss(model, a, targets, 0, &loss, NULL)); /* the forward failed */
  MUST(ctx, pg_model_forward(model, a, tokens, 3, 13, &hidden));
  REFUSED(PG_ESTATE, pg_model_backward(model, a));
  int32_t kept = targets[7];
  targets[7] = 65535;
  REFUSED(PG_EDATA, pg_head_loss(model, a, targets, 1, &loss, NULL));
  CHECK(strstr(pg_context_message(ctx), "target 7 is 65535"), "%s", pg_context_message(ctx));
  targets[7] = kept;
  MUST(ctx, pg_head_loss(model, a, targets, 1, &loss, NULL));
  REFUSED(PG_ESTATE, pg_model_backward(wrong, a));
  MUST(ctx, pg_model_backward(model, a));
  REFUSED(PG_ESTATE, pg_model_backward(model, a));
  REFUSED(PG_ESTATE, pg_head_loss(model, a, targets, 1, &loss, NULL));
  MUST(ctx, pg_head_loss(model, a, targets, 0, &loss, NULL)); /* hidden states are still there */
  REFUSED(PG_EINVAL, pg_head_logits(model, a, 39, logits));
  REFUSED(PG_EINVAL, pg_head_ranges(model, a, pg_model_head(model)->value, 30, 10, range));
  REFUSED(PG_EINVAL, pg_head_ranges(model, a, pg_model_parameter(model, 1)->value, 0, 39, range));
  MUST(ctx, pg_model_forward(model, plain, tokens, 3, 13, &hidden));
  REFUSED(PG_EINVAL, pg_head_loss(model, plain, targets, 1, &loss, NULL));
#undef REFUSED
  free(tokens);
  free(targets);
  pg_activations_free(a);
  pg_activations_free(plain);
  pg_activations_free(NULL);
  pg_model_free(model);
  pg_model_free(wrong);
  pg_context_free(ctx);
}

/* Loss and all gradients of one pass in a context of its own. */
static float *fresh_pass(int threads, const shape *s, int64_t room, double *loss, int64_t *count) {
  pg_context *ctx = open_context(threads);
  pg_model_config c = make_config(s);
  c.context += room;
  pg_model *model = make_model(ctx, &c, 8);
  pg_activations *a;
  int32_t *tokens = make_ids(s->batch * s->time, s->vocab, 1);
  int32_t *targets = make_ids(s->batch * s->time, s->vocab, 2);
  MUST(ctx, pg_activations_new(ctx, &c, PG_F32, s->batch + room, s->time + room, PG_KEEP_ALL, &a));
  add_gradients(model);
  if (room) { /* leave something in every buffer */
    int64_t n = (s->batch + room) * (s->time + room);
    int32_t *more = make_ids(n, s->vocab, 3);
    pass(model, a, more, more, s->batch + room, s->time + room, 1);
    free(more);
    drop_gradients(model);
    add_gradients(model);
  }
  *loss = pass(model, a, tokens, targets, s->batch, s->time, 1.0 / (double)(s->batch * s->time));
  float *gradients = all_gradients(model, count);
  drop_gradients(model);
  free(tokens);
  free(targets);
  pg_activations_free(a);
  pg_model_free(model);
  CHECK(pg_context_live_tensors(ctx) == 0 && pg_context_bytes(ctx) == 0, "left over");
  pg_context_free(ctx);
  return gradients;
}

TEST(results_repeat_to_the_last_bit) {
  static const shape shapes[] = {{2, 16, 2, 6, 24, 97, 3, 13}, {1, 40, 1, 18, 33, 97, 1, 37},
                                 {1, 32, 1, 72, 64, 97, 4, 1}, {1, 12, 3, 2, 24, 97, 1, 1023},
                                 {1, 32, 2, 80, 64, 97, 2, 5}, {1, 32, 2, 128, 64, 97, 2, 5}};
  for (size_t i = 0; i < PG_COUNT(shapes); i++)
    for (int threads = 1; threads <= 2; threads++) {
      double loss[2];
      int64_t count;
      float *first = fresh_pass(threads, &shapes[i], 0, &loss[0], &count);
      float *second = fresh_pass(threads, &shapes[i], 0, &loss[1], &count);
      CHECK(loss[0] == loss[1] && isfinite(loss[0]), "shape %zu, %d threads", i, threads);
      CHECK(!memcmp(first, second, (size_t)count * sizeof *first), "shape %zu, %d threads", i,
            threads);
      free(first);
      free(second);
    }
}

TEST(larger_buffers_with_old_contents_change_nothing) {
  double loss[2];
  int64_t count;
  float *exact = fresh_pass(1, &small, 0, &loss[0], &count);
  float *roomy = fresh_pass(1, &small, 5, &loss[1], &count);
  CHECK(loss[0] == loss[1], "%.17g and %.17g", loss[0], loss[1]);
  CHECK(!memcmp(exact, roomy, (size_t)count * sizeof *exact), "gradients differ");
  free(exact);
  free(roomy);
}

TEST(padding_rows_never_leak) {
  pg_context *ctx = open_context(2);
  pg_model_config c = make_config(&small);
  pg_model *model = make_model(ctx, &c, 8);
  int32_t *tokens = make_ids(39, 97, 1), *targets = make_ids(39, 97, 2);
  float *gradients[3], logits[3][97], range[3][39];
  double loss[3];
  int64_t count;
  const float fill[3] = {0, 1e4f, NAN};
  for (int i = 0; i < 3; i++) {
    pg_activations *a;
    pg_parameter *padded[2] = {pg_model_embedding(model), pg_model_head(model)};
    for (int k = 0; k < 2; k++) { /* rows 97 ... 127 of the storage */
      const pg_tensor *v = padded[k]->value;
      char *end = (char *)v->storage->memory + v->storage->bytes;
      float row[16];
      for (int j = 0; j < 16; j++) row[j] = fill[i];
      for (int64_t r = 97; r < 128; r++) {
        char *at = (char *)v->data + r * 16 * (int64_t)sizeof *row;
        CHECK(at + sizeof row <= end, "no padding row %lld", (long long)r);
        MUST(ctx, ctx->kernels->upload(ctx->queue, at, row, sizeof row));
      }
    }
    MUST(ctx, pg_activations_new(ctx, &c, PG_F32, 3, 13, PG_KEEP_ALL, &a));
    add_gradients(model);
    loss[i] = pass(model, a, tokens, targets, 3, 13, 1.0 / 39);
    gradients[i] = all_gradients(model, &count);
    MUST(ctx, pg_head_logits(model, a, 38, logits[i]));
    MUST(ctx, pg_head_ranges(model, a, pg_model_head(model)->value, 0, 39, range[i]));
    drop_gradients(model);
    pg_activations_free(a);
  }
  CHECK(isfinite(loss[0]) && isfinite(norm_of(gradients[0], count)), "not finite");
  for (int i = 1; i < 3; i++) {
    CHECK(loss[i] == loss[0], "loss %.17g, %.17g with %g in the padding", loss[0], loss[i],
          (double)fill[i]);
    CHECK(!memcmp(gradients[i], gradients[0], (size_t)count * sizeof(float)), "gradients, %g",
          (double)fill[i]);
    CHECK(!memcmp(logits[i], logits[0], sizeof logits[0]), "logits, %g", (double)fill[i]);
    CHECK(!memcmp(range[i], range[0], sizeof range[0]), "ranges, %g", (double)fill[i]);
  }
  for (int i = 0; i < 3; i++) free(gradients[i]);
  free(tokens);
  free(targets);
  pg_model_free(model);
  pg_context_free(ctx);
}

TEST(ranges_and_logits_agree) {
  pg_context *ctx = open_context(2);
  pg_model_config c = make_config(&small);
  c.logit_scale = 0.5;
  pg_model *model = make_model(ctx, &c, 8);
  pg_activations *a;
  const void *hidden;
  int32_t *tokens = make_ids(39, 97, 1);
  float logits[97], range[20];
  MUST(ctx, pg_activations_new(ctx, &c, PG_F32, 3, 13, PG_KEEP_NOTHING, &a));
  MUST(ctx, pg_model_forward(model, a, tokens, 3, 13, &hidden));
  MUST(ctx, pg_head_ranges(model, a, pg_model_head(model)->value, 15, 20, range));
  for (int i = 0; i < 20; i++) {
    float most = -INFINITY, least = INFINITY;
    MUST(ctx, pg_head_logits(model, a, 15 + i, logits));
    for (int v = 0; v < 97; v++) {
      most = fmaxf(most, logits[v]);
      least = fminf(least, logits[v]);
    }
    /* Sums of 16 products in another order: 16 u of values that reach the range itself. */
    CHECK_CLOSE(range[i], most - least, 16 * UNIT_ROUNDOFF);
  }
  free(tokens);
  pg_activations_free(a);
  pg_model_free(model);
  pg_context_free(ctx);
}

TEST(later_tokens_do_not_change_earlier_features) {
  pg_context *ctx = open_context(2);
  const shape s = {2, 16, 2, 8, 24, 97, 1, 5};
  pg_model_config c = make_config(&s);
  pg_model *model = make_model(ctx, &c, 8);
  pg_activations *a;
  const int32_t tokens[2][5] = {{1, 2, 3, 4, 5}, {1, 2, 3, 8, 9}};
  float features[2][5 * 16];
  MUST(ctx, pg_activations_new(ctx, &c, PG_F32, 1, 5, PG_KEEP_NOTHING, &a));
  for (int i = 0; i < 2; i++) {
    const void *hidden;
    MUST(ctx, pg_model_forward(model, a, tokens[i], 1, 5, &hidden));
    MUST(ctx, ctx->kernels->download(ctx->queue, features[i], hidden, sizeof features[i]));
  }
  CHECK(!memcmp(features[0], features[1], 3 * 16 * sizeof(float)), "the first three differ");
  for (int t = 3; t < 5; t++)
    CHECK(memcmp(features[0] + t * 16, features[1] + t * 16, 16 * sizeof(float)), "%d is equal", t);
  pg_activations_free(a);
  pg_model_free(model);
  pg_context_free(ctx);
}

TEST(a_forward_that_keeps_nothing_gives_the_same_loss) {
  pg_context *ctx = open_context(2);
  pg_model_config c = make_config(&small);
  pg_model *model = make_model(ctx, &c, 8), *copy;
  pg_activations *training, *plain;
  int32_t *tokens = make_ids(39, 97, 1), *targets = make_ids(39, 97, 2);
  MUST(ctx, pg_activations_new(ctx, &c, PG_F32, 3, 13, PG_KEEP_ALL, &training));
  MUST(ctx, pg_activations_new(ctx, &c, PG_F32, 3, 13, PG_KEEP_NOTHING, &plain));
  MUST(ctx, pg_model_new(ctx, &c, &copy));
  MUST(ctx, pg_model_copy(copy, model));
  double loss = pass(model, training, tokens, targets, 3, 13, 0);
  CHECK(pass(copy, plain, tokens, targets, 3, 13, 0) == loss, "losses differ");
  CHECK(pg_activations_bytes(&c, PG_F32, 3, 13, PG_KEEP_NOTHING) <
            pg_activations_bytes(&c, PG_F32, 3, 13, PG_KEEP_ALL),
        "larger");
  free(tokens);
  free(targets);
  pg_activations_free(training);
  pg_activations_free(plain);
  pg_model_free(copy);
  pg_model_free(model);
  pg_context_free(ctx);
}

TEST(frozen_parameters_leave_the_other_gradients_as_they_are) {
  double loss;
  int64_t count;
  float *all = fresh_pass(2, &small, 0, &loss, &count);
  pg_context *ctx = open_context(2);
  pg_model_config c = make_config(&small);
  pg_model *model = make_model(ctx, &c, 8);
  pg_activations *a;
  int32_t *tokens = make_ids(39, 97, 1), *targets = make_ids(39, 97, 2);
  MUST(ctx, pg_activations_new(ctx, &c, PG_F32, 3, 13, PG_KEEP_ALL, &a));
  /* bit i: parameter i is trained. Head only; embedding only; the upper block; every other. */
  static const unsigned trained[] = {1u << 15, 1u, 0x7f00u, 0x5555u, 0xaaaau, 0};
  for (size_t k = 0; k < PG_COUNT(trained); k++) {
    int64_t at = 0;
    for (size_t i = 0; i < 16; i++)
      if (trained[k] >> i & 1) add_gradient(pg_model_parameter(model, i));
    pass(model, a, tokens, targets, 3, 13, 1.0 / 39);
    float *some = all_gradients(model, &count);
    for (size_t i = 0; i < 16; i++) {
      const pg_parameter *p = pg_model_parameter(model, i);
      int64_t n = p->rows * p->columns;
      if (p->gradient)
        CHECK(!memcmp(all + at, some + at, (size_t)n * sizeof *all), "%zu: %s", k, p->name);
      at += n;
    }
    free(some);
    drop_gradients(model);
  }
  free(all);
  free(tokens);
  free(targets);
  pg_activations_free(a);
  pg_model_free(model);
  pg_context_free(ctx);
}

TEST(activations_of_a_large_vocabulary_stay_small) {
  pg_context *ctx = open_context(1);
  pg_model_config c;
  pg_activations *a;
  pg_model_config_default(&c);
  c.layers = 4;
  c.width = 256;
  c.heads = 4;
  c.vocab = 50257;
  c.context = 1024;
  MUST(ctx, pg_model_config_resolve(ctx, &c));
  int64_t bytes = pg_activations_bytes(&c, PG_F32, 8, 1024, PG_KEEP_ALL);
  int64_t plain = pg_activations_bytes(&c, PG_F32, 8, 1024, PG_KEEP_NOTHING);
  MUST(ctx, pg_activations_new(ctx, &c, PG_F32, 8, 1024, PG_KEEP_ALL, &a));
  CHECK(pg_context_bytes(ctx) == bytes, "%lld, estimate %lld", (long long)pg_context_bytes(ctx),
        (long long)bytes);
  pg_activations_free(a);
  /* All logits alone would be 1.6 GB. */
  CHECK(bytes <= 900000000, "%lld bytes", (long long)bytes);
  CHECK(plain <= 250000000, "%lld bytes without training", (long long)plain);
  printf("  8192 positions: %.1f MB training (%.0f bytes each), %.1f MB without\n",
         1e-6 * (double)bytes, (double)bytes / 8192, 1e-6 * (double)plain);
  pg_context_free(ctx);
}

int main(void) {
  RUN(the_presets_have_the_published_counts);
  RUN(defaults_are_filled_in_and_zero_layers_allowed);
  RUN(names_order_roles_and_shapes_are_those_of_hugging_face);
  RUN(initial_weights_depend_on_seed_and_name_only);
  RUN(initial_weights_have_their_standard_deviation);
  RUN(impossible_sizes_are_refused_by_name);
  RUN(impossible_batches_are_refused);
  RUN(calls_out_of_order_and_bad_ids_are_refused);
  RUN(results_repeat_to_the_last_bit);
  RUN(larger_buffers_with_old_contents_change_nothing);
  RUN(padding_rows_never_leak);
  RUN(ranges_and_logits_agree);
  RUN(later_tokens_do_not_change_earlier_features);
  RUN(a_forward_that_keeps_nothing_gives_the_same_loss);
  RUN(frozen_parameters_leave_the_other_gradients_as_they_are);
  RUN(activations_of_a_large_vocabulary_stay_small);
  return unit_report();
}
