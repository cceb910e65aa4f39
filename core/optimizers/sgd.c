/* SGD with momentum (torch.optim.SGD):
 *   B <- mu B + G;   S = -lr B, or with `nesterov` -lr (G + mu B).
 * average = "mean" keeps M <- mu M + (1-mu) G instead (torch's dampening = momentum) and takes M,
 * or (1-mu) G + mu M. The slot exists for mu = 0 too, where it holds the last gradient: a momentum
 * that a recipe changes during training then needs no new state. */
#include "compose.h"

#include <math.h>

enum { LR, MOMENTUM, WEIGHT_DECAY, NESTEROV, AVERAGE };
enum { AVERAGE_SUM, AVERAGE_MEAN };
enum { BUFFER };

/* The direction, where it is not the slot itself, and its length. */
static int64_t sgd_scratch(const pg_increment_group *group) {
  const bool apart = group->hypers[NESTEROV] != 0;
  return apart ? (group->rows * group->columns + 1) * (int64_t)sizeof(float) : 0;
}

static int sgd_one(const pg_increment_group *group, size_t i, float *memory) {
  const double mu = group->hypers[MOMENTUM];
  const bool nesterov = group->hypers[NESTEROV] != 0, mean = group->hypers[AVERAGE] != AVERAGE_SUM;
  const int64_t n = group->rows * group->columns;
  int status;
  float *x = group->slots[i][BUFFER];
  if (nesterov) x = memory;
  if (mean && nesterov)
    PG_TRY(pg__mean_direction(group, i, mu, true, x));
  else if (mean)
    PG_TRY(pg__mean(group, i, mu));
  else
    PG_TRY(pg__sum_direction(group, i, mu, nesterov, nesterov ? x : NULL,
                             nesterov ? memory + n : NULL));
  PG_TRY(pg__deliver(group, i, -group->lr, x));
fail:
  return status;
}

static int sgd_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, sgd_scratch(group), sgd_one);
}

static const char *const averages[] = {"sum", "mean", NULL};
static const pg_hyper hypers[] = {
    [LR] = PG__LR(NAN),
    [MOMENTUM] = PG__SHARE("momentum", 0, "mu of B <- mu B + G"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0),
    [NESTEROV] = PG__SWITCH("nesterov", 0, "step along G + mu B instead of B"),
    [AVERAGE] = PG__CHOICE("average", AVERAGE_SUM, AVERAGE_MEAN, averages,
                           "what the momentum is of gradients: their decayed sum or mean"),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__sgd_optimizer;
const pg_optimizer pg__sgd_optimizer = {
    .name = "sgd",
    .help = "Gradient descent with momentum: B <- momentum B + G, S = -lr B, or -lr (G + momentum "
            "B) with nesterov; average = \"mean\" for means in place of sums (torch.optim.SGD).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_ELEMENTS,
    .applies = true,
    .increment = sgd_increment,
    .scratch = sgd_scratch,
};
