/* The functional size of a change of the head (core/functional.c): against long double on random
 * heads, the exact values of SPEC section 5 and GEOMETRY, its bounds, and over the golden panel.
 * PG_TEST_DEVICE=cuda: on another device. */
#include "core/functional.h"
#include "core/panel.h"
#include "golden_support.h"

#include <float.h>

static pg_context *ctx;

/* Heads u, s [v, d], states h [n, d] and targets on the host; `before` as in the options. */
typedef struct setup {
  int64_t v, d, n;
  const float *u, *s, *h;
  const int32_t *targets;
  double scale;
  bool before;
} setup;

static int measure(const setup *x, bool backward, pg_functional *out, pg_change *changes) {
  pg_tensor *u = make_matrix(ctx, x->u, x->v, x->d), *s = make_matrix(ctx, x->s, x->v, x->d),
            *h = make_matrix(ctx, x->h, x->n, x->d);
  const pg_functional_options o = {.before = x->before, .backward = backward};
  int status = pg_functional_states(u, s, h, x->targets, x->scale, &o, out, changes);
  pg_tensor_free(u);
  pg_tensor_free(s);
  pg_tensor_free(h);
  return status;
}

/* Whole multiples of `unit` up to 2^6 units: sums of a few hundred products of two of them are
 * exact in fp32, so that logits have no error and what is left is that of the statistics. */
static float *exact(uint64_t stream, int64_t count, double unit) {
  float *x = malloc((size_t)count * sizeof *x);
  if (!x) abort();
  pg_normals(11, stream, 0, (size_t)count, x);
  for (int64_t i = 0; i < count; i++)
    x[i] = (float)(fmax(-64, fmin(64, rint(16 * (double)x[i]))) * unit);
  return x;
}

/* ---- against long double ------------------------------------------------------------------- */
typedef long double real;

static real log_sum(const real *z, int64_t v) {
  real top = z[0], sum = 0;
  for (int64_t i = 0; i < v; i++) top = fmaxl(top, z[i]);
  for (int64_t i = 0; i < v; i++) sum += expl(z[i] - top);
  return top + logl(sum);
}

static real diameter(const float *u, const float *s, real sign, int64_t v, int64_t d) {
  real most = 0;
  for (int64_t i = 0; i < v; i++)
    for (int64_t j = 0; j < i; j++) {
      real sum = 0;
      for (int64_t k = 0; k < d; k++) {
        const real a = (u ? (real)u[i * d + k] : 0) + sign * (s ? (real)s[i * d + k] : 0);
        const real b = (u ? (real)u[j * d + k] : 0) + sign * (s ? (real)s[j * d + k] : 0);
        sum += (a - b) * (a - b);
      }
      most = fmaxl(most, sum);
    }
  return sqrtl(most);
}

