/* SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's factors. With L and R the means of
 * G G^T and G^T G under b2, and Q_L, Q_R their eigenvectors:
 *   G' = Q_L^T G Q_R;   M <- b1 M + (1-b1) G';   V <- b2 V + (1-b2) G'^2;
 *   S = -lr sqrt(1-b2^t)/(1-b1^t) Q_L M/(sqrt(V) + eps) Q_R^T,
 * with this update's bases; then L and R take G in, and every `every`-th update the bases take one
 * step of power iteration, columns by falling estimate of the eigenvalue. M lies in the rotated
 * basis and goes along when that changes; V is exchanged in the same order.
 *
 * The first update only makes L, R and the bases: S = 0, and t = n - 1. A side of more than
 * PG_FACTOR_LIMIT rows is not rotated, nor, with one_sided, are rows: for a head [V, d] the d x d
 * side alone. The authors decay weights after their step; here decay comes before it, as for all.
 *
 * Bases are made on the host (eigen.h): n^3 operations for a side of n. */
#include "eigen.h"

enum { LR, BETA1, BETA2, EPS, EVERY, ONE_SIDED, WEIGHT_DECAY };
enum { MEAN, SECOND, LEFT, RIGHT, LEFT_BASIS, RIGHT_BASIS };

static pg_sides moments_of(const pg_increment_group *group, size_t i) {
  return pg__sides(group, i, group->hypers[ONE_SIDED] != 0, LEFT, RIGHT);
}
static pg_sides bases_of(const pg_increment_group *group, size_t i) {
  return pg__sides(group, i, group->hypers[ONE_SIDED] != 0, LEFT_BASIS, RIGHT_BASIS);
}

/* Two matrices, and a permutation of the larger factor. */
static int64_t soap_scratch(const pg_increment_group *group) {
  const int64_t m = group->rows, n = group->columns;
  const int64_t left = m <= PG_FACTOR_LIMIT && group->hypers[ONE_SIDED] == 0 ? m : 0;
  const int64_t side = pg__max(left, n <= PG_FACTOR_LIMIT ? n : 0);
  return (2 * m * n + side * side) * (int64_t)sizeof(float);
}

/* *x <- Q_L^T *x Q_R, or Q_L *x Q_R^T when `back`; *x and *y may change places. */
static int rotate(const pg_increment_group *group, size_t i, bool back, float **x, float **y) {
  return pg__between_sides(group, bases_of(group, i), !back, back, x, y);
}

/* New bases; M through the old ones and the new, V by the order of the columns. */
static int turn(const pg_increment_group *group, size_t i, float *x, float *y, float *order) {
  pg_context *ctx = group->context;
  const int64_t m = group->rows, n = group->columns;
  const size_t bytes = (size_t)(m * n) * sizeof(float);
  const pg_sides moments = moments_of(group, i), bases = bases_of(group, i);
  void *const *slots = group->slots[i];
  int status;
  PG_LAUNCH(ctx, copy, x, slots[MEAN], bytes);
  PG_TRY(rotate(group, i, true, &x, &y));
  if (bases.left) {
    PG_TRY(pg__power_step(ctx, moments.left, m, bases.left, order));
    PG_TRY(pg__matmul(ctx, order, true, slots[SECOND], false, m, m, n, y));
    PG_LAUNCH(ctx, copy, slots[SECOND], y, bytes);
  }
  if (bases.right) {
    PG_TRY(pg__power_step(ctx, moments.right, n, bases.right, order));
    PG_TRY(pg__matmul(ctx, slots[SECOND], false, order, false, m, n, n, y));
    PG_LAUNCH(ctx, copy, slots[SECOND], y, bytes);
  }
  PG_TRY(rotate(group, i, false, &x, &y));
  PG_LAUNCH(ctx, copy, slots[MEAN], x, bytes);
fail:
  return status;
}

