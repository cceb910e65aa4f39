/* Shampoo (Gupta et al. 2018), with means of second moments:
 *   M <- b1 M + (1-b1) G;   L <- b2 L + (1-b2) G G^T;   R <- b2 R + (1-b2) G^T G;
 *   S = -lr L^-p M R^-p,  p = 1/4,
 * a power of A = Q diag(w) Q^T being Q diag(max(w, eps max w))^-p Q^T. A side of more than
 * PG_FACTOR_LIMIT rows has no factor, and one_sided leaves L out everywhere: then S = -lr M R^-1/2,
 * which for a head [V, d] works on the d x d side alone. With neither S = -lr M.
 *
 * Roots are taken at the first and every `every`-th update after it, on the host (eigen.h): n^3
 * operations for a side of n. Between them an update costs two products with each factor. */
#include "eigen.h"

enum { LR, BETA1, BETA2, EPS, EVERY, ONE_SIDED, WEIGHT_DECAY };
enum { MOMENTUM, LEFT, RIGHT, LEFT_ROOT, RIGHT_ROOT };

static int64_t shampoo_scratch(const pg_increment_group *group) {
  return 2 * group->rows * group->columns * (int64_t)sizeof(float);
}

static int shampoo_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const int64_t m = group->rows, n = group->columns;
  const bool one_sided = h[ONE_SIDED] != 0;
  const pg_sides factors = pg__sides(group, i, one_sided, LEFT, RIGHT);
  const pg_sides roots = pg__sides(group, i, one_sided, LEFT_ROOT, RIGHT_ROOT);
  const double power = roots.left && roots.right ? 0.25 : 0.5;
  float *x = memory, *y = memory + m * n;
  int status;
  PG_TRY(pg__mean_direction(group, i, h[BETA1], false, x));
  PG_TRY(pg__side_moments(group, i, factors, h[BETA2]));
  if ((group->updates[i] - 1) % (int64_t)h[EVERY] == 0) {
    if (roots.left) PG_TRY(pg__inverse_power(ctx, factors.left, m, h[EPS], 0, power, roots.left));
    if (roots.right)
      PG_TRY(pg__inverse_power(ctx, factors.right, n, h[EPS], 0, power, roots.right));
  }
  PG_TRY(pg__between_sides(group, roots, false, false, &x, &y));
  PG_TRY(pg__deliver(group, i, -group->lr, x));
fail:
  return status;
}

static int shampoo_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, shampoo_scratch(group), shampoo_one);
}

static const pg_hyper hypers[] = {
    PG__LR(1.5e-3),
    PG__SHARES("betas", 0.9, 0.95, "decay of the gradient's mean and of its second moments"),
    PG__SHARE("eps", 1e-6, "least eigenvalue of a factor, over its largest"),
    PG__COUNT_FROM_1("every", 5, "updates from one root of a factor to the next"),
    PG__SWITCH("one_sided", 0, "the columns' factor alone, to the power 1/2; for a head"),
    PG__WEIGHT_DECAY(0.2),
};
static const pg_slot slots[] = {[MOMENTUM] = {"momentum", PG_SLOT_MATRIX, PG_F32},
                                [LEFT] = {"left", PG_SLOT_ROWS_FACTOR, PG_F32},
                                [RIGHT] = {"right", PG_SLOT_COLUMNS_FACTOR, PG_F32},
                                [LEFT_ROOT] = {"left_root", PG_SLOT_ROWS_FACTOR, PG_F32},
                                [RIGHT_ROOT] = {"right_root", PG_SLOT_COLUMNS_FACTOR, PG_F32}};

extern const pg_optimizer pg__shampoo_optimizer;
const pg_optimizer pg__shampoo_optimizer = {
    .name = "shampoo",
    .help = "Shampoo: M <- b1 M + (1-b1) G, L and R the means of G G^T and G^T G, S = -lr L^-1/4 M "
            "R^-1/4, or with one side -lr M R^-1/2; roots on the host every few updates (Gupta et "
            "al. 2018).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .increment = shampoo_increment,
    .scratch = shampoo_scratch,
};
