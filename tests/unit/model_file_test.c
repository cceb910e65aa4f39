/* Weights in files: Hugging Face's names and unit gains out, every way in, and refusals that name
 * the tensor. */
#include "core/safetensors.h"
#include "model_support.h"
#include <sys/stat.h>
#include <unistd.h>

static char folder[64];

static const char *in_folder(const char *name) {
  static char path[4][160];
  static int turn;
  turn = (turn + 1) % 4;
  snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
  return path[turn];
}

static const shape small = {2, 6, 2, 4, 10, 7, 1, 4};

/* ---- a writer of its own ----------------------------------------------------------------- */
typedef struct file_tensor {
  char name[96];
  const char *dtype;
  int64_t shape[3];
  int ndim;
  float *values;
} file_tensor;

static int element_size(const char *dtype) {
  return !strcmp(dtype, "F64") ? 8 : !strcmp(dtype, "F32") ? 4 : 2;
}

/* The values used here are exact in every type: multiples of 1/4 up to 4. */
static void put(FILE *file, const char *dtype, float value) {
  uint32_t bits;
  double wide = value;
  memcpy(&bits, &value, sizeof bits);
  uint16_t narrow = (uint16_t)(bits >> 16); /* BF16 */
  if (!strcmp(dtype, "F16"))
    narrow = (uint16_t)((bits >> 16 & 0x8000) |
                        (value == 0 ? 0 : ((bits >> 23 & 255) - 112) << 10 | (bits >> 13 & 1023)));
  const void *data = element_size(dtype) == 8   ? (const void *)&wide
                     : element_size(dtype) == 4 ? (const void *)&value
                                                : (const void *)&narrow;
  fwrite(data, (size_t)element_size(dtype), 1, file);
}

static void write_file(const char *path, const file_tensor *tensors, size_t count) {
  char header[16384];
  size_t used = 0;
  int64_t offset = 0;
  FILE *file = fopen(path, "wb");
  if (!file) abort();
  used += (size_t)sprintf(header, "{");
  for (size_t i = 0; i < count; i++) {
    int64_t n = 1;
    used += (size_t)sprintf(header + used, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i ? "," : "",
                            tensors[i].name, tensors[i].dtype);
    for (int k = 0; k < tensors[i].ndim; k++) {
      used +=
          (size_t)sprintf(header + used, "%s%lld", k ? "," : "", (long long)tensors[i].shape[k]);
      n *= tensors[i].shape[k];
    }
    n *= element_size(tensors[i].dtype);
    used += (size_t)sprintf(header + used, "],\"data_offsets\":[%lld,%lld]}", (long long)offset,
                            (long long)(offset + n));
    offset += n;
  }
  used += (size_t)sprintf(header + used, "}");
  uint64_t length = used;
  fwrite(&length, sizeof length, 1, file);
  fwrite(header, 1, used, file);
  for (size_t i = 0; i < count; i++) {
    int64_t n = 1;
    for (int k = 0; k < tensors[i].ndim; k++) n *= tensors[i].shape[k];
    for (int64_t j = 0; j < n; j++) put(file, tensors[i].dtype, tensors[i].values[j]);
  }
  fclose(file);
}

#define ROOM 24
/* The small model's matrices, of one type. */
static size_t describe(const pg_model *model, const char *dtype, file_tensor out[ROOM]) {
  size_t count = pg_model_count(model);
  for (size_t i = 0; i < count; i++) {
    const pg_parameter *p = pg_model_parameter(model, i);
    int64_t n = p->rows * p->columns;
    out[i] = (file_tensor){
        .dtype = dtype, .shape = {p->rows, p->columns}, .ndim = 2, .values = calloc((size_t)n, 4)};
    snprintf(out[i].name, sizeof out[i].name, "%s", p->name);
    for (int64_t j = 0; j < n; j++)
      out[i].values[j] = (float)(((int64_t)i * 5 + j * 7) % 33 - 16) / 4;
  }
  return count;
}

static void release(file_tensor *tensors, size_t count) {
  for (size_t i = 0; i < count; i++) free(tensors[i].values);
}

static pg_model *empty_model(pg_context *ctx) {
  pg_model_config c = make_config(&small);
  pg_model *model;
  MUST(ctx, pg_model_new(ctx, &c, &model));
  return model;
}

