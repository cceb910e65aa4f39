/* The head's geometry as properties that must hold with the library's D (SPEC section 5, GEOMETRY
 * "Property tests"): Hilbert's distance and its supremum over a ball, cross entropies, the backward
 * bounds, total variation. Everything but D is computed here in double precision. */
#include "core/geometry.h"
#include "core/internal.h"
#include "core/random.h"
#include "unit.h"

#include <float.h>

static pg_context *ctx;

enum { V = 60, D = 7 };

/* A head U, an increment S, and D(U), D(S), D(U + S) by the library. */
typedef struct head {
  float u[V * D], s[V * D], after[V * D];
  pg_diameter du, ds, dafter;
} head;

static pg_diameter diameter(const float *x) {
  pg_tensor *t = NULL;
  pg_diameter d = {.value = NAN};
  CHECK(pg_tensor_new(ctx, PG_F32, 2, (int64_t[]){V, D}, &t) == 0 && pg_tensor_write(t, x) == 0,
        "%s", pg_context_message(ctx));
  CHECK(pg_geometry_diameter(t, &d) == 0, "%s", pg_context_message(ctx));
  pg_tensor_free(t);
  return d;
}

static head make_head(uint64_t seed, float u_scale, float s_scale) {
  head h;
  pg_normals(seed, 1, 0, V * D, h.u);
  pg_normals(seed, 2, 0, V * D, h.s);
  for (int i = 0; i < V * D; i++) { /* multiples of 2^-14 below 2^9, so that U + S is exact */
    h.u[i] = rintf(h.u[i] * u_scale * 16384) / 16384;
    h.s[i] = rintf(h.s[i] * s_scale * (i / D % 9 ? 1.0f : 6.0f) * 16384) / 16384;
    h.after[i] = h.u[i] + h.s[i];
  }
  h.du = diameter(h.u);
  h.ds = diameter(h.s);
  h.dafter = diameter(h.after);
  return h;
}

/* z = M h. */
static void logits(const float *m, const double *h, double *z) {
  for (int i = 0; i < V; i++) {
    z[i] = 0;
    for (int j = 0; j < D; j++) z[i] += m[i * D + j] * h[j];
  }
}
static void softmax(const double *z, int n, double *p) {
  double max = z[0], sum = 0;
  for (int i = 1; i < n; i++) max = fmax(max, z[i]);
  for (int i = 0; i < n; i++) sum += p[i] = exp(z[i] - max);
  for (int i = 0; i < n; i++) p[i] /= sum;
}
static double cross_entropy(const double *z, int n, int target) {
  double max = z[0], sum = 0;
  for (int i = 1; i < n; i++) max = fmax(max, z[i]);
  for (int i = 0; i < n; i++) sum += exp(z[i] - max);
  return max + log(sum) - z[target];
}
/* H(softmax a, softmax b), from logits: from probabilities it is NaN when some underflow. */
static double hilbert(const double *a, const double *b, int n) {
  double low = a[0] - b[0], high = low;
  for (int i = 1; i < n; i++) {
    low = fmin(low, a[i] - b[i]);
    high = fmax(high, a[i] - b[i]);
  }
  return high - low;
}
static double total_variation(const double *p, const double *q, int n) {
  double sum = 0;
  for (int i = 0; i < n; i++) sum += fabs(p[i] - q[i]) / 2;
  return sum;
}
static double norm(const double *x, int n) {
  double sum = 0;
  for (int i = 0; i < n; i++) sum += x[i] * x[i];
  return sqrt(sum);
}
/* A hidden state of length `radius`, direction by seed. */
static void hidden(uint64_t seed, double radius, double *h) {
  float f[D];
  pg_normals(seed, 3, 0, D, f);
  for (int j = 0; j < D; j++) h[j] = f[j];
  double length = norm(h, D);
  for (int j = 0; j < D; j++) h[j] *= radius / length;
}

