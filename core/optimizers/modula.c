/* Modula's maps (Bernstein et al. 2025). M <- beta M + (1-beta) G;  S = -lr tau L(M), for [rows,
 * columns]:
 *   linear  sqrt(rows/columns) times the polar factor, by six Newton-Schulz steps of their own
 *   embed   sqrt(columns) m_i / ||m_i||, rows without gradient staying where they are
 * tau is the share of the step that a module gets by its mass. */
#include "newton_schulz.h"

#include <float.h>
#include <math.h>

enum { LR, BETA, MAP, TAU, STEPS, WEIGHT_DECAY };
enum { MAP_LINEAR, MAP_EMBED };
enum { BUFFER };

static int64_t modula_scratch(const pg_increment_group *group) {
  return pg__polar_bytes(1, group->rows, group->columns) + group->rows * (int64_t)sizeof(float);
}

static int modula_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const int64_t rows = group->rows, columns = group->columns;
  pg__polar c = pg__polar_in(memory, 1, rows, columns, PG_F32);
  float *norms = memory + pg__polar_bytes(1, rows, columns) / (int64_t)sizeof(float);
  double factor = sqrt((double)columns);
  int status;
  PG_TRY(pg__mean_direction(group, i, h[BETA], false, c.x));
  if (h[MAP] == MAP_LINEAR) {
    factor = sqrt((double)rows / (double)columns);
    PG_TRY(pg__polar_factor(ctx, &c, PG__MODULA, (int)h[STEPS], 0));
  } else {
    PG_TRY(pg__normalise(group, false, PG_MAX, FLT_MIN, c.x, norms));
  }
  PG_TRY(pg__deliver(group, i, -group->lr * h[TAU] * factor, c.x));
fail:
  return status;
}

static int modula_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, modula_scratch(group), modula_one);
}

static const char *const maps[] = {"linear", "embed", NULL};
static const pg_hyper hypers[] = {
    [LR] = PG__LR(0.1),
    [BETA] = PG__SHARE("beta", 0.95, "decay of the gradient's mean, per update"),
    [MAP] = PG__CHOICE("map", MAP_LINEAR, MAP_EMBED, maps, "what the parameter is"),
    [TAU] = PG__FROM_0("tau", 1, "its share of the step"),
    [STEPS] = PG__COUNT_TO("steps", 6, 1000, "Newton-Schulz steps of the linear map"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__modula_optimizer;
const pg_optimizer pg__modula_optimizer = {
    .name = "modula",
    .help =
        "Modula: M <- beta M + (1-beta) G, S = -lr tau L(M), L(M) = sqrt(rows/columns) polar(M) "
        "for linear maps and rows sqrt(columns) m / ||m|| for embeddings (Bernstein et al. "
        "2025).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .increment = modula_increment,
    .scratch = modula_scratch,
};
