/* A model: its named parameters, their initial weights, and copies. */
#include "files.h"
#include "gram.h"
#include "model_internal.h"
#include "random.h"
#include "tensor_ops.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The embedding's and the head's storage is a whole number of these rows, so that kernels may
 * work on aligned tiles of the vocabulary; only the vocabulary's own rows are ever viewed. */
#define ROW_PADDING 64
/* Every value starts on a cache line, and so does its bf16 copy. */
#define VALUE_ELEMENTS 32

static int64_t storage_rows(const pg_parameter *p) {
  return p->role == PG_BACKBONE ? p->rows : pg__round_up(p->rows, ROW_PADDING);
}

static int describe(pg_parameter *p, pg_role role, int64_t layer, const char *name, int64_t rows,
                    int64_t columns) {
  char full[96];
  if (layer >= 0)
    snprintf(full, sizeof full, "model.layers.%lld.%s.weight", (long long)layer, name);
  else
    snprintf(full, sizeof full, "%s.weight", name);
  *p = (pg_parameter){.name = strdup(full),
                      .role = role,
                      .layer = layer,
                      .rows = rows,
                      .columns = columns,
                      .assignment = -1};
  return p->name ? 0 : -1;
}

static int describe_all(pg_model *model) {
  const pg_model_config *c = &model->config;
  int64_t d = c->width, inner = c->heads * c->head_dim;
  const struct {
    const char *name;
    int64_t rows, columns;
  } matrices[PG_BLOCK_MATRICES] = {
      [PG_Q] = {"self_attn.q_proj", inner, d},  [PG_K] = {"self_attn.k_proj", inner, d},
      [PG_V] = {"self_attn.v_proj", inner, d},  [PG_O] = {"self_attn.o_proj", d, inner},
      [PG_GATE] = {"mlp.gate_proj", c->mlp, d}, [PG_UP] = {"mlp.up_proj", c->mlp, d},
      [PG_DOWN] = {"mlp.down_proj", d, c->mlp},
  };
  pg_parameter *p = model->parameters;
  int bad = describe(p++, PG_EMBEDDING, -1, "model.embed_tokens", c->vocab, d);
  for (int64_t layer = 0; layer < c->layers; layer++)
    for (int i = 0; i < PG_BLOCK_MATRICES; i++)
      bad |= describe(p++, PG_BACKBONE, layer, matrices[i].name, matrices[i].rows,
                      matrices[i].columns);
  const int64_t rank = c->head.rank, classes = pg_model_classes(c);
  if (rank) {
    bad |= describe(p++, PG_HEAD, -1, "lm_head.right", rank, d);
    bad |= describe(p, PG_HEAD, -1, "lm_head.left", classes, rank);
  } else {
    bad |= describe(p, PG_HEAD, -1, "lm_head", classes, d);
  }
  return bad;
}

int pg_model_describe(pg_context *ctx, const pg_model_config *config, pg_model **out) {
  int status;
  pg_model *model = NULL;
  pg_model_config resolved = *config;
  *out = NULL;
  PG_TRY(pg_model_config_resolve(ctx, &resolved));
  model = calloc(1, sizeof *model);
  if (!model) goto memory;
  model->context = ctx;
  model->config = resolved;
  size_t count = (size_t)(resolved.layers * PG_BLOCK_MATRICES + 2 + (resolved.head.rank > 0));
  model->parameters = calloc(count, sizeof *model->parameters);
  if (!model->parameters) goto memory;
  model->count = count;
  if (describe_all(model)) goto memory;
  *out = model;
  return 0;
memory:
  status = pg_fail(ctx, PG_ENOMEM, "no memory for the names of %lld layers' parameters",
                   (long long)resolved.layers);
fail:
  pg_model_free(model);
  return status;
}

int64_t pg__model_elements(const pg_model *model) {
  int64_t elements = 0;
  for (size_t i = 0; i < model->count; i++)
    elements += pg__round_up(storage_rows(&model->parameters[i]) * model->parameters[i].columns,
                             VALUE_ELEMENTS);
  if (pg__head_narrows(&model->config))
    elements +=
        pg__round_up(model->config.head.backward_rank * model->config.width, VALUE_ELEMENTS);
  return elements;
}

/* The subspace that the backward pass of the head keeps: Gaussian rows, made orthonormal, so that
 * it is uniform among those of its dimension and the same for every model of the config. */
static int make_basis(pg_model *model, int64_t offset) {
  pg_context *ctx = model->context;
  const int64_t shape[2] = {model->config.head.backward_rank, model->config.width};
  const int64_t stride[2] = {shape[1], 1}, n = shape[0] * shape[1];
  int status = 0;
  float *narrow = malloc((size_t)n * sizeof *narrow);
  double *wide = malloc((size_t)n * sizeof *wide);
  if (!narrow || !wide)
    PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory for the head's backward subspace"));
  pg_normals((uint64_t)model->config.head.backward_seed, pg_hash_name("lm_head.backward"), 0,
             (size_t)n, narrow);
  for (int64_t i = 0; i < n; i++) wide[i] = (double)narrow[i];
  PG_TRY(pg__orthonormal_rows(ctx, wide, shape[0], shape[1]));
  for (int64_t i = 0; i < n; i++) narrow[i] = (float)wide[i];
  PG_TRY(pg_tensor_view(model->weights, offset, 2, shape, stride, &model->basis));
  PG_TRY(pg_tensor_write(model->basis, narrow));
fail:
  free(narrow);
  free(wide);
  return status;
}

