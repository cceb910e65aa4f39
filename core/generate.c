/* Sampling from the model's distribution over the next token. */
#include "generate.h"
#include "internal.h"
#include "random.h"
#include <math.h>
#include <stdlib.h>

typedef struct choice {
  float logit;
  int32_t token;
} choice;

/* Most likely first; the smaller token wins a tie. */
static int by_logit(const void *left, const void *right) {
  const choice *a = left, *b = right;
  if (a->logit != b->logit) return a->logit > b->logit ? -1 : 1;
  return a->token < b->token ? -1 : 1;
}

/* Uniform in [0, 1): the first 53 bits of Philox block `index` of the stream "generate". */
static double uniform(uint64_t seed, uint64_t index) {
  uint32_t words[4];
  pg_philox(seed, pg_hash_name("generate"), index, words);
  return (double)(((uint64_t)words[0] << 32 | words[1]) >> 11) * 0x1p-53;
}

/* One of choices[count], by its probability at the temperature. `top` is the largest logit: weights
 * are relative to it, so that no exponential overflows. */
static int32_t draw(const choice *choices, int64_t count, float top, double temperature, double u) {
  double total = 0, sum = 0;
  int32_t token = -1;
  for (int64_t i = 0; i < count; i++) total += exp(((double)choices[i].logit - top) / temperature);
  for (int64_t i = 0; i < count && sum <= u * total; i++) {
    sum += exp(((double)choices[i].logit - top) / temperature);
    token = choices[i].token;
  }
  return token; /* u < 1, and both sums are the same: some token is reached */
}

int pg_generate_next(const pg_model *model, pg_activations *a, const int32_t *tokens, int64_t count,
                     const pg_generate_options *options, uint64_t index, int32_t *next) {
  pg_context *ctx = pg_model_context(model);
  const pg_model_config *c = pg_model_get_config(model);
  int64_t vocab = c->vocab, time = pg__min(count, c->context), kept = vocab;
  float *logits = NULL;
  choice *choices = NULL;
  int64_t best = 0;
  int status;
  if (count < 1)
    return pg_fail(ctx, PG_EINVAL, "generation needs at least one token to go on from");
  if (!(options->temperature >= 0 && isfinite(options->temperature)))
    return pg_fail(ctx, PG_EINVAL, "temperature is %g; allowed: 0 and above", options->temperature);
  if (options->top_k < 0)
    return pg_fail(ctx, PG_EINVAL, "top_k is %lld; allowed: 0 (all tokens) and above",
                   (long long)options->top_k);
  logits = malloc((size_t)vocab * sizeof *logits);
  choices = malloc((size_t)vocab * sizeof *choices);
  if (!logits || !choices) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for the logits of %lld tokens", (long long)vocab);
    goto fail;
  }
  PG_TRY(pg_model_forward(model, a, tokens + count - time, 1, time, NULL));
  PG_TRY(pg_head_logits(model, a, time - 1, logits));
  for (int64_t i = 0; i < vocab; i++) {
    if (!isfinite(logits[i])) {
      status = pg_fail(ctx, PG_ENONFINITE, "the logit of token %lld is %g", (long long)i,
                       (double)logits[i]);
      goto fail;
    }
    if (logits[i] > logits[best]) best = i;
    choices[i] = (choice){logits[i], (int32_t)i};
  }
  if (options->top_k > 0 && options->top_k < vocab) {
    kept = options->top_k;
    qsort(choices, (size_t)vocab, sizeof *choices, by_logit);
  }
  *next = options->temperature == 0 ? (int32_t)best
                                    : draw(choices, kept, logits[best], options->temperature,
                                           uniform(options->seed, index));
fail:
  free(choices);
  free(logits);
  return status;
}
