/* RowNorm (the paper's head optimizer): every row of the momentum at the same length. With n the
 * parameter's own update, from 1, and c = 1 - beta^n:
 *   B <- beta B + (1-beta) G;   S_i = -lr b_i / (||b_i|| + eps c),
 * which is normalising the bias-corrected B/c with eps, without a copy of it. D(S) <= 2 lr.
 * project = "both" takes P B for B and P S for S, where P subtracts the mean row; "outer" only the
 * latter. The paper's runs project nothing: gradients of a softmax sum to zero over the rows, and a
 * common row of S changes no probability.
 *
 * The operations and their order are those of the same optimizer written over tensors,
 *   m:lerp_(g, 1 - beta);  m:div_rows(m:row_norms() + eps * c):mul(-lr),
 * so that both give the same bits. */
#include "compose.h"

#include <float.h>
#include <math.h>

enum { LR, BETA, EPS, WEIGHT_DECAY, PROJECT };
enum { PROJECT_NONE, PROJECT_OUTER, PROJECT_BOTH };
enum { BUFFER };

/* The mean row of all rows has to be known before any row can be applied, so that a projected
 * increment must exist: in `memory` [rows, columns] when it is not kept. */
static int increment_projected(const pg_increment_group *group, size_t i, const pg_rownorm *h,
                               float *memory) {
  pg_context *ctx = group->context;
  const int64_t rows = group->rows, columns = group->columns;
  float *b = group->slots[i][BUFFER];
  pg_target to = pg__target(group, i);
  float *s = to.increment ? to.increment : memory;
  const pg_target into = {.increment = s};
  int status = 0;

  if ((int)group->hypers[PROJECT] == PROJECT_BOTH) {
    PG_LAUNCH(ctx, lerp, pg__matrix_view(b, columns), pg__input_view(group->gradients[i], columns),
              1 - h->beta, rows, columns);
    PG_TRY(pg__center_rows(group, b, s));
    PG_LAUNCH(ctx, rownorm, h, NULL, rows, columns, s, &into);
  } else {
    PG_LAUNCH(ctx, rownorm, h, group->gradients[i], rows, columns, b, &into);
  }
  PG_TRY(pg__center_rows(group, s, s));
  to.increment = NULL;
  if (to.value) PG_LAUNCH(ctx, apply, 1, PG_F32, s, rows * columns, 1, &to);
fail:
  return status;
}

/* A projected increment that is not kept, and a mean row where ranks share the rows. */
static int64_t rownorm_scratch(const pg_increment_group *group) {
  const int64_t all = group->increments[0] ? 0 : group->rows * group->columns;
  const int64_t mean = group->rows == group->all_rows ? 0 : group->columns;
  if ((int)group->hypers[PROJECT] == PROJECT_NONE) return 0;
  return (all + mean) * (int64_t)sizeof(float);
}

static int rownorm_increment(const pg_increment_group *group, void *self) {
  (void)self;
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const bool project = (int)h[PROJECT] != PROJECT_NONE;
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
    if (project) {
      if (!to.increment && !memory)
        PG_TRY(pg__alloc(ctx, bytes, "rownorm's projected increments", &memory));
      PG_TRY(increment_projected(group, i, &r, memory));
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
