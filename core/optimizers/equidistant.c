/* RowNorm whose rows are told apart by a code. Rows of tokens that were never seen have nearly
 * parallel gradients, which RowNorm moves as one. With M the mean of gradients, M <- beta M +
 * (1-beta) G, u_i the direction of m_i, and n_i a hashed unit vector of which n'_i is the unit part
 * orthogonal to u_i:
 *   s_i = -lr ||m_i|| / (||m_i|| + eps (1-beta^n)) (u_i + kappa_i n'_i) / sqrt(1 + kappa_i^2),
 * and the mean row is subtracted. It maximises sum <m_i, s_i> + kappa_i ||m_i|| <n'_i, s_i> (with
 * the minus) over rows of length lr, so that D(S) <= 2 lr; where gradients sum to zero over the
 * rows, the decrease is RowNorm's times 1 / sqrt(1 + kappa^2). kappa = 0 is RowNorm.
 *
 * adaptive = true: kappa_i = min(1, sqrt(share q / ||m_i||)), q the ||m||'s nearest-rank quantile
 * 0.9 over all rows: long rows keep their direction, short ones are spread. The norms travel to the
 * host for that, once per update.
 *
 * A code that stays would make the weights drift along it. So that of update n is (-1)^(n-1) times
 * the one of stream floor((n-1)/2): every code is taken back in the update after. n_i is the row's
 * signs of pg_signs_fn under `seed`, over sqrt(columns): bits of a counter, alike on every device,
 * for every part of the rows, and in a resumed run. Codes of two rows have a product of about
 * 1/sqrt(columns).
 *
 * n' = (n - <n,u> u) / w, w = sqrt(1 - <n,u>^2), where w counts as 1e-3 at least: of two or three
 * columns a code may be parallel to u, and then only a part of it is taken. */
#include "../comm.h"
#include "compose.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

enum { LR, BETA, EPS, WEIGHT_DECAY, KAPPA, ADAPTIVE, SHARE, SEED };
enum { BUFFER };

/* Codes and products exist for some rows at a time. */
#define CHUNK_ELEMENTS ((int64_t)1 << 22)

static int64_t chunk_rows(const pg_increment_group *group) {
  return pg__max(1, pg__min(group->rows, CHUNK_ELEMENTS / group->columns));
}

/* Increments, codes and products of a chunk, and per row: length, kappa, and two factors. */
static int64_t equidistant_scratch(const pg_increment_group *group) {
  const int64_t mean = group->rows == group->all_rows ? 0 : group->columns;
  return (group->rows * group->columns + 2 * chunk_rows(group) * group->columns + 4 * group->rows +
          group->all_rows + mean) *
         (int64_t)sizeof(float);
}

static int ascending(const void *a, const void *b) {
  const float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

/* The quantile of the lengths of all rows, of which `lengths` [rows] are this rank's; `all`
 * [all_rows] is scratch. */
static int quantile(const pg_increment_group *group, const float *lengths, float *all,
                    double *out) {
  pg_context *ctx = group->context;
  const int64_t n = group->all_rows;
  float *host = malloc((size_t)n * sizeof *host);
  int status;
  if (!host) {
    status = pg_fail(ctx, PG_ENOMEM, "out of memory for the lengths of %lld rows", (long long)n);
    goto fail;
  }
  PG_LAUNCH(ctx, zero, all, (size_t)n * sizeof *all);
  PG_LAUNCH(ctx, copy, all + group->first_row, lengths, (size_t)group->rows * sizeof *all);
  if (group->rows != n) {
    PG_TRY(pg_comm_sum(group->comm, ctx, all, n));
    PG_TRY(pg_comm_finish(group->comm, ctx));
  }
  PG_LAUNCH(ctx, download, host, all, (size_t)n * sizeof *host);
  qsort(host, (size_t)n, sizeof *host, ascending);
  *out = host[(9 * n + 9) / 10 - 1];
fail:
  free(host);
  return status;
}

/* kappa [rows], from the lengths. */
static int strengths(const pg_increment_group *group, const float *lengths, float *all,
                     float *kappa) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const pg_view k = pg__per_row_view(kappa);
  const pg_view length = pg__per_row_view((float *)(uintptr_t)lengths);
  double q = 0;
  int status;
  if (h[ADAPTIVE] == 0) {
    PG_LAUNCH(ctx, zero, kappa, (size_t)group->rows * sizeof *kappa);
    PG_LAUNCH(ctx, scalar, PG_ADD, k, h[KAPPA], false, group->rows, 1, k);
    return 0;
  }
  PG_TRY(quantile(group, lengths, all, &q));
  PG_LAUNCH(ctx, scalar, PG_MAX, length, FLT_MIN, false, group->rows, 1, k);
  PG_LAUNCH(ctx, scalar, PG_DIV, k, h[SHARE] * q, true, group->rows, 1, k);
  PG_LAUNCH(ctx, unary, PG_SQRT, k, group->rows, 1, k);
  PG_LAUNCH(ctx, scalar, PG_MIN, k, 1, false, group->rows, 1, k);
fail:
  return status;
}

