/* Causal attention against its equation in fp64; the fp64 backward pass against differences. */
#include "kernels_unit.h"

typedef struct reference {
  int64_t batch, time, heads, hd;
  double *out, *lse, *dq, *dk, *dv;
} reference;

/* Row t of head h of sequence b. */
static int64_t place(const reference *r, int64_t b, int64_t h, int64_t t) {
  return ((b * r->time + t) * r->heads + h) * r->hd;
}

/* One query row: p [time] its probabilities; out and lse. */
static double query_row(const reference *r, const double *q, const double *kk, const double *v,
                        int64_t b, int64_t h, int64_t t, double *p, double *out) {
  double top = -INFINITY, sum = 0, scale = 1 / sqrt((double)r->hd);
  int64_t at = place(r, b, h, t);
  for (int64_t s = 0; s <= t; s++) {
    int64_t other = place(r, b, h, s);
    p[s] = 0;
    for (int64_t j = 0; j < r->hd; j++) p[s] += q[at + j] * kk[other + j];
    p[s] *= scale;
    top = fmax(top, p[s]);
  }
  for (int64_t s = 0; s <= t; s++) sum += p[s] = exp(p[s] - top);
  for (int64_t j = 0; j < r->hd; j++) out[at + j] = 0;
  for (int64_t s = 0; s <= t; s++) {
    int64_t other = place(r, b, h, s);
    p[s] /= sum;
    for (int64_t j = 0; j < r->hd; j++) out[at + j] += p[s] * v[other + j];
  }
  return top + log(sum);
}

static void forward64(reference *r, const double *q, const double *kk, const double *v) {
  double *p = unit_doubles(r->time);
  for (int64_t b = 0; b < r->batch; b++)
    for (int64_t h = 0; h < r->heads; h++)
      for (int64_t t = 0; t < r->time; t++)
        r->lse[(b * r->heads + h) * r->time + t] = query_row(r, q, kk, v, b, h, t, p, r->out);
  free(p);
}

static void backward64(reference *r, const double *dout, const double *q, const double *kk,
                       const double *v) {
  double *p = unit_doubles(r->time), scale = 1 / sqrt((double)r->hd);
  for (int64_t b = 0; b < r->batch; b++)
    for (int64_t h = 0; h < r->heads; h++)
      for (int64_t t = 0; t < r->time; t++) {
        int64_t at = place(r, b, h, t);
        query_row(r, q, kk, v, b, h, t, p, r->out);
        double delta = 0;
        for (int64_t j = 0; j < r->hd; j++) delta += dout[at + j] * r->out[at + j];
        for (int64_t s = 0; s <= t; s++) {
          int64_t other = place(r, b, h, s);
          double dp = 0;
          for (int64_t j = 0; j < r->hd; j++) {
            dp += dout[at + j] * v[other + j];
            r->dv[other + j] += p[s] * dout[at + j];
          }
          double ds = p[s] * (dp - delta) * scale;
          for (int64_t j = 0; j < r->hd; j++) {
            r->dq[at + j] += ds * kk[other + j];
            r->dk[other + j] += ds * q[at + j];
          }
        }
      }
  free(p);
}

typedef struct problem {
  int64_t n, rows; /* elements, statistics */
  float *q, *k, *v, *dout;
  double *q64, *k64, *v64, *dout64;
  reference r;
} problem;

static problem problem_new(int64_t batch, int64_t time, int64_t heads, int64_t hd, double spread) {
  problem p = {.n = batch * time * heads * hd, .rows = batch * heads * time};
  p.q = unit_normals(p.n, spread), p.k = unit_normals(p.n, spread);
  p.v = unit_normals(p.n, 1), p.dout = unit_normals(p.n, 1);
  p.q64 = unit_doubles(p.n), p.k64 = unit_doubles(p.n), p.v64 = unit_doubles(p.n);
  p.dout64 = unit_doubles(p.n);
  for (int64_t i = 0; i < p.n; i++)
    p.q64[i] = p.q[i], p.k64[i] = p.k[i], p.v64[i] = p.v[i], p.dout64[i] = p.dout[i];
  p.r = (reference){batch,
                    time,
                    heads,
                    hd,
                    unit_doubles(p.n),
                    unit_doubles(p.rows),
                    unit_doubles(p.n),
                    unit_doubles(p.n),
                    unit_doubles(p.n)};
  return p;
}
static void problem_free(problem *p) {
  free(p->q), free(p->k), free(p->v), free(p->dout);
  free(p->q64), free(p->k64), free(p->v64), free(p->dout64);
  free(p->r.out), free(p->r.lse), free(p->r.dq), free(p->r.dk), free(p->r.dv);
}

