/* First order: increments against gradients (core/first_order.c) beside the definitions and exact
 * cases; predicted and measured loss of an update; the gradient noise scale against single
 * micro-batches (core/run_measure.c); and that measuring changes no bit. PG_TEST_DEVICE=cuda: on
 * another device. */
#include "core/geometry.h"
#include "golden_support.h"

#include <float.h>

static pg_context *ctx;

static int measure(const float *g, const float *s, int64_t v, int64_t d, pg_first_order *out) {
  pg_tensor *a = make_matrix(ctx, g, v, d), *b = make_matrix(ctx, s, v, d);
  int status = pg_first_order_measure(a, b, out);
  pg_tensor_free(a);
  pg_tensor_free(b);
  return status;
}

typedef long double real;

/* P x in place, [v, d] */
static void center(real *x, int64_t v, int64_t d) {
  for (int64_t j = 0; j < d; j++) {
    real mean = 0;
    for (int64_t i = 0; i < v; i++) mean += x[i * d + j] / v;
    for (int64_t i = 0; i < v; i++) x[i * d + j] -= mean;
  }
}
static real inner(const real *x, const real *y, int64_t n) {
  real sum = 0;
  for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
  return sum;
}

TEST(against_the_definitions) {
  const int64_t sizes[][2] = {{1, 1}, {2, 3}, {7, 1}, {31, 5}, {130, 17}, {3001, 400}};
  for (size_t k = 0; k < PG_COUNT(sizes); k++) {
    const int64_t v = sizes[k][0], d = sizes[k][1], n = v * d;
    float *g = malloc((size_t)n * sizeof *g), *s = malloc((size_t)n * sizeof *s);
    real *a = malloc((size_t)(3 * n) * sizeof *a), *b = a + n, *r = b + n, norms = 0, common = 0;
    if (!g || !s || !a) abort();
    pg_normals(1, k, 0, (size_t)n, g);
    pg_normals(2, k, 0, (size_t)n, s);
    for (int64_t i = 0; i < n; i++) s[i] = 1e-3f * (s[i] - g[i]);
    if (v > 5)
      for (int64_t j = 0; j < d; j++) g[3 * d + j] = 0; /* not 0 once it is centred */
    for (int64_t i = 0; i < n; i++) a[i] = g[i], b[i] = s[i];
    const real gain = -inner(a, b, n), gg = inner(a, a, n), ss = inner(b, b, n);
    for (int64_t j = 0; j < d; j++) {
      real sum = 0;
      for (int64_t i = 0; i < v; i++) sum += a[i * d + j];
      common += sum * sum;
    }
    center(a, v, d);
    center(b, v, d);
    for (int64_t i = 0; i < v; i++) {
      const real norm = sqrtl(inner(a + i * d, a + i * d, d));
      norms += norm;
      for (int64_t j = 0; j < d; j++) r[i * d + j] = norm > 0 ? a[i * d + j] / norm : 0;
    }
    center(r, v, d);
    pg_first_order x;
    MUST(ctx, measure(g, s, v, d, &x));
    const double fp64 = 1e-12;
    CHECK_CLOSE(x.gain, (double)gain, fp64 * 1e2);
    CHECK_CLOSE(x.gradient_norm, (double)sqrtl(gg), fp64);
    CHECK_CLOSE(x.increment_norm, (double)sqrtl(ss), fp64);
    CHECK_CLOSE(x.common, (double)sqrtl(common / gg), fp64 * 1e2);
    if (v == 1) {
      CHECK(x.row_norms == 0 && x.oracle == 0 && isnan(x.cosine_rownorm) &&
                isnan(x.cosine_gradient),
            "one token: nothing moves a distribution");
    } else {
      CHECK_CLOSE(x.row_norms, (double)norms, fp64);
      CHECK_CLOSE(x.oracle, x.diameter / 2 * (double)norms, fp64);
      CHECK_CLOSE(x.ratio, x.gain / x.oracle, fp64);
      CHECK_CLOSE(x.cosine_gradient,
                  (double)(-inner(a, b, n) / sqrtl(inner(a, a, n) * inner(b, b, n))), fp64 * 1e2);
      CHECK_CLOSE(x.cosine_rownorm,
                  (double)(-inner(r, b, n) / sqrtl(inner(r, r, n) * inner(b, b, n))), fp64 * 1e2);
      const double rank = (double)pg__min(d, v - 1);
      CHECK(-(double)inner(a, b, n) <= x.oracle * sqrt(2 * rank / (rank + 1)) * (1 + 1e-12),
            "the gain is above Jung's bound");
    }
    free(g);
    free(s);
    free(a);
  }
}

