/* Heads of tests of cause (pg_head_config): gradients against central differences of the fp64
 * reference, exact where a switch promises that something does not change, files, refusals.
 *
 * The bar of gradients is that of model_gradient_test.c, 6 (11 L + 3) u for L blocks, with two more
 * stages for the product with B and the projection: 6 (11 L + 5) u, u the roundoff of the compute
 * type. */
#include "core/model_internal.h"
#include "core/safetensors.h"
#include "data_files.h"
#include "model_support.h"
#include "reference_model.h"

static double bar_of(const pg_model_config *c, double roundoff) {
  return 6 * (11 * (double)c->layers + 5) * roundoff;
}

typedef struct fixture {
  pg_context *ctx;
  pg_model_config config;
  pg_model *model;
  pg_activations *a;
  int64_t batch, time, n;
  int32_t *tokens, *targets;
} fixture;

static const shape two_blocks = {2, 18, 3, 6, 20, 97, 2, 9};
static const shape one_position = {0, 18, 1, 4, 8, 97, 1, 1};

static void open_fixture(fixture *f, const shape *s, const pg_head_config *head, pg_dtype compute,
                         pg_keep keep) {
  f->ctx = open_context(2);
  f->config = make_config(s);
  f->config.logit_scale = 0.75;
  f->config.head = *head;
  f->model = make_model(f->ctx, &f->config, 5);
  MUST(f->ctx, pg_model_set_compute(f->model, compute));
  f->batch = s->batch;
  f->time = s->time;
  f->n = s->batch * s->time;
  MUST(f->ctx, pg_activations_new(f->ctx, &f->config, compute, s->batch, s->time, keep, &f->a));
  f->tokens = make_ids(f->n, s->vocab, 1);
  f->targets = make_ids(f->n, s->vocab, 2);
  add_gradients(f->model);
}

static void close_fixture(fixture *f) {
  free(f->tokens);
  free(f->targets);
  drop_gradients(f->model);
  pg_activations_free(f->a);
  pg_model_free(f->model);
  CHECK(pg_context_live_tensors(f->ctx) == 0 && pg_context_bytes(f->ctx) == 0,
        "%lld tensors, %lld bytes left", (long long)pg_context_live_tensors(f->ctx),
        (long long)pg_context_bytes(f->ctx));
  pg_context_free(f->ctx);
}

static double mean_loss(fixture *f) {
  return pass(f->model, f->a, f->tokens, f->targets, f->batch, f->time, 1.0 / (double)f->n) /
         (double)f->n;
}

/* ---- the reference ----------------------------------------------------------------------------
 */
static double **read_weights(const fixture *f) {
  double **w = calloc(pg_model_count(f->model), sizeof *w);
  for (size_t i = 0; i < pg_model_count(f->model); i++) {
    const pg_parameter *p = pg_model_parameter(f->model, i);
    float *values = read_floats(p->value);
    w[i] = reference_alloc(p->rows * p->columns);
    for (int64_t j = 0; j < p->rows * p->columns; j++) w[i][j] = values[j];
    free(values);
  }
  return w;
}

static void free_weights(const fixture *f, double **w) {
  for (size_t i = 0; i < pg_model_count(f->model); i++) free(w[i]);
  free(w);
}

/* The reference of one matrix for a head: its classes are a vocabulary, of which the embedding has
 * rows too, and its head is the product. */
static double reference_of(const fixture *f, double *const *w, const double *head, double *logits) {
  pg_model_config c = f->config;
  const int64_t d = c.width, classes = pg_model_classes(&c), rank = c.head.rank;
  const size_t count = (size_t)(7 * c.layers + 2);
  double **list = calloc(count, sizeof *list), *product = NULL;
  list[0] = reference_alloc(classes * d);
  memcpy(list[0], w[0], (size_t)(c.vocab * d) * sizeof(double));
  for (size_t i = 1; i + 1 < count; i++) list[i] = w[i];
  if (!head && rank) {
    const double *b = w[count - 1], *a = w[count];
    product = reference_alloc(classes * d);
    for (int64_t i = 0; i < classes; i++)
      for (int64_t j = 0; j < d; j++)
        for (int64_t k = 0; k < rank; k++) product[i * d + j] += a[i * rank + k] * b[k * d + j];
  }
  list[count - 1] = head ? (double *)head : product ? product : w[count - 1];
  c.vocab = classes;
  if (head) c.logit_scale = 1; /* hidden states are wanted as they are */
  const double loss = reference_loss(&c, list, f->tokens, f->targets, f->batch, f->time, logits);
  free(list[0]);
  free(product);
  free(list);
  return loss / (double)f->n;
}

