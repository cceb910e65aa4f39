/* The oracle against values known in closed form, and its certificates against the checker, which
 * must accept what the solver hands out and refuse what was tampered with. */
#include "core/oracle.h"
#include "core/internal.h"
#include "core/random.h"
#include "unit.h"

static pg_context *ctx;

static pg_tensor *upload(const float *x, int64_t rows, int64_t columns) {
  pg_tensor *t = NULL;
  CHECK(pg_tensor_new(ctx, PG_F32, 2, (int64_t[]){rows, columns}, &t) == 0, "%s",
        pg_context_message(ctx));
  CHECK(pg_tensor_write(t, x) == 0, "write");
  return t;
}

/* The interval for x; the checker has to prove both ends. */
static void solved(const char *what, const float *x, int64_t rows, int64_t columns, double gap,
                   pg_oracle *o) {
  pg_tensor *t = upload(x, rows, columns);
  pg_oracle_verdict v;
  CHECK(pg_oracle_solve(t, &(pg_oracle_options){.gap = gap}, o) == 0, "%s: %s", what,
        pg_context_message(ctx));
  CHECK(o->lower <= o->upper && o->upper - o->lower <= gap * o->upper, "%s: [%.12g, %.12g]", what,
        o->lower, o->upper);
  CHECK(pg_oracle_check(t, o, &v) == 0, "%s: %s", what, pg_context_message(ctx));
  CHECK(v.lower_holds && v.upper_holds, "%s: %s", what, v.problem);
  CHECK(v.diameter <= 1, "%s: diameter %.17g", what, v.diameter);
  pg_tensor_free(t);
}

/* `want` is T of the values before they were rounded to fp32: T moves by no more than sum ||dg_i||,
 * 2^-24 of sum ||g_i|| <= 2 T. */
static void known(const char *what, const float *x, int64_t rows, int64_t columns, double want) {
  pg_oracle o;
  solved(what, x, rows, columns, 1e-6, &o);
  CHECK(o.lower <= want * (1 + 2e-7) && o.upper >= want * (1 - 2e-7),
        "%s: %.12g is not in [%.12g, %.12g]", what, want, o.lower, o.upper);
  pg_oracle_free(&o);
}

TEST(known_values) {
  known("two rows", (float[]){3, 4, -3, -4}, 2, 2, 5);
  known("one column", (float[]){2, -1, -1}, 3, 1, 2);
  known("Fermat's triangle", (float[]){3, 0, 0, 4, -3, -4}, 3, 2, 6.7664325675);
  known("an angle of 120 degrees and more", (float[]){1, 0, .8f, .6f, -1.8f, -.6f}, 3, 2, 2);
  known("a cross", (float[]){1, 0, -1, 0, 0, 1, 0, -1}, 4, 2, 2);
  known("with rows of zeros", (float[]){0, 0, 3, 4, 0, 0, -3, -4, 0, 0}, 5, 2, 5);
  known("far from centred", (float[]){1003, 1004, 997, 996}, 2, 2, 5);
  known("tiny", (float[]){3e-36f, 4e-36f, -3e-36f, -4e-36f}, 2, 2, 5e-36);
  known("huge", (float[]){3e36f, 4e36f, -3e36f, -4e36f}, 2, 2, 5e36);
}

/* On a line, T is what the positive rows add up to. Alike rows count as one of their sum; rank and
 * columns beyond it change nothing but lengths. */
TEST(degenerate_inputs) {
  known("one column of five", (float[]){5, -3, 1, -3, 0}, 5, 1, 6);
  known("one column of two", (float[]){-7, 7}, 2, 1, 7);
  known("rows on a line", (float[]){2, 4, 4, -1, -2, -2, -1, -2, -2, 3, 6, 6, -3, -6, -6}, 5, 3,
        15);
  known("duplicates", (float[]){3, 4, -3, -4, 3, 4, -3, -4}, 4, 2, 10);
  known("duplicates of three directions", (float[]){1, 0, 2, 0, 0, 1, 0, 3, -1.5f, -2, -1.5f, -2},
        6, 2, 6.7664325675);
  known("two columns alike", (float[]){3, 0, 3, 0, 4, 0, -3, -4, -3}, 3, 3,
        sqrt(34 + 12 * sqrt(6))); /* Fermat: sqrt((a^2 + b^2 + c^2)/2 + 2 sqrt(3) area) */
  known("1e-30", (float[]){3e-30f, 0, 0, 4e-30f, -3e-30f, -4e-30f}, 3, 2, 6.7664325675e-30);
  known("1e+30", (float[]){3e30f, 0, 0, 4e30f, -3e30f, -4e30f}, 3, 2, 6.7664325675e30);
  known("of subnormal numbers", (float[]){0x3p-149f, 0x4p-149f, -0x3p-149f, -0x4p-149f}, 2, 2,
        0x5p-149);
  known("near the largest number", (float[]){3e38f, -3e38f, -3e38f, 3e38f}, 2, 2, 3e38 * sqrt(2));
  known("rows of very different norms", (float[]){1, 0, -1, 0, 0, 1e-12f, 0, -1e-12f}, 4, 2, 1);
}