TEST(exact_cases) {
  pg_first_order x;
  { /* a regular triangle's rows: RowNorm keeps .8660254 of the exact decrease k/2 = 1 (D = 1) */
    const double j = sqrt(1. / 3);
    float g[6], s[6];
    for (int i = 0; i < 3; i++) {
      g[2 * i] = (float)(j * cos(2 * acos(-1) * i / 3));
      g[2 * i + 1] = (float)(j * sin(2 * acos(-1) * i / 3));
      s[2 * i] = -g[2 * i], s[2 * i + 1] = -g[2 * i + 1];
    }
    MUST(ctx, measure(g, s, 3, 2, &x));
    CHECK_CLOSE(x.diameter, 1, 1e-7);
    CHECK_CLOSE(x.gain, 1, 1e-6); /* the exact decrease T(G) = k/2 */
    CHECK_CLOSE(x.oracle / x.gain, .8660254, 1e-6);
    CHECK_CLOSE(x.cosine_gradient, 1, 1e-6);
    CHECK_CLOSE(x.cosine_rownorm, 1, 1e-6);
    CHECK(x.common < 1e-7, "centred");
  }
  { /* +-e1, +-e2: RowNorm is exact, its own increment has ratio 1 */
    const float g[8] = {1, 0, -1, 0, 0, 1, 0, -1}, s[8] = {-.5f, 0, .5f, 0, 0, -.5f, 0, .5f};
    MUST(ctx, measure(g, s, 4, 2, &x));
    CHECK(x.gain == 2 && x.oracle == 2 && x.ratio == 1 && x.cosine_rownorm == 1, "%g %g", x.gain,
          x.oracle);
    /* a common row of S changes neither cosine */
    float moved[8];
    for (int i = 0; i < 8; i++) moved[i] = s[i] + 64;
    MUST(ctx, measure(g, moved, 4, 2, &x));
    CHECK(fabs(x.cosine_rownorm - 1) < 1e-10 && x.ratio == 1, "%.17g", x.cosine_rownorm);
  }
  { /* an increment of zeros */
    const float g[4] = {1, 0, -1, 0}, s[4] = {0};
    MUST(ctx, measure(g, s, 2, 2, &x));
    CHECK(x.gain == 0 && x.oracle == 0 && isnan(x.ratio) && isnan(x.cosine_gradient), "zeros");
  }
  float bad[4] = {0, 0, INFINITY, 0};
  const float fine[4] = {0};
  CHECK(measure(bad, fine, 2, 2, &x) == PG_ENONFINITE &&
            strstr(pg_context_message(ctx), "gradient: row 1, column 0"),
        "%s", pg_context_message(ctx));
  CHECK(measure(fine, bad, 2, 2, &x) == PG_ENONFINITE, "the increment");
}

/* ---- a run ------------------------------------------------------------------------------------
 */
static pg_run *run_of(pg_model *model, int64_t micro, double clip, double lr, double decay) {
  const pg_run_options options = {.data = FOLDER,
                                  .sequences = 8,
                                  .micro = micro,
                                  .max_norm = clip,
                                  .keep_all_increments = true};
  return golden_run(model, &options, lr, decay);
}

