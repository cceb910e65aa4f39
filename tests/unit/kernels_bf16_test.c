/* Kernels on bf16 activations. A kernel computes in fp32 from widened operands and rounds what it
 * stores, so its result is, to the bit, the rounded result of the fp32 kernel on the same operands;
 * the fp32 kernels are measured against fp64 elsewhere. Where sums run in another order (products)
 * or where it is cheap, fp64 is the reference here too.
 *
 * A bf16 has 8 significant bits: rounding errs by at most 2^-8 of a number, and, for mantissas
 * spread evenly in the logarithm, by 2^-7 sqrt(0.541/12) = 2^-9.24 in the mean: 2^-9 bounds the
 * relative error of a vector of a thousand numbers or more. */
#include "kernels_unit.h"

#define ELEMENT_BOUND 0x1p-8
#define VECTOR_BOUND 0x1p-9
/* Of a sum of products whose one factor was rounded as well, over independent random terms: the
 * errors of the terms add as the terms do, VECTOR_BOUND again, and independent of the result's
 * rounding, so both together are sqrt(2) of it. */
#define PRODUCT_BOUND (1.4143 * VECTOR_BOUND)

/* ---- conversion, written anew ----------------------------------------------------------- */
static double widen(uint16_t x) {
  int exponent = x >> 7 & 0xff, mantissa = x & 0x7f;
  double size = exponent == 255 ? (mantissa ? NAN : INFINITY)
                : exponent      ? ldexp(128 + mantissa, exponent - 134)
                                : ldexp(mantissa, -133);
  return x & 0x8000 ? -size : size;
}

/* Nearest multiple of the spacing at x, ties to even; not for NaN. */
static uint16_t narrow(double x) {
  int exponent;
  uint16_t sign = signbit(x) ? 0x8000 : 0;
  frexp(x, &exponent); /* |x| in [2^(exponent-1), 2^exponent) */
  if (x == 0 || exponent < -125) exponent = -125;
  if (isinf(x)) return sign | 0x7f80;
  double units = nearbyint(ldexp(fabs(x), 8 - exponent)); /* of the spacing 2^(exponent-8) */
  if (units == 256) units = 128, exponent++;
  if (exponent > 128) return sign | 0x7f80;
  if (units < 128) return sign | (uint16_t)units; /* denormal */
  return (uint16_t)(sign | (exponent + 126) << 7 | ((int)units - 128));
}

static float with_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

TEST(conversion) {
  static const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
  int64_t n = 65536 * 6;
  float *x = unit_floats(n), *back = unit_poisoned(65536);
  uint16_t *y = malloc((size_t)n * 2), *all = malloc(65536 * 2);
  for (int64_t i = 0; i < n; i++) x[i] = with_bits((uint32_t)(i / 6) << 16 | low[i % 6]);
  for (int64_t i = 0; i < 65536; i++) all[i] = (uint16_t)i;
  KERNEL(convert, PG_F32, x, PG_BF16, y, n);
  int wrong = 0;
  for (int64_t i = 0; i < n; i++) {
    uint16_t upper = (uint16_t)(i / 6);
    /* A NaN keeps its sign and upper bits and becomes quiet. */
    wrong += y[i] != (isnan(x[i]) ? (upper | 0x40) : narrow((double)x[i]));
  }
  CHECK(wrong == 0, "%d of %lld conversions are wrong", wrong, (long long)n);
  KERNEL(convert, PG_BF16, all, PG_F32, back, 65536);
  wrong = 0;
  for (int64_t i = 0; i < 65536; i++) {
    uint32_t bits;
    memcpy(&bits, &back[i], 4);
    wrong += bits != (uint32_t)i << 16;
    if (!isnan(back[i])) wrong += (double)back[i] != widen(all[i]);
  }
  CHECK(wrong == 0, "%d bf16 widen to something else", wrong);
  /* By hand: 1 + 2^-8 is halfway and goes to the even 1; the largest float is past the largest
   * bf16 by almost a spacing; 2^-134 is half the smallest denormal. */
  float hand[] = {1 + 0x1p-8f, 1 + 0x1.8p-7f, 0x1.fffffep127f, 0x1.fep127f, 0x1p-134f, 0x1.8p-134f};
  uint16_t want[] = {0x3f80, 0x3f82, 0x7f80, 0x7f7f, 0, 1}, got[6];
  KERNEL(convert, PG_F32, hand, PG_BF16, got, 6);
  for (int i = 0; i < 6; i++) CHECK(got[i] == want[i], "%a gives %04x", (double)hand[i], got[i]);
  KERNEL(convert, PG_F32, x, PG_F32, back, 65536);
  CHECK(unit_same_bits(x, back, 65536), "a copy differs");
  CHECK(k->convert(q, PG_F64, x, PG_F32, back, 1) == -1, "F64 is not converted");
  free(x), free(y), free(all), free(back);
}

