/* Launchers' variables, and training on several ranks against one rank. The ranks are processes
 * with a communicator over shared memory (ranks.h); MPI and NCCL have tests of their own.
 *
 * Gradients are summed over ranks in another order than over micro-batches: one rounding of 2^-24
 * per addition. Eight updates of training amplify that; the golden trajectory, of 40 updates, was
 * measured within 2e-8 in the loss and 1e-7 in the gradient norm. */
#include "core/perigee.h"
#include "core/run_internal.h"
#include "ranks.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#define FOLDER PG_TEST_DIR "/golden/trajectory"
#define LOSS_BAR 1e-6
#define NORM_BAR 5e-6
#define WEIGHT_BAR 1e-5 /* of the root mean square difference, relative to that of the weights */

static char temporary[] = "/tmp/perigee-XXXXXX";

#define MUST(ctx, call)                                                                            \
  do {                                                                                             \
    int must_ = (call);                                                                            \
    if (must_ < 0) {                                                                               \
      printf("  %s:%d: %s: %s\n", __FILE__, __LINE__, pg_error_name(must_),                        \
             pg_context_message(ctx));                                                             \
      fflush(stdout);                                                                              \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

/* ---- launchers ------------------------------------------------------------------------------- */
static void environment(const char *first, ...) {
  static const char *const names[] = {"OMPI_COMM_WORLD_RANK",
                                      "OMPI_COMM_WORLD_SIZE",
                                      "OMPI_COMM_WORLD_LOCAL_RANK",
                                      "OMPI_COMM_WORLD_LOCAL_SIZE",
                                      "RANK",
                                      "WORLD_SIZE",
                                      "LOCAL_RANK",
                                      "LOCAL_WORLD_SIZE",
                                      "MASTER_ADDR",
                                      "MASTER_PORT",
                                      "SLURM_PROCID",
                                      "SLURM_NTASKS",
                                      "SLURM_STEP_NUM_TASKS",
                                      "SLURM_LOCALID",
                                      "SLURM_TASKS_PER_NODE",
                                      "SLURM_STEP_TASKS_PER_NODE",
                                      "SLURM_JOB_NODELIST",
                                      "SLURM_JOB_ID",
                                      "SLURM_STEP_ID",
                                      "TORCHELASTIC_RUN_ID",
                                      "PERIGEE_JOB"};
  for (size_t i = 0; i < PG_COUNT(names); i++) unsetenv(names[i]);
  va_list list;
  va_start(list, first);
  for (const char *name = first; name; name = va_arg(list, const char *))
    setenv(name, va_arg(list, const char *), 1);
  va_end(list);
}

TEST(a_launcher_numbers_the_process) {
  pg_launcher l;
  char text[512] = "";
  environment(NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == 0 && l.world == 1 && l.rank == 0 && !l.by[0]);
  environment("OMPI_COMM_WORLD_RANK", "5", "OMPI_COMM_WORLD_SIZE", "8",
              "OMPI_COMM_WORLD_LOCAL_RANK", "1", "OMPI_COMM_WORLD_LOCAL_SIZE", "4", "RANK", "7",
              "WORLD_SIZE", "9", NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == 0, "%s", text);
  CHECK(strcmp(l.by, "mpirun") == 0 && l.rank == 5 && l.world == 8 && l.local_rank == 1 &&
        l.local_size == 4);
  environment("RANK", "3", "WORLD_SIZE", "4", "MASTER_ADDR", "head", "MASTER_PORT", "1234", NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == 0, "%s", text);
  CHECK(strcmp(l.by, "environment") == 0 && l.rank == 3 && l.world == 4 && l.local_rank == 3 &&
        strcmp(l.master, "head") == 0 && l.port == 1234);
  environment("SLURM_PROCID", "2", "SLURM_STEP_NUM_TASKS", "8", "SLURM_LOCALID", "0",
              "SLURM_STEP_TASKS_PER_NODE", "2(x4)", "SLURM_JOB_NODELIST", "gpu[07-09,12],big",
              NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == 0, "%s", text);
  CHECK(strcmp(l.by, "srun") == 0 && l.rank == 2 && l.world == 8 && l.local_rank == 0 &&
            l.local_size == 2 && strcmp(l.master, "gpu07") == 0,
        "%s", l.master);
  /* The name of a job. */
  environment("RANK", "0", "WORLD_SIZE", "2", "SLURM_JOB_ID", "12", "SLURM_STEP_ID", "3", NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == 0 && strcmp(l.job, "job 12") == 0, "%s", l.job);
  setenv("TORCHELASTIC_RUN_ID", "abc", 1);
  CHECK(pg_launcher_read(&l, text, sizeof text) == 0);
  CHECK(strcmp(l.job, "run abc, job 12") == 0, "%s", l.job);
  setenv("PERIGEE_JOB", "mine", 1);
  CHECK(pg_launcher_read(&l, text, sizeof text) == 0);
  CHECK(strcmp(l.job, "PERIGEE_JOB mine") == 0, "%s", l.job);
  environment("SLURM_PROCID", "0", "SLURM_STEP_NUM_TASKS", "2", "SLURM_JOB_ID", "12",
              "SLURM_STEP_ID", "3", NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == 0 && strcmp(l.job, "job 12.3") == 0, "%s",
        l.job);
  /* A batch script has a rank and a number of tasks, but is one process. */
  environment("SLURM_PROCID", "0", "SLURM_NTASKS", "8", "SLURM_LOCALID", "0", NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == 0 && l.world == 1);
}

TEST(contradictions_are_refused) {
  pg_launcher l;
  char text[512] = "";
  environment("RANK", "4", "WORLD_SIZE", "4", NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == PG_EINVAL);
  CHECK(strstr(text, "RANK = 4 with WORLD_SIZE = 4"), "%s", text);
  environment("RANK", "1", NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == PG_EINVAL);
  CHECK(strstr(text, "WORLD_SIZE = (unset)"), "%s", text);
  environment("RANK", "x", "WORLD_SIZE", "2", NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == PG_EINVAL);
  environment("RANK", "0", "WORLD_SIZE", "2", "MASTER_PORT", "70000", NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == PG_EINVAL);
  CHECK(strstr(text, "MASTER_PORT = 70000"), "%s", text);
  environment("RANK", "0", "WORLD_SIZE", "2", "LOCAL_WORLD_SIZE", "junk", NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == PG_EINVAL);
  CHECK(strstr(text, "LOCAL_WORLD_SIZE = junk"), "%s", text);
  environment("SLURM_PROCID", "2", "SLURM_STEP_NUM_TASKS", "8", "SLURM_LOCALID", "0",
              "SLURM_STEP_TASKS_PER_NODE", "2;4", NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == PG_EINVAL);
  CHECK(strstr(text, "SLURM_STEP_TASKS_PER_NODE = 2;4"), "%s", text);
  environment("RANK", "0", "WORLD_SIZE", "2", NULL);
  CHECK(pg_launcher_read(&l, text, sizeof text) == 0);
  pg_comm *comm = NULL;
  pg_comm_options options = {.launch = &l, .device = "cpu"};
  CHECK(pg_comm_open(&options, &comm, text, sizeof text) == PG_EUNSUPPORTED && !comm);
  CHECK(strstr(text, "mpirun or srun"), "%s", text);
  environment(NULL);
}

TEST(ranks_of_a_machine_share_its_cpus) {
  const int cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);
  pg_launcher l = {.by = "mpirun", .world = 4, .local_size = 4};
  CHECK(pg_launcher_threads(&l, cpus) == (cpus / 4 > 1 ? cpus / 4 : 1));
  if (cpus > 1) CHECK(pg_launcher_threads(&l, cpus - 1) == cpus - 1); /* bound by the launcher */
  l.world = l.local_size = 1;
  CHECK(pg_launcher_threads(&l, cpus) == cpus);
}

/* ---- meeting through a port ------------------------------------------------------------------ */
static int port(void) {
  return 20000 + (int)(getppid() % 20000);
}

static pg_launcher at_port(int rank, int world) {
  return (pg_launcher){.by = "environment",
                       .rank = rank,
                       .world = world,
                       .local_rank = rank,
                       .local_size = world,
                       .port = port()};
}

static int meet(int rank, int world, double timeout, pg_comm **out, char *text, size_t size) {
  pg_launcher l = at_port(rank, world);
  pg_comm_options options = {.launch = &l, .device = "cuda", .timeout = timeout};
  return pg__rendezvous_open(&options, out, text, size);
}

static void meet_and_fail(pg_comm *shared, void *self) {
  char text[1024] = "", bytes[128];
  pg_comm *comm = NULL;
  (void)self;
  if (shared->rank == 0) usleep(300000); /* the others try again */
  CHECK(meet(shared->rank, shared->world, 20, &comm, text, sizeof text) == 0, "%s", text);
  if (!comm) return;
  memset(bytes, shared->rank, sizeof bytes);
  if (shared->rank == 0)
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (char)(3 * i);
  CHECK(comm->ops->broadcast(comm, NULL, bytes, sizeof bytes, 0) == 0);
  for (size_t i = 0; i < sizeof bytes; i++) CHECK(bytes[i] == (char)(3 * i));
  CHECK(comm->ops->poll(comm, 1, "a test", 0) == 0);
  shared->ops->all_reduce(shared, NULL, &(double){0}, 1, PG__COMM_F64, PG__COMM_SUM);
  if (shared->rank == 2) {
    pg__comm_note(comm, 2, "rank 2 failed: on purpose");
    comm->ops->report(comm);
  } else {
    for (int i = 0; i < 2000 && comm->ops->poll(comm, 2, "a test", 0) == 0; i++) usleep(5000);
    CHECK(comm->failed_rank == 2 && strcmp(comm->failure, "rank 2 failed: on purpose") == 0, "%s",
          comm->failure);
  }
  pg_comm_close(comm);
}

static void meet_and_vanish(pg_comm *shared, void *self) {
  char text[1024] = "";
  pg_comm *comm = NULL;
  (void)self;
  CHECK(meet(shared->rank, shared->world, 20, &comm, text, sizeof text) == 0, "%s", text);
  if (!comm || shared->rank == 1) _exit(comm == NULL);
  for (int i = 0; i < 2000 && comm->ops->poll(comm, 1, "a test", 0) == 0; i++) usleep(5000);
  CHECK(comm->failed_rank == 1 && strstr(comm->failure, "ended without a word"), "%s",
        comm->failure);
  pg_comm_close(comm);
}

/* Rank 1 is there but takes part in nothing, and the others wait with a timeout of half a second.
 */
static void meet_and_hang(pg_comm *shared, void *self) {
  char text[1024] = "";
  pg_comm *comm = NULL;
  (void)self;
  CHECK(meet(shared->rank, shared->world, shared->rank == 1 ? 20 : 4, &comm, text, sizeof text) ==
            0,
        "%s", text);
  if (!comm) return;
  comm->timeout = 0.5;
  if (shared->rank == 1) {
    sleep(4);
    CHECK(comm->ops->poll(comm, 1, "a test", 0) < 0);
  } else {
    for (int i = 0; i < 2000 && comm->ops->poll(comm, 1, "a test", 0.005 * i) == 0; i++)
      usleep(5000);
  }
  CHECK(comm->failed_rank == 1 &&
            strcmp(comm->failure, "rank 1 did not come to a test within 0.5 s") == 0,
        "%s", comm->failure);
  pg_comm_close(comm);
}

static void meet_twice(pg_comm *shared, void *self) {
  char text[1024] = "";
  pg_comm *comm = NULL;
  (void)self;
  CHECK(meet(shared->rank == 0 ? 0 : 1, 3, 3, &comm, text, sizeof text) == PG_EPEER && !comm);
  /* Which of the two was first is not known; rank 0 waits on, and names rank 2. */
  CHECK(strstr(text, shared->rank ? "rank" : "(two processes are rank 1)"), "%s", text);
}

/* A connection to rank 0 that sends these bytes; -1 when nobody listens. */
static int knock(const void *bytes, size_t size) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port())};
  const int s = socket(AF_INET, SOCK_STREAM, 0);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(s, (struct sockaddr *)&to, sizeof to) < 0) {
    close(s);
    return -1;
  }
  CHECK(size == 0 || send(s, bytes, size, MSG_NOSIGNAL) == (ssize_t)size);
  return s;
}

