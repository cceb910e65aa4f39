/* SinkGD (Scetbon et al. 2025): the gradient, its rows and columns normalised in turn until all
 * have root mean square 1, and nothing kept. `steps` times
 *   rows of X / their rms, then columns of X / their rms;   S = -lr X, from X = G. */
#include "compose.h"

#include <float.h>
#include <math.h>

enum { LR, STEPS, WEIGHT_DECAY };

static int64_t sinkgd_scratch(const pg_increment_group *group) {
  const int64_t rows = group->rows, columns = group->columns;
  return (rows * columns + pg__max(rows, columns)) * (int64_t)sizeof(float);
}

/* Rows and columns are taken to length 1. Only the last factor sqrt(rows) remains then: the others
 * drop out of the next normalisation. */
static int sinkgd_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const int64_t n = group->rows * group->columns;
  const int steps = (int)group->hypers[STEPS];
  const double factor = steps ? sqrt((double)group->rows) : 1;
  int status;
  PG_LAUNCH(ctx, copy, memory, group->gradients[i], (size_t)n * sizeof(float));
  for (int k = 0; k < steps; k++) {
    PG_TRY(pg__normalise(group, false, PG_MAX, FLT_MIN, memory, memory + n));
    PG_TRY(pg__normalise(group, true, PG_MAX, FLT_MIN, memory, memory + n));
  }
  PG_TRY(pg__deliver(group, i, -group->lr * factor, memory));
fail:
  return status;
}

static int sinkgd_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, sinkgd_scratch(group), sinkgd_one);
}

static const pg_hyper hypers[] = {
    [LR] = PG__LR(1e-3),
    [STEPS] = PG__COUNT_TO("steps", 5, 1000, "normalisations of rows and columns; 0: none"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0),
};

extern const pg_optimizer pg__sinkgd_optimizer;
const pg_optimizer pg__sinkgd_optimizer = {
    .name = "sinkgd",
    .help = "SinkGD: S = -lr X, where X is G after its rows and its columns were brought to root "
            "mean square 1 in turn, `steps` times; no state (Scetbon et al. 2025).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .increment = sinkgd_increment,
    .scratch = sinkgd_scratch,
};