/* Rows [first, first + rows) of x, directions u, become r (u + kappa n') / sqrt(1 + kappa^2), with
 * r in `shrink`. Through a = <e,u> for the signs e = sqrt(columns) n, v = max(columns - a^2, 1e-6
 * columns)^(1/2):  kappa n' = (kappa/v) e - (kappa/v) a u. */
static int spread(const pg_increment_group *group, size_t i, int64_t first, int64_t rows, float *x,
                  float *codes, float *product, float *kappa, float *a, float *shrink) {
  pg_context *ctx = group->context;
  const int64_t columns = group->columns, n = group->updates[i] - 1;
  const double d = (double)columns;
  const pg_view u = pg__matrix_view(x, columns), e = pg__matrix_view(codes, columns);
  const pg_view p = pg__matrix_view(product, columns);
  const pg_view k = pg__per_row_view(kappa), c = pg__per_row_view(a), r = pg__per_row_view(shrink);
  const pg_view t = pg__per_row_view(product); /* after p is read */
  int status;
  PG_LAUNCH(ctx, signs, (uint64_t)group->hypers[SEED], (uint64_t)(n / 2), group->first_row + first,
            rows, columns, codes);
  PG_LAUNCH(ctx, binary, PG_MUL, u, e, rows, columns, p);
  PG_LAUNCH(ctx, reduce, PG_SUM, p, rows, columns, 1, a);
  /* r <- r / sqrt(1 + kappa^2) */
  PG_LAUNCH(ctx, binary, PG_MUL, k, k, rows, 1, t);
  PG_LAUNCH(ctx, scalar, PG_ADD, t, 1, false, rows, 1, t);
  PG_LAUNCH(ctx, unary, PG_SQRT, t, rows, 1, t);
  PG_LAUNCH(ctx, binary, PG_DIV, r, t, rows, 1, r);
  /* k <- +-kappa / v */
  PG_LAUNCH(ctx, binary, PG_MUL, c, c, rows, 1, t);
  PG_LAUNCH(ctx, scalar, PG_SUB, t, d, true, rows, 1, t);
  PG_LAUNCH(ctx, scalar, PG_MAX, t, 1e-6 * d, false, rows, 1, t);
  PG_LAUNCH(ctx, unary, PG_SQRT, t, rows, 1, t);
  PG_LAUNCH(ctx, binary, PG_DIV, k, t, rows, 1, k);
  if (n % 2) PG_LAUNCH(ctx, unary, PG_NEG, k, rows, 1, k);
  /* x <- r ((1 - k a) u + k e) */
  PG_LAUNCH(ctx, binary, PG_MUL, c, k, rows, 1, c);
  PG_LAUNCH(ctx, scalar, PG_SUB, c, 1, true, rows, 1, c);
  PG_LAUNCH(ctx, binary, PG_MUL, c, r, rows, 1, c);
  PG_LAUNCH(ctx, binary, PG_MUL, k, r, rows, 1, k);
  PG_LAUNCH(ctx, binary, PG_MUL, u, c, rows, columns, u);
  PG_LAUNCH(ctx, binary, PG_MUL, e, k, rows, columns, e);
  PG_LAUNCH(ctx, binary, PG_ADD, u, e, rows, columns, u);
fail:
  return status;
}

