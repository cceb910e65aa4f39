/* metrics.jsonl: one JSON object a line, flushed; readers take the last line per update. */
#ifndef PG_METRICS_H
#define PG_METRICS_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_metrics pg_metrics;

/* Open for appending. A torn last line (a kill while writing) is cut off first. */
int pg_metrics_open(pg_context *ctx, const char *path, pg_metrics **out);
void pg_metrics_close(pg_metrics *m);
/* Build one line: fields keep their order; a repeated name overwrites its earlier value in place.
 * A non-finite value is written as null and its name listed under "nonfinite". */
int pg_metrics_integer(pg_metrics *m, const char *name, int64_t value);
int pg_metrics_real(pg_metrics *m, const char *name, double value);
/* `size` bytes of UTF-8, zeros among them or not. */
int pg_metrics_string(pg_metrics *m, const char *name, const char *value, size_t size);
int pg_metrics_json(pg_metrics *m, const char *name, const char *json); /* arrays, objects */
/* Write the line and flush it; on failure (disk full) the file is cut back to its last whole line
 * and PG_EIO/PG_ENOSPC returned; the line is dropped. An empty line is not written. */
int pg_metrics_flush(pg_metrics *m);

#ifdef __cplusplus
}
#endif
#endif
