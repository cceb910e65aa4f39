/* Frozen: no gradient, no slots, no share in the gradient norm. */
#include "compose.h"

extern const pg_optimizer pg__frozen_optimizer;
const pg_optimizer pg__frozen_optimizer = {
    .name = "frozen",
    .help = "Leaves its parameters as they are: no gradient is computed for them, they have no "
            "optimizer state and no share in the gradient norm.",
    .sharding = PG_SHARD_ELEMENTS,
};
