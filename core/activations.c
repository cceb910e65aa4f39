/* The buffers of forward and backward passes, planned in one arena.
 *
 * PG_KEEP_ALL keeps, per position and block, 2 d + 6 D + 3 F elements and 2 + 3 heads floats
 * (model_internal.h; d width, D = heads * head_dim, F mlp): 20 d at D = d, F = 4 d, that is 80 d
 * bytes in fp32 and 40 d in bf16. Norm outputs are recomputed, gate and up are overwritten by their
 * gradients. On top, once: 5 d + max(F, 4 D) elements per position, and a chunk of logits of at
 * most 128 MB, which shares memory with the latter. In fp32, at V = 50257, d = 256, 4 blocks and 4
 * heads a position costs 82,144 bytes in the blocks and 5,144 beside them; 8192 positions with the
 * 103 MB chunk: 818 MB. PG_KEEP_INPUTS keeps d elements per block and the rest once: 23,608 bytes
 * in the blocks, for a second forward pass of all blocks but the last, without its last product.
 * PG_KEEP_NOTHING keeps nothing per block: 2 d + max(d + 6 D + 3 F, chunk of logits). In bf16
 * diagnostics need d floats for each row of a chunk. */
#include "model_internal.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_ROWS 512
#define CHUNK_BYTES 134217728
#define LOGITS_PADDING 64

/* A first pass over the plan adds sizes up, a second one takes the memory. */
typedef struct planner {
  pg_dtype compute;
  pg_arena *arena;
  size_t used;
  bool overflow;
} planner;

/* rows x columns elements. */
static void *take_type(planner *p, pg_dtype type, int64_t rows, int64_t columns) {
  size_t bytes, end;
  if (__builtin_mul_overflow((size_t)rows, (size_t)columns, &bytes) ||
      __builtin_mul_overflow(bytes, pg_dtype_size(type), &bytes) || bytes > SIZE_MAX / 2 ||
      __builtin_add_overflow(p->used, pg__arena_size(bytes), &end) || end > INT64_MAX) {
    p->overflow = true;
    return NULL;
  }
  p->used = end;
  return p->arena ? pg__arena_take(p->arena, bytes) : NULL;
}

/* Elements of the compute type. */
static void *take(planner *p, int64_t rows, int64_t columns) {
  return take_type(p, p->compute, rows, columns);
}
/* Four bytes each: statistics, ids, logits. */
static void *take_words(planner *p, int64_t rows, int64_t columns) {
  return take_type(p, PG_F32, rows, columns);
}

static void rewind_to(planner *p, size_t used) {
  p->used = used;
  if (p->arena) p->arena->used = used;
}

/* All of a block's buffers but the residual stream before and within it. */
static void plan_block(planner *p, const pg_model_config *c, int64_t n, pg_block_buffers *b) {
  int64_t inner = c->heads * c->head_dim;
  b->q_raw = take(p, n, inner);
  b->k_raw = take(p, n, inner);
  b->q = take(p, n, inner);
  b->k = take(p, n, inner);
  b->v = take(p, n, inner);
  b->attended = take(p, n, inner);
  b->gate = take(p, n, c->mlp);
  b->up = take(p, n, c->mlp);
  b->product = take(p, n, c->mlp);
  b->input_rstd = take_words(p, n, 1);
  b->middle_rstd = take_words(p, n, 1);
  b->q_rstd = take_words(p, n, c->heads);
  b->k_rstd = take_words(p, n, c->heads);
  b->lse = take_words(p, n, c->heads);
}

/* What the blocks keep for the backward pass; `blocks` may be NULL in a dry run. */
static void plan_kept(planner *p, const pg_model_config *c, int64_t n, bool shared,
                      pg_block_buffers *blocks) {
  pg_block_buffers b = {0};
  for (int64_t i = 0; i < c->layers; i++) {
    b.input = take(p, n, c->width);
    if (i == 0 || !shared) {
      b.middle = take(p, n, c->width);
      plan_block(p, c, n, &b);
    }
    if (blocks) blocks[i] = b;
  }
}

static int64_t padded_vocabulary(const pg_model_config *c) {
  return pg__round_up(pg_model_classes(c), LOGITS_PADDING);
}
/* Rows of logits that exist at once, of n. */
static int64_t chunk_rows(int64_t n, int64_t logits_ld) {
  return pg__min(pg__min(CHUNK_ROWS, n), pg__max(1, CHUNK_BYTES / (4 * logits_ld)));
}

