/* A model's weights as a safetensors file in Hugging Face's names. Our norms have no gains; the
 * files carry gains of one, since transformers expects them, and files without gains are read. */
#include "model_internal.h"
#include "safetensors.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const struct {
  const char *name; /* within model.layers.N. */
  bool of_head;     /* [head_dim] instead of [width] */
} block_gains[] = {
    {"input_layernorm", false},
    {"post_attention_layernorm", false},
    {"self_attn.q_norm", true},
    {"self_attn.k_norm", true},
};
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
static int check_file(const pg_model *model, const char *path, pg_safetensors *file) {
  pg_context *ctx = model->context;
  int status = 0;
  for (size_t i = 0; i < model->count; i++) {
    const pg_parameter *p = &model->parameters[i];
    const pg_safetensors_entry *e = pg_safetensors_find(file, p->name);
    if (!e)
      return pg_fail(ctx, PG_EFORMAT, "%s: tensor %s [%lld, %lld] is missing", path, p->name,
                     (long long)p->rows, (long long)p->columns);
    PG_TRY(check_entry(ctx, path, e, 2, p->rows, p->columns));
  }
  for (size_t i = 0; i < pg_safetensors_count(file); i++) {
    const pg_safetensors_entry *e = pg_safetensors_at(file, i);
    if (pg_model_find(model, e->name)) continue;
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
  struct stat info;
  char *inside = NULL;
  pg_safetensors *file = NULL;
  if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
    if (asprintf(&inside, "%s/model.safetensors", path) < 0) {
      inside = NULL;
      status = pg_fail(ctx, PG_ENOMEM, "no memory for the path %s", path);
      goto fail;
    }
    path = inside;
  }
  PG_TRY(pg_safetensors_open(ctx, path, &file));
  PG_TRY(check_file(model, path, file));
  for (size_t i = 0; i < model->count; i++)
    PG_TRY(pg_safetensors_read_tensor(file, model->parameters[i].name, model->parameters[i].value));
  PG_TRY(pg_model_refresh(model, NULL));
fail:
  pg_safetensors_close(file);
  free(inside);
  return status;
}

int pg_model_save(const pg_model *model, const char *path) {
  const pg_model_config *c = &model->config;
  static const char *const metadata[] = {"format", "pt", NULL};
  size_t gains = (size_t)c->layers * PG_COUNT(block_gains) + 1;
  size_t count = 0;
  int status = PG_ENOMEM;
  pg_named_tensor *tensors = calloc(model->count + gains, sizeof *tensors);
  char(*names)[GAIN_NAME] = calloc(gains, sizeof *names);
  if (!tensors || !names) {
    pg_fail(model->context, status, "no memory to list the tensors of %s", path);
    goto fail;
  }
  for (size_t i = 0; i < model->count; i++)
    tensors[count++] =
        (pg_named_tensor){.name = model->parameters[i].name, .tensor = model->parameters[i].value};
  for (int64_t layer = 0; layer < c->layers; layer++)
    for (size_t i = 0; i < PG_COUNT(block_gains); i++) {
      char *name = names[count - model->count];
      gain_name(layer, i, name);
      tensors[count++] =
          (pg_named_tensor){.name = name, .ones = block_gains[i].of_head ? c->head_dim : c->width};
    }
  tensors[count++] = (pg_named_tensor){.name = final_gain, .ones = c->width};
  PG_TRY(pg_safetensors_write(model->context, path, tensors, count, metadata));
fail:
  free(names);
  free(tensors);
  return status;
}