/* ---- pairs of tensors -------------------------------------------------------------------- */
/* The same numbers in both types. */
typedef struct pair {
  float *f;
  uint16_t *h;
} pair;

static pair pair_of(float *f, int64_t n) {
  pair p = {f, malloc((size_t)n * 2 + 1)};
  if (!p.h) abort();
  for (int64_t i = 0; i < n; i++) {
    p.h[i] = narrow((double)f[i]);
    f[i] = (float)widen(p.h[i]);
  }
  return p;
}
static pair normals(int64_t n, double scale) {
  return pair_of(unit_normals(n, scale), n);
}
/* Outputs, poisoned with NaN in both. */
static pair poisoned(int64_t n) {
  pair p = {unit_poisoned(n), malloc((size_t)n * 2 + 1)};
  if (!p.h) abort();
  memset(p.h, 0xff, (size_t)n * 2);
  return p;
}
static void pair_free(pair p) {
  free(p.f), free(p.h);
}
static void check_rounded(const char *what, pair p, int64_t n) {
  int64_t wrong = 0, at = 0;
  for (int64_t i = 0; i < n; i++)
    if (p.h[i] != narrow((double)p.f[i])) wrong++, at = i;
  CHECK(wrong == 0, "%s: %lld of %lld differ; [%lld] is %g, rounded from %g", what,
        (long long)wrong, (long long)n, (long long)at, widen(p.h[at]), (double)p.f[at]);
}
/* Against fp64; slack: what the fp32 arithmetic of an element may err by beside its rounding;
 * bound: the relative error of the whole, when it is a thousand numbers or more. */
static void check_close(const char *what, const uint16_t *got, const double *want, int64_t n,
                        double slack, double bound) {
  double difference = 0, size = 0, worst = 0;
  for (int64_t i = 0; i < n; i++) {
    double e = fabs(widen(got[i]) - want[i]);
    worst = fmax(worst, e - ELEMENT_BOUND * fabs(want[i]));
    difference += e * e;
    size += want[i] * want[i];
  }
  double error = sqrt(difference / size);
  printf("# %-28s error %.2e (bound %.1e)\n", what, error, bound);
  CHECK(worst <= slack, "%s: an element is off by %g more than a rounding", what, worst);
  if (n >= 1000) CHECK(error <= bound, "%s: error %g", what, error);
}

