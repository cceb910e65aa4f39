/* Time stamps: events on the stream, kept for the next measurement. The arithmetic peak has no loop
 * of its own: a large product reaches it, and the tensor cores' too. */
#include "cuda.cuh"

#include <new>
#include <vector>

struct pg_cuda_stamps {
  std::vector<cudaEvent_t> events;
};

void pg__cuda_stamps_free(pg_queue *q) {
  if (!q->stamps) return;
  for (cudaEvent_t event : q->stamps->events) cudaEventDestroy(event);
  delete q->stamps;
  q->stamps = NULL;
}

int pg_cuda_timestamp(pg_queue *q, int64_t index) {
  try {
    if (!q->stamps) q->stamps = new pg_cuda_stamps();
    while ((int64_t)q->stamps->events.size() <= index) {
      q->stamps->events.push_back(NULL);
      pg_cuda_enter(q);
      const cudaError_t error = cudaEventCreate(&q->stamps->events.back());
      if (error == cudaSuccess) continue;
      q->stamps->events.pop_back();
      return pg_cuda_fail(q, "cudaEventCreate", error);
    }
  } catch (const std::bad_alloc &) {
    return pg_cuda_refuse(q, "no host memory for %lld time stamps", (long long)index + 1);
  }
  PG_CUDA(q, cudaEventRecord(q->stamps->events[(size_t)index], q->stream));
  return 0;
}

/* Step by step: a difference of neighbours is exact, that of distant ones is rounded to fp32. */
int pg_cuda_elapsed(pg_queue *q, int64_t count, double *seconds) {
  if (count < 1) return 0;
  PG_CUDA(q, cudaEventSynchronize(q->stamps->events[(size_t)count - 1]));
  seconds[0] = 0;
  for (int64_t i = 1; i < count; i++) {
    float milliseconds = 0;
    PG_CUDA(q, cudaEventElapsedTime(&milliseconds, q->stamps->events[(size_t)i - 1],
                                    q->stamps->events[(size_t)i]));
    seconds[i] = seconds[i - 1] + 1e-3 * (double)milliseconds;
  }
  return 0;
}

int pg_cuda_peak(pg_queue *q, pg_dtype type, double *flops) {
  (void)q, (void)type;
  *flops = 0;
  return 0;
}
