/* The ranks of a run: how the launcher numbered this process, and a communicator. */
#include "bind.h"
#include <stdlib.h>
#include <string.h>

/* The open communicator, for the handler that runs when a script ends the process. */
static pg_comm *present;
static bool left; /* all ranks have agreed that they are done */

static void at_exit(void) {
  if (!present || left) return;
  pg_comm *comm = present;
  present = NULL;
  pg_comm_fail(comm, "the process ended before the run did");
  pg_comm_close(comm);
}

static void release_comm(pgl_object *o) {
  pg_comm *comm = o->resource;
  if (comm == present) {
    present = NULL;
    if (!left) pg_comm_fail(comm, "the run was left before its end");
  }
  pg_comm_close(comm);
}

const pgl_kind pgl_comm_kind = {"perigee.comm", "communicator", 0, release_comm};

/* core.launch() -> { by, rank, world, local_rank, local_size, master, port } */
static int launch(lua_State *L) {
  pg_launcher l;
  char message[512] = "";
  int status = pg_launcher_read(&l, message, sizeof message);
  if (status < 0) {
    lua_pushnil(L);
    lua_pushfstring(L, "%s: %s", pg_error_name(status), message);
    lua_pushstring(L, pg_error_name(status));
    return 3;
  }
  lua_createtable(L, 0, 8);
  pgl_set_string(L, "by", l.by);
  pgl_set_integer(L, "rank", l.rank);
  pgl_set_integer(L, "world", l.world);
  pgl_set_integer(L, "local_rank", l.local_rank);
  pgl_set_integer(L, "local_size", l.local_size);
  pgl_set_string(L, "master", l.master);
  pgl_set_integer(L, "port", l.port);
  return 1;
}

/* core.launch_threads(cpus): this rank's share of the CPUs */
static int launch_threads(lua_State *L) {
  pg_launcher l;
  int cpus = (int)pgl_integer(L, 1, "cpus", 1, 1 << 20);
  char message[512];
  if (pg_launcher_read(&l, message, sizeof message) == 0) cpus = pg_launcher_threads(&l, cpus);
  lua_pushinteger(L, cpus);
  return 1;
}

/* core.comm(ctx, { timeout, device_index }) */
static int comm_new(lua_State *L) {
  static const char *const keys[] = {"timeout", "device_index", NULL};
  pgl_object *context = pgl_check(L, 1, &pgl_context_kind);
  char message[1024] = "";
  static bool registered;
  int64_t index = 0;
  pg_launcher l;
  pg_comm *comm = NULL;
  pg_comm_options options = {.launch = &l, .device = pg_context_device(context->resource)};
  lua_settop(L, 2);
  pgl_table(L, 2, "comm", keys);
  pgl_get_number(L, 2, "comm", "timeout", &options.timeout);
  pgl_get_integer(L, 2, "comm", "device_index", 0, 1 << 20, &index);
  options.device_index = (int)index;
  pgl_object *o = pgl_new(L, &pgl_comm_kind, context);
  int status = pg_launcher_read(&l, message, sizeof message);
  if (status == 0) status = pg_comm_open(&options, &comm, message, sizeof message);
  if (status < 0) {
    lua_pushnil(L);
    lua_pushfstring(L, "%s: %s", pg_error_name(status), message);
    lua_pushstring(L, pg_error_name(status));
    return 3;
  }
  o->resource = comm;
  if (comm != pg_comm_self()) {
    present = comm;
    left = false;
    if (!registered) atexit(at_exit);
    registered = true;
  }
  return 1;
}

/* core.excuse(text): what made this rank fail before it had a communicator, to those that wait for
 * it; takes at most 10 s */
static int excuse(lua_State *L) {
  pg_launcher l;
  char message[512];
  pg_comm_options options = {.launch = &l, .device = "cuda"};
  const char *text = pgl_string(L, 1, "text");
  if (pg_launcher_read(&l, message, sizeof message) == 0) pg_comm_excuse(&options, text);
  return 0;
}

static pg_comm *check_comm(lua_State *L, pg_context **ctx) {
  pgl_object *o = pgl_check(L, 1, &pgl_comm_kind);
  *ctx = pgl_context(o);
  return o->resource;
}

static int comm_rank(lua_State *L) {
  pg_context *ctx;
  lua_pushinteger(L, pg_comm_rank(check_comm(L, &ctx)));
  return 1;
}

static int comm_world(lua_State *L) {
  pg_context *ctx;
  lua_pushinteger(L, pg_comm_world(check_comm(L, &ctx)));
  return 1;
}