TEST(hilbert_of_logits) {
  const double z[3] = {0, 0, 0}, y[3] = {1, -1, .5}, shifted[3] = {101, 99, 100.5};
  CHECK(hilbert(y, z, 3) == 2, "H of (1, -1, .5)");
  CHECK(fabs(hilbert(shifted, z, 3) - 2) <= 1e-13, "invariant to common shifts");
  double p[3], q[3], low = INFINITY, high = -INFINITY;
  softmax(y, 3, p);
  softmax(z, 3, q);
  for (int i = 0; i < 3; i++) {
    low = fmin(low, log(p[i] / q[i]));
    high = fmax(high, log(p[i] / q[i]));
  }
  CHECK(fabs(high - low - 2) <= 1e-14, "the definition");
}

TEST(supremum_over_a_ball) {
  /* sup over ||h|| <= R of H(p_{U+S}(h), p_U(h)) = R D(S), attained at R (s_i - s_j) / ||.||. */
  for (uint64_t seed = 0; seed < 10; seed++) {
    head m = make_head(seed, 1, .1f);
    double h[D], z[V], R = 3;
    const double none[V] = {0};
    for (int j = 0; j < D; j++)
      h[j] = R * ((double)m.s[m.ds.first * D + j] - m.s[m.ds.second * D + j]) / m.ds.value;
    logits(m.s, h, z);
    CHECK_CLOSE(hilbert(z, none, V), R * m.ds.value, 1e-12);
    for (uint64_t k = 0; k < 200; k++) {
      hidden(seed * 1000 + k, R, h);
      logits(m.s, h, z);
      CHECK(hilbert(z, none, V) <= R * m.ds.value * (1 + 1e-12), "above the supremum");
    }
  }
}

TEST(cross_entropy_moves_by_less_than_hilbert) {
  const double b[3] = {1, 5, 20}, want[3] = {.62011, .98857, 1};
  for (int k = 0; k < 3; k++) { /* H = 1 */
    double z[2] = {-b[k], 0}, y[2] = {-b[k] + 1, 0};
    double change = fabs(cross_entropy(y, 2, 0) - cross_entropy(z, 2, 0));
    CHECK(fabs(change - want[k]) <= 5e-6 && change <= 1, "b = %g: %.6f", b[k], change);
  }
  for (uint64_t seed = 0; seed < 5; seed++) {
    head m = make_head(20 + seed, 1, .3f);
    for (uint64_t k = 0; k < 20; k++) {
      double h[D], z[V], y[V];
      hidden(seed * 100 + k, 4, h);
      logits(m.u, h, z);
      logits(m.after, h, y);
      double distance = hilbert(y, z, V);
      CHECK(distance <= 4 * m.ds.value * (1 + 1e-12), "H <= ||h|| D(S)");
      for (int c = 0; c < V; c++)
        CHECK(fabs(cross_entropy(y, V, c) - cross_entropy(z, V, c)) <= distance + 1e-12,
              "target %d", c);
    }
  }
}

TEST(transposed_product) {
  /* ||S^T r|| <= D(S)/2 ||r||_1 for sum r = 0; equality at e_i - e_j of the farthest pair. */
  for (uint64_t seed = 0; seed < 20; seed++) {
    head m = make_head(40 + seed, 1, 1);
    float f[V];
    double r[V], mean = 0, one = 0, product[D] = {0}, tight[D];
    pg_normals(seed, 5, 0, V, f);
    for (int i = 0; i < V; i++) mean += (r[i] = f[i] * f[i] * f[i]) / V;
    for (int i = 0; i < V; i++) one += fabs(r[i] -= mean);
    for (int i = 0; i < V; i++)
      for (int j = 0; j < D; j++) product[j] += m.s[i * D + j] * r[i];
    CHECK(norm(product, D) <= m.ds.value / 2 * one * (1 + 1e-12), "seed %d", (int)seed);
    for (int j = 0; j < D; j++)
      tight[j] = (double)m.s[m.ds.first * D + j] - m.s[m.ds.second * D + j];
    CHECK_CLOSE(norm(tight, D), m.ds.value / 2 * 2, 1e-14);
  }
}

