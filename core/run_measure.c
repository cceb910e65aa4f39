/* What a run measures of its last update: its batch again, and the norms of its micro-batches'
 * gradients. */
#include "first_order.h"
#include "run_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Mean cross entropy of the last optimizer batch at the present weights. */
static int batch_loss(pg_run *run, double *loss) {
  pg_context *ctx = run->context;
  pg_loader_state position;
  double sum = 0, one;
  const void *hidden;
  int status = 0, restored = 0;
  if (run->loader) {
    pg_loader_get_state(run->loader, &position);
    PG_TRY(pg_loader_set_state(run->loader, &run->before));
  }
  for (int64_t m = 0; m < run->rounds; m++) {
    if (pg_context_cancelled(ctx))
      PG_TRY(pg_fail(ctx, PG_ECANCELED, "the prediction was cancelled"));
    PG_TRY(pg__next_states(run, &hidden));
    PG_TRY(pg_head_loss(run->model, run->activations, run->targets, 0, &one, NULL));
    sum += one;
  }
fail:;
  char message[sizeof ctx->message];
  memcpy(message, ctx->message, sizeof message);
  if (run->loader) restored = pg_loader_set_state(run->loader, &position);
  if (status == 0) status = restored;
  if (status < 0 && restored == 0) memcpy(ctx->message, message, sizeof message);
  if (status == 0) status = pg_comm_sum_f64(run->comm, ctx, &sum, 1);
  *loss = sum / ((double)run->sequences * (double)run->time);
  return status;
}

/* *out = <x, y> of two fp32 matrices without gaps. */
static int product(pg_run *run, const pg_tensor *x, const pg_tensor *y, float *scratch, double *sum,
                   double *out) {
  pg_context *ctx = run->context;
  const int64_t n = x->shape[0] * x->shape[1];
  int status;
  PG_LAUNCH(ctx, binary, PG_MUL, ((pg_view){x->data, n, 1}), ((pg_view){y->data, n, 1}), 1, n,
            ((pg_view){scratch, n, 1}));
  PG_LAUNCH(ctx, sum, scratch, n, false, sum);
  PG_LAUNCH(ctx, download, out, sum, sizeof *out);
fail:
  return status;
}

/* sum <G, W - W before>, G not clipped. W = keep W_before + S, so that W - W_before is
 * S + (1 - 1/keep) (W - S). NaN when an increment was not kept. */
static int predict(pg_run *run, double *out) {
  pg_context *ctx = run->context;
  float *scratch = NULL;
  double *device = NULL, sum = 0;
  int64_t largest = 0;
  int status = 0;
  *out = NAN;
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    if (!p->gradient) continue;
    if (!p->increment || p->assignment < 0) return 0;
    const pg__assigned *a = run->assigned[p->assignment];
    if (a->kept_at != run->updates || isnan(a->keep)) return 0;
    largest = pg__max(largest, p->rows * p->columns);
  }
  PG_TRY(pg__alloc(ctx, (size_t)largest * sizeof *scratch, "products", (void **)&scratch));
  PG_TRY(pg__alloc(ctx, sizeof *device, "a sum", (void **)&device));
  for (size_t i = 0; i < pg_model_count(run->model); i++) {
    const pg_parameter *p = pg_model_parameter(run->model, i);
    double step, weight = 0;
    if (!p->gradient) continue;
    const double keep = run->assigned[p->assignment]->keep;
    PG_TRY(product(run, p->gradient, p->increment, scratch, device, &step));
    if (keep != 1) PG_TRY(product(run, p->gradient, p->value, scratch, device, &weight));
    sum += keep != 1 ? step + (1 - 1 / keep) * (weight - step) : step;
  }
  *out = sum / run->last_factor;
fail:
  pg__release(ctx, scratch, (size_t)largest * sizeof *scratch);
  pg__release(ctx, device, sizeof *device);
  return status;
}

int pg_run_prediction(pg_run *run, pg_prediction *out) {
  const double start = pg__now();
  int status;
  if (!run->applied)
    return pg_fail(
        run->context, PG_ESTATE,
        "a prediction is of the last update, and none was made since the run was opened");
  PG_TRY(pg_comm_meet(run->comm, run->context, "a prediction", NULL, 0));
  PG_TRY(predict(run, &out->predicted));
  PG_TRY(batch_loss(run, &out->after));
  out->before = run->last_loss;
  out->seconds = pg__now() - start;
  return 0;
fail:
  pg_comm_fail(run->comm, pg_context_message(run->context));
  return status;
}

