/* Logits over a panel: their size (the eight statistics of Lau and Su 2026), the largest attention
 * logits, and the rank of the matrix of log-probabilities. */
#ifndef PG_LOGITS_H
#define PG_LOGITS_H

#include "geometry.h"

#ifdef __cplusplus
extern "C" {
#endif

/* z: the logits of a position, in nats, from fp32 products of the fp32 head; statistics in fp64,
 * over all classes of the softmax. Centred logits are z minus their mean over the classes at the
 * position. */
typedef struct pg_logits {
  double rms, centered_rms;         /* root mean square over positions and classes */
  double max_abs, centered_max_abs; /* largest magnitude */
  double logsumexp_mean, logsumexp_max;
  double entropy_mean;  /* of the softmax, nats */
  double prob_max_mean; /* of the largest probability */
  double seconds;
} pg_logits;
/* comm: the panel is shared out over its ranks; NULL: one rank. Non-finite logits are PG_ENONFINITE
 * naming position and token. */
int pg_panel_logits(const pg_model *model, pg_activations *a, const pg_panel *panel, pg_comm *comm,
                    pg_logits *out);
/* The same of hidden states [n, d] of any origin, fp32; logits = scale * head h. */
int pg_logits_states(const pg_tensor *head, const pg_tensor *hidden, double scale, pg_logits *out);

/* Largest attention logit q_i . k_j / sqrt(head_dim), j <= i, of every head of every block over the
 * panel's sequences: largest[layers * heads] (host). q and k are normalised: its magnitude is at
 * most sqrt(head_dim) but for rounding. Scores come down a block of rows at a time. *seconds may be
 * NULL. */
int pg_panel_attention(const pg_model *model, pg_activations *a, const pg_panel *panel,
                       pg_comm *comm, float *largest, double *seconds);

/* The matrix A [N, V] of log-probabilities over a panel's N positions: A = k X W^T - lse 1^T with W
 * [V, d] the head's last matrix, which reads X [N, d], so that its rank is at most d + 1 (Yang et
 * al. 2018). Its singular values are those of R1 R2^T, with QR decompositions Q1 R1 of [k X, -lse]
 * and Q2 R2 of [W, 1]: A is never formed. In fp64 (LAPACK) on the host, from fp32 X and W; takes
 * 12 max(N, V) (d + 1) bytes there. */
typedef struct pg_log_rank {
  int64_t rank;     /* singular values above max(N, V) 2^-52 times the largest */
  int64_t bound;    /* min(N, V, d + 1) */
  double effective; /* exp of the entropy of sigma / sum sigma (Roy and Vetterli 2007) */
  double stable;    /* sum sigma^2 / sigma_1^2 */
  double largest;   /* sigma_1, nats */
  double seconds;
} pg_log_rank;
/* values: host, [bound], decreasing; NULL: not wanted. */
int pg_panel_log_rank(const pg_model *model, pg_activations *a, const pg_panel *panel,
                      pg_comm *comm, pg_log_rank *out, double *values);
/* The same of hidden states [n, d] of any origin, fp32; logits = scale * head h. */
int pg_log_rank_states(const pg_tensor *head, const pg_tensor *hidden, double scale,
                       pg_log_rank *out, double *values);

#ifdef __cplusplus
}
#endif
#endif
