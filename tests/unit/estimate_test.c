/* pg_run_estimate against what runs then allocate, and the host's memory as its system files tell.
 *
 * Everything a run allocates is known beforehand, so an estimate without the backend's workspace is
 * what the accounts show at their peak, but for what takes turns: the largest of those is counted,
 * whether or not it comes when all else is there. PG_TEST_DEVICE=cuda: on another device. */
#include "core/geometry.h"
#include "data_files.h"
#include "model_support.h"
#include "ranks.h"

typedef struct setting {
  shape shape;
  pg_dtype compute;
  const char *head, *backbone;
  unsigned with; /* of the following */
} setting;
enum { RECOMPUTE = 1, KEEP_ALL = 2, SHARD = 4, DIAMETER = 8, PROJECT = 16, BUDGET = 32 };

static pg_context *new_context(void) {
  const pg_context_options options = {
      .device = getenv("PG_TEST_DEVICE") ? getenv("PG_TEST_DEVICE") : "cpu", .threads = 1};
  pg_context *ctx;
  char message[256];
  if (pg_context_new(&options, &ctx, message, sizeof message) < 0) {
    printf("no context: %s\n", message);
    exit(1);
  }
  return ctx;
}

static char folder[64];

static pg_run_options options_of(const setting *s, pg_comm *comm) {
  return (pg_run_options){.data = folder,
                          .sequences = s->shape.batch * 2 * pg_comm_world(comm),
                          .micro = s->shape.batch,
                          .max_norm = 1,
                          .comm = comm,
                          .keep_all_increments = s->with & KEEP_ALL,
                          .shard_optimizer = s->with & SHARD,
                          .recompute = s->with & RECOMPUTE};
}

static const char *optimizer_of(const setting *s, pg_role role) {
  return role == PG_HEAD ? s->head : role == PG_BACKBONE ? s->backbone : "adamw";
}

/* PROJECT: what can, projects on both sides. BUDGET: what can, uses up a diameter. */
static void hypers_of(const setting *s, pg_role role, double hypers[PG_MAX_HYPERS]) {
  const pg_optimizer *o = pg_optimizer_find(optimizer_of(s, role));
  const int lr = pg_optimizer_hyper_index(o, "lr", NULL);
  const int project = pg_optimizer_hyper_index(o, "project", NULL);
  const int budget = pg_optimizer_hyper_index(o, "diameter_budget", NULL);
  const int rescale = pg_optimizer_hyper_index(o, "rescale", NULL);
  pg_optimizer_defaults(o, hypers);
  if (budget >= 0 && s->with & BUDGET) hypers[budget] = 1e-3;
  if (rescale >= 0 && s->with & BUDGET) hypers[rescale] = 1;
  if (lr >= 0) hypers[lr] = 1e-3;
  if (project >= 0 && s->with & PROJECT) hypers[project] = 2;
}

static pg_run_memory estimate(pg_context *ctx, const setting *s, pg_comm *comm) {
  pg_model_config c = make_config(&s->shape);
  const pg_run_options options = options_of(s, comm);
  const size_t blocks = 7 * (size_t)s->shape.layers;
  size_t *all = calloc(blocks + 2, sizeof *all);
  pg_run_memory need;
  double hypers[PG_ROLES][PG_MAX_HYPERS];
  for (size_t i = 0; i < blocks + 2; i++) all[i] = i;
  for (int role = 0; role < PG_ROLES; role++) hypers_of(s, (pg_role)role, hypers[role]);
  const pg_run_entry entries[] = {
      {pg_optimizer_find(optimizer_of(s, PG_EMBEDDING)), hypers[PG_EMBEDDING], all, 1},
      {pg_optimizer_find(optimizer_of(s, PG_BACKBONE)), hypers[PG_BACKBONE], all + 1, blocks},
      {pg_optimizer_find(optimizer_of(s, PG_HEAD)), hypers[PG_HEAD], all + 1 + blocks, 1}};
  const int64_t before = pg_context_peak_bytes(ctx);
  MUST(ctx, pg_run_estimate(ctx, &c, s->compute, &options, entries, 3, s->with & DIAMETER, &need));
  CHECK(pg_context_peak_bytes(ctx) == before, "an estimate allocated");
  free(all);
  return need;
}

