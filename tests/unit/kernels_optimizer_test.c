/* Sums, clipping, the optimizers' kernels and the apply step: equations in fp64, published rows,
 * and bit equality of the kernels with the same optimizer composed of element-wise ones. */
#include "core/random.h"
#include "kernels_unit.h"

TEST(sum) {
  unit_seed(41);
  int64_t sizes[] = {0, 1, 17, 16384, 16385, 1000003};
  for (int c = 0; c < 6; c++) {
    int64_t n = sizes[c];
    float *x = unit_normals(n, 3);
    double want = 0, size = 0, squares = 0, got = NAN;
    for (int64_t i = 0; i < n; i++) {
      want += x[i], size += fabs((double)x[i]), squares += (double)x[i] * x[i];
    }
    KERNEL(sum, x, n, false, &got);
    /* Both sums are fp64: n 2^-53 of the sum of magnitudes. */
    CHECK(fabs(got - want) <= (double)n * 0x1p-52 * size, "sum %.17g, want %.17g", got, want);
    KERNEL(sum, x, n, true, &got);
    CHECK(fabs(got - squares) <= (double)n * 0x1p-52 * squares, "%.17g, want %.17g", got, squares);
    free(x);
  }
  float tiny[] = {1e-24f, 2e-24f}, wide[] = {3e38f, 3e38f}, bad[] = {1, INFINITY, 2};
  double got = NAN;
  KERNEL(sum, tiny, 2, true, &got);
  CHECK_CLOSE(got, 5e-48, 1e-6);
  KERNEL(sum, wide, 2, true, &got);
  CHECK_CLOSE(got, 1.8e77, 1e-6);
  KERNEL(sum, bad, 3, true, &got);
  CHECK(!isfinite(got), "infinity is lost");
}

/* The same bits whatever the thread count. */
TEST(sum_does_not_depend_on_threads) {
  int64_t n = 300001;
  float *x = unit_normals(n, 1);
  for (int level = 0; level < PG_CPU_LEVELS; level++) {
    double got[4] = {0};
    for (int threads = 1; threads <= 3; threads += 2) {
      const pg_kernels *table = pg_cpu_kernels(pg_cpu_levels[level]);
      pg_queue *queue = NULL;
      if (!table) continue;
      pg_queue_options options = {.threads = threads};
      char why[64];
      CHECK(table->queue_new(&options, &queue, why, sizeof why) == 0, "queue");
      CHECK(table->sum(queue, x, n, true, &got[threads]) == 0, "sum");
      table->queue_free(queue);
    }
    CHECK(got[1] == got[3], "%.17g with one thread, %.17g with three", got[1], got[3]);
  }
  free(x);
}

TEST(clip) {
  pg_clip clip;
  double sums[] = {9, 16};
  KERNEL(clip_factor, sums, 2, 10, &clip);
  CHECK(clip.norm == 5 && clip.factor == 1 && clip.finite == 1, "norm %g", clip.norm);
  KERNEL(clip_factor, sums, 2, 1, &clip);
  CHECK(clip.factor == (float)(1 / 5.000001), "factor %.9g", (double)clip.factor);
  float x[] = {5, -10, 0};
  KERNEL(clip_apply, &clip, 3, x);
  CHECK(x[0] == 5 * clip.factor && x[1] == -10 * clip.factor && x[2] == 0, "%g", x[0]);
  KERNEL(clip_factor, sums, 2, INFINITY, &clip);
  CHECK(clip.factor == 1 && clip.norm == 5, "no clipping: factor %g", (double)clip.factor);
  KERNEL(clip_apply, &clip, 3, x);
  CHECK(x[1] == -10 * (float)(1 / 5.000001), "factor 1 changes nothing");
  double bad[] = {1, NAN};
  KERNEL(clip_factor, bad, 2, 1, &clip);
  CHECK(clip.finite == 0, "NaN norm counts as finite");
  float y[] = {2};
  KERNEL(clip_apply, &clip, 1, y);
  CHECK(y[0] == 2, "a refused update must not touch gradients");
  double infinite[] = {INFINITY};
  KERNEL(clip_factor, infinite, 1, 1, &clip);
  CHECK(clip.finite == 0, "infinite norm counts as finite");
  /* A 3-logit bias model at target 0 and clip 0.1: the clipped norm is 0.1 within 2e-7. */
  float g[] = {-2.0f / 3, 1.0f / 3, 1.0f / 3};
  double square, after;
  KERNEL(sum, g, 3, true, &square);
  KERNEL(clip_factor, &square, 1, 0.1, &clip);
  KERNEL(clip_apply, &clip, 3, g);
  KERNEL(sum, g, 3, true, &after);
  CHECK(fabs(sqrt(after) - 0.1) <= 2e-7, "clipped norm %.9g", sqrt(after));
}

