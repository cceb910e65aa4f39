/* The kernel table of this CPU level. */
#include "cpu.h"

const pg_kernels PG_CPU(kernels) = {.name = "cpu",
                                    .queue_new = PG_CPU(queue_new),
                                    .queue_free = PG_CPU(queue_free),
                                    .message = PG_CPU(message),
                                    .held = PG_CPU(held),
#define PG_KERNEL_ENTRY(op) .op = PG_CPU(op),
                                    PG_KERNELS(PG_KERNEL_ENTRY)
#undef PG_KERNEL_ENTRY
};
