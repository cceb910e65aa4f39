/* SCALE (Glentis et al. 2025): every row, or every column, at root mean square 1:
 *   M <- beta M + (1-beta) G;   S = -lr M / max(rms of its row, eps).
 * The authors keep a mean of gradients (beta 0.9) for the head alone, and normalise the columns of
 * the embedding table. With beta = 0 the slot holds the last gradient. */
#include "compose.h"

#include <math.h>

enum { LR, BETA, EPS, AXIS, WEIGHT_DECAY };
enum { AXIS_ROWS, AXIS_COLUMNS };
enum { BUFFER };

static int64_t scale_scratch(const pg_increment_group *group) {
  const int64_t rows = group->rows, columns = group->columns;
  return (rows * columns + pg__max(rows, columns)) * (int64_t)sizeof(float);
}

static int scale_one(const pg_increment_group *group, size_t i, float *memory) {
  const double *h = group->hypers;
  const int64_t rows = group->rows, columns = group->columns, n = rows * columns;
  const bool by_column = h[AXIS] == AXIS_COLUMNS;
  /* max(norm / sqrt(k), eps) = max(norm, eps sqrt(k)) / sqrt(k), for k numbers */
  const double root = sqrt((double)(by_column ? rows : columns));
  int status;
  PG_TRY(pg__mean_direction(group, i, h[BETA], false, memory));
  PG_TRY(pg__normalise(group, by_column, PG_MAX, h[EPS] * root, memory, memory + n));
  PG_TRY(pg__deliver(group, i, -group->lr * root, memory));
fail:
  return status;
}

static int scale_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, scale_scratch(group), scale_one);
}

static const char *const axes[] = {"rows", "columns", NULL};
static const pg_hyper hypers[] = {
    [LR] = PG__LR(1e-3),
    [BETA] = PG__SHARE("beta", 0, "decay of the gradient's mean, per update; 0.9 for a head"),
    [EPS] = PG__ABOVE_0("eps", 1e-8, "least root mean square to divide by"),
    [AXIS] = {"axis", PG_HYPER_CHOICE, {AXIS_ROWS}, 0, 1, false, false, axes, "what is normalised"},
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__scale_optimizer;
const pg_optimizer pg__scale_optimizer = {
    .name = "scale",
    .help = "SCALE: M <- beta M + (1-beta) G, S = -lr M / max(rms, eps) with the root mean square "
            "of each row or column (Glentis et al. 2025).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .increment = scale_increment,
    .scratch = scale_scratch,
};
