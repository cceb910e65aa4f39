/* RMNP (Deng et al. 2026): Muon's momentum and shape scale, with rows of length 1 in place of the
 * orthogonal factor:
 *   B <- mu B + G;   D = G + mu B (Nesterov) or B;
 *   row i of S = -lr sqrt(max(1, rows/columns)) d_i / max(||d_i||, eps). */
#include "compose.h"

#include <math.h>

enum { LR, MOMENTUM, NESTEROV, EPS, WEIGHT_DECAY };
enum { BUFFER };

static int64_t rmnp_scratch(const pg_increment_group *group) {
  return (group->rows * group->columns + group->rows) * (int64_t)sizeof(float);
}

static int rmnp_one(const pg_increment_group *group, size_t i, float *memory) {
  const double *h = group->hypers;
  const int64_t n = group->rows * group->columns;
  const double shape = fmax(1, (double)group->all_rows / (double)group->columns);
  int status;
  PG_TRY(pg__sum_direction(group, i, h[MOMENTUM], h[NESTEROV] != 0, memory, memory + n));
  PG_TRY(pg__normalise(group, false, PG_MAX, h[EPS], memory, memory + n));
  PG_TRY(pg__deliver(group, i, -group->lr * sqrt(shape), memory));
fail:
  return status;
}

static double rmnp_factor(const double *hypers, int64_t rows, int64_t columns) {
  (void)hypers;
  return sqrt(fmax(1, (double)rows / (double)columns));
}

static int rmnp_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, rmnp_scratch(group), rmnp_one);
}

static const pg_hyper hypers[] = {
    [LR] = PG__LR(4e-3),
    [MOMENTUM] = PG__SHARE("momentum", 0.95, "mu of B <- mu B + G"),
    [NESTEROV] = PG__SWITCH("nesterov", 1, "normalise G + mu B instead of B"),
    [EPS] = PG__ABOVE_0("eps", 1e-12, "least length of a row to divide by"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__rmnp_optimizer;
const pg_optimizer pg__rmnp_optimizer = {
    .name = "rmnp",
    .help = "RMNP: B <- momentum B + G, D = G + momentum B, every row of S = -lr sqrt(max(1, "
            "rows/columns)) d / max(||d||, eps) (Deng et al. 2026).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_ROWS,
    .applies = true,
    .factor = rmnp_factor,
    .increment = rmnp_increment,
    .scratch = rmnp_scratch,
};
