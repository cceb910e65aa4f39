/* Sums, norm and clip, AdamW, apply, conversion and centring on the device. */
#include "cuda_unit.h"

static const int64_t sizes[] = {1, 3, 4, 37, 1023, 8192, 8193, 40001};
#define SIZES (int)(sizeof sizes / sizeof *sizes)

/* Both sides add n numbers in fp64 in different orders: each differs from the exact sum by at most
 * (n-1) 2^-53 sum |x_i|. Pointers are not always aligned to four elements. */
TEST(sums) {
  unit_seed(11);
  for (int c = 0; c <= SIZES; c++)
    for (int square = 0; square < 2; square++)
      for (int offset = 0; offset < 2; offset++) {
        int64_t n = c < SIZES ? sizes[c] : 0;
        twin x = normals(PG_F32, n + offset, 1), out = poisoned(PG_F64, 1);
        double size = 0;
        for (int64_t i = offset; i < n + offset; i++) {
          double v = fabs((double)((float *)x.at[CPU])[i]);
          size += square ? v * v : v;
        }
        BOTH(sum, F(x, offset), n, square != 0, P(out));
        double *got = from_gpu(&out), want = *(double *)out.at[CPU];
        CHECK(fabs(*got - want) <= 2 * (double)n * 0x1p-53 * size, "n %lld: %.17g, want %.17g",
              (long long)n, *got, want);
        /* The same elements at another address give the same bits. */
        twin y = twin_of(PG_F32, n, (float *)x.at[CPU] + offset);
        twin out2 = poisoned(PG_F64, 1);
        ON(GPU, sum, P(y), n, square != 0, P(out2));
        double *again = from_gpu(&out2);
        CHECK(*again == *got, "n %lld at another address: %.17g, %.17g", (long long)n, *again,
              *got);
        free(got), free(again);
        drop_twins();
      }
}

TEST(sum_of_nan_and_infinity) {
  float x[] = {1, INFINITY, 2, 3, NAN};
  for (int n = 4; n <= 5; n++) {
    twin t = twin_of(PG_F32, n, x), out = poisoned(PG_F64, 1);
    BOTH(sum, P(t), n, false, P(out));
    CHECK_SAME("sum", &out);
    drop_twins();
  }
}

/* From the same sums the same bits. */
TEST(clip) {
  unit_seed(12);
  int64_t counts[] = {0, 1, 3, 37, 300, 1023};
  double norms[] = {1.0, 1e-3, 1e6, INFINITY};
  for (int c = 0; c < 6; c++)
    for (int m = 0; m < 4; m++) {
      double sums[1023];
      for (int64_t i = 0; i < counts[c]; i++) sums[i] = exp(4 * unit_normal());
      twin s = twin_of(PG_F64, counts[c], sums), clip = poisoned(PG_F64, 2);
      twin x = normals(PG_F32, 1023, 1), odd = normals(PG_F32, 1024, 1e-37);
      BOTH(clip_factor, P(s), counts[c], norms[m], (pg_clip *)P(clip));
      pg_clip *got = from_gpu(&clip), *want = clip.at[CPU];
      CHECK(got->norm == want->norm && got->factor == want->factor && got->finite == want->finite,
            "norm %.17g, factor %.9g, finite %d; want %.17g, %.9g, %d", got->norm, got->factor,
            got->finite, want->norm, want->factor, want->finite);
      BOTH(clip_apply, (pg_clip *)P(clip), x.n, P(x));
      BOTH(clip_apply, (pg_clip *)P(clip), 1023, F(odd, 1));
      CHECK_SAME("aligned", &x);
      CHECK_SAME("not aligned, small", &odd);
      free(got);
      drop_twins();
    }
}

