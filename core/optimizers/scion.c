/* Scion (Pethick et al. 2025): steps in a ball of radius rho, by the linear minimisation oracle of
 * its norm. D <- (1-alpha) D + alpha G;  S = -lr rho L(D), for [m, n] = [rows, columns]:
 *   spectral  sqrt(m/n) times the polar factor (five Newton-Schulz steps)
 *   sign      sign(D) / n
 *   row       d_i / (sqrt(n) ||d_i|| + eps)
 *   column    d_j / (n ||d_j|| / sqrt(m) + eps)
 * With normalised = false they are larger by sqrt(n), n, sqrt(n) and n.
 * Weight decay 1, the default, is the constrained form W <- (1-lr) W + S; 0 is the other. */
#include "newton_schulz.h"

#include <math.h>

enum { LR, ALPHA, RADIUS, MAP, NORMALISED, STEPS, EPS, WEIGHT_DECAY };
enum { MAP_SPECTRAL, MAP_SIGN, MAP_ROW, MAP_COLUMN };
enum { BUFFER };

/* Beside the Frobenius norm, as in the authors' program. */
static const double POLAR_EPS = 1e-7;

static int64_t scion_scratch(const pg_increment_group *group) {
  const int64_t rows = group->rows, columns = group->columns;
  return pg__polar_bytes(1, rows, columns) + pg__max(rows, columns) * (int64_t)sizeof(float);
}

static int scion_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const double *h = group->hypers, m = (double)group->rows, n = (double)group->columns;
  const int64_t rows = group->rows, columns = group->columns;
  const bool normalised = h[NORMALISED] != 0;
  pg__polar c = pg__polar_in(memory, 1, rows, columns, PG_F32);
  float *norms = memory + pg__polar_bytes(1, rows, columns) / (int64_t)sizeof(float);
  const pg_view x = pg__matrix_view(c.x, columns);
  double factor = 1; /* what the floor of a norm is over, too: u / (u_norm + eps factor) * factor */
  int status;
  PG_TRY(pg__mean_direction(group, i, 1 - h[ALPHA], false, c.x));
  switch ((int)h[MAP]) {
  case MAP_SPECTRAL:
    factor = normalised ? sqrt(m / n) : sqrt(m);
    PG_TRY(pg__polar_factor(ctx, &c, PG__QUINTIC, (int)h[STEPS], POLAR_EPS));
    break;
  case MAP_SIGN:
    factor = normalised ? 1 / n : 1;
    PG_LAUNCH(ctx, unary, PG_SIGN, x, rows, columns, x);
    break;
  case MAP_ROW:
    factor = normalised ? 1 / sqrt(n) : 1;
    PG_TRY(pg__normalise(group, false, PG_ADD, h[EPS] * factor, c.x, norms));
    break;
  default:
    factor = normalised ? sqrt(m) / n : sqrt(m);
    PG_TRY(pg__normalise(group, true, PG_ADD, h[EPS] * factor, c.x, norms));
  }
  PG_TRY(pg__deliver(group, i, -group->lr * h[RADIUS] * factor, c.x));
fail:
  return status;
}

static int scion_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, scion_scratch(group), scion_one);
}

static const char *const maps[] = {"spectral", "sign", "row", "column", NULL};
static const pg_hyper hypers[] = {
    [LR] = PG__LR(3.6e-4),
    [ALPHA] = {"alpha",
               PG_HYPER_NUMBER,
               {0.1},
               0,
               1,
               true,
               false,
               NULL,
               "share of the new gradient in the mean; 1: the gradient itself"},
    [RADIUS] = PG__FROM_0("radius", 50, "rho, of the ball"),
    [MAP] = PG__CHOICE("map", MAP_SPECTRAL, MAP_COLUMN, maps, "whose norm the ball is of"),
    [NORMALISED] = PG__SWITCH("normalised", 1, "divide by the fan-in"),
    [STEPS] = PG__COUNT_TO("steps", 5, 1000, "Newton-Schulz steps of the spectral map"),
    [EPS] = PG__ABOVE_0("eps", 1e-8, "added to the length of a row or column"),
    [WEIGHT_DECAY] = PG__FROM_0("weight_decay", 1, "1: constrained to the ball; 0: not"),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__scion_optimizer;
const pg_optimizer pg__scion_optimizer = {
    .name = "scion",
    .help = "Scion: D <- (1-alpha) D + alpha G, S = -lr radius L(D) with L the linear minimisation "
            "oracle of the spectral, sign, row or column norm; weight_decay 1 keeps the weights in "
            "the ball (Pethick et al. 2025).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .increment = scion_increment,
    .scratch = scion_scratch,
};