/* A message as the protocol has it, of a stranger: kinds 1 (hello) to 8 (farewell). */
static int knock_with(uint32_t kind, int32_t rank, int32_t world) {
  char packet[32 + 904] = "";
  const uint32_t head[4] = {0x50474532, kind, (uint32_t)rank, (uint32_t)world};
  memcpy(packet, head, sizeof head);
  if (kind > 1) snprintf(packet + 32, 100, "rank 1 failed: a stranger says so");
  return knock(packet, sizeof packet);
}

static void wait_alone(pg_comm *shared, void *self) {
  char text[1024] = "";
  pg_comm *comm = NULL;
  (void)self;
  if (shared->rank == 1) { /* one that dies at once, and might come again */
    int first;
    while ((first = knock_with(1, 1, 3)) < 0) usleep(10000);
    close(first);
  }
  CHECK(meet(shared->rank == 0 ? 0 : 2, 3, 1, &comm, text, sizeof text) == PG_EPEER && !comm);
  CHECK(strstr(text, "rank 1 did not come to rank 0 at port") &&
            strstr(text, "(rank 1 came and left)"),
        "%s", text);
}

/* Whoever comes to the port, before and after the ranks have met: no effect. Rank 1 does it all. */
static void meet_strangers(pg_comm *shared, void *self) {
  char text[1024] = "", noise[5000];
  pg_comm *comm = NULL;
  int status;
  (void)self;
  memset(noise, 'x', sizeof noise);
  if (shared->rank == 1) {
    int first;
    while ((first = knock(NULL, 0)) < 0) usleep(10000);
    close(first);
    for (int i = 0; i < 3; i++) close(knock(NULL, 0));
    for (uint32_t kind = 2; kind <= 8; kind++) knock_with(kind, kind == 6 ? -100 : 1, 2);
    knock_with(6, 1, 2);
    knock(noise, sizeof noise);
    knock_with(1, 1, 9);
    knock_with(1, -7, 2);
    knock_with(1, 0, 2);
    pg_launcher other = at_port(1, 2);
    snprintf(other.job, sizeof other.job, "job 7");
    pg_comm_options options = {.launch = &other, .device = "cuda", .timeout = 20};
    CHECK(pg__rendezvous_open(&options, &comm, text, sizeof text) == PG_EPEER && !comm);
    CHECK(strstr(text, "is used by another job (without a name, this is job 7)"), "%s", text);
    CHECK(meet(1, 3, 20, &comm, text, sizeof text) == PG_EPEER && !comm);
    CHECK(strcmp(text, "rank 1 has WORLD_SIZE = 3, rank 0 has 2") == 0, "%s", text);
    for (int i = 0; i < 80; i++) knock(NULL, 0); /* more than rank 0 keeps */
  }
  status = meet(shared->rank, 2, 20, &comm, text, sizeof text);
  CHECK(status == 0, "%s", text);
  if (!comm) return;
  shared->ops->all_reduce(shared, NULL, &(double){0}, 1, PG__COMM_F64, PG__COMM_SUM);
  if (shared->rank == 1) CHECK(knock(NULL, 0) < 0); /* the port is free for another job */
  for (int i = 0; i < 40; i++) {
    CHECK(comm->ops->poll(comm, 1, "a test", 0) == 0, "%s", comm->failure);
    usleep(5000);
  }
  shared->ops->all_reduce(shared, NULL, &(double){0}, 1, PG__COMM_F64, PG__COMM_SUM);
  pg_comm_close(comm);
}