/* Central differences at h and h/2 of `value` along a unit direction in parameter `which`,
 * extrapolated. */
typedef double value_fn(const fixture *f, double *const *w, void *self);
static double slope(const fixture *f, double **w, size_t which, const double *direction, int64_t n,
                    value_fn *value, void *self) {
  double difference[2];
  for (int half = 0; half < 2; half++) {
    const double step = half ? 1e-3 : 2e-3;
    double at[2];
    for (int side = 0; side < 2; side++) {
      const double moved = side ? -step : step;
      for (int64_t j = 0; j < n; j++) w[which][j] += moved * direction[j];
      at[side] = value(f, w, self);
      for (int64_t j = 0; j < n; j++) w[which][j] -= moved * direction[j];
    }
    difference[half] = (at[0] - at[1]) / (2 * step);
  }
  return (4 * difference[1] - difference[0]) / 3;
}

static double loss_value(const fixture *f, double *const *w, void *self) {
  (void)self;
  return reference_of(f, w, NULL, NULL);
}

/* Parameters [first, last) along random directions. */
static void check_slopes(fixture *f, size_t first, size_t last, value_fn *value, void *self) {
  double **w = read_weights(f);
  const double bar = bar_of(&f->config, UNIT_ROUNDOFF);
  for (size_t i = first; i < last; i++) {
    const pg_parameter *p = pg_model_parameter(f->model, i);
    const int64_t n = p->rows * p->columns;
    float *normals = malloc((size_t)n * sizeof *normals), *gradient = read_floats(p->gradient);
    double *direction = reference_alloc(n), squares = 0, along = 0;
    pg_normals(9, i, 0, (size_t)n, normals);
    for (int64_t j = 0; j < n; j++) squares += (double)normals[j] * normals[j];
    for (int64_t j = 0; j < n; j++) {
      direction[j] = normals[j] / sqrt(squares);
      along += direction[j] * gradient[j];
    }
    const double want = slope(f, w, i, direction, n, value, self);
    const double scale = norm_of(gradient, n) + 1e-12 / bar;
    CHECK(fabs(along - want) <= bar * scale, "%s: %.9g, want %.9g, norm %.3g", p->name, along, want,
          scale);
    free(normals);
    free(gradient);
    free(direction);
  }
  free_weights(f, w);
}

TEST(factors_and_extra_classes_have_the_gradients_of_their_product) {
  static const pg_head_config heads[] = {
      {.rank = 5}, {.extra = 13}, {.rank = 7, .extra = 3}, {.rank = 18}, {.extra = 1}};
  static const shape *const shapes[] = {&two_blocks, &one_position};
  for (size_t i = 0; i < PG_COUNT(heads); i++)
    for (size_t s = 0; s < PG_COUNT(shapes); s++) {
      fixture f;
      open_fixture(&f, shapes[s], &heads[i], PG_F32, i % 2 ? PG_KEEP_INPUTS : PG_KEEP_ALL);
      double **w = read_weights(&f);
      CHECK_CLOSE(mean_loss(&f), reference_of(&f, w, NULL, NULL), bar_of(&f.config, UNIT_ROUNDOFF));
      free_weights(&f, w);
      check_slopes(&f, 0, pg_model_count(f.model), loss_value, NULL);
      int64_t weights = 0;
      for (size_t p = 0; p < pg_model_count(f.model); p++)
        weights += pg_model_parameter(f.model, p)->rows * pg_model_parameter(f.model, p)->columns;
      CHECK(weights == pg_model_config_weights(&f.config), "%lld weights", (long long)weights);
      close_fixture(&f);
    }
}

