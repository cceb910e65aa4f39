/* RowNorm (the paper's head optimizer): every row of the momentum at the same length. With n the
 * parameter's own update, from 1, and c = 1 - beta^n:
 *   B <- beta B + (1-beta) G;   S_i = -lr b_i / (||b_i|| + eps c),
 * which is normalising the bias-corrected B/c with eps, without a copy of it. D(S) <= 2 lr.
 * project = "both" takes P B for B and P S for S, where P subtracts the mean row; "outer" only the
 * latter. The paper's runs project nothing: gradients of a softmax sum to zero over the rows, and a
 * common row of S changes no probability.
 *
 * axis = "columns" gives every column that length instead, as for a layer's input side; D(S) has
 * then no such bound.
 *
 * diameter_budget = eta > 0 multiplies S, projected or not, so that the exact diameter D(S) is eta
 * times the scale of the schedule (lr over its peak), whatever lr is: the paper's budget, used up
 * in every update. D(S) is found anew for each, which waits for the device and costs up to rows^2
 * columns / 2 multiply-adds (kernels/cpu/diameter.c).
 *
 * The operations and their order are those of the same optimizer written over tensors,
 *   m:lerp_(g, 1 - beta);  m:div_rows(m:row_norms() + eps * c):mul(-lr),
 * so that both give the same bits. */
#include "compose.h"

#include <float.h>
#include <math.h>

enum { LR, BETA, EPS, WEIGHT_DECAY, PROJECT, DIAMETER_BUDGET, AXIS };
enum { AXIS_ROWS, AXIS_COLUMNS };
enum { PROJECT_NONE, PROJECT_OUTER, PROJECT_BOTH };
enum { BUFFER };

/* Neither the mean row nor the diameter is known before all rows are, so that such an increment
 * must exist: in `memory` [rows, columns] when it is not kept. */
static bool whole(const double *hypers) {
  return (int)hypers[PROJECT] != PROJECT_NONE || hypers[DIAMETER_BUDGET] > 0 ||
         hypers[AXIS] == AXIS_COLUMNS;
}

/* b <- beta b + (1-beta) g;  s = -lr b, or P b, over the lengths of its columns, of all rows. */
static int columns_of_one_length(const pg_increment_group *group, size_t i, const pg_rownorm *h,
                                 bool center, float *s) {
  pg_context *ctx = group->context;
  const int64_t rows = group->rows, columns = group->columns;
  const pg_view all = pg__matrix_view(s, columns);
  const size_t bytes = (size_t)columns * sizeof(float);
  void *norms = NULL;
  int status;
  PG_TRY(pg__alloc(ctx, bytes, "lengths of columns", &norms));
  PG_TRY(pg__mean_direction(group, i, h->beta, false, s));
  if (center) PG_TRY(pg__center_rows(group, s, s));
  PG_TRY(pg__normalise(group, true, PG_ADD, h->offset, s, norms));
  PG_LAUNCH(ctx, scalar, PG_MUL, all, -h->lr, false, rows, columns, all);
fail:
  if (norms) pg__release(ctx, norms, bytes);
  return status;
}

static int increment_whole(const pg_increment_group *group, size_t i, const pg_rownorm *h,
                           float *memory) {
  pg_context *ctx = group->context;
  const int64_t rows = group->rows, columns = group->columns;
  const int project = (int)group->hypers[PROJECT];
  const double budget = group->hypers[DIAMETER_BUDGET];
  float *b = group->slots[i][BUFFER];
  pg_target to = pg__target(group, i);
  float *s = to.increment ? to.increment : memory;
  const pg_target into = {.increment = s};
  int status = 0;

  if (group->hypers[AXIS] == AXIS_COLUMNS) {
    PG_TRY(columns_of_one_length(group, i, h, project == PROJECT_BOTH, s));
  } else if (project == PROJECT_BOTH) {
    PG_LAUNCH(ctx, lerp, pg__matrix_view(b, columns), pg__input_view(group->gradients[i], columns),
              1 - h->beta, rows, columns);
    PG_TRY(pg__center_rows(group, b, s));
    PG_LAUNCH(ctx, rownorm, h, NULL, rows, columns, s, &into);
  } else {
    PG_LAUNCH(ctx, rownorm, h, group->gradients[i], rows, columns, b, &into);
  }
  if (project != PROJECT_NONE) PG_TRY(pg__center_rows(group, s, s));
  if (budget > 0 && group->lr > 0)
    PG_TRY(pg__use_budget(group, budget * group->lr / group->hypers[LR], s));
  to.increment = NULL;
  if (to.value) PG_TRY(pg__deliver(group, i, 1, s));
fail:
  return status;
}

