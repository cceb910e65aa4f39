/* Normalisation, rotary embedding, the gated unit, the loss and the range of logits: each against
 * its equation in fp64, backward kernels against central differences of that equation. */
#include "kernels_unit.h"

/* Central differences of f = sum_i weight_i y_i(x) to x, where `forward` computes y in fp64. The
 * step h leaves an error of about h^2 + 2^-53/h, 1e-8 here, far below the kernels' rounding. */
typedef void forward_fn(const double *x, double *y, const void *shape);
static void differences(forward_fn *forward, const void *shape, const float *x, int64_t n,
                        const float *weight, int64_t outputs, double *gradient) {
  double *at = unit_doubles(n), *plus = unit_doubles(outputs), *minus = unit_doubles(outputs);
  const double h = 1e-4;
  for (int64_t i = 0; i < n; i++) at[i] = x[i];
  for (int64_t i = 0; i < n; i++) {
    double f = 0;
    at[i] = x[i] + h;
    forward(at, plus, shape);
    at[i] = x[i] - h;
    forward(at, minus, shape);
    at[i] = x[i];
    for (int64_t o = 0; o < outputs; o++) f += weight[o] * (plus[o] - minus[o]);
    gradient[i] = f / (2 * h);
  }
  free(at), free(plus), free(minus);
}

typedef struct shape {
  int64_t n, d, heads, time;
  double eps;
  const float *cosine, *sine;
} shape;

static void rmsnorm64(const double *x, double *y, const void *data) {
  const shape *s = data;
  for (int64_t i = 0; i < s->n; i++) {
    double sum = 0;
    for (int64_t j = 0; j < s->d; j++) sum += x[i * s->d + j] * x[i * s->d + j];
    double r = 1 / sqrt(sum / (double)s->d + s->eps);
    for (int64_t j = 0; j < s->d; j++) y[i * s->d + j] = x[i * s->d + j] * r;
  }
}

TEST(rmsnorm) {
  unit_seed(21);
  int64_t shapes[][2] = {{1, 1}, {3, 2}, {5, 37}, {4, 64}, {300, 130}};
  for (int c = 0; c < 5; c++) {
    shape s = {.n = shapes[c][0], .d = shapes[c][1], .eps = (double)1e-6f};
    int64_t n = s.n * s.d;
    float *x = unit_normals(n, 2), *y = unit_poisoned(n), *rstd = unit_poisoned(s.n);
    double *want = unit_doubles(n);
    double *xd = unit_doubles(n);
    for (int64_t i = 0; i < n; i++) xd[i] = x[i];
    rmsnorm64(xd, want, &s);
    KERNEL(rmsnorm_forward, PG_F32, x, s.n, s.d, 1e-6f, y, rstd);
    /* One rounding of r and one of the product. */
    CHECK_ERROR("rmsnorm forward", y, want, n, 2 * UNIT_ULP);
    float *copy = unit_clone(x, n);
    KERNEL(rmsnorm_forward, PG_F32, copy, s.n, s.d, 1e-6f, copy, NULL);
    CHECK(unit_same_bits(copy, y, n), "in place, without rstd");
    if (n <= 2000) {
      float *dy = unit_normals(n, 1), *dx = unit_poisoned(n), *sum = unit_normals(n, 1);
      float *base = unit_clone(sum, n);
      double *gradient = unit_doubles(n), scale = 0;
      differences(rmsnorm64, &s, x, n, dy, n, gradient);
      KERNEL(rmsnorm_backward, PG_F32, dy, x, rstd, s.n, s.d, false, dx);
      /* r dy and the projection each carry a few roundings, and for d <= 2 they nearly cancel:
       * measured against the size of r dy. */
      for (int64_t i = 0; i < n; i++) scale += pow((double)dy[i] * rstd[i / s.d], 2);
      double error = 0;
      for (int64_t i = 0; i < n; i++) error += pow((double)dx[i] - gradient[i], 2);
      printf("# %-28s error %.2e (bound %.1e)\n", "rmsnorm backward", sqrt(error / scale),
             4 * UNIT_ULP + 1e-8);
      CHECK(sqrt(error / scale) <= 4 * UNIT_ULP + 1e-8, "error %g", sqrt(error / scale));
      KERNEL(rmsnorm_backward, PG_F32, dy, x, rstd, s.n, s.d, true, sum);
      int wrong = 0;
      for (int64_t i = 0; i < n; i++) wrong += sum[i] != base[i] + dx[i];
      CHECK(!wrong, "`add` differs from adding in %d elements", wrong);
      free(dy), free(dx), free(sum), free(base), free(gradient);
    }
    free(x), free(y), free(rstd), free(want), free(xd), free(copy);
  }
}