TEST(total_variation_below_tanh) {
  const double h[2] = {1, 4}, want[2] = {.2449186624, .7615941560};
  for (int k = 0; k < 2; k++) { /* two points with odds e^{+-H/4}: equality */
    double z[2] = {h[k] / 4, -h[k] / 4}, y[2] = {-h[k] / 4, h[k] / 4}, p[2], q[2];
    softmax(z, 2, p);
    softmax(y, 2, q);
    CHECK(fabs(total_variation(p, q, 2) - want[k]) <= 1e-10, "H = %g", h[k]);
    CHECK(fabs(hilbert(z, y, 2) - h[k]) <= 1e-15, "H itself");
    CHECK_CLOSE(total_variation(p, q, 2), tanh(h[k] / 4), 1e-14);
  }
  for (uint64_t k = 0; k < 200; k++) {
    float f[2 * V];
    double z[V], y[V], p[V], q[V];
    pg_normals(k, 6, 0, 2 * V, f);
    for (int i = 0; i < V; i++) z[i] = 4 * f[i], y[i] = z[i] + (k % 10 + .1) * f[V + i];
    softmax(z, V, p);
    softmax(y, V, q);
    CHECK(total_variation(p, q, V) <= tanh(hilbert(z, y, V) / 4) + 1e-15, "k = %d", (int)k);
  }
}

TEST(complete_backward_bound) {
  /* b = U^T (p - e_c), b+ = (U+S)^T (q - e_c), delta = max(Sh) - min(Sh):
   * ||b+ - b|| <= min{ D(S)(1-q_c) + D(U) tanh(delta/4), D(S)(1-p_c) + D(U+S) tanh(delta/4) }. */
  double largest = 0;
  for (uint64_t seed = 0; seed < 12; seed++) {
    head m = make_head(70 + seed, seed % 3 ? 1 : .05f, seed % 2 ? .02f : 2);
    for (uint64_t k = 0; k < 30; k++) {
      double h[D], z[V], y[V], p[V], q[V];
      hidden(seed * 100 + k, pow(10, (double)(k % 4) - 1), h);
      logits(m.u, h, z);
      logits(m.after, h, y);
      softmax(z, V, p);
      softmax(y, V, q);
      double t = tanh(hilbert(y, z, V) / 4);
      for (int c = 0; c < V; c++) {
        double before[D] = {0}, after[D] = {0}, change[D];
        for (int i = 0; i < V; i++)
          for (int j = 0; j < D; j++) {
            before[j] += m.u[i * D + j] * (p[i] - (i == c));
            after[j] += m.after[i * D + j] * (q[i] - (i == c));
          }
        for (int j = 0; j < D; j++) change[j] = after[j] - before[j];
        double bound = fmin(m.ds.value * (1 - q[c]) + m.du.value * t,
                            m.ds.value * (1 - p[c]) + m.dafter.value * t);
        double slack = 1e-10 + 32 * DBL_EPSILON * (norm(before, D) + norm(after, D));
        CHECK(norm(change, D) <= bound + slack, "%.12g > %.12g", norm(change, D), bound);
        largest = fmax(largest, norm(change, D) / (bound + slack));
      }
    }
  }
  printf("  largest change / bound %.6f\n", largest);
  CHECK(largest > .5, "the bound is not vacuous here");
}

int main(void) {
  char message[256];
  pg_context_options options = {.device = unit_device(), .threads = 2};
  if (pg_context_new(&options, &ctx, message, sizeof message) < 0) {
    printf("not ok: %s\n", message);
    return 1;
  }
  RUN(hilbert_of_logits);
  RUN(supremum_over_a_ball);
  RUN(cross_entropy_moves_by_less_than_hilbert);
  RUN(transposed_product);
  RUN(total_variation_below_tanh);
  RUN(complete_backward_bound);
  unit_bad = 0;
  CHECK(pg_context_live_tensors(ctx) == 0, "tensors left");
  unit_failed += unit_bad != 0;
  pg_context_free(ctx);
  return unit_report();
}