/* The peak of two updates, a diameter and a checkpoint. */
static int64_t measure(pg_context *ctx, const setting *s, pg_comm *comm) {
  pg_model_config c = make_config(&s->shape);
  const pg_run_options options = options_of(s, comm);
  pg_model *model = make_model(ctx, &c, 1);
  pg_run *run;
  char path[128];
  MUST(ctx, pg_model_set_compute(model, s->compute));
  MUST(ctx, pg_run_new(model, &options, &run));
  for (int role = 0; role < PG_ROLES; role++) {
    const pg_optimizer *o = pg_optimizer_find(optimizer_of(s, (pg_role)role));
    pg_parameter *chosen[256];
    double hypers[PG_MAX_HYPERS];
    size_t count = 0;
    hypers_of(s, (pg_role)role, hypers);
    for (size_t i = 0; i < pg_model_count(model); i++)
      if (pg_model_parameter(model, i)->role == (pg_role)role)
        chosen[count++] = pg_model_parameter(model, i);
    MUST(ctx, pg_run_assign(run, o, hypers, false, chosen, count, NULL));
  }
  for (int i = 0; i < 2; i++) {
    pg_step step;
    MUST(ctx, pg_run_step(run, &step));
  }
  static int saved;
  if (s->with & DIAMETER) {
    pg_diameter found;
    MUST(ctx, pg_geometry_diameter(pg_model_head(model)->increment, &found));
  }
  snprintf(path, sizeof path, "%s/%08d", folder, 100 * pg_comm_world(comm) + saved++);
  MUST(ctx, pg_checkpoint_save(run, path, NULL));
  pg_run_free(run);
  pg_model_free(model);
  return pg_context_peak_bytes(ctx);
}

static void compare(const setting *s, pg_comm *comm) {
  pg_context *ctx = new_context();
  const pg_run_memory need = estimate(ctx, s, comm);
  const int64_t peak = measure(ctx, s, comm), said = need.total;
  /* The rest is exact. */
  const double slack = s->with & (DIAMETER | BUDGET) ? 1.1 : 1.03;
  CHECK(said >= peak && (double)(said - need.workspace) <= slack * (double)peak,
        "%s on %s, %s, with %u: estimated %lld, peak %lld, workspace %lld", s->head, s->backbone,
        pg_dtype_name(s->compute), s->with, (long long)said, (long long)peak,
        (long long)need.workspace);
  CHECK(need.total == need.weights + need.copies + need.gradients + need.slots + need.increments +
                          need.activations + need.scratch + need.workspace);
  CHECK(need.logits > 0 && need.logits <= need.activations && need.workspace > 0);
  pg_context_free(ctx);
}

/* layers width heads head_dim mlp vocab batch time */
static const shape wide = {3, 48, 2, 24, 160, 301, 3, 20}, deep = {6, 40, 2, 20, 96, 97, 2, 33},
                   large_head = {1, 64, 2, 32, 64, 1200, 1, 8},
                   none = {0, 32, 2, 16, 64, 200, 4, 8};

TEST(one_rank) {
  const setting settings[] = {
      {wide, PG_F32, "adamw", "muon", 0},
      {wide, PG_F32, "rownorm", "muon", RECOMPUTE},
      {wide, PG_BF16, "rownorm", "adamw", KEEP_ALL},
      {deep, PG_F32, "muon", "muon", 0},
      {deep, PG_BF16, "adamw", "sgd", RECOMPUTE | KEEP_ALL},
      {deep, PG_BF16, "rownorm", "frozen", RECOMPUTE},
      {large_head, PG_F32, "muon", "adamw", 0},
      {large_head, PG_BF16, "rownorm", "muon", RECOMPUTE},
      {large_head, PG_F32, "adamw", "adamw", RECOMPUTE | DIAMETER},
      {wide, PG_BF16, "rownorm", "muon", KEEP_ALL | DIAMETER},
      {none, PG_F32, "frozen", "muon", 0},
      {large_head, PG_F32, "rownorm", "muon", PROJECT},
      {wide, PG_BF16, "adamw", "rownorm", PROJECT},
      {wide, PG_F32, "adamw", "rownorm", PROJECT | KEEP_ALL},
      {none, PG_BF16, "sgd", "muon", RECOMPUTE},
      {large_head, PG_F32, "rownorm", "muon", BUDGET},
      {large_head, PG_BF16, "rownorm", "rownorm", PROJECT | BUDGET},
      {large_head, PG_F32, "greedy_radial", "adamw", BUDGET},
  };
  for (size_t i = 0; i < PG_COUNT(settings); i++) compare(&settings[i], pg_comm_self());
}

