/* What this backend takes for itself: scratch of the kernels that need most of it, and the centred
 * copy that the diameter works on. */
#include "cpu.h"

int PG_CPU(workspace)(pg_queue *q, const pg_workload *work, int64_t *bytes) {
  int64_t floats = pg_max64(PG_CPU(attention_scratch)(work->time, work->head_dim),
                            PG_CPU(gemm_scratch)(work->type));
  floats = pg_max64(floats, 3 * work->columns); /* rmsnorm_backward */
  *bytes = (floats + 15) / 16 * 64 * q->threads;
  if (work->cloud_columns) *bytes += PG_CPU(diameter_bytes)(work->rows, work->cloud_columns);
  return 0;
}