/* The definitions as they are written. Allocated: everything of position i. */
static void reference(const setup *x, int64_t at, pg_change *out) {
  const int64_t v = x->v, d = x->d, c = x->targets[at];
  real *z = malloc((size_t)(4 * v) * sizeof *z), *y = z + v, *p = y + v, *q = p + v;
  real mean = 0, bhattacharyya = 0, hp = 0, hq = 0, kl = 0, tv = 0, squares = 0;
  if (!z) abort();
  *out = (pg_change){.target = c};
  for (int64_t i = 0; i < v; i++) {
    real a = 0, b = 0;
    for (int64_t k = 0; k < d; k++) {
      a += (real)x->u[i * d + k] * x->h[at * d + k];
      b += (real)x->s[i * d + k] * x->h[at * d + k];
    }
    a *= x->scale, b *= x->scale;
    z[i] = x->before ? a : a - b;
    y[i] = x->before ? a + b : a;
  }
  const real log_z = log_sum(z, v), log_y = log_sum(y, v);
  real low = INFINITY, high = -INFINITY;
  for (int64_t i = 0; i < v; i++) {
    const real step = y[i] - z[i], lp = z[i] - log_z, lq = y[i] - log_y;
    if (step > high) high = step, out->high = i;
    if (step < low) low = step, out->low = i;
    mean += step / v;
    p[i] = expl(lp), q[i] = expl(lq);
    bhattacharyya += expl((lp + lq) / 2);
    kl += p[i] * (lp - lq);
    tv += fabsl(q[i] - p[i]) / 2;
    hp -= p[i] * lp, hq -= q[i] * lq;
  }
  for (int64_t i = 0; i < v; i++) squares += (y[i] - z[i] - mean) * (y[i] - z[i] - mean);
  out->range = (double)(high - low);
  out->kl = (double)kl;
  out->tv = (double)tv;
  out->aitchison = (double)sqrtl(squares);
  out->fisher_rao = (double)(2 * acosl(fminl(1, bhattacharyya)));
  out->entropy = (double)hp;
  out->entropy_change = (double)(hq - hp);
  out->loss = (double)(log_z - z[c]);
  out->loss_change = (double)((log_y - y[c]) - (log_z - z[c]));
  real descent = 0, gradient = 0;
  for (int64_t i = 0; i < v; i++) {
    const real g = p[i] - (i == c);
    descent -= g * (y[i] - z[i]);
    gradient += g * g;
  }
  if (squares > 0) out->gradient_cosine = (double)(descent / sqrtl(squares * gradient));
  /* b+ - b, and its two parts */
  real whole = 0, rows = 0, flow = 0;
  for (int64_t k = 0; k < d; k++) {
    real b = 0, next = 0, r = 0, f = 0;
    for (int64_t i = 0; i < v; i++) {
      const real s = x->s[i * d + k], head = x->u[i * d + k], one = i == c;
      const real u = x->before ? head : head - s;
      b += u * (p[i] - one), next += (u + s) * (q[i] - one);
      r += s * ((x->before ? q[i] : p[i]) - one);
      f += head * (q[i] - p[i]);
    }
    whole += (next - b) * (next - b), rows += r * r, flow += f * f;
  }
  const real t = tanhl((high - low) / 4), scale = fabs(x->scale);
  const real ds = scale * diameter(NULL, x->s, 1, v, d);
  const real du = scale * diameter(x->u, x->s, x->before ? 0 : -1, v, d);
  const real da = scale * diameter(x->u, x->s, x->before ? 1 : 0, v, d);
  out->backward = (double)(scale * sqrtl(whole));
  out->rows = (double)(scale * sqrtl(rows));
  out->flow = (double)(scale * sqrtl(flow));
  out->backward_bound[0] = (double)(ds * (1 - q[c]) + du * t);
  out->backward_bound[1] = (double)(ds * (1 - p[c]) + da * t);
  out->rows_bound = (double)(ds * (1 - (x->before ? q : p)[c]));
  out->flow_bound = (double)((x->before ? du : da) * t);
  free(z);
}

#define NEAR(name, slack)                                                                          \
  CHECK(fabs(got.name - want.name) <= 1e-12 * fabs(want.name) + (slack),                           \
        "%s of position %d (V %d, d %d): %.17g, want %.17g", #name, (int)i, (int)x->v, (int)x->d,  \
        got.name, want.name)

