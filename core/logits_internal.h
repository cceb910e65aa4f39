/* What the diagnostics of logits share. */
#ifndef PG_LOGITS_INTERNAL_H
#define PG_LOGITS_INTERNAL_H

#include "logits.h"

/* The logits z of one position, in fp64. */
typedef struct pg__logit_row {
  double square, centered_square; /* means over the classes */
  double max_abs, centered_max_abs, logsumexp, entropy, prob_max;
} pg__logit_row;

/* rows [tokens of the panel] and, unless NULL, what the head's last matrix reads, inputs
 * [tokens, its columns]: of all positions, on every rank. */
int pg__panel_logit_rows(const pg_model *model, pg_activations *a, const pg_panel *panel,
                         pg_comm *comm, const char *what, pg__logit_row *rows, float *inputs);

/* The same of hidden states [n, d] of any origin, logits = scale * head h; inputs [n, d]. */
int pg__state_logit_rows(const pg_tensor *head, const pg_tensor *hidden, double scale,
                         pg__logit_row *rows, float *inputs);
/* Whether these are a head [V, d] and hidden states [n, d]. */
int pg__check_states(const pg_tensor *head, const pg_tensor *hidden);

#endif
