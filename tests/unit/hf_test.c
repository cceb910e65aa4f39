/* A checkpoint gives the same logits in Hugging Face's Qwen3ForCausalLM and in the model of
 * tools/torch_bench.py: writes one with random weights and lets tests/hf_compare.py and
 * tests/torch_compare.py compare. And the other way: a model that transformers saved (by
 * tests/hf_make.py), in one file or several and in any float type, is read. PG_PYTHON names a
 * Python that has transformers and torch; without them the comparison is skipped. */
#include "core/checkpoint_internal.h"
#include "core/files.h"
#include "model_support.h"
#include <sys/wait.h>
#include <unistd.h>

static void write_config(const char *folder, const pg_model_config *c) {
  char path[128];
  snprintf(path, sizeof path, "%s/config.json", folder);
  json_t *config = pg__model_config_json(c);
  if (!config || json_dump_file(config, path, 0) != 0) abort();
  json_decref(config);
}

static void write_logits(const char *folder, const pg_model *model, int64_t time) {
  pg_context *ctx = pg_model_context(model);
  const pg_model_config *c = pg_model_get_config(model);
  pg_activations *a;
  const void *hidden;
  char path[128];
  int32_t *tokens = make_ids(time, c->vocab, 1);
  float *logits = malloc((size_t)c->vocab * sizeof *logits);
  snprintf(path, sizeof path, "%s/logits.json", folder);
  FILE *file = fopen(path, "w");
  if (!file || !logits) abort();
  MUST(ctx, pg_activations_new(ctx, c, PG_F32, 1, time, PG_KEEP_NOTHING, &a));
  MUST(ctx, pg_model_forward(model, a, tokens, 1, time, &hidden));
  fprintf(file, "{\"tokens\": [");
  for (int64_t t = 0; t < time; t++) fprintf(file, "%s%d", t ? "," : "", (int)tokens[t]);
  fprintf(file, "], \"logits\": [");
  for (int64_t t = 0; t < time; t++) {
    MUST(ctx, pg_head_logits(model, a, t, logits));
    for (int64_t v = 0; v < c->vocab; v++)
      fprintf(file, "%s%.9g", v ? "," : t ? ",\n[" : "[", (double)logits[v]);
    fprintf(file, "]");
  }
  fprintf(file, "]}\n");
  fclose(file);
  free(logits);
  free(tokens);
  pg_activations_free(a);
}

static int skipped;

/* Twice the forward's bar of model_gradient_test.c, since both sides round, and 64 positions times
 * half a unit for their fp32 angles. */
static double bar(const pg_model_config *c) {
  return 4 * (11 * (double)c->layers + 3) * UNIT_ROUNDOFF + 64 * UNIT_ROUNDOFF;
}

/* Python on a script of tests/ with these arguments; false when it was skipped. */
static bool python(const char *script, const char *arguments) {
  const char *program = getenv("PG_PYTHON");
  char command[512];
  snprintf(command, sizeof command, "'%s' '%s/%s' %s", program ? program : "python3", PG_TEST_DIR,
           script, arguments);
  fflush(stdout);
  int status = system(command);
  int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  CHECK(code == 0 || code == 77, "%s ended with %d", command, code);
  skipped += code == 77;
  return code != 77;
}

static void compare(const shape *s) {
  char folder[] = "/tmp/perigee-XXXXXX", path[128], arguments[256];
  pg_context *ctx = open_context(1);
  pg_model_config c = make_config(s);
  pg_model *model = make_model(ctx, &c, 21);
  if (!mkdtemp(folder)) abort();
  snprintf(path, sizeof path, "%s/model.safetensors", folder);
  MUST(ctx, pg_model_save(model, path));
  write_config(folder, &c);
  write_logits(folder, model, s->time);
  snprintf(arguments, sizeof arguments, "'%s' '%s/logits.json' %.3g", folder, folder, bar(&c));
  python("hf_compare.py", arguments);
  snprintf(arguments, sizeof arguments, "logits '%s' '%s/logits.json' %.3g", folder, folder,
           bar(&c));
  python("torch_compare.py", arguments);
  MUST(ctx, pg_file_remove_tree(ctx, folder));
  pg_model_free(model);
  pg_context_free(ctx);
}

/* A model of transformers in files of at most `shard`. */
static void import(const char *type, const char *shard) {
  char folder[] = "/tmp/perigee-XXXXXX", arguments[256];
  pg_context *ctx = open_context(1);
  pg_model_config c;
  pg_model *model;
  if (!mkdtemp(folder)) abort();
  snprintf(arguments, sizeof arguments, "'%s' %s %s", folder, type, shard);
  if (python("hf_make.py", arguments)) {
    MUST(ctx, pg_checkpoint_config(ctx, folder, &c));
    MUST(ctx, pg_model_new(ctx, &c, &model));
    MUST(ctx, pg_model_load(model, folder));
    write_logits(folder, model, c.context);
    snprintf(arguments, sizeof arguments, "'%s' '%s/logits.json' %.3g", folder, folder, bar(&c));
    python("hf_compare.py", arguments);
    pg_model_free(model);
  }
  MUST(ctx, pg_file_remove_tree(ctx, folder));
  pg_context_free(ctx);
}

TEST(a_checkpoint_has_the_same_logits_in_transformers) {
  static const shape shapes[] = {{2, 64, 4, 16, 128, 97, 1, 64}, {3, 48, 2, 64, 100, 211, 1, 37}};
  for (size_t i = 0; i < PG_COUNT(shapes) && !skipped; i++) compare(&shapes[i]);
}

TEST(a_model_of_transformers_has_the_same_logits) {
  static const char *const made[][2] = {
      {"float32", "1GB"}, {"float32", "60KB"}, {"bfloat16", "30KB"}, {"float16", "1GB"}};
  for (size_t i = 0; i < PG_COUNT(made) && !skipped; i++) import(made[i][0], made[i][1]);
}

int main(void) {
  RUN(a_checkpoint_has_the_same_logits_in_transformers);
  RUN(a_model_of_transformers_has_the_same_logits);
  int failed = unit_report();
  if (!skipped) return failed;
  printf("transformers is not installed\n");
  return 77;
}
