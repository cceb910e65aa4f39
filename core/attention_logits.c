/* The largest attention logit of every head: scores of a block of rows at a time, for one sequence
 * and one block of the transformer, right after that block has made its queries and keys. */
#include "logits.h"
#include "model_internal.h"
#include "panel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SCORES ((int64_t)1 << 22) /* elements of scores at a time */

typedef struct job {
  const pg_model *model;
  pg_activations *a;
  float *largest;       /* [layers * heads] */
  int64_t rows;         /* of scores at a time */
  float *device, *host; /* [heads, rows, time] */
} job;

/* Rows [first, first + count) of sequence b, against all positions up to the last of them. */
static int block_of_rows(job *j, int64_t layer, int64_t b, int64_t first, int64_t count) {
  pg_context *ctx = pg_model_context(j->model);
  const pg_activations *a = j->a;
  const pg_model_config *c = &j->model->config;
  const pg_block_buffers *buffers = &a->blocks[layer];
  const int64_t inner = c->heads * c->head_dim, start = b * a->time, columns = first + count;
  const pg_gemm g = {.transpose_b = true,
                     .m = count,
                     .n = columns,
                     .k = c->head_dim,
                     .alpha = (float)(1 / sqrt((double)c->head_dim)),
                     .a = pg__element(a->compute, buffers->q, (start + first) * inner),
                     .lda = inner,
                     .b = pg__element(a->compute, buffers->k, start * inner),
                     .ldb = inner,
                     .c = j->device,
                     .ldc = columns,
                     .type_a = a->compute,
                     .type_b = a->compute,
                     .type_c = PG_F32,
                     .batch = c->heads,
                     .stride_a = c->head_dim,
                     .stride_b = c->head_dim,
                     .stride_c = count * columns};
  int status;
  PG_LAUNCH(ctx, gemm, &g);
  PG_LAUNCH(ctx, download, j->host, j->device,
            (size_t)(c->heads * count * columns) * sizeof *j->host);
  for (int64_t h = 0; h < c->heads; h++) {
    float most = j->largest[layer * c->heads + h];
    for (int64_t i = 0; i < count; i++) {
      const float *scores = j->host + (h * count + i) * columns;
      for (int64_t t = 0; t <= first + i; t++) {
        if (!isfinite(scores[t]))
          PG_TRY(pg_fail(ctx, PG_ENONFINITE,
                         "an attention logit of block %lld, head %lld (counted from 0) is %g",
                         (long long)layer, (long long)h, (double)scores[t]));
        most = fmaxf(most, scores[t]);
      }
    }
    j->largest[layer * c->heads + h] = most;
  }
fail:
  return status;
}

static int after_block(void *self, int64_t layer) {
  job *j = self;
  int status = 0;
  for (int64_t b = 0; b < j->a->batch; b++)
    for (int64_t first = 0; first < j->a->time; first += j->rows)
      PG_TRY(block_of_rows(j, layer, b, first, pg__min(j->rows, j->a->time - first)));
fail:
  return status;
}

static int batch(void *self, const int32_t *ids, const int32_t *targets,
                 const pg_panel_piece *pieces, int64_t sequences, int64_t length) {
  job *j = self;
  (void)targets, (void)pieces;
  return pg__model_forward_blocks(j->model, j->a, ids, sequences, length, after_block, j);
}

int pg_panel_attention(const pg_model *model, pg_activations *a, const pg_panel *panel,
                       pg_comm *comm, float *largest, double *seconds) {
  pg_context *ctx = pg_model_context(model);
  const pg_model_config *c = pg_model_get_config(model);
  const int64_t count = c->layers * c->heads;
  job j = {.model = model, .a = a, .largest = largest};
  pg__panel_visit visit = {.what = "the attention logits", .comm = comm, .batch = batch};
  const double start = pg__now();
  double *wide = NULL;
  size_t bytes = 0;
  int status = 0;
  visit.self = &j;
  pg_activations_size(a, &visit.positions, &visit.time);
  j.rows = pg__max(1, pg__min(visit.time, SCORES / (c->heads * visit.time)));
  bytes = (size_t)(c->heads * j.rows * visit.time) * sizeof *j.device;
  for (int64_t i = 0; i < count; i++) largest[i] = -INFINITY;
  PG_TRY(pg__alloc(ctx, bytes, "attention logits", (void **)&j.device));
  j.host = malloc(bytes);
  wide = malloc((size_t)pg__max(1, count) * sizeof *wide);
  if (!j.host || !wide) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for attention logits"));
  PG_TRY(pg__panel_pass(ctx, panel, &visit));
  if (comm && pg_comm_world(comm) > 1) { /* a rank may have had no sequence: -infinity */
    for (int64_t i = 0; i < count; i++) wide[i] = largest[i];
    PG_TRY(pg_comm_meet(comm, ctx, "the attention logits", NULL, 0));
    PG_TRY(pg_comm_max_f64(comm, ctx, wide, count));
    for (int64_t i = 0; i < count; i++) largest[i] = (float)wide[i];
  }
  if (seconds) *seconds = pg__now() - start;
fail:
  if (status < 0 && comm) pg_comm_fail(comm, pg_context_message(ctx));
  if (j.device) pg__release(ctx, j.device, bytes);
  free(j.host);
  free(wide);
  return status;
}
