/* The perigee program: Lua with perigee.core built in, which runs require("perigee.main") on the
 * command line. The Lua files are in EXEDIR/lua (build tree) or EXEDIR/../share/lua/5.4
 * (installed). */
#include "../core/version.h"
#include <fcntl.h>
#include <lauxlib.h>
#include <limits.h>
#include <lua.h>
#include <lualib.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

int luaopen_perigee_core(lua_State *L);

/* Exit codes of the program that this file itself uses. */
enum { EXIT_DONE = 0, EXIT_ERROR = 1 };

/* Folder of the running program into `folder`; false when /proc does not tell. */
static int own_folder(char folder[PATH_MAX]) {
  ssize_t size = readlink("/proc/self/exe", folder, PATH_MAX - 1);
  if (size <= 0) return 0;
  folder[size] = '\0';
  char *slash = strrchr(folder, '/');
  if (slash) *slash = '\0';
  return slash != NULL;
}

/* Push the folder that holds perigee/main.lua, or nil. */
static void push_lua_folder(lua_State *L) {
  static const char *const places[] = {"lua", "../share/lua/5.4"};
  char folder[PATH_MAX];
  for (size_t i = 0; own_folder(folder) && i < sizeof places / sizeof *places; i++) {
    const char *base = lua_pushfstring(L, "%s/%s", folder, places[i]);
    const char *file = lua_pushfstring(L, "%s/perigee/main.lua", base);
    const int found = access(file, R_OK) == 0;
    lua_pop(L, 1);
    if (found) return;
    lua_pop(L, 1);
  }
  lua_pushnil(L);
}

/* Put FOLDER/?.lua and FOLDER/?/init.lua before everything in package.path, and the built-in
 * module into package.preload. */
static void set_paths(lua_State *L) {
  lua_getglobal(L, "package");
  push_lua_folder(L);
  if (!lua_isnil(L, -1)) {
    const char *folder = lua_tostring(L, -1);
    lua_getfield(L, -2, "path");
    lua_pushfstring(L, "%s/?.lua;%s/?/init.lua;%s", folder, folder, lua_tostring(L, -1));
    lua_setfield(L, -4, "path");
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
  lua_getfield(L, -1, "preload");
  lua_pushcfunction(L, luaopen_perigee_core);
  lua_setfield(L, -2, "perigee.core");
  lua_pop(L, 2);
}

static int run(lua_State *L) {
  const int argc = (int)lua_tointeger(L, 1);
  char **argv = lua_touserdata(L, 2);
  luaL_checkversion(L);
  luaL_openlibs(L);
  set_paths(L);
  lua_createtable(L, argc, 1);
  for (int i = 0; i < argc; i++) {
    lua_pushstring(L, argv[i]);
    lua_rawseti(L, -2, i);
  }
  lua_pushvalue(L, -1);
  lua_setglobal(L, "arg");
  lua_getglobal(L, "require");
  lua_pushstring(L, "perigee.main");
  lua_call(L, 1, 1);
  lua_insert(L, -2);
  lua_call(L, 1, 1);
  if (!lua_isinteger(L, -1))
    return luaL_error(L, "perigee.main returned a %s, an integer is expected",
                      luaL_typename(L, -1));
  return 1;
}

static int to_text(lua_State *L) {
  luaL_tolstring(L, 1, NULL);
  return 1;
}

/* Turn any error object into a line of text; its own __tostring may fail too. */
static int describe_error(lua_State *L) {
  lua_pushcfunction(L, to_text);
  lua_pushvalue(L, 1);
  if (lua_pcall(L, 1, 1, 0) != LUA_OK)
    lua_pushfstring(L, "(an error object of type %s that cannot be shown)", luaL_typename(L, 1));
  const char *trace = getenv("PERIGEE_TRACE");
  if (trace && strcmp(trace, "1") == 0) luaL_traceback(L, L, lua_tostring(L, -1), 1);
  return 1;
}

/* Standard descriptors that the caller closed: else the first files opened would take their
 * places, and libraries would write messages into them. */
static void fill_descriptors(void) {
  int fd;
  do fd = open("/dev/null", O_RDWR);
  while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd >= 0) close(fd);
}

/* Threads of libgomp spin for milliseconds at the end of every parallel loop, which costs the
 * machine's other processes, and the thread that is waited for, their cores: beside six busy
 * processes on two cores a small model trains ten times slower. Sleeping at once costs an idle
 * machine 15 %; 1000 rounds cost neither. libgomp reads the number when it is loaded, so the
 * program starts once more, unless the user has chosen. */
static void spin_briefly(char **argv) {
  if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
  if (setenv("GOMP_SPINCOUNT", "1000", 1) == 0) execv("/proc/self/exe", argv);
}

/* A run of a sweep ends with a checkpoint when the sweep is killed (PERIGEE_PARENT is its process):
 * nobody else would know of it. */
static void follow_parent(void) {
  const char *parent = getenv("PERIGEE_PARENT");
  if (!parent) return;
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != (pid_t)atoll(parent)) raise(SIGTERM); /* it was faster */
  unsetenv("PERIGEE_PARENT");                            /* of this process alone */
}

int main(int argc, char **argv) {
  if (argc == 2 && strcmp(argv[1], "--version") == 0) {
    puts("perigee " PG_VERSION);
    return fflush(stdout) == 0 ? EXIT_DONE : EXIT_ERROR;
  }
  spin_briefly(argv);
  follow_parent();
  /* A reader of our output that goes away must not end a training run; writes fail instead. */
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN); /* a file size limit is an error of the write, as a full disk is */
  fill_descriptors();
  lua_State *L = luaL_newstate();
  if (!L) {
    fputs("perigee: out of memory\n", stderr);
    return EXIT_ERROR;
  }
  lua_pushcfunction(L, describe_error);
  lua_pushcfunction(L, run);
  lua_pushinteger(L, argc);
  lua_pushlightuserdata(L, argv);
  int code = EXIT_ERROR;
  if (lua_pcall(L, 2, 1, 1) == LUA_OK) {
    code = (int)lua_tointeger(L, -1);
  } else {
    const char *text = lua_tostring(L, -1);
    fflush(stdout);
    fprintf(stderr, "perigee: %s\n", text ? text : "an error without a text");
  }
  lua_close(L);
  /* What was to be kept must have been written: a full disk is an error of the command. A reader
   * at the end of a pipe that went away is not. */
  struct stat out;
  bool kept = fstat(STDOUT_FILENO, &out) == 0 && !S_ISFIFO(out.st_mode) && !S_ISSOCK(out.st_mode);
  if ((fflush(stdout) != 0 || ferror(stdout)) && kept && code == EXIT_DONE) {
    fputs("perigee: standard output cannot be written\n", stderr);
    code = EXIT_ERROR;
  }
  return code;
}