static pg_adamw adamw_at(double lr, double b1, double b2, double eps, int update) {
  return (pg_adamw){lr, b1, b2, eps, 1 / (1 - pow(b1, update)), 1 / (1 - pow(b2, update))};
}

static pg_target keep_in(float *s) {
  return (pg_target){.increment = s};
}
static pg_target apply_to(float *w, double keep) {
  return (pg_target){.value = w, .keep = keep};
}

/* Two updates with decay from published rows (4 x 2). */
TEST(adamw_rows) {
  float w[] = {1, 3, 2, -1, -4, 2, 5, -2};
  float g1[] = {1, 2, 2, -3, -1, 4, 3, 1}, g2[] = {.5f, -2, 3, 1, 2, -1, -4, 2};
  double w1[] = {.7400199980001999, 2.620009999500025, 1.6800099995000248, -.7400066664444518,
                 -3.5600199980002,  1.680004999875003, 4.500006666444451,  -2.0799800019998};
  double w2[] = {.5236502458033829,  2.5485193997442983, 1.3731689305384562, -.6818191314324812,
                 -3.483877220746035, 1.547209741889248,  4.340444647018115,  -2.1613688358185827};
  float m[8] = {0}, v[8] = {0}, s[8];
  for (int i = 0; i < 8; i++) s[i] = NAN;
  pg_adamw h = adamw_at(.2, .4, .7, 1e-4, 1);
  pg_target to = apply_to(w, 1 - .2 * .3);
  KERNEL(adamw, &h, g1, 8, m, v, &to);
  /* About ten roundings, against the row's size. */
  CHECK_ERROR("adamw update 1", w, w1, 8, 4 * UNIT_ULP);
  h = adamw_at(.2, .4, .7, 1e-4, 2);
  KERNEL(adamw, &h, g2, 8, m, v, &to);
  CHECK_ERROR("adamw update 2", w, w2, 8, 4 * UNIT_ULP);
  /* Zero gradient from zero slots: increment exactly 0, decay exactly once. */
  float zero[8] = {0}, m0[8] = {0}, v0[8] = {0}, one[8];
  for (int i = 0; i < 8; i++) one[i] = 10;
  h = adamw_at(.1, .9, .999, 1e-10, 1);
  to = (pg_target){.increment = s, .value = one, .keep = 1 - .1};
  KERNEL(adamw, &h, zero, 8, m0, v0, &to);
  for (int i = 0; i < 8; i++) CHECK(s[i] == 0 && one[i] == 9, "s %g, w %g", s[i], one[i]);
}