/* ---- tests ------------------------------------------------------------------------------- */
TEST(a_saved_model_comes_back_bit_for_bit_with_unit_gains) {
  pg_context *ctx = open_context(1);
  pg_model_config c = make_config(&small);
  pg_model *model = make_model(ctx, &c, 4), *back = empty_model(ctx);
  pg_safetensors *file;
  const char *path = in_folder("model.safetensors");
  MUST(ctx, pg_model_save(model, path));
  for (int way = 0; way < 2; way++) {
    MUST(ctx, pg_model_load(back, way ? folder : path));
    for (size_t i = 0; i < pg_model_count(model); i++) {
      const pg_parameter *p = pg_model_parameter(model, i);
      float *want = read_floats(p->value), *got = read_floats(pg_model_parameter(back, i)->value);
      CHECK(!memcmp(want, got, (size_t)(p->rows * p->columns) * sizeof *got), "%s", p->name);
      free(want);
      free(got);
    }
    MUST(ctx, pg_model_init(back, 99));
  }
  MUST(ctx, pg_safetensors_open(ctx, path, &file));
  CHECK(pg_safetensors_count(file) == 16 + 2 * 4 + 1, "%zu tensors", pg_safetensors_count(file));
  CHECK(!strcmp(pg_safetensors_metadata(file, "format"), "pt"), "metadata");
  static const struct {
    const char *name;
    int64_t length;
  } gains[] = {{"model.norm.weight", 6},
               {"model.layers.0.input_layernorm.weight", 6},
               {"model.layers.1.post_attention_layernorm.weight", 6},
               {"model.layers.0.self_attn.q_norm.weight", 4},
               {"model.layers.1.self_attn.k_norm.weight", 4}};
  for (size_t i = 0; i < PG_COUNT(gains); i++) {
    const pg_safetensors_entry *e = pg_safetensors_find(file, gains[i].name);
    float values[6] = {0};
    CHECK(e && e->ndim == 1 && e->shape[0] == gains[i].length && !strcmp(e->dtype, "F32"), "%s",
          gains[i].name);
    if (!e) continue;
    MUST(ctx, pg_safetensors_read_f32(file, e, 0, gains[i].length, values));
    for (int j = 0; j < gains[i].length; j++) CHECK(values[j] == 1, "%s", gains[i].name);
  }
  pg_safetensors_close(file);
  unlink(path);
  pg_model_free(model);
  pg_model_free(back);
  CHECK(pg_context_live_tensors(ctx) == 0 && pg_context_bytes(ctx) == 0, "left over");
  pg_context_free(ctx);
}

TEST(files_in_any_float_type_and_without_gains_are_read) {
  pg_context *ctx = open_context(1);
  pg_model *model = empty_model(ctx);
  static const char *const types[] = {"F32", "BF16", "F16"};
  const char *path = in_folder("typed.safetensors");
  for (size_t t = 0; t < PG_COUNT(types); t++) {
    file_tensor tensors[ROOM];
    size_t count = describe(model, types[t], tensors);
    write_file(path, tensors, count);
    MUST(ctx, pg_model_init(model, 1));
    MUST(ctx, pg_model_load(model, path));
    for (size_t i = 0; i < count; i++) {
      const pg_parameter *p = pg_model_parameter(model, i);
      float *got = read_floats(p->value);
      CHECK(!memcmp(got, tensors[i].values, (size_t)(p->rows * p->columns) * sizeof *got),
            "%s in %s", p->name, types[t]);
      free(got);
    }
    release(tensors, count);
  }
  unlink(path);
  pg_model_free(model);
  pg_context_free(ctx);
}

TEST(the_golden_initial_weights_load) {
  pg_context *ctx = open_context(1);
  const shape s = {2, 32, 2, 16, 128, 97, 8, 16};
  pg_model_config c = make_config(&s);
  pg_model *model;
  MUST(ctx, pg_model_new(ctx, &c, &model));
  MUST(ctx, pg_model_load(model, PG_TEST_DIR "/golden/trajectory/init.safetensors"));
  float *head = read_floats(pg_model_head(model)->value);
  CHECK_CLOSE(norm_of(head, 97 * 32) / sqrt(97.0 * 32), 0.02, 0.05);
  free(head);
  pg_model_free(model);
  pg_context_free(ctx);
}

