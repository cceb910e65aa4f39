/* The kernels' exponential against libm's in fp64, with and without fused multiply-adds. */
#include "kernels/cpu/exp.h"
#include "unit.h"

typedef float exp_function(float x);
static float exp_as_compiled(float x) {
  return pg_expf(x);
}

/* The same text again, with every multiply-add fused. */
#undef PG_CPU_EXP_H
#undef PG_FMA
#undef PG_EXP_LOW
#undef PG_EXP_HIGH
#define PG_FMA(a, b, c) fmaf(a, b, c)
#define pg_expf exp_fused
#include "kernels/cpu/exp.h"
#undef pg_expf

/* Largest error in units in the last place over every 1021st number of the sign's range. */
static double worst_ulps(exp_function *f, float limit) {
  double worst = 0;
  uint32_t sign = limit < 0 ? 0x80000000u : 0, last;
  float magnitude = fabsf(limit);
  memcpy(&last, &magnitude, 4);
  for (uint32_t bits = 0; bits <= last; bits += 1021) {
    uint32_t pattern = bits | sign;
    float x;
    memcpy(&x, &pattern, 4);
    double want = exp((double)x);
    int exponent;
    frexp(want, &exponent);
    double error = fabs((double)f(x) - want) / ldexp(1.0, exponent - 24);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

static void check(exp_function *f, const char *name) {
  double below = worst_ulps(f, PG_EXP_LOW), above = worst_ulps(f, PG_EXP_HIGH);
  printf("# %s: %.3f ulp below 0, %.3f above\n", name, below, above);
  /* 1/2 for the last rounding, 1/2 for r + 1's operand, 0.13 for the polynomial. */
  CHECK(below <= 1.13, "%g ulp", below);
  CHECK(above <= 1.13, "%g ulp", above);
  CHECK(f(0.0f) == 1.0f, "exp(0) = %g", (double)f(0.0f));
  CHECK(f(-87.34f) == 0 && f(-1e30f) == 0 && f(-INFINITY) == 0, "exp of large negatives");
  CHECK(f(1e30f) == f(PG_EXP_HIGH) && isfinite(f(INFINITY)), "large arguments stay at the limit");
  CHECK(isnan(f(NAN)), "NaN is lost");
}

TEST(exp_as_compiled) {
  check(exp_as_compiled, "as compiled");
}
TEST(exp_fused) {
  check(exp_fused, "fused");
}

int main(void) {
  RUN(exp_as_compiled);
  RUN(exp_fused);
  return unit_report();
}