TEST(clip_refuses_what_is_not_finite) {
  double bad[] = {NAN, INFINITY};
  for (int c = 0; c < 2; c++) {
    double sums[] = {1, bad[c], 2};
    twin s = twin_of(PG_F64, 3, sums), clip = poisoned(PG_F64, 2), x = normals(PG_F32, 37, 1);
    twin before = clone(&x);
    BOTH(clip_factor, P(s), 3, 1.0, (pg_clip *)P(clip));
    BOTH(clip_apply, (pg_clip *)P(clip), 37, P(x));
    pg_clip *got = from_gpu(&clip), *want = clip.at[CPU];
    CHECK(got->finite == 0 && want->finite == 0, "finite is %d", got->finite);
    CHECK(got->factor == want->factor, "factor %g, want %g", got->factor, want->factor);
    void *a = from_gpu(&x), *b = from_gpu(&before);
    CHECK(!memcmp(a, b, twin_bytes(&x)), "x changed");
    free(a), free(b), free(got);
    drop_twins();
  }
}

/* The target of this side: s, w and copy from `at` on; those without elements stay away. */
static pg_target target(const twin *s, const twin *w, const twin *copy, int64_t at, double keep) {
  return (pg_target){.increment = s ? F(*s, at) : NULL,
                     .value = w ? F(*w, at) : NULL,
                     .copy = copy ? (uint16_t *)P(*copy) + at : NULL,
                     .keep = keep};
}

/* What becomes of increments: kept or not, applied or not, with a copy or without. */
static const struct fate {
  bool kept, applied, copied;
} fates[] = {{true, false, false},
             {false, true, false},
             {false, true, true},
             {true, true, false},
             {true, true, true}};
#define FATES (int)(sizeof fates / sizeof *fates)

#define V(x) ((pg_view){F(x, 0), n, 1})
#define V2(x) ((pg_view){F(x, 0), columns, 1})

/* Elements [at, at + n) differ by the relative and absolute bounds at most, and no others do. */
static void check_close(const char *name, const twin *t, int64_t at, int64_t n, double relative,
                        double absolute) {
  void *got = from_gpu(t);
  for (int64_t i = 0; i < t->n; i++) {
    double a = value_of(t->type, got, i), b = value_of(t->type, t->at[CPU], i);
    bool inside = i >= at && i < at + n, same = a == b || (isnan(a) && isnan(b));
    if (inside ? fabs(a - b) <= relative * fabs(b) + absolute : same) continue;
    CHECK(false, "%s: element %lld is %.9g, want %.9g", name, (long long)i, a, b);
    break;
  }
  free(got);
}

TEST(adamw) {
  unit_seed(13);
  for (int c = 0; c < SIZES; c++)
    for (int way = 0; way < 2 * FATES; way++) {
      const int64_t n = sizes[c], offset = way % 2;
      const struct fate f = fates[way / 2];
      /* Gradients from 1e-25 to 1: squares of the small ones are below 2^-126. */
      twin g = normals(PG_F32, n + 1, 1), m = normals(PG_F32, n + 1, 1), v = clone(&m);
      twin s = poisoned(PG_F32, n + 1), exponent = normals(PG_F32, n + 1, 10);
      twin w = normals(PG_F32, n + 1, 1), copy = poisoned(PG_BF16, n + 1);
      BOTH(unary, PG_ABS, ((pg_view){F(v, 0), n + 1, 1}), 1, n + 1, ((pg_view){F(v, 0), n + 1, 1}));
      BOTH(unary, PG_EXP, ((pg_view){F(exponent, 0), n + 1, 1}), 1, n + 1,
           ((pg_view){F(exponent, 0), n + 1, 1}));
      twin scale = twin_of(PG_F32, n + 1, exponent.at[CPU]);
      BOTH(binary, PG_MUL, ((pg_view){F(g, 0), n + 1, 1}), ((pg_view){F(scale, 0), n + 1, 1}), 1,
           n + 1, ((pg_view){F(g, 0), n + 1, 1}));
      for (int step = 1; step <= 3; step++) {
        pg_adamw h = {1e-3, 0.9, 0.999, 1e-8, 1 / (1 - pow(.9, step)), 1 / (1 - pow(.999, step))};
        for (int side = 0; side < 2; side++) {
          side_ = side;
          pg_target to = target(f.kept ? &s : NULL, f.applied ? &w : NULL, f.copied ? &copy : NULL,
                                way % 4 / 2, 1 - 1e-4);
          ON(side, adamw, &h, F(g, offset), n, F(m, 0), F(v, 0), &to);
        }
      }
      CHECK_SAME("m", &m);
      CHECK_SAME("v", &v);
      CHECK_SAME("s", &s);
      CHECK_SAME("w", &w);
      CHECK_SAME("copy", &copy);
      drop_twins();
    }
}