int pg_model_new(pg_context *ctx, const pg_model_config *config, pg_model **out) {
  int status;
  int64_t floats, offset = 0;
  pg_model *model = NULL;
  *out = NULL;
  PG_TRY(pg_model_describe(ctx, config, &model));
  /* One allocation: what does not fit is refused before any of it is touched. */
  floats = pg__model_elements(model);
  status = pg_tensor_new(ctx, PG_F32, 1, &floats, &model->weights);
  if (status == PG_ENOMEM) {
    const pg_model_config *c = &model->config;
    status =
        pg_fail(ctx, PG_ENOMEM,
                "no memory for a model of %lld weights (%.1f GB in fp32; layers %lld, width "
                "%lld, mlp %lld, vocab %lld)",
                (long long)pg_model_config_weights(c), 4e-9 * (double)pg_model_config_weights(c),
                (long long)c->layers, (long long)c->width, (long long)c->mlp, (long long)c->vocab);
  }
  PG_TRY(status);
  for (size_t i = 0; i < model->count; i++) {
    pg_parameter *p = &model->parameters[i];
    int64_t shape[2] = {p->rows, p->columns}, stride[2] = {p->columns, 1};
    PG_TRY(pg_tensor_view(model->weights, offset, 2, shape, stride, &p->value));
    offset += pg__round_up(storage_rows(p) * p->columns, VALUE_ELEMENTS);
  }
  if (pg__head_narrows(&model->config)) PG_TRY(make_basis(model, offset));
  *out = model;
  return 0;
fail:
  pg_model_free(model);
  return status;
}

void pg_model_free(pg_model *model) {
  if (!model) return;
  for (size_t i = 0; i < model->count; i++) {
    pg_tensor_free(model->parameters[i].value);
    pg_tensor_free(model->parameters[i].copy);
    free((char *)model->parameters[i].name);
  }
  pg_tensor_free(model->basis);
  pg_tensor_free(model->basis_copy);
  pg_tensor_free(model->weights);
  pg_tensor_free(model->copies);
  free(model->parameters);
  free(model);
}

const pg_model_config *pg_model_get_config(const pg_model *model) {
  return &model->config;
}

pg_context *pg_model_context(const pg_model *model) {
  return model->context;
}

size_t pg_model_count(const pg_model *model) {
  return model->count;
}

pg_parameter *pg_model_parameter(const pg_model *model, size_t index) {
  return index < model->count ? &model->parameters[index] : NULL;
}

pg_parameter *pg_model_find(const pg_model *model, const char *name) {
  for (size_t i = 0; i < model->count; i++)
    if (!strcmp(model->parameters[i].name, name)) return &model->parameters[i];
  return NULL;
}

pg_parameter *pg_model_embedding(const pg_model *model) {
  return &model->parameters[0];
}

pg_parameter *pg_model_head(const pg_model *model) {
  return &model->parameters[model->count - 1];
}

pg_parameter *pg_model_head_inner(const pg_model *model) {
  return model->config.head.rank ? &model->parameters[model->count - 2] : NULL;
}

int pg_model_head_matrix(const pg_model *model, pg_tensor **out) {
  const pg_tensor *head = pg_model_head(model)->value;
  const pg_parameter *inner = pg_model_head_inner(model);
  if (inner) return pg_tensor_matmul(head, inner->value, out);
  return pg_tensor_view(head, 0, 2, head->shape, head->stride, out);
}

/* ---- the compute type ------------------------------------------------------------------ */
static void drop_copies(pg_model *model) {
  for (size_t i = 0; i < model->count; i++) {
    pg_tensor_free(model->parameters[i].copy);
    model->parameters[i].copy = NULL;
  }
  pg_tensor_free(model->basis_copy);
  pg_tensor_free(model->copies);
  model->copies = model->basis_copy = NULL;
  model->compute = PG_F32;
}

