/* Clocks, the terminal, the machine, and random numbers for pg.random. */
#include "../../core/plugin.h"
#include "bind.h"
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

/* OpenBLAS itself tells how it was built; its header is a private matter of the kernels. */
extern char *openblas_get_config(void);
extern int openblas_get_parallel(void);

static int push_clock(lua_State *L, clockid_t id) {
  struct timespec now;
  clock_gettime(id, &now);
  lua_pushnumber(L, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec);
  return 1;
}

static int system_clock(lua_State *L) {
  return push_clock(L, CLOCK_MONOTONIC);
}

static int system_time(lua_State *L) {
  return push_clock(L, CLOCK_REALTIME);
}

static int system_sleep(lua_State *L) {
  double seconds = pgl_number(L, 1, "seconds");
  if (!(seconds >= 0 && seconds <= 1e6))
    return luaL_error(L, "sleep: 0 to 1e6 seconds expected, got %f", seconds);
  /* A signal ends it early, which is wanted; so does the end of a guarded call. */
  while (seconds > 0 && !pgl_guard_cut()) {
    const double slice = seconds < 0.05 ? seconds : 0.05;
    struct timespec t = {.tv_nsec = (long)(slice * 1e9)};
    if (nanosleep(&t, NULL) != 0) break;
    seconds -= slice;
  }
  pgl_guard_check(L);
  return 0;
}

/* core.terminal() -> { tty, columns, rows } of standard error; input, output: whether those are
 * terminals too */
static int system_terminal(lua_State *L) {
  struct winsize size = {0};
  const bool tty = isatty(STDERR_FILENO);
  int columns = 80, rows = 24;
  if (tty && ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    columns = size.ws_col;
    rows = size.ws_row;
  }
  lua_createtable(L, 0, 5);
  pgl_set_boolean(L, "tty", tty);
  pgl_set_boolean(L, "input", isatty(STDIN_FILENO));
  pgl_set_boolean(L, "output", isatty(STDOUT_FILENO));
  pgl_set_integer(L, "columns", columns);
  pgl_set_integer(L, "rows", rows);
  return 1;
}

/* ---- the machine
 * ---------------------------------------------------------------------------------- */
/* Set `key` to the value of the first line "NAME ... : value" of a /proc file. */
static void set_proc_value(lua_State *L, const char *key, const char *path, const char *name) {
  char line[512];
  FILE *f = fopen(path, "re");
  line[0] = '\0';
  while (f && fgets(line, sizeof line, f) && strncmp(line, name, strlen(name)) != 0) line[0] = '\0';
  if (f) fclose(f);
  char *value = strchr(line, ':');
  if (!value) return;
  value += 1 + strspn(value + 1, " \t");
  value[strcspn(value, "\n")] = '\0';
  pgl_set_string(L, key, value);
}

/* CPUs that this process may use. */
static int allowed_cpus(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return (int)sysconf(_SC_NPROCESSORS_ONLN);
}

/* core.host() */
static int system_host(lua_State *L) {
  static const char *const parallel[] = {"none", "pthreads", "openmp"};
  struct utsname os;
  const int kind = openblas_get_parallel();
  lua_createtable(L, 0, 12);
  set_proc_value(L, "cpu", "/proc/cpuinfo", "model name");
  pgl_set_integer(L, "cores", allowed_cpus());
  pgl_set_string(L, "cpu_level", pg_cpu_level(pg_cpu_kernels(NULL)));
  pgl_set_string(L, "openblas", openblas_get_config());
  pgl_set_string(L, "openblas_parallel", kind >= 0 && kind <= 2 ? parallel[kind] : "unknown");
  pgl_set_string(L, "lua", LUA_RELEASE);
  pgl_set_string(L, "jansson", JANSSON_VERSION);
  pgl_set_integer(L, "memory_bytes",
                  (int64_t)sysconf(_SC_PHYS_PAGES) * (int64_t)sysconf(_SC_PAGESIZE));
  pgl_set_integer(L, "pid", getpid());
  if (uname(&os) == 0) {
    lua_pushfstring(L, "%s %s %s", os.sysname, os.release, os.machine);
    lua_setfield(L, -2, "os");
    pgl_set_string(L, "hostname", os.nodename);
  }
  return 1;
}

/* ---- random numbers
 * --------------------------------------------------------------------------------- */
/* A stream is an integer, or a name that is hashed. */
static uint64_t check_stream(lua_State *L, int arg) {
  if (lua_type(L, arg) == LUA_TSTRING) return pg_hash_name(pgl_string(L, arg, "stream"));
  return (uint64_t)pgl_integer(L, arg, "stream", INT64_MIN, INT64_MAX);
}

/* core.uniform(seed, stream, index) -> number index of the stream in [0, 1), 53 bits */
static int random_uniform(lua_State *L) {
  const uint64_t seed = (uint64_t)pgl_integer(L, 1, "seed", INT64_MIN, INT64_MAX);
  const uint64_t stream = check_stream(L, 2);
  uint32_t words[4];
  pg_philox(seed, stream, (uint64_t)pgl_integer(L, 3, "index", 0, INT64_MAX), words);
  const uint64_t bits = (uint64_t)words[0] << 32 | words[1];
  lua_pushnumber(L, (double)(bits >> 11) * 0x1p-53);
  return 1;
}

/* core.random(seed, stream, first, n) -> list of n standard normals from number `first` (0 is the
 * first) */
static int random_normals(lua_State *L) {
  const uint64_t seed = (uint64_t)pgl_integer(L, 1, "seed", INT64_MIN, INT64_MAX);
  const uint64_t stream = check_stream(L, 2);
  const uint64_t first = (uint64_t)pgl_integer(L, 3, "first", 0, INT64_MAX);
  const int64_t n = pgl_integer(L, 4, "n", 0, 1 << 26);
  float *values = lua_newuserdatauv(L, sizeof *values * (size_t)n + 1, 0);
  pg_normals(seed, stream, first, (size_t)n, values);
  lua_createtable(L, (int)n, 0);
  for (int64_t i = 0; i < n; i++) {
    lua_pushnumber(L, values[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static const luaL_Reg functions[] = {{"clock", system_clock},    {"time", system_time},
                                     {"sleep", system_sleep},    {"terminal", system_terminal},
                                     {"host", system_host},      {"uniform", random_uniform},
                                     {"random", random_normals}, {NULL, NULL}};

void pgl_open_system(lua_State *L) {
  char path[PATH_MAX];
  int count = 0;
  luaL_setfuncs(L, functions, 0);
  lua_createtable(L, 0, 2);
  lua_newtable(L);
  for (size_t i = 0; i < PG_CPU_LEVELS; i++)
    if (pg_cpu_kernels(pg_cpu_levels[i])) {
      lua_pushstring(L, pg_cpu_levels[i]);
      lua_rawseti(L, -2, ++count);
    }
  lua_setfield(L, -2, "cpu_levels"); /* those that are built and can run here */
  pgl_set_boolean(L, "cuda", pg__cuda_plugin(path, sizeof path));
  pgl_set_boolean(L, "mpi", pg__plugin_path("perigee_mpi.so", path, sizeof path));
  pgl_set_boolean(L, "nccl", pg__plugin_path("perigee_nccl.so", path, sizeof path));
  lua_setfield(L, -2, "build");
}
