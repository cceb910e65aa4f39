/* TensorBoard's event files: what metrics.jsonl says, for TensorBoard. A record is written by one
 * write(2), so that a kill leaves at most a torn last record, which readers leave out. */
#ifndef PG_EVENTS_H
#define PG_EVENTS_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_events pg_events;

/* Create a new file events.out.tfevents.SECONDS.HOST.PID.N in `folder`. What earlier files there
 * say of steps >= `step` no longer holds. */
int pg_events_open(pg_context *ctx, const char *folder, int64_t step, pg_events **out);
void pg_events_close(pg_events *e);
const char *pg_events_path(const pg_events *e);
/* Collect the values of one step. */
int pg_events_scalar(pg_events *e, const char *tag, double value);
int pg_events_text(pg_events *e, const char *tag, const char *text); /* UTF-8, Markdown */
/* Values that are not finite are left out; without any other, so is the histogram. */
int pg_events_histogram(pg_events *e, const char *tag, const double *values, int64_t count);
/* Write what was collected, if anything, as one record. On failure the file is cut back to its last
 * whole record and the values are dropped. */
int pg_events_flush(pg_events *e, int64_t step);

#ifdef __cplusplus
}
#endif
#endif
