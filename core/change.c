/* What a step from logits z to z' does to their softmax (functional.h): three sweeps over a row.
 * Small steps are why nothing here is a difference of probabilities: with
 * y_i = (z'_i - z_i) - (log Z' - log Z) = log q_i - log p_i, q_i - p_i = p_i expm1(y_i). */
#include "change.h"

#include <math.h>

typedef struct pair {
  double before, step;
} pair;

static inline pair at(pg__form form, const float *x, const float *y, int64_t i) {
  const double a = x[i], b = y[i];
  switch (form) {
  case PG__AFTER_AND_STEP: return (pair){a - b, b};
  case PG__BEFORE_AND_AFTER: return (pair){a, b - a};
  default: return (pair){a, b};
  }
}

/* e^y - 1 - y >= 0, given e = e^y - 1: the series where the difference would cancel. The terms left
 * out are below 2^-49 of the first. */
static inline double above_tangent(double y, double e) {
  if (fabs(y) > 0x1p-10) return e - y;
  return y * y * (1 / 2. + y * (1 / 6. + y * (1 / 24. + y * (1 / 120. + y * (1 / 720.)))));
}

int64_t pg__change(pg__form form, float *x, float *y, int64_t vocab, int64_t target, bool residuals,
                   double probability[2], pg_change *out) {
  double low = INFINITY, high = -INFINITY, top = -INFINITY, next_top = -INFINITY, mean = 0;
  for (int64_t i = 0; i < vocab; i++) {
    const pair v = at(form, x, y, i);
    if (!isfinite(v.before) || !isfinite(v.step)) return i;
    if (v.step > high) high = v.step, out->high = i;
    if (v.step < low) low = v.step, out->low = i;
    top = fmax(top, v.before);
    next_top = fmax(next_top, v.before + v.step);
    mean += v.step;
  }
  mean /= (double)vocab;

  double sum = 0, next_sum = 0, squares = 0;
  for (int64_t i = 0; i < vocab; i++) {
    const pair v = at(form, x, y, i);
    sum += exp(v.before - top);
    next_sum += exp(v.before + v.step - next_top);
    squares += (v.step - mean) * (v.step - mean);
  }
  /* Each sum has exp(0) among its terms: this is exact, and shows that it is not 0. */
  const double log_z = top + log(fmax(sum, 1)), next_log_z = next_top + log(fmax(next_sum, 1));
  const double shift = next_log_z - log_z;

  const double own = at(form, x, y, target).step;
  double others = 0, others_squares = 0, descent = 0; /* over i != c: p_i, p_i^2 */
  double kl = 0, tv = 0, hellinger = 0, entropy = 0, entropy_change = 0;
  for (int64_t i = 0; i < vocab; i++) {
    const pair v = at(form, x, y, i);
    const double log_p = v.before - log_z, gain = v.step - shift, p = exp(log_p);
    double q, flow, half; /* q - p, sqrt q - sqrt p */
    if (fabs(gain) < 8) {
      const double root = expm1(gain / 2), e = root * (root + 2);
      flow = p * e;
      q = p + flow;
      half = sqrt(p) * root;
      kl += p * above_tangent(gain, e);
    } else { /* p, or its square root, may be 0 and e^gain infinite */
      q = exp(log_p + gain);
      flow = q - p;
      half = exp((log_p + gain) / 2) - exp(log_p / 2);
      kl += flow - p * gain;
    }
    tv += fabs(flow);
    hellinger += half * half;
    entropy -= p * log_p;
    entropy_change -= flow * log_p + q * gain;
    if (i == target) {
      probability[0] = p;
      probability[1] = q;
      out->loss = -log_p;
      out->loss_change = -gain;
    } else {
      others += p;
      others_squares += p * p;
      descent += p * (own - v.step);
    }
    if (residuals) {
      x[i] = (float)flow;
      y[i] = (float)((form == PG__BEFORE_AND_STEP ? q : p) - (i == target));
    }
  }
  out->range = high - low;
  out->kl = fmax(kl, 0);
  out->tv = tv / 2;
  out->aitchison = sqrt(squares);
  /* <z'-z, e_c - p> = sum over i != c of p_i (step_c - step_i), and 1 - p_c is the sum of p_i */
  const double lengths = sqrt(squares) * sqrt(others_squares + others * others);
  out->gradient_cosine = lengths > 0 ? fmax(-1, fmin(1, descent / lengths)) : 0;
  /* sum sqrt(p q) = 1 - hellinger/2 and arccos(1 - 2 s^2) = 2 arcsin s */
  out->fisher_rao = 4 * asin(fmin(1, sqrt(hellinger) / 2));
  out->entropy = entropy;
  out->entropy_change = entropy_change;
  out->target = target;
  return -1;
}