/* The momentum has the CPU's bits. A sum of squares in fp64 in another order may round to the next
 * fp32 number, and quotient and product by it one further each: 3 * 2^-23 of the increment, which
 * is below 1e-3 and moves the weights by as much; a bf16 copy may fall to the other side of a tie.
 * On the device the bits are those of the operations one after the other, up to 8192 columns. */
TEST(rownorm) {
  unit_seed(17);
  const int64_t shapes[][2] = {{1, 1},    {3, 5},    {67, 33},  {9, 1024}, {5, 1025},
                               {3, 1028}, {2, 8192}, {2, 9001}, {1023, 72}};
  const pg_rownorm h = {1e-3, 0.95, 1e-8};
  const double unit = 3 * 0x1p-23;
  for (int c = 0; c < 9; c++)
    for (int way = 0; way < 4 * FATES; way++) {
      const int64_t rows = shapes[c][0], columns = shapes[c][1], n = rows * columns;
      const struct fate f = fates[way / 4];
      const bool given = way & 2;
      const int64_t offset = way % 2;
      if (n > 10000 && way % 3) continue;
      twin g = normals(PG_F32, n + 1, 1e-3), b = normals(PG_F32, n, c % 2 ? 1 : 1e-38);
      twin s = poisoned(PG_F32, n + 1), w = normals(PG_F32, n + 1, 1);
      twin copy = poisoned(PG_BF16, n + 1), b2 = clone(&b), s2 = poisoned(PG_F32, n);
      twin again = clone(&w), norms = poisoned(PG_F32, rows);
      if (c % 2 == 0) BOTH(scalar, PG_MUL, V(g), 0.0, false, 1, n, V(g));
      for (int side = 0; side < 2; side++) {
        side_ = side;
        pg_target to = target(f.kept ? &s : NULL, f.applied ? &w : NULL, f.copied ? &copy : NULL,
                              offset, 1 - 1e-4);
        ON(side, rownorm, &h, given ? NULL : F(g, offset), rows, columns, F(b, 0), &to);
        if (!given)
          ON(side, lerp, V2(b2), ((pg_view){F(g, offset), columns, 1}), 1 - h.beta, rows, columns);
        ON(side, reduce, PG_NORM, V2(b2), rows, columns, 1, P(norms));
        const pg_view per_row = {P(norms), 1, 0};
        ON(side, scalar, PG_ADD, per_row, h.offset, false, rows, 1, per_row);
        ON(side, binary, PG_DIV, V2(b2), per_row, rows, columns, V2(s2));
        ON(side, scalar, PG_MUL, V2(s2), -h.lr, false, rows, columns, V2(s2));
        const pg_target apart = target(NULL, &again, NULL, offset, 1 - 1e-4);
        if (f.applied) ON(side, apply, 1, PG_F32, P(s2), n, 1, &apart);
      }
      CHECK_SAME("momentum", &b);
      if (f.kept) check_close("increments", &s, offset, n, unit, 0);
      if (f.applied) check_close("weights", &w, offset, n, unit, unit * 1e-3);
      if (f.copied) check_close("copy", &copy, offset, n, 0x1p-7, unit * 1e-3);
      if (columns <= 8192) {
        float *one = from_gpu(&s), *two = from_gpu(&s2), *a = from_gpu(&w), *d = from_gpu(&again);
        if (f.kept) CHECK(!memcmp(one + offset, two, (size_t)n * 4), "composed, %d %d", c, way);
        CHECK(!memcmp(a, d, twin_bytes(&w)), "weights of the composition, %d %d", c, way);
        free(one), free(two), free(a), free(d);
      }
      drop_twins();
    }
}