/* A rank that fails before it joins tells those that wait for it. */
static void excuse_one(pg_comm *shared, void *self) {
  char text[1024] = "", want[64];
  pg_comm *comm = NULL;
  const int failing = *(int *)self;
  snprintf(want, sizeof want, "rank %d failed: no such file", failing);
  if (shared->rank == failing) {
    pg_launcher l = at_port(failing, 3);
    pg_comm_options options = {.launch = &l, .device = "cuda", .timeout = 60};
    pg_comm_excuse(&options, "no such file");
    return;
  }
  if (shared->rank == 1) usleep(500000); /* when the others know already */
  CHECK(meet(shared->rank, 3, 60, &comm, text, sizeof text) == PG_EPEER && !comm);
  CHECK(strcmp(text, want) == 0, "%s", text);
}

TEST(ranks_meet_through_a_port) {
  ranks_free(run_ranks(3, meet_and_fail, NULL));
  ranks_free(run_ranks(3, meet_and_vanish, NULL));
  ranks_free(run_ranks(3, meet_and_hang, NULL));
  ranks_free(run_ranks(2, wait_alone, NULL));
  ranks_free(run_ranks(3, meet_twice, NULL));
}

TEST(ranks_excuse_themselves) {
  time_t start = time(NULL);
  for (int failing = 0; failing < 3; failing += 2) ranks_free(run_ranks(3, excuse_one, &failing));
  CHECK(time(NULL) - start < 15);
}