TEST(a_product_of_factors_has_the_deviation_that_one_matrix_has) {
  fixture f;
  shape s = two_blocks;
  s.vocab = 4000;
  open_fixture(&f, &s, &(pg_head_config){.rank = 6}, PG_F32, PG_KEEP_ALL);
  pg_tensor *u;
  MUST(f.ctx, pg_model_head_matrix(f.model, &u));
  float *values = read_floats(u);
  const double rms = norm_of(values, 4000 * 18) / sqrt(4000 * 18);
  /* its square is a mean over 6 x 18 squares of B: relative deviation sqrt(2 / 108) of it */
  CHECK_CLOSE(rms, f.config.init_std[PG_HEAD], 4 * 0.5 * sqrt(2 / 108.));
  free(values);
  pg_tensor_free(u);
  close_fixture(&f);
}

/* ---- the backward pass on a subspace -----------------------------------------------------------
 */
typedef struct signal {
  double *sent; /* [n, d]: what the head sends back, on the subspace */
} signal;

/* <sent, h>: its gradient is what the blocks must get, while `sent` is held fixed. */
static double sent_value(const fixture *f, double *const *w, void *self) {
  const signal *s = self;
  const int64_t d = f->config.width, classes = pg_model_classes(&f->config);
  double *head = reference_alloc(classes * d), *z = reference_alloc(f->n * classes), sum = 0;
  for (int64_t i = 0; i < d; i++) head[i * d + i] = 1;
  reference_of(f, w, head, z);
  for (int64_t i = 0; i < f->n; i++)
    for (int64_t j = 0; j < d; j++) sum += s->sent[i * d + j] * z[i * classes + j];
  free(head);
  free(z);
  return sum;
}

static void make_signal(const fixture *f, signal *s) {
  const int64_t d = f->config.width, classes = pg_model_classes(&f->config),
                r = f->model->basis->shape[0];
  double **w = read_weights(f), *z = reference_alloc(f->n * classes);
  const double *head = w[pg_model_count(f->model) - 1];
  float *q = read_floats(f->model->basis);
  s->sent = reference_alloc(f->n * d);
  reference_of(f, w, NULL, z);
  for (int64_t i = 0; i < f->n; i++) {
    double *p = z + i * classes, top = -INFINITY, total = 0, *full = reference_alloc(d);
    for (int64_t v = 0; v < classes; v++) top = fmax(top, p[v]);
    for (int64_t v = 0; v < classes; v++) total += p[v] = exp(p[v] - top);
    for (int64_t v = 0; v < classes; v++) {
      const double g = (p[v] / total - (v == f->targets[i])) * f->config.logit_scale / (double)f->n;
      for (int64_t j = 0; j < d; j++) full[j] += g * head[v * d + j];
    }
    for (int64_t k = 0; k < r; k++) {
      double along = 0;
      for (int64_t j = 0; j < d; j++) along += q[k * d + j] * full[j];
      for (int64_t j = 0; j < d; j++) s->sent[i * d + j] += along * q[k * d + j];
    }
    free(full);
  }
  free(q);
  free(z);
  free_weights(f, w);
}

static void check_equal(const fixture *f, const fixture *g, size_t first, size_t last) {
  for (size_t i = first; i < last; i++) {
    const pg_parameter *p = pg_model_parameter(f->model, i), *q = pg_model_parameter(g->model, i);
    const int64_t n = p->rows * p->columns;
    float *x = read_floats(p->gradient), *y = read_floats(q->gradient);
    CHECK(memcmp(x, y, (size_t)n * sizeof *x) == 0, "%s differs", p->name);
    free(x);
    free(y);
  }
}

TEST(only_a_subspace_of_what_the_head_sends_back_reaches_the_blocks) {
  static const shape *const shapes[] = {&two_blocks, &one_position};
  static const int64_t ranks[] = {1, 7, 17};
  for (size_t s = 0; s < PG_COUNT(shapes); s++)
    for (size_t i = 0; i < PG_COUNT(ranks); i++) {
      fixture f, plain;
      signal sent;
      const pg_head_config head = {.backward_rank = ranks[i], .backward_seed = 3};
      open_fixture(&f, shapes[s], &head, PG_F32, i % 2 ? PG_KEEP_INPUTS : PG_KEEP_ALL);
      open_fixture(&plain, shapes[s], &(pg_head_config){0}, PG_F32, PG_KEEP_ALL);
      const size_t last = pg_model_count(f.model) - 1;
      CHECK(mean_loss(&f) == mean_loss(&plain), "the forward pass changed");
      check_equal(&f, &plain, last, last + 1);
      make_signal(&f, &sent);
      check_slopes(&f, 0, last, sent_value, &sent);
      free(sent.sent);
      close_fixture(&f);
      close_fixture(&plain);
    }
}