static void compare(const setup *x, pg_change *changes) {
  pg_functional sizes;
  MUST(ctx, measure(x, true, &sizes, changes));
  for (int64_t i = 0; i < x->n; i++) {
    pg_change want, got = changes[i];
    reference(x, i, &want);
    CHECK(got.target == want.target && got.high == want.high && got.low == want.low, "tokens");
    /* Logits to about 2^9 are exact; log Z has an error of their last bit in fp64, and so have the
     * logarithms of probabilities. */
    const double ulp = 0x1p9 * DBL_EPSILON;
    NEAR(range, 0);
    NEAR(aitchison, 1e-15);
    /* At most ||p - e_c|| times as far off as the products of p and steps are. */
    NEAR(gradient_cosine, 8 * ulp);
    NEAR(loss, ulp);
    NEAR(loss_change, ulp);
    NEAR(entropy, 8 * ulp);
    NEAR(entropy_change, 8 * ulp);
    NEAR(tv, ulp);
    /* In the reference log p - log q, of the size of log V, cancels. */
    NEAR(kl, ulp * want.range + 64 * LDBL_EPSILON);
    /* The reference loses half the digits of a short length: arccos near 1 in long double. */
    NEAR(fisher_rao, 4 * ulp + 8 * sqrt(LDBL_EPSILON));
    /* Two products in fp32 of rows up to V long with residuals rounded to fp32. */
    const double fp32 = UNIT_ROUNDOFF * (4 + sqrt((double)x->v)) * 4;
    CHECK(fabs(got.backward - want.backward) <= fp32 * (want.rows_bound + 2 * want.flow_bound),
          "backward %g, want %g", got.backward, want.backward);
    CHECK(fabs(got.rows - want.rows) <= fp32 * want.rows_bound, "rows %g, %g", got.rows, want.rows);
    CHECK(fabs(got.flow - want.flow) <= fp32 * 2 * want.flow_bound, "flow %g, %g", got.flow,
          want.flow);
    for (int k = 0; k < 2; k++)
      CHECK(fabs(got.backward_bound[k] - want.backward_bound[k]) <=
                1e-6 * want.backward_bound[k] + ulp,
            "bound %d: %g, %g", k, got.backward_bound[k], want.backward_bound[k]);
  }
}

/* What must hold whatever the numbers. */
static void bounds(const pg_change *c, int64_t v, double d_step, double norm) {
  const double slack = 1e-10; /* GEOMETRY's; a bound may be attained */
  CHECK(fabs(c->loss_change) <= c->range + slack, "the loss moves by %g, H is %g", c->loss_change,
        c->range);
  CHECK(c->tv <= tanh(c->range / 4) + slack, "TV %g, H %g", c->tv, c->range);
  CHECK(c->range <= norm * d_step * (1 + 1e-6) + slack, "H = %g above ||h|| D = %g", c->range,
        norm * d_step);
  CHECK(c->aitchison >= c->range / sqrt(2) * (1 - slack) &&
            c->aitchison <= c->range * sqrt((double)v) / 2 * (1 + slack),
        "Aitchison %g, H %g", c->aitchison, c->range);
  CHECK(c->fisher_rao <= acos(-1) + slack && c->fisher_rao >= 2 * c->tv - slack, "Fisher-Rao %g",
        c->fisher_rao);
  CHECK(c->kl >= 2 * c->tv * c->tv - slack, "Pinsker: KL %g, TV %g", c->kl, c->tv);
  /* Products in fp32: a part in 10^5 covers the sums here. */
  const double least = fmin(c->backward_bound[0], c->backward_bound[1]);
  CHECK(c->backward <= least * (1 + 1e-5) + slack, "b moves by %g > %g", c->backward, least);
  CHECK(c->rows <= c->rows_bound * (1 + 1e-5) + slack, "%g > %g", c->rows, c->rows_bound);
  CHECK(c->flow <= c->flow_bound * (1 + 1e-5) + slack, "%g > %g", c->flow, c->flow_bound);
}