/* A regular simplex of k + 1 rows of norm J_k = sqrt(k/(2(k+1))), which has unit edges: the best
 * potential is the simplex itself, T = sum J^2 = k/2, and RowNorm keeps sqrt((k+1)/(2k)) of it. */
TEST(simplices) {
  static const struct {
    int k;
    double ratio;
  } cases[] = {{2, .8660254}, {3, .8164966}, {16, .7288690}};
  for (size_t c = 0; c < PG_COUNT(cases); c++)
    for (int zeros = 0; zeros <= 5; zeros += 5) {
      const int k = cases[c].k, rows = k + 1 + zeros, d = k + 1;
      float x[22 * 17] = {0};
      pg_oracle o;
      for (int i = 0; i <= k; i++)
        for (int j = 0; j < d; j++) x[i * d + j] = (float)(((i == j) - 1.0 / d) * sqrt(0.5));
      solved("simplex", x, rows, d, 1e-6, &o);
      CHECK_CLOSE(o.lower, k / 2.0, 2e-6);
      CHECK_CLOSE(o.upper, k / 2.0, 2e-6);
      CHECK_CLOSE(o.rownorm / o.upper, cases[c].ratio, 2e-6);
      pg_oracle_free(&o);
    }
}

/* Multiplicative updates with exponent 2 cycle on this one. */
TEST(the_cycling_case) {
  pg_oracle o;
  solved("cycle", (float[]){10, 0, -9, 1, -1, -1}, 3, 2, 1e-6, &o);
  pg_oracle_free(&o);
}

/* Without differences between rows, T = 0; the upper bound allows for the rounding of the centring,
 * 4 * 2^-52 rows ||mean row||. */
TEST(nothing_to_gain) {
  static const struct {
    const char *what;
    float x[6];
    int64_t rows;
    double most;
  } cases[] = {{"zero", {0}, 3, 0},
               {"alike", {1, 2, 1, 2, 1, 2}, 3, 0x1p-50 * 3 * 2.2361},
               {"one row", {1, 2}, 1, 0x1p-50 * 2.2361}};
  for (size_t c = 0; c < PG_COUNT(cases); c++) {
    pg_oracle o;
    pg_oracle_verdict v;
    pg_tensor *t = upload(cases[c].x, cases[c].rows, 2);
    CHECK(pg_oracle_solve(t, NULL, &o) == 0, "%s", pg_context_message(ctx));
    CHECK(o.lower == 0 && o.upper <= cases[c].most, "%s: [%g, %g]", cases[c].what, o.lower,
          o.upper);
    CHECK(pg_oracle_check(t, &o, &v) == 0 && v.lower_holds && v.upper_holds, "%s: %s",
          cases[c].what, v.problem);
    pg_oracle_free(&o);
    pg_tensor_free(t);
  }
}

