/* NorMuon (Li et al. 2025): Muon, then every row of its orthogonal matrix over a mean of its root
 * mean squares, at the Frobenius norm that it had.
 *   M <- mu M + (1-mu) G;   X = polar((1-mu) G + mu M), by Newton-Schulz steps;
 *   v_i <- b2 v_i + (1-b2) mean_j x_ij^2;   Y = X / (sqrt(v_i) + 1e-10) by rows;
 *   S = -lr sqrt(max(1, rows/columns)) ||X||_F / (||Y||_F + 1e-10) Y. */
#include "newton_schulz.h"

#include <math.h>

enum { LR, MOMENTUM, BETA2, STEPS, EPS, WEIGHT_DECAY };
enum { BUFFER, SECOND };

static const double LEAST = 1e-10; /* beside a root mean square and ||Y||_F */

static int64_t normuon_scratch(const pg_increment_group *group) {
  const int64_t extra = group->rows + 2; /* a number per row, ||X||_F, ||Y||_F */
  return pg__polar_bytes(1, group->rows, group->columns) + extra * (int64_t)sizeof(float);
}

static int normuon_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const int64_t rows = group->rows, columns = group->columns;
  const double shape = fmax(1, (double)rows / (double)columns);
  float *extra = memory + pg__polar_bytes(1, rows, columns) / (int64_t)sizeof(float);
  const pg_view q = pg__per_row_view(extra), v = pg__per_row_view(group->slots[i][SECOND]);
  const pg_view before = {extra + rows, 0, 0}, after = {extra + rows + 1, 0, 0};
  pg__polar c = pg__polar_in(memory, 1, rows, columns, PG_F32);
  int status;
  PG_TRY(pg__mean_direction(group, i, h[MOMENTUM], true, c.direction));
  PG_TRY(pg__polar_factor(ctx, &c, PG__QUINTIC, (int)h[STEPS], h[EPS]));
  const pg_view x = pg__matrix_view(c.x, columns);
  PG_LAUNCH(ctx, reduce, PG_NORM, x, rows, columns, -1, before.data);
  PG_LAUNCH(ctx, reduce, PG_NORM, x, rows, columns, 1, q.data);
  PG_LAUNCH(ctx, unary, PG_SQUARE, q, rows, 1, q);
  PG_LAUNCH(ctx, scalar, PG_DIV, q, (double)columns, false, rows, 1, q);
  PG_LAUNCH(ctx, lerp, v, q, 1 - h[BETA2], rows, 1);
  PG_LAUNCH(ctx, unary, PG_SQRT, v, rows, 1, q);
  PG_LAUNCH(ctx, scalar, PG_ADD, q, LEAST, false, rows, 1, q);
  PG_LAUNCH(ctx, binary, PG_DIV, x, q, rows, columns, x);
  PG_LAUNCH(ctx, reduce, PG_NORM, x, rows, columns, -1, after.data);
  PG_LAUNCH(ctx, scalar, PG_ADD, after, LEAST, false, 1, 1, after);
  PG_LAUNCH(ctx, binary, PG_DIV, before, after, 1, 1, before);
  PG_LAUNCH(ctx, binary, PG_MUL, x, before, rows, columns, x);
  PG_TRY(pg__deliver(group, i, -group->lr * sqrt(shape), c.x));
fail:
  return status;
}

static double normuon_factor(const double *hypers, int64_t rows, int64_t columns) {
  (void)hypers;
  return sqrt(fmax(1, (double)rows / (double)columns));
}

static int normuon_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, normuon_scratch(group), normuon_one);
}

static const pg_hyper hypers[] = {
    [LR] = PG__LR(0.02),
    [MOMENTUM] = PG__SHARE("momentum", 0.95, "decay of the gradient's mean, per update"),
    [BETA2] = PG__SHARE("beta2", 0.95, "decay of the mean square of a row of X, per update"),
    [STEPS] = PG__COUNT_TO("steps", 5, 1000, "Newton-Schulz steps; 0 only normalises"),
    [EPS] = PG__FROM_0("eps", 1e-7, "added to the Frobenius norm"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0),
};
static const pg_slot slots[] = {
    [BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}, [SECOND] = {"v", PG_SLOT_ROW, PG_F32}};

extern const pg_optimizer pg__normuon_optimizer;
const pg_optimizer pg__normuon_optimizer = {
    .name = "normuon",
    .help =
        "NorMuon: X = polar((1-momentum) G + momentum M), v <- beta2 v + (1-beta2) mean x^2 per "
        "row, S = -lr sqrt(max(1, rows/columns)) X / sqrt(v) at the Frobenius norm of X (Li et "
        "al. 2025).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .factor = normuon_factor,
    .increment = normuon_increment,
    .scratch = normuon_scratch,
};
