/* K-FAC (Martens and Grosse 2015) on the side of the inputs: for a head [V, d] whose logits are
 * U h, with A^ the mean of h h^T over the positions of the optimizer batch,
 *   M <- beta M + (1-beta) G;   A <- b2 A + (1-b2) A^;   S = -lr M (A/(1-b2^n) + damping tau I)^-1,
 * tau the mean eigenvalue of A/(1-b2^n). The other factor would be V x V and is left out: that is
 * exact where the mean of diag(p) - p p^T is a multiple of the identity, and else a preconditioner
 * from the right alone. The run measures A^ for the head only (N d^2 multiply-adds for N
 * positions).
 *
 * The inverse is taken at the first and every `every`-th update after it, on the host (eigen.h):
 * d^3 operations. With more than PG_FACTOR_LIMIT columns there is none. */
#include "eigen.h"

enum { LR, BETA, BETA2, DAMPING, EVERY, WEIGHT_DECAY };
enum { MOMENTUM, INPUTS, INVERSE };

static int64_t kfac_scratch(const pg_increment_group *group) {
  return 2 * group->rows * group->columns * (int64_t)sizeof(float);
}

static int kfac_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const int64_t m = group->rows, d = group->columns, n = group->updates[i];
  float *x = memory, *s = memory + m * d, *inverse = group->slots[i][INVERSE];
  const pg_view a = pg__matrix_view(group->slots[i][INPUTS], d);
  const pg_view all = pg__matrix_view(inverse, d);
  int status;
  if (d > PG_FACTOR_LIMIT) {
    status =
        pg_fail(ctx, PG_EINVAL, "kfac for %lld columns: at most %d", (long long)d, PG_FACTOR_LIMIT);
    goto fail;
  }
  PG_TRY(pg__mean_direction(group, i, h[BETA], false, x));
  PG_LAUNCH(ctx, lerp, a, pg__input_view(group->moments[i], d), 1 - h[BETA2], d, d);
  if ((n - 1) % (int64_t)h[EVERY] == 0) {
    PG_TRY(pg__inverse_power(ctx, a.data, d, 0, h[DAMPING], 1, inverse));
    PG_LAUNCH(ctx, scalar, PG_MUL, all, pg__bias_correction(h[BETA2], n), false, d, d, all);
  }
  PG_TRY(pg__matmul(ctx, x, false, inverse, false, m, d, d, s));
  PG_TRY(pg__deliver(group, i, -group->lr, s));
fail:
  return status;
}

static int kfac_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, kfac_scratch(group), kfac_one);
}

static const pg_hyper hypers[] = {
    PG__LR(NAN),
    PG__SHARE("beta", 0.9, "decay of the gradient's mean, per update"),
    PG__SHARE("beta2", 0.95, "decay of the inputs' second moment, per update"),
    PG__ABOVE_0("damping", 1e-3, "added to its eigenvalues, over their mean"),
    PG__COUNT_FROM_1("every", 10, "updates from one inverse to the next"),
    PG__WEIGHT_DECAY(0),
};
static const pg_slot slots[] = {[MOMENTUM] = {"momentum", PG_SLOT_MATRIX, PG_F32},
                                [INPUTS] = {"inputs", PG_SLOT_COLUMNS_FACTOR, PG_F32},
                                [INVERSE] = {"inverse", PG_SLOT_COLUMNS_FACTOR, PG_F32}};

extern const pg_optimizer pg__kfac_optimizer;
const pg_optimizer pg__kfac_optimizer = {
    .name = "kfac",
    .help =
        "One-sided K-FAC for a head: M <- beta M + (1-beta) G, S = -lr M (A + damping tau I)^-1 "
        "with A the mean of h h^T over the head's inputs h and tau its mean eigenvalue; inverted "
        "on the host every few updates (after Martens and Grosse 2015).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .moments = true,
    .increment = kfac_increment,
    .scratch = kfac_scratch,
};