TEST(rmsnorm) {
  unit_seed(41);
  int64_t shapes[][2] = {{1, 1}, {3, 2}, {5, 37}, {4, 64}, {40, 1500}};
  for (int c = 0; c < 5; c++) {
    int64_t rows = shapes[c][0], d = shapes[c][1], n = rows * d;
    pair x = normals(n, 2), y = poisoned(n), dy = normals(n, 1), dx = poisoned(n);
    pair sum = normals(n, 1);
    float *rstd = unit_poisoned(rows), *rstd_h = unit_poisoned(rows);
    double *want = unit_doubles(n);
    for (int64_t i = 0; i < rows; i++) {
      double mean = 0;
      for (int64_t j = 0; j < d; j++) mean += pow((double)x.f[i * d + j], 2) / (double)d;
      for (int64_t j = 0; j < d; j++) want[i * d + j] = x.f[i * d + j] / sqrt(mean + 1e-6);
    }
    KERNEL(rmsnorm_forward, PG_F32, x.f, rows, d, 1e-6f, y.f, rstd);
    KERNEL(rmsnorm_forward, PG_BF16, x.h, rows, d, 1e-6f, y.h, rstd_h);
    check_rounded("rmsnorm", y, n);
    check_close("rmsnorm forward", y.h, want, n, 2 * UNIT_ULP * sqrt((double)d), VECTOR_BOUND);
    CHECK(unit_same_bits(rstd, rstd_h, rows), "the statistics differ");
    KERNEL(rmsnorm_backward, PG_F32, dy.f, x.f, rstd, rows, d, false, dx.f);
    KERNEL(rmsnorm_backward, PG_BF16, dy.h, x.h, rstd, rows, d, false, dx.h);
    check_rounded("rmsnorm backward", dx, n);
    KERNEL(rmsnorm_backward, PG_F32, dy.f, x.f, rstd, rows, d, true, sum.f);
    KERNEL(rmsnorm_backward, PG_BF16, dy.h, x.h, rstd, rows, d, true, sum.h);
    check_rounded("rmsnorm backward, added", sum, n); /* one rounding, after the addition */
    KERNEL(rmsnorm_forward, PG_BF16, x.h, rows, d, 1e-6f, x.h, NULL);
    CHECK(memcmp(x.h, y.h, (size_t)n * 2) == 0, "in place");
    pair_free(x), pair_free(y), pair_free(dy), pair_free(dx), pair_free(sum);
    free(rstd), free(rstd_h), free(want);
  }
}

TEST(qk_norm_rope) {
  unit_seed(42);
  int64_t shapes[][4] = {{1, 1, 1, 2}, {2, 3, 3, 18}, {1, 37, 2, 64}, {3, 5, 1, 72}};
  for (int c = 0; c < 4; c++) {
    int64_t batch = shapes[c][0], time = shapes[c][1], heads = shapes[c][2], hd = shapes[c][3];
    int64_t rows = batch * time, n = rows * heads * hd, half = hd / 2;
    pair x = normals(n, 1.5), y = poisoned(n), dy = normals(n, 1), dx = poisoned(n);
    float *cosine = unit_floats(time * half), *sine = unit_floats(time * half);
    float *rstd = unit_poisoned(rows * heads), *rstd_h = unit_poisoned(rows * heads);
    for (int64_t i = 0; i < time * half; i++) {
      double angle = (double)(i / half) * pow(10000, -2.0 * (double)(i % half) / (double)hd);
      cosine[i] = (float)cos(angle), sine[i] = (float)sin(angle);
    }
    KERNEL(qk_norm_rope_forward, PG_F32, x.f, batch, time, heads, hd, 1e-6f, cosine, sine, y.f,
           rstd);
    KERNEL(qk_norm_rope_forward, PG_BF16, x.h, batch, time, heads, hd, 1e-6f, cosine, sine, y.h,
           rstd_h);
    check_rounded("qk_norm_rope", y, n);
    CHECK(unit_same_bits(rstd, rstd_h, rows * heads), "the statistics differ");
    KERNEL(qk_norm_rope_backward, PG_F32, dy.f, x.f, rstd, batch, time, heads, hd, cosine, sine,
           dx.f);
    KERNEL(qk_norm_rope_backward, PG_BF16, dy.h, x.h, rstd, batch, time, heads, hd, cosine, sine,
           dy.h);
    memcpy(dx.h, dy.h, (size_t)n * 2);
    check_rounded("qk_norm_rope backward, in place", dx, n);
    pair_free(x), pair_free(y), pair_free(dy), pair_free(dx);
    free(cosine), free(sine), free(rstd), free(rstd_h);
  }
}

