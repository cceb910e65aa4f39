/* Which attention a call takes. Every case is a process of its own: a copy of this program in a
 * folder with or without a cuDNN plugin, under its own environment. The plugin is fake_cudnn.c,
 * which leaves outputs as they are: poisoned. */
#include "cuda_unit.h"
#include "fake_cudnn.h"
#include "tests/unit/temporary.h"

#include <dlfcn.h>
#include <limits.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BATCH = 2, TIME = 5, HEADS = 3, DIM = 8, N = BATCH * TIME * HEADS * DIM };

/* ---- in the copy --------------------------------------------------------------------------- */
static const char *path_of(pg_dtype type, int64_t batch, int64_t time, int64_t dim) {
  static char text[512];
  const struct side *gpu = &sides[GPU];
  if (gpu->k->attention_path(gpu->q, type, batch, time, HEADS, dim, text, sizeof text) < 0)
    snprintf(text, sizeof text, "error: %s", gpu->k->message(gpu->q));
  return text;
}
#define CHECK_SAYS(text, part)                                                                     \
  do {                                                                                             \
    const char *text_ = (text);                                                                    \
    CHECK(strstr(text_, part), "said \"%s\", without \"%s\"", text_, part);                        \
  } while (0)

/* What the plugin beside this program saw; NULL where it was not loaded. */
static const fake_cudnn_log *log_of_fake(void) {
  char path[PATH_MAX];
  fake_cudnn_log *(*get)(void) = NULL;
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 64);
  if (length < 0) abort();
  path[length] = 0;
  strcpy(strrchr(path, '/') + 1, PG_CUDNN_PLUGIN);
  void *plugin = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (plugin) *(void **)&get = dlsym(plugin, "fake_cudnn");
  return get ? get() : NULL;
}

static struct { twin query, key, value, out, lse, dout, dq, dk, dv; } t;
static void make_tensors(pg_dtype type) {
  unit_seed(61);
  t.query = normals(type, N, 1), t.key = normals(type, N, 1), t.value = normals(type, N, 1);
  t.dout = normals(type, N, 1), t.out = poisoned(type, N);
  t.lse = poisoned(PG_F32, BATCH * TIME * HEADS);
  t.dq = poisoned(type, N), t.dk = poisoned(type, N), t.dv = poisoned(type, N);
}
static void both_ways(pg_dtype type) {
  make_tensors(type);
  BOTH(attention_forward, type, P(t.query), P(t.key), P(t.value), BATCH, TIME, HEADS, DIM, P(t.out),
       P(t.lse));
  BOTH(attention_backward, type, P(t.dout), P(t.query), P(t.key), P(t.value), P(t.out), P(t.lse),
       BATCH, TIME, HEADS, DIM, P(t.dq), P(t.dk), P(t.dv));
}
/* Bounds as in cuda_attention_test.c. */
static void check_computed(pg_dtype type) {
  const double bound = type == PG_BF16 ? 1e-2 : 1e-5;
  CHECK_WITHIN("out", &t.out, bound);
  CHECK_WITHIN("lse", &t.lse, bound);
  CHECK_WITHIN("dquery", &t.dq, bound);
  CHECK_WITHIN("dkey", &t.dk, bound);
  CHECK_WITHIN("dvalue", &t.dv, bound);
}
static void check_untouched(const twin *x) {
  unsigned char *bytes = from_gpu(x);
  size_t wrong = 0;
  for (size_t i = 0; i < twin_bytes(x); i++) wrong += bytes[i] != 0xff;
  CHECK(wrong == 0, "%zu bytes were written", wrong);
  free(bytes);
}

TEST(no_plugin) {
  CHECK_SAYS(path_of(PG_BF16, BATCH, TIME, DIM), "plain kernel: this build has no cuDNN plugin");
  both_ways(PG_BF16);
  check_computed(PG_BF16);
}