/* The fp64 backward pass is right: central differences of sum(dout . out) over every input. */
TEST(reference_backward) {
  unit_seed(31);
  problem p = problem_new(2, 5, 2, 4, 1);
  backward64(&p.r, p.dout64, p.q64, p.k64, p.v64);
  double *inputs[] = {p.q64, p.k64, p.v64}, *gradients[] = {p.r.dq, p.r.dk, p.r.dv};
  const double h = 1e-5;
  for (int which = 0; which < 3; which++)
    for (int64_t i = 0; i < p.n; i++) {
      double keep = inputs[which][i], f[2];
      for (int side = 0; side < 2; side++) {
        inputs[which][i] = keep + (side ? h : -h);
        forward64(&p.r, p.q64, p.k64, p.v64);
        f[side] = 0;
        for (int64_t o = 0; o < p.n; o++) f[side] += p.dout64[o] * p.r.out[o];
      }
      inputs[which][i] = keep;
      /* h^2 and 2^-53 / h are both 1e-10, times third derivatives and a sum of order ten. */
      double difference = (f[1] - f[0]) / (2 * h);
      CHECK(fabs(difference - gradients[which][i]) <= 1e-8, "input %d[%lld]: %.12g against %.12g",
            which, (long long)i, difference, gradients[which][i]);
    }
  problem_free(&p);
}

enum { CASES = 12 };
/* batch, time, heads, head_dim: the head dims and lengths that broke other programs. */
static const int64_t cases[CASES][4] = {{1, 1, 1, 2},    {2, 1, 3, 64},    {1, 37, 2, 18},
                                        {2, 37, 1, 2},   {3, 64, 2, 64},   {1, 65, 2, 72},
                                        {1, 128, 3, 80}, {1, 257, 1, 128}, {2, 320, 1, 64},
                                        {1, 513, 1, 18}, {1, 1023, 1, 2},  {1, 1023, 2, 64}};
static problem problems[CASES];

static void make_problems(void) {
  unit_seed(32);
  for (int c = 0; c < CASES; c++) {
    problems[c] = problem_new(cases[c][0], cases[c][1], cases[c][2], cases[c][3], 1);
    problem *p = &problems[c];
    forward64(&p->r, p->q64, p->k64, p->v64);
    backward64(&p->r, p->dout64, p->q64, p->k64, p->v64);
  }
}

/* Scores of normal vectors are of order one after scaling; the fp32 product of hd terms errs by
 * about sqrt(hd) u <= 11 u of |q||k|/sqrt(hd) = sqrt(hd) <= 11 at worst, typically 3u; exp turns
 * that into a relative error of the probabilities, and sums of them average it. 16 u covers it
 * with a factor of 4 to spare. The gradient passes twice through such products: 32 u. */
#define FORWARD_BOUND (16 * UNIT_ULP)
#define BACKWARD_BOUND (32 * UNIT_ULP)

TEST(attention) {
  for (int c = 0; c < CASES; c++) {
    problem *p = &problems[c];
    reference *r = &p->r;
    float *out = unit_poisoned(p->n), *lse = unit_poisoned(p->rows);
    float *dq = unit_poisoned(p->n), *dk = unit_poisoned(p->n), *dv = unit_poisoned(p->n);
    char name[64];
    KERNEL(attention_forward, PG_F32, p->q, p->k, p->v, r->batch, r->time, r->heads, r->hd, out,
           lse);
    snprintf(name, sizeof name, "out T=%d hd=%d", (int)r->time, (int)r->hd);
    CHECK_ERROR(name, out, r->out, p->n, FORWARD_BOUND);
    for (int64_t i = 0; i < p->rows; i++)
      CHECK(fabs(lse[i] - r->lse[i]) <= 16 * UNIT_ULP * fmax(1, fabs(r->lse[i])),
            "lse[%lld] = %.9g, want %.9g", (long long)i, (double)lse[i], r->lse[i]);
    KERNEL(attention_backward, PG_F32, p->dout, p->q, p->k, p->v, out, lse, r->batch, r->time,
           r->heads, r->hd, dq, dk, dv);
    if (r->time == 1) {
      /* One key: the gradient to the scores is 0 up to the rounding of dp - delta. */
      for (int64_t i = 0; i < p->n; i++)
        CHECK(fabs(dq[i]) <= 1e-5 && fabs(dk[i]) <= 1e-5, "dq %g dk %g", dq[i], dk[i]);
    } else {
      CHECK_ERROR("  dq", dq, r->dq, p->n, BACKWARD_BOUND);
      CHECK_ERROR("  dk", dk, r->dk, p->n, BACKWARD_BOUND);
    }
    CHECK_ERROR("  dv", dv, r->dv, p->n, BACKWARD_BOUND);
    float *out2 = unit_poisoned(p->n), *dq2 = unit_poisoned(p->n), *dk2 = unit_poisoned(p->n);
    KERNEL(attention_forward, PG_F32, p->q, p->k, p->v, r->batch, r->time, r->heads, r->hd, out2,
           lse);
    KERNEL(attention_backward, PG_F32, p->dout, p->q, p->k, p->v, out2, lse, r->batch, r->time,
           r->heads, r->hd, dq2, dk2, dv);
    CHECK(unit_same_bits(out, out2, p->n) && unit_same_bits(dq, dq2, p->n) &&
              unit_same_bits(dk, dk2, p->n),
          "two runs differ at T=%d hd=%d", (int)r->time, (int)r->hd);
    free(out), free(lse), free(dq), free(dk), free(dv), free(out2), free(dq2), free(dk2);
  }
}

