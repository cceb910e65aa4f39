/* The functional size of a change of the head (SPEC §5, GEOMETRY): what it does to the distribution
 * after every position of a panel. In fp64 from logits, never from probabilities, of which a gap of
 * 114 makes fp32 zeros. One pass gives all of it; logits exist for a chunk of positions at a time.
 *
 * z are the logits before and z' those after, p and q their softmax, H = max(z'-z) - min(z'-z)
 * Hilbert's distance, c the token that follows. With h the hidden state and k the scale of logits,
 * b = k U^T (p - e_c) is what the loss sends back through the head. Natural logarithms: distances,
 * losses and entropies are in nats; b is a loss per unit of h. */
#ifndef PG_FUNCTIONAL_H
#define PG_FUNCTIONAL_H

#include "geometry.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_change {
  double range;           /* H; every |loss_change| is at most that */
  double kl;              /* KL(p||q) = sum p_i log(p_i / q_i) */
  double tv;              /* total variation 1/2 sum |q_i - p_i|, at most tanh(H/4) */
  double aitchison;       /* ||(z'-z) - mean(z'-z)||_2 (Aitchison 1982): between H/sqrt(2) and
                             H sqrt(V)/2 */
  double fisher_rao;      /* 2 arccos sum sqrt(p_i q_i): length of the geodesic, at most pi */
  double entropy;         /* -sum p_i log p_i */
  double entropy_change;  /* that of q minus that of p */
  double loss;            /* -log p_c */
  double loss_change;     /* -log q_c + log p_c */
  double gradient_cosine; /* of z'-z, its mean taken off, with -(p - e_c), the steepest descent of
                             the loss in logits (Godey and Artzi 2026); 0 when one of them is 0 */
  int64_t target;         /* c */
  int64_t high, low;      /* the tokens where z'-z is largest and smallest, the first of equals */
  /* The rest is NaN unless `backward` is asked for. S is the change of the head. */
  double backward; /* ||b+ - b||_2 with b+ = k (U+S)^T (q - e_c) */
  /* k D(S) (1-q_c) + k D(U) tanh(H/4), and k D(S) (1-p_c) + k D(U+S) tanh(H/4): each bounds it */
  double backward_bound[2];
  /* b+ - b = k S^T r + k A^T (q-p), where r = q - e_c and A = U for a change that comes after the
   * model's weights, r = p - e_c and A = U+S for one that is in them; and what bounds each part,
   * k D(S)/2 ||r||_1 and k D(A) tanh(H/4) */
  double rows, rows_bound, flow, flow_bound;
} pg_change;

typedef struct pg_functional_options {
  bool before;   /* the model's head is U; false: U + S, as after an update by S */
  bool backward; /* two more products, and the diameters of U and U + S */
  pg_comm *comm; /* the panel is shared out over its ranks, with equal results; NULL: one rank */
} pg_functional_options;

typedef struct pg_functional {
  double diameter;                        /* D(S) */
  double before_diameter, after_diameter; /* D(U), D(U+S); NaN unless `backward` */
  double seconds;
} pg_functional;

/* What S = `matrix` [V, d] (an increment, or a longer change of the head) does at the present
 * hidden states of `model`. changes: host, [tokens of the panel]. Non-finite logits are
 * PG_ENONFINITE naming position and token. */
int pg_functional_change(const pg_model *model, pg_activations *a, const pg_panel *panel,
                         const pg_tensor *matrix, const pg_functional_options *options,
                         pg_functional *out, pg_change *changes);
/* From one model to another, hidden states and all; S is the difference of their heads, and
 * `before` is not looked at. The models share the context and the vocabulary; `backward`, and a
 * diameter that is not NaN, need one width and one scale of logits. `a` serves `from`, `b` `to`. */
int pg_functional_between(const pg_model *from, pg_activations *a, const pg_model *to,
                          pg_activations *b, const pg_panel *panel,
                          const pg_functional_options *options, pg_functional *out,
                          pg_change *changes);
/* The same as pg_functional_change on hidden states of any origin: head, matrix [V, d], hidden
 * [n, d], fp32; targets[n] on the host; logits = scale * head h. */
int pg_functional_states(const pg_tensor *head, const pg_tensor *matrix, const pg_tensor *hidden,
                         const int32_t *targets, double scale, const pg_functional_options *options,
                         pg_functional *out, pg_change *changes);

#ifdef __cplusplus
}
#endif
#endif