TEST(broken_plugin) {
  CHECK_SAYS(path_of(PG_BF16, BATCH, TIME, DIM), "plain kernel: the cuDNN plugin does not load: ");
  both_ways(PG_BF16);
  check_computed(PG_BF16);
}

TEST(plugin_does_not_start) {
  CHECK_SAYS(path_of(PG_BF16, BATCH, TIME, DIM), "plain kernel: no luck with open");
  both_ways(PG_BF16);
  check_computed(PG_BF16);
  CHECK(log_of_fake()->opened == 1, "%d attempts", log_of_fake()->opened);
}

TEST(forced_plain) {
  CHECK_SAYS(path_of(PG_BF16, BATCH, TIME, DIM), "plain kernel: PG_ATTENTION=plain");
  both_ways(PG_BF16);
  check_computed(PG_BF16);
  CHECK(!log_of_fake(), "the plugin was loaded");
}

TEST(unknown_wish) {
  CHECK_SAYS(path_of(PG_BF16, BATCH, TIME, DIM),
             "error: PG_ATTENTION is \"fast\"; it must be \"plain\" or \"cudnn\"");
}

/* One line, and no result. */
TEST(forced_without_plugin) {
  const struct side *gpu = &sides[GPU];
  CHECK_SAYS(path_of(PG_BF16, BATCH, TIME, DIM),
             "error: PG_ATTENTION=cudnn cannot be met: this build has no cuDNN plugin");
  make_tensors(PG_BF16);
  CHECK(gpu->k->attention_forward(gpu->q, PG_BF16, t.query.at[GPU], t.key.at[GPU], t.value.at[GPU],
                                  BATCH, TIME, HEADS, DIM, t.out.at[GPU], t.lse.at[GPU]) == -1);
  CHECK_SAYS(gpu->k->message(gpu->q), "PG_ATTENTION=cudnn cannot be met: ");
  check_untouched(&t.out);
}

TEST(forced_where_it_cannot) {
  const pg_workload work = {.type = PG_F32, .batch = 1, .time = 1, .heads = 1, .head_dim = 8};
  int64_t bytes;
  CHECK(sides[GPU].k->workspace(sides[GPU].q, &work, &bytes) == -1);
  CHECK_SAYS(sides[GPU].k->message(sides[GPU].q), "bf16 only");
  CHECK_SAYS(path_of(PG_F32, BATCH, TIME, DIM), "error: PG_ATTENTION=cudnn cannot be met: ");
  CHECK_SAYS(path_of(PG_BF16, BATCH, TIME, 18), "head_dim is 18, not a multiple of 8");
  CHECK_SAYS(path_of(PG_BF16, 1, TIME, DIM), "cuDNN 0.0.1");
}

TEST(working_plugin) {
  CHECK_SAYS(path_of(PG_F32, BATCH, TIME, DIM), "bf16 only");
  CHECK(!log_of_fake(), "fp32 loads the plugin");
  CHECK_SAYS(path_of(PG_BF16, BATCH, TIME, 18), "head_dim is 18, not a multiple of 8");
  CHECK_SAYS(path_of(PG_BF16, 1, TIME, DIM), "plain kernel: a single sequence of 5 positions");
  CHECK(!strcmp(path_of(PG_BF16, 1, 128, DIM), "cuDNN 0.0.1"), "%s", path_of(PG_BF16, 1, 128, DIM));
  CHECK(!strcmp(path_of(PG_BF16, BATCH, TIME, DIM), "cuDNN 0.0.1"));
  both_ways(PG_F32);
  check_computed(PG_F32);
  drop_twins();
  CHECK(log_of_fake()->opened == 1 && log_of_fake()->ran == 0, "fp32 went to cuDNN");
}

/* At 90 MiB for every head, backward takes two heads of a sequence and then its third. Every head
 * is in one part, at its place. */
