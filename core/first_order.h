/* First order (SPEC §5): what an increment S of the head promises against its gradient G, beside
 * what projected RowNorm would under the same diameter, and how far promises are kept. */
#ifndef PG_FIRST_ORDER_H
#define PG_FIRST_ORDER_H

#include "run.h"

#ifdef __cplusplus
extern "C" {
#endif

/* P subtracts the mean row, RN divides rows by their norm (0 stays 0), D is the row diameter. A
 * common row of S changes no probability, and one of G is rounding: both are taken out wherever
 * that makes a difference. In fp64 from the fp32 matrices. */
typedef struct pg_first_order {
  double gain;            /* -<G, S>: the decrease of the loss to first order, nats */
  double oracle;          /* D(S)/2 sum ||(PG)_i||: that of S_RN = -D(S)/2 P RN(PG), nats */
  double ratio;           /* gain / oracle, at most sqrt(2k/(k+1)) with k = rank PG; NaN: 0 / 0 */
  double cosine_gradient; /* of PS and -PG; NaN when one is 0, as below */
  double cosine_rownorm;  /* of PS and S_RN */
  double common;          /* ||1^T G||_2 / ||G||_F: rounding where the logits' gradient sums to 0 */
  double gradient_norm, increment_norm; /* ||G||_F, ||S||_F */
  double row_norms;                     /* sum ||(PG)_i|| */
  double diameter;                      /* D(S) */
  double seconds;
} pg_first_order;
/* gradient, increment: fp32 [V, d]. A number that is not finite is PG_ENONFINITE with its place. */
int pg_first_order_measure(const pg_tensor *gradient, const pg_tensor *increment,
                           pg_first_order *out);

/* The last update of a run, predicted and measured on its own batch, which is read again; its data
 * position stays. Takes all ranks. PG_ESTATE before the first update since the run was opened. */
typedef struct pg_prediction {
  double before, after; /* mean cross entropy of the batch before and after the update, nats */
  double predicted;     /* sum <G_p, W_p after - W_p before> over parameters p with a gradient, not
                           clipped, weight decay included; NaN unless all increments are kept, and
                           with cautious decay or a clip of an optimizer's own */
  double seconds;
} pg_prediction;
int pg_run_prediction(pg_run *run, pg_prediction *out);

/* The gradient noise scale (McCandlish et al. 2018, appendix A.1): with g the mean gradient of n
 * sequences, E||g||^2 = |G|^2 + trace/n, so that from n = small, averaged over the micro-batches of
 * all ranks, and n = large, the whole batch, both unknowns have unbiased estimates. Their ratio has
 * not: average both over updates before dividing. Before clipping, over all parameters that are
 * trained. */
typedef struct pg_noise {
  int64_t small, large;              /* sequences */
  double small_square, large_square; /* ||g||^2 of each; of the small ones the mean */
  double gradient_square;            /* |G|^2; may be negative */
  double trace;                      /* of the covariance of one sequence's gradient */
  double scale;                      /* trace / gradient_square, sequences */
} pg_noise;
/* From the next update on keep what pg_run_noise needs, or no more. That takes memory of the size
 * of the gradients and three passes over them for every micro-batch, and changes no bit of the
 * update. PG_EINVAL when the batch is one micro-batch. */
int pg_run_measure_noise(pg_run *run, bool on);
/* Of the last gradients. PG_ESTATE when they were not measured. */
int pg_run_noise(const pg_run *run, pg_noise *out);

#ifdef __cplusplus
}
#endif
#endif