TEST(random_heads) {
  const struct {
    int64_t v, d, n;
    double unit, step, scale;
    bool before;
  } cases[] = {
      {1, 1, 1, 0x1p-4, 0x1p-4, 1, true},      {1, 3, 2, 0x1p-4, 0x1p-4, 1, false},
      {2, 1, 1, 0x1p-4, 0x1p-4, 1, true},      {7, 3, 1, 0x1p-4, 0x1p-4, 1, false},
      {61, 5, 9, 0x1p-4, 0x1p-4, -.5, true},   {97, 13, 4, 0x1p-5, 0x1p-5, 2, false},
      {257, 17, 5, 0x1p-5, 0x1p-16, 1, true},  {101, 9, 3, 0x1p-6, 0x1p-30, 1, true},
      {1031, 3, 6, 0x1p-4, 0x1p-12, 1, false}, {64, 64, 2, 0x1p-6, 0x1p-3, 1, true},
  };
  double used = 0;
  for (size_t k = 0; k < PG_COUNT(cases); k++) {
    const int64_t v = cases[k].v, d = cases[k].d, n = cases[k].n;
    float *u = exact(3 * k, v * d, cases[k].unit), *s = exact(3 * k + 1, v * d, cases[k].step),
          *h = exact(3 * k + 2, n * d, 0x1p-4);
    int32_t *targets = make_ids(n, v, k);
    pg_change *changes = malloc((size_t)n * sizeof *changes);
    const setup x = {v, d, n, u, s, h, targets, cases[k].scale, cases[k].before};
    if (!cases[k].before) /* U + S must be exact too */
      for (int64_t i = 0; i < v * d; i++) u[i] += s[i];
    compare(&x, changes);
    const double step = (double)diameter(NULL, s, 1, v, d) * fabs(x.scale);
    for (int64_t i = 0; i < n; i++) {
      bounds(&changes[i], v, step, norm_of(h + i * d, d));
      if (changes[i].range > 0) used = fmax(used, fabs(changes[i].loss_change) / changes[i].range);
    }
    free(u);
    free(s);
    free(h);
    free(targets);
    free(changes);
  }
  CHECK(used > .5, "the bound of the loss is far from every change: %g", used);
}

/* ---- exact values ---------------------------------------------------------------------------- */
TEST(exact_values) {
  const int32_t zero[1] = {0};
  const float one[1] = {1};
  pg_functional sizes;
  pg_change c;
  { /* z = 0, z' = (1, -1, .5): H = 2, from token 1 to token 0; D(S) is 2 */
    const float u[3] = {0}, s[3] = {1, -1, .5f};
    const setup x = {3, 1, 1, u, s, one, zero, 1, true};
    MUST(ctx, measure(&x, false, &sizes, &c));
    CHECK(c.range == 2 && c.high == 0 && c.low == 1 && sizes.diameter == 2, "H %g", c.range);
    CHECK_CLOSE(c.entropy, log(3), 1e-14);
    CHECK(isnan(c.backward) && isnan(c.flow_bound) && isnan(sizes.after_diameter), "not asked for");
    /* the same for a change that is in the weights already */
    const setup y = {3, 1, 1, s, s, one, zero, 1, false};
    MUST(ctx, measure(&y, false, &sizes, &c));
    CHECK(c.range == 2, "H %g", c.range);
    CHECK_CLOSE(c.entropy, log(3), 1e-14);
  }
  const double b[3] = {1, 5, 20}, change[3] = {.62011, .98857, 1};
  for (int k = 0; k < 3; k++) { /* z = (-b, 0) -> (-b + 1, 0), H = 1 */
    const float u[2] = {(float)-b[k], 0}, s[2] = {1, 0};
    const setup x = {2, 1, 1, u, s, one, zero, 1, true};
    MUST(ctx, measure(&x, false, &sizes, &c));
    CHECK(c.range == 1 && fabs(fabs(c.loss_change) - change[k]) <= 5e-6, "b = %g: %.6f", b[k],
          c.loss_change);
    CHECK(c.loss_change < 0 && c.loss_change >= -1, "the target gains");
  }
  const double h[2] = {1, 4}, tv[2] = {.2449186624, .7615941560};
  for (int k = 0; k < 2; k++) { /* two tokens with odds e^{+-H/4}: TV = tanh(H/4) */
    const float q = (float)h[k] / 4, u[2] = {q, -q}, s[2] = {-2 * q, 2 * q};
    const setup x = {2, 1, 1, u, s, one, zero, 1, true};
    MUST(ctx, measure(&x, true, &sizes, &c));
    CHECK(c.range == h[k] && fabs(c.tv - tv[k]) <= 1e-10, "TV %.12f", c.tv);
    CHECK_CLOSE(c.tv, tanh(h[k] / 4), 1e-14);
    /* V = 2: every bound of the backward change's parts is attained */
    CHECK_CLOSE(c.rows, c.rows_bound, 1e-6);
    CHECK_CLOSE(c.flow, c.flow_bound, 1e-6);
    CHECK_CLOSE(c.aitchison, h[k] / sqrt(2), 1e-14);
  }
  { /* M = 1000, eta = 1: ||U^T (q - p)|| = M tanh(eta/2), and D(S) = 1 does not bound it */
    const float u[4] = {0, 1000, 0, -1000}, s[4] = {.5f, 0, -.5f, 0}, e1[2] = {1, 0};
    const setup x = {2, 2, 1, u, s, e1, zero, 1, true};
    MUST(ctx, measure(&x, true, &sizes, &c));
    CHECK(sizes.diameter == 1 && c.range == 1, "D %g", sizes.diameter);
    /* p = (1/2, 1/2), q = sigma(+-1): q - p = +-tanh(1/2)/2, and its flow meets rows 2000 apart */
    CHECK(fabs(c.flow - 462.117157) <= 5e-5, "%.9f", c.flow);
    CHECK_CLOSE(c.flow, 1000 * tanh(.5), 1e-7);
    CHECK(c.backward >= c.flow * (1 - 1e-6), "the parts are orthogonal");
    CHECK_CLOSE(hypot(c.flow, c.rows), c.backward, 1e-6);
  }
}

