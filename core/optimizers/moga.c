/* MOGA (Xu et al. 2026): steepest descent in the mean-normalised p -> infinity norm. With M the
 * mean of gradients, M <- mu M + (1-mu) G:
 *   s_ij = -lr base / columns^(1/p) * sign(m_ij) |m_ij|^(p-1) / max(||m_i||_p^(p-1), eps).
 * p = 2 gives rows of one length, p = 1 signs. fan_in = false leaves out columns^(1/p), as the
 * authors do for the head (with base = 1).
 * axis = "columns" is the other end of the family, the 1 -> q norm: columns in place of rows, with
 * p = 1 / (1 - 1/q), and rows^(1/q) / columns in place of 1 / columns^(1/p), which makes the mean-
 * normalised norm of the step lr base: max_j ||s_j||_q columns / rows^(1/q).
 *
 * Powers are taken of y = |m_ij| / r with r the row's largest, so that none overflows and the sum
 * is at least 1: sign(m) y^(p-1) / max(||y||_p^(p-1), eps r^(1-p)). */
#include "compose.h"

#include <float.h>
#include <math.h>

enum { LR, MOMENTUM, P, BASE, FAN_IN, EPS, WEIGHT_DECAY, AXIS, Q };
enum { AXIS_ROWS, AXIS_COLUMNS };
enum { BUFFER };

static int64_t moga_scratch(const pg_increment_group *group) {
  const int64_t lines = pg__max(group->rows, group->columns);
  return (2 * group->rows * group->columns + 2 * lines) * (int64_t)sizeof(float);
}

static int moga_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const bool by_column = h[AXIS] == AXIS_COLUMNS;
  const double p = by_column ? h[Q] / (h[Q] - 1) : h[P];
  const int64_t rows = group->rows, columns = group->columns, n = rows * columns;
  const double width = h[FAN_IN] == 0 ? 1
                       : by_column    ? (double)columns / pow((double)rows, 1 / h[Q])
                                      : pow((double)columns, 1 / p);
  const int64_t lines = by_column ? columns : rows, line_rows = by_column ? 1 : rows;
  const int64_t line_columns = by_column ? columns : 1;
  const int axis = by_column ? 0 : 1;
  const pg_view m = pg__matrix_view(group->slots[i][BUFFER], columns);
  const pg_view x = pg__matrix_view(memory, columns), y = pg__matrix_view(memory + n, columns);
  const pg_view largest = pg__per_line_view(memory + 2 * n, by_column);
  const pg_view length = pg__per_line_view(memory + 2 * n + lines, by_column);
  int status;
  PG_TRY(pg__mean(group, i, h[MOMENTUM]));
  PG_LAUNCH(ctx, unary, PG_ABS, m, rows, columns, x);
  PG_LAUNCH(ctx, reduce, PG_RMAX, x, rows, columns, axis, largest.data);
  PG_LAUNCH(ctx, scalar, PG_MAX, largest, FLT_MIN, false, line_rows, line_columns, largest);
  PG_LAUNCH(ctx, binary, PG_DIV, x, largest, rows, columns, x);
  PG_LAUNCH(ctx, scalar, PG_POW, x, p, false, rows, columns, y);
  PG_LAUNCH(ctx, reduce, PG_SUM, y, rows, columns, axis, length.data);
  PG_LAUNCH(ctx, scalar, PG_POW, length, (p - 1) / p, false, line_rows, line_columns, length);
  PG_LAUNCH(ctx, scalar, PG_POW, largest, 1 - p, false, line_rows, line_columns, largest);
  PG_LAUNCH(ctx, scalar, PG_MUL, largest, h[EPS], false, line_rows, line_columns, largest);
  PG_LAUNCH(ctx, binary, PG_MAX, length, largest, line_rows, line_columns, length);
  PG_LAUNCH(ctx, scalar, PG_POW, x, p - 1, false, rows, columns, x);
  PG_LAUNCH(ctx, binary, PG_DIV, x, length, rows, columns, x);
  PG_LAUNCH(ctx, unary, PG_SIGN, m, rows, columns, y);
  PG_LAUNCH(ctx, binary, PG_MUL, x, y, rows, columns, x);
  PG_TRY(pg__deliver(group, i, -group->lr * h[BASE] / width, memory));
fail:
  return status;
}

static int moga_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, moga_scratch(group), moga_one);
}

static const char *const axes[] = {"rows", "columns", NULL};
static const pg_hyper hypers[] = {
    [LR] = PG__LR(1e-2),
    [MOMENTUM] = PG__SHARE("momentum", 0.95, "decay of the gradient's mean, per update"),
    [P] = {"p", PG_HYPER_NUMBER, {2}, 1, 64, false, false, NULL, "norm of a row"},
    [BASE] = PG__FROM_0("base", 20, "factor of the step; 1 for a head"),
    [FAN_IN] = PG__SWITCH("fan_in", 1, "divide by columns^(1/p); false for a head"),
    [EPS] = PG__ABOVE_0("eps", 1e-8, "least ||m||_p^(p-1) to divide by"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0.1),
    [AXIS] = PG__CHOICE("axis", AXIS_ROWS, AXIS_COLUMNS, axes, "what is normalised"),
    [Q] = {"q", PG_HYPER_NUMBER, {2}, 64.0 / 63, 64, false, false, NULL, "norm of a column"},
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__moga_optimizer;
const pg_optimizer pg__moga_optimizer = {
    .name = "moga",
    .help = "MOGA: M <- momentum M + (1-momentum) G, and every row of S = -lr base columns^(-1/p) "
            "sign(m) |m|^(p-1) / max(||m||_p^(p-1), eps) (Xu et al. 2026).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .increment = moga_increment,
    .scratch = moga_scratch,
};
