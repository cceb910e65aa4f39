/* A C host without Lua: trains 20 updates and reads the head's row diameter.
 * Usage: host_train DATA_FOLDER VOCAB */
#include "perigee.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRY(call)                                                                                  \
  if ((call) < 0) {                                                                                \
    fprintf(stderr, "%s\n", pg_context_message(ctx));                                              \
    return 1;                                                                                      \
  }

/* Let optimizer `name` with its default hyperparameters, but this learning rate, update a role. */
static int assign(pg_context *ctx, pg_run *run, pg_role role, const char *name, double lr,
                  int *out) {
  pg_model *model = pg_run_model(run);
  const pg_optimizer *optimizer = pg_optimizer_find(name);
  double hypers[PG_MAX_HYPERS];
  pg_parameter *chosen[64];
  size_t count = 0;
  pg_optimizer_defaults(optimizer, hypers);
  hypers[pg_optimizer_hyper_index(optimizer, "lr", NULL)] = lr;
  for (size_t i = 0; i < pg_model_count(model); i++)
    if (pg_model_parameter(model, i)->role == role) chosen[count++] = pg_model_parameter(model, i);
  TRY(pg_run_assign(run, optimizer, hypers, false, chosen, count, out));
  return 0;
}

int main(int argc, char **argv) {
  pg_context *ctx;
  pg_model *model;
  pg_run *run;
  char message[256];
  int assignments[3];
  const int64_t updates = 20;
  if (argc != 3) return fprintf(stderr, "usage: %s DATA_FOLDER VOCAB\n", argv[0]), 2;
  if (pg_context_new(NULL, &ctx, message, sizeof message) < 0)
    return fprintf(stderr, "%s\n", message), 1;

  pg_model_config config;
  pg_model_config_default(&config);
  config.layers = 2, config.width = 64, config.heads = 1, config.context = 32;
  config.vocab = atoll(argv[2]);
  TRY(pg_model_config_resolve(ctx, &config));
  TRY(pg_model_new(ctx, &config, &model));
  TRY(pg_model_init(model, 0));
  pg_run_options options = {
      .data = argv[1], .sequences = 8, .micro = 4, .max_norm = 1.0, .data_seed = 0};
  TRY(pg_run_new(model, &options, &run));
  if (assign(ctx, run, PG_EMBEDDING, "adamw", 4e-3, &assignments[0]) ||
      assign(ctx, run, PG_BACKBONE, "muon", 8e-3, &assignments[1]) ||
      assign(ctx, run, PG_HEAD, "rownorm", 1e-2, &assignments[2]))
    return 1;

  pg_step step;
  pg_diameter diameter;
  for (int64_t t = 0; t < updates; t++) {
    for (int i = 0; i < 3; i++)
      pg_run_assignment(run, assignments[i])->scale = pg_schedule_warmup_cosine(t, updates, 2, 0.1);
    TRY(pg_run_step(run, &step));
    TRY(pg_geometry_diameter(pg_model_head(model)->increment, &diameter));
    printf("update %2lld  loss %.4f  diameter %.6f\n", (long long)step.update, step.loss,
           diameter.value);
  }
  pg_run_free(run);
  pg_model_free(model);
  pg_context_free(ctx);
  return 0;
}