TEST(rows_product_attains_its_bound) {
  /* ||S^T r|| = D/2 ||r||_1 where r = e_i - e_j of the farthest pair: p puts all on i, c = j. */
  enum { V = 9, D = 4 };
  float *s = exact(90, V * D, 0x1p-4), u[V * D] = {0};
  float h[D] = {1, 0, 0, 0};
  int32_t first = 0, second = 0;
  double most = 0;
  for (int i = 0; i < V; i++)
    for (int j = 0; j < V; j++) {
      double sum = 0;
      for (int k = 0; k < D; k++) sum += pow((double)s[i * D + k] - (double)s[j * D + k], 2);
      if (sum > most) most = sum, first = i, second = j;
    }
  for (int i = 0; i < V; i++) u[i * D] = s[i * D] + (i == first ? 200.0f : -200.0f);
  for (int i = 0; i < V; i++)
    for (int k = 1; k < D; k++) u[i * D + k] = s[i * D + k];
  const setup x = {V, D, 1, u, s, h, &second, 1, false};
  pg_functional sizes;
  pg_change c;
  MUST(ctx, measure(&x, true, &sizes, &c));
  CHECK_CLOSE(sizes.diameter, sqrt(most), 1e-12);
  CHECK_CLOSE(c.rows_bound, sqrt(most), 1e-12); /* 1 - p_c = 1 */
  CHECK_CLOSE(c.rows, c.rows_bound, 1e-6);
  free(s);
}

TEST(gaps_that_probabilities_do_not_survive) {
  /* A gap of 114 is 0 in fp32, one of 800 in fp64; distances are what they are. */
  const float gaps[3] = {114, 800, 3000}, one[1] = {1};
  for (int k = 0; k < 3; k++) {
    const float u[3] = {0, -gaps[k], -gaps[k]}, s[3] = {0, 2 * gaps[k], .5f};
    const int32_t target = 1;
    const setup x = {3, 1, 1, u, s, one, &target, 1, true};
    pg_functional sizes;
    pg_change c;
    MUST(ctx, measure(&x, true, &sizes, &c));
    CHECK(c.range == 2 * gaps[k] && c.high == 1 && c.low == 0, "H %g", c.range);
    CHECK_CLOSE(c.loss, gaps[k], 1e-12);
    CHECK_CLOSE(c.loss_change, -gaps[k], 1e-12);
    CHECK_CLOSE(c.kl, gaps[k], 1e-12);
    CHECK_CLOSE(c.tv, 1, 1e-12);
    CHECK_CLOSE(c.fisher_rao, acos(-1), 1e-6);
    CHECK(isfinite(c.backward) && isfinite(c.entropy_change), "finite");
  }
}

