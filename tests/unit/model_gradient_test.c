/* The model against a double-precision reference: logits, loss, gradients by finite differences,
 * and against the golden trajectory's first batch.
 *
 * The bar for fp32: a block has 11 stages that round (norm, product, rotation, scores, softmax,
 * product, sum; norm, product, gate, product with sum), embedding and head 3 more. Each stage's
 * relative error is at most about two roundings, since sums are blocked, and errors of stages add
 * up at worst: 2 (11 L + 3) u for what the forward pass gives. A backward pass has two products
 * per forward one and reads the forward's results, so three times that; single gradients are
 * compared on the scale of their matrix's root mean square, of which the largest of a few hundred
 * deviates by up to 4 standard deviations. A wrong epsilon or a missing factor is off by 1e-3 and
 * more. */
#include "model_support.h"
#include "reference_model.h"
#include <jansson.h>

static double forward_bar(const pg_model_config *c) {
  return 2 * (11 * (double)c->layers + 3) * UNIT_ROUNDOFF;
}
static double gradient_bar(const pg_model_config *c) {
  return 3 * forward_bar(c);
}

static const shape shapes[] = {
    /* layers width heads head_dim mlp vocab batch time */
    {2, 8, 4, 2, 12, 97, 2, 37},  {1, 40, 2, 18, 33, 31, 3, 16}, {1, 24, 2, 72, 64, 97, 1, 37},
    {2, 16, 2, 8, 64, 97, 4, 1},  {0, 16, 1, 4, 8, 97, 2, 9},    {1, 32, 1, 128, 40, 50, 1, 12},
    {2, 16, 1, 80, 24, 5, 2, 11}, {3, 12, 3, 4, 7, 130, 1, 1},   {1, 8, 2, 4, 8, 97, 1, 1023},
};

typedef struct fixture {
  pg_context *ctx;
  pg_model_config config;
  pg_model *model;
  pg_activations *activations;
  int64_t batch, time, n;
  int32_t *tokens, *targets;
  double **weights; /* of the reference */
} fixture;

static void open_fixture(fixture *f, const shape *s, double logit_scale) {
  f->ctx = open_context(2);
  f->config = make_config(s);
  f->config.logit_scale = logit_scale;
  f->model = make_model(f->ctx, &f->config, 5);
  f->batch = s->batch;
  f->time = s->time;
  f->n = s->batch * s->time;
  MUST(f->ctx, pg_activations_new(f->ctx, &f->config, PG_F32, s->batch, s->time, PG_KEEP_ALL,
                                  &f->activations));
  f->tokens = make_ids(f->n, s->vocab, 1);
  f->targets = make_ids(f->n, s->vocab, 2);
  f->weights = calloc(pg_model_count(f->model), sizeof *f->weights);
  for (size_t i = 0; i < pg_model_count(f->model); i++) {
    const pg_parameter *p = pg_model_parameter(f->model, i);
    float *values = read_floats(p->value);
    f->weights[i] = reference_alloc(p->rows * p->columns);
    for (int64_t j = 0; j < p->rows * p->columns; j++) f->weights[i][j] = values[j];
    free(values);
  }
}

static void close_fixture(fixture *f) {
  for (size_t i = 0; i < pg_model_count(f->model); i++) free(f->weights[i]);
  free(f->weights);
  free(f->tokens);
  free(f->targets);
  drop_gradients(f->model);
  pg_activations_free(f->activations);
  pg_model_free(f->model);
  CHECK(pg_context_live_tensors(f->ctx) == 0 && pg_context_bytes(f->ctx) == 0,
        "%lld tensors, %lld bytes left", (long long)pg_context_live_tensors(f->ctx),
        (long long)pg_context_bytes(f->ctx));
  pg_context_free(f->ctx);
}

static double reference(const fixture *f, double *logits) {
  return reference_loss(&f->config, f->weights, f->tokens, f->targets, f->batch, f->time, logits);
}