TEST(the_subspace_is_orthonormal_and_its_seeds_own) {
  pg_context *ctx = open_context(1);
  float *q[3];
  for (int i = 0; i < 3; i++) {
    pg_model_config c = make_config(&two_blocks);
    c.head = (pg_head_config){.backward_rank = 7, .backward_seed = i == 2};
    pg_model *model = make_model(ctx, &c, (uint64_t)i);
    q[i] = read_floats(model->basis);
    for (int64_t j = 0; j < 7; j++)
      for (int64_t k = 0; k <= j; k++) {
        double sum = 0;
        for (int64_t l = 0; l < 18; l++) sum += (double)q[i][j * 18 + l] * q[i][k * 18 + l];
        /* entries were rounded once: 2 u ||q|| ||q|| at most */
        CHECK(fabs(sum - (j == k)) <= 2 * UNIT_ROUNDOFF, "%lld, %lld: %.9g", (long long)j,
              (long long)k, sum);
      }
    pg_model_free(model);
  }
  CHECK(memcmp(q[0], q[1], 7 * 18 * sizeof **q) == 0, "the weights' seed changed it");
  CHECK(memcmp(q[0], q[2], 7 * 18 * sizeof **q) != 0, "its own seed did not");
  for (int i = 0; i < 3; i++) free(q[i]);
  pg_context_free(ctx);
}

TEST(a_subspace_of_the_whole_width_changes_no_bit) {
  fixture f, plain;
  open_fixture(&f, &two_blocks, &(pg_head_config){.backward_rank = 18}, PG_F32, PG_KEEP_ALL);
  open_fixture(&plain, &two_blocks, &(pg_head_config){0}, PG_F32, PG_KEEP_ALL);
  CHECK(mean_loss(&f) == mean_loss(&plain), "the loss differs");
  check_equal(&f, &plain, 0, pg_model_count(f.model));
  close_fixture(&f);
  close_fixture(&plain);
}

/* ---- the residual
 * --------------------------------------------------------------------------------
 */
/* W (W^T W)^-1 W^T G by Gram-Schmidt, twice, on the columns of W [rows, k]. */
static double *project(const double *w, const float *g, int64_t rows, int64_t k) {
  double *q = reference_alloc(rows * k), *out = reference_alloc(rows * k);
  memcpy(q, w, (size_t)(rows * k) * sizeof *q);
  for (int64_t j = 0; j < k; j++) {
    for (int again = 0; again < 2; again++)
      for (int64_t l = 0; l < j; l++) {
        double along = 0;
        for (int64_t i = 0; i < rows; i++) along += q[i * k + j] * q[i * k + l];
        for (int64_t i = 0; i < rows; i++) q[i * k + j] -= along * q[i * k + l];
      }
    double squares = 0;
    for (int64_t i = 0; i < rows; i++) squares += q[i * k + j] * q[i * k + j];
    for (int64_t i = 0; i < rows; i++) q[i * k + j] /= sqrt(squares);
  }
  for (int64_t j = 0; j < k; j++)
    for (int64_t l = 0; l < k; l++) {
      double along = 0;
      for (int64_t i = 0; i < rows; i++) along += q[i * k + j] * g[i * k + l];
      for (int64_t i = 0; i < rows; i++) out[i * k + l] += along * q[i * k + j];
    }
  free(q);
  return out;
}

