/* Peak resident size of a run at V = 50257, d = 256, 4 layers, 8192 tokens per micro-batch: the
 * head never holds all logits (8192 x 50257 fp32 alone would be 1.6 GB). Bound: 16 bytes per weight
 * (value, gradient, two slots) plus 1.5 GB, for activations, one chunk of logits, increments and
 * libraries. Exit 77 (skipped) under sanitizers, whose shadow memory would be measured instead. */
#include "core/perigee.h"
#include "model_support.h"
#include "temporary.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { VOCAB = 50257, TOKENS = 8192, TIME = 1024 };

/* One update, in a child so that nothing else counts. Exit 0 when it went well. */
static void one_update(void) {
  pg_context *ctx = open_context(2);
  pg_model_config config;
  pg_model *model;
  pg_run *run;
  pg_step step;
  pg_parameter *all[64];
  double hypers[PG_MAX_HYPERS];
  const pg_optimizer *adamw = pg_optimizer_find("adamw");
  pg_model_config_default(&config);
  config.layers = 4, config.width = 256, config.heads = 4, config.vocab = VOCAB;
  config.context = TIME;
  MUST(ctx, pg_model_config_resolve(ctx, &config));
  MUST(ctx, pg_model_new(ctx, &config, &model));
  MUST(ctx, pg_model_init(model, 0));
  pg_run_options options = {.data = temporary_folder, .sequences = TOKENS / TIME, .max_norm = 1.0};
  MUST(ctx, pg_run_new(model, &options, &run));
  for (size_t i = 0; i < pg_model_count(model); i++) all[i] = pg_model_parameter(model, i);
  pg_optimizer_defaults(adamw, hypers);
  MUST(ctx, pg_run_assign(run, adamw, hypers, false, all, pg_model_count(model), NULL));
  MUST(ctx, pg_run_step(run, &step));
  /* ln V at the start: a run that computed nothing would not have this loss. */
  exit(fabs(step.loss - log(VOCAB)) > 0.2);
}

TEST(peak_resident_size) {
  pg_context *ctx = open_context(1);
  int32_t *tokens = malloc((TOKENS + 1) * sizeof *tokens);
  for (int i = 0; i <= TOKENS; i++) tokens[i] = (int32_t)((uint32_t)i * 2654435761u % VOCAB);
  const char *shard = temporary_path("x_train_000001.bin");
  MUST(ctx, pg_shard_write(ctx, shard, tokens, TOKENS + 1));
  free(tokens);
  pid_t child = fork();
  if (child == 0) one_update();
  int status = -1;
  struct rusage usage;
  CHECK(wait4(child, &status, 0, &usage) == child && status == 0, "the run ended with %d", status);
  double weights = 4 * 16.0 * 256 * 256 + 2.0 * VOCAB * 256;
  double peak = 1024.0 * (double)usage.ru_maxrss, bound = 16 * weights + 1.5e9;
  printf("  peak %.0f MB, bound %.0f MB\n", peak / 1e6, bound / 1e6);
  CHECK(peak < bound);
  MUST(ctx, pg_file_remove_tree(ctx, temporary_folder));
  pg_context_free(ctx);
}

int main(void) {
#if defined(__SANITIZE_ADDRESS__)
  printf("sanitizers change the resident size\n");
  return 77;
#endif
  RUN(peak_resident_size);
  return unit_report();
}
