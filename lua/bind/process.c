/* core.spawn: another program, through libuv, and what a child may take over. A process of its own
 * session, so that Ctrl-C at the terminal reaches the one that started it and nobody else. Closing
 * the object leaves the process alone. */
#include "bind.h"
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#define PGL_PROCESS "perigee.process"
#define PGL_LISTENER "perigee.listener"
enum { MOST_ARGUMENTS = 4096, MOST_INHERITED = 4 };

typedef struct child {
  uv_loop_t loop;
  uv_process_t process;
  bool looping, spawned, exited;
  int64_t status;
  int signal;
} child;

static void has_ended(uv_process_t *process, int64_t status, int signal) {
  child *c = process->data;
  c->exited = true;
  c->status = status;
  c->signal = signal;
}

static child *check_child(lua_State *L) {
  child *c = luaL_checkudata(L, 1, PGL_PROCESS);
  if (!c->spawned) luaL_error(L, "this process is closed");
  return c;
}

static int child_close(lua_State *L) {
  child *c = luaL_checkudata(L, 1, PGL_PROCESS);
  if (c->looping) {
    if (!uv_is_closing((uv_handle_t *)&c->process) && c->process.type == UV_PROCESS)
      uv_close((uv_handle_t *)&c->process, NULL);
    uv_run(&c->loop, UV_RUN_DEFAULT);
    uv_loop_close(&c->loop);
  }
  c->looping = c->spawned = false;
  return 0;
}

/* The strings of the list at `index` into list[], NULL at the end. They live as long as the table.
 */
static void read_list(lua_State *L, int index, const char *what, const char **list) {
  const lua_Integer n = (lua_Integer)lua_rawlen(L, index);
  if (n >= MOST_ARGUMENTS) luaL_error(L, "%s: at most %d expected", what, MOST_ARGUMENTS - 1);
  for (lua_Integer i = 1; i <= n; i++) {
    lua_rawgeti(L, index, i);
    if (lua_type(L, -1) != LUA_TSTRING)
      luaL_error(L, "%s[%d]: a string expected, got %s", what, (int)i, pgl_describe(L, -1));
    list[i - 1] = lua_tostring(L, -1);
    if (strlen(list[i - 1]) != lua_rawlen(L, -1))
      luaL_error(L, "%s[%d]: a string without NUL bytes expected, got %s", what, (int)i,
                 pgl_describe(L, -1));
    lua_pop(L, 1);
  }
  list[n] = NULL;
}

/* The descriptors of the list at `index` into stdio[3] and on; returns their number. */
static int read_inherited(lua_State *L, int index, uv_stdio_container_t *stdio) {
  const lua_Integer n = (lua_Integer)lua_rawlen(L, index);
  if (n > MOST_INHERITED) luaL_error(L, "spawn.inherit: at most %d expected", MOST_INHERITED);
  for (lua_Integer i = 1; i <= n; i++) {
    lua_rawgeti(L, index, i);
    if (!lua_isinteger(L, -1) || fcntl((int)lua_tointeger(L, -1), F_GETFD) < 0)
      luaL_error(L, "spawn.inherit[%d]: an open descriptor expected, got %s", (int)i,
                 pgl_describe(L, -1));
    stdio[2 + i] =
        (uv_stdio_container_t){.flags = UV_INHERIT_FD, .data.fd = (int)lua_tointeger(L, -1)};
    lua_pop(L, 1);
  }
  return (int)n;
}

/* spawn { args = { program, … }, env = { "NAME=value", … }, output = file, inherit = { descriptor,
 * … } } -> process. `env` is all of the environment; output and errors are appended to the file,
 * the input is empty. Descriptors that it inherits are 3, 4, … there. */