TEST(rmsnorm_by_hand) {
  /* mean(x^2) = 12.5 and eps = 3.5: r = 1/4. A zero row stays zero. */
  float x[] = {3, 4, 0, 0}, y[4] = {NAN, NAN, NAN, NAN}, rstd[2];
  KERNEL(rmsnorm_forward, PG_F32, x, 2, 2, 3.5f, y, rstd);
  CHECK(y[0] == 0.75f && y[1] == 1.0f && y[2] == 0 && y[3] == 0, "%g %g", y[0], y[1]);
  CHECK(rstd[0] == 0.25f, "rstd %g", rstd[0]);
  /* dy = (1, 0): dx = r (dy - x r^2 (dy.x)/2) = .25 (1 - 3/16*1.5, -4/16*1.5). */
  float dy[] = {1, 0}, dx[2] = {NAN, NAN};
  KERNEL(rmsnorm_backward, PG_F32, dy, x, rstd, 1, 2, false, dx);
  CHECK(dx[0] == 0.1796875f && dx[1] == -0.09375f, "%g %g", dx[0], dx[1]);
}

static void rope64(const double *x, double *y, const void *data) {
  const shape *s = data;
  int64_t half = s->d / 2;
  for (int64_t i = 0; i < s->n; i++)
    for (int64_t h = 0; h < s->heads; h++) {
      const double *l = x + (i * s->heads + h) * s->d;
      double *o = y + (i * s->heads + h) * s->d, sum = 0;
      for (int64_t j = 0; j < s->d; j++) sum += l[j] * l[j];
      double r = 1 / sqrt(sum / (double)s->d + s->eps);
      for (int64_t j = 0; j < half; j++) {
        double c = s->cosine[i % s->time * half + j], n = s->sine[i % s->time * half + j];
        o[j] = r * (l[j] * c - l[half + j] * n);
        o[half + j] = r * (l[half + j] * c + l[j] * n);
      }
    }
}

