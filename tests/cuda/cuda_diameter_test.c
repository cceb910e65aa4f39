/* The farthest and the nearest pair on the device: the same value, bit for bit, and the same pair
 * as on the CPU and as all pairs in fp64 give, on the clouds of tests/unit/clouds.h. */
#include "cuda_unit.h"

#define CLOUD_ROWS(n) ((n) / 4)
static void check(const char *name, const float *x, int64_t rows, int64_t d);
#include "tests/unit/clouds.h"

/* One search on both sides against its definition. */
static void check_pair(const char *name, const pg_farthest *got, const pg_farthest *cpu,
                       double want, const int64_t *pair) {
  CHECK(got->bad_row == -1, "%s: bad row %lld", name, (long long)got->bad_row);
  CHECK(got->value == want && got->value == cpu->value, "%s: %.17g, on the CPU %.17g, want %.17g",
        name, got->value, cpu->value, want);
  CHECK(got->first == pair[0] && got->second == pair[1], "%s: pair %lld,%lld, want %lld,%lld", name,
        (long long)got->first, (long long)got->second, (long long)pair[0], (long long)pair[1]);
  CHECK(fabs(got->radius - cpu->radius) <= 1e-12 * cpu->radius,
        "%s: radius %.17g, on the CPU %.17g", name, got->radius, cpu->radius);
}

static void check(const char *name, const float *x, int64_t rows, int64_t d) {
  pg_farthest got = {NAN, -7, -7, -7, NAN, NAN}, again = got, cpu = got;
  const cloud_extremes want = cloud_pairs(x, rows, d);
  int cancel = 0;
  twin t = twin_of(PG_F32, rows * d, x);
  ON(CPU, diameter, P(t), rows, d, &cancel, &cpu);
  ON(GPU, diameter, P(t), rows, d, &cancel, &got);
  check_pair(name, &got, &cpu, want.most, want.far);
  ON(GPU, diameter, P(t), rows, d, NULL, &again);
  CHECK(memcmp(&got, &again, sizeof got) == 0, "%s: two runs differ", name);
  ON(CPU, separation, P(t), rows, d, &cancel, &cpu);
  ON(GPU, separation, P(t), rows, d, &cancel, &got);
  check_pair(name, &got, &cpu, want.least, want.near);
  drop_twins();
}

TEST(no_pair) {
  float *x = calloc(300 * 3, sizeof *x);
  for (int rows = 0; rows <= 300; rows += rows < 3 ? 1 : 297) check("zeros", x, rows, 3);
  for (int i = 0; i < 900; i++) x[i] = (float)(i % 3) + 0.1f;
  check("equal rows", x, 300, 3);
  check("no columns", x, 5, 0);
  free(x);
}

TEST(refusals) {
  float x[] = {1, 2, 3, NAN, INFINITY, 6};
  for (int c = 0; c < 2; c++) {
    pg_farthest f = {0};
    twin t = twin_of(PG_F32, 6, x);
    ON(GPU, diameter, P(t), 3, 2, NULL, &f);
    CHECK(f.bad_row == 1 + c && f.first == -1, "bad row %d", (int)f.bad_row);
    x[3] = 0;
  }
  x[4] = 3e38f; /* finite: differences overflow fp32, not fp64 */
  x[0] = -3e38f;
  check("the largest numbers", x, 3, 2);
  pg_farthest f;
  int cancel = 1;
  twin t = twin_of(PG_F32, 6, x);
  CHECK(sides[GPU].k->diameter(sides[GPU].q, t.at[GPU], 3, 2, &cancel, &f) == -1 &&
            strstr(sides[GPU].k->message(sides[GPU].q), "cancel"),
        "%s", sides[GPU].k->message(sides[GPU].q));
  drop_twins();
}

/* Two values: 278,000 pairs tie, more than the device keeps candidates for. Rows 0 and 1 tie with
 * them, but lie nearer to the mean: the smallest pair is met in a later batch. */
TEST(more_ties_than_candidates_fit) {
  unit_seed(36);
  int64_t rows = 1100, d = 2;
  float *x = cloud_zeros(rows, d);
  for (int64_t i = 0; i < rows * d; i++) x[i] = i / d % 14 < 5 ? 1 : 2;
  x[0] = x[3] = 1, x[1] = x[2] = 2;
  check("two clusters", x, rows, d);
  free(x);
}

TEST(pruning) {
  unit_seed(37);
  const int64_t rows = 2000, d = 4;
  float *x = cloud_normal(rows, d);
  for (int64_t i = 0; i < rows * d; i++) x[i] *= i / d % 700 == 77 ? 10 : 0.01f;
  pg_farthest f;
  twin t = twin_of(PG_F32, rows * d, x);
  ON(GPU, diameter, P(t), rows, d, NULL, &f);
  CHECK(f.multiply_adds < 0.05 * (double)rows * (double)rows * (double)d / 2,
        "%g multiply-adds: nothing was left out", f.multiply_adds);
  drop_twins();
  free(x);
}

int main(void) {
  open_sides();
  RUN(no_pair);
  RUN(refusals);
  RUN(more_ties_than_candidates_fit);
  RUN(pruning);
  RUN_CLOUDS();
  return close_sides();
}