static int process_spawn(lua_State *L) {
  static const char *const keys[] = {"args", "env", "output", "inherit", NULL};
  const char *args[MOST_ARGUMENTS], *env[MOST_ARGUMENTS], *output = NULL;
  uv_stdio_container_t stdio[3 + MOST_INHERITED];
  int inherited = 0;
  lua_settop(L, 1);
  pgl_table(L, 1, "spawn", keys);
  pgl_need(L, pgl_raw(L, 1, "args"), "spawn", "args");
  luaL_checktype(L, 2, LUA_TTABLE);
  read_list(L, 2, "spawn.args", args);
  if (!args[0]) return luaL_error(L, "spawn.args: at least a program expected");
  pgl_need(L, pgl_raw(L, 1, "env"), "spawn", "env");
  luaL_checktype(L, 3, LUA_TTABLE);
  read_list(L, 3, "spawn.env", env);
  pgl_need(L, pgl_get_string(L, 1, "spawn", "output", &output), "spawn", "output");
  if (pgl_raw(L, 1, "inherit")) {
    luaL_checktype(L, 4, LUA_TTABLE);
    inherited = read_inherited(L, 4, stdio);
  }

  child *c = lua_newuserdatauv(L, sizeof *c, 0);
  memset(c, 0, sizeof *c);
  luaL_setmetatable(L, PGL_PROCESS);
  int failed = uv_loop_init(&c->loop);
  if (failed) return pgl_fail_errno(L, -failed, "start", args[0]);
  c->looping = true;
  const int in = open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int out = open(output, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  const int error = errno;
  if (in < 0 || out < 0) {
    if (in >= 0) close(in);
    if (out >= 0) close(out);
    return pgl_fail_errno(L, error, "write", output);
  }
  for (int i = 0; i < 3; i++)
    stdio[i] = (uv_stdio_container_t){.flags = UV_INHERIT_FD, .data.fd = i == 0 ? in : out};
  c->process.data = c;
  failed = uv_spawn(&c->loop, &c->process,
                    &(uv_process_options_t){.exit_cb = has_ended,
                                            .file = args[0],
                                            .args = (char **)args,
                                            .env = (char **)env,
                                            .flags = UV_PROCESS_DETACHED,
                                            .stdio_count = 3 + inherited,
                                            .stdio = stdio});
  close(in);
  close(out);
  if (failed) return pgl_fail_errno(L, -failed, "start", args[0]);
  c->spawned = true;
  return 1;
}

/* process:poll() -> nil while it runs, else its exit code, and the number of the signal that ended
 * it (0: none) */
static int child_poll(lua_State *L) {
  child *c = check_child(L);
  if (!c->exited) uv_run(&c->loop, UV_RUN_NOWAIT);
  if (!c->exited) return 0;
  lua_pushinteger(L, c->status);
  lua_pushinteger(L, c->signal);
  return 2;
}

static int child_pid(lua_State *L) {
  lua_pushinteger(L, uv_process_get_pid(&check_child(L)->process));
  return 1;
}

/* process:kill("SIGTERM" | "SIGKILL"): nothing when it has ended. */
static int child_kill(lua_State *L) {
  child *c = check_child(L);
  const char *name = pgl_string(L, 2, "signal");
  const bool term = strcmp(name, "SIGTERM") == 0;
  if (!term && strcmp(name, "SIGKILL") != 0)
    return luaL_error(L, "kill: SIGTERM or SIGKILL expected, got %s", pgl_describe(L, 2));
  if (!c->exited) uv_process_kill(&c->process, term ? SIGTERM : SIGKILL);
  return 0;
}

/* environment() -> list of "NAME=value" */
static int process_environment(lua_State *L) {
  lua_newtable(L);
  for (int i = 0; environ[i]; i++) {
    lua_pushstring(L, environ[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

/* program() -> the file of this process */
static int process_program(lua_State *L) {
  char path[4096];
  size_t size = sizeof path;
  const int failed = uv_exepath(path, &size);
  if (failed) return pgl_fail_errno(L, -failed, "find", "this program");
  lua_pushlstring(L, path, size);
  return 1;
}

/* ---- listeners --------------------------------------------------------------------------- */
typedef struct listener {
  int fd;
  int port;
} listener;

static int listener_close(lua_State *L) {
  listener *l = luaL_checkudata(L, 1, PGL_LISTENER);
  if (l->fd >= 0) close(l->fd);
  l->fd = -1;
  return 0;
}

/* listener() -> a socket that listens at a port of this machine that nobody uses, for a child to
 * take: the port is taken from now on, whoever else looks for one. */
static int process_listener(lua_State *L) {
  listener *l = lua_newuserdatauv(L, sizeof *l, 0);
  struct sockaddr_in6 any = {.sin6_family = AF_INET6};
  struct sockaddr_in any4 = {.sin_family = AF_INET};
  struct sockaddr_storage bound;
  socklen_t size = sizeof bound;
  const int no = 0;
  l->fd = -1;
  luaL_setmetatable(L, PGL_LISTENER);
  l->fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool ready = l->fd >= 0 && setsockopt(l->fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no) == 0 &&
               bind(l->fd, (struct sockaddr *)&any, sizeof any) == 0;
  if (!ready) { /* a machine without IPv6 */
    if (l->fd >= 0) close(l->fd);
    l->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ready = l->fd >= 0 && bind(l->fd, (struct sockaddr *)&any4, sizeof any4) == 0;
  }
  if (!ready || listen(l->fd, 128) != 0 ||
      getsockname(l->fd, (struct sockaddr *)&bound, &size) != 0)
    return pgl_fail_errno(L, errno, "listen at", "a free port");
  l->port = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                              : ((struct sockaddr_in *)&bound)->sin_port);
  return 1;
}

static int listener_port(lua_State *L) {
  lua_pushinteger(L, ((listener *)luaL_checkudata(L, 1, PGL_LISTENER))->port);
  return 1;
}

static int listener_descriptor(lua_State *L) {
  const listener *l = luaL_checkudata(L, 1, PGL_LISTENER);
  if (l->fd < 0) return luaL_error(L, "this listener is closed");
  lua_pushinteger(L, l->fd);
  return 1;
}

static const luaL_Reg functions[] = {{"spawn", process_spawn},
                                     {"environment", process_environment},
                                     {"program", process_program},
                                     {"listener", process_listener},
                                     {NULL, NULL}};
static const luaL_Reg methods[] = {
    {"poll", child_poll},  {"pid", child_pid},       {"kill", child_kill}, {"close", child_close},
    {"__gc", child_close}, {"__close", child_close}, {NULL, NULL}};
static const luaL_Reg listener_methods[] = {
    {"port", listener_port},  {"descriptor", listener_descriptor}, {"close", listener_close},
    {"__gc", listener_close}, {"__close", listener_close},         {NULL, NULL}};

static void define(lua_State *L, const char *type, const luaL_Reg *list) {
  luaL_newmetatable(L, type);
  luaL_setfuncs(L, list, 0);
  lua_pushvalue(L, -1);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}

void pgl_open_process(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
  define(L, PGL_PROCESS, methods);
  define(L, PGL_LISTENER, listener_methods);
}