/* Each knows what it takes for itself. */
TEST(every_optimizer) {
  const pg_optimizer *o;
  for (size_t i = 0; (o = pg_optimizer_at(i)); i++)
    compare(&(setting){deep, PG_BF16, o->name, o->moments ? "adamw" : o->name, RECOMPUTE},
            pg_comm_self());
}

static void one_of_several(pg_comm *comm, void *self) {
  compare(self, comm);
}

TEST(several_ranks) {
  setting settings[] = {
      {wide, PG_F32, "rownorm", "muon", SHARD},
      {deep, PG_BF16, "adamw", "muon", RECOMPUTE | KEEP_ALL | SHARD},
      {deep, PG_F32, "muon", "adamw", 0},
      {wide, PG_F32, "rownorm", "rownorm", PROJECT | SHARD},
      {wide, PG_F32, "rownorm", "rownorm", PROJECT | BUDGET | SHARD},
  };
  for (size_t i = 0; i < PG_COUNT(settings); i++)
    for (int world = 2; world <= 3; world++)
      ranks_free(run_ranks(world, one_of_several, &settings[i]));
  const pg_optimizer *o;
  for (size_t i = 0; (o = pg_optimizer_at(i)); i++) {
    setting s = {wide, PG_F32, o->name, o->moments ? "adamw" : o->name, SHARD};
    ranks_free(run_ranks(2, one_of_several, &s));
  }
}

/* As described, without a device that could hold it. */
TEST(what_does_not_fit) {
  pg_context *ctx = new_context();
  const setting huge = {
      {4096, 65536, 512, 128, 262144, 1 << 20, 1024, 65536}, PG_F32, "adamw", "adamw", 0};
  const pg_run_memory need = estimate(ctx, &huge, pg_comm_self());
  const double weights = 4096.0 * 65536 * (4 * 65536 + 3 * 262144.0) + 2.0 * (1 << 20) * 65536;
  CHECK_CLOSE(need.weights, 4 * weights, 1e-12);
  CHECK(need.total > need.weights + need.gradients && need.total < INT64_MAX);
  setting beyond = huge;
  beyond.shape.batch = INT64_MAX / 65536 / 4;
  CHECK(estimate(ctx, &beyond, pg_comm_self()).total == INT64_MAX, "too much to count");
  pg_context_free(ctx);
}

TEST(a_gap_in_the_assignments) {
  pg_context *ctx = new_context();
  pg_model_config c = make_config(&wide);
  pg_run_memory need;
  const size_t some[] = {0, 22, 0}, beyond[] = {23};
  const pg_run_options options = {.data = folder, .sequences = 2, .max_norm = 1};
  const pg_optimizer *o = pg_optimizer_find("adamw");
  const struct {
    pg_run_entry entry;
    const char *says;
  } cases[] = {{{o, NULL, some, 2}, "no optimizer updates 21 of 23 parameters"},
               {{o, NULL, some, 3}, "parameter 0 has two optimizers: model.embed_tokens.weight"},
               {{o, NULL, beyond, 1}, "parameter 23 does not exist"}};
  for (size_t i = 0; i < PG_COUNT(cases); i++) {
    CHECK(pg_run_estimate(ctx, &c, PG_F32, &options, &cases[i].entry, 1, false, &need) ==
          PG_EINVAL);
    CHECK(strstr(pg_context_message(ctx), cases[i].says), "%s", pg_context_message(ctx));
  }
  CHECK(pg_context_bytes(ctx) == 0);
  pg_context_free(ctx);
}