static int comm_name(lua_State *L) {
  pg_context *ctx;
  lua_pushstring(L, pg_comm_name(check_comm(L, &ctx)));
  return 1;
}

/* comm:meet(what [, numbers]) -> the largest of every position over all ranks, when all are at
 * the call that `what` names */
static int comm_meet(lua_State *L) {
  pg_context *ctx;
  pg_comm *comm = check_comm(L, &ctx);
  const char *what = pgl_string(L, 2, "what");
  double values[PG_COMM_VALUES];
  lua_settop(L, 3);
  if (!lua_isnil(L, 3)) luaL_checktype(L, 3, LUA_TTABLE);
  const size_t count = lua_isnil(L, 3) ? 0 : (size_t)lua_rawlen(L, 3);
  if (count > PG_COMM_VALUES)
    return luaL_error(L, "meet: at most %d numbers, got %I", PG_COMM_VALUES, (LUAI_UACINT)count);
  for (size_t i = 0; i < count; i++) {
    lua_rawgeti(L, 3, (lua_Integer)i + 1);
    values[i] = luaL_checknumber(L, -1);
    lua_pop(L, 1);
  }
  int status = pg_comm_meet(comm, ctx, what, values, (int)count);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_createtable(L, (int)count, 0);
  for (size_t i = 0; i < count; i++) {
    lua_pushnumber(L, values[i]);
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  return 1;
}

/* comm:gather(text) -> the texts of all ranks, rank 0's first */
static int comm_gather(lua_State *L) {
  pg_context *ctx;
  pg_comm *comm = check_comm(L, &ctx);
  size_t size;
  const char *text = pgl_bytes(L, 2, "text", &size);
  const int world = pg_comm_world(comm), rank = pg_comm_rank(comm);
  double *sizes = lua_newuserdatauv(L, sizeof *sizes * (size_t)world, 0);
  int status;
  for (int r = 0; r < world; r++) sizes[r] = r == rank ? (double)size : 0;
  PG_TRY(pg_comm_meet(comm, ctx, "an exchange of texts", NULL, 0));
  PG_TRY(pg_comm_sum_f64(comm, ctx, sizes, world));
  lua_createtable(L, world, 0);
  for (int r = 0; r < world; r++) {
    const size_t length = (size_t)sizes[r];
    char *copy = lua_newuserdatauv(L, length + 1, 0);
    if (r == rank) memcpy(copy, text, size);
    PG_TRY(pg_comm_broadcast_host(comm, ctx, copy, (int64_t)length, r));
    lua_pushlstring(L, copy, length);
    lua_rawseti(L, -3, r + 1);
    lua_pop(L, 1);
  }
  return 1;
fail:
  return pgl_fail(L, ctx, status);
}

/* comm:leave(): all ranks are done; from here on the process may end. */
static int comm_leave(lua_State *L) {
  pg_context *ctx;
  pg_comm *comm = check_comm(L, &ctx);
  int status = pg_comm_meet(comm, ctx, "the end of the run", NULL, 0);
  if (status < 0) return pgl_fail(L, ctx, status);
  if (comm == present) left = true;
  lua_pushboolean(L, true);
  return 1;
}

/* comm:failure() -> why the ranks cannot go on together; nil while they can */
static int comm_failure(lua_State *L) {
  pg_context *ctx;
  const char *text = pg_comm_failure(check_comm(L, &ctx), NULL);
  lua_pushstring(L, *text ? text : NULL);
  return 1;
}

/* comm:fail(text): tell the other ranks that this one cannot go on; not after comm:leave() */
static int comm_fail(lua_State *L) {
  pg_context *ctx;
  pg_comm *comm = check_comm(L, &ctx);
  const char *text = pgl_string(L, 2, "text");
  if (!left || comm != present) pg_comm_fail(comm, text);
  return 0;
}

static const luaL_Reg methods[] = {
    {"rank", comm_rank},       {"world", comm_world},   {"name", comm_name},
    {"meet", comm_meet},       {"gather", comm_gather}, {"leave", comm_leave},
    {"failure", comm_failure}, {"fail", comm_fail},     {NULL, NULL}};
static const luaL_Reg functions[] = {{"launch", launch},
                                     {"launch_threads", launch_threads},
                                     {"comm", comm_new},
                                     {"excuse", excuse},
                                     {NULL, NULL}};

void pgl_open_comm(lua_State *L) {
  pgl_define(L, &pgl_comm_kind, methods);
  luaL_setfuncs(L, functions, 0);
}