TEST(strangers_have_no_effect) {
  ranks_free(run_ranks(2, meet_strangers, NULL));
}

/* Another program at the address of rank 0 that accepts and says nothing, or closes. */
static void meet_nobody(pg_comm *shared, void *self) {
  char text[1024] = "";
  pg_comm *comm = NULL;
  if (shared->rank == 0) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port())};
    const int s = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    CHECK(bind(s, (struct sockaddr *)&at, sizeof at) == 0 && listen(s, 8) == 0);
    CHECK(meet(0, 2, 2, &comm, text, sizeof text) == PG_EIO && !comm);
    CHECK(strstr(text, "address already in use (by another job, perhaps)"), "%s", text);
    for (time_t end = time(NULL) + 5; time(NULL) < end;) {
      struct pollfd p = {.fd = s, .events = POLLIN};
      if (poll(&p, 1, 100) > 0 && self) close(accept(s, NULL, NULL));
    }
    close(s);
    return;
  }
  usleep(300000);
  CHECK(meet(1, 2, 1, &comm, text, sizeof text) == PG_EPEER && !comm);
  CHECK(strstr(text, "rank 0 at 127.0.0.1, port "), "%s", text);
  CHECK(strstr(text, self ? "closes the connection (waited 1 s)" : "does not answer (waited 1 s)"),
        "%s", text);
}