TEST(qk_norm_rope) {
  unit_seed(22);
  int64_t shapes[][4] = {/* batch, time, heads, head_dim */
                         {1, 1, 1, 2},  {2, 3, 3, 18}, {1, 37, 2, 64},
                         {3, 5, 1, 72}, {1, 4, 2, 80}, {2, 2, 1, 128}};
  for (int c = 0; c < 6; c++) {
    int64_t batch = shapes[c][0], time = shapes[c][1], heads = shapes[c][2], hd = shapes[c][3];
    shape s = {.n = batch * time, .d = hd, .heads = heads, .time = time, .eps = (double)1e-6f};
    int64_t n = s.n * heads * hd, half = hd / 2;
    float *x = unit_normals(n, 1.5), *cosine = unit_floats(time * half);
    float *sine = unit_floats(time * half);
    for (int64_t i = 0; i < time * half; i++) {
      double angle = (double)(i / half) * pow(10000, -2.0 * (double)(i % half) / (double)hd);
      cosine[i] = (float)cos(angle);
      sine[i] = (float)sin(angle);
    }
    s.cosine = cosine, s.sine = sine;
    float *y = unit_poisoned(n), *rstd = unit_poisoned(s.n * heads);
    double *xd = unit_doubles(n), *want = unit_doubles(n);
    for (int64_t i = 0; i < n; i++) xd[i] = x[i];
    rope64(xd, want, &s);
    KERNEL(qk_norm_rope_forward, PG_F32, x, batch, time, heads, hd, 1e-6f, cosine, sine, y, rstd);
    /* r, the scaled pair, two products, a sum: the vectors' lengths are kept by the rotation. */
    CHECK_ERROR("qk_norm_rope forward", y, want, n, 4 * UNIT_ULP);
    float *dy = unit_normals(n, 1), *dx = unit_poisoned(n);
    KERNEL(qk_norm_rope_backward, PG_F32, dy, x, rstd, batch, time, heads, hd, cosine, sine, dx);
    double *gradient = unit_doubles(n), scale = 0, error = 0;
    differences(rope64, &s, x, n, dy, n, gradient);
    for (int64_t i = 0; i < n; i++) {
      scale += pow((double)dy[i] * rstd[i / hd], 2);
      error += pow((double)dx[i] - gradient[i], 2);
    }
    printf("# %-28s error %.2e (bound %.1e)\n", "qk_norm_rope backward", sqrt(error / scale),
           6 * UNIT_ULP + 1e-8);
    CHECK(sqrt(error / scale) <= 6 * UNIT_ULP + 1e-8, "head_dim %lld: error %g", (long long)hd,
          sqrt(error / scale));
    float *in_place = unit_clone(dy, n);
    KERNEL(qk_norm_rope_backward, PG_F32, in_place, x, rstd, batch, time, heads, hd, cosine, sine,
           in_place);
    CHECK(unit_same_bits(in_place, dx, n), "in place");
    free(x), free(cosine), free(sine), free(y), free(rstd), free(xd), free(want), free(dy);
    free(dx), free(gradient), free(in_place);
  }
}

TEST(rope_half_split_by_hand) {
  /* x = (1,2,3,4) turned by a quarter is (-3,-4,1,2), not (-2,1,-4,3); mean(x^2) = 7.5 and
   * eps = 8.5 scale it by 1/4. */
  float x[] = {1, 2, 3, 4}, cosine[] = {0, 0}, sine[] = {1, 1}, y[4], rstd[1];
  KERNEL(qk_norm_rope_forward, PG_F32, x, 1, 1, 1, 4, 8.5f, cosine, sine, y, rstd);
  CHECK(y[0] == -0.75f && y[1] == -1 && y[2] == 0.25f && y[3] == 0.5f, "%g %g %g %g", y[0], y[1],
        y[2], y[3]);
  /* dx = r (dn - x r^2 mean(dn.x)) with dn = dy turned back; dy = (0,0,1,0) gives dn = (1,0,0,0),
   * so dx = .25 (dn - x / 64). */
  float dy[] = {0, 0, 1, 0}, dx[4];
  KERNEL(qk_norm_rope_backward, PG_F32, dy, x, rstd, 1, 1, 1, 4, cosine, sine, dx);
  CHECK(dx[0] == 0.24609375f && dx[1] == -0.0078125f && dx[2] == -0.01171875f &&
            dx[3] == -0.015625f,
        "%g %g %g %g", dx[0], dx[1], dx[2], dx[3]);
}