/* Against fp64 over a long vector; increments of very different sizes. */
TEST(adamw) {
  unit_seed(42);
  int64_t n = 70001;
  float *g = unit_floats(n), *m = unit_floats(n), *v = unit_floats(n), *s = unit_poisoned(n);
  const pg_target to = keep_in(s);
  double *m64 = unit_doubles(n), *v64 = unit_doubles(n), *s64 = unit_doubles(n);
  memset(m, 0, (size_t)n * 4), memset(v, 0, (size_t)n * 4);
  for (int update = 1; update <= 3; update++) {
    pg_adamw h = adamw_at(4e-3, .9, .999, 1e-10, update);
    for (int64_t i = 0; i < n; i++) {
      g[i] = unit_normal() * (float)pow(10, -(double)(i % 9));
      m64[i] = .9 * m64[i] + .1 * g[i];
      v64[i] = .999 * v64[i] + .001 * ((double)g[i] * g[i]);
      s64[i] = -4e-3 * (m64[i] * h.correction1) / (sqrt(v64[i] * h.correction2) + 1e-10);
    }
    KERNEL(adamw, &h, g, n, m, v, &to);
    CHECK_ERROR("adamw increment", s, s64, n, 8 * UNIT_ULP);
    CHECK_ERROR("adamw m", m, m64, n, 4 * UNIT_ULP);
    CHECK_ERROR("adamw v", v, v64, n, 6 * UNIT_ULP);
  }
  free(g), free(m), free(v), free(s), free(m64), free(v64), free(s64);
}

/* What a Lua optimizer does with element-wise kernels has the bits of the C one. */
TEST(adamw_equals_its_composition) {
  unit_seed(43);
  int64_t rows = 37, columns = 129, n = rows * columns;
  float *g = unit_normals(n, 1e-2), *m = unit_normals(n, 1e-2), *v = unit_floats(n);
  for (int64_t i = 0; i < n; i++) v[i] = fabsf(m[i] * m[i]);
  g[0] = 0, g[1] = 1e-25f, m[2] = 1e-39f, v[2] = 1e-40f, g[2] = 0; /* squares that vanish */
  float *w = unit_normals(n, 1), *s = unit_poisoned(n);
  float *m2 = unit_clone(m, n), *v2 = unit_clone(v, n), *w2 = unit_clone(w, n);
  float *a = unit_poisoned(n), *b = unit_poisoned(n);
  pg_adamw h = adamw_at(3e-3, .9, .99, 1e-8, 5);
  const pg_target to = {.increment = s, .value = w, .keep = 1 - 3e-3 * .1};
  KERNEL(adamw, &h, g, n, m, v, &to);
#define VIEW(x) ((pg_view){(x), columns, 1})
  KERNEL(lerp, VIEW(m2), VIEW(g), 1 - .9, rows, columns);
  KERNEL(unary, PG_SQUARE, VIEW(g), rows, columns, VIEW(a));
  KERNEL(lerp, VIEW(v2), VIEW(a), 1 - .99, rows, columns);
  KERNEL(scalar, PG_MUL, VIEW(v2), h.correction2, false, rows, columns, VIEW(b));
  KERNEL(unary, PG_SQRT, VIEW(b), rows, columns, VIEW(b));
  KERNEL(scalar, PG_ADD, VIEW(b), 1e-8, false, rows, columns, VIEW(b));
  KERNEL(scalar, PG_MUL, VIEW(m2), h.correction1, false, rows, columns, VIEW(a));
  KERNEL(scalar, PG_MUL, VIEW(a), -3e-3, false, rows, columns, VIEW(a));
  KERNEL(binary, PG_DIV, VIEW(a), VIEW(b), rows, columns, VIEW(a));
  KERNEL(scalar, PG_MUL, VIEW(w2), 1 - 3e-3 * .1, false, rows, columns, VIEW(w2));
  KERNEL(binary, PG_ADD, VIEW(w2), VIEW(a), rows, columns, VIEW(w2));
  CHECK(unit_same_bits(m, m2, n), "first moments");
  CHECK(unit_same_bits(v, v2, n), "second moments");
  CHECK(unit_same_bits(s, a, n), "increments");
  CHECK(unit_same_bits(w, w2, n), "weights");
  /* And both are the plain loop without contraction, for numbers above the denormals. */
  float lr = (float)-3e-3, c1 = (float)h.correction1, c2 = (float)h.correction2;
  int wrong = 0;
  for (int64_t i = 3; i < n; i++) {
    float top = lr * (m[i] * c1), root = sqrtf(v[i] * c2), bottom = root + 1e-8f;
    wrong += s[i] != top / bottom;
  }
  CHECK(!wrong, "%d increments differ from the plain loop", wrong);
  free(g), free(m), free(v), free(w), free(s), free(m2), free(v2), free(w2), free(a), free(b);
}