TEST(another_program_at_the_port_is_named) {
  ranks_free(run_ranks(2, meet_nobody, NULL));
  ranks_free(run_ranks(2, meet_nobody, &(int){1}));
}

/* ---- a run ----------------------------------------------------------------------------------- */
typedef struct setting {
  /* An optimizer's name, "projected" (RowNorm with project = both), "budget" (with that too) or
   * "adaptive" (equidistant) */
  const char *head;
  const char *load, *save; /* checkpoints; NULL: none */
  int64_t sequences, micro, updates;
  bool sharded;
  int layers, matrices; /* 0: those of the golden trajectory; else Muon updates so many matrices */
  int broken; /* rank whose head gets a weight that is not a number before the last update; -1 */
} setting;

/* What a rank reports: written as text, read by the parent. */
typedef struct outcome {
  double loss, norm, weights; /* of the last update; a weighted sum of all weights */
  uint64_t hash;
  int64_t bytes, update;
  int status;
  char message[700];
} outcome;

/* Those of a role from number `from` on, at most `most`. */
static void assign(pg_run *run, pg_role role, size_t from, size_t most, const char *name, double lr,
                   const char *hyper, double value) {
  pg_model *model = pg_run_model(run);
  const pg_optimizer *o = pg_optimizer_find(name);
  double hypers[PG_MAX_HYPERS];
  pg_parameter *chosen[64];
  size_t count = 0, seen = 0;
  pg_optimizer_defaults(o, hypers);
  hypers[pg_optimizer_hyper_index(o, "lr", NULL)] = lr;
  if (hyper) hypers[pg_optimizer_hyper_index(o, hyper, NULL)] = value;
  for (size_t i = 0; i < pg_model_count(model); i++) {
    pg_parameter *p = pg_model_parameter(model, i);
    if (p->role == role && seen++ >= from && count < most) chosen[count++] = p;
  }
  MUST(pg_model_context(model), pg_run_assign(run, o, hypers, false, chosen, count, NULL));
}

static pg_run *open_run(pg_context *ctx, pg_comm *comm, const setting *s, pg_model **model) {
  pg_model_config config;
  pg_run *run;
  pg_model_config_default(&config);
  config.layers = s->layers ? s->layers : 2;
  config.width = 32, config.heads = 2, config.head_dim = 16, config.mlp = 128;
  config.vocab = 97, config.context = 16;
  MUST(ctx, pg_model_new(ctx, &config, model));
  if (s->layers)
    MUST(ctx, pg_model_init(*model, 5));
  else
    MUST(ctx, pg_model_load(*model, FOLDER "/init.safetensors"));
  pg_run_options options = {.data = FOLDER,
                            .sequences = s->sequences,
                            .micro = s->micro,
                            .max_norm = 1,
                            .data_seed = 3,
                            .comm = comm,
                            .shard_optimizer = s->sharded};
  MUST(ctx, pg_run_new(*model, &options, &run));
  static const struct {
    const char *name, *optimizer, *hyper;
    double value;
  } variants[] = {{"projected", "rownorm", "project", 2},
                  {"budget", "rownorm", "diameter_budget", 6e-3},
                  {"adaptive", "equidistant", "adaptive", 1}};
  const char *head = s->head, *hyper = NULL;
  double value = 0;
  for (size_t i = 0; i < PG_COUNT(variants); i++)
    if (strcmp(s->head, variants[i].name) == 0)
      head = variants[i].optimizer, hyper = variants[i].hyper, value = variants[i].value;
  const size_t muon = s->layers ? (size_t)s->matrices : 64;
  assign(run, PG_EMBEDDING, 0, 1, "adamw", 4e-3, NULL, 0);
  assign(run, PG_BACKBONE, 0, muon, "muon", 8e-3, NULL, 0);
  if (s->layers) assign(run, PG_BACKBONE, muon, 64, "adamw", 4e-3, NULL, 0);
  assign(run, PG_HEAD, 0, 1, head, 4e-3, hyper, value);
  return run;
}

