/* Two models on one panel (core/compare.c), and trials of optimizers on a run's gradients
 * (core/trial.c), on the shards and weights of the golden trajectory. PG_TEST_DEVICE=cuda: on
 * another device. */
#include "core/panel.h"
#include "golden_support.h"

/* 150 positions of sequences of 16: nine whole ones and a part of the tenth. */
enum { POSITIONS = 150 };

static pg_context *ctx;

static pg_panel *golden_panel(void) {
  pg_panel *panel;
  pg_panel_options options = {.tokens = POSITIONS};
  MUST(ctx, pg_panel_new(ctx, FOLDER, "*_val_*.bin", TIME, VOCAB, &options, &panel));
  return panel;
}

/* ---- two models -------------------------------------------------------------------------------
 */
TEST(losses_are_those_of_single_sequences) {
  pg_model *model = golden_model(ctx, PG_F32);
  pg_panel *panel = golden_panel();
  pg_activations *wide = golden_activations(model, 4), *narrow = golden_activations(model, 1);
  float losses[POSITIONS], single[TIME];
  double sum;
  MUST(ctx, pg_panel_losses(model, wide, panel, losses));
  for (size_t k = 0; k < panel->count; k++) {
    const pg_panel_piece *piece = &panel->pieces[k];
    MUST(ctx, pg_model_forward(model, narrow, panel->ids + piece->first, 1, piece->length, NULL));
    MUST(ctx, pg_head_loss(model, narrow, panel->targets + piece->first, 0, &sum, single));
    /* The same products in another batch: fp32 sums of 32 and 97 terms in another order. */
    for (int64_t i = 0; i < piece->length; i++)
      CHECK(fabsf(losses[piece->first + i] - single[i]) < 1e-5, "piece %zu position %lld", k,
            (long long)i);
    for (int64_t i = 1; i < piece->length; i++)
      CHECK(panel->targets[piece->first + i - 1] == panel->ids[piece->first + i],
            "targets are the next tokens");
  }
  pg_activations_free(wide);
  pg_activations_free(narrow);
  pg_panel_free(panel);
  pg_model_free(model);
}

TEST(distances_of_models_that_differ_in_the_head) {
  /* U' = U + S: the distance at a position is the Hilbert range of S there, and the same model is
   * at distance 0 from itself. */
  pg_model *from = golden_model(ctx, PG_F32), *to = golden_model(ctx, PG_F32);
  pg_panel *panel = golden_panel();
  pg_activations *a = golden_activations(from, 4), *b = golden_activations(to, 3);
  const int64_t n = VOCAB * WIDTH;
  float ranges[POSITIONS], between[POSITIONS], la[POSITIONS], lb[POSITIONS], *s, *u;
  double rms, expected, largest = 0;
  pg_tensor *matrix;
  MUST(ctx, pg_hilbert_between(from, a, to, b, panel, &rms, between));
  CHECK(rms == 0, "rms %g of a model and its copy", rms);
  s = malloc((size_t)n * sizeof *s);
  pg_normals(5, 1, 0, (size_t)n, s);
  MUST(ctx, pg_tensor_new(ctx, PG_F32, 2, (int64_t[]){VOCAB, WIDTH}, &matrix));
  MUST(ctx, pg_tensor_write(matrix, s));
  u = read_floats(pg_model_head(to)->value);
  for (int64_t i = 0; i < n; i++) u[i] += s[i];
  MUST(ctx, pg_tensor_write(pg_model_head(to)->value, u));
  MUST(ctx, pg_hilbert(from, a, panel, matrix, &expected, ranges));
  MUST(ctx, pg_hilbert_between(from, a, to, b, panel, &rms, between));
  MUST(ctx, pg_panel_losses(from, a, panel, la));
  MUST(ctx, pg_panel_losses(to, b, panel, lb));
  /* Logits near 20 cancel: an error of 32 roundings of them, in each of four numbers. */
  const double slack = 4 * 32 * 20 * UNIT_ROUNDOFF;
  for (int i = 0; i < POSITIONS; i++) {
    CHECK(fabs(between[i] - ranges[i]) < slack, "position %d: %g, %g", i, between[i], ranges[i]);
    CHECK(fabs(lb[i] - la[i]) <= between[i] + slack, "position %d: the loss changes by more", i);
    largest = fmax(largest, fabs(lb[i] - la[i]) / between[i]);
  }
  CHECK(fabs(rms - expected) < slack, "rms %g, %g", rms, expected);
  CHECK(largest > 0.3, "the bound is far from every change: %g", largest);
  /* The other way round it is the same. */
  MUST(ctx, pg_hilbert_between(to, b, from, a, panel, &expected, ranges));
  CHECK(fabs(rms - expected) < slack, "not symmetric: %g, %g", rms, expected);
  CHECK(pg_hilbert_between(from, a, to, a, panel, &rms, ranges) == PG_EINVAL, "one for both");
  pg_context_cancel(ctx);
  CHECK(pg_panel_losses(from, a, panel, la) == PG_ECANCELED, "cancelled");
  pg_context_resume(ctx);
  free(s);
  free(u);
  pg_tensor_free(matrix);
  pg_activations_free(a);
  pg_activations_free(b);
  pg_panel_free(panel);
  pg_model_free(from);
  pg_model_free(to);
}