/* An increment that is not kept, and beside it a mean row where ranks share the rows, or what the
 * diameter takes. */
static int64_t rownorm_scratch(const pg_increment_group *group) {
  const int64_t all = group->increments[0] ? 0 : group->rows * group->columns;
  const bool by_column = group->hypers[AXIS] == AXIS_COLUMNS;
  const bool shared = group->rows != group->all_rows;
  /* The lengths of the columns, and beside them a mean row or the ranks' squares. */
  const int64_t mean = (by_column + shared) * group->columns;
  const int64_t budget = group->hypers[DIAMETER_BUDGET] > 0 ? pg__budget_bytes(group) : 0;
  if (!whole(group->hypers)) return 0;
  return all * (int64_t)sizeof(float) + pg__max(mean * (int64_t)sizeof(float), budget);
}

static int rownorm_increment(const pg_increment_group *group, void *self) {
  (void)self;
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const size_t bytes = (size_t)(group->rows * group->columns) * sizeof(float);
  void *memory = NULL;
  int status = 0;
  for (size_t i = 0; i < group->count; i++) {
    /* The floor keeps a zero row from 0/0 when eps * c is below the smallest fp32 number. */
    const pg_rownorm r = {
        .lr = group->lr,
        .beta = h[BETA],
        .offset = fmax(h[EPS] * pg__bias_correction(h[BETA], group->updates[i]), FLT_MIN)};
    const pg_target to = pg__target(group, i);
    pg__on(group, i);
    if (whole(h)) {
      if (!to.increment && !memory) PG_TRY(pg__alloc(ctx, bytes, "rownorm's increments", &memory));
      PG_TRY(increment_whole(group, i, &r, memory));
    } else {
      PG_LAUNCH(ctx, rownorm, &r, group->gradients[i], group->rows, group->columns,
                (float *)group->slots[i][BUFFER], &to);
    }
  }
fail:
  if (memory) pg__release(ctx, memory, bytes);
  return status;
}

static const char *const projections[] = {"none", "outer", "both", NULL};
static const char *const axes[] = {"rows", "columns", NULL};
static const pg_hyper hypers[] = {
    /* The paper's 3.2e-3 * 512 / d depends on the width d: no default. */
    [LR] = PG__FROM_0("lr", NAN, "peak learning rate: the length of every row's step"),
    [BETA] = PG__SHARE("beta", 0.95, "decay of the gradient's mean, per update"),
    [EPS] = PG__ABOVE_0("eps", 1e-8, "added to the norm of a bias-corrected row"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0),
    [PROJECT] = {"project",
                 PG_HYPER_CHOICE,
                 {PROJECT_NONE},
                 0,
                 2,
                 false,
                 false,
                 projections,
                 "subtract the mean row: of the increment (outer), of the momentum too (both)"},
    [DIAMETER_BUDGET] = PG__FROM_0("diameter_budget", 0,
                                   "D of every increment at the peak of the schedule; 0: as it "
                                   "comes. Costs an exact diameter per update"),
    [AXIS] = PG__CHOICE("axis", AXIS_ROWS, AXIS_COLUMNS, axes, "what is brought to one length"),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__rownorm_optimizer;
const pg_optimizer pg__rownorm_optimizer = {
    .name = "rownorm",
    .help = "RowNorm: B <- beta B + (1-beta) G, and every row s_i = -lr b_i / (||b_i|| + eps "
            "(1-beta^n)), so that no two rows move apart by more than 2 lr.",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_ROWS_COLUMN_SUM,
    .applies = true,
    .increment = rownorm_increment,
    .scratch = rownorm_scratch,
};