/* Different for any two different weight sets, and a sum that rounding hardly changes. */
static double weigh(const pg_model *model) {
  double sum = 0;
  for (size_t i = 0; i < pg_model_count(model); i++) {
    const pg_parameter *p = pg_model_parameter(model, i);
    int64_t n = p->rows * p->columns;
    float *w = malloc((size_t)n * sizeof *w);
    MUST(pg_model_context(model), pg_tensor_read(p->value, w));
    for (int64_t k = 0; k < n; k++)
      sum += (double)w[k] * w[k] * (1 + (double)((k + (int64_t)i) % 7));
    free(w);
  }
  return sum;
}

static void train(pg_comm *comm, const setting *s, outcome *out) {
  pg_context *ctx;
  pg_model *model;
  pg_step step = {0};
  char message[256];
  pg_context_options options = {.device = "cpu", .threads = 1};
  if (pg_context_new(&options, &ctx, message, sizeof message) < 0) exit(1);
  pg_run *run = open_run(ctx, comm, s, &model);
  memset(out, 0, sizeof *out);
  if (s->load) MUST(ctx, pg_checkpoint_load(run, s->load, NULL, NULL));
  for (int64_t u = 0; u < s->updates; u++) {
    if (u + 1 == s->updates && s->broken == pg_comm_rank(comm)) {
      float *w = malloc(97 * 32 * sizeof *w);
      MUST(ctx, pg_tensor_read(pg_model_head(model)->value, w));
      w[40] = NAN;
      MUST(ctx, pg_tensor_write(pg_model_head(model)->value, w));
      free(w);
    }
    out->status = pg_run_step(run, &step);
    if (out->status < 0) break;
  }
  snprintf(out->message, sizeof out->message, "%s", pg_context_message(ctx));
  if (out->status == 0 && s->save) MUST(ctx, pg_checkpoint_save(run, s->save, NULL));
  int64_t everywhere;
  pg_run_slot_bytes(run, &out->bytes, &everywhere);
  out->loss = step.loss, out->norm = step.norm, out->hash = step.batch_hash;
  out->update = pg_run_updates(run);
  out->weights = weigh(model);
  pg_run_free(run);
  pg_model_free(model);
  CHECK(pg_context_bytes(ctx) == 0, "%lld bytes", (long long)pg_context_bytes(ctx));
  pg_context_free(ctx);
}

static void train_rank(pg_comm *comm, void *self) {
  outcome out;
  train(comm, self, &out);
  memcpy(((shared_comm *)comm)->all->result[comm->rank], &out, sizeof out);
}

/* One rank, in a process of its own too: a process that forks must not have used OpenMP. */
static void train_alone(pg_comm *comm, void *self) {
  outcome out;
  train(pg_comm_self(), self, &out);
  memcpy(((shared_comm *)comm)->all->result[0], &out, sizeof out);
}

static outcome alone(setting s) {
  ranks *all = run_ranks(1, train_alone, &s);
  outcome out = *(outcome *)(void *)all->result[0];
  ranks_free(all);
  return out;
}

/* The outcome on `world` ranks, alike on all of them. */
static outcome together(int world, setting s) {
  ranks *all = run_ranks(world, train_rank, &s);
  outcome out = *(outcome *)(void *)all->result[0];
  int64_t bytes = 0;
  for (int r = 0; r < world; r++) {
    const outcome *o = (outcome *)(void *)all->result[r];
    CHECK(o->weights == out.weights || isnan(out.weights) || isnan(o->weights),
          "rank %d has other weights than rank 0", r);
    CHECK(o->hash == out.hash && o->status == out.status && o->update == out.update);
    CHECK(strcmp(o->message, out.message) == 0, "rank %d: %s; rank 0: %s", r, o->message,
          out.message);
    bytes += o->bytes;
  }
  out.bytes = bytes;
  ranks_free(all);
  return out;
}

static void compare(const outcome *got, const outcome *want) {
  CHECK(got->status == 0 && want->status == 0, "%s %s", got->message, want->message);
  CHECK(got->hash == want->hash && got->update == want->update);
  CHECK_CLOSE(got->loss, want->loss, LOSS_BAR);
  CHECK_CLOSE(got->norm, want->norm, NORM_BAR);
  CHECK_CLOSE(got->weights, want->weights, WEIGHT_BAR);
}

