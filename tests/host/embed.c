/* A C host with its own lua_State: the Lua module is loaded with require, as any other.
 * Usage: host_embed SCRIPT.lua [ARGUMENT…]; LUA_PATH and LUA_CPATH say where the module is. */
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <stdio.h>

int main(int argc, char **argv) {
  if (argc < 2) return fprintf(stderr, "usage: %s SCRIPT.lua [ARGUMENT...]\n", argv[0]), 2;
  lua_State *L = luaL_newstate();
  if (!L) return fprintf(stderr, "out of memory\n"), 1;
  luaL_openlibs(L);
  lua_createtable(L, argc, 0);
  for (int i = 1; i < argc; i++) {
    lua_pushstring(L, argv[i]);
    lua_rawseti(L, -2, i - 1);
  }
  lua_setglobal(L, "arg");
  int failed = luaL_dofile(L, argv[1]);
  if (failed) fprintf(stderr, "%s\n", luaL_tolstring(L, -1, NULL));
  lua_close(L);
  return failed;
}
