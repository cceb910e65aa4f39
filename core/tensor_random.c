/* Random tensors: counter-based, so that element i is a pure function of (seed, stream, first + i)
 * on every machine and device. Made on the host. */
#include "internal.h"
#include "random.h"
#include "tensor_ops.h"

#include <math.h>
#include <stdlib.h>

/* Number i: word i % 4 of block i / 4, 24 bits of it, so that it is an fp32 number below 1. */
static void uniforms(uint64_t seed, uint64_t stream, uint64_t first, int64_t n, float *out) {
  uint32_t words[4];
  for (int64_t i = 0; i < n; i++) {
    const uint64_t at = first + (uint64_t)i;
    if (i == 0 || at % 4 == 0) pg_philox(seed, stream, at / 4, words);
    out[i] = (float)(words[at % 4] >> 8) * 0x1p-24f;
  }
}

int pg_tensor_random(pg_tensor *t, bool normal, uint64_t seed, uint64_t stream, uint64_t first,
                     double a, double b) {
  pg_context *ctx = t->context;
  const int64_t n = pg_tensor_elements(t);
  float *values = NULL;
  int status;

  PG_TRY(pg__tensor_check_f32(normal ? "normal_" : "uniform_", t));
  if (!normal && !(a < b)) {
    status = pg_fail(ctx, PG_EINVAL, "uniform_: from %g to %g; the first must be less", a, b);
    goto fail;
  }
  if (normal && !(b >= 0)) {
    status = pg_fail(ctx, PG_EINVAL, "normal_: a deviation of %g; it must be 0 or more", b);
    goto fail;
  }
  if (!(values = malloc((size_t)n * sizeof *values + 1))) {
    status = pg_fail(ctx, PG_ENOMEM, "%lld random numbers do not fit in host memory", (long long)n);
    goto fail;
  }
  if (normal) {
    pg_normals(seed, stream, first, (size_t)n, values);
    for (int64_t i = 0; i < n; i++) values[i] = (float)(a + b * values[i]);
  } else {
    uniforms(seed, stream, first, n, values);
    const float most = nextafterf((float)b, -INFINITY); /* rounding may reach b */
    for (int64_t i = 0; i < n; i++) values[i] = fminf((float)(a + (b - a) * values[i]), most);
  }
  PG_TRY(pg_tensor_write(t, values));
fail:
  free(values);
  return status;
}