TEST(swiglu) {
  unit_seed(43);
  int64_t sizes[] = {1, 7, 1023, 1025, 40001};
  for (int c = 0; c < 5; c++) {
    int64_t n = sizes[c];
    pair g = normals(n, 4), u = normals(n, 1), y = poisoned(n), dy = normals(n, 1);
    pair dg = poisoned(n), du = poisoned(n);
    double *want = unit_doubles(n);
    for (int64_t i = 0; i < n; i++) want[i] = g.f[i] / (1 + exp(-(double)g.f[i])) * u.f[i];
    KERNEL(swiglu_forward, PG_F32, g.f, u.f, n, y.f);
    KERNEL(swiglu_forward, PG_BF16, g.h, u.h, n, y.h);
    check_rounded("swiglu", y, n);
    check_close("swiglu forward", y.h, want, n, 6 * UNIT_ULP * 64, VECTOR_BOUND); /* |y| < 64 */
    KERNEL(swiglu_backward, PG_F32, dy.f, g.f, u.f, n, dg.f, du.f);
    KERNEL(swiglu_backward, PG_BF16, dy.h, g.h, u.h, n, g.h, u.h);
    memcpy(dg.h, g.h, (size_t)n * 2), memcpy(du.h, u.h, (size_t)n * 2);
    check_rounded("swiglu dgate, in place", dg, n);
    check_rounded("swiglu dup, in place", du, n);
    pair_free(g), pair_free(u), pair_free(y), pair_free(dy), pair_free(dg), pair_free(du);
    free(want);
  }
}

TEST(embedding) {
  unit_seed(44);
  int64_t n = 300, vocab = 31, d = 1100;
  int32_t tokens[300];
  for (int64_t i = 0; i < n; i++) tokens[i] = (int32_t)(unit_uniform() * (double)vocab);
  pair weight = normals(vocab * d, 1), out = poisoned(n * d), dout = normals(n * d, 1);
  float *dw = unit_normals(vocab * d, 1), *dw_h = unit_clone(dw, vocab * d);
  KERNEL(embedding_forward, PG_F32, tokens, n, weight.f, d, out.f);
  KERNEL(embedding_forward, PG_BF16, tokens, n, weight.h, d, out.h);
  check_rounded("embedding", out, n * d);
  KERNEL(embedding_backward, PG_F32, tokens, n, dout.f, d, vocab, dw);
  KERNEL(embedding_backward, PG_BF16, tokens, n, dout.h, d, vocab, dw_h);
  CHECK(unit_same_bits(dw, dw_h, vocab * d), "the table's gradient is fp32 and differs");
  pair_free(weight), pair_free(out), pair_free(dout), free(dw), free(dw_h);
}

/* fp64 attention of one query over the keys before it. */
static void attend(pair query, pair key, pair value, int64_t heads, int64_t hd, int64_t t,
                   int64_t h, double *out) {
  double sum = 0, *p = unit_doubles(t + 1);
  for (int64_t s = 0; s <= t; s++) {
    for (int64_t j = 0; j < hd; j++)
      p[s] += (double)query.f[(t * heads + h) * hd + j] * key.f[(s * heads + h) * hd + j];
    sum += p[s] = exp(p[s] / sqrt((double)hd));
  }
  for (int64_t j = 0; j < hd; j++) {
    double o = 0;
    for (int64_t s = 0; s <= t; s++) o += p[s] / sum * value.f[(s * heads + h) * hd + j];
    out[(t * heads + h) * hd + j] = o;
  }
  free(p);
}

/* Against the fp32 kernel on the same operands: to the bit, or where scores are rounded to bf16 as
 * operands of products, as near as that leaves it. */
static void check_attention(const char *what, pair p, int64_t n, bool rounds_scores) {
  double *want = unit_doubles(n);
  for (int64_t i = 0; i < n; i++) want[i] = p.f[i];
  /* An element is a sum that may cancel, so only the whole has a bound. */
  if (rounds_scores)
    check_close(what, p.h, want, n, INFINITY, PRODUCT_BOUND);
  else
    check_rounded(what, p, n);
  free(want);
}

