/* A model's weights as a safetensors file in Hugging Face's names. Our norms have no gains; the
 * files carry gains of one, since transformers expects them, and files without gains are read.
 * What transformers does not know of the head has names of its own beside lm_head.weight [V, d]:
 * extra classes are rows of lm_head.extra.weight, and a head A B is in lm_head.left.weight and
 * lm_head.right.weight, with its product, which is not read back, under the usual name. */
#include "model_internal.h"
#include "safetensors.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
  const char *name; /* within model.layers.N. */
  bool of_head;     /* [head_dim] instead of [width] */
} block_gains[] = {
    {"input_layernorm", false},
    {"post_attention_layernorm", false},
    {"self_attn.q_norm", true},
    {"self_attn.k_norm", true},
};
/* What a file calls rows [first, first + rows) of a parameter. */
typedef struct part {
  const char *name;
  pg_tensor *tensor; /* a view; owned */
} part;
static const char product_name[] = "lm_head.weight", extra_name[] = "lm_head.extra.weight";

static void free_parts(part *parts, size_t count) {
  for (size_t i = 0; parts && i < count; i++) pg_tensor_free(parts[i].tensor);
  free(parts);
}

/* The parts of all parameters: one each, but for a head with rows of its own kind. */
static int make_parts(const pg_model *model, part **out, size_t *count) {
  const int64_t vocab = model->config.vocab, extra = model->config.head.extra;
  const bool split = extra && !model->config.head.rank;
  int status = 0;
  part *parts = calloc(model->count + 1, sizeof *parts);
  *count = 0;
  if (!parts)
    PG_TRY(pg_fail(model->context, PG_ENOMEM, "no memory to list the tensors of a model"));
  for (size_t i = 0; i < model->count; i++) {
    const pg_parameter *p = &model->parameters[i];
    const bool head = split && p == pg_model_head(model);
    const int64_t shape[2] = {head ? vocab : p->rows, p->columns}, rest[2] = {extra, p->columns};
    parts[*count].name = p->name;
    PG_TRY(pg_tensor_view(p->value, 0, 2, shape, p->value->stride, &parts[(*count)++].tensor));
    if (!head) continue;
    parts[*count].name = extra_name;
    PG_TRY(pg_tensor_view(p->value, vocab * p->columns, 2, rest, p->value->stride,
                          &parts[(*count)++].tensor));
  }
  *out = parts;
  return 0;
fail:
  free_parts(parts, *count);
  *out = NULL;
  *count = 0;
  return status;
}

static const char final_gain[] = "model.norm.weight";
#define GAIN_NAME 80

static void gain_name(int64_t layer, size_t which, char out[GAIN_NAME]) {
  snprintf(out, GAIN_NAME, "model.layers.%lld.%s.weight", (long long)layer,
           block_gains[which].name);
}

/* Length of the norm gain of this name; 0 when no norm of the model has it. */
static int64_t gain_length(const pg_model_config *c, const char *name) {
  long long layer;
  int end = 0;
  char canonical[GAIN_NAME];
  if (!strcmp(name, final_gain)) return c->width;
  if (sscanf(name, "model.layers.%18lld.%n", &layer, &end) != 1 || !end || layer < 0 ||
      layer >= c->layers)
    return 0;
  for (size_t i = 0; i < PG_COUNT(block_gains); i++) {
    gain_name(layer, i, canonical); /* compared whole, so that "layers.+1." and "01" are unknown */
    if (!strcmp(name, canonical)) return block_gains[i].of_head ? c->head_dim : c->width;
  }
  return 0;
}

static bool float_type(const char *dtype) {
  return !strcmp(dtype, "F32") || !strcmp(dtype, "BF16") || !strcmp(dtype, "F16");
}

static void print_shape(const pg_safetensors_entry *e, char *out, size_t size) {
  size_t used = (size_t)snprintf(out, size, "[");
  for (int i = 0; i < e->ndim && used < size; i++)
    used +=
        (size_t)snprintf(out + used, size - used, "%s%lld", i ? ", " : "", (long long)e->shape[i]);
  if (used < size) snprintf(out + used, size - used, "]");
}

static int check_entry(pg_context *ctx, const char *path, const pg_safetensors_entry *e, int ndim,
                       int64_t rows, int64_t columns) {
  char shape[128], want[64];
  bool fits = e->ndim == ndim && e->shape[0] == rows && (ndim == 1 || e->shape[1] == columns);
  if (!fits) {
    print_shape(e, shape, sizeof shape);
    if (ndim == 1)
      snprintf(want, sizeof want, "[%lld]", (long long)rows);
    else
      snprintf(want, sizeof want, "[%lld, %lld]", (long long)rows, (long long)columns);
    return pg_fail(ctx, PG_EFORMAT, "%s: tensor %s has shape %s; the model needs %s", path, e->name,
                   shape, want);
  }
  if (!float_type(e->dtype))
    return pg_fail(ctx, PG_EFORMAT, "%s: tensor %s has type %s; allowed: F32, BF16, F16", path,
                   e->name, e->dtype);
  return 0;
}

