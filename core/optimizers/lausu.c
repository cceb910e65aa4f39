/* The symmetry-compatible maps of Lau and Su (2026) for a head, whose rows may be shifted together
 * (center = true: P subtracts the mean row), and for an embedding, whose may not.
 *   M <- beta M + (1-beta) G;   C = P M or M;
 *   row          U = rows c_i / (||c_i|| + eps)
 *   right_polar  U = nu^alpha polar(C),  nu = max(<C, polar(C)>, eps), about the nuclear norm
 *   hybrid       the same with R = rows c_i / (||c_i|| + eps), centred again, for C
 *   S = -lr P U or -lr U.
 * The authors' right factor (C^T C)^(-1/2) makes the polar factor, here by Newton-Schulz steps. */
#include "newton_schulz.h"

#include <math.h>

enum { LR, BETA, MAP, CENTER, ALPHA, STEPS, EPS, WEIGHT_DECAY };
enum { MAP_ROW, MAP_RIGHT_POLAR, MAP_HYBRID };
enum { BUFFER };

/* The polar factor's, C beside it, and a number per row, of which the first is nu's later. */
static int64_t lausu_scratch(const pg_increment_group *group) {
  return pg__polar_bytes(1, group->rows, group->columns) +
         (group->rows * group->columns + group->rows) * (int64_t)sizeof(float);
}

/* x <- nu^alpha polar(x); `given` and `number` are scratch. */
static int scaled_polar(const pg_increment_group *group, pg__polar *c, float *given,
                        float *number) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const int64_t n = group->rows * group->columns;
  const pg_view from = pg__matrix_view(given, n), nu = {number, 0, 0};
  int status;
  PG_LAUNCH(ctx, copy, given, c->direction, (size_t)n * sizeof(float));
  PG_TRY(pg__polar_factor(ctx, c, PG__GRAM, (int)h[STEPS], h[EPS]));
  const pg_view x = pg__matrix_view(c->x, n);
  PG_LAUNCH(ctx, binary, PG_MUL, from, x, 1, n, from);
  PG_LAUNCH(ctx, reduce, PG_SUM, from, 1, n, -1, number);
  PG_LAUNCH(ctx, scalar, PG_MAX, nu, h[EPS], false, 1, 1, nu);
  PG_LAUNCH(ctx, scalar, PG_POW, nu, h[ALPHA], false, 1, 1, nu);
  PG_LAUNCH(ctx, binary, PG_MUL, x, nu, 1, n, x);
fail:
  return status;
}

static int lausu_one(const pg_increment_group *group, size_t i, float *memory) {
  const double *h = group->hypers;
  const int64_t n = group->rows * group->columns;
  const bool center = h[CENTER] != 0;
  pg__polar c = pg__polar_in(memory, 1, group->rows, group->columns, PG_F32);
  float *given = memory + pg__polar_bytes(1, group->rows, group->columns) / (int64_t)sizeof(float);
  int status;
  PG_TRY(pg__mean_direction(group, i, h[BETA], false, c.x));
  if (center) PG_TRY(pg__center_rows(group, c.x, c.x));
  if (h[MAP] != MAP_RIGHT_POLAR)
    PG_TRY(pg__normalise(group, false, PG_ADD, h[EPS], c.x, given + n));
  if (h[MAP] == MAP_HYBRID && center) PG_TRY(pg__center_rows(group, c.x, c.x));
  if (h[MAP] != MAP_ROW) PG_TRY(scaled_polar(group, &c, given, given + n));
  if (center) PG_TRY(pg__center_rows(group, c.x, c.x));
  PG_TRY(pg__deliver(group, i, -group->lr, c.x));
fail:
  return status;
}

static int lausu_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, lausu_scratch(group), lausu_one);
}

static const char *const maps[] = {"row", "right_polar", "hybrid", NULL};
static const pg_hyper hypers[] = {
    [LR] = PG__LR(NAN),
    [BETA] = PG__SHARE("beta", 0.95, "decay of the gradient's mean, per update"),
    [MAP] = PG__CHOICE("map", MAP_ROW, MAP_HYBRID, maps, "what is made of the mean"),
    [CENTER] = PG__SWITCH("center", 0, "subtract the mean row, before and after; true for a head"),
    [ALPHA] = PG__FROM_0("alpha", 1, "power of the nuclear norm; 0: the polar factor itself"),
    [STEPS] = PG__COUNT_TO("steps", 5, 1000, "Newton-Schulz steps of a polar factor"),
    [EPS] = PG__ABOVE_0("eps", 1e-8, "added to a norm; the least nuclear norm"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__lausu_optimizer;
const pg_optimizer pg__lausu_optimizer = {
    .name = "lausu",
    .help = "Symmetry-compatible maps: M <- beta M + (1-beta) G, S = -lr U, where U has rows of "
            "length 1 (row), is the polar factor times a power of the nuclear norm (right_polar), "
            "or that of rows of length 1 (hybrid); centred for a head (Lau and Su 2026).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .increment = lausu_increment,
    .scratch = lausu_scratch,
};
