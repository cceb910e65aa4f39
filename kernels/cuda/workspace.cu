/* What this backend takes for itself: the workspace of cuBLASLt, the scratch that operations share,
 * and the centred copy that the diameter works on. Code that the driver loads with the first launch
 * of a kernel is not counted. */
#include "attention_path.cuh"
#include "column.cuh"

#include <algorithm>

static int64_t taken(int64_t bytes) {
  return (int64_t)pg_cuda_size_class((size_t)bytes);
}

/* Of the operations that share it, what the greediest asks for. `momentum` takes 8 bytes for every
 * 8192 numbers of the matrices in one call: less than `sums` for what fits into Muon's 32 MiB of
 * scratch, and less than `along_rows` for one matrix that is larger. */
static int64_t scratch(const pg_workload *w, int64_t cudnn) {
  const int64_t blocks = pg_blocks(w->rows, pg_column_block_rows(w->rows));
  const int64_t attention = w->batch * w->heads * w->time * (int64_t)sizeof(float);
  const int64_t embedding = 2 * w->rows * (int64_t)sizeof(unsigned);
  const int64_t along_rows = 16 * (w->rows + w->rows * w->columns / 8192);
  const int64_t along_columns = 16 * (blocks + 1) * std::max(w->columns, w->cloud_columns);
  const int64_t sums = 8192; /* at most 1024 blocks of fp64: sums.cu */
  return std::max({sums, cudnn, attention, embedding, along_rows, along_columns});
}

int pg_cuda_workspace(pg_queue *q, const pg_workload *work, int64_t *bytes) {
  int64_t cudnn = 0;
  if (pg__cuda_cudnn_workspace(q, work, &cudnn) < 0) return -1;
  const int64_t shared = scratch(work, cudnn), cloud = work->cloud_columns;
  *bytes = (int64_t)PG_CUDA_WORKSPACE + (shared ? taken(shared) : 0) +
           (cloud ? taken(pg_cuda_diameter_bytes(work->rows, cloud)) : 0);
  return 0;
}
