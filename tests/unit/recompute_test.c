/* PG_KEEP_INPUTS against PG_KEEP_ALL: the same losses, gradients, weights and slots, bit for bit.
 * PG_TEST_DEVICE=cuda: on another device. */
#include "data_files.h"
#include "model_support.h"

#define UPDATES 3

static pg_context *ctx;

/* Other than the CPU: slow where it is emulated. */
static bool elsewhere(void) {
  return strcmp(pg_context_device(ctx), "cpu") != 0;
}

static pg_model *shaped_model(const shape *s, pg_dtype compute, pg_model_config *c) {
  pg_model *model;
  *c = make_config(s);
  MUST(ctx, pg_model_config_resolve(ctx, c));
  model = make_model(ctx, c, 5);
  MUST(ctx, pg_model_set_compute(model, compute));
  return model;
}

/* ---- one pass ------------------------------------------------------------------------------ */
/* Two micro-batches, the second one smaller, with gradients for the parameters from `first` on. */
static float *gradients_of(pg_model *model, const pg_model_config *c, const shape *s, pg_keep keep,
                           size_t first, double losses[2], int64_t *count) {
  pg_activations *a;
  int64_t n = s->batch * s->time;
  int32_t *tokens = make_ids(2 * n, c->vocab, 1), *targets = make_ids(2 * n, c->vocab, 2);
  MUST(ctx, pg_activations_new(ctx, c, pg_model_compute(model), s->batch, s->time, keep, &a));
  for (size_t i = first; i < pg_model_count(model); i++) add_gradient(pg_model_parameter(model, i));
  losses[0] = pass(model, a, tokens, targets, s->batch, s->time, 1e-2);
  losses[1] = pass(model, a, tokens + n, targets + n, (s->batch + 1) / 2, s->time, 1e-2);
  float *all = all_gradients(model, count);
  drop_gradients(model);
  pg_activations_free(a);
  free(tokens);
  free(targets);
  return all;
}

static void compare_passes(const shape *s, pg_dtype compute, size_t first) {
  pg_model_config c;
  pg_model *model = shaped_model(s, compute, &c);
  double kept[2], again[2];
  int64_t count;
  float *a = gradients_of(model, &c, s, PG_KEEP_ALL, first, kept, &count);
  float *b = gradients_of(model, &c, s, PG_KEEP_INPUTS, first, again, &count);
  CHECK(memcmp(kept, again, sizeof kept) == 0 && kept[0] != 0, "losses %.17g %.17g", kept[0],
        again[0]);
  CHECK(memcmp(a, b, (size_t)count * sizeof *a) == 0,
        "%lld layers, %s, from parameter %zu: gradients differ", (long long)s->layers,
        pg_dtype_name(compute), first);
  float largest = 0;
  for (int64_t i = 0; i < count; i++) largest = fmaxf(largest, fabsf(b[i]));
  CHECK(largest > 0, "all gradients are zero");
  free(a);
  free(b);
  pg_model_free(model);
}

TEST(gradients) {
  const shape shapes[] = {
      /* layers width heads head_dim mlp vocab batch time */
      {3, 24, 2, 10, 40, 61, 3, 17}, {1, 16, 2, 8, 24, 33, 2, 9}, {0, 16, 2, 8, 24, 33, 2, 9},
      {2, 16, 1, 16, 24, 33, 5, 1},  {4, 8, 3, 2, 5, 600, 1, 20},
  };
  for (size_t i = 0; i < PG_COUNT(shapes); i++) {
    compare_passes(&shapes[i], PG_F32, 0);
    compare_passes(&shapes[i], PG_BF16, 0);
  }
}

/* The pass ends at the first trained parameter: within a block, at a block's first matrix, at the
 * head. */
TEST(gradients_above_frozen_blocks) {
  const shape s = {3, 24, 2, 10, 40, 61, 3, 17};
  const size_t firsts[] = {8, 11, 22, 1, 15, 19};
  for (size_t i = 0; i < (elsewhere() ? 3 : PG_COUNT(firsts)); i++) {
    compare_passes(&s, PG_F32, firsts[i]);
    compare_passes(&s, PG_BF16, firsts[i]);
  }
}

/* ---- updates ------------------------------------------------------------------------------- */
typedef struct outcome {
  double losses[UPDATES], norms[UPDATES], factors[UPDATES];
  float *values; /* weights and slots */
  size_t count;
} outcome;

static void assign(pg_run *run, pg_role role, const char *optimizer, double lr) {
  pg_model *model = pg_run_model(run);
  const pg_optimizer *o = pg_optimizer_find(optimizer);
  pg_parameter *chosen[64];
  double hypers[PG_MAX_HYPERS];
  size_t count = 0;
  pg_optimizer_defaults(o, hypers);
  hypers[pg_optimizer_hyper_index(o, "lr", NULL)] = lr;
  for (size_t i = 0; i < pg_model_count(model); i++)
    if (pg_model_parameter(model, i)->role == role) chosen[count++] = pg_model_parameter(model, i);
  MUST(ctx, pg_run_assign(run, o, hypers, false, chosen, count, NULL));
}