/* ---- the noise scale ------------------------------------------------------------------------- */
int pg_run_measure_noise(pg_run *run, bool on) {
  const int64_t parts = run->rounds * pg_comm_world(run->comm);
  if (on && parts < 2)
    return pg_fail(run->context, PG_EINVAL,
                   "the noise scale compares micro-batches with the whole batch, which is one "
                   "micro-batch of %lld sequences; smaller ones are needed",
                   (long long)run->micro);
  run->noise.wanted = on;
  if (!on) pg__noise_free(run);
  return 0;
}

void pg__noise_free(pg_run *run) {
  pg_tensor_free(run->noise.parts);
  pg__release(run->context, run->noise.sums, (size_t)run->rounds * sizeof(double));
  run->noise.parts = NULL;
  run->noise.sums = NULL;
  run->noise.measured = false;
}

/* The gradients as they are before the next micro-batch adds its own. */
int pg__noise_before(pg_run *run) {
  pg_context *ctx = run->context;
  int status = 0;
  const int64_t n = pg_tensor_elements(run->gradients);
  if (!run->noise.parts) {
    PG_TRY(pg_tensor_new(ctx, PG_F32, 1, &n, &run->noise.parts));
    PG_TRY(pg__alloc(ctx, (size_t)run->rounds * sizeof(double), "gradient norms",
                     (void **)&run->noise.sums));
  }
  PG_LAUNCH(ctx, copy, run->noise.parts->data, run->gradients->data, (size_t)n * sizeof(float));
fail:
  return status;
}

/* What the micro-batch added to n elements from `at` on. */
int pg__noise_part(pg_run *run, int64_t at, int64_t n) {
  pg_context *ctx = run->context;
  const pg_view part = {(float *)run->noise.parts->data + at, n, 1};
  const pg_view all = {(float *)run->gradients->data + at, n, 1};
  int status;
  PG_LAUNCH(ctx, binary, PG_SUB, all, part, 1, n, part);
fail:
  return status;
}

/* All parts of micro-batch m are there. */
int pg__noise_sum(pg_run *run, int64_t m) {
  pg_context *ctx = run->context;
  int status;
  PG_LAUNCH(ctx, sum, run->noise.parts->data, pg_tensor_elements(run->noise.parts), true,
            &run->noise.sums[m]);
fail:
  return status;
}

/* Mean square of the micro-batches' mean gradients, over all ranks. Gradients are of the mean over
 * the whole batch: a micro-batch's own is `parts` times what it added. */
int pg__noise_finish(pg_run *run, double norm) {
  pg_context *ctx = run->context;
  const double parts = (double)run->rounds * pg_comm_world(run->comm);
  double total = 0, *sums = malloc((size_t)run->rounds * sizeof *sums);
  int status = 0;
  if (!sums) return pg_fail(ctx, PG_ENOMEM, "no memory for gradient norms");
  PG_LAUNCH(ctx, download, sums, run->noise.sums, (size_t)run->rounds * sizeof *sums);
  for (int64_t m = 0; m < run->rounds; m++) total += sums[m];
  PG_TRY(pg_comm_sum_f64(run->comm, ctx, &total, 1));
  run->noise.small_square = total * parts;
  run->noise.large_square = norm * norm;
  run->noise.measured = true;
fail:
  free(sums);
  return status;
}

int pg_run_noise(const pg_run *run, pg_noise *out) {
  if (!run->noise.measured)
    return pg_fail(run->context, PG_ESTATE,
                   "the last gradients were not measured for their noise scale");
  const double b = (double)run->micro, all = (double)run->sequences;
  const double small = run->noise.small_square, large = run->noise.large_square;
  *out = (pg_noise){.small = run->micro,
                    .large = run->sequences,
                    .small_square = small,
                    .large_square = large,
                    .gradient_square = (all * large - b * small) / (all - b),
                    .trace = (small - large) / (1 / b - 1 / all)};
  out->scale = out->trace / out->gradient_square;
  return 0;
}
