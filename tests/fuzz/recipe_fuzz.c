/* Fuzzes recipes: the input chooses a Lua table (recipe_fuzz.lua reads it as keys and values),
 * which pg.recipe must accept or refuse with a message, never with a crash or an error inside
 * Perigee. */
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int luaopen_perigee_core(lua_State *L);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static lua_State *open_state(void) {
  lua_State *L = luaL_newstate();
  if (!L) abort();
  luaL_openlibs(L);
  luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
  lua_pushcfunction(L, luaopen_perigee_core);
  lua_setfield(L, -2, "perigee.core");
  lua_pop(L, 1);
  lua_pushliteral(L, PG_SOURCE_DIR "/lua/?.lua;" PG_SOURCE_DIR "/lua/?/init.lua");
  lua_getglobal(L, "package");
  lua_insert(L, -2);
  lua_setfield(L, -2, "path");
  lua_pop(L, 1);
  if (luaL_dofile(L, PG_SOURCE_DIR "/tests/fuzz/recipe_fuzz.lua")) {
    fprintf(stderr, "%s\n", lua_tostring(L, -1));
    abort();
  }
  return L; /* the function of the bytes on its stack */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static lua_State *L;
  if (!L) L = open_state();
  lua_pushvalue(L, 1);
  lua_pushlstring(L, (const char *)data, size);
  if (lua_pcall(L, 1, 0, 0)) {
    fprintf(stderr, "%s\n", luaL_tolstring(L, -1, NULL));
    abort();
  }
  return 0;
}