TEST(a_small_step_does_what_was_predicted) {
  /* With a rate so small that second order is lost, measured and predicted change agree, weight
   * decay and clipping included; the larger the step, the less. */
  const double rates[3] = {1e-6, 1e-5, 3e-3}, clips[3] = {INFINITY, .01, INFINITY};
  const double decays[3] = {0, 20, 0}; /* keep = 1 - 2e-4 */
  for (int k = 0; k < 3; k++) {
    pg_model *model = golden_model(ctx, PG_F32);
    pg_run *run = run_of(model, 4, clips[k], rates[k], decays[k]);
    pg_prediction p;
    pg_step step;
    CHECK(pg_run_prediction(run, &p) == PG_ESTATE, "before any update");
    MUST(ctx, pg_run_step(run, &step));
    pg_loader_state before, after;
    pg_loader_get_state(pg_run_loader(run), &before);
    MUST(ctx, pg_run_prediction(run, &p));
    pg_loader_get_state(pg_run_loader(run), &after);
    CHECK(!memcmp(&before, &after, sizeof before), "the data position");
    CHECK(p.before == step.loss && p.predicted < 0 && p.seconds > 0, "before %g, %g", p.before,
          p.predicted);
    const double actual = p.after - p.before;
    /* losses of fp32: 128 of about 4.6, each with an error of a few roundings */
    const double noise = 4.6 * 8 * UNIT_ROUNDOFF;
    if (k < 2)
      CHECK(fabs(actual - p.predicted) <= noise + .05 * fabs(p.predicted), "case %d: %g, not %g", k,
            actual, p.predicted);
    else
      CHECK(actual < 0 && fabs(actual - p.predicted) > .05 * fabs(p.predicted),
            "a large step is not linear: %g, %g", actual, p.predicted);
    CHECK(fabs(p.predicted) > 20 * noise, "the test sees the change: %g", p.predicted);
    pg_run_free(run);
    pg_model_free(model);
  }
}

static float *weights_of(const pg_model *model, int64_t *count) {
  int64_t at = 0;
  *count = pg_model_config_weights(pg_model_get_config(model));
  float *all = malloc((size_t)*count * sizeof *all);
  if (!all) abort();
  for (size_t i = 0; i < pg_model_count(model); i++) {
    const pg_parameter *p = pg_model_parameter(model, i);
    MUST(ctx, pg_tensor_read(p->value, all + at));
    at += p->rows * p->columns;
  }
  return all;
}