/* What the head needs besides logits when it is not one matrix with its whole gradient. */
static void plan_head(pg_activations *a, planner *p) {
  const pg_model_config *c = &a->config;
  const int64_t columns = c->head.rank ? c->head.rank : c->width;
  const bool backward = a->keep != PG_KEEP_NOTHING;
  if (c->head.rank) a->inner = take_words(p, a->chunk, c->head.rank);
  if (c->head.rank && backward) a->dinner = take(p, a->chunk, c->head.rank);
  if (pg__head_narrows(c) && backward) a->projected = take(p, a->chunk, c->head.backward_rank);
  if (c->head.drop_residual && backward) a->moment = take_words(p, columns, columns);
}

/* Returns the bytes needed; INT64_MAX when they cannot be counted. `a` has config, capacity,
 * max_time and keep set; blocks may be NULL in a dry run. */
static int64_t plan(pg_activations *a, pg_arena *arena) {
  const pg_model_config *c = &a->config;
  planner p = {.compute = a->compute, .arena = arena};
  int64_t n = a->capacity, inner = c->heads * c->head_dim;
  size_t shared, high;

  for (int i = 0; i < 2; i++) {
    a->tokens[i] = take_words(&p, n, 1);
    a->targets[i] = take_words(&p, n, 1);
  }
  a->losses = take_words(&p, n, 1);
  a->loss_sum = take_words(&p, 2, 1);
  a->cosine = take_words(&p, a->max_time, c->head_dim / 2);
  a->sine = take_words(&p, a->max_time, c->head_dim / 2);
  a->output = take(&p, n, c->width);
  a->output_rstd = take_words(&p, n, 1);
  a->hidden = take(&p, n, c->width);
  if (a->keep != PG_KEEP_NOTHING) {
    a->stream = take(&p, n, c->width);
    a->norm = take(&p, n, c->width);
    a->dnorm = take(&p, n, c->width);
    plan_kept(&p, c, n, a->keep == PG_KEEP_INPUTS, a->blocks);
  }

  /* From here on three tenants share memory, never at the same time: scratch of the blocks'
   * backward pass or of a forward pass that keeps nothing, and the head's logits. */
  shared = p.used;
  if (a->keep != PG_KEEP_NOTHING) {
    a->dproduct = take(&p, n, c->mlp);
    high = p.used;
    rewind_to(&p, shared);
    a->dattended = take(&p, n, inner);
    a->dq = take(&p, n, inner);
    a->dk = take(&p, n, inner);
    a->dv = take(&p, n, inner);
  } else {
    pg_block_buffers one = {.input = a->output, .middle = a->output};
    a->norm = take(&p, n, c->width);
    plan_block(&p, c, n, &one);
    for (int64_t i = 0; a->blocks && i < c->layers; i++) a->blocks[i] = one;
    high = p.used;
  }
  high = p.used > high ? p.used : high;
  rewind_to(&p, shared);
  a->logits_ld = padded_vocabulary(c);
  a->chunk = chunk_rows(n, a->logits_ld);
  a->logits = take_words(&p, a->chunk, a->logits_ld);
  a->wide = a->compute == PG_F32 ? NULL : take_words(&p, a->chunk, c->width);
  plan_head(a, &p);
  high = p.used > high ? p.used : high;
  return p.overflow ? INT64_MAX : (int64_t)high;
}

/* Angles pos * base^(-2i/head_dim) in fp64; their cosines and sines are rounded once. */
static int upload_rotation(pg_activations *a) {
  pg_context *ctx = a->context;
  int64_t half = a->config.head_dim / 2, count = a->max_time * half;
  int status = 0;
  float *table = malloc((size_t)(2 * count) * sizeof *table);
  if (!table) return pg_fail(ctx, PG_ENOMEM, "no memory for the rotation tables");
  for (int64_t i = 0; i < half; i++) {
    double rate = pow(a->config.rope_base, -2.0 * (double)i / (double)a->config.head_dim);
    for (int64_t t = 0; t < a->max_time; t++) {
      table[t * half + i] = (float)cos((double)t * rate);
      table[count + t * half + i] = (float)sin((double)t * rate);
    }
  }
  PG_LAUNCH(ctx, upload, a->cosine, table, (size_t)count * sizeof *table);
  PG_LAUNCH(ctx, upload, a->sine, table + count, (size_t)count * sizeof *table);
fail:
  free(table);
  return status;
}

