/* Lion (Chen et al. 2023). Decay rates differ in the step and in what is kept:
 *   U = sign(b1 M + (1-b1) G);   S = -lr U;   M <- b2 M + (1-b2) G, after the step. */
#include "compose.h"

#include <math.h>

enum { LR, BETA1, BETA2, WEIGHT_DECAY };
enum { BUFFER };

static int64_t lion_scratch(const pg_increment_group *group) {
  return group->rows * group->columns * (int64_t)sizeof(float);
}

static int lion_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const int64_t rows = group->rows, columns = group->columns, n = rows * columns;
  const pg_view x = pg__matrix_view(memory, columns);
  const pg_view m = pg__matrix_view(group->slots[i][BUFFER], columns);
  const pg_view g = pg__input_view(group->gradients[i], columns);
  int status;
  PG_LAUNCH(ctx, copy, memory, m.data, (size_t)n * sizeof(float));
  PG_LAUNCH(ctx, lerp, x, g, 1 - group->hypers[BETA1], rows, columns);
  PG_LAUNCH(ctx, unary, PG_SIGN, x, rows, columns, x);
  PG_TRY(pg__deliver(group, i, -group->lr, memory));
  PG_TRY(pg__mean(group, i, group->hypers[BETA2]));
fail:
  return status;
}

static int lion_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, lion_scratch(group), lion_one);
}

static const pg_hyper hypers[] = {
    PG__LR(1e-4),
    PG__SHARES("betas", 0.9, 0.99,
               "share of the momentum in the step, and its decay per update afterwards"),
    PG__WEIGHT_DECAY(0),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__lion_optimizer;
const pg_optimizer pg__lion_optimizer = {
    .name = "lion",
    .help = "Lion: S = -lr sign(b1 M + (1-b1) G), then M <- b2 M + (1-b2) G (Chen et al. 2023).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_ELEMENTS,
    .applies = true,
    .increment = lion_increment,
    .scratch = lion_scratch,
};