TEST(chunks_and_refusals) {
  enum { V = 5003, N = 900 };
  float *u = exact(50, V, 0x1p-4), *s = exact(51, V, 0x1p-8), *h = exact(52, N, 0x1p-3);
  int32_t *targets = make_ids(N, V, 53);
  pg_change *all = malloc(N * sizeof *all), one;
  pg_functional sizes;
  const setup x = {V, 1, N, u, s, h, targets, 1, true};
  MUST(ctx, measure(&x, false, &sizes, all));
  for (int i = 0; i < N; i += 299) { /* two chunks of 838: the same bits one by one */
    const setup single = {V, 1, 1, u, s, h + i, targets + i, 1, true};
    MUST(ctx, measure(&single, false, &sizes, &one));
    CHECK(!memcmp(&one.range, &all[i].range, 9 * sizeof(double)), "position %d", i);
  }
  float *bad = malloc(V * sizeof *bad);
  memcpy(bad, s, V * sizeof *bad);
  bad[77] = NAN;
  const setup nan = {V, 1, N, u, bad, h, targets, 1, true};
  CHECK(measure(&nan, false, &sizes, all) == PG_ENONFINITE, "NaN");
  CHECK(strstr(pg_context_message(ctx), "row 77"), "%s", pg_context_message(ctx));
  memcpy(bad, u, V * sizeof *bad);
  bad[78] = 3e38f; /* finite, its logits are not where |h| > 1.2 */
  for (int i = 0; i < N; i++) h[i] = 1;
  h[850] = 8;
  const setup large = {V, 1, N, bad, s, h, targets, 1, true};
  CHECK(measure(&large, false, &sizes, all) == PG_ENONFINITE, "overflow");
  CHECK(strstr(pg_context_message(ctx), "position 850 at token 78"), "%s", pg_context_message(ctx));
  targets[3] = V;
  CHECK(measure(&x, false, &sizes, all) == PG_EDATA, "a target outside");
  free(u);
  free(s);
  free(h);
  free(targets);
  free(all);
  free(bad);
}

/* ---- over a panel ------------------------------------------------------------------------------
 */