TEST(swiglu) {
  unit_seed(23);
  int64_t sizes[] = {1, 7, 64, 1000, 40001};
  for (int c = 0; c < 5; c++) {
    int64_t n = sizes[c];
    float *g = unit_normals(n, 4), *u = unit_normals(n, 1), *y = unit_poisoned(n);
    float *dy = unit_normals(n, 1), *dg = unit_poisoned(n), *du = unit_poisoned(n);
    g[0] = c ? 0 : -3;
    if (n > 20) g[1] = 200, g[2] = -200, g[3] = 1e-20f, g[4] = 88.9f, g[5] = -88.9f;
    double *want = unit_doubles(n), *wg = unit_doubles(n), *wu = unit_doubles(n);
    const double h = 1e-4;
    for (int64_t i = 0; i < n; i++) {
      double x = g[i];
      want[i] = x / (1 + exp(-x)) * u[i];
      wu[i] = dy[i] * (x / (1 + exp(-x)));
      wg[i] = dy[i] * u[i] * ((x + h) / (1 + exp(-x - h)) - (x - h) / (1 + exp(-x + h))) / (2 * h);
    }
    KERNEL(swiglu_forward, PG_F32, g, u, n, y);
    /* exp 1.1 ulp = 2.2u, the sum, the quotient, the product. */
    CHECK_ERROR("swiglu forward", y, want, n, 6 * UNIT_ULP);
    KERNEL(swiglu_backward, PG_F32, dy, g, u, n, dg, du);
    CHECK_ERROR("swiglu dup", du, wu, n, 8 * UNIT_ULP);
    /* Differences are good to h^2/6 times the third derivative of silu (at most 0.5). */
    CHECK_ERROR("swiglu dgate", dg, wg, n, 10 * UNIT_ULP + 1e-8);
    float *g2 = unit_clone(g, n), *u2 = unit_clone(u, n);
    KERNEL(swiglu_backward, PG_F32, dy, g2, u2, n, g2, u2);
    CHECK(unit_same_bits(g2, dg, n) && unit_same_bits(u2, du, n), "in place");
    g[0] = NAN;
    KERNEL(swiglu_forward, PG_F32, g, u, n, y);
    CHECK(isnan(y[0]), "NaN is lost");
    free(g), free(u), free(y), free(dy), free(dg), free(du), free(want), free(wg), free(wu);
    free(g2), free(u2);
  }
}

TEST(cross_entropy) {
  unit_seed(24);
  int64_t shapes[][3] = {{1, 1, 1}, {3, 2, 2}, {5, 37, 40}, {9, 1024, 1024}, {4, 5003, 5056}};
  double spreads[] = {1, 5, 30};
  float logit_scales[] = {1, 0.25f, -2};
  for (int c = 0; c < 15; c++) {
    int64_t n = shapes[c % 5][0], v = shapes[c % 5][1], ld = shapes[c % 5][2];
    float ls = logit_scales[c / 5], scale = 0.125f;
    float *z = unit_normals(n * ld, spreads[c / 5]), *loss = unit_poisoned(n);
    int32_t *targets = malloc((size_t)n * sizeof *targets);
    for (int64_t i = 0; i < n; i++) {
      targets[i] = (int32_t)(unit_uniform() * (double)v);
      for (int64_t j = v; j < ld; j++) z[i * ld + j] = NAN; /* padding: never read */
    }
    float *before = unit_clone(z, n * ld), *loss2 = unit_poisoned(n);
    KERNEL(cross_entropy, PG_F32, z, n, v, ld, targets, ls, scale, false, loss);
    CHECK(unit_same_bits(z, before, n * ld), "logits changed without a gradient");
    KERNEL(cross_entropy, PG_F32, z, n, v, ld, targets, ls, scale, true, loss2);
    CHECK(unit_same_bits(loss, loss2, n), "the loss depends on the gradient flag");
    for (int64_t i = 0; i < n; i++) {
      const float *row = before + i * ld;
      double top = -INFINITY, sum = 0, worst = 0;
      for (int64_t j = 0; j < v; j++) top = fmax(top, (double)ls * row[j]);
      for (int64_t j = 0; j < v; j++) sum += exp((double)ls * row[j] - top);
      double want = log(sum) + top - (double)ls * row[targets[i]];
      /* ls z and its difference to the maximum round once each: 2u max|ls z|; the sum is good to
       * 2.2u for exp, and at most 64 roundings of a lane of a block. The fp32 result rounds. */
      double size = 0;
      for (int64_t j = 0; j < v; j++) size = fmax(size, fabs((double)ls * row[j]));
      double bound = UNIT_ULP * (3 * size + 8 + fabs(want));
      CHECK(fabs((double)loss[i] - want) <= bound, "loss %.9g, want %.9g", (double)loss[i], want);
      double total = 0;
      for (int64_t j = 0; j < v; j++) {
        double p = exp((double)ls * row[j] - top) / sum - (j == targets[i]);
        worst = fmax(worst, fabs((double)z[i * ld + j] - p * (double)scale * ls));
        total += z[i * ld + j];
      }
      bound = UNIT_ULP * (3 * size + 8) * fabs((double)scale * ls);
      CHECK(worst <= bound, "gradient off by %g, bound %g", worst, bound);
      CHECK(fabs(total) <= 4 * bound, "the gradient's sum %g is not 0", total);
    }
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = v; j < ld; j++) CHECK(isnan(z[i * ld + j]), "padding was written");
    free(z), free(loss), free(loss2), free(targets), free(before);
  }
}