/* x <- M/(sqrt(V) + eps) after both have taken in the rotated gradient x; y is scratch. */
static int adam(const pg_increment_group *group, size_t i, float *x, float *y) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const int64_t n = group->rows * group->columns;
  const pg_view g = pg__matrix_view(x, n), t = pg__matrix_view(y, n);
  const pg_view m = pg__matrix_view(group->slots[i][MEAN], n);
  const pg_view v = pg__matrix_view(group->slots[i][SECOND], n);
  int status;
  PG_LAUNCH(ctx, lerp, m, g, 1 - h[BETA1], 1, n);
  PG_LAUNCH(ctx, unary, PG_SQUARE, g, 1, n, t);
  PG_LAUNCH(ctx, lerp, v, t, 1 - h[BETA2], 1, n);
  PG_LAUNCH(ctx, unary, PG_SQRT, v, 1, n, t);
  PG_LAUNCH(ctx, scalar, PG_ADD, t, h[EPS], false, 1, n, t);
  PG_LAUNCH(ctx, binary, PG_DIV, m, t, 1, n, g);
fail:
  return status;
}

static int soap_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const int64_t m = group->rows, n = group->columns, t = group->updates[i] - 1;
  const size_t bytes = (size_t)(m * n) * sizeof(float);
  const pg_sides moments = moments_of(group, i), bases = bases_of(group, i);
  float *x = memory, *y = x + m * n, *order = y + m * n;
  double factor = 0;
  int status;
  if (t == 0) {
    PG_TRY(pg__side_moments(group, i, moments, h[BETA2]));
    if (bases.left) PG_TRY(pg__eigenvectors(ctx, moments.left, m, bases.left));
    if (bases.right) PG_TRY(pg__eigenvectors(ctx, moments.right, n, bases.right));
    PG_LAUNCH(ctx, zero, x, bytes);
  } else {
    factor = sqrt(pg__bias_correction(h[BETA2], t)) / pg__bias_correction(h[BETA1], t);
    PG_LAUNCH(ctx, copy, x, group->gradients[i], bytes);
    PG_TRY(rotate(group, i, false, &x, &y));
    PG_TRY(adam(group, i, x, y));
    PG_TRY(rotate(group, i, true, &x, &y));
  }
  PG_TRY(pg__deliver(group, i, -group->lr * factor, x));
  if (t == 0) return 0;
  PG_TRY(pg__side_moments(group, i, moments, h[BETA2]));
  if (t % (int64_t)h[EVERY] == 0) PG_TRY(turn(group, i, x, y, order));
fail:
  return status;
}

static int soap_increment(const pg_increment_group *group, void *self) {
  (void)self;
  return pg__each(group, soap_scratch(group), soap_one);
}

static const pg_hyper hypers[] = {
    PG__LR(3e-3),
    PG__SHARES("betas", 0.95, 0.95, "decay of the mean, and of all second moments, per update"),
    PG__ABOVE_0("eps", 1e-8, "added to the root, before the correction"),
    PG__COUNT_FROM_1("every", 10, "updates from one basis to the next"),
    PG__SWITCH("one_sided", 0, "rotate the columns' side alone; for a head"),
    PG__WEIGHT_DECAY(0.01),
};
static const pg_slot slots[] = {[MEAN] = {"m", PG_SLOT_MATRIX, PG_F32},
                                [SECOND] = {"v", PG_SLOT_MATRIX, PG_F32},
                                [LEFT] = {"left", PG_SLOT_ROWS_FACTOR, PG_F32},
                                [RIGHT] = {"right", PG_SLOT_COLUMNS_FACTOR, PG_F32},
                                [LEFT_BASIS] = {"left_basis", PG_SLOT_ROWS_FACTOR, PG_F32},
                                [RIGHT_BASIS] = {"right_basis", PG_SLOT_COLUMNS_FACTOR, PG_F32}};

extern const pg_optimizer pg__soap_optimizer;
const pg_optimizer pg__soap_optimizer = {
    .name = "soap",
    .help =
        "SOAP: Adam on Q_L^T G Q_R, turned back, with Q_L and Q_R the eigenvectors of the means "
        "of G G^T and G^T G, renewed on the host every few updates; the first update only makes "
        "these (Vyas et al. 2024).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .increment = soap_increment,
    .scratch = soap_scratch,
};
