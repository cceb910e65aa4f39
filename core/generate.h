/* Text from a model, one token at a time. */
#ifndef PG_GENERATE_H
#define PG_GENERATE_H

#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_generate_options {
  double temperature; /* 0: the most likely token */
  int64_t top_k;      /* 0: all */
  uint64_t seed;
} pg_generate_options;

/* The token after tokens[count] (only the last `context` of them are read, count >= 1). Draw
 * number `index` of the seed decides, so a text is reproducible token by token. `a` must hold one
 * sequence of the model's context. */
int pg_generate_next(const pg_model *model, pg_activations *a, const int32_t *tokens, int64_t count,
                     const pg_generate_options *options, uint64_t index, int32_t *next);

#ifdef __cplusplus
}
#endif
#endif