/* Momentum and direction have the CPU's bits; the length is that of the same sum in fp64 in another
 * order, rounded once. More matrices than one launch takes, not all of them aligned. */
TEST(momentum) {
  unit_seed(18);
  for (int c = 0; c < SIZES; c++)
    for (int way = 0; way < 6; way++) {
      const int64_t n = sizes[c], count = n < 1000 ? 131 : 3, offset = way % 2;
      const bool nesterov = way % 3 == 1, alone = way % 3 == 2;
      const double size = c % 2 ? 1 : 1e-37;
      twin g = normals(PG_F32, n * count + 1, size), b = normals(PG_F32, n * count + 1, size);
      twin x = poisoned(PG_F32, n * count + 1), norm = poisoned(PG_F32, count);
      for (int side = 0; side < 2; side++) {
        const float *gradients[131];
        float *buffers[131];
        side_ = side;
        for (int64_t i = 0; i < count; i++)
          gradients[i] = F(g, i * n), buffers[i] = F(b, i * n + offset);
        ON(side, momentum, 0.95, nesterov, count, gradients, buffers, n,
           alone ? NULL : F(x, way / 3), F(norm, 0));
      }
      CHECK_SAME("momentum", &b);
      CHECK_SAME("direction", &x);
      if (!alone) check_close("length", &norm, 0, count, 0x1p-23, 0);
      drop_twins();
    }
}

/* `count` matrices side by side, those of odd size not aligned. */
TEST(apply) {
  unit_seed(14);
  double keeps[] = {1, 1 - 3e-4 * 0.1, 0.5}, factors[] = {1, -0.0123};
  for (int c = 0; c < SIZES; c++)
    for (int way = 0; way < 4 * FATES; way++) {
      const int64_t n = sizes[c], offset = way % 2, count = n < 9000 && way % 3 == 0 ? 67 : 1;
      const struct fate f = fates[way / 4];
      const pg_dtype type = way & 2 ? PG_BF16 : PG_F32;
      const double size = c % 2 ? 1 : 3e-38; /* some below 2^-126 */
      twin w = normals(PG_F32, n * count + 1, size), x = normals(type, n * count + 1, size);
      twin s = poisoned(PG_F32, n * count + 1), copy = poisoned(PG_BF16, n * count + 1);
      for (int side = 0; side < 2; side++) {
        pg_target to[67];
        side_ = side;
        for (int64_t k = 0; k < count; k++)
          to[k] = target(f.kept ? &s : NULL, f.applied ? &w : NULL, f.copied ? &copy : NULL,
                         k * n + way % 4 / 2, keeps[(c + k) % 3]);
        for (int64_t k = 0; k < count; k++) to[k].cautious = (way + c) % 5 == 0;
        ON(side, apply, factors[c / 2 % 2], type,
           (char *)P(x) + (size_t)offset * (type == PG_BF16 ? 2 : 4), n, count, to);
      }
      CHECK_SAME("w", &w);
      CHECK_SAME("s", &s);
      CHECK_SAME("copy", &copy);
      drop_twins();
    }
  for (int s = 0; s < 2; s++)
    CHECK(sides[s].k->apply(sides[s].q, 1, PG_I32, NULL, 0, 0, NULL) == -1 &&
              strstr(sides[s].k->message(sides[s].q), "BF16"),
          "%s", sides[s].k->message(sides[s].q));
}

