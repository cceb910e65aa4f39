/* How the launcher says which rank this process is. */
#include "comm.h"

#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_PORT 29500

/* The integer in an environment variable; `fallback` when it is unset or empty; -2 when it is no
 * number. */
static int number(const char *name, int fallback) {
  const char *text = getenv(name);
  if (!text || !*text) return fallback;
  char *end;
  long value = strtol(text, &end, 10);
  return *end || value < 0 || value > INT_MAX ? -2 : (int)value;
}

/* The first host of "node[03-07,12],other" or "a,b". */
static void first_host(const char *list, char *out, size_t size) {
  size_t head = strcspn(list, "[,");
  snprintf(out, size, "%.*s", (int)head, list);
  if (list[head] != '[') return;
  size_t digits = strspn(list + head + 1, "0123456789");
  if (head + digits < size) snprintf(out + head, size - head, "%.*s", (int)digits, list + head + 1);
}

/* Ranks on this machine from "4(x2),3": only an even distribution is known without the rest. -1:
 * not stated; -2: no number. */
static int tasks_per_node(const char **name) {
  *name =
      getenv("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE";
  const char *text = getenv(*name);
  if (!text || !*text) return -1;
  char *end;
  const long tasks = strtol(text, &end, 10);
  return end == text || !strchr("(,", *end) || tasks < 1 || tasks > INT_MAX ? -2 : (int)tasks;
}

/* What all processes of a job share and others have not. */
static void name_job(pg_launcher *l) {
  const char *stated = getenv("PERIGEE_JOB"), *run = getenv("TORCHELASTIC_RUN_ID");
  const char *job = getenv("SLURM_JOB_ID"), *step = getenv("SLURM_STEP_ID");
  if (stated && *stated)
    snprintf(l->job, sizeof l->job, "PERIGEE_JOB %s", stated);
  else
    snprintf(l->job, sizeof l->job, "%s%s%s%s%s%s", run ? "run " : "", run ? run : "",
             job ? run ? ", job " : "job " : "", job ? job : "",
             job && step && strcmp(l->by, "srun") == 0 ? "." : "",
             job && step && strcmp(l->by, "srun") == 0 ? step : "");
}

int pg_launcher_read(pg_launcher *out, char *message, size_t size) {
  static const char *const names[][5] = {
      {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE"},
      {"environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
      {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""}};
  *out = (pg_launcher){.by = "", .world = 1, .local_size = 1};
  out->port = number("MASTER_PORT", DEFAULT_PORT);
  if (out->port < 1 || out->port > 65535) {
    snprintf(message, size, "MASTER_PORT = %s is not allowed: expected 1 to 65535",
             getenv("MASTER_PORT"));
    return PG_EINVAL;
  }
  out->listener = number("PERIGEE_LISTENER", 0);
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    /* A batch script of Slurm has a rank too; only a step of srun has a number of tasks. */
    const int world = number(names[i][2], -1), rank = number(names[i][1], -1);
    if (world == -1 && (i != 1 || rank == -1)) continue;
    out->by = names[i][0];
    if (world < 1 || rank < 0 || rank >= world) {
      const char *r = getenv(names[i][1]), *w = getenv(names[i][2]);
      snprintf(message, size,
               "%s = %s with %s = %s is not allowed: expected ranks from 0 below a "
               "number of at least 1",
               names[i][1], r ? r : "(unset)", names[i][2], w ? w : "(unset)");
      return PG_EINVAL;
    }
    out->rank = rank;
    out->world = world;
    out->local_rank = number(names[i][3], -1);
    const char *size_name = names[i][4];
    out->local_size = size_name[0] ? number(size_name, -1) : tasks_per_node(&size_name);
    if (out->local_size == -2 || out->local_size == 0) {
      snprintf(message, size, "%s = %s is not allowed: expected a whole number >= 1", size_name,
               getenv(size_name));
      return PG_EINVAL;
    }
    if (out->local_rank == -2 || (out->local_rank < 0 && i == 0)) {
      snprintf(message, size, "%s = %s is not allowed: expected a whole number >= 0", names[i][3],
               getenv(names[i][3]) ? getenv(names[i][3]) : "(unset)");
      return PG_EINVAL;
    }
    if (out->local_rank < 0) out->local_rank = rank; /* one machine, unless told otherwise */
    if (out->local_size < 1) out->local_size = world;
    break;
  }
  const char *host = getenv("MASTER_ADDR"), *nodes = getenv("SLURM_JOB_NODELIST");
  if (host && *host)
    snprintf(out->master, sizeof out->master, "%s", host);
  else if (nodes && strcmp(out->by, "srun") == 0)
    first_host(nodes, out->master, sizeof out->master);
  name_job(out);
  if (out->world == 1) out->by = "";
  return 0;
}

int pg_launcher_threads(const pg_launcher *launch, int cpus) {
  if (launch->world <= 1 || cpus < (int)sysconf(_SC_NPROCESSORS_ONLN)) return cpus;
  return cpus / launch->local_size > 1 ? cpus / launch->local_size : 1;
}
