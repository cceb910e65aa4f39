/* The transformer of SPEC §1 (Hugging Face's Qwen3ForCausalLM with unit gains, untied head): its
 * sizes, its named parameters, forward and backward. A pg_model is a weight set; gradients, slots
 * and increments hang on its parameters only where a run asked for them, so that validation,
 * checkpoint comparison and probes use plain models and share this code. */
#ifndef PG_MODEL_H
#define PG_MODEL_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Roles partition the parameters. */
typedef enum pg_role { PG_EMBEDDING, PG_BACKBONE, PG_HEAD, PG_ROLES } pg_role;
const char *pg_role_name(pg_role role); /* "embedding", "backbone", "head" */

/* What tests of cause change about the head U and its backward pass (the gradient bottleneck,
 * bottleneck.h). Zeros change nothing. g is the loss's gradient at the logits. */
typedef struct pg_head_config {
  int64_t rank;  /* U = A B with A [V, rank], B [rank, width]; 0: one matrix. At most the width */
  int64_t extra; /* rows after the vocabulary's, classes of the softmax that are never a target */
  /* Of U^T g only the projection onto a fixed random subspace of so many dimensions reaches the
   * blocks; the forward pass and the head's own gradient stay what they are. 0 or width: all */
  int64_t backward_rank;
  int64_t backward_seed; /* what that subspace is drawn from, >= 0 */
  /* The gradient of U (or A) is projected onto its own column space, U (U^T U)^-1 U^T g h^T: it
   * learns from no more than what the blocks are told. Takes independent columns */
  bool drop_residual;
} pg_head_config;

typedef struct pg_model_config {
  int64_t layers;            /* >= 0 */
  int64_t width;             /* d */
  int64_t heads;             /* heads * head_dim need not equal width */
  int64_t head_dim;          /* even */
  int64_t mlp;               /* inner width of SwiGLU */
  int64_t vocab;             /* V >= 2 */
  int64_t context;           /* T, the longest sequence */
  double norm_eps;           /* 1e-6 */
  double rope_base;          /* 1e4 */
  double logit_scale;        /* logits = logit_scale * U h; 1 */
  double init_std[PG_ROLES]; /* standard deviation of initial weights per role; 0.02; 0 allowed.
                                Of A when the head is A B; B's is 1/sqrt(rank), and so U has it */
  pg_head_config head;
} pg_model_config;

/* Zero sizes, default constants. Then set sizes; head_dim 0 means 64, mlp 0 means 4 width. */
void pg_model_config_default(pg_model_config *config);
/* Presets of the paper, "190m" "380m" "640m" (case and - _ . ignored). PG_ENOENT otherwise. */
int pg_model_config_preset(pg_context *ctx, const char *name, pg_model_config *config);
/* Fill in head_dim and mlp and check everything: PG_EINVAL names the size, its value, the range. */
int pg_model_config_resolve(pg_context *ctx, pg_model_config *config);
/* Number of weights of a resolved config: layers * (4 d heads head_dim + 3 d mlp) + V d and the
 * head's, (V + extra) d, or (V + extra + d) rank. */
int64_t pg_model_config_weights(const pg_model_config *config);

/* A parameter: a named matrix [rows, columns], what hangs on it, and who updates it. Storage may
 * have more rows than `rows` (padding); no operation reads those. */
typedef struct pg_parameter {
  /* read-only for users */
  const char *name; /* Hugging Face tensor name */
  pg_role role;
  int64_t layer; /* block index from 0; -1 outside the blocks */
  int64_t rows, columns;
  pg_tensor *value;     /* fp32 [rows, columns] */
  pg_tensor *copy;      /* value rounded to bf16, what products read; NULL in fp32 */
  pg_tensor *gradient;  /* NULL: not computed (frozen, or no run) */
  pg_tensor *increment; /* NULL: not kept. Scaled by the learning rate, weight decay excluded */
  pg_tensor **slots;    /* optimizer state, as the optimizer's slot list declares */
  int64_t updates;      /* own updates done: n of SPEC §3 */
  int assignment;       /* index into the run's assignments; -1 none */
} pg_parameter;

typedef struct pg_model pg_model;

/* Allocate all parameters, zero. Order: embedding, blocks 0…L-1 (q k v o gate up down), head (B
 * before A where it is A B). */
int pg_model_new(pg_context *ctx, const pg_model_config *config, pg_model **out);
/* A model without memory: its parameters have names, roles and shapes, and no values. */
int pg_model_describe(pg_context *ctx, const pg_model_config *config, pg_model **out);
void pg_model_free(pg_model *model);
const pg_model_config *pg_model_get_config(const pg_model *model);
pg_context *pg_model_context(const pg_model *model);
size_t pg_model_count(const pg_model *model);
pg_parameter *pg_model_parameter(const pg_model *model, size_t index);
/* NULL when there is none of that name. */
pg_parameter *pg_model_find(const pg_model *model, const char *name);
pg_parameter *pg_model_embedding(const pg_model *model);
pg_parameter *pg_model_head(const pg_model *model);       /* U, or A where it is A B */
pg_parameter *pg_model_head_inner(const pg_model *model); /* B; NULL where U is one matrix */
/* U [V + extra, width] as a tensor of the caller's: a view, or the product of the present A and B.
 */
