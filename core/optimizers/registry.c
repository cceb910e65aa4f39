/* The optimizers, one line each: X(NAME) stands for the descriptor pg__NAME_optimizer that
 * core/optimizers/NAME.c exports. */
#include "compose.h"

#define PG_OPTIMIZERS(X)                                                                           \
  X(adamw)                                                                                         \
  X(muon)                                                                                          \
  X(rownorm)                                                                                       \
  X(sgd)                                                                                           \
  X(lion)                                                                                          \
  X(signsgd)                                                                                       \
  X(scale)                                                                                         \
  X(rmnp)                                                                                          \
  X(sinkgd)                                                                                        \
  X(moga)                                                                                          \
  X(scion)                                                                                         \
  X(modula)                                                                                        \
  X(normuon)                                                                                       \
  X(lausu)                                                                                         \
  X(equidistant)                                                                                   \
  X(greedy_radial)                                                                                 \
  X(exact)                                                                                         \
  X(shampoo)                                                                                       \
  X(soap)                                                                                          \
  X(kfac)                                                                                          \
  X(frozen)

#define PG_DECLARE(name) extern const pg_optimizer pg__##name##_optimizer;
PG_OPTIMIZERS(PG_DECLARE)

#define PG_LIST(name) &pg__##name##_optimizer,
const pg_optimizer *const pg__optimizers[] = {PG_OPTIMIZERS(PG_LIST)};
const size_t pg__optimizer_count = PG_COUNT(pg__optimizers);