static void collect(pg_run *run, outcome *out) {
  pg_model *model = pg_run_model(run);
  size_t room = 4 * (size_t)pg_model_config_weights(pg_model_get_config(model));
  out->values = calloc(room, sizeof *out->values);
  for (size_t i = 0; i < pg_model_count(model); i++) {
    const pg_parameter *p = pg_model_parameter(model, i);
    const pg_optimizer *o = pg_run_assignment(run, p->assignment)->optimizer;
    MUST(ctx, pg_tensor_read(p->value, out->values + out->count));
    out->count += (size_t)(p->rows * p->columns);
    for (size_t s = 0; s < o->slot_count; s++) {
      MUST(ctx, pg_tensor_read(p->slots[s], out->values + out->count));
      out->count += (size_t)pg_tensor_elements(p->slots[s]);
    }
  }
}

static outcome updates(const char *folder, const shape *s, pg_dtype compute, const char *head,
                       bool recompute) {
  outcome out = {0};
  pg_model_config c;
  pg_model *model = shaped_model(s, compute, &c);
  pg_run *run;
  pg_run_options options = {.data = folder,
                            .sequences = 2 * s->batch,
                            .micro = s->batch,
                            .max_norm = 0.05, /* always clips */
                            .recompute = recompute};
  MUST(ctx, pg_run_new(model, &options, &run));
  assign(run, PG_EMBEDDING, "adamw", 1e-2);
  assign(run, PG_BACKBONE, "muon", 1e-2);
  assign(run, PG_HEAD, head, 1e-2);
  for (int i = 0; i < UPDATES; i++) {
    pg_step step;
    MUST(ctx, pg_run_step(run, &step));
    out.losses[i] = step.loss;
    out.norms[i] = step.norm;
    out.factors[i] = step.factor;
  }
  collect(run, &out);
  pg_run_free(run);
  pg_model_free(model);
  return out;
}

TEST(updates) {
  const shape shapes[] = {
      {3, 24, 2, 10, 40, 61, 2, 17}, {1, 16, 2, 8, 24, 61, 2, 9}, {0, 16, 2, 8, 24, 61, 2, 9}};
  const char *const heads[] = {"adamw", "rownorm"};
  char folder[64];
  data_folder(folder);
  data_count_shard(ctx, data_path(folder, "x_train_0.bin"), 3, 2000, 61);
  for (size_t i = 0; i < PG_COUNT(shapes); i++)
    for (int h = 0; h < 2; h++)
      for (int half = 0; half < 2; half++) {
        pg_dtype compute = half ? PG_BF16 : PG_F32;
        if (elsewhere() && h != half) continue;
        outcome kept = updates(folder, &shapes[i], compute, heads[h], false);
        outcome again = updates(folder, &shapes[i], compute, heads[h], true);
        CHECK(kept.factors[0] < 1, "nothing was clipped: %g", kept.factors[0]);
        CHECK(memcmp(kept.losses, again.losses, sizeof kept.losses) == 0 &&
                  memcmp(kept.norms, again.norms, sizeof kept.norms) == 0,
              "%s, %s: losses or norms differ", heads[h], pg_dtype_name(compute));
        CHECK(kept.count == again.count &&
                  memcmp(kept.values, again.values, kept.count * sizeof *kept.values) == 0,
              "%s, %s: weights or slots differ", heads[h], pg_dtype_name(compute));
        free(kept.values);
        free(again.values);
      }
  data_folder_remove(folder);
}

/* ---- memory -------------------------------------------------------------------------------- */
/* Per block but the first, what is saved is all but the block's input: model_internal.h. Every
 * buffer is a whole number of 256 bytes here. */
TEST(what_is_saved) {
  const shape s = {5, 64, 2, 32, 128, 100, 4, 64};
  const int64_t n = s.batch * s.time, inner = s.heads * s.head_dim;
  for (int half = 0; half < 2; half++) {
    pg_dtype compute = half ? PG_BF16 : PG_F32;
    pg_model_config c;
    pg_model *model = shaped_model(&s, compute, &c);
    int64_t all = pg_activations_bytes(&c, compute, s.batch, s.time, PG_KEEP_ALL);
    int64_t inputs = pg_activations_bytes(&c, compute, s.batch, s.time, PG_KEEP_INPUTS);
    int64_t block = (s.width + 6 * inner + 3 * s.mlp) * n * (half ? 2 : 4) +
                    (2 + 3 * s.heads) * n * (int64_t)sizeof(float);
    CHECK(all - inputs == (s.layers - 1) * block, "saved %lld bytes, %lld expected",
          (long long)(all - inputs), (long long)((s.layers - 1) * block));
    int64_t before = pg_context_bytes(ctx);
    pg_activations *a;
    MUST(ctx, pg_activations_new(ctx, &c, compute, s.batch, s.time, PG_KEEP_INPUTS, &a));
    CHECK(pg_context_bytes(ctx) - before == inputs);
    pg_activations_free(a);
    pg_model_free(model);
  }
}

int main(void) {
  const pg_context_options options = {.device = unit_device(), .threads = 2};
  char message[256];
  if (pg_context_new(&options, &ctx, message, sizeof message) < 0) {
    printf("no context: %s\n", message);
    return 1;
  }
  RUN(gradients);
  RUN(gradients_above_frozen_blocks);
  RUN(updates);
  RUN(what_is_saved);
  pg_context_free(ctx);
  return unit_report();
}
