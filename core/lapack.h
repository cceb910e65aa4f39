/* What is used of LAPACK, in Fortran's calling convention: OpenBLAS brings no header for it.
 * Matrices are by columns; the lower triangle by rows is the upper one by columns. */
#ifndef PG_LAPACK_H
#define PG_LAPACK_H

/* Cholesky factor; inverse from it; norm and reciprocal condition of a symmetric matrix. */
extern void dpotrf_(const char *triangle, const int *n, double *a, const int *lda, int *info);
extern void dpotri_(const char *triangle, const int *n, double *a, const int *lda, int *info);
extern double dlansy_(const char *norm, const char *triangle, const int *n, const double *a,
                      const int *lda, double *work);
extern void dpocon_(const char *triangle, const int *n, const double *a, const int *lda,
                    const double *norm, double *reciprocal, double *work, int *iwork, int *info);
/* Q R, and Q from it. */
extern void dgeqrf_(const int *m, const int *n, double *a, const int *lda, double *tau,
                    double *work, const int *lwork, int *info);
extern void dorgqr_(const int *m, const int *n, const int *k, double *a, const int *lda,
                    const double *tau, double *work, const int *lwork, int *info);
/* Eigenvalues w of a symmetric matrix, increasing, and with job "V" its eigenvectors. */
extern void dsyevd_(const char *job, const char *triangle, const int *n, double *a, const int *lda,
                    double *w, double *work, const int *lwork, int *iwork, const int *liwork,
                    int *info);

#endif