/* Whatever becomes of the increments, their bits are the same: kept, applied by the way, applied
 * from memory by pg_apply, with and without a copy, in parts at odd addresses. */
TEST(targets_agree) {
  unit_seed(44);
  const int64_t sizes[] = {1, 3, 63, 1024, 1025, 70001};
  for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
    const int64_t n = sizes[c], part = n / 3;
    const double keep = 1 - 3e-3 * .1;
    const pg_adamw h = adamw_at(3e-3, .9, .99, 1e-8, 5);
    float *g = unit_normals(n, 1e-2), *m = unit_normals(n, 1e-2), *v = unit_floats(n);
    for (int64_t i = 0; i < n; i++) v[i] = m[i] * m[i];
    float *w = unit_normals(n, 1), *s = unit_poisoned(n), *kept = unit_poisoned(n);
    float *w1 = unit_clone(w, n), *w2 = unit_clone(w, n), *w3 = unit_clone(w, n);
    uint16_t *copy1 = calloc((size_t)n, 2), *copy2 = calloc((size_t)n, 2);
    const pg_target two = {.value = w1, .copy = copy1, .keep = keep},
                    one = {.increment = kept, .value = w2, .copy = copy2, .keep = keep};
    float *mm = unit_clone(m, n), *vv = unit_clone(v, n);
    const pg_target alone = keep_in(s);
    KERNEL(adamw, &h, g, n, mm, vv, &alone);
    KERNEL(apply, 1, PG_F32, s, n, 1, &two);
    float *m2 = unit_clone(m, n), *v2 = unit_clone(v, n);
    KERNEL(adamw, &h, g, n, m2, v2, &one);
    const pg_target head = apply_to(w3, keep), tail = apply_to(w3 + part, keep);
    KERNEL(adamw, &h, g, part, m, v, &head);
    KERNEL(adamw, &h, g + part, n - part, m + part, v + part, &tail);
    CHECK(unit_same_bits(s, kept, n), "increments");
    CHECK(unit_same_bits(w1, w2, n) && unit_same_bits(w1, w3, n), "weights");
    CHECK(!memcmp(copy1, copy2, (size_t)n * 2), "copies");
    CHECK(unit_same_bits(mm, m2, n) && unit_same_bits(vv, v2, n), "slots");
    CHECK(unit_same_bits(mm, m, n) && unit_same_bits(vv, v, n), "slots in parts");
    free(g), free(m), free(v), free(w), free(s), free(kept), free(w1), free(w2), free(w3);
    free(copy1), free(copy2), free(mm), free(vv), free(m2), free(v2);
  }
}

/* One kernel has the bits of lerp, norm, sum, division and product one after the other: rows
 * shorter and longer than a run, rows of zeros, small numbers that the sum of squares alone still
 * sees. */