int pg_activations_new(pg_context *ctx, const pg_model_config *config, pg_dtype compute,
                       int64_t batch, int64_t time, pg_keep keep, pg_activations **out) {
  int status;
  int64_t bytes = INT64_MAX, capacity;
  pg_activations *a = NULL;
  pg_model_config resolved = *config;
  *out = NULL;
  PG_TRY(pg_model_config_resolve(ctx, &resolved));
  if (compute != PG_F32 && compute != PG_BF16)
    return pg_fail(ctx, PG_EINVAL, "activations cannot be %s; allowed: F32, BF16",
                   pg_dtype_name(compute));
  if (time < 1 || time > resolved.context)
    return pg_fail(ctx, PG_EINVAL, "time is %lld; allowed: 1 to the model's context %lld",
                   (long long)time, (long long)resolved.context);
  if (batch < 1 || __builtin_mul_overflow(batch, time, &capacity) || capacity > INT32_MAX)
    return pg_fail(ctx, PG_EINVAL, "batch is %lld; allowed: 1 to %lld sequences of %lld tokens",
                   (long long)batch, (long long)(INT32_MAX / time), (long long)time);
  a = calloc(1, sizeof *a);
  if (!a) goto memory;
  a->context = ctx;
  a->config = resolved;
  a->compute = compute;
  a->capacity = capacity;
  a->max_time = time;
  a->keep = keep;
  bytes = plan(a, NULL);
  if (bytes == INT64_MAX) goto memory;
  a->blocks = calloc((size_t)pg__max(1, resolved.layers), sizeof *a->blocks);
  if (!a->blocks) goto memory;
  status = pg__arena_new(ctx, (size_t)bytes, "activations", &a->arena);
  if (status == PG_ENOMEM) goto memory;
  if (status < 0) goto fail;
  plan(a, &a->arena);
  PG_TRY(upload_rotation(a));
  /* The memory may have had another owner, whose work is still queued. */
  PG_TRY(pg__join_uploads(ctx));
  *out = a;
  return 0;
memory:
  status = pg_fail(ctx, PG_ENOMEM,
                   "no memory for the activations of %lld sequences of %lld tokens (%.1f GB%s); "
                   "fewer sequences per micro-batch need less",
                   (long long)batch, (long long)time, 1e-9 * (double)bytes,
                   keep == PG_KEEP_NOTHING ? "" : ", training");
fail:
  pg_activations_free(a);
  return status;
}

void pg_activations_free(pg_activations *a) {
  if (!a) return;
  pg__arena_free(&a->arena);
  free(a->blocks);
  free(a);
}

void pg_activations_size(const pg_activations *a, int64_t *positions, int64_t *time) {
  *positions = a->capacity;
  *time = a->max_time;
}

int64_t pg_activations_bytes(const pg_model_config *config, pg_dtype compute, int64_t batch,
                             int64_t time, pg_keep keep) {
  pg_activations a = {.config = *config, .compute = compute, .max_time = time, .keep = keep};
  if (config->vocab < 1 || config->width < 1 || config->heads < 1 || batch < 1 || time < 1)
    return INT64_MAX;
  if (__builtin_mul_overflow(batch, time, &a.capacity)) return INT64_MAX;
  if (a.config.head_dim == 0) a.config.head_dim = 64;
  if (a.config.mlp == 0) a.config.mlp = 4 * a.config.width;
  return plan(&a, NULL);
}

int64_t pg__logits_bytes(const pg_model_config *config, pg_dtype compute, int64_t n) {
  const int64_t ld = padded_vocabulary(config);
  return chunk_rows(n, ld) * (ld + (compute == PG_F32 ? 0 : config->width)) *
         (int64_t)sizeof(float);
}

int pg__activations_check(const pg_model *model, const pg_activations *a) {
  if (a->compute != model->compute)
    return pg_fail(model->context, PG_EINVAL, "these activations are %s, the model computes in %s",
                   pg_dtype_name(a->compute), pg_dtype_name(model->compute));
  if (pg__model_config_matches(&model->config, &a->config)) return 0;
  return pg_fail(model->context, PG_EINVAL,
                 "these activations were made for a model of other sizes");
}

/* pair[1] was last read by what was queued before pair[0] came, with a join between the two. */
int pg__bring_ids(pg_context *ctx, const int32_t *ids, int64_t n, int32_t *pair[2]) {
  int status;
  PG_LAUNCH(ctx, upload_beside, pair[1], ids, (size_t)n * sizeof *ids);
  pg__begin(ctx, PG_PART_DATA_WAIT, "join");
  status = pg__join_uploads(ctx);
  pg__end(ctx);
  PG_TRY(status);
  int32_t *arrived = pair[1];
  pair[1] = pair[0];
  pair[0] = arrived;
fail:
  return status;
}

int pg__check_ids(pg_context *ctx, const int32_t *ids, int64_t n, int64_t vocab, const char *what) {
  for (int64_t i = 0; i < n; i++)
    if (ids[i] < 0 || ids[i] >= vocab)
      return pg_fail(ctx, PG_EDATA, "%s %lld is %ld; allowed: 0 to %lld (the vocabulary)", what,
                     (long long)i, (long)ids[i], (long long)(vocab - 1));
  return 0;
}
