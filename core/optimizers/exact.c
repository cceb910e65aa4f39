/* The exact steepest descent under the row diameter (SPEC section 5), for small vocabularies: with
 * M <- beta M + (1-beta) G and Phi the oracle's potential of M (core/oracle.h), D(Phi) <= 1 and
 * <M, Phi> >= (1 - gap) T(M),
 *   S = -2 lr Phi,   D(S) <= 2 lr,
 * so that lr means what RowNorm's does. No S of that diameter decreases <M, S> by more than 1/(1 -
 * gap) of this one; RowNorm's and greedy_radial's directions are among the oracle's, so that at the
 * same diameter neither decreases it by more, but for 2^-21 that keep rounding within the diameter.
 * Phi has no mean row and does not depend on the size of M: nothing to correct the mean for.
 *
 * The oracle computes on the host, in fp64; a round is about rows^3 + 3 rows^2 columns
 * multiply-adds. It ends by gap and number of rounds, never by time: the same gradients give the
 * same steps on a slow machine, and after a resume. */
#include "../oracle.h"
#include "compose.h"

#include <math.h>

enum { LR, BETA, WEIGHT_DECAY, GAP, ITERATIONS };
enum { BUFFER };

/* x, what the oracle measures a diameter of, and what that takes. */
static int64_t exact_scratch(const pg_increment_group *group) {
  return 2 * group->rows * group->columns * (int64_t)sizeof(float) + pg__budget_bytes(group);
}

/* An update is made as a whole: what cancels it meanwhile waits for its end. */
static int solve(pg_context *ctx, const pg_tensor *x, const pg_oracle_options *options,
                 pg_oracle *out) {
  bool cancelled = false;
  int status;
  while ((status = pg_oracle_solve(x, options, out)) == PG_ECANCELED) {
    pg_context_resume(ctx);
    cancelled = true;
  }
  if (cancelled) pg_context_cancel(ctx);
  return status;
}

static int exact_one(const pg_increment_group *group, size_t i) {
  const double *h = group->hypers;
  const pg_oracle_options options = {
      .gap = h[GAP], .seconds = HUGE_VAL, .iterations = (int64_t)h[ITERATIONS]};
  pg_oracle o = {0};
  pg_tensor *x = NULL;
  int status;
  PG_TRY(pg_tensor_new(group->context, PG_F32, 2, (int64_t[]){group->rows, group->columns}, &x));
  PG_TRY(pg__mean_direction(group, i, h[BETA], false, x->data));
  if (group->lr > 0) {
    PG_TRY(solve(group->context, x, &options, &o));
    PG_TRY(pg_tensor_write(x, o.potential));
  }
  PG_TRY(pg__deliver(group, i, -2 * group->lr, x->data));
fail:
  pg_tensor_free(x);
  pg_oracle_free(&o);
  return status;
}

static int exact_increment(const pg_increment_group *group, void *self) {
  (void)self;
  int status = 0;
  for (size_t i = 0; i < group->count; i++) {
    pg__on(group, i);
    PG_TRY(exact_one(group, i));
  }
fail:
  return status;
}

static const pg_hyper hypers[] = {
    [LR] = PG__LR(NAN),
    [BETA] = PG__SHARE("beta", 0.95, "decay of the gradient's mean, per update"),
    [WEIGHT_DECAY] = PG__WEIGHT_DECAY(0),
    [GAP] = {"gap",
             PG_HYPER_NUMBER,
             {0.01},
             0,
             1,
             true,
             true,
             NULL,
             "ends where the decrease is within this share of the optimum"},
    [ITERATIONS] = PG__COUNT_FROM_1("iterations", 200, "ends after so many rounds in any case"),
};
static const pg_slot slots[] = {[BUFFER] = {"momentum", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__exact_optimizer;
const pg_optimizer pg__exact_optimizer = {
    .name = "exact",
    .help = "The exact steepest descent under the row diameter: M <- beta M + (1-beta) G, S = -2 "
            "lr Phi, Phi of diameter 1 with <M, Phi> within gap of the largest. At most 2 lr "
            "between two rows, 1024 rows at most; a round costs rows^3 on the host.",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_WHOLE,
    .applies = true,
    .most_rows = 1024,
    .increment = exact_increment,
    .scratch = exact_scratch,
};
