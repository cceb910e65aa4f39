/* Where the time of an update goes. While a context records, every operation is bracketed by time
 * stamps on its queue: a CPU's clock, a GPU's events, which are not waited for. Nothing else
 * changes: the same work in the same order, the same bits.
 *
 *   pg_profile_start(ctx);  pg_run_step(run, &step);  pg_profile_stop(ctx, &profile);
 *   pg_profile_write(ctx, profile, "update.json");
 */
#ifndef PG_PROFILE_H
#define PG_PROFILE_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What an operation belongs to: what it was called for (the first four), else what it is. */
typedef enum pg_part {
  PG_PART_HEAD,          /* logits, loss and their gradients */
  PG_PART_OPTIMIZER,     /* norm and clip, increments, apply */
  PG_PART_COMMUNICATION, /* sums over the ranks, as far as the queue waits for them */
  PG_PART_DATA_WAIT,     /* the next micro-batch, as far as the queue waits for it */
  PG_PART_ATTENTION,
  PG_PART_GEMM,
  PG_PART_EMBEDDING,
  PG_PART_ELEMENTWISE, /* norms, rotations, SwiGLU, copies between blocks */
  PG_PART_REST,        /* transfers from and to the host, clearing */
  PG_PARTS
} pg_part;
const char *pg_part_name(pg_part part); /* "head", "data_wait" */

/* One call of an operation. Times in seconds since the start. */
typedef struct pg_profile_event {
  const char *operation; /* its name in kernels.h, or of other work: "loader" */
  const char *caller;    /* innermost span: "block forward", "muon", "clip"; "" outside */
  pg_part part;
  double begin, end;
  double bytes, flops; /* what it had to move and compute at least; 0 where nothing is known */
} pg_profile_event;

/* The calls of one operation by one caller for one part. */
typedef struct pg_profile_row {
  const char *operation, *caller;
  pg_part part;
  int64_t calls;
  double seconds, bytes, flops;
} pg_profile_row;

typedef struct pg_profile pg_profile;

/* Begin to record. PG_ESTATE when this context records already. */
int pg_profile_start(pg_context *ctx);
/* Wait for the work queued so far, end, and give the record to the caller. */
int pg_profile_stop(pg_context *ctx, pg_profile **out);
void pg_profile_free(pg_profile *profile);

/* From start to stop, what lies between operations included. */
double pg_profile_seconds(const pg_profile *profile);
double pg_profile_part_seconds(const pg_profile *profile, pg_part part);
/* In order of time; and summed, longest first. Valid as long as the profile. */
const pg_profile_event *pg_profile_events(const pg_profile *profile, size_t *count);
const pg_profile_row *pg_profile_rows(const pg_profile *profile, size_t *count);
/* Write a trace for Perfetto or Chrome (JSON trace events): operations, and above them the spans of
 * what called them. */
int pg_profile_write(pg_context *ctx, const pg_profile *profile, const char *path);

#ifdef __cplusplus
}
#endif
#endif
