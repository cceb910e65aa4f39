/* Linear warmup and cosine decay, SPEC section 3. */
#include "schedule.h"

#include <math.h>

#define PI 3.14159265358979323846

int pg_schedule_warmup(pg_context *ctx, double fraction, int64_t total, int64_t *warmup) {
  if (total < 1)
    return pg_fail(ctx, PG_EINVAL, "a schedule over %lld updates: at least 1 is needed",
                   (long long)total);
  const double w = trunc(fraction * (double)total);
  if (!(fraction >= 0) || !(w < (double)total))
    return pg_fail(ctx, PG_EINVAL,
                   "warmup fraction %g of %lld updates is %g updates: it must be 0 to %lld",
                   fraction, (long long)total, w, (long long)(total - 1));
  *warmup = (int64_t)w;
  return 0;
}

double pg_schedule_warmup_cosine(int64_t t, int64_t total, int64_t warmup, double floor) {
  if (t < warmup) return (double)t / (double)warmup;
  if (total - warmup <= 1) return floor;
  const double part = (double)(t - warmup) / (double)(total - warmup - 1);
  return floor + (1 - floor) * 0.5 * (1 + cos(PI * fmin(1, part)));
}