TEST(parts) {
  both_ways(PG_BF16);
  const fake_cudnn_log *log = log_of_fake();
  int times[2][BATCH * HEADS] = {0};
  CHECK(log->runs[0].shape.backward == 0 && log->runs[0].shape.batch == BATCH &&
            log->runs[0].shape.heads == HEADS && !log->runs[0].workspace,
        "a forward pass without workspace is one part");
  for (int r = 0; r < log->ran; r++) {
    const pg_cudnn_shape *s = &log->runs[r].shape;
    const pg_cudnn_tensors *g = &log->runs[r].tensors;
    CHECK(s->time == TIME && s->head_dim == DIM && s->ld == HEADS * DIM);
    CHECK(s->batch == 1 || s->heads == HEADS, "statistics of this part have gaps");
    if (s->backward)
      CHECK(FAKE_WORKSPACE * (size_t)(s->batch * s->heads) <= (size_t)256 << 20 &&
                log->runs[r].workspace,
            "too much workspace, or none");
    const int64_t first = ((float *)g->lse - (float *)t.lse.at[GPU]) / TIME;
    const int64_t element = first / HEADS * TIME * HEADS * DIM + first % HEADS * DIM;
    const void *const got[] = {g->query, g->key,    g->value, g->out,
                               g->dout,  g->dquery, g->dkey,  g->dvalue};
    const twin *const whole[] = {&t.query, &t.key, &t.value, &t.out, &t.dout, &t.dq, &t.dk, &t.dv};
    for (int i = 0; i < 8; i++) {
      if (!s->backward && i > 3)
        CHECK(!got[i], "forward with tensor %d", i);
      else
        CHECK(got[i] == (uint16_t *)whole[i]->at[GPU] + element, "run %d, tensor %d", r, i);
    }
    for (int64_t b = 0; b < s->batch; b++)
      for (int64_t h = 0; h < s->heads; h++) times[s->backward][first + b * HEADS + h]++;
  }
  for (int i = 0; i < 2 * BATCH * HEADS; i++)
    CHECK(times[i / (BATCH * HEADS)][i % (BATCH * HEADS)] == 1, "head %d", i);
  check_untouched(&t.out);
  check_untouched(&t.dq);
  drop_twins();
}

/* What an estimate says is what the parts take. */
TEST(estimate) {
  const struct side *gpu = &sides[GPU];
  pg_workload work = {.type = PG_F32,
                      .batch = BATCH,
                      .time = TIME,
                      .heads = HEADS,
                      .head_dim = DIM,
                      .rows = 97,
                      .columns = 24};
  int64_t plain, cudnn;
  CHECK(gpu->k->workspace(gpu->q, &work, &plain) == 0);
  work.type = PG_BF16;
  CHECK(gpu->k->workspace(gpu->q, &work, &cudnn) == 0);
  const int64_t grown = cudnn - plain, two = 2 * (int64_t)FAKE_WORKSPACE;
  CHECK(grown > two - ((int64_t)1 << 20) && grown <= two, "%lld bytes for two heads",
        (long long)grown);
}

/* Rows that start between 16-byte boundaries go to the plain kernel. */
TEST(unaligned) {
  unit_seed(62);
  twin query = normals(PG_BF16, N + 1, 1), out = poisoned(PG_BF16, N);
  twin lse = poisoned(PG_F32, BATCH * TIME * HEADS);
  const uint16_t *from[2] = {(uint16_t *)query.at[CPU] + 1, (uint16_t *)query.at[GPU] + 1};
  BOTH(attention_forward, PG_BF16, from[side_], from[side_], from[side_], BATCH, TIME, HEADS, DIM,
       P(out), P(lse));
  CHECK_WITHIN("out", &out, 1e-2);
  drop_twins();
}

TEST(forward_only) {
  CHECK_SAYS(path_of(PG_BF16, BATCH, TIME, DIM),
             "cuDNN 0.0.1 forward, plain kernel backward: no luck with plan backward");
}