/* Later keys and values do not reach earlier outputs, to the bit. */
TEST(attention_is_causal) {
  problem *p = &problems[8];
  reference *r = &p->r;
  float *kk = unit_clone(p->k, p->n), *v = unit_clone(p->v, p->n);
  float *a = unit_poisoned(p->n), *b = unit_poisoned(p->n), *lse = unit_poisoned(p->rows);
  int64_t cut = 200;
  for (int64_t i = 0; i < p->n; i++)
    if (i / r->hd % r->time >= cut) kk[i] = 1e3f, v[i] = -1e3f;
  KERNEL(attention_forward, PG_F32, p->q, p->k, p->v, r->batch, r->time, r->heads, r->hd, a, lse);
  KERNEL(attention_forward, PG_F32, p->q, kk, v, r->batch, r->time, r->heads, r->hd, b, lse);
  for (int64_t s = 0; s < r->batch; s++)
    CHECK(unit_same_bits(a + s * r->time * r->hd, b + s * r->time * r->hd, cut * r->hd),
          "position before %lld saw a later key", (long long)cut);
  free(kk), free(v), free(a), free(b), free(lse);
}

/* Scores of hundreds, growing along the keys so that every block raises the maximum. */
TEST(attention_large_scores) {
  unit_seed(33);
  problem p = problem_new(1, 600, 1, 8, 1);
  for (int64_t i = 0; i < p.n; i++) {
    p.k[i] = (float)(p.k64[i] = p.k[i] + (float)(i / 8) * 0.2f);
    p.q[i] = (float)(p.q64[i] = fabsf(p.q[i]));
  }
  forward64(&p.r, p.q64, p.k64, p.v64);
  float *out = unit_poisoned(p.n), *lse = unit_poisoned(p.rows);
  KERNEL(attention_forward, PG_F32, p.q, p.k, p.v, 1, 600, 1, 8, out, lse);
  /* Scores up to 500 round to 500u, which is the relative error of a probability. */
  CHECK_ERROR("out, scores to 500", out, p.r.out, p.n, 500 * UNIT_ULP);
  free(out), free(lse);
  problem_free(&p);
}

TEST(attention_by_hand) {
  /* Zero queries: every row is the mean of the values so far. */
  float zero[4] = {0}, v[] = {1, 2, 3, 6}, out[4] = {NAN, NAN, NAN, NAN}, lse[2];
  KERNEL(attention_forward, PG_F32, zero, v, v, 1, 2, 1, 2, out, lse);
  CHECK(out[0] == 1 && out[1] == 2 && out[2] == 2 && out[3] == 4, "%g %g", out[2], out[3]);
  CHECK(lse[0] == 0 && fabs(lse[1] - 0.6931471805599453) < 1e-7, "%g %g", lse[0], lse[1]);
  /* dout = ((0,0),(1,0)): dv = ((.5,0),(.5,0)); dp = (1,3), delta = 2, ds = (-.5,.5)/sqrt 2;
   * dq_2 = ds_1 k_1 + ds_2 k_2 = ((3-1)/2, (6-2)/2)/sqrt 2; dk = 0 since q = 0. */
  float dout[] = {0, 0, 1, 0}, dq[4], dk[4], dv[4];
  KERNEL(attention_backward, PG_F32, dout, zero, v, v, out, lse, 1, 2, 1, 2, dq, dk, dv);
  CHECK(fabs(dv[0] - 0.5) < 1e-6 && fabs(dv[2] - 0.5) < 1e-6 && dv[1] == 0 && dv[3] == 0,
        "dv %g %g", dv[0], dv[2]);
  CHECK_CLOSE(dq[2], 0.7071067811865476, 1e-6);
  CHECK_CLOSE(dq[3], 1.4142135623730951, 1e-6);
  CHECK(dk[0] == 0 && dk[3] == 0, "dk %g", dk[0]);
}

int main(void) {
  RUN(reference_backward);
  make_problems();
  FOR_EACH_BACKEND {
    RUN(attention);
    RUN(attention_is_causal);
    RUN(attention_large_scores);
    RUN(attention_by_hand);
  }
  for (int c = 0; c < CASES; c++) problem_free(&problems[c]);
  return unit_kernels_report();
}
