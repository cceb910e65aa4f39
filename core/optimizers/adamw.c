/* AdamW (Loshchilov and Hutter 2019, with torch's placement of eps: after the bias correction and
 * outside the root). With n the parameter's own update, from 1:
 *   m <- b1 m + (1-b1) G;   v <- b2 v + (1-b2) G^2;
 *   S = -lr (m / (1-b1^n)) / (sqrt(v / (1-b2^n)) + eps).
 * Defaults are the paper's. */
#include "compose.h"

#include <math.h>

/* BETAS takes two values, so that the later positions are one further. */
enum { LR, BETA1, BETA2, EPS, WEIGHT_DECAY };
enum { FIRST, SECOND };

static int adamw_increment(const pg_increment_group *group, void *self) {
  (void)self;
  pg_context *ctx = group->context;
  const double *h = group->hypers;
  int status = 0;
  for (size_t i = 0; i < group->count; i++) {
    int64_t n = group->updates[i];
    pg_adamw a = {.lr = group->lr,
                  .beta1 = h[BETA1],
                  .beta2 = h[BETA2],
                  .eps = h[EPS],
                  .correction1 = 1 / pg__bias_correction(h[BETA1], n),
                  .correction2 = 1 / pg__bias_correction(h[BETA2], n)};
    const pg_target to = pg__target(group, i);
    pg__on(group, i);
    PG_LAUNCH(ctx, adamw, &a, group->gradients[i], group->rows * group->columns,
              (float *)group->slots[i][FIRST], (float *)group->slots[i][SECOND], &to);
  }
fail:
  return status;
}

static const pg_hyper hypers[] = {
    PG__LR(4e-3),
    PG__SHARES("betas", 0.9, 0.999,
               "decay of the gradient's mean and of its square's mean, per update"),
    /* Below the smallest fp32 number eps would be zero, and a zero gradient 0/0. */
    {"eps",
     PG_HYPER_NUMBER,
     {1e-10},
     1e-37,
     HUGE_VAL,
     false,
     true,
     NULL,
     "added to the root of the bias-corrected mean square"},
    PG__WEIGHT_DECAY(0.1),
};
static const pg_slot slots[] = {
    [FIRST] = {"m", PG_SLOT_MATRIX, PG_F32}, [SECOND] = {"v", PG_SLOT_MATRIX, PG_F32}};

extern const pg_optimizer pg__adamw_optimizer;
const pg_optimizer pg__adamw_optimizer = {
    .name = "adamw",
    .help = "AdamW: m <- b1 m + (1-b1) G, v <- b2 v + (1-b2) G^2, S = -lr (m/(1-b1^n)) / "
            "(sqrt(v/(1-b2^n)) + eps), n counting the parameter's updates (Loshchilov and Hutter "
            "2019).",
    .hypers = hypers,
    .hyper_count = PG_COUNT(hypers),
    .slots = slots,
    .slot_count = PG_COUNT(slots),
    .sharding = PG_SHARD_ELEMENTS,
    .applies = true,
    .increment = adamw_increment,
};
