/* What an operation moves and computes at least: a third table beside the backends', whose queue is
 * a pg_cost. A call with the arguments of a kernel adds that kernel's cost and does nothing else.
 * Every operand counts once as read and every result once as written, in place as both; what a
 * kernel writes and reads again in between does not count. FLOP are those of dense products,
 * attention and the diameter, a multiply-add as two: the others are bounded by bytes. */
#ifndef PG_COST_H
#define PG_COST_H

#include "kernels.h"

typedef struct pg_cost {
  double bytes, flops;
} pg_cost;

/* pg_cost_kernels.gemm(pg_cost_queue(&cost), &g). Operations only, no queue_new. Sizes alone are
 * read, and of the diameter its result: call it after the kernel. */
extern const pg_kernels pg_cost_kernels;
static inline pg_queue *pg_cost_queue(pg_cost *cost) {
  return (pg_queue *)cost;
}

#endif
