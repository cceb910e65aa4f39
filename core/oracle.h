/* The exact first-order optimum under the row diameter (SPEC §5):
 *   T(G) = max { <G, Phi> : ||phi_i - phi_j|| <= 1 }
 *        = min { sum_{i<j} ||y_ij|| : sum_j y_ij = g_i, y_ji = -y_ij },
 * of G with its mean row subtracted (a G that does not sum to zero would make T infinite). The best
 * update of diameter eta decreases the loss by eta T(G) to first order; projected RowNorm by
 * eta/2 sum ||g_i||.
 *
 * The answer is an interval [lower, upper] that holds T(G), with a certificate for either end:
 * a potential Phi for the lower one, a balanced flow for the upper one. pg_oracle_check recomputes
 * both from G and the certificates alone. */
#ifndef PG_ORACLE_H
#define PG_ORACLE_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_oracle_options {
  double gap;         /* ends when (upper - lower) / upper is no more than this; 0: 1e-6 */
  double seconds;     /* ends at the first bounds after so long; 0: 60 */
  int64_t iterations; /* ends at the first bounds after so many; 0: as many as it takes */
} pg_oracle_options;

/* The flow is given by clusters of rows. With a_i = ||g_i|| and, in cluster c, A = sum a_i,
 * alpha_i = a_i / A, g_c = sum g_i, the flow between rows i of c and j of c' is
 *   y_ij = t_cc' alpha_i alpha_j (psi_i - psi_j),  psi_i = psi_c + (g_i / alpha_i - g_c) / D_c,
 * D_c = sum_c' t_cc', t_cc among them: it balances where the clusters' own flow does. Clusters of
 * one row give any flow y_ij = t_ij (psi_i - psi_j). */
typedef struct pg_oracle {
  double lower, upper; /* lower <= T(G) <= upper */
  double rownorm;      /* sum ||g_i|| / 2: what projected RowNorm attains */
  int64_t rows, columns;
  float *potential; /* [rows, columns], of diameter at most 1; lower = <G, Phi> / D(Phi) */
  int64_t clusters;
  int32_t *cluster; /* [rows], from 0; -1 for a row of zeros, which carries no flow */
  double scale;     /* t = scale * weights, a power of two */
  float *weights;   /* [clusters, clusters], symmetric, not negative */
  float *centres;   /* [clusters, columns], psi_c */
  int64_t iterations;
  double seconds;
} pg_oracle;

/* gradient: fp32, 2-D, finite. On success free *out with pg_oracle_free. An interval is given
 * whether or not the gap was reached; G = 0 gives [0, 0]. At most some 1500 rows that are not zero
 * are solved to any gap; more, to what clusters of rows can certify. */
int pg_oracle_solve(const pg_tensor *gradient, const pg_oracle_options *options, pg_oracle *out);
void pg_oracle_free(pg_oracle *oracle);

typedef struct pg_oracle_verdict {
  bool lower_holds, upper_holds; /* what the certificates prove is no worse than what is claimed */
  double lower, upper;           /* what they prove; NaN where they are malformed */
  double diameter;               /* of the potential, in fp64 */
  double residual;               /* the flow's largest ||g_i - sum_j y_ij||, and its row */
  int64_t residual_row;          /* from 0; -1: no row */
  char problem[240];             /* what fails, and by how much; "" when both hold */
} pg_oracle_verdict;
/* Independent of the solver: only the certificates and `lower`, `upper` of *claimed are read. */
int pg_oracle_check(const pg_tensor *gradient, const pg_oracle *claimed, pg_oracle_verdict *out);

#ifdef __cplusplus
}
#endif
#endif
