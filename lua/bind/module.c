/* perigee.core: the Lua module. One function per area adds its part. */
#include "bind.h"

int luaopen_perigee_core(lua_State *L) {
  static void (*const areas[])(lua_State * L) = {
      pgl_open_context,  pgl_open_comm,        pgl_open_tensor,     pgl_open_model,
      pgl_open_run,      pgl_open_optimizer,   pgl_open_data,       pgl_open_tokenizer,
      pgl_open_geometry, pgl_open_rows,        pgl_open_functional, pgl_open_bottleneck,
      pgl_open_json,     pgl_open_metrics,     pgl_open_events,     pgl_open_files,
      pgl_open_signals,  pgl_open_system,      pgl_open_guard,      pgl_open_socket,
      pgl_open_line,     pgl_open_trial,       pgl_open_bench,      pgl_open_estimate,
      pgl_open_oracle,   pgl_open_first_order, pgl_open_logits,     pgl_open_process};
  luaL_checkversion(L);
  lua_newtable(L);
  pgl_set_string(L, "version", PG_VERSION);
  for (size_t i = 0; i < PG_COUNT(areas); i++) areas[i](L);
  return 1;
}