TEST(rownorm_equals_its_composition) {
  unit_seed(46);
  const int64_t shapes[][2] = {{1, 1}, {3, 5}, {67, 33}, {40, 1024}, {5, 1025}, {2, 5000}};
  for (int c = 0; c < 12; c++) {
    const int64_t rows = shapes[c / 2][0], columns = shapes[c / 2][1], n = rows * columns;
    const bool given = c % 2; /* the momentum as it is */
    const pg_rownorm h = {3e-3, .95, 1e-8 * (1 - pow(.95, 3))};
    const double keep = 1 - 3e-3 * .1;
    float *g = unit_normals(n, 1e-2), *b = unit_normals(n, 1e-2), *w = unit_normals(n, 1);
    for (int64_t j = 0; j < columns; j++) {
      g[j] = 0;
      b[j] = given ? 1e-39f : 1e-38f; /* decays below 2^-126 */
      if (rows > 2) g[2 * columns + j] = b[2 * columns + j] = 0;
    }
    float *b1 = unit_clone(b, n), *w1 = unit_clone(w, n), *w2 = unit_clone(w, n);
    float *b2 = unit_clone(b, n), *s = unit_poisoned(n), *s1 = unit_poisoned(n);
    float *norms = unit_poisoned(rows);
    uint16_t *copy = calloc((size_t)n, 2), *copy1 = calloc((size_t)n, 2);
    const pg_target all = {.increment = s, .value = w, .copy = copy, .keep = keep},
                    bare = apply_to(w2, keep);
    KERNEL(rownorm, &h, given ? NULL : g, rows, columns, b, &all);
    KERNEL(rownorm, &h, given ? NULL : g, rows, columns, b2, &bare);
    if (!given) KERNEL(lerp, VIEW(b1), VIEW(g), 1 - .95, rows, columns);
    KERNEL(reduce, PG_NORM, VIEW(b1), rows, columns, 1, norms);
    const pg_view per_row = {norms, 1, 0};
    KERNEL(scalar, PG_ADD, per_row, h.offset, false, rows, 1, per_row);
    KERNEL(binary, PG_DIV, VIEW(b1), per_row, rows, columns, VIEW(s1));
    KERNEL(scalar, PG_MUL, VIEW(s1), -3e-3, false, rows, columns, VIEW(s1));
    const pg_target apart = {.value = w1, .copy = copy1, .keep = keep};
    KERNEL(apply, 1, PG_F32, s1, n, 1, &apart);
    CHECK(unit_same_bits(b, b1, n) && unit_same_bits(b2, b1, n), "momentum, case %d", c);
    CHECK(unit_same_bits(s, s1, n), "increments, case %d", c);
    CHECK(unit_same_bits(w, w1, n) && unit_same_bits(w2, w1, n), "weights, case %d", c);
    CHECK(!memcmp(copy, copy1, (size_t)n * 2), "copies, case %d", c);
    if (given) { /* in place, as the centred momentum is */
      const pg_target in_place = keep_in(b2);
      KERNEL(rownorm, &h, NULL, rows, columns, b2, &in_place);
      CHECK(unit_same_bits(b2, s1, n), "in place, case %d", c);
    }
    free(g), free(b), free(w), free(b1), free(w1), free(w2), free(b2), free(s), free(s1);
    free(norms), free(copy), free(copy1);
  }
}

/* Bits of the counter-based words, row by row, whatever part of the rows is asked for. */
TEST(signs) {
  const int64_t sizes[] = {1, 31, 128, 129, 300};
  for (int c = 0; c < 5; c++) {
    const int64_t columns = sizes[c], rows = 40, draws = (columns + 127) / 128;
    float *all = unit_poisoned(rows * columns), *part = unit_poisoned(7 * columns);
    KERNEL(signs, 5, 9, 1000, rows, columns, all);
    KERNEL(signs, 5, 9, 1011, 7, columns, part);
    CHECK(unit_same_bits(all + 11 * columns, part, 7 * columns), "a part, case %d", c);
    int64_t wrong = 0, sum = 0;
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) {
        uint32_t words[4];
        pg_philox(5, 9, (uint64_t)((1000 + i) * draws + j / 128), words);
        const bool bit = words[j % 128 / 32] >> j % 32 & 1;
        wrong += all[i * columns + j] != (bit ? -1 : 1);
        sum += (int64_t)all[i * columns + j];
      }
    CHECK(wrong == 0, "%lld bits", (long long)wrong);
    /* Five standard deviations. */
    CHECK(fabs((double)sum) <= 5 * sqrt((double)(rows * columns)), "sum %lld", (long long)sum);
    free(all), free(part);
  }
}

