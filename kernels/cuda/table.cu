/* The table of the CUDA backend, the one symbol that the plugin exports. */
#include "cuda.cuh"

/* In the order of the members of pg_kernels. */
static const pg_kernels table = {"cuda",
                                 pg_cuda_queue_new,
                                 pg_cuda_queue_free,
                                 pg_cuda_message,
                                 pg_cuda_held,
#define PG_KERNEL_ENTRY(op) pg_cuda_##op,
                                 PG_KERNELS(PG_KERNEL_ENTRY)
#undef PG_KERNEL_ENTRY
};

extern "C" __attribute__((visibility("default"))) const pg_kernels *pg_cuda_kernels(void) {
  return &table;
}
