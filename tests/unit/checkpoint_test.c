/* Checkpoints under kills, damage and misuse. */
#include "core/files.h"
#include "core/perigee.h"
#include "model_support.h"
#include "temporary.h"

#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static pg_context *ctx;

typedef struct trial {
  pg_model *model;
  pg_run *run;
} trial;

static void put_shard(const char *name, int count) {
  int32_t tokens[1200];
  for (int i = 0; i < count; i++) tokens[i] = (i * i / 7 + 3 * i) % 97;
  MUST(ctx, pg_shard_write(ctx, temporary_path(name), tokens, count));
}

/* `width` makes a save take as long as a test needs. */
static trial open_trial(int64_t width, int64_t sequences, uint64_t seed) {
  trial t;
  pg_model_config c;
  pg_parameter *all[64];
  double hypers[PG_MAX_HYPERS];
  pg_model_config_default(&c);
  c.layers = 2, c.width = width, c.heads = 1, c.head_dim = 16, c.context = 8, c.vocab = 97;
  MUST(ctx, pg_model_config_resolve(ctx, &c));
  MUST(ctx, pg_model_new(ctx, &c, &t.model));
  MUST(ctx, pg_model_init(t.model, 0));
  pg_run_options options = {
      .data = temporary_folder, .sequences = sequences, .max_norm = 1, .data_seed = seed};
  MUST(ctx, pg_run_new(t.model, &options, &t.run));
  for (size_t i = 0; i < pg_model_count(t.model); i++) all[i] = pg_model_parameter(t.model, i);
  pg_optimizer_defaults(pg_optimizer_find("adamw"), hypers);
  MUST(ctx, pg_run_assign(t.run, pg_optimizer_find("adamw"), hypers, false, all,
                          pg_model_count(t.model), NULL));
  return t;
}

static void close_trial(trial *t) {
  pg_run_free(t->run);
  pg_model_free(t->model);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Save over `path` in a child that is killed `delay` seconds after it began; true when the kill
 * came before the save was done. */
static int killed_in_a_save(const trial *t, const char *path, double delay) {
  int begun[2], done[2];
  char byte = 0;
  if (pipe(begun) || pipe(done)) abort();
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    if (write(begun[1], "b", 1) != 1) _exit(1);
    if (pg_checkpoint_save(t->run, path, NULL) < 0) _exit(2);
    if (write(done[1], "d", 1) != 1) _exit(3);
    for (;;) pause();
  }
  close(done[1]);
  if (read(begun[0], &byte, 1) != 1) abort();
  struct timespec wait = {(time_t)delay, (long)(1e9 * (delay - (double)(time_t)delay))};
  nanosleep(&wait, NULL);
  kill(child, SIGKILL);
  waitpid(child, NULL, 0);
  int finished = read(done[0], &byte, 1) == 1;
  close(begun[0]);
  close(begun[1]);
  close(done[0]);
  return !finished;
}

/* CASES 8: SIGKILL at 20 moments spread over a save that replaces an older checkpoint of the same
 * name. One of the two always loads: the older at update 1, or the newer at update 2. */
TEST(a_kill_during_a_save_leaves_a_valid_checkpoint) {
  const char *path = temporary_path("saved");
  trial t = open_trial(256, 4, 0);
  pg_step s;
  MUST(ctx, pg_run_step(t.run, &s));
  double begin = now();
  MUST(ctx, pg_checkpoint_save(t.run, path, NULL));
  double duration = now() - begin;
  MUST(ctx, pg_run_step(t.run, &s));
  int interrupted = 0, older = 0;
  for (int i = 0; i < 20; i++) {
    interrupted += killed_in_a_save(&t, path, duration * (i + 0.5) / 20);
    CHECK(pg_checkpoint_verify(ctx, path, true) == 0, "kill %d: %s", i, pg_context_message(ctx));
    trial back = open_trial(256, 4, 0);
    CHECK(pg_checkpoint_load(back.run, path, NULL, NULL) == 0, "kill %d: %s", i,
          pg_context_message(ctx));
    int64_t update = pg_run_updates(back.run);
    CHECK(update == 1 || update == 2, "kill %d: update %lld", i, (long long)update);
    older += update == 1;
    close_trial(&back);
  }
  printf("  a save takes %.0f ms; %d of 20 kills came during it; the older one stood %d times\n",
         1e3 * duration, interrupted, older);
  CHECK(interrupted >= 5, "the kills came too late: %d", interrupted);
  close_trial(&t);
}