/* Weights that do not move towards zero keep their size before the step is added. */
TEST(cautious_decay) {
  float x[] = {1, -1, 1, -1, 0, 1, -2, 0}, w[] = {2, 2, -2, -2, 2, 0, -0.0f, 0};
  float want[8], s[8];
  const pg_target to = {.increment = s, .value = w, .keep = 0.75, .cautious = true};
  for (int i = 0; i < 8; i++) want[i] = (x[i] * w[i] < 0 ? 0.75f * w[i] : w[i]) + x[i];
  CHECK(want[1] == 0.5f && want[0] == 3 && want[2] == -0.5f && want[4] == 2, "by hand");
  KERNEL(apply, 1, PG_F32, x, 8, 1, &to);
  for (int i = 0; i < 8; i++) CHECK(w[i] == want[i], "w[%d] = %g, want %g", i, w[i], want[i]);
}

/* One kernel has the bits of product, sum, product, sum and norm one after the other, for matrices
 * shorter and longer than a run. */
TEST(momentum_equals_its_composition) {
  unit_seed(48);
  const int64_t sizes[] = {1, 15, 4096, 4097, 30000};
  for (int c = 0; c < 15; c++) {
    const int64_t n = sizes[c / 3], count = 3;
    const bool nesterov = c % 3 == 1, alone = c % 3 == 2; /* the momentum without a direction */
    float *g = unit_normals(n * count, 1e-3), *b = unit_normals(n * count, 1e-3);
    float *b1 = unit_clone(b, n * count), *x1 = unit_poisoned(n), *x = unit_poisoned(n * count);
    float norm[3], norm1;
    const float *gradients[3];
    float *buffers[3];
    g[0] = 0, b[0] = b1[0] = 1e-38f; /* decays below 2^-126 */
    for (int64_t i = 0; i < count; i++) gradients[i] = g + i * n, buffers[i] = b + i * n;
    KERNEL(momentum, .95, nesterov, count, gradients, buffers, n, alone ? NULL : x, norm);
    for (int64_t i = 0; i < count; i++) {
      const pg_view vb = {b1 + i * n, n, 1}, vg = {g + i * n, n, 1}, vx = {x1, n, 1};
      KERNEL(scalar, PG_MUL, vb, .95, false, 1, n, vb);
      KERNEL(binary, PG_ADD, vb, vg, 1, n, vb);
      KERNEL(scalar, PG_MUL, vb, nesterov ? .95 : 1, false, 1, n, vx);
      if (nesterov) KERNEL(binary, PG_ADD, vx, vg, 1, n, vx);
      KERNEL(reduce, PG_NORM, vx, 1, n, -1, &norm1);
      CHECK(unit_same_bits(b + i * n, b1 + i * n, n), "momentum, case %d", c);
      if (alone) continue;
      CHECK(unit_same_bits(x + i * n, x1, n) && norm[i] == norm1, "direction, case %d", c);
    }
    free(g), free(b), free(b1), free(x), free(x1);
  }
}

/* Against fp64: six roundings and those of the sum. */
TEST(rownorm) {
  unit_seed(47);
  const int64_t rows = 129, columns = 257, n = rows * columns;
  float *g = unit_floats(n), *b = unit_floats(n), *s = unit_poisoned(n);
  double *b64 = unit_doubles(n), *s64 = unit_doubles(n);
  const pg_target to = keep_in(s);
  memset(b, 0, (size_t)n * 4);
  for (int update = 1; update <= 3; update++) {
    const pg_rownorm h = {2e-3, .95, 1e-3 * (1 - pow(.95, update))};
    for (int64_t i = 0; i < rows; i++) {
      double square = 0;
      for (int64_t at = i * columns; at < (i + 1) * columns; at++) {
        g[at] = unit_normal() * (float)pow(10, -(double)(i % 6));
        b64[at] = .95 * b64[at] + .05 * g[at];
        square += b64[at] * b64[at];
      }
      for (int64_t at = i * columns; at < (i + 1) * columns; at++)
        s64[at] = -2e-3 * b64[at] / (sqrt(square) + h.offset);
    }
    KERNEL(rownorm, &h, g, rows, columns, b, &to);
    CHECK_ERROR("rownorm", s, s64, n, 8 * UNIT_ULP);
    CHECK_ERROR("momentum", b, b64, n, 4 * UNIT_ULP);
  }
  free(g), free(b), free(s), free(b64), free(s64);
}

