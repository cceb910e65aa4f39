/* The second moment of the head's inputs as a run measures it for K-FAC. PG_TEST_DEVICE=cuda: on
 * another device. */
#include "core/run.h"
#include "data_files.h"
#include "model_support.h"

/* The slot after one update with beta2 = 0 is the mean of h h^T over the batch's positions. */
static void run_moment(pg_context *ctx, pg_dtype compute) {
  const shape s = {2, 16, 2, 8, 32, 97, 2, 12};
  pg_model_config config = make_config(&s);
  char folder[64];
  pg_model *model;
  pg_run *run;
  pg_step step;
  pg_loader_state start;
  data_folder(folder);
  data_count_shard(ctx, data_path(folder, "x_train_0.bin"), 3, 4000, 97);
  model = make_model(ctx, &config, 1);
  MUST(ctx, pg_model_set_compute(model, compute));
  const pg_run_options options = {
      .data = folder, .sequences = 6, .micro = 2, .max_norm = 1, .data_seed = 1};
  MUST(ctx, pg_run_new(model, &options, &run));
  const pg_optimizer *kfac = pg_optimizer_find("kfac"), *sgd = pg_optimizer_find("sgd");
  double hypers[PG_MAX_HYPERS], plain[PG_MAX_HYPERS];
  pg_optimizer_defaults(kfac, hypers), pg_optimizer_defaults(sgd, plain);
  hypers[pg_optimizer_hyper_index(kfac, "lr", NULL)] = 1e-3;
  hypers[pg_optimizer_hyper_index(kfac, "beta2", NULL)] = 0;
  plain[pg_optimizer_hyper_index(sgd, "lr", NULL)] = 1e-3;
  pg_parameter *head = pg_model_head(model);
  for (size_t i = 0; i < pg_model_count(model); i++) {
    pg_parameter *p = pg_model_parameter(model, i);
    if (p == head) continue;
    CHECK(pg_run_assign(run, kfac, hypers, false, &p, 1, NULL) == PG_EINVAL &&
              strstr(pg_context_message(ctx), "is for the head alone"),
          "%s", pg_context_message(ctx));
    MUST(ctx, pg_run_assign(run, sgd, plain, false, &p, 1, NULL));
  }
  MUST(ctx, pg_run_assign(run, kfac, hypers, false, &head, 1, NULL));
  pg_loader_get_state(pg_run_loader(run), &start);
  /* The batch's inputs, by the same passes. */
  const int64_t d = 16, n = 24;
  static double want[16][16];
  int32_t inputs[24], targets[24];
  float *h = malloc((size_t)(n * d) * sizeof *h);
  memset(want, 0, sizeof want);
  for (int micro = 0; micro < 3; micro++) {
    const void *hidden;
    void *wide = NULL;
    MUST(ctx, pg_loader_next(pg_run_loader(run), inputs, targets));
    MUST(ctx, pg_model_forward(model, pg_run_activations(run), inputs, 2, 12, &hidden));
    MUST(ctx, pg__alloc(ctx, (size_t)(n * d) * sizeof *h, "a copy", &wide));
    CHECK(ctx->kernels->convert(ctx->queue, compute, hidden, PG_F32, wide, n * d) == 0, "convert");
    CHECK(ctx->kernels->download(ctx->queue, h, wide, (size_t)(n * d) * sizeof *h) == 0, "read");
    pg__release(ctx, wide, (size_t)(n * d) * sizeof *h);
    for (int64_t i = 0; i < n; i++)
      for (int a = 0; a < 16; a++)
        for (int b = 0; b < 16; b++)
          want[a][b] += (double)h[i * d + a] * (double)h[i * d + b] / (double)(3 * n);
  }
  MUST(ctx, pg_run_rewind(run, &start));
  MUST(ctx, pg_run_step(run, &step));
  /* 24 products and sums, three parts: at most 32 U of the sum of magnitudes, which is at most the
   * mean square of h, about 1, times 16. */
  float got[256];
  double worst = 0;
  MUST(ctx, pg_tensor_read(head->slots[1], got));
  for (int i = 0; i < 256; i++)
    worst = fmax(worst, isfinite(got[i]) ? fabs((double)got[i] - want[i / 16][i % 16]) : HUGE_VAL);
  CHECK(worst <= 32 * 0x1p-24 * 16, "off by %g", worst);
  free(h);
  pg_run_free(run);
  pg_model_free(model);
  data_folder_remove(folder);
}

TEST(moment_of_a_run) {
  const pg_context_options options = {
      .device = getenv("PG_TEST_DEVICE") ? getenv("PG_TEST_DEVICE") : "cpu", .threads = 2};
  char message[256];
  pg_context *ctx;
  if (pg_context_new(&options, &ctx, message, sizeof message) < 0) {
    CHECK(false, "%s", message);
    return;
  }
  run_moment(ctx, PG_F32);
  run_moment(ctx, PG_BF16);
  pg_context_free(ctx);
}

int main(void) {
  RUN(moment_of_a_run);
  return unit_report();
}
