/* Validation loss (SPEC §2): mean over the loader's groups of the mean cross entropy of each. */
#include "geometry.h"
#include "model_internal.h"

#include <math.h>
#include <stdlib.h>

int pg_validate(const pg_model *model, pg_activations *a, pg_loader *loader, int64_t batches,
                double *loss) {
  pg_context *ctx = pg_model_context(model);
  const pg_loader_options *o = pg_loader_get_options(loader);
  int64_t micro = o->micro, time = o->time, positions, longest;
  int32_t *tokens = NULL;
  double sum = 0, *sums = NULL;
  void *device_sums = NULL;
  size_t bytes = 0;
  int status = 0;

  pg_activations_size(a, &positions, &longest);
  if (o->shuffle)
    return pg_fail(ctx, PG_EINVAL, "validation needs a sequential loader, this one shuffles");
  if (time > longest)
    return pg_fail(ctx, PG_EINVAL,
                   "validation sequences of %lld are longer than the activations' %lld",
                   (long long)time, (long long)longest);
  if (batches < 1 || batches > pg_loader_batches(loader))
    return pg_fail(ctx, batches < 1 ? PG_EINVAL : PG_EDATA,
                   "validation over %lld groups of %lld sequences; the split has %lld",
                   (long long)batches, (long long)(micro * o->world),
                   (long long)pg_loader_batches(loader));
  const int64_t together = positions / time;                /* sequences per forward pass */
  const int64_t passes = (micro + together - 1) / together; /* per group */
  bytes = (size_t)(batches * passes) * sizeof *sums;
  tokens = malloc((size_t)(2 * micro * time) * sizeof *tokens);
  sums = malloc(bytes);
  if (!tokens || !sums) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory for %lld tokens", (long long)micro * time);
    goto fail;
  }
  int32_t *targets = tokens + micro * time;
  PG_TRY(pg__alloc(ctx, bytes, "validation losses", &device_sums));

  PG_TRY(pg_loader_rewind(loader));
  for (int64_t b = 0; b < batches; b++) {
    PG_TRY(pg_loader_next(loader, tokens, targets));
    for (int64_t pass = 0; pass < passes; pass++) {
      const int64_t first = pass * together, n = pg__min(together, micro - first);
      if (pg_context_cancelled(ctx))
        PG_TRY(pg_fail(ctx, PG_ECANCELED, "validation was cancelled after %lld of %lld groups",
                       (long long)b, (long long)batches));
      PG_TRY(pg_model_forward(model, a, tokens + first * time, n, time, NULL));
      PG_TRY(pg__head_loss(model, a, targets + first * time, 0,
                           (double *)device_sums + b * passes + pass));
    }
  }
  PG_LAUNCH(ctx, download, sums, device_sums, bytes);
  for (int64_t b = 0; b < batches; b++) {
    double batch_sum = 0;
    for (int64_t pass = 0; pass < passes; pass++) batch_sum += sums[b * passes + pass];
    if (!isfinite(batch_sum))
      PG_TRY(pg_fail(ctx, PG_ENONFINITE, "the validation loss of group %lld (counted from 0) is %g",
                     (long long)b, batch_sum));
    sum += batch_sum / (double)(micro * time);
  }
  *loss = sum / (double)batches;
fail:
  if (device_sums) pg__release(ctx, device_sums, bytes);
  free(tokens);
  free(sums);
  return status;
}

int pg_validate_shared(const pg_model *model, pg_activations *a, pg_loader *loader, int64_t batches,
                       pg_comm *comm, double *loss) {
  pg_context *ctx = pg_model_context(model);
  int status;
  PG_TRY(pg_validate(model, a, loader, batches, loss));
  PG_TRY(pg_comm_meet(comm, ctx, "a validation", NULL, 0));
  PG_TRY(pg_comm_sum_f64(comm, ctx, loss, 1));
  *loss /= pg_comm_world(comm); /* all ranks have as many sequences */
  return 0;
fail:
  pg_comm_fail(comm, pg_context_message(ctx));
  return status;
}
