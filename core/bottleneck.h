/* The gradient bottleneck of the head (Godey and Artzi 2026; Murugan 2026): of the gradient that
 * the loss has at the logits, g = p - e_c with p their softmax and c the token that follows, the
 * rest of the model gets U^T g, and so the part in the column space of U alone. How much of g that
 * is, is geometry: it is not known to tell how well a model trains.
 *
 * With K = U^T U = L L^T, the part has the length ||L^-1 U^T g||; no V x d factorisation is needed.
 * A random subspace of d dimensions among V keeps sqrt(d/V) in the root mean square. */
#ifndef PG_BOTTLENECK_H
#define PG_BOTTLENECK_H

#include "geometry.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One position. */
typedef struct pg_kept {
  double kept; /* ||part of g that gets through|| / ||g||, in [0, 1] to rounding; NaN when g is 0 */
  double norm; /* ||g||_2, at most sqrt(2) */
  double loss; /* -log p_c, nats */
  int64_t target; /* c */
} pg_kept;

typedef struct pg_bottleneck {
  int64_t rank, classes; /* of the subspace, d or less; of the softmax */
  double baseline;       /* sqrt(rank / classes) */
  double condition; /* of the matrix that spans it: sqrt of LAPACK's estimate for its Gram matrix in
                       the 1-norm, between it and sqrt(rank) times it */
  double seconds;
} pg_bottleneck;

/* At the positions of a panel, under the model's present weights; positions: host, [tokens of the
 * panel]. What model.head restricts the backward pass to (backward_rank, rank) is counted: it is
 * what reaches the blocks. The panel is shared out over the ranks of `comm` (NULL: one rank), with
 * equal results. Pure. PG_EINVAL when the head's columns are dependent, PG_ENONFINITE with the
 * place. */
int pg_bottleneck_panel(const pg_model *model, pg_activations *a, const pg_panel *panel,
                        pg_comm *comm, pg_bottleneck *out, pg_kept *positions);
/* The same on hidden states of any origin: head [V, d], hidden [n, d], fp32 with contiguous rows;
 * targets[n] on the host; logits = scale * head h. */
int pg_bottleneck_states(const pg_tensor *head, const pg_tensor *hidden, const int32_t *targets,
                         double scale, pg_bottleneck *out, pg_kept *positions);
/* ||Pi G||_F / ||G||_F with Pi the projection onto the column space of head [V, d], gradient G
 * [V, d]: 1 minus its square is the share of the head's gradient that the blocks know nothing of.
 * NaN when G is 0. */
int pg_bottleneck_gradient(const pg_tensor *head, const pg_tensor *gradient, double *kept);

#ifdef __cplusplus
}
#endif
#endif