TEST(attention) {
  unit_seed(45);
  int64_t shapes[][4] = {/* batch, time, heads, head_dim */
                         {1, 1, 1, 2},   {2, 37, 2, 18},  {1, 65, 2, 72},
                         {3, 64, 1, 64}, {1, 130, 3, 80}, {1, 257, 1, 128}};
  for (int c = 0; c < 6; c++) {
    int64_t batch = shapes[c][0], time = shapes[c][1], heads = shapes[c][2], hd = shapes[c][3];
    int64_t n = batch * time * heads * hd, rows = batch * time * heads;
    const bool tiles = strcmp(unit_level, "amx") == 0 && hd % 32 == 0;
    pair query = normals(n, 1), key = normals(n, 1), value = normals(n, 1), dout = normals(n, 1);
    pair out = poisoned(n), dq = poisoned(n), dk = poisoned(n), dv = poisoned(n);
    float *lse = unit_poisoned(rows), *lse_h = unit_poisoned(rows);
    KERNEL(attention_forward, PG_F32, query.f, key.f, value.f, batch, time, heads, hd, out.f, lse);
    KERNEL(attention_forward, PG_BF16, query.h, key.h, value.h, batch, time, heads, hd, out.h,
           lse_h);
    check_attention("attention", out, n, tiles);
    /* Scores of order one, of products of hd terms: as in kernels_attention_test.c. */
    for (int64_t i = 0; i < rows; i++)
      CHECK(tiles ? fabsf(lse[i] - lse_h[i]) <= 64 * UNIT_ULP : lse[i] == lse_h[i], "lse differs");
    if (batch == 1) {
      double *want = unit_doubles(n);
      for (int64_t t = 0; t < time; t++)
        for (int64_t h = 0; h < heads; h++) attend(query, key, value, heads, hd, t, h, want);
      /* |out| < 4; rounded probabilities add 2^-8 of a mean of |values|, which are below 4 too. */
      check_close("attention forward", out.h, want, n,
                  16 * UNIT_ULP * 4 + (tiles ? 4 * ELEMENT_BOUND : 0),
                  tiles ? PRODUCT_BOUND : VECTOR_BOUND);
      free(want);
    }
    /* The backward pass reads the rounded output. */
    for (int64_t i = 0; i < n; i++) out.f[i] = (float)widen(out.h[i]);
    KERNEL(attention_backward, PG_F32, dout.f, query.f, key.f, value.f, out.f, lse, batch, time,
           heads, hd, dq.f, dk.f, dv.f);
    KERNEL(attention_backward, PG_BF16, dout.h, query.h, key.h, value.h, out.h, lse, batch, time,
           heads, hd, dq.h, dk.h, dv.h);
    check_attention("attention dquery", dq, n, tiles);
    check_attention("attention dkey", dk, n, tiles);
    check_attention("attention dvalue", dv, n, tiles);
    pair_free(query), pair_free(key), pair_free(value), pair_free(dout);
    pair_free(out), pair_free(dq), pair_free(dk), pair_free(dv), free(lse), free(lse_h);
  }
}

TEST(cross_entropy) {
  unit_seed(46);
  int64_t shapes[][3] = {{1, 1, 1}, {3, 2, 3}, {5, 37, 40}, {4, 5003, 5056}};
  for (int c = 0; c < 4; c++) {
    int64_t n = shapes[c][0], v = shapes[c][1], ld = shapes[c][2];
    float *z = unit_normals(n * ld, 5), *zh = unit_clone(z, n * ld);
    float *before = unit_clone(z, n * ld), *loss = unit_poisoned(n), *loss_h = unit_poisoned(n);
    int32_t targets[5];
    for (int64_t i = 0; i < n; i++) targets[i] = (int32_t)(unit_uniform() * (double)v);
    KERNEL(cross_entropy, PG_F32, z, n, v, ld, targets, 0.5f, 0.125f, true, loss);
    KERNEL(cross_entropy, PG_BF16, zh, n, v, ld, targets, 0.5f, 0.125f, true, loss_h);
    CHECK(unit_same_bits(loss, loss_h, n), "the loss depends on the type");
    for (int64_t i = 0; i < n; i++) {
      pair row = {z + i * ld, (uint16_t *)(zh + i * ld)};
      check_rounded("cross entropy gradient", row, v);
      CHECK(unit_same_bits(zh + i * ld + v, before + i * ld + v, ld - v), "padding was written");
    }
    KERNEL(cross_entropy, PG_BF16, before, n, v, ld, targets, 0.5f, 0.125f, false, loss_h);
    CHECK(unit_same_bits(loss, loss_h, n), "the loss depends on the gradient flag");
    free(z), free(zh), free(before), free(loss), free(loss_h);
  }
}