TEST(ranks_train_as_one) {
  static const char *const heads[] = {"adamw", "rownorm", "projected", "sgd", "budget", "adaptive"};
  for (size_t h = 0; h < PG_COUNT(heads); h++)
    for (int world = 2; world <= 8; world += world < 4 ? 1 : 4) { /* 2, 3, 4, 8 */
      if (h > 0 && world != 3) continue;
      setting s = {.head = heads[h],
                   .sequences = world == 3 ? 6 : 8,
                   .micro = 1,
                   .updates = 8,
                   .broken = -1};
      outcome want = alone(s), whole = together(world, s);
      s.sharded = true;
      outcome parts = together(world, s);
      compare(&whole, &want);
      compare(&parts, &want);
      CHECK(whole.bytes == world * want.bytes && parts.bytes == want.bytes,
            "slots: %lld bytes on one rank, %lld whole, %lld split", (long long)want.bytes,
            (long long)whole.bytes, (long long)parts.bytes);
    }
}

/* Whole matrices that the ranks do not divide: some own more of them than others. */
TEST(matrices_that_do_not_divide_train_as_one) {
  static const struct { int layers, matrices, world; } cases[] = {{1, 5, 3}, {3, 19, 8}, {1, 2, 4}};
  for (size_t i = 0; i < PG_COUNT(cases); i++) {
    setting s = {.head = "rownorm",
                 .sequences = cases[i].world == 3 ? 6 : 8,
                 .micro = 1,
                 .updates = 6,
                 .layers = cases[i].layers,
                 .matrices = cases[i].matrices,
                 .broken = -1};
    outcome want = alone(s);
    s.sharded = true;
    outcome got = together(cases[i].world, s);
    compare(&got, &want);
    CHECK(got.bytes == want.bytes, "slots: %lld bytes on one rank, %lld split",
          (long long)want.bytes, (long long)got.bytes);
  }
}

/* Ranks at different calls find that out, and who is where. */
static void meet_apart(pg_comm *comm, void *self) {
  pg_context *ctx;
  pg_context_options options = {.device = "cpu", .threads = 1};
  double values[2] = {comm->rank, -comm->rank};
  (void)self;
  if (pg_context_new(&options, &ctx, NULL, 0) < 0) exit(1);
  CHECK(pg_comm_meet(comm, ctx, "a test", values, 2) == 0 && values[0] == 2 && values[1] == 0);
  CHECK(pg_comm_meet(comm, ctx, comm->rank == 1 ? "the left" : "the right", values, 2) == PG_EPEER);
  CHECK(strncmp(pg_context_message(ctx),
                "rank 1 is at the left while rank 0 is at the right: ", 51) == 0,
        "%s", pg_context_message(ctx));
  CHECK(comm->failed_rank == 1);
  CHECK(pg_comm_meet(comm, ctx, "a test", NULL, 0) == PG_EPEER);
  pg_context_free(ctx);
}

TEST(ranks_that_part_are_told) {
  ranks_free(run_ranks(3, meet_apart, NULL));
}

TEST(checkpoints_do_not_depend_on_the_ranks) {
  char four[64], two[64];
  snprintf(four, sizeof four, "%s/four", temporary);
  snprintf(two, sizeof two, "%s/two", temporary);
  setting s = {.head = "rownorm", .sequences = 8, .micro = 1, .updates = 9, .broken = -1};
  outcome want = alone(s);
  s.sharded = true;
  s.updates = 3, s.save = four;
  together(4, s);
  s.load = four, s.save = two;
  together(2, s);
  s.load = two, s.save = NULL;
  outcome got = together(4, s);
  compare(&got, &want);
  s.sharded = false;
  got = alone(s);
  compare(&got, &want);
}

TEST(all_ranks_refuse_alike) {
  setting s = {
      .head = "adamw", .sequences = 6, .micro = 1, .updates = 3, .sharded = true, .broken = 2};
  outcome got = together(3, s);
  CHECK(got.status == PG_ENONFINITE && got.update == 2, "%d", got.status);
  CHECK(strstr(got.message, "is not finite on rank 2 (loss nan)"), "%s", got.message);
}

