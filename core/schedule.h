/* Learning-rate schedules (SPEC §3) as pure functions of the update index t = 0 … total-1. */
#ifndef PG_SCHEDULE_H
#define PG_SCHEDULE_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* W = trunc(fraction * total) in fp64, without any epsilon. PG_EINVAL unless 0 <= W < total. */
int pg_schedule_warmup(pg_context *ctx, double fraction, int64_t total, int64_t *warmup);
/* t/W while t < W, then floor + (1-floor) (1 + cos(pi min(1, (t-W)/(total-W-1)))) / 2; `floor`
 * when total - W == 1. */
double pg_schedule_warmup_cosine(int64_t t, int64_t total, int64_t warmup, double floor);

#ifdef __cplusplus
}
#endif
#endif