TEST(apply_with_copy) {
  unit_seed(47);
  int64_t sizes[] = {1, 63, 1024, 1025, 50001};
  for (int c = 0; c < 5; c++) {
    int64_t n = sizes[c];
    float *w = unit_normals(n, 1), *s = unit_normals(n, 1e-3), *plain = unit_clone(w, n);
    pair p = poisoned(n);
    free(p.f);
    p.f = w;
    const pg_target alone = {.value = plain, .keep = 1 - 3e-4},
                    both = {.value = w, .copy = p.h, .keep = 1 - 3e-4};
    KERNEL(apply, 1, PG_F32, s, n, 1, &alone);
    KERNEL(apply, 1, PG_F32, s, n, 1, &both);
    CHECK(unit_same_bits(w, plain, n), "the copy changes the weights");
    check_rounded("copy", p, n);
    pair_free(p), free(s), free(plain);
  }
}

/* C = alpha op(A) op(B) + beta C on bf16 operands; slack of leading dimensions filled with NaN. */
static void check_gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t kk, float beta,
                       pg_dtype type_c, int64_t batch) {
  int64_t lda = (ta ? m : kk) + 3, ldb = (tb ? kk : n) + 1, ldc = n + 2;
  int64_t sa = lda * (ta ? kk : m), sb = ldb * (tb ? n : kk), sc = ldc * m;
  pair a = normals(sa * batch + 1, 1), b = normals(sb * batch + 1, 1), c = normals(sc * batch, 1);
  pg_gemm g = {ta,  tb,  m,   n,       kk,      0.5f,   beta,  a.h, b.h, NULL, NULL,
               lda, ldb, ldc, PG_BF16, PG_BF16, type_c, batch, sa,  sb,  sc,   false};
  const bool half = type_c == PG_BF16;
  void *result = half ? (void *)c.h : c.f;
  g.c = result;
  float *before = unit_clone(c.f, sc * batch);
  if (beta == 0)
    for (int64_t i = 0; i < sc * batch; i++)
      if (i % ldc < n) c.h[i] = 0xffff, c.f[i] = NAN; /* beta = 0 never reads C */
  /* First from an addend elsewhere, over NaN; then in place: the same bits. */
  const size_t bytes = (size_t)(sc * batch) * (half ? 2 : 4);
  uint16_t *apart = malloc(bytes);
  memcpy(apart, result, bytes);
  for (int64_t i = 0; i < sc * batch; i++)
    if (i % ldc < n) memset((char *)apart + i * (half ? 2 : 4), 0xff, half ? 2 : 4);
  g.c = apart, g.addend = result;
  KERNEL(gemm, &g);
  g.c = result, g.addend = NULL;
  KERNEL(gemm, &g);
  CHECK(memcmp(apart, result, bytes) == 0, "an addend elsewhere");
  free(apart);
  double worst = 0, difference = 0, size = 0;
  for (int64_t e = 0; e < batch; e++)
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < ldc; j++) {
        int64_t at = e * sc + i * ldc + j;
        double got = type_c == PG_BF16 ? widen(c.h[at]) : (double)c.f[at];
        if (j >= n) {
          CHECK(got == (double)before[at], "slack of C was written");
          continue;
        }
        double want = beta == 0 ? 0 : (double)beta * before[at], magnitude = fabs(want);
        for (int64_t l = 0; l < kk; l++) {
          double x = a.f[e * sa + (ta ? l * lda + i : i * lda + l)];
          double y = b.f[e * sb + (tb ? j * ldb + l : l * ldb + j)];
          want += 0.5 * x * y, magnitude += fabs(0.5 * x * y);
        }
        /* Products of bf16 are exact in fp32; each of the k + 3 sums and scalings rounds once. */
        double bound = (double)(kk + 3) * UNIT_ULP * magnitude;
        if (type_c == PG_BF16) bound += ELEMENT_BOUND * fabs(want);
        worst = fmax(worst, fabs(got - want) - bound);
        difference += (got - want) * (got - want), size += want * want;
      }
  CHECK(worst <= 0, "product %d%d [%lld,%lld,%lld] beta %g type %d: off by %g beyond the bound", ta,
        tb, (long long)m, (long long)n, (long long)kk, (double)beta, (int)type_c, worst);
  if (m * n * batch >= 1000)
    CHECK(sqrt(difference / size) <= (type_c == PG_BF16 ? VECTOR_BOUND : 16 * UNIT_ULP), "error %g",
          sqrt(difference / size));
  pair_free(a), pair_free(b), pair_free(c), free(before);
}