TEST(a_batch_that_the_ranks_do_not_divide_is_refused) {
  shared_comm comm = make_rank(NULL, 0, 3);
  pg_context *ctx;
  pg_model *model;
  pg_run *run;
  pg_model_config config;
  pg_context_options options = {.device = "cpu", .threads = 1};
  if (pg_context_new(&options, &ctx, NULL, 0) < 0) exit(1);
  pg_model_config_default(&config);
  config.layers = 1, config.width = 4, config.heads = 1, config.head_dim = 4, config.vocab = 97;
  config.context = 16;
  MUST(ctx, pg_model_new(ctx, &config, &model));
  pg_run_options o = {
      .data = FOLDER, .sequences = 8, .micro = 2, .max_norm = 1, .comm = &comm.public};
  CHECK(pg_run_new(model, &o, &run) == PG_EINVAL && !run);
  CHECK(strstr(pg_context_message(ctx), "batch.sequences = 8") &&
            strstr(pg_context_message(ctx), "2 x 3"),
        "%s", pg_context_message(ctx));
  pg_model_free(model);
  pg_context_free(ctx);
}

/* Every matrix has one owner, alike on all ranks; the dearest rank has at most one matrix more than
 * the cheapest. */
static void share(int64_t layers, int matrices, int world) {
  pg_context *ctx;
  pg_model *model;
  pg_model_config config;
  pg_context_options options = {.device = "cpu", .threads = 1};

  int owned[RANKS_MAX] = {0}, count[64] = {0};
  if (pg_context_new(&options, &ctx, NULL, 0) < 0) exit(1);
  pg_model_config_default(&config);
  config.layers = layers, config.width = 8, config.heads = 2, config.head_dim = 4, config.mlp = 8;
  config.vocab = 97, config.context = 16;
  for (int rank = 0; rank < world; rank++) {
    shared_comm comm = make_rank(NULL, rank, world);
    pg_run *run;
    double hypers[PG_MAX_HYPERS];
    pg_parameter *chosen[64];
    MUST(ctx, pg_model_new(ctx, &config, &model));
    pg_run_options o = {.data = FOLDER,
                        .sequences = world,
                        .micro = 1,
                        .max_norm = 1,
                        .comm = &comm.public,
                        .shard_optimizer = true};
    MUST(ctx, pg_run_new(model, &o, &run));
    for (int i = 0; i < matrices; i++) chosen[i] = pg_model_parameter(model, 1 + (size_t)i);
    pg_optimizer_defaults(pg_optimizer_find("muon"), hypers);
    MUST(ctx, pg_run_assign(run, pg_optimizer_find("muon"), hypers, false, chosen, (size_t)matrices,
                            NULL));
    for (int i = 0; i < matrices; i++) {
      int64_t first, rows = pg__part(run, chosen[i], rank, &first);
      CHECK(rows == 0 || rows == chosen[i]->rows);
      CHECK(chosen[i]->slots[0]->shape[0] == rows);
      owned[rank] += rows > 0;
      count[i] += rows > 0;
    }
    pg_run_free(run);
    pg_model_free(model);
  }
  int least = matrices, most = 0;
  for (int r = 0; r < world; r++) {
    least = owned[r] < least ? owned[r] : least;
    most = owned[r] > most ? owned[r] : most;
  }
  CHECK(most - least <= 1, "%d matrices over %d ranks: %d to %d", matrices, world, least, most);
  for (int i = 0; i < matrices; i++) CHECK(count[i] == 1, "matrix %d has %d owners", i, count[i]);
  pg_context_free(ctx);
}

TEST(whole_matrices_are_balanced) {
  share(1, 5, 3);
  share(3, 19, 8);
  share(1, 2, 4); /* two ranks have nothing to do */
}

int main(void) {
  if (!mkdtemp(temporary)) return 1;
  RUN(a_launcher_numbers_the_process);
  RUN(contradictions_are_refused);
  RUN(ranks_of_a_machine_share_its_cpus);
  RUN(ranks_meet_through_a_port);
  RUN(strangers_have_no_effect);
  RUN(ranks_excuse_themselves);
  RUN(another_program_at_the_port_is_named);
  RUN(ranks_train_as_one);
  RUN(matrices_that_do_not_divide_train_as_one);
  RUN(ranks_that_part_are_told);
  RUN(checkpoints_do_not_depend_on_the_ranks);
  RUN(all_ranks_refuse_alike);
  RUN(a_batch_that_the_ranks_do_not_divide_is_refused);
  RUN(whole_matrices_are_balanced);
  char command[128];
  snprintf(command, sizeof command, "rm -rf '%s'", temporary);
  if (system(command) != 0) return 1;
  return unit_report();
}