TEST(only_a_checkpoint_is_replaced) {
  trial t = open_trial(16, 4, 0);
  pg_step s;
  char *text;
  size_t size;
  MUST(ctx, pg_run_step(t.run, &s));
  MUST(ctx, pg_file_make_folders(ctx, temporary_path("precious")));
  put_file(temporary_path("precious/thesis.txt"), "years", 5);
  CHECK(pg_checkpoint_save(t.run, temporary_path("precious"), NULL) == PG_EEXIST);
  CHECK(strstr(pg_context_message(ctx), "no checkpoint") != NULL, "%s", pg_context_message(ctx));
  text = get_file(temporary_path("precious/thesis.txt"), &size);
  CHECK(text && size == 5, "the folder was touched");
  free(text);
  put_file(temporary_path("file"), "x", 1);
  CHECK(pg_checkpoint_save(t.run, temporary_path("file"), NULL) == PG_EEXIST);
  MUST(ctx, pg_checkpoint_save(t.run, temporary_path("own"), NULL));
  MUST(ctx, pg_run_step(t.run, &s));
  MUST(ctx, pg_checkpoint_save(t.run, temporary_path("own"), NULL));
  MUST(ctx, pg_checkpoint_verify(ctx, temporary_path("own"), true));
  close_trial(&t);
}

/* A data position means nothing in another order or other shards. */
TEST(a_data_position_stays_with_its_data) {
  const char *path = temporary_path("position");
  pg_checkpoint_load_options restart = {.restart_data = true}, keep = {.restart_data = false};
  pg_step s;
  trial t = open_trial(16, 4, 0);
  MUST(ctx, pg_run_step(t.run, &s));
  MUST(ctx, pg_checkpoint_save(t.run, path, NULL));
  close_trial(&t);
  const struct {
    int64_t sequences;
    uint64_t seed;
  } other[] = {{8, 0}, {4, 1}};
  for (size_t i = 0; i < 2; i++) {
    trial b = open_trial(16, other[i].sequences, other[i].seed);
    CHECK(pg_checkpoint_load(b.run, path, &keep, NULL) == PG_EDATA, "%s", pg_context_message(ctx));
    MUST(ctx, pg_checkpoint_load(b.run, path, &restart, NULL));
    close_trial(&b);
  }
  put_shard("y_train_000002.bin", 900);
  trial c = open_trial(16, 4, 0);
  CHECK(pg_checkpoint_load(c.run, path, NULL, NULL) == PG_EDATA, "%s", pg_context_message(ctx));
  CHECK(strstr(pg_context_message(ctx), "other shards") != NULL, "%s", pg_context_message(ctx));
  close_trial(&c);
  unlink(temporary_path("y_train_000002.bin"));
}

/* Each file truncated by a byte, changed in one bit, or gone: named, and nothing is loaded. */
TEST(damage_is_found_and_named) {
  static const char *const files[] = {
      "config.json",           "model.safetensors", "optimizer.safetensors",
      "increment.safetensors", "state.json",        "manifest.json"};
  trial t = open_trial(16, 4, 0);
  pg_step s;
  char path[200];
  MUST(ctx, pg_run_step(t.run, &s));
  for (size_t f = 0; f < PG_COUNT(files); f++)
    for (int how = 0; how < 3; how++) {
      const char *folder = temporary_path("damaged");
      size_t size;
      MUST(ctx, pg_checkpoint_save(t.run, folder, NULL));
      snprintf(path, sizeof path, "%s/%s", folder, files[f]);
      char *data = get_file(path, &size);
      if (how == 0) size--;
      if (how == 1) data[size / 2] ^= 4;
      if (how == 2)
        unlink(path);
      else
        put_file(path, data, size);
      free(data);
      int status = pg_checkpoint_load(t.run, folder, NULL, NULL);
      CHECK(status == PG_EFORMAT || status == PG_ENOENT, "%s, damage %d: %d", files[f], how,
            status);
      CHECK(strstr(pg_context_message(ctx), "damaged/") != NULL, "%s", pg_context_message(ctx));
      MUST(ctx, pg_run_step(t.run, &s)); /* the run is as it was */
      MUST(ctx, pg_file_remove_tree(ctx, folder));
    }
  close_trial(&t);
}

static int64_t live_at_start;
TEST(no_tensor_leaks) {
  CHECK(pg_context_live_tensors(ctx) == live_at_start);
}

int main(void) {
  ctx = open_context(1); /* one thread: the test forks */
  live_at_start = pg_context_live_tensors(ctx);
  put_shard("x_train_000001.bin", 1200);
  RUN(a_kill_during_a_save_leaves_a_valid_checkpoint);
  RUN(only_a_checkpoint_is_replaced);
  RUN(a_data_position_stays_with_its_data);
  RUN(damage_is_found_and_named);
  RUN(no_tensor_leaks);
  MUST(ctx, pg_file_remove_tree(ctx, temporary_folder));
  pg_context_free(ctx);
  return unit_report();
}