/* A failure when it runs: the plain kernel takes over. */
TEST(failing_run) {
  both_ways(PG_BF16);
  check_computed(PG_BF16);
}
TEST(forced_failing_run) {
  const struct side *gpu = &sides[GPU];
  make_tensors(PG_BF16);
  CHECK(gpu->k->attention_forward(gpu->q, PG_BF16, t.query.at[GPU], t.key.at[GPU], t.value.at[GPU],
                                  BATCH, TIME, HEADS, DIM, t.out.at[GPU], t.lse.at[GPU]) == -1);
  CHECK_SAYS(gpu->k->message(gpu->q), "PG_ATTENTION=cudnn cannot be met: no luck with run");
}

/* ---- the cases ----------------------------------------------------------------------------- */
typedef enum plugin { NONE, BROKEN, FAKE } plugin;
static const struct test {
  const char *name;
  void (*run)(void);
  plugin plugin;
  const char *wish, *failing;
} tests[] = {
    {"no_plugin", test_no_plugin, NONE, NULL, NULL},
    {"broken_plugin", test_broken_plugin, BROKEN, NULL, NULL},
    {"plugin_does_not_start", test_plugin_does_not_start, FAKE, NULL, "open"},
    {"forced_plain", test_forced_plain, FAKE, "plain", NULL},
    {"unknown_wish", test_unknown_wish, FAKE, "fast", NULL},
    {"forced_without_plugin", test_forced_without_plugin, NONE, "cudnn", NULL},
    {"forced_where_it_cannot", test_forced_where_it_cannot, FAKE, "cudnn", NULL},
    {"working_plugin", test_working_plugin, FAKE, NULL, NULL},
    {"parts", test_parts, FAKE, NULL, NULL},
    {"estimate", test_estimate, FAKE, NULL, NULL},
    {"unaligned", test_unaligned, FAKE, NULL, NULL},
    {"forward_only", test_forward_only, FAKE, "", "plan backward"},
    {"failing_run", test_failing_run, FAKE, NULL, "run"},
    {"forced_failing_run", test_forced_failing_run, FAKE, "cudnn", "run"},
};
enum { TESTS = sizeof tests / sizeof *tests };

static int copy(const char *name) {
  for (int i = 0; i < TESTS; i++)
    if (!strcmp(tests[i].name, name)) {
      open_sides();
      tests[i].run();
      for (int s = 0; s < 2; s++) sides[s].k->queue_free(sides[s].q);
      const fake_cudnn_log *log = log_of_fake();
      CHECK(!log || log->closed == 1, "closed %d times", log ? log->closed : 0);
      return unit_bad != 0;
    }
  return 2;
}

static void set(const char *name, const char *value) {
  if (value)
    setenv(name, value, 1);
  else
    unsetenv(name);
}

static const struct test *current;
static void in_a_copy(void) {
  const char *folder = temporary_path("");
  char beside[300], command[PATH_MAX + 800];
  snprintf(beside, sizeof beside, "%s" PG_CUDNN_PLUGIN, folder);
  unlink(beside);
  if (current->plugin == BROKEN) put_file(beside, "rubbish\n", 8);
  snprintf(command, sizeof command, "cp /proc/%d/exe %sprogram && %s %s", (int)getpid(), folder,
           current->plugin == FAKE ? "cp " PG_FAKE_CUDNN : "true", beside);
  CHECK(system(command) == 0, "%s", command);
  set("PG_ATTENTION", current->wish);
  set("FAKE_CUDNN", current->failing);
  snprintf(command, sizeof command, "cd / && exec %sprogram %s", folder, current->name);
  fflush(stdout);
  const int status = system(command);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
}

int main(int argc, char **argv) {
  if (argc == 2) return copy(argv[1]);
  for (int i = 0; i < TESTS; i++) {
    current = &tests[i];
    unit_bad = 0;
    in_a_copy();
    if (unit_bad)
      unit_failed++;
    else
      unit_passed++;
    printf("%s %s\n", unit_bad ? "not ok" : "ok", current->name);
  }
  char command[300];
  snprintf(command, sizeof command, "rm -r %s", temporary_folder);
  if (system(command) != 0) unit_failed++;
  return unit_report();
}
