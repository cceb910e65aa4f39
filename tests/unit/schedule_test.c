/* The schedule: SPEC section 3, the values of REFERENCE, and the edges users met (CASES 14). */
#include "core/schedule.h"
#include "unit.h"

/* cos and the products around it are good to about 4 units of the last place of 1. */
#define TOLERANCE 1e-15

TEST(reference_values) {
  static const struct {
    int64_t total, warmup, t;
    double floor, want;
  } cases[] = {
      {7083, 708, 0, .1, 0},
      {7083, 708, 1, .1, 0.0014124293785310734},
      {7083, 708, 354, .1, .5},
      {7083, 708, 707, .1, 0.998587570621469},
      {7083, 708, 708, .1, 1},
      {7083, 708, 709, .1, 0.9999999453414462},
      {7083, 708, 3541, .1, 0.628117410419696},
      {7083, 708, 3895, .1, .55},
      {7083, 708, 7081, .1, 0.10000005465855379},
      {7083, 708, 7082, .1, .1},
      {14464, 1446, 7232, .1, 0.6280703753021374},
      {14464, 1446, 14462, .1, 0.10000001310570693},
      {24406, 2440, 12203, .1, 0.628092380460081},
      {24406, 2440, 24404, .1, 0.10000000460277607},
      {9, 4, 0, 0, 0},
      {9, 4, 1, 0, .25},
      {9, 4, 2, 0, .5},
      {9, 4, 3, 0, .75},
      {9, 4, 4, 0, 1},
      {9, 4, 5, 0, .8535533905932737},
      {9, 4, 6, 0, .5},
      {9, 4, 7, 0, .14644660940672627},
      {9, 4, 8, 0, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const double got =
        pg_schedule_warmup_cosine(cases[i].t, cases[i].total, cases[i].warmup, cases[i].floor);
    CHECK(fabs(got - cases[i].want) <= TOLERANCE, "T %lld, t %lld: %.17g, want %.17g",
          (long long)cases[i].total, (long long)cases[i].t, got, cases[i].want);
  }
  /* These two are exact: the first update does nothing, the peak is the peak. */
  CHECK(pg_schedule_warmup_cosine(0, 7083, 708, .1) == 0);
  CHECK(pg_schedule_warmup_cosine(708, 7083, 708, .1) == 1);
}

TEST(warmup_is_truncated_without_an_epsilon) {
  static const struct {
    double fraction;
    int64_t total, want;
  } cases[] = {{.1, 7083, 708}, {.1, 14464, 1446}, {.1, 24406, 2440}, {.5, 9, 4},
               {.29, 100, 28},  {0, 10, 0},        {0, 1, 0},         {.999, 1000, 999},
               {.9999, 10, 9},  {-0.0, 5, 0}};
  pg_context *ctx;
  CHECK(pg_context_new(NULL, &ctx, NULL, 0) == 0);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    int64_t got = -1;
    CHECK(pg_schedule_warmup(ctx, cases[i].fraction, cases[i].total, &got) == 0);
    CHECK(got == cases[i].want, "%g of %lld: %lld", cases[i].fraction, (long long)cases[i].total,
          (long long)got);
  }
  const double refused[] = {1, 1.5, -.1, NAN, INFINITY, -INFINITY, 1e300};
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
    int64_t got = -1;
    CHECK(pg_schedule_warmup(ctx, refused[i], 100, &got) == PG_EINVAL, "fraction %g", refused[i]);
    CHECK(got == -1, "a refused warmup was written");
  }
  CHECK(strstr(pg_context_message(ctx), "100 updates"), "%s", pg_context_message(ctx));
  int64_t got;
  CHECK(pg_schedule_warmup(ctx, 0, 0, &got) == PG_EINVAL);
  CHECK(pg_schedule_warmup(ctx, 0, -5, &got) == PG_EINVAL);
  pg_context_free(ctx);
}

TEST(edges_are_defined_or_refused) {
  const int64_t totals[] = {1, 2, 10};
  pg_context *ctx;
  CHECK(pg_context_new(NULL, &ctx, NULL, 0) == 0);
  for (size_t i = 0; i < 3; i++) {
    const int64_t total = totals[i], warmups[] = {0, 1, total - 1, total, total + 1};
    for (size_t j = 0; j < 5; j++) {
      int64_t w = -1;
      /* The exact quotient times total may fall just below the integer: half an update is added. */
      const double fraction = ((double)warmups[j] + .5) / (double)total;
      const int status = pg_schedule_warmup(ctx, fraction, total, &w);
      CHECK(status == (warmups[j] < total ? 0 : PG_EINVAL), "warmup %lld of %lld",
            (long long)warmups[j], (long long)total);
      if (status < 0) continue;
      CHECK(w == warmups[j]);
      double last = -1;
      for (int64_t t = 0; t < total + 2; t++) { /* also past the end: a run extended by its host */
        const double s = pg_schedule_warmup_cosine(t, total, w, .1);
        CHECK(isfinite(s) && s >= 0 && s <= 1, "T %lld, W %lld, t %lld: %g", (long long)total,
              (long long)w, (long long)t, s);
        CHECK(t >= w || s > last, "the warmup rises");
        CHECK(t <= w || s <= last, "the decay falls");
        last = s;
      }
      CHECK(fabs(last - .1) <= TOLERANCE, "it ends at the floor: %.17g", last);
      CHECK(w == 0 || pg_schedule_warmup_cosine(0, total, w, .1) == 0);
      if (total - w == 1) CHECK(pg_schedule_warmup_cosine(w, total, w, .1) == .1);
    }
  }
  pg_context_free(ctx);
}

int main(void) {
  RUN(reference_values);
  RUN(warmup_is_truncated_without_an_epsilon);
  RUN(edges_are_defined_or_refused);
  return unit_report();
}
