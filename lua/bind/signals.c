/* SIGINT, SIGTERM and SIGHUP as flags. A handler counts, remembers the first signal, and may cancel
 * one context's long operation; everything else is the program's to decide at its next safe point.
 * A second signal only raises the count: it must not kill a run that is saving. */
#include "bind.h"
#include <errno.h>
#include <signal.h>

static volatile sig_atomic_t pending, count;
static pg_context *volatile target; /* also cancelled by a signal; or NULL */
static bool installed;
static struct sigaction previous[3];
static const int numbers[3] = {SIGINT, SIGTERM, SIGHUP};

static void handle(int number) {
  pg_context *ctx = target;
  if (!pending) pending = number;
  count++;
  if (ctx) pg_context_cancel(ctx);
  pgl_guard_signal();
}

bool pgl_signals_pending(void) {
  return pending != 0;
}

/* install(): without SA_RESTART, so that a read from the terminal returns. Data is read by the
 * core, which retries. */
static int signals_install(lua_State *L) {
  struct sigaction action = {.sa_handler = handle};
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < 3 && !installed; i++)
    if (sigaction(numbers[i], &action, &previous[i]) != 0)
      return pgl_fail_errno(L, errno, "install", "signal handlers");
  installed = true;
  return 0;
}

/* uninstall(): back to what was before install. */
static int signals_uninstall(lua_State *L) {
  (void)L;
  for (int i = 0; i < 3 && installed; i++) sigaction(numbers[i], &previous[i], NULL);
  installed = false;
  return 0;
}

static int signals_pending(lua_State *L) {
  if (!pending)
    lua_pushnil(L);
  else
    lua_pushstring(L, pending == SIGINT ? "SIGINT" : pending == SIGHUP ? "SIGHUP" : "SIGTERM");
  return 1;
}

static int signals_count(lua_State *L) {
  lua_pushinteger(L, count);
  return 1;
}

/* clear(): forget what arrived. The cancel flag of a context is cleared by ctx:resume(). */
static int signals_clear(lua_State *L) {
  (void)L;
  pending = 0;
  count = 0;
  return 0;
}

/* cancel_on(ctx, bool). A signal that is pending already cancels at once. */
static int signals_cancel_on(lua_State *L) {
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  const bool on = pgl_boolean(L, 2, "on");
  if (on) {
    target = ctx;
    if (pending) pg_context_cancel(ctx);
  } else if (target == ctx) {
    target = NULL;
  }
  return 0;
}

void pgl_signals_forget(pg_context *ctx) {
  if (target == ctx) target = NULL;
}

static const luaL_Reg functions[] = {{"install", signals_install},
                                     {"uninstall", signals_uninstall},
                                     {"pending", signals_pending},
                                     {"count", signals_count},
                                     {"clear", signals_clear},
                                     {"cancel_on", signals_cancel_on},
                                     {NULL, NULL}};

void pgl_open_signals(lua_State *L) {
  luaL_newlib(L, functions);
  lua_setfield(L, -2, "signals");
}