TEST(logits_and_loss_equal_the_reference) {
  double worst_logits = 0, worst_loss = 0;
  for (size_t i = 0; i < PG_COUNT(shapes); i++) {
    fixture f;
    open_fixture(&f, &shapes[i], i % 2 ? 0.75 : 1);
    int64_t vocab = f.config.vocab;
    double *want = reference_alloc(f.n * vocab), loss, want_loss = reference(&f, want);
    float *got = malloc((size_t)vocab * sizeof *got);
    float *losses = malloc((size_t)f.n * sizeof *losses);
    const void *hidden;
    double error = 0, scale = 0, sum = 0;
    MUST(f.ctx, pg_model_forward(f.model, f.activations, f.tokens, f.batch, f.time, &hidden));
    for (int64_t t = 0; t < f.n; t++) {
      MUST(f.ctx, pg_head_logits(f.model, f.activations, t, got));
      for (int64_t v = 0; v < vocab; v++) {
        double w = want[t * vocab + v];
        error += (got[v] - w) * (got[v] - w);
        scale += w * w;
      }
    }
    MUST(f.ctx, pg_head_loss(f.model, f.activations, f.targets, 0, &loss, losses));
    for (int64_t t = 0; t < f.n; t++) sum += losses[t];
    CHECK(sum == loss, "losses add up to %.17g, not to %.17g", sum, loss);
    error = sqrt(error / scale);
    CHECK(error <= forward_bar(&f.config), "shape %zu: logits off by %.3g, bar %.3g", i, error,
          forward_bar(&f.config));
    CHECK_CLOSE(loss, want_loss, forward_bar(&f.config));
    worst_logits = fmax(worst_logits, error);
    worst_loss = fmax(worst_loss, fabs(loss - want_loss) / want_loss);
    free(want);
    free(got);
    free(losses);
    close_fixture(&f);
  }
  printf("  worst relative error: logits %.3g, loss %.3g\n", worst_logits, worst_loss);
}

/* d/ds of the reference's mean loss at weights + s direction, s = 0: central differences at h and
 * h/2, extrapolated, so that the error is of order h^4. `direction` spans all matrices, or NULL:
 * the unit of entry `at` of matrix `which`. */
static double slope(fixture *f, double *const *direction, size_t which, int64_t at, double h) {
  double difference[2];
  for (int half = 0; half < 2; half++) {
    double step = half ? h / 2 : h, loss[2];
    for (int side = 0; side < 2; side++) {
      double moved = side ? -step : step;
      for (int undo = 0; undo < 2; undo++) {
        if (undo) {
          loss[side] = reference(f, NULL) / (double)f->n;
          moved = -moved;
        }
        if (!direction)
          f->weights[which][at] += moved;
        else
          for (size_t i = 0; i < pg_model_count(f->model); i++) {
            const pg_parameter *p = pg_model_parameter(f->model, i);
            for (int64_t j = 0; j < p->rows * p->columns; j++)
              f->weights[i][j] += moved * direction[i][j];
          }
      }
    }
    difference[half] = (loss[0] - loss[1]) / (2 * step);
  }
  return (4 * difference[1] - difference[0]) / 3;
}

/* What a deviation of parameter i's gradient is compared with, beside its norm. Scores have the
 * gradient p (dp - sum p dp), whose terms are of the size of v's gradient: at T = 1 they cancel
 * completely, and only rounding is left of q's and k's. Below 1e-12 differences of a loss of 5
 * tell nothing. */
static double noise(const fixture *f, size_t i, double bar) {
  size_t which = (i - 1) % 7;
  double floor = 1e-12 / bar;
  if (f->time > 1 || i == 0 || i + 1 >= pg_model_count(f->model) || which > 1) return floor;
  const pg_parameter *v = pg_model_parameter(f->model, i - which + 2);
  float *gradient = read_floats(v->gradient);
  floor += norm_of(gradient, v->rows * v->columns);
  free(gradient);
  return floor;
}