/* Several matrices at once, from either type, scaled: what a plain loop gives. */
TEST(apply_many) {
  unit_seed(45);
  const int64_t sizes[] = {1, 5, 1023, 1028, 20000};
  for (int c = 0; c < 5; c++)
    for (int count = 1; count <= 70; count += 69) {
      const int64_t n = sizes[c], all = n * count;
      const double factor = -.37, keep = 1 - 1e-3;
      float *x = unit_normals(all, 1), *w = unit_normals(all, 1), *s = unit_poisoned(all);
      float *wide = unit_poisoned(all), *want = unit_floats(all), *w2 = unit_clone(w, all);
      uint16_t *narrow = calloc((size_t)all, 2), *copy = calloc((size_t)all, 2);
      pg_target to[70], bare[70];
      for (int k = 0; k < count; k++) {
        to[k] = (pg_target){
            .increment = s + k * n, .value = w + k * n, .copy = copy + k * n, .keep = keep};
        bare[k] = apply_to(w2 + k * n, keep);
      }
      for (int64_t i = 0; i < all; i++) {
        float product = (float)factor * x[i], kept = (float)keep * w[i];
        want[i] = kept + product;
      }
      KERNEL(apply, factor, PG_F32, x, n, count, to);
      CHECK(unit_same_bits(w, want, all), "weights of %d times %lld", count, (long long)n);
      for (int64_t i = 0; i < all; i++) want[i] = (float)factor * x[i];
      CHECK(unit_same_bits(s, want, all), "increments");
      KERNEL(convert, PG_F32, w, PG_BF16, narrow, all);
      CHECK(!memcmp(copy, narrow, (size_t)all * 2), "copies");
      KERNEL(convert, PG_F32, x, PG_BF16, narrow, all);
      KERNEL(convert, PG_BF16, narrow, PG_F32, wide, all);
      for (int64_t i = 0; i < all; i++) {
        float product = (float)factor * wide[i], kept = (float)keep * w2[i];
        want[i] = kept + product;
      }
      KERNEL(apply, factor, PG_BF16, narrow, n, count, bare);
      CHECK(unit_same_bits(w2, want, all), "from bf16");
      free(x), free(w), free(s), free(wide), free(want), free(w2), free(narrow), free(copy);
    }
  CHECK(k->apply(q, 1, PG_I32, NULL, 0, 0, NULL) == -1 && strstr(k->message(q), "BF16"), "%s",
        k->message(q));
}

/* A slot that decays for ever ends at 0, not among the denormals. */
TEST(slots_do_not_become_denormal) {
  float g[64] = {0}, m[64], v[64], s[64];
  for (int i = 0; i < 64; i++) m[i] = 1e-3f, v[i] = 1e-30f;
  pg_adamw h = adamw_at(1e-3, .9, .9, 1e-8, 100);
  const pg_target to = keep_in(s);
  for (int update = 0; update < 1200; update++) KERNEL(adamw, &h, g, 64, m, v, &to);
  for (int i = 0; i < 64; i++) {
    uint32_t bits;
    memcpy(&bits, &m[i], 4);
    CHECK(bits == 0, "m = %g", (double)m[i]);
  }
  /* The caller's own arithmetic keeps denormals. */
  volatile float small = 1e-38f;
  CHECK(small / 4 != 0, "the kernel left flush-to-zero on");
}

int main(void) {
  RUN(sum_does_not_depend_on_threads);
  FOR_EACH_BACKEND {
    RUN(sum);
    RUN(clip);
    RUN(adamw_rows);
    RUN(adamw);
    RUN(adamw_equals_its_composition);
    RUN(targets_agree);
    RUN(rownorm_equals_its_composition);
    RUN(rownorm);
    RUN(signs);
    RUN(cautious_decay);
    RUN(momentum_equals_its_composition);
    RUN(apply_many);
    RUN(slots_do_not_become_denormal);
  }
  return unit_kernels_report();
}