TEST(gemm) {
  unit_seed(48);
  for (int c = 0; c < 8; c++)
    for (int beta = 0; beta < 3; beta++)
      check_gemm(c & 1, c & 2, 33, 47, 29, 0.5f * (float)beta, c & 4 ? PG_BF16 : PG_F32, 1 + c % 3);
  /* Sides beyond one tile, and a sum over several. */
  check_gemm(false, true, 400, 390, 65, 0, PG_BF16, 1);
  check_gemm(true, false, 50, 60, 900, 1, PG_BF16, 1);
  check_gemm(true, true, 523, 18, 1027, 0.5f, PG_BF16, 1);
  check_gemm(false, false, 18, 531, 513, 1, PG_F32, 1);
  check_gemm(false, false, 30, 400, 800, 1, PG_F32, 1);
  check_gemm(false, true, 1, 500, 300, 0, PG_F32, 1);
  check_gemm(false, false, 5, 3, 0, 0.5f, PG_BF16, 1);
}

/* A result too large for the caches, whose rows begin with a line: it may be stored past them. */
TEST(large_gemm) {
  enum { M = 71, N = 60001, K = 5, LD = 60032 };
  unit_seed(49);
  pair a = normals(M * K, 1), b = normals((int64_t)N * K, 1);
  float *c = aligned_alloc(64, (size_t)M * LD * sizeof *c);
  if (!c) abort();
  memset(c, 0xff, (size_t)M * LD * sizeof *c);
  pg_gemm g = {.transpose_b = true, .m = M, .n = N, .k = K, .alpha = 1, .a = a.h, .b = b.h, .c = c};
  g.lda = g.ldb = K, g.ldc = LD, g.type_a = g.type_b = PG_BF16, g.type_c = PG_F32;
  KERNEL(gemm, &g);
  int64_t wrong = 0, written = 0;
  for (int64_t i = 0; i < M; i++) {
    for (int64_t j = 0; j < N; j++) {
      double want = 0, magnitude = 0;
      for (int64_t l = 0; l < K; l++) {
        const double term = (double)a.f[i * K + l] * b.f[j * K + l];
        want += term, magnitude += fabs(term);
      }
      /* Exact products, K sums that round once each. */
      wrong += !(fabs(c[i * LD + j] - want) <= K * UNIT_ULP * magnitude);
    }
    for (int64_t j = N; j < LD; j++) written += !isnan(c[i * LD + j]);
  }
  CHECK(wrong == 0, "%lld of the elements", (long long)wrong);
  CHECK(written == 0, "%lld floats of slack were written", (long long)written);
  pair_free(a), pair_free(b), free(c);
}

int main(void) {
  FOR_EACH_BACKEND {
    RUN(conversion);
    RUN(rmsnorm);
    RUN(qk_norm_rope);
    RUN(swiglu);
    RUN(embedding);
    RUN(attention);
    RUN(cross_entropy);
    RUN(apply_with_copy);
    RUN(gemm);
    RUN(large_gemm);
  }
  return unit_kernels_report();
}