/* Write `tensors` and expect a refusal whose text holds `text`; the weights stay. */
static void refused(pg_model *model, const file_tensor *tensors, size_t count, const char *text) {
  pg_context *ctx = pg_model_context(model);
  const char *path = in_folder("bad.safetensors");
  const pg_parameter *p = pg_model_parameter(model, 0);
  float *before = read_floats(p->value);
  write_file(path, tensors, count);
  int status = pg_model_load(model, path);
  CHECK(status == PG_EFORMAT, "%s: %s", pg_error_name(status), pg_context_message(ctx));
  CHECK(strstr(pg_context_message(ctx), text) && strstr(pg_context_message(ctx), path), "\"%s\"",
        pg_context_message(ctx));
  float *after = read_floats(p->value);
  CHECK(!memcmp(before, after, (size_t)(p->rows * p->columns) * sizeof *after), "weights changed");
  free(before);
  free(after);
  unlink(path);
}

TEST(files_of_another_model_are_refused_by_tensor) {
  pg_context *ctx = open_context(1);
  pg_model_config c = make_config(&small);
  pg_model *model = make_model(ctx, &c, 2);
  file_tensor t[ROOM], extra = {.dtype = "F32", .ndim = 1, .shape = {4}};
  float ones[6] = {1, 1, 1, 1, 1, 1}, other[6] = {1, 1, 1.5f, 1, 1, 1};
  size_t count = describe(model, "F32", t);
  refused(model, t, count - 1, "tensor lm_head.weight [7, 6] is missing");
  t[3].shape[0] = 6;
  t[3].shape[1] = 8;
  refused(model, t, count,
          "tensor model.layers.0.self_attn.v_proj.weight has shape [6, 8]; the model needs [8, 6]");
  t[3].ndim = 3;
  t[3].shape[0] = 8;
  t[3].shape[1] = 6;
  t[3].shape[2] = 1;
  refused(model, t, count, "has shape [8, 6, 1]");
  t[3].ndim = 2;
  t[3].dtype = "F64";
  refused(model, t, count, "has type F64; allowed: F32, BF16, F16");
  t[3].dtype = "F32";

  extra.values = other;
  static const char *const unknown[] = {"model.layers.2.input_layernorm.weight",
                                        "model.layers.0.self_attn.q_proj.bias",
                                        "model.layers.01.self_attn.q_norm.weight",
                                        "model.layers.-1.self_attn.q_norm.weight", "anything"};
  for (size_t i = 0; i < PG_COUNT(unknown); i++) {
    char text[160];
    snprintf(extra.name, sizeof extra.name, "%s", unknown[i]);
    snprintf(text, sizeof text, "tensor %s is not part of this model of 2 layers", unknown[i]);
    t[count] = extra;
    refused(model, t, count + 1, text);
  }
  snprintf(extra.name, sizeof extra.name, "model.layers.1.self_attn.k_norm.weight");
  t[count] = extra;
  refused(model, t, count + 1, "model.layers.1.self_attn.k_norm.weight has 1.5 at element 2");
  t[count].shape[0] = 6;
  refused(model, t, count + 1, "k_norm.weight has shape [6]; the model needs [4]");
  t[count].shape[0] = 4;
  t[count].values = ones;
  write_file(in_folder("good.safetensors"), t, count + 1);
  MUST(ctx, pg_model_load(model, in_folder("good.safetensors")));
  unlink(in_folder("good.safetensors"));

  CHECK(pg_model_load(model, in_folder("none.safetensors")) == PG_ENOENT, "%s",
        pg_context_message(ctx));
  CHECK(pg_model_load(model, folder) == PG_ENOENT, "%s", pg_context_message(ctx));
  CHECK(strstr(pg_context_message(ctx), "model.safetensors"), "%s", pg_context_message(ctx));
  CHECK(pg_model_save(model, in_folder("no/where")) < 0, "saved into a missing folder");
  release(t, count);
  pg_model_free(model);
  CHECK(pg_context_live_tensors(ctx) == 0 && pg_context_bytes(ctx) == 0, "left over");
  pg_context_free(ctx);
}

int main(void) {
  strcpy(folder, "/tmp/perigee-XXXXXX");
  if (!mkdtemp(folder)) return 1;
  RUN(a_saved_model_comes_back_bit_for_bit_with_unit_gains);
  RUN(files_in_any_float_type_and_without_gains_are_read);
  RUN(the_golden_initial_weights_load);
  RUN(files_of_another_model_are_refused_by_tensor);
  CHECK(rmdir(folder) == 0, "%s is not empty", folder);
  return unit_report();
}