int pg_model_head_matrix(const pg_model *model, pg_tensor **out);
/* Classes of the softmax, V + extra. */
int64_t pg_model_classes(const pg_model_config *config);

/* What products of this model compute in: PG_F32 (at first) or PG_BF16, which keeps a rounded copy
 * of every parameter. Everything here that changes weights refreshes the copies; who changes a
 * value otherwise calls pg_model_refresh with the parameter, or NULL for all. No-op in fp32. */
int pg_model_set_compute(pg_model *model, pg_dtype type);
pg_dtype pg_model_compute(const pg_model *model);
int pg_model_refresh(pg_model *model, const pg_parameter *parameter);
/* SHA-256 over the values of a parameter, or NULL for all in order; they are read to the host. */
int pg_model_sha256(const pg_model *model, const pg_parameter *parameter, char hex[65]);

/* Draw weights N(0, init_std[role]^2) from Philox: element i of a parameter is normal number i of
 * stream hash(name) under `seed` (random.h). */
int pg_model_init(pg_model *model, uint64_t seed);
/* Copy weights from `path` (safetensors, a file or a folder; Hugging Face names). Every parameter
 * must be there with the right shape in F32, BF16 or F16; extra tensors must be the unit norm
 * gains, else PG_EFORMAT.
 */
int pg_model_load(pg_model *model, const char *path);
/* Write model.safetensors as transformers reads it, unit gains included. */
int pg_model_save(const pg_model *model, const char *path);
/* Copy the weights of one model into another of the same config. */
int pg_model_copy(pg_model *to, const pg_model *from);

/* ---- forward and backward -------------------------------------------------------------- */
/* What a forward pass leaves behind for a backward pass. The last two give the same bits. */
typedef enum pg_keep {
  PG_KEEP_NOTHING, /* there is no backward pass */
  PG_KEEP_ALL,     /* whatever a block's backward pass reads, of every block */
  PG_KEEP_INPUTS   /* every block's input: its backward pass first runs its forward pass again */
} pg_keep;

/* Buffers of a forward pass for up to batch * time positions, and, unless nothing is kept, of the
 * backward pass. Independent of the weights: any model of this config and compute type may use it.
 * In bf16 the residual stream, its gradient and the operands of products are bf16; logits and
 * statistics are fp32, and gradients of weights accumulate in fp32. */
typedef struct pg_activations pg_activations;
int pg_activations_new(pg_context *ctx, const pg_model_config *config, pg_dtype compute,
                       int64_t batch, int64_t time, pg_keep keep, pg_activations **out);
void pg_activations_free(pg_activations *a);
/* How many positions it holds, batch * time at most, and the longest time. */
void pg_activations_size(const pg_activations *a, int64_t *positions, int64_t *time);

/* Run the blocks and the final norm on tokens[batch*time] (host memory, checked against the
 * vocabulary: PG_EDATA names the position and the value). batch and time may be smaller than the
 * arena's. Afterwards *hidden (device, [batch*time, width] in the compute type; NULL: not wanted)
 * is valid until the next forward. */
int pg_model_forward(const pg_model *model, pg_activations *a, const int32_t *tokens, int64_t batch,
                     int64_t time, const void **hidden);

/* The head on the hidden states of the last forward, in row chunks: never all logits at once.
 * targets[batch*time] in host memory, checked like tokens. *loss_sum: sum of the tokens' cross
 * entropies (fp64). `losses` (host, may be NULL) receives each. With gradient_scale != 0 also
 * the gradient of gradient_scale * loss_sum: added to the head's gradient (when it has one), and
 * kept for pg_model_backward. */
int pg_head_loss(const pg_model *model, pg_activations *a, const int32_t *targets,
                 double gradient_scale, double *loss_sum, float *losses);
/* Add the gradients of the last pg_head_loss to every parameter that has one. */
int pg_model_backward(const pg_model *model, pg_activations *a);
/* The same; `ready(self, index)` tells that the gradients of the parameters from `index` to the
 * last are complete. It is called with falling indices, the last time with 0; a negative result
 * ends the pass. */
typedef int pg_ready_fn(void *self, size_t index);
int pg_model_backward_ready(const pg_model *model, pg_activations *a, pg_ready_fn *ready,
                            void *self);

/* range[i] = max_v z_v - min_v z_v with z = logit_scale * M h_i for each of the last forward's
 * positions, `matrix` [V + extra, width] (an increment, say): host memory, `count` positions from
 * `first`. The product is fp32 whatever the compute type: an increment is small against the
 * weights. */
int pg_head_ranges(const pg_model *model, pg_activations *a, const pg_tensor *matrix, int64_t first,
                   int64_t count, float *range);
/* Logits [V] (fp32, host) of position `position` of the last forward. */
int pg_head_logits(const pg_model *model, pg_activations *a, int64_t position, float *logits);

/* Bytes of device memory that such activations need, for estimates; INT64_MAX when too many to
 * count. */
int64_t pg_activations_bytes(const pg_model_config *config, pg_dtype compute, int64_t batch,
                             int64_t time, pg_keep keep);

#ifdef __cplusplus
}
#endif
#endif