TEST(the_noise_of_micro_batches) {
  pg_model *model = golden_model(ctx, PG_F32), *plain = golden_model(ctx, PG_F32),
           *single = golden_model(ctx, PG_F32);
  pg_run *run = run_of(model, 2, 1, 1e-3, .1), *other = run_of(plain, 2, 1, 1e-3, .1);
  pg_noise noise;
  pg_step step, same;
  CHECK(pg_run_noise(run, &noise) == PG_ESTATE, "not measured");
  MUST(ctx, pg_run_measure_noise(run, true));
  CHECK(pg_run_noise(run, &noise) == PG_ESTATE, "no update yet");

  /* Gradients of the same batch by single micro-batches, from a model of its own. */
  pg_activations *a;
  MUST(ctx, pg_activations_new(ctx, pg_model_get_config(single), PG_F32, 2, TIME, PG_KEEP_ALL, &a));
  pg_loader_options lo = {.folder = FOLDER,
                          .pattern = "*_train_*.bin",
                          .time = TIME,
                          .batch = 8,
                          .micro = 2,
                          .world = 1,
                          .vocab = VOCAB,
                          .shuffle = true};
  pg_loader *loader;
  MUST(ctx, pg_loader_open(ctx, &lo, &loader));
  double small = 0, *mean = NULL;
  int64_t n = 0;
  add_gradients(single);
  for (int m = 0; m < 4; m++) {
    int32_t inputs[2 * TIME], targets[2 * TIME];
    MUST(ctx, pg_loader_next(loader, inputs, targets));
    for (size_t i = 0; i < pg_model_count(single); i++) {
      pg_tensor *g = pg_model_parameter(single, i)->gradient;
      MUST(ctx, pg_tensor_fill(g, 0));
    }
    pass(single, a, inputs, targets, 2, TIME, 1. / (2 * TIME));
    float *g = all_gradients(single, &n);
    if (!mean) mean = calloc((size_t)n, sizeof *mean);
    for (int64_t i = 0; i < n; i++) mean[i] += g[i] / 4;
    small += norm_of(g, n) * norm_of(g, n) / 4;
    free(g);
  }
  double large = 0;
  for (int64_t i = 0; i < n; i++) large += mean[i] * mean[i];

  MUST(ctx, pg_run_step(run, &step));
  MUST(ctx, pg_run_step(other, &same));
  MUST(ctx, pg_run_noise(run, &noise));
  CHECK(noise.small == 2 && noise.large == 8, "sequences");
  /* fp32 gradients in another order of summation, and differences of partial sums. */
  CHECK_CLOSE(noise.small_square, small, 1e-4);
  CHECK_CLOSE(noise.large_square, large, 1e-4);
  CHECK_CLOSE(noise.large_square, step.norm * step.norm, 1e-12);
  CHECK_CLOSE(noise.gradient_square, (8 * large - 2 * small) / 6, 1e-3);
  CHECK_CLOSE(noise.trace, (small - large) / (1. / 2 - 1. / 8), 1e-3);
  CHECK_CLOSE(noise.scale, noise.trace / noise.gradient_square, 1e-12);
  CHECK(noise.small_square > noise.large_square, "averages are shorter");

  /* The same bits as without: three more updates, with a prediction and a first order between. */
  for (int k = 0; k < 3; k++) {
    pg_prediction p;
    pg_first_order f;
    MUST(ctx, pg_run_prediction(run, &p));
    MUST(ctx, pg_first_order_measure(pg_model_head(model)->gradient,
                                     pg_model_head(model)->increment, &f));
    CHECK(f.gain > 0 && f.common < 1e-4, "gain %g, common %g", f.gain, f.common);
    MUST(ctx, pg_run_step(run, &step));
    MUST(ctx, pg_run_step(other, &same));
    CHECK(step.loss == same.loss && step.norm == same.norm && step.batch_hash == same.batch_hash,
          "update %d", k);
  }
  float *x = weights_of(model, &n), *y = weights_of(plain, &n);
  CHECK(!memcmp(x, y, (size_t)n * sizeof *x), "weights");
  MUST(ctx, pg_run_measure_noise(run, false));
  CHECK(pg_run_noise(run, &noise) == PG_ESTATE, "no more");
  free(x);
  free(y);
  free(mean);
  pg_loader_close(loader);
  pg_activations_free(a);
  pg_run_free(run);
  pg_run_free(other);
  run = run_of(model, 8, 1, 1e-3, .1);
  CHECK(pg_run_measure_noise(run, true) == PG_EINVAL, "one micro-batch");
  pg_run_free(run);
  for (size_t i = 0; i < pg_model_count(single); i++) {
    pg_parameter *p = pg_model_parameter(single, i);
    pg_tensor_free(p->gradient);
    p->gradient = NULL;
  }
  pg_model_free(model);
  pg_model_free(plain);
  pg_model_free(single);
}

int main(void) {
  ctx = open_context(2);
  RUN(against_the_definitions);
  RUN(exact_cases);
  RUN(a_small_step_does_what_was_predicted);
  RUN(the_noise_of_micro_batches);
  unit_bad = 0;
  CHECK(pg_context_live_tensors(ctx) == 0, "tensors left");
  unit_failed += unit_bad != 0;
  pg_context_free(ctx);
  return unit_report();
}