/* ---- the host's memory --------------------------------------------------------------------- */
static void put(const char *root, const char *name, const char *text) {
  char path[256], command[320];
  snprintf(path, sizeof path, "%s%s", root, name);
  snprintf(command, sizeof command, "mkdir -p \"$(dirname '%s')\"", path);
  if (system(command) != 0) exit(1);
  FILE *f = fopen(path, "w");
  if (!f || fputs(text, f) < 0 || fclose(f) != 0) exit(1);
}

TEST(the_hosts_memory) {
  char root[64];
  data_folder(root);
  CHECK(pg__host_memory(root) == 0, "nothing is known");
  put(root, "/proc/meminfo", "MemTotal:  900 kB\nMemAvailable:     500 kB\nSwapFree:  100 kB\n");
  CHECK(pg__host_memory(root) == 600 * 1024);
  /* Version 2: the tightest of the group's and its parents' limits. */
  put(root, "/proc/self/cgroup", "0::/a/b\n");
  put(root, "/sys/fs/cgroup/a/b/memory.max", "max\n");
  put(root, "/sys/fs/cgroup/a/b/memory.current", "1000\n");
  CHECK(pg__host_memory(root) == 600 * 1024, "no limit");
  put(root, "/sys/fs/cgroup/a/memory.max", "300000\n");
  put(root, "/sys/fs/cgroup/a/memory.current", "200000\n");
  CHECK(pg__host_memory(root) == 100000);
  put(root, "/sys/fs/cgroup/a/memory.stat", "active_file 7000\ninactive_file 5000\n");
  CHECK(pg__host_memory(root) == 105000, "cached pages can be given back");
  put(root, "/sys/fs/cgroup/a/b/memory.max", "21000\n");
  CHECK(pg__host_memory(root) == 20000);
  put(root, "/sys/fs/cgroup/memory.max", "12000\n");
  put(root, "/sys/fs/cgroup/memory.current", "13000\n");
  CHECK(pg__host_memory(root) == 0, "nothing is left");
  /* Version 1; without a limit its number is larger than any memory. */
  put(root, "/proc/self/cgroup", "9:cpu,cpuacct:/a/b\n4:memory:/x\n");
  CHECK(pg__host_memory(root) == 600 * 1024, "other groups do not count");
  put(root, "/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n");
  put(root, "/sys/fs/cgroup/memory/x/memory.usage_in_bytes", "4096\n");
  CHECK(pg__host_memory(root) == 600 * 1024);
  put(root, "/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "50000\n");
  put(root, "/sys/fs/cgroup/memory/x/memory.stat", "inactive_file 1\ntotal_inactive_file 96\n");
  CHECK(pg__host_memory(root) == 50000 - 4096 + 96);
  data_folder_remove(root);
}

TEST(available) {
  pg_context *ctx = new_context();
  int64_t bytes = pg_context_available(ctx), large = 64 << 20;
  CHECK(bytes > 0 && bytes < (int64_t)1 << 50, "%lld bytes", (long long)bytes);
  if (strcmp(pg_context_device(ctx), "cpu") != 0) {
    pg_tensor *t;
    MUST(ctx, pg_tensor_new(ctx, PG_F32, 1, &(int64_t){large / 4}, &t));
    CHECK(pg_context_available(ctx) == bytes - large);
    pg_tensor_free(t);
  }
  pg_context_free(ctx);
}

int main(void) {
  pg_context *ctx = new_context();
  const bool cpu = strcmp(pg_context_device(ctx), "cpu") == 0;
  data_folder(folder);
  data_count_shard(ctx, data_path(folder, "x_train_0.bin"), 3, 4000, 97);
  pg_context_free(ctx);
  if (cpu) RUN(several_ranks); /* first: a process that forks must not have used OpenMP */
  RUN(one_rank);
  RUN(every_optimizer);
  RUN(what_does_not_fit);
  RUN(a_gap_in_the_assignments);
  RUN(the_hosts_memory);
  RUN(available);
  data_folder_remove(folder);
  return unit_report();
}