static void over_the_panel(pg_dtype compute) {
  enum { N = 150 };
  pg_model *model = golden_model(ctx, compute), *before = golden_model(ctx, compute);
  pg_activations *a = golden_activations(model, 4), *b = golden_activations(before, 3);
  pg_panel *panel;
  pg_panel_options po = {.tokens = N};
  float ranges[N], losses[N], *s = malloc(VOCAB * WIDTH * sizeof *s);
  double rms;
  pg_functional in, ahead, between;
  pg_change after[N], from[N], both[N];
  const int64_t n = VOCAB * WIDTH;
  MUST(ctx, pg_panel_new(ctx, FOLDER, "*_val_*.bin", TIME, VOCAB, &po, &panel));
  pg_normals(5, 1, 0, (size_t)n, s);
  for (int64_t i = 0; i < n; i++) s[i] = rintf(s[i] * 64) / 1024; /* U + S is exact below */
  float *u = read_floats(pg_model_head(model)->value), *moved = malloc((size_t)n * sizeof *moved);
  for (int64_t i = 0; i < n; i++) {
    u[i] = rintf(u[i] * 16384) / 16384;
    moved[i] = u[i] + s[i];
  }
  pg_tensor *step = make_matrix(ctx, s, VOCAB, WIDTH);
  MUST(ctx, pg_tensor_write(pg_model_head(before)->value, u));
  MUST(ctx, pg_tensor_write(pg_model_head(model)->value, moved));
  MUST(ctx, pg_model_refresh(before, NULL));
  MUST(ctx, pg_model_refresh(model, NULL));

  pg_functional_options o = {.backward = true};
  MUST(ctx, pg_functional_change(model, a, panel, step, &o, &in, after));
  o.before = true;
  MUST(ctx, pg_functional_change(before, b, panel, step, &o, &ahead, from));
  MUST(ctx, pg_functional_between(before, b, model, a, panel, &o, &between, both));
  MUST(ctx, pg_hilbert(model, a, panel, step, &rms, ranges));
  MUST(ctx, pg_panel_losses(before, b, panel, losses));
  double squares = 0;
  for (int i = 0; i < N; i++) {
    /* fp32 logits up to about 8 from sums of 32 products; losses of the model in bf16 round */
    const double slack = 64 * 8 * UNIT_ROUNDOFF;
    CHECK_CLOSE(after[i].range, ranges[i], 1e-6);
    CHECK(after[i].target == panel->targets[i], "target %d", i);
    if (compute == PG_F32) CHECK(fabs(after[i].loss - losses[i]) <= slack, "loss %d", i);
    squares += after[i].range * after[i].range;
    const pg_change *others[2] = {&from[i], &both[i]};
    for (int k = 0; k < 2; k++) {
      CHECK(fabs(others[k]->range - after[i].range) <= slack, "range %d: %g, %g", i,
            others[k]->range, after[i].range);
      CHECK(fabs(others[k]->loss_change - after[i].loss_change) <= slack, "loss change %d", i);
      CHECK(fabs(others[k]->kl - after[i].kl) <= slack * 2, "KL %d", i);
      CHECK(fabs(others[k]->backward - after[i].backward) <= slack * 4, "backward %d: %g, %g", i,
            others[k]->backward, after[i].backward);
      for (int m = 0; m < 2; m++)
        CHECK(fabs(others[k]->backward_bound[m] - after[i].backward_bound[m]) <= slack * 16,
              "bound %d", i);
    }
    /* ||h|| of a final RMSNorm is sqrt(d) at most; bf16 rounds it by 2^-8. */
    bounds(&after[i], VOCAB, in.diameter, sqrt(WIDTH) * (1 + 0x1p-8));
  }
  CHECK_CLOSE(sqrt(squares / N), rms, 1e-6);
  CHECK(in.diameter == ahead.diameter && in.diameter == between.diameter, "D(S)");
  CHECK(in.before_diameter == ahead.before_diameter &&
            in.after_diameter == between.after_diameter &&
            in.before_diameter == between.before_diameter,
        "D(U), D(U + S)");
  CHECK(in.seconds > 0 && between.seconds > 0, "what it cost");

  /* A pass changes no weight. */
  float *same = read_floats(pg_model_head(model)->value);
  CHECK(!memcmp(same, moved, (size_t)n * sizeof *same), "weights");
  free(same);
  pg_context_cancel(ctx);
  CHECK(pg_functional_change(model, a, panel, step, &o, &in, after) == PG_ECANCELED, "cancelled");
  pg_context_resume(ctx);
  CHECK(pg_functional_between(model, a, model, a, panel, &o, &in, after) == PG_EINVAL, "one a");
  s[33] = INFINITY;
  MUST(ctx, pg_tensor_write(step, s));
  CHECK(pg_functional_change(model, a, panel, step, &o, &in, after) == PG_ENONFINITE &&
            strstr(pg_context_message(ctx), "row 1, column 1"),
        "%s", pg_context_message(ctx));
  pg_tensor_free(step);
  free(s);
  free(u);
  free(moved);
  pg_panel_free(panel);
  pg_activations_free(a);
  pg_activations_free(b);
  pg_model_free(model);
  pg_model_free(before);
}

TEST(over_the_golden_panel) {
  over_the_panel(PG_F32);
}
TEST(over_the_golden_panel_in_bf16) {
  over_the_panel(PG_BF16);
}

int main(void) {
  ctx = open_context(2);
  RUN(random_heads);
  RUN(exact_values);
  RUN(rows_product_attains_its_bound);
  RUN(gaps_that_probabilities_do_not_survive);
  RUN(chunks_and_refusals);
  RUN(over_the_golden_panel);
  RUN(over_the_golden_panel_in_bf16);
  unit_bad = 0;
  CHECK(pg_context_live_tensors(ctx) == 0, "tensors left");
  unit_failed += unit_bad != 0;
  pg_context_free(ctx);
  return unit_report();
}
