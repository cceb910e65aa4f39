/* Runs a script that uses every part of the module in Lua states whose memory runs out at the
 * 1st, 4th, 7th … allocation: each error must leave no C resource behind (a sanitizer build
 * reports leaks) and never crash.
 *
 * host_lua_memory BUILD SCRIPT FOLDER [STEP] */
#include <lauxlib.h>
#include <lualib.h>
#include <stdio.h>
#include <stdlib.h>

static long allocations, limit; /* of this state; limit 0: none */

static void *allocate(void *self, void *block, size_t old, size_t size) {
  (void)self;
  if (size == 0) {
    free(block);
    return NULL;
  }
  if ((!block || size > old) && ++allocations > limit && limit > 0) return NULL;
  return realloc(block, size);
}

static int run(lua_State *L) {
  char **argv = lua_touserdata(L, 1);
  luaL_openlibs(L);
  lua_getglobal(L, "package");
  lua_pushfstring(L, "%s/lib/?.so", argv[1]);
  lua_setfield(L, -2, "cpath");
  if (luaL_loadfile(L, argv[2]) != LUA_OK) return lua_error(L);
  lua_pushstring(L, argv[3]);
  lua_call(L, 1, 0);
  return 0;
}

/* Status of one run whose memory ends after `most` allocations. */
static int attempt(char **argv, long most, int report) {
  lua_State *L;
  limit = 0;
  if (!(L = lua_newstate(allocate, NULL))) return LUA_ERRMEM;
  allocations = 0;
  limit = most;
  lua_pushcfunction(L, run);
  lua_pushlightuserdata(L, argv);
  int status = lua_pcall(L, 1, 0, 0);
  if (status != LUA_OK && report) fprintf(stderr, "%s\n", lua_tostring(L, -1));
  limit = 0;
  lua_close(L);
  return status;
}

int main(int argc, char **argv) {
  if (argc < 4) return 2;
  const long step = argc > 4 ? atol(argv[4]) : 3;
  if (attempt(argv, 0, 1) != LUA_OK) return 1;
  const long needed = allocations;
  long failed = 0, tried = 0;
  for (long most = 1; most < needed; most += step, tried++) failed += attempt(argv, most, 0) != 0;
  printf("%ld allocations, %ld states, %ld failed\n", needed, tried, failed);
  return failed < tried / 2; /* emergency collections save the last few */
}