/* Refused by both, with the place. */
TEST(bad_input) {
  static const struct {
    float x;
    const char *text;
  } values[] = {{NAN, "nan"}, {INFINITY, "inf"}, {-INFINITY, "-inf"}};
  float x[6] = {0, 1, 2, 3, -2, -4};
  pg_oracle o, sound;
  pg_oracle_verdict v;
  pg_tensor *t = upload(x, 3, 2);
  CHECK(pg_oracle_solve(t, NULL, &sound) == 0, "%s", pg_context_message(ctx));
  for (size_t c = 0; c < PG_COUNT(values); c++) {
    x[3] = values[c].x;
    CHECK(pg_tensor_write(t, x) == 0, "write");
    CHECK(pg_oracle_solve(t, NULL, &o) == PG_ENONFINITE, "%s is refused", values[c].text);
    CHECK(strstr(pg_context_message(ctx), "row 1, column 1"), "%s", pg_context_message(ctx));
    CHECK(pg_oracle_check(t, &sound, &v) == PG_ENONFINITE, "%s is refused", values[c].text);
    CHECK(strstr(pg_context_message(ctx), "row 1, column 1"), "%s", pg_context_message(ctx));
  }
  x[3] = 3;
  CHECK(pg_tensor_write(t, x) == 0, "write");
  static const double gaps[] = {-1e-6, 1.5, NAN, INFINITY}, seconds[] = {-1, NAN};
  for (size_t c = 0; c < PG_COUNT(gaps); c++) {
    CHECK(pg_oracle_solve(t, &(pg_oracle_options){.gap = gaps[c]}, &o) == PG_EINVAL, "gap %g",
          gaps[c]);
    CHECK(strstr(pg_context_message(ctx), "gap"), "%s", pg_context_message(ctx));
  }
  for (size_t c = 0; c < PG_COUNT(seconds); c++) {
    CHECK(pg_oracle_solve(t, &(pg_oracle_options){.seconds = seconds[c]}, &o) == PG_EINVAL,
          "%g seconds", seconds[c]);
    CHECK(strstr(pg_context_message(ctx), "seconds"), "%s", pg_context_message(ctx));
  }
  pg_oracle_free(&sound);
  pg_tensor_free(t);
  t = NULL;
  CHECK(pg_tensor_new(ctx, PG_F32, 1, (int64_t[]){4}, &t) == 0, "vector");
  CHECK(pg_oracle_solve(t, NULL, &o) == PG_EINVAL, "a vector is refused");
  pg_tensor_free(t);
  t = NULL;
  CHECK(pg_tensor_new(ctx, PG_F32, 2, (int64_t[]){0, 4}, &t) == 0, "no rows");
  CHECK(pg_oracle_solve(t, NULL, &o) == PG_EINVAL, "no rows are refused");
  pg_tensor_free(t);
}

/* Rows with norms like 1 / (i + 1) around a common direction, as a softmax head's: unseen tokens
 * have nearly parallel gradients. */
static float *clouded(int64_t rows, int64_t columns, bool skewed, uint64_t seed) {
  float *x = malloc(sizeof *x * (size_t)(rows * columns));
  pg_normals(seed, 1, 0, (size_t)(rows * columns), x);
  if (skewed)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++)
        x[i * columns + j] =
            (j == 0 ? 1.f : x[i * columns + j] * (i < rows / 4 ? 1.f : .1f)) / (float)(i + 1);
  return x;
}

static void refused(const pg_tensor *g, const pg_oracle *o, bool lower, const char *what) {
  pg_oracle_verdict v;
  CHECK(pg_oracle_check(g, o, &v) == 0, "%s: %s", what, pg_context_message(ctx));
  CHECK(v.lower_holds == !lower && v.upper_holds == lower, "%s: lower %d upper %d: %s", what,
        v.lower_holds, v.upper_holds, v.problem);
  CHECK(strstr(v.problem, lower ? "lower bound" : "upper bound"), "%s: '%s'", what, v.problem);
}

/* Each field by itself, one after the other. What is claimed is what the certificates prove, but
 * for rounding and for the 2^-21 that keep the rounded potential's diameter below 1: small changes
 * tell whatever the gap is. */
#define TAMPER(field, value, lower, what)                                                          \
  do {                                                                                             \
    const __typeof__(field) kept = (field);                                                        \
    (field) = (value);                                                                             \
    refused(g, o, (lower), what);                                                                  \
    (field) = kept;                                                                                \
  } while (0)