TEST(without_its_residual_the_head_learns_from_its_own_column_space) {
  static const shape *const shapes[] = {&two_blocks, &one_position};
  for (size_t s = 0; s < PG_COUNT(shapes); s++)
    for (int64_t rank = 0; rank < 8; rank += 7) {
      fixture f, plain;
      open_fixture(&f, shapes[s], &(pg_head_config){.rank = rank, .drop_residual = true}, PG_F32,
                   PG_KEEP_ALL);
      open_fixture(&plain, shapes[s], &(pg_head_config){.rank = rank}, PG_F32, PG_KEEP_ALL);
      const size_t last = pg_model_count(f.model) - 1;
      CHECK(mean_loss(&f) == mean_loss(&plain), "the forward pass changed");
      check_equal(&f, &plain, 0, last);
      for (int pass = 1; pass <= 2; pass++) { /* gradients add up */
        const pg_parameter *p = pg_model_head(f.model);
        double **w = read_weights(&f), squares = 0, error = 0;
        float *got = read_floats(p->gradient),
              *whole = read_floats(pg_model_head(plain.model)->gradient);
        double *want = project(w[last], whole, p->rows, p->columns);
        for (int64_t j = 0; j < p->rows * p->columns; j++) {
          error += (got[j] - want[j]) * (got[j] - want[j]);
          squares += want[j] * want[j];
        }
        const double kept = sqrt(squares) / norm_of(whole, p->rows * p->columns);
        /* The part of the gradient is `kept` of it, and the condition of W at V = 97, k = 18 is
         * below (1 + sqrt(k/V)) / (1 - sqrt(k/V)) = 2.6 but for chance; 4 bounds it here. */
        CHECK(sqrt(error) <= 4 / kept * bar_of(&f.config, UNIT_ROUNDOFF) * sqrt(squares),
              "rank %lld: off by %.3g", (long long)rank, sqrt(error / squares));
        CHECK(kept < 0.95, "nothing to drop: %g", kept);
        free(got);
        free(whole);
        free(want);
        free_weights(&f, w);
        if (pass == 1) CHECK(mean_loss(&f) == mean_loss(&plain), "the second pass differs");
      }
      close_fixture(&f);
      close_fixture(&plain);
    }
}

TEST(dependent_columns_have_no_residual_to_drop) {
  fixture f;
  double loss;
  open_fixture(&f, &two_blocks, &(pg_head_config){.drop_residual = true}, PG_F32, PG_KEEP_ALL);
  pg_parameter *head = pg_model_head(f.model);
  float *w = read_floats(head->value);
  for (int64_t i = 0; i < head->rows; i++) w[i * 18 + 4] = w[i * 18 + 5];
  MUST(f.ctx, pg_tensor_write(head->value, w));
  MUST(f.ctx, pg_model_forward(f.model, f.a, f.tokens, f.batch, f.time, NULL));
  CHECK(pg_head_loss(f.model, f.a, f.targets, 1, &loss, NULL) == PG_EINVAL &&
            strstr(pg_context_message(f.ctx), "linearly dependent"),
        "%s", pg_context_message(f.ctx));
  free(w);
  close_fixture(&f);
}

/* ---- bf16, files, refusals
 * -----------------------------------------------------------------------
 */
static const pg_head_config all_kinds[] = {
    {.rank = 6},
    {.extra = 31},
    {.backward_rank = 5},
    {.drop_residual = true},
    {.rank = 6, .extra = 5, .backward_rank = 4, .backward_seed = 9, .drop_residual = true},
};

TEST(in_bf16_gradients_differ_by_its_rounding) {
  for (size_t i = 0; i < PG_COUNT(all_kinds); i++) {
    fixture f, narrow;
    shape s = two_blocks;
    s.layers = 1;
    open_fixture(&f, &s, &all_kinds[i], PG_F32, PG_KEEP_ALL);
    open_fixture(&narrow, &s, &all_kinds[i], PG_BF16, PG_KEEP_INPUTS);
    const double bar = bar_of(&f.config, 0x1p-9);
    const double loss = mean_loss(&f); /* once: gradients add up */
    CHECK_CLOSE(mean_loss(&narrow), loss, bar);
    for (size_t p = 0; p < pg_model_count(f.model); p++) {
      const pg_parameter *x = pg_model_parameter(f.model, p);
      float *want = read_floats(x->gradient),
            *got = read_floats(pg_model_parameter(narrow.model, p)->gradient);
      const double error = distance(got, want, x->rows * x->columns);
      CHECK(error <= bar, "kind %zu: %s is off by %.3g, bar %.3g", i, x->name, error, bar);
      free(want);
      free(got);
    }
    close_fixture(&f);
    close_fixture(&narrow);
  }
}

