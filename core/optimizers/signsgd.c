/* signSGD (Bernstein et al. 2018), with a mean of gradients as Signum:
 *   M <- beta M + (1-beta) G;   S = -lr sign(M).
 * beta = 0 takes the sign of the gradient itself. */
#include "compose.h"

#include <math.h>

enum { LR, BETA, WEIGHT_DECAY };
enum { BUFFER };

static int64_t signsgd_scratch(const pg_increment_group *group) {
  return group->rows * group->columns * (int64_t)sizeof(float);
}

static int signsgd_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const int64_t rows = group->rows, columns = group->columns;
  const pg_view m = pg__matrix_view(group->slots[i][BUFFER], columns);
  int status;
  PG_TRY(pg__mean(group, i, group->hypers[BETA]));
  PG_LAUNCH(ctx, unary, PG_SIGN, m, rows, columns, pg__matrix_view(memory, columns));
  PG_TRY(pg__deliver(group, i, -group->lr, memory));
fail:
  return status;
}

static int signsgd_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, signsgd_scratch(group), signsgd_one);
}

static const pg_hyper hypers[] = {
    PG__LR(NAN),
    PG__SHARE("beta", 0, "decay of the gradient's mean, per update; 0: the gradient itself"),
    PG__WEIGHT_DECAY(0),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__signsgd_optimizer;
const pg_optimizer pg__signsgd_optimizer = {
    .name = "signsgd",
    .help = "signSGD: M <- beta M + (1-beta) G, S = -lr sign(M) (Bernstein et al. 2018).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_ELEMENTS,
    .applies = true,
    .increment = signsgd_increment,
    .scratch = signsgd_scratch,
};
