/* What tests on the golden trajectory share: its shards in FOLDER, its weights, and runs of AdamW
 * on them. Failures here abort. */
#ifndef PG_GOLDEN_SUPPORT_H
#define PG_GOLDEN_SUPPORT_H

#include "core/perigee.h"
#include "model_support.h"

#define FOLDER PG_TEST_DIR "/golden/trajectory"
enum { TIME = 16, VOCAB = 97, WIDTH = 32 };

static inline pg_model *golden_model(pg_context *ctx, pg_dtype compute) {
  pg_model_config config;
  pg_model *model;
  pg_model_config_default(&config);
  config.layers = 2, config.width = WIDTH, config.heads = 2, config.head_dim = 16;
  config.mlp = 128, config.vocab = VOCAB, config.context = TIME;
  MUST(ctx, pg_model_new(ctx, &config, &model));
  MUST(ctx, pg_model_load(model, FOLDER "/init.safetensors"));
  MUST(ctx, pg_model_set_compute(model, compute));
  return model;
}

/* For evaluation. */
static inline pg_activations *golden_activations(const pg_model *model, int64_t sequences) {
  pg_context *ctx = pg_model_context(model);
  pg_activations *a;
  MUST(ctx, pg_activations_new(ctx, pg_model_get_config(model), pg_model_compute(model), sequences,
                               TIME, PG_KEEP_NOTHING, &a));
  return a;
}

/* With AdamW at its defaults but lr and weight_decay, NAN for these too. */
static inline pg_run *golden_run(pg_model *model, const pg_run_options *options, double lr,
                                 double decay) {
  pg_context *ctx = pg_model_context(model);
  const pg_optimizer *adamw = pg_optimizer_find("adamw");
  double hypers[PG_MAX_HYPERS];
  pg_run *run;
  MUST(ctx, pg_run_new(model, options, &run));
  pg_optimizer_defaults(adamw, hypers);
  if (!isnan(lr)) hypers[pg_optimizer_hyper_index(adamw, "lr", NULL)] = lr;
  if (!isnan(decay)) hypers[pg_optimizer_hyper_index(adamw, "weight_decay", NULL)] = decay;
  for (size_t i = 0; i < pg_model_count(model); i++) {
    pg_parameter *p = pg_model_parameter(model, i);
    MUST(ctx, pg_run_assign(run, adamw, hypers, false, &p, 1, NULL));
  }
  return run;
}

#endif
