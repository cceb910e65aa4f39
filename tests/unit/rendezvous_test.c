/* Launchers' variables, and ranks that meet through a port, with whoever else knows it. */
#include "core/perigee.h"
#include "core/run_internal.h"
#include "ranks.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/socket.h>
#include <time.h>

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
                                      "PERIGEE_JOB",
                                      "PERIGEE_LISTENER"};
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
  CHECK(l.listener == 0);
  setenv("PERIGEE_LISTENER", "4", 1);
  CHECK(pg_launcher_read(&l, text, sizeof text) == 0 && l.listener == 4);
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

/* Rank 0 takes over a socket that listened before any rank was there: nobody waits. */
static void meet_at_listener(pg_comm *shared, void *self) {
  char text[1024] = "";
  pg_comm *comm = NULL;
  struct sockaddr_in at;
  socklen_t size = sizeof at;
  const int fd = *(int *)self;
  CHECK(getsockname(fd, (struct sockaddr *)&at, &size) == 0);
  pg_launcher l = at_port(shared->rank, shared->world);
  l.port = ntohs(at.sin_port);
  if (shared->rank == 0) l.listener = fd;
  pg_comm_options options = {.launch = &l, .device = "cuda", .timeout = 20};
  CHECK(pg__rendezvous_open(&options, &comm, text, sizeof text) == 0, "%s", text);
  if (comm) pg_comm_close(comm);
}

TEST(rank_0_takes_over_a_listener) {
  struct sockaddr_in any = {.sin_family = AF_INET};
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(bind(fd, (struct sockaddr *)&any, sizeof any) == 0 && listen(fd, 8) == 0);
  ranks_free(run_ranks(3, meet_at_listener, &fd));
  close(fd);
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

int main(void) {
  RUN(a_launcher_numbers_the_process);
  RUN(contradictions_are_refused);
  RUN(ranks_of_a_machine_share_its_cpus);
  RUN(ranks_meet_through_a_port);
  RUN(strangers_have_no_effect);
  RUN(rank_0_takes_over_a_listener);
  RUN(ranks_excuse_themselves);
  RUN(another_program_at_the_port_is_named);
  return unit_report();
}