/* ---- trials ------------------------------------------------------------------------------------
 */

TEST(a_trial_foretells_the_next_step_and_changes_nothing) {
  const pg_run_options options = {.data = FOLDER, .sequences = 8, .micro = 4, .max_norm = 1};
  pg_model *tried = golden_model(ctx, PG_F32), *plain = golden_model(ctx, PG_F32);
  pg_run *run = golden_run(tried, &options, NAN, NAN),
         *other = golden_run(plain, &options, NAN, NAN);
  pg_parameter *head = pg_model_head(tried);
  const pg_optimizer *adamw = pg_optimizer_find("adamw"), *rownorm = pg_optimizer_find("rownorm");
  double hypers[PG_MAX_HYPERS], rates[PG_MAX_HYPERS];
  pg_loader_state before, after;
  pg_step step, same;
  pg_trial *own, *fresh, *refused = NULL;
  pg_optimizer_defaults(adamw, hypers);
  pg_optimizer_defaults(rownorm, rates);
  rates[pg_optimizer_hyper_index(rownorm, "lr", NULL)] = 0.01;
  for (int i = 0; i < 3; i++) {
    MUST(ctx, pg_run_step(run, &step));
    MUST(ctx, pg_run_step(other, &same));
  }
  CHECK(pg_trial_new(run, head, rownorm, rates, true, &refused) == PG_EINVAL && !refused,
        "the slots of another optimizer");
  CHECK(pg_trial_new(run, head, pg_optimizer_find("frozen"), rates, false, &refused) == PG_EINVAL,
        "frozen");
  MUST(ctx, pg_trial_new(run, head, adamw, hypers, true, &own));
  MUST(ctx, pg_trial_new(run, head, rownorm, rates, false, &fresh));
  pg_loader_get_state(pg_run_loader(run), &before);
  MUST(ctx, pg_run_gradients(run, &step));
  MUST(ctx, pg_trial_increment(own, 1));
  float *foretold = read_floats(pg_trial_value(own));
  for (int i = 0; i < 3; i++) { /* more batches, and an optimizer that begins anew */
    MUST(ctx, pg_trial_increment(own, 1));
    MUST(ctx, pg_trial_increment(fresh, 0.5));
    MUST(ctx, pg_run_gradients(run, &step));
  }
  /* Rows of RowNorm at scale 0.5 have the norm lr / 2: 32 squares in fp32. */
  float *rows = read_floats(pg_trial_value(fresh));
  for (int64_t i = 0; i < VOCAB; i++)
    CHECK(fabs(norm_of(rows + i * WIDTH, WIDTH) / 0.005 - 1) < 1e-4, "row %lld", (long long)i);
  MUST(ctx, pg_run_rewind(run, &before));
  CHECK(pg_run_apply(run, &step) == PG_ESTATE, "gradients that were only looked at");
  pg_loader_get_state(pg_run_loader(run), &after);
  CHECK(!memcmp(&before, &after, sizeof before), "the data position");
  MUST(ctx, pg_run_step(run, &step));
  MUST(ctx, pg_run_step(other, &same));
  float *made = read_floats(head->increment);
  CHECK(!memcmp(made, foretold, sizeof(float) * VOCAB * WIDTH),
        "the increment is the foretold one");
  CHECK(step.loss == same.loss && step.norm == same.norm && step.batch_hash == same.batch_hash,
        "the run goes on as without trials");
  for (size_t i = 0; i < pg_model_count(tried); i++) {
    const pg_parameter *p = pg_model_parameter(tried, i), *q = pg_model_parameter(plain, i);
    float *x = read_floats(p->value), *y = read_floats(q->value);
    CHECK(!memcmp(x, y, sizeof *x * (size_t)(p->rows * p->columns)), "%s", p->name);
    CHECK(p->updates == q->updates, "%s: updates", p->name);
    free(x);
    free(y);
  }
  free(foretold);
  free(rows);
  free(made);
  pg_trial_free(own);
  pg_trial_free(fresh);
  pg_run_free(run);
  pg_run_free(other);
  pg_model_free(tried);
  pg_model_free(plain);
}

int main(void) {
  const pg_context_options options = {
      .device = getenv("PG_TEST_DEVICE") ? getenv("PG_TEST_DEVICE") : "cpu", .threads = 1};
  char message[256];
  if (pg_context_new(&options, &ctx, message, sizeof message) < 0) {
    printf("no context: %s\n", message);
    return 1;
  }
  RUN(losses_are_those_of_single_sequences);
  RUN(distances_of_models_that_differ_in_the_head);
  RUN(a_trial_foretells_the_next_step_and_changes_nothing);
  unit_bad = 0;
  CHECK(pg_context_live_tensors(ctx) == 0, "tensors are left");
  unit_failed += unit_bad != 0;
  pg_context_free(ctx);
  return unit_report();
}