TEST(cross_entropy_by_hand) {
  /* z = (0, log 3): p = (1/4, 3/4). Target 0: loss log 4, gradient (-3/4, 3/4). */
  float z[] = {0, 1.0986123f}, loss[1];
  int32_t target[] = {0};
  KERNEL(cross_entropy, PG_F32, z, 1, 2, 2, target, 1, 1, true, loss);
  CHECK_CLOSE(loss[0], 1.3862943611198906, 1e-6);
  CHECK_CLOSE(z[0], -0.75, 1e-6);
  CHECK_CLOSE(z[1], 0.75, 1e-6);
  /* Logits that exponentials of which overflow, and one that is certain: loss 0, not -0 or NaN. */
  float far[] = {1000, -1000, 0};
  KERNEL(cross_entropy, PG_F32, far, 1, 3, 3, target, 1, 1, true, loss);
  CHECK(loss[0] == 0 && far[0] == 0 && far[1] == 0 && far[2] == 0, "loss %g", (double)loss[0]);
  float bad[] = {1, NAN, 0, INFINITY, 0, 0};
  float losses[2];
  int32_t targets[] = {0, 1};
  KERNEL(cross_entropy, PG_F32, bad, 2, 3, 3, targets, 1, 1, true, losses);
  CHECK(!isfinite(losses[0]) && !isfinite(losses[1]), "%g %g", losses[0], losses[1]);
}

/* A sum over 50257 columns must not lose digits: all logits equal give exactly log V. */
TEST(cross_entropy_large_vocabulary) {
  int64_t v = 50257;
  float *z = unit_floats(v), loss[1];
  int32_t target[] = {50256};
  for (int64_t j = 0; j < v; j++) z[j] = 0.3f;
  KERNEL(cross_entropy, PG_F32, z, 1, v, v, target, 1, 1, false, loss);
  CHECK_CLOSE(loss[0], log(50257.0), UNIT_ULP);
  free(z);
}

TEST(row_range) {
  /* Ranges 6 and 4; the padding columns are not read. */
  float z[] = {1, -2, 4, NAN, 3, 3, -1, INFINITY}, out[2] = {NAN, NAN};
  KERNEL(row_range, z, 2, 3, 4, out);
  CHECK(out[0] == 6 && out[1] == 4, "%g %g", out[0], out[1]);
  unit_seed(25);
  int64_t v = 10007;
  float *x = unit_normals(3 * v, 1), want[3];
  for (int i = 0; i < 3; i++) {
    float max = x[i * v], min = x[i * v];
    for (int64_t j = 0; j < v; j++) max = fmaxf(max, x[i * v + j]), min = fminf(min, x[i * v + j]);
    want[i] = max - min;
  }
  float got[3] = {NAN, NAN, NAN};
  KERNEL(row_range, x, 3, v, v, got);
  CHECK(unit_same_bits(got, want, 3), "%g %g %g", got[0], got[1], got[2]);
  x[5] = NAN, x[v + 9000] = -INFINITY;
  KERNEL(row_range, x, 3, v, v, got);
  CHECK(isnan(got[0]) && isnan(got[1]) && got[2] == want[2], "non-finite logits must show");
  free(x);
}

int main(void) {
  FOR_EACH_BACKEND {
    RUN(rmsnorm);
    RUN(rmsnorm_by_hand);
    RUN(qk_norm_rope);
    RUN(rope_half_split_by_hand);
    RUN(swiglu);
    RUN(cross_entropy);
    RUN(cross_entropy_by_hand);
    RUN(cross_entropy_large_vocabulary);
    RUN(row_range);
  }
  return unit_kernels_report();
}