/* Along random directions within one matrix each, and within all. */
static double check_directions(fixture *f, double bar) {
  size_t count = pg_model_count(f->model);
  double **direction = calloc(count, sizeof *direction), worst = 0;
  for (size_t only = 0; only <= count; only++) { /* == count: all matrices */
    double along = 0, gradient_squares = 0, squares = 0;
    for (size_t i = 0; i < count; i++) {
      const pg_parameter *p = pg_model_parameter(f->model, i);
      int64_t n = p->rows * p->columns;
      float *normals = malloc((size_t)n * sizeof *normals);
      pg_normals(9, 100 * only + i, 0, (size_t)n, normals);
      direction[i] = reference_alloc(n);
      for (int64_t j = 0; j < n; j++)
        if (only == count || only == i) direction[i][j] = normals[j];
      for (int64_t j = 0; j < n; j++) squares += direction[i][j] * direction[i][j];
      free(normals);
    }
    for (size_t i = 0; i < count; i++) {
      const pg_parameter *p = pg_model_parameter(f->model, i);
      float *gradient = read_floats(p->gradient);
      for (int64_t j = 0; j < p->rows * p->columns; j++) {
        direction[i][j] /= sqrt(squares);
        along += direction[i][j] * gradient[j];
        if (only == count || only == i) gradient_squares += (double)gradient[j] * gradient[j];
      }
      free(gradient);
    }
    double want = slope(f, direction, 0, 0, 2e-3);
    /* |<g - g', u>| <= |g - g'| |u| with |u| = 1. */
    double scale = sqrt(gradient_squares) + noise(f, only, bar);
    CHECK(fabs(along - want) <= bar * scale, "%s: %.9g, want %.9g, norm %.3g",
          only == count ? "all" : pg_model_parameter(f->model, only)->name, along, want, scale);
    worst = fmax(worst, fabs(along - want) / scale);
    for (size_t i = 0; i < count; i++) free(direction[i]);
  }
  free(direction);
  return worst;
}

/* Single entries of every matrix: the first, the last, and some between. */
static double check_entries(fixture *f, double bar, int entries) {
  double worst = 0;
  for (size_t i = 0; i < pg_model_count(f->model); i++) {
    const pg_parameter *p = pg_model_parameter(f->model, i);
    int64_t n = p->rows * p->columns;
    float *gradient = read_floats(p->gradient);
    double typical = (norm_of(gradient, n) + noise(f, i, bar)) / sqrt((double)n);
    int32_t *picks = make_ids(entries, n, 300 + i);
    picks[0] = 0;
    if (p->role == PG_EMBEDDING) /* rows of tokens that occur */
      for (int e = 0; e < entries; e++)
        picks[e] = (int32_t)(f->tokens[e * 5 % f->n] * p->columns + picks[e] % p->columns);
    else
      picks[1] = (int32_t)(n - 1);
    for (int e = 0; e < entries; e++) {
      double want = slope(f, NULL, i, picks[e], 2e-3), got = gradient[picks[e]];
      double scale = fmax(fabs(want), typical);
      CHECK(fabs(got - want) <= bar * scale, "%s[%d]: %.9g, want %.9g, typical %.3g", p->name,
            (int)picks[e], got, want, typical);
      worst = fmax(worst, fabs(got - want) / scale);
    }
    free(picks);
    free(gradient);
  }
  return worst;
}

TEST(gradients_equal_central_differences) {
  double worst_direction = 0, worst_entry = 0;
  for (size_t i = 0; i < PG_COUNT(shapes); i++) {
    fixture f;
    bool slow = shapes[i].time > 100;
    open_fixture(&f, &shapes[i], i % 2 ? 0.75 : 1);
    double bar = gradient_bar(&f.config);
    add_gradients(f.model);
    pass(f.model, f.activations, f.tokens, f.targets, f.batch, f.time, 1.0 / (double)f.n);
    double direction = check_directions(&f, bar);
    double entry = check_entries(&f, 4 * bar, slow ? 2 : 6);
    printf("  shape %zu: worst relative error along directions %.3g (bar %.3g), of entries %.3g\n",
           i, direction, bar, entry);
    worst_direction = fmax(worst_direction, direction);
    worst_entry = fmax(worst_entry, entry);
    close_fixture(&f);
  }
  printf("  worst relative error: directions %.3g, entries %.3g\n", worst_direction, worst_entry);
}

TEST(a_chunked_head_gives_the_gradient_of_the_whole) {
  /* 600 positions make two chunks of the head. */
  const shape s = {1, 8, 2, 4, 8, 97, 2, 300};
  fixture f;
  open_fixture(&f, &s, 1);
  add_gradients(f.model);
  double loss =
      pass(f.model, f.activations, f.tokens, f.targets, f.batch, f.time, 1.0 / (double)f.n);
  CHECK_CLOSE(loss, reference(&f, NULL), forward_bar(&f.config));
  printf("  worst relative error along directions %.3g\n",
         check_directions(&f, gradient_bar(&f.config)));
  close_fixture(&f);
}