static void tampered(const pg_tensor *g, const float *x, pg_oracle *o) {
  const int64_t rows = o->rows, d = o->columns, n = o->clusters;
  int64_t heavy = 0, a = 0, b = 1;
  pg_oracle_verdict v;
  double most = 0;
  for (int64_t i = 0; i < rows; i++) {
    double square = 0;
    for (int64_t k = 0; k < d; k++) square += x[i * d + k] * x[i * d + k];
    if (square > most) most = square, heavy = i;
  }
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < i; j++)
      if (o->weights[i * n + j] > o->weights[a * n + b]) a = i, b = j;

  TAMPER(o->lower, o->lower * (1 + 2e-6), true, "lower: too high");
  TAMPER(o->lower, NAN, true, "lower: no number");
  TAMPER(o->lower, INFINITY, true, "lower: infinite");
  float *phi = o->potential + heavy * d, *away = malloc(sizeof *away * (size_t)(rows * d));
  memcpy(away, o->potential, sizeof *away * (size_t)(rows * d));
  for (int64_t k = 0; k < d; k++) phi[k] -= 1e-4f * x[heavy * d + k] / (float)sqrt(most);
  refused(g, o, true, "potential: a row moved against its gradient");
  memcpy(o->potential, away, sizeof *away * (size_t)(rows * d));
  for (int64_t k = 0; k < d; k++) phi[k] = -phi[k];
  refused(g, o, true, "potential: a row turned round");
  memcpy(o->potential, away, sizeof *away * (size_t)(rows * d));
  for (int64_t k = 0; k < rows * d; k++) o->potential[k] *= 1 + 1e-5f;
  refused(g, o, true, "potential: wider than 1");
  for (int64_t k = 0; k < rows * d; k++) o->potential[k] = 0;
  refused(g, o, true, "potential: nothing");
  memcpy(o->potential, away, sizeof *away * (size_t)(rows * d));
  free(away);
  TAMPER(phi[d - 1], NAN, true, "potential: no number");
  TAMPER(phi[0], INFINITY, true, "potential: infinite");

  TAMPER(o->upper, o->upper * (1 - 1e-8), false, "upper: too low");
  TAMPER(o->upper, NAN, false, "upper: no number");
  TAMPER(o->upper, -INFINITY, false, "upper: infinite");
  TAMPER(o->scale, o->scale * 1.001, false, "scale: too large");
  TAMPER(o->scale, o->scale / 2, false, "scale: half");
  TAMPER(o->scale, 0, false, "scale: 0");
  TAMPER(o->scale, -o->scale, false, "scale: negative");
  TAMPER(o->scale, NAN, false, "scale: no number");
  TAMPER(o->scale, INFINITY, false, "scale: infinite");
  float *weight = o->weights + a * n + b, *mirror = o->weights + b * n + a;
  TAMPER(*weight, *weight * 1.001f, false, "weights: not symmetric");
  TAMPER(*weight, -*weight, false, "weights: negative");
  TAMPER(*weight, NAN, false, "weights: no number");
  TAMPER(*weight, INFINITY, false, "weights: infinite");
  TAMPER(o->weights[a * n + a], -1, false, "weights: a negative self-tension");
  const float kept = *weight;
  *weight = *mirror = kept * 1.001f;
  refused(g, o, false, "weights: one larger");
  *weight = *mirror = 0;
  refused(g, o, false, "weights: one left out");
  *weight = *mirror = kept;
  float *centre = o->centres + o->cluster[heavy] * d;
  TAMPER(centre[0], centre[0] + 1e-3f, false, "centres: one moved");
  TAMPER(centre[d - 1], NAN, false, "centres: no number");
  TAMPER(centre[0], INFINITY, false, "centres: infinite");
  int32_t *cluster = o->cluster + heavy;
  TAMPER(*cluster, (int32_t)n, false, "clusters: does not exist");
  TAMPER(*cluster, -2, false, "clusters: does not exist");
  TAMPER(*cluster, INT32_MIN, false, "clusters: does not exist");
  TAMPER(*cluster, -1, false, "clusters: a row without flow");
  TAMPER(*cluster, *cluster ? 0 : 1, false, "clusters: of another");

  static const int64_t shapes[][3] = {{-1, 0, 0}, {1, 0, 0}, {0, -1, 0}, {0, 1, 0}, {0, 0, -4097}};
  const pg_oracle sound = *o;
  for (size_t c = 0; c < PG_COUNT(shapes); c++) {
    o->rows += shapes[c][0], o->columns += shapes[c][1], o->clusters += shapes[c][2];
    CHECK(pg_oracle_check(g, o, &v) == PG_EINVAL, "shape %zu", c);
    *o = sound;
  }
  CHECK(pg_oracle_check(g, o, &v) == 0 && v.lower_holds && v.upper_holds, "%s", v.problem);
}

