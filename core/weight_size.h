/* How large a matrix of weights is, and a change of it beside it (REFERENCE: what Scion, Modula and
 * modded-nanogpt watch). One sweep over the matrix in fp64 on the host. */
#ifndef PG_WEIGHT_SIZE_H
#define PG_WEIGHT_SIZE_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_weight_size {
  double norm;             /* ||W||_F */
  double largest;          /* max |w_ij| */
  double row_min, row_max; /* of ||w_i||_2 */
  double column_max;       /* largest ||W e_j||_2 */
  double mean_row;         /* ||1^T W||_2 / rows */
  double product;          /* <W, S>; NaN without S */
  double seconds;
} pg_weight_size;
/* w, s: fp32 [rows, columns] of one shape, s NULL for none. mean: host, [columns], the mean row;
 * NULL: not wanted. A number that is not finite is PG_ENONFINITE with its place; `what` names w. */
int pg_weight_measure(const pg_tensor *w, const pg_tensor *s, const char *what, double *mean,
                      pg_weight_size *out);

#ifdef __cplusplus
}
#endif
#endif
