/* One position's change of distribution, from two rows of logits: host memory, fp64. */
#ifndef PG_CHANGE_H
#define PG_CHANGE_H

#include "functional.h"

/* What the two rows are. */
typedef enum pg__form {
  PG__BEFORE_AND_STEP,  /* z, z' - z */
  PG__AFTER_AND_STEP,   /* z', z' - z */
  PG__BEFORE_AND_AFTER, /* z, z' */
} pg__form;

/* x, y: [vocab]. Fills everything of *out up to `low`; p_c and q_c go to probability[2]. Returns
 * the first token whose logits are not finite (nothing else is then set), -1 if all are. With
 * `residuals` x becomes q - p, and y the r of pg_change, p - e_c or for PG__BEFORE_AND_STEP
 * q - e_c. */
int64_t pg__change(pg__form form, float *x, float *y, int64_t vocab, int64_t target, bool residuals,
                   double probability[2], pg_change *out);

#endif