TEST(certificates) {
  static const struct {
    int64_t rows, columns;
    bool skewed;
  } cases[] = {{32, 64, false}, {32, 64, true}, {40, 3, false}, {100, 12, true}};
  for (size_t c = 0; c < PG_COUNT(cases); c++) {
    const int64_t rows = cases[c].rows, d = cases[c].columns;
    float *x = clouded(rows, d, cases[c].skewed, c);
    pg_oracle o;
    solved("cloud", x, rows, d, 1e-6, &o);
    CHECK(o.rownorm <= o.upper && o.rownorm >= o.upper / sqrt(2), "RowNorm keeps %g",
          o.rownorm / o.upper);
    pg_tensor *g = upload(x, rows, d);
    tampered(g, x, &o);
    /* Of another gradient, or of another scale. */
    for (int64_t k = 0; k < rows * d; k++) x[k] *= 2;
    CHECK(pg_tensor_write(g, x) == 0, "write");
    refused(g, &o, false, "twice the gradient");
    pg_oracle_free(&o);
    pg_tensor_free(g);
    free(x);
  }
}

/* The bounds hold whenever it ends. */
TEST(no_time) {
  float *x = clouded(200, 16, true, 7);
  pg_tensor *g = upload(x, 200, 16);
  pg_oracle o;
  pg_oracle_verdict v;
  CHECK(pg_oracle_solve(g, &(pg_oracle_options){.seconds = 1e-9}, &o) == 0, "%s",
        pg_context_message(ctx));
  CHECK(o.upper > o.lower * (1 + 1e-4) && o.lower >= o.rownorm * (1 - 1e-6), "[%g, %g]", o.lower,
        o.upper);
  CHECK(pg_oracle_check(g, &o, &v) == 0 && v.lower_holds && v.upper_holds, "%s", v.problem);
  pg_oracle_free(&o);
  pg_context_cancel(ctx);
  CHECK(pg_oracle_solve(g, NULL, &o) == PG_ECANCELED, "cancelled");
  pg_context_resume(ctx);
  pg_tensor_free(g);
  free(x);
}

/* Ends by count as it does by time, always with the same bits. */
TEST(iterations) {
  float *x = clouded(100, 16, true, 7);
  pg_tensor *g = upload(x, 100, 16);
  pg_oracle a, b;
  pg_oracle_verdict v;
  for (int64_t most = 1; most <= 40; most += 39) {
    const pg_oracle_options options = {.gap = 1e-9, .iterations = most};
    CHECK(pg_oracle_solve(g, &options, &a) == 0 && pg_oracle_solve(g, &options, &b) == 0, "%s",
          pg_context_message(ctx));
    CHECK(a.iterations == most && a.upper > a.lower && a.lower >= a.rownorm * (1 - 1e-6),
          "%lld rounds: [%g, %g]", (long long)a.iterations, a.lower, a.upper);
    CHECK(memcmp(a.potential, b.potential, 1600 * sizeof(float)) == 0, "the same potential");
    CHECK(pg_oracle_check(g, &a, &v) == 0 && v.lower_holds && v.upper_holds, "%s", v.problem);
    pg_oracle_free(&a), pg_oracle_free(&b);
  }
  pg_tensor_free(g);
  free(x);
}

/* More rows than pairs can be held for: an interval by clusters of rows. */
TEST(many_rows) {
  const int64_t rows = 4000, d = 24;
  float *x = clouded(rows, d, true, 11);
  pg_tensor *g = upload(x, rows, d);
  pg_oracle o;
  pg_oracle_verdict v;
  CHECK(pg_oracle_solve(g, &(pg_oracle_options){.gap = .05, .seconds = 20}, &o) == 0, "%s",
        pg_context_message(ctx));
  CHECK(o.lower >= o.rownorm * (1 - 1e-6) && o.upper <= o.rownorm * sqrt(2) * (1 + 1e-6),
        "[%.9g, %.9g], RowNorm %.9g", o.lower, o.upper, o.rownorm);
  CHECK(pg_oracle_check(g, &o, &v) == 0 && v.lower_holds && v.upper_holds, "%s", v.problem);
  CHECK(o.clusters < rows, "%lld clusters", (long long)o.clusters);
  tampered(g, x, &o);
  pg_oracle_free(&o);
  pg_tensor_free(g);
  free(x);
}

int main(void) {
  char message[256];
  if (pg_context_new(&(pg_context_options){.device = unit_device(), .threads = 2}, &ctx, message,
                     sizeof message) < 0) {
    printf("not ok context: %s\n", message);
    return 1;
  }
  RUN(known_values);
  RUN(degenerate_inputs);
  RUN(simplices);
  RUN(the_cycling_case);
  RUN(nothing_to_gain);
  RUN(bad_input);
  RUN(certificates);
  RUN(no_time);
  RUN(iterations);
  RUN(many_rows);
  pg_context_free(ctx);
  return unit_report();
}