int pg_model_set_compute(pg_model *model, pg_dtype type) {
  pg_context *ctx = model->context;
  int64_t elements = pg_tensor_elements(model->weights), offset = 0;
  int status;
  if (type != PG_F32 && type != PG_BF16)
    return pg_fail(ctx, PG_EINVAL, "a model cannot compute in %s; allowed: F32, BF16",
                   pg_dtype_name(type));
  if (type == model->compute) return pg_model_refresh(model, NULL);
  drop_copies(model);
  if (type == PG_F32) return 0;
  status = pg_tensor_new(ctx, type, 1, &elements, &model->copies);
  if (status == PG_ENOMEM)
    status = pg_fail(ctx, PG_ENOMEM, "no memory for the bf16 copies of %lld weights (%.1f GB)",
                     (long long)pg_model_config_weights(&model->config), 2e-9 * (double)elements);
  PG_TRY(status);
  for (size_t i = 0; i < model->count; i++) {
    pg_parameter *p = &model->parameters[i];
    int64_t shape[2] = {p->rows, p->columns}, stride[2] = {p->columns, 1};
    PG_TRY(pg_tensor_view(model->copies, offset, 2, shape, stride, &p->copy));
    offset += pg__round_up(storage_rows(p) * p->columns, VALUE_ELEMENTS);
  }
  if (model->basis) {
    const pg_tensor *b = model->basis;
    PG_TRY(pg_tensor_view(model->copies, offset, 2, b->shape, b->stride, &model->basis_copy));
    PG_LAUNCH(ctx, convert, PG_F32, b->data, PG_BF16, model->basis_copy->data,
              pg_tensor_elements(b));
  }
  model->compute = type;
  PG_TRY(pg_model_refresh(model, NULL));
  return 0;
fail:
  drop_copies(model);
  return status;
}

pg_dtype pg_model_compute(const pg_model *model) {
  return model->compute;
}

int pg_model_refresh(pg_model *model, const pg_parameter *parameter) {
  pg_context *ctx = model->context;
  int status = 0;
  for (size_t i = 0; i < model->count; i++) {
    const pg_parameter *p = &model->parameters[i];
    if (!p->copy || (parameter && p != parameter)) continue;
    pg__at(ctx, p->name, 0);
    PG_LAUNCH(ctx, convert, PG_F32, p->value->data, PG_BF16, p->copy->data, p->rows * p->columns);
  }
fail:
  return status;
}

/* Normals are drawn on the host in slabs: a pure function of their index, so threads share a slab
 * without changing it. */
#define SLAB (1 << 18)
#define PIECE (1 << 13)

static int init_parameter(pg_context *ctx, pg_parameter *p, double std, uint64_t seed,
                          float *slab) {
  int status = 0;
  uint64_t stream = pg_hash_name(p->name);
  int64_t n = p->rows * p->columns;
  for (int64_t first = 0; first < n; first += SLAB) {
    int64_t count = pg__min(SLAB, n - first);
#pragma omp parallel for num_threads(ctx->threads) schedule(static)
    for (int64_t i = 0; i < count; i += PIECE) {
      int64_t size = pg__min(PIECE, count - i);
      pg_normals(seed, stream, (uint64_t)(first + i), (size_t)size, slab + i);
      for (int64_t j = i; j < i + size; j++) slab[j] = (float)(std * slab[j]);
    }
    PG_LAUNCH(ctx, upload, (float *)p->value->data + first, slab, (size_t)count * sizeof *slab);
  }
fail:
  return status;
}

int pg_model_init(pg_model *model, uint64_t seed) {
  pg_context *ctx = model->context;
  int status = 0;
  float *slab = malloc(SLAB * sizeof *slab);
  if (!slab) return pg_fail(ctx, PG_ENOMEM, "no memory to draw initial weights");
  for (size_t i = 0; i < model->count; i++) {
    pg_parameter *p = &model->parameters[i];
    const double std = p == pg_model_head_inner(model) ? 1 / sqrt((double)p->rows)
                                                       : model->config.init_std[p->role];
    PG_TRY(init_parameter(ctx, p, std, seed, slab));
  }
  PG_TRY(pg_model_refresh(model, NULL));
fail:
  free(slab);
  return status;
}

int pg_model_copy(pg_model *to, const pg_model *from) {
  int status = 0;
  if (to->context != from->context || !pg__model_config_matches(&to->config, &from->config))
    return pg_fail(to->context, PG_EINVAL,
                   "weights can be copied between models of equal sizes in one context only");
  for (size_t i = 0; i < to->count; i++)
    PG_TRY(pg_tensor_copy(to->parameters[i].value, from->parameters[i].value));
  PG_TRY(pg_model_refresh(to, NULL));
fail:
  return status;
}

int pg_model_sha256(const pg_model *model, const pg_parameter *parameter, char hex[65]) {
  int status = 0;
  char *all = calloc(model->count, 64);
  float *values = NULL;
  size_t count = 0;
  if (!all) return pg_fail(model->context, PG_ENOMEM, "no memory to hash the weights");
  for (size_t i = 0; i < model->count; i++) {
    const pg_parameter *p = &model->parameters[i];
    const size_t bytes = (size_t)(p->rows * p->columns) * sizeof *values;
    if (parameter && p != parameter) continue;
    free(values);
    if (!(values = malloc(bytes)))
      PG_TRY(pg_fail(model->context, PG_ENOMEM, "no memory to hash %s (%lld x %lld)", p->name,
                     (long long)p->rows, (long long)p->columns));
    PG_TRY(pg_tensor_read(p->value, values));
    pg_sha256(values, bytes, hex);
    memcpy(all + 64 * count++, hex, 64);
  }
  pg_sha256(all, 64 * count, hex);
fail:
  free(values);
  free(all);
  return status;
}
