/* Methods of a context that record where time goes (core/profile.h). */
#include "bind.h"

/* ctx:profile_start(): record operations from here on */
int pgl_profile_start(lua_State *L) {
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  int status = pg_profile_start(ctx);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_pushboolean(L, true);
  return 1;
}

static void push_row(lua_State *L, const pg_profile_row *row) {
  lua_createtable(L, 0, 7);
  pgl_set_string(L, "operation", row->operation);
  pgl_set_string(L, "caller", row->caller);
  pgl_set_string(L, "part", pg_part_name(row->part));
  pgl_set_integer(L, "calls", row->calls);
  pgl_set_number(L, "seconds", row->seconds);
  pgl_set_number(L, "bytes", row->bytes);
  pgl_set_number(L, "flops", row->flops);
}

static void release(void *profile) {
  pg_profile_free(profile);
}

/* ctx:profile_stop([path]) -> { seconds, parts = { head = seconds, ... }, operations = { {
 * operation, caller, part, calls, seconds, bytes, flops }, ... } }, longest first; a trace goes to
 * `path`
 */
int pgl_profile_stop(lua_State *L) {
  const char *path = lua_isnoneornil(L, 2) ? NULL : pgl_string(L, 2, "path");
  void **box = pgl_own(L, release);
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  pg_profile *profile = NULL;
  size_t count;
  int status = pg_profile_stop(ctx, &profile);
  *box = profile;
  if (status == 0 && path) status = pg_profile_write(ctx, profile, path);
  if (status < 0) return pgl_fail(L, ctx, status);

  const pg_profile_row *rows = pg_profile_rows(profile, &count);
  lua_createtable(L, 0, 3);
  pgl_set_number(L, "seconds", pg_profile_seconds(profile));
  lua_createtable(L, 0, PG_PARTS);
  for (int part = 0; part < PG_PARTS; part++)
    pgl_set_number(L, pg_part_name((pg_part)part), pg_profile_part_seconds(profile, (pg_part)part));
  lua_setfield(L, -2, "parts");
  lua_createtable(L, (int)count, 0);
  for (size_t i = 0; i < count; i++) {
    push_row(L, &rows[i]);
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  lua_setfield(L, -2, "operations");
  pgl_disown(box);
  return 1;
}