/* A gain other than one would be a different function. */
static int check_gain(pg_context *ctx, const char *path, pg_safetensors *file,
                      const pg_safetensors_entry *e, int64_t length) {
  int status;
  float values[256];
  PG_TRY(check_entry(ctx, path, e, 1, length, 1));
  for (int64_t first = 0; first < length; first += (int64_t)PG_COUNT(values)) {
    int64_t count = pg__min((int64_t)PG_COUNT(values), length - first);
    PG_TRY(pg_safetensors_read_f32(file, e, first, count, values));
    for (int64_t i = 0; i < count; i++)
      if (values[i] != 1)
        return pg_fail(ctx, PG_EFORMAT,
                       "%s: tensor %s has %.9g at element %lld; norm gains other than 1 are not "
                       "supported",
                       path, e->name, (double)values[i], (long long)(first + i));
  }
fail:
  return status;
}

/* Everything about the file that can be known before a weight changes. */
static int check_file(const pg_model *model, const char *path, pg_safetensors *file,
                      const part *parts, size_t count) {
  pg_context *ctx = model->context;
  int status = 0;
  for (size_t i = 0; i < count; i++) {
    const int64_t *shape = parts[i].tensor->shape;
    const pg_safetensors_entry *e = pg_safetensors_find(file, parts[i].name);
    if (!e)
      return pg_fail(ctx, PG_EFORMAT, "%s: tensor %s [%lld, %lld] is missing", path, parts[i].name,
                     (long long)shape[0], (long long)shape[1]);
    PG_TRY(check_entry(ctx, path, e, 2, shape[0], shape[1]));
  }
  for (size_t i = 0; i < pg_safetensors_count(file); i++) {
    const pg_safetensors_entry *e = pg_safetensors_at(file, i);
    bool known = model->config.head.rank && !strcmp(e->name, product_name);
    for (size_t j = 0; j < count && !known; j++) known = !strcmp(e->name, parts[j].name);
    if (known) continue;
    int64_t length = gain_length(&model->config, e->name);
    if (!length)
      return pg_fail(ctx, PG_EFORMAT, "%s: tensor %s is not part of this model of %lld layers",
                     path, e->name, (long long)model->config.layers);
    PG_TRY(check_gain(ctx, path, file, e, length));
  }
fail:
  return status;
}

int pg_model_load(pg_model *model, const char *path) {
  pg_context *ctx = model->context;
  int status = 0;
  pg_safetensors *file = NULL;
  part *parts = NULL;
  size_t count = 0;
  PG_TRY(pg_safetensors_open(ctx, path, &file));
  PG_TRY(make_parts(model, &parts, &count));
  PG_TRY(check_file(model, path, file, parts, count));
  for (size_t i = 0; i < count; i++)
    PG_TRY(pg_safetensors_read_tensor(file, parts[i].name, parts[i].tensor));
  PG_TRY(pg_model_refresh(model, NULL));
fail:
  pg_safetensors_close(file);
  free_parts(parts, count);
  return status;
}

int pg_model_save(const pg_model *model, const char *path) {
  const pg_model_config *c = &model->config;
  static const char *const metadata[] = {"format", "pt", NULL};
  size_t gains = (size_t)c->layers * PG_COUNT(block_gains) + 1;
  size_t count = 0, part_count = 0;
  int status = PG_ENOMEM;
  part *parts = NULL;
  pg_tensor *whole = NULL, *product = NULL;
  pg_named_tensor *tensors = calloc(model->count + 2 + gains, sizeof *tensors);
  char(*names)[GAIN_NAME] = calloc(gains, sizeof *names);
  if (!tensors || !names) {
    pg_fail(model->context, status, "no memory to list the tensors of %s", path);
    goto fail;
  }
  PG_TRY(make_parts(model, &parts, &part_count));
  for (size_t i = 0; i < part_count; i++)
    tensors[count++] = (pg_named_tensor){.name = parts[i].name, .tensor = parts[i].tensor};
  if (c->head.rank) {
    const int64_t shape[2] = {c->vocab, c->width};
    PG_TRY(pg_model_head_matrix(model, &whole));
    PG_TRY(pg_tensor_view(whole, 0, 2, shape, whole->stride, &product));
    tensors[count++] = (pg_named_tensor){.name = product_name, .tensor = product};
  }
  const size_t weights = count;
  for (int64_t layer = 0; layer < c->layers; layer++)
    for (size_t i = 0; i < PG_COUNT(block_gains); i++) {
      char *name = names[count - weights];
      gain_name(layer, i, name);
      tensors[count++] =
          (pg_named_tensor){.name = name, .ones = block_gains[i].of_head ? c->head_dim : c->width};
    }
  tensors[count++] = (pg_named_tensor){.name = final_gain, .ones = c->width};
  PG_TRY(pg_safetensors_write(model->context, path, tensors, count, metadata));
fail:
  pg_tensor_free(product);
  pg_tensor_free(whole);
  free_parts(parts, part_count);
  free(names);
  free(tensors);
  return status;
}