TEST(files_hold_every_head_and_what_transformers_reads) {
  char folder[64], path[96];
  data_folder(folder);
  snprintf(path, sizeof path, "%s/model.safetensors", folder);
  for (size_t i = 0; i < PG_COUNT(all_kinds); i++) {
    fixture f;
    pg_model *other;
    pg_safetensors *file;
    open_fixture(&f, &two_blocks, &all_kinds[i], PG_F32, PG_KEEP_ALL);
    MUST(f.ctx, pg_model_save(f.model, path));
    MUST(f.ctx, pg_model_new(f.ctx, &f.config, &other));
    MUST(f.ctx, pg_model_load(other, path));
    for (size_t p = 0; p < pg_model_count(f.model); p++) {
      const pg_parameter *x = pg_model_parameter(f.model, p);
      float *want = read_floats(x->value), *got = read_floats(pg_model_parameter(other, p)->value);
      CHECK(memcmp(want, got, (size_t)(x->rows * x->columns) * sizeof *got) == 0, "%s", x->name);
      free(want);
      free(got);
    }
    MUST(f.ctx, pg_safetensors_open(f.ctx, path, &file));
    const pg_safetensors_entry *e = pg_safetensors_find(file, "lm_head.weight");
    CHECK(e && e->shape[0] == 97 && e->shape[1] == 18, "kind %zu: no head for transformers", i);
    pg_safetensors_close(file);
    pg_model_free(other);
    if (f.config.head.rank || f.config.head.extra) {
      pg_model_config plain = f.config;
      plain.head = (pg_head_config){0};
      MUST(f.ctx, pg_model_new(f.ctx, &plain, &other));
      CHECK(pg_model_load(other, path) == PG_EFORMAT, "kind %zu: another head was read", i);
      pg_model_free(other);
    }
    close_fixture(&f);
  }
  data_folder_remove(folder);
}

TEST(nonsense_is_refused) {
  static const struct {
    pg_head_config head;
    const char *text;
  } bad[] = {{{.rank = 19}, "model.head.rank is 19; allowed: 0 to 18"},
             {{.rank = -1}, "model.head.rank"},
             {{.extra = -1}, "model.head.extra"},
             {{.extra = INT64_MAX}, "model.head.extra"},
             {{.backward_rank = 19}, "model.head.backward_rank is 19; allowed: 0 to 18"},
             {{.backward_seed = 4}, "without model.head.backward_rank"},
             {{.backward_rank = 3, .backward_seed = -1}, "model.head.backward_seed"}};
  pg_context *ctx = open_context(1);
  for (size_t i = 0; i < PG_COUNT(bad); i++) {
    pg_model_config c = make_config(&two_blocks);
    c.head = bad[i].head;
    CHECK(pg_model_config_resolve(ctx, &c) == PG_EINVAL &&
              strstr(pg_context_message(ctx), bad[i].text),
          "%zu: %s", i, pg_context_message(ctx));
  }
  pg_model_config c = make_config(&(shape){0, 18, 1, 4, 8, 18, 1, 1});
  c.head.drop_residual = true;
  CHECK(pg_model_config_resolve(ctx, &c) == PG_EINVAL &&
            strstr(pg_context_message(ctx), "leave no residual"),
        "%s", pg_context_message(ctx));
  c.head.extra = 1;
  CHECK(pg_model_config_resolve(ctx, &c) == 0, "%s", pg_context_message(ctx));
  pg_context_free(ctx);
}

int main(void) {
  RUN(factors_and_extra_classes_have_the_gradients_of_their_product);
  RUN(a_product_of_factors_has_the_deviation_that_one_matrix_has);
  RUN(only_a_subspace_of_what_the_head_sends_back_reaches_the_blocks);
  RUN(the_subspace_is_orthonormal_and_its_seeds_own);
  RUN(a_subspace_of_the_whole_width_changes_no_bit);
  RUN(without_its_residual_the_head_learns_from_its_own_column_space);
  RUN(dependent_columns_have_no_residual_to_drop);
  RUN(in_bf16_gradients_differ_by_its_rounding);
  RUN(files_hold_every_head_and_what_transformers_reads);
  RUN(nonsense_is_refused);
  return unit_report();
}
