/* SGD with momentum (torch.optim.SGD, dampening 0, no Nesterov):
 *   B <- mu B + G;   S = -lr B.
 * The slot exists for mu = 0 too, where it holds the last gradient: a momentum that a recipe
 * changes during training then needs no new state. */
#include "compose.h"

#include <math.h>

enum { LR, MOMENTUM, WEIGHT_DECAY };
enum { BUFFER };

static int sgd_increment(const pg_increment_group *group, void *self) {
  (void)self;
  int status = 0;
  for (size_t i = 0; i < group->count; i++) {
    pg__on(group, i);
    PG_TRY(pg__sum_direction(group, i, group->hypers[MOMENTUM], false, NULL, NULL));
    PG_TRY(pg__deliver(group, i, -group->lr, group->slots[i][BUFFER]));
  }
fail:
  return status;
}

static const pg_hyper hypers[] = {
    [LR] = PG__LR(NAN),
    [MOMENTUM] = PG__SHARE("momentum", 0, "mu of B <- mu B + G"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__sgd_optimizer;
const pg_optimizer pg__sgd_optimizer = {
    .name = "sgd",
    .help = "Gradient descent with momentum: B <- momentum B + G, S = -lr B (torch.optim.SGD "
            "without dampening).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_ELEMENTS,
    .applies = true,
    .increment = sgd_increment,
};