TEST(signs) {
  const int64_t shapes[][2] = {{1, 1}, {7, 31}, {33, 128}, {5, 129}, {300, 96}};
  for (int c = 0; c < 5; c++) {
    twin x = poisoned(PG_F32, shapes[c][0] * shapes[c][1]);
    BOTH(signs, 0x123456789ull, 7, c * 1000, shapes[c][0], shapes[c][1], P(x));
    CHECK_SAME("signs", &x);
    drop_twins();
  }
}

TEST(convert) {
  unit_seed(15);
  for (int c = 0; c < SIZES; c++)
    for (int offset = 0; offset < 2; offset++) {
      int64_t n = sizes[c];
      twin x = normals(PG_F32, n + 1, 1), half = poisoned(PG_BF16, n + 1);
      twin back = poisoned(PG_F32, n + 1), same = poisoned(PG_F32, n + 1);
      BOTH(convert, PG_F32, F(x, offset), PG_BF16, P(half), n);
      BOTH(convert, PG_BF16, P(half), PG_F32, F(back, offset), n);
      BOTH(convert, PG_F32, P(x), PG_F32, P(same), n);
      CHECK_SAME("to bf16", &half);
      CHECK_SAME("to fp32", &back);
      CHECK_SAME("a copy", &same);
      drop_twins();
    }
  /* Ties to even both ways, the largest numbers, infinities, NaN, the smallest numbers. */
  uint32_t bits[] = {0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff, 0x7f7fffff, 0x7f7f7fff,
                     0x7f800000, 0xff800000, 0x7f800001, 0x7fffffff, 0xffffffff, 0x00000001,
                     0x007fffff, 0x80008000, 0x80018000, 0x00000000, 0x80000000};
  int64_t n = sizeof bits / sizeof *bits;
  twin x = twin_of(PG_F32, n, bits), half = poisoned(PG_BF16, n), back = poisoned(PG_F32, n);
  BOTH(convert, PG_F32, P(x), PG_BF16, P(half), n);
  BOTH(convert, PG_BF16, P(half), PG_F32, P(back), n);
  CHECK_SAME("special numbers to bf16", &half);
  CHECK_SAME("special numbers to fp32", &back);
  drop_twins();
  for (int s = 0; s < 2; s++)
    CHECK(sides[s].k->convert(sides[s].q, PG_F32, NULL, PG_I32, NULL, 0) == -1 &&
              strstr(sides[s].k->message(sides[s].q), "BF16"),
          "%s", sides[s].k->message(sides[s].q));
}

/* Same order of sums as on the CPU. */
TEST(center_rows) {
  unit_seed(16);
  int64_t shapes[][2] = {{1, 1}, {1, 37}, {37, 1}, {63, 18}, {65, 300}, {1023, 5}, {5000, 3}};
  for (int c = 0; c < 7; c++) {
    int64_t n = shapes[c][0] * shapes[c][1];
    twin x = normals(PG_F32, n, 1), y = poisoned(PG_F32, n);
    BOTH(scalar, PG_ADD, ((pg_view){F(x, 0), n, 1}), 100.0, false, 1, n,
         ((pg_view){F(x, 0), n, 1}));
    BOTH(center_rows, P(x), shapes[c][0], shapes[c][1], P(y));
    CHECK_SAME("centred", &y);
    BOTH(center_rows, P(x), shapes[c][0], shapes[c][1], P(x));
    CHECK_SAME("in place", &x);
    drop_twins();
  }
}

int main(void) {
  open_sides();
  RUN(sums);
  RUN(sum_of_nan_and_infinity);
  RUN(clip);
  RUN(clip_refuses_what_is_not_finite);
  RUN(adamw);
  RUN(rownorm);
  RUN(momentum);
  RUN(apply);
  RUN(signs);
  RUN(convert);
  RUN(center_rows);
  return close_sides();
}