TEST(gradients_accumulate_over_micro_batches) {
  const shape s = {2, 16, 2, 8, 24, 97, 6, 11};
  fixture f;
  int64_t count, third = 2 * s.time;
  open_fixture(&f, &s, 1);
  add_gradients(f.model);
  double whole = pass(f.model, f.activations, f.tokens, f.targets, 6, s.time, 1.0 / (double)f.n);
  float *want = all_gradients(f.model, &count), *got;
  drop_gradients(f.model);
  add_gradients(f.model);
  double parts = 0;
  for (int m = 0; m < 3; m++)
    parts += pass(f.model, f.activations, f.tokens + m * third, f.targets + m * third, 2, s.time,
                  1.0 / (double)f.n);
  got = all_gradients(f.model, &count);
  CHECK_CLOSE(parts, whole, forward_bar(&f.config));
  double error = distance(got, want, count);
  CHECK(error <= gradient_bar(&f.config), "off by %.3g", error);
  printf("  three micro-batches: relative error %.3g\n", error);
  free(got);
  free(want);
  close_fixture(&f);
}

/* The batch of eight sequences whose first is `row`, from the training shards of the golden data.
 */
static bool find_batch(json_t *row, int32_t *tokens, int32_t *targets) {
  for (int shard = 1; shard <= 3; shard++) {
    char path[1024];
    static uint16_t ids[4096];
    snprintf(path, sizeof path, PG_TEST_DIR "/golden/trajectory/fineweb_train_%06d.bin", shard);
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 1024, SEEK_SET)) return false;
    int64_t count = (int64_t)fread(ids, sizeof *ids, PG_COUNT(ids), file);
    fclose(file);
    for (int64_t start = 0; start + 8 * 16 < count; start += 8 * 16) {
      size_t same = 0;
      while (same < 16 && json_integer_value(json_array_get(row, same)) == ids[start + same])
        same++;
      for (int64_t i = 0; i < 8 * 16; i++) {
        tokens[i] = ids[start + i];
        targets[i] = ids[start + i + 1];
      }
      if (same == 16) return true;
    }
  }
  return false;
}

TEST(the_first_golden_batch_has_its_loss_and_gradient_norm) {
  json_t *golden = json_load_file(PG_TEST_DIR "/golden/trajectory/expected.json", 0, NULL);
  json_t *first = json_object_get(golden, "first_batch");
  int32_t tokens[128], targets[128];
  int64_t sum = 0, count;
  CHECK(find_batch(json_object_get(first, "inputs_row0"), tokens, targets), "no such batch");
  for (int i = 0; i < 128; i++) sum += tokens[i];
  CHECK(sum == json_integer_value(json_object_get(first, "input_sum")), "sum %lld", (long long)sum);

  pg_context *ctx = open_context(2);
  const shape s = {2, 32, 2, 16, 128, 97, 8, 16};
  pg_model_config c = make_config(&s);
  pg_model *model;
  pg_activations *a;
  MUST(ctx, pg_model_new(ctx, &c, &model));
  MUST(ctx, pg_model_load(model, PG_TEST_DIR "/golden/trajectory/init.safetensors"));
  MUST(ctx, pg_activations_new(ctx, &c, PG_F32, 8, 16, PG_KEEP_ALL, &a));
  add_gradients(model);
  double loss = pass(model, a, tokens, targets, 8, 16, 1.0 / 128) / 128;
  float *gradients = all_gradients(model, &count);
  double norm = norm_of(gradients, count);
  /* Bars of SPEC §7. */
  CHECK_CLOSE(loss, 4.56535256385908, 1e-6);
  CHECK_CLOSE(norm, 1.1192576341900542, 5e-6);
  printf("  relative error: loss %.3g, gradient norm %.3g\n", fabs(loss / 4.56535256385908 - 1),
         fabs(norm / 1.1192576341900542 - 1));
  free(gradients);
  drop_gradients(model);
  pg_activations_free(a);
  pg_model_free(model);
  pg_context_free(ctx);
  json_decref(golden);
}

int main(void) {
  RUN(logits_and_loss_equal_the_reference);
  RUN(gradients_equal_central_differences);
  RUN(a_chunked_head_gives_the_gradient_of_the_whole);
  RUN(gradients_accumulate_over_micro_batches);
  RUN(the_first_golden_batch_has_its_loss_and_gradient_norm);
  return unit_report();
}