static int equidistant_one(const pg_increment_group *group, size_t i, float *memory) {
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  const int64_t rows = group->rows, columns = group->columns, chunk = chunk_rows(group);
  const double offset = h[EPS] * pg__bias_correction(h[BETA], group->updates[i]);
  float *x = memory, *codes = x + rows * columns, *product = codes + chunk * columns;
  float *length = product + chunk * columns, *kappa = length + rows, *a = kappa + rows;
  float *shrink = a + rows, *all = shrink + rows;
  const pg_view l = pg__per_row_view(length), r = pg__per_row_view(shrink);
  int status;
  PG_TRY(pg__mean_direction(group, i, h[BETA], false, x));
  PG_LAUNCH(ctx, reduce, PG_NORM, pg__matrix_view(x, columns), rows, columns, 1, length);
  PG_TRY(strengths(group, length, all, kappa));
  PG_LAUNCH(ctx, scalar, PG_ADD, l, fmax(offset, FLT_MIN), false, rows, 1, r);
  PG_LAUNCH(ctx, binary, PG_DIV, l, r, rows, 1, r);
  PG_LAUNCH(ctx, scalar, PG_MAX, l, FLT_MIN, false, rows, 1, l);
  PG_LAUNCH(ctx, binary, PG_DIV, pg__matrix_view(x, columns), l, rows, columns,
            pg__matrix_view(x, columns));
  for (int64_t first = 0; first < rows; first += chunk)
    PG_TRY(spread(group, i, first, pg__min(chunk, rows - first), x + first * columns, codes,
                  product, kappa + first, a + first, shrink + first));
  PG_TRY(pg__center_rows(group, x, x));
  PG_TRY(pg__deliver(group, i, -group->lr, x));
fail:
  return status;
}

static int equidistant_increment(const pg_increment_group *group, void *self) {
  (void)self;
  /* A part's mean row is pg__center_rows' own. */
  const int64_t mean = group->rows == group->all_rows ? 0 : group->columns;
  return pg__each(group, equidistant_scratch(group) - mean * (int64_t)sizeof(float),
                  equidistant_one);
}

static const pg_hyper hypers[] = {
    [LR] = PG__LR(NAN),
    [BETA] = PG__SHARE("beta", 0.95, "decay of the gradient's mean, per update"),
    [EPS] = PG__ABOVE_0("eps", 1e-8, "added to the norm of a bias-corrected row"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0),
    [KAPPA] = PG__FROM_0("kappa", 0.3, "weight of a row's code against its direction"),
    [ADAPTIVE] = PG__SWITCH("adaptive", 0, "kappa_i = min(1, sqrt(share q / ||m_i||)) instead"),
    [SHARE] = PG__FROM_0("share", 0.1, "of the 0.9-quantile q of the rows' lengths; adaptive"),
    [SEED] =
        {"seed", PG_HYPER_INTEGER, {0}, 0, 9007199254740992.0, false, false, NULL, "of the codes"},
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__equidistant_optimizer;
const pg_optimizer pg__equidistant_optimizer = {
    .name = "equidistant",
    .help = "RowNorm with hashed codes that keep rows apart: M <- beta M + (1-beta) G, s_i = -lr "
            "(u_i + kappa n'_i) / sqrt(1 + kappa^2) less the mean row, with u_i the direction of "
            "m_i and n'_i a code orthogonal to it, of another sign in every update and another "
            "code in every second; at most 2 lr between two rows.",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_ROWS_COLUMN_SUM,
    .applies = true,
    .increment = equidistant_increment,
    .scratch = equidistant_scratch,
};
