/* core.guard: a call that can be cut off, by a signal, a time limit or the client of a socket that
 * goes away. Lua code is stopped by a count hook, which coroutines made meanwhile inherit (one
 * that was made before is not stopped); a long operation of the core by the cancel flag of every
 * context. Time and client are watched by a thread of their own, so that the process needs no timer
 * signal. What polls neither (a program that was started, one string function) goes on until it
 * returns.
 *
 * core.uninterrupted keeps a change whole: what cuts off waits until its end. */
#include "bind.h"
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CUT_NONE, CUT_SIGNAL, CUT_TIME, CUT_CLIENT };
static const char *const reasons[] = {NULL, "interrupted", "time limit", "client gone"};

/* Lua instructions between two looks at the flags: some 20 us. */
#define COUNT 4096
#define SLOTS 64

/* Contexts alive, in blocks that stay for as long as the process. The lock keeps a context from
 * being freed while the watching thread cancels it; the signal handler reads without it, and runs
 * while no slot is being freed by its own thread. */
typedef struct block {
  _Atomic(pg_context *) contexts[SLOTS];
  _Atomic(struct block *) next;
} block;
static block first;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The call in progress; one at a time in a process. */
static struct {
  atomic_bool active;
  atomic_int cut, masked;
  double deadline; /* CLOCK_MONOTONIC seconds, or infinity */
  int client, wake;
  pthread_t thread;
} call = {.client = -1, .wake = -1};

static double monotonic(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Put `to` in the place of `from`; false when `from` is nowhere. */
static bool replace(block *b, pg_context *from, pg_context *to) {
  for (; b; b = atomic_load(&b->next))
    for (size_t i = 0; i < SLOTS; i++) {
      pg_context *expected = from;
      if (atomic_compare_exchange_strong(&b->contexts[i], &expected, to)) return true;
    }
  return false;
}

bool pgl_guard_know(pg_context *ctx) {
  if (replace(&first, NULL, ctx)) return true;
  block *more = calloc(1, sizeof *more), *last = &first, *none = NULL;
  if (!more) return false;
  atomic_store(&more->contexts[0], ctx);
  while (!atomic_compare_exchange_strong(&last->next, &none, more)) {
    last = none;
    none = NULL;
  }
  return true;
}

void pgl_guard_forget(pg_context *ctx) {
  pthread_mutex_lock(&lock);
  replace(&first, ctx, NULL);
  pthread_mutex_unlock(&lock);
}

static void for_contexts(void (*act)(pg_context *ctx)) {
  for (block *b = &first; b; b = atomic_load(&b->next))
    for (size_t i = 0; i < SLOTS; i++) {
      pg_context *ctx = atomic_load(&b->contexts[i]);
      if (ctx) act(ctx);
    }
}

void pgl_guard_signal(void) {
  if (atomic_load(&call.active) && !atomic_load(&call.masked)) for_contexts(pg_context_cancel);
}

static int cut_now(void) {
  int cut = atomic_load(&call.cut);
  if (!cut && pgl_signals_pending()) cut = CUT_SIGNAL;
  return cut;
}

int pgl_guard_cut(void) {
  return atomic_load(&call.active) ? cut_now() : CUT_NONE;
}

void pgl_guard_check(lua_State *L) {
  const int cut = pgl_guard_cut();
  if (cut) luaL_error(L, "%s", reasons[cut]);
}

/* ---- the watching thread ------------------------------------------------------------------- */
static void cut_off(int reason) {
  pthread_mutex_lock(&lock);
  atomic_store(&call.cut, reason);
  if (!atomic_load(&call.masked)) for_contexts(pg_context_cancel);
  pthread_mutex_unlock(&lock);
}

/* What the client's socket says: it is gone, or it sent the byte 3 (as the key ^C does). */
static int client_wish(struct pollfd *client) {
  char byte = 0;
  ssize_t got = recv(client->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (got == 0 || client->revents & (POLLRDHUP | POLLHUP | POLLERR)) return CUT_CLIENT;
  if (got == 1 && byte == 3) {
    (void)!recv(client->fd, &byte, 1, MSG_DONTWAIT);
    return CUT_SIGNAL;
  }
  client->events = POLLRDHUP; /* something for after the call */
  return CUT_NONE;
}

static void *watch(void *unused) {
  struct pollfd fds[2] = {{.fd = call.wake, .events = POLLIN},
                          {.fd = call.client, .events = POLLIN | POLLRDHUP}};
  (void)unused;
  for (;;) {
    const double left = call.deadline - monotonic();
    const int timeout = isinf(left) ? -1 : left <= 0 ? 0 : (int)fmin(ceil(left * 1e3), 1e6);
    const int ready = poll(fds, call.client < 0 ? 1 : 2, timeout);
    if (ready > 0 && fds[0].revents) return NULL;
    int reason = ready > 0 && fds[1].revents ? client_wish(&fds[1]) : CUT_NONE;
    if (!reason && monotonic() >= call.deadline) reason = CUT_TIME;
    if (!reason) continue;
    cut_off(reason);
    return NULL;
  }
}

static int start_watching(void) {
  sigset_t all, before;
  if ((call.wake = eventfd(0, EFD_CLOEXEC)) < 0) return errno;
  sigfillset(&all); /* signals belong to the other threads */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(&call.thread, NULL, watch, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!error) return 0;
  close(call.wake);
  call.wake = -1;
  return error;
}

static void stop_watching(void) {
  const uint64_t one = 1;
  if (call.wake < 0) return;
  (void)!write(call.wake, &one, sizeof one);
  pthread_join(call.thread, NULL);
  close(call.wake);
  call.wake = -1;
}

/* ---- the call --------------------------------------------------------------------------------
 */
static void look(lua_State *L, lua_Debug *ar) {
  (void)ar;
  if (!atomic_load(&call.active)) { /* in a coroutine that outlived its call */
    lua_sethook(L, NULL, 0, 0);
    return;
  }
  const int cut = pgl_guard_cut();
  if (!cut || atomic_load(&call.masked)) {
    if (lua_gethookcount(L) != COUNT) lua_sethook(L, look, LUA_MASKCOUNT, COUNT);
    return;
  }
  /* At the next instruction again: a pcall around this one does not escape. */
  lua_sethook(L, look, LUA_MASKCOUNT, 1);
  lua_pushstring(L, reasons[cut]);
  lua_error(L);
}

/* The error and the stack below it, as { error, traceback }. */
static int describe(lua_State *L) {
  lua_settop(L, 1);
  lua_createtable(L, 2, 0);
  lua_insert(L, 1);
  lua_rawseti(L, 1, 1);
  luaL_traceback(L, L, NULL, 1);
  lua_rawseti(L, 1, 2);
  return 1;
}

/* core.guard({ seconds, socket }, f, …) -> true, results… | false, error, traceback, reason; the
 * reason is nil unless the call was cut off: "interrupted", "time limit", "client gone". Within
 * another guarded call it only protects. */
static int guard(lua_State *L) {
  static const char *const keys[] = {"seconds", "socket", NULL};
  double seconds = HUGE_VAL;
  int client = -1;
  pgl_table(L, 1, "guard", keys);
  pgl_get_number(L, 1, "guard", "seconds", &seconds);
  if (!(seconds > 0)) return luaL_error(L, "guard.seconds: a number above 0 expected");
  if (pgl_raw(L, 1, "socket")) {
    client = pgl_socket_descriptor(L, -1);
    lua_pop(L, 1);
  }
  luaL_checktype(L, 2, LUA_TFUNCTION);

  const bool outer = !atomic_load(&call.active);
  lua_Hook hook = lua_gethook(L);
  const int mask = lua_gethookmask(L), count = lua_gethookcount(L);
  if (outer) {
    call.deadline = monotonic() + seconds;
    call.client = client;
    atomic_store(&call.cut, CUT_NONE);
    if (isfinite(seconds) || client >= 0) {
      int error = start_watching();
      if (error) return pgl_fail_errno(L, error, "watch", "a call");
    }
    atomic_store(&call.active, true);
    lua_sethook(L, look, LUA_MASKCOUNT, COUNT);
  }
  lua_pushcfunction(L, describe);
  lua_replace(L, 1);
  int status = lua_pcall(L, lua_gettop(L) - 2, LUA_MULTRET, 1);
  int cut = CUT_NONE;
  if (outer) {
    stop_watching();
    /* A signal cancels nothing from here on; what one has cancelled before goes on. */
    atomic_store(&call.active, false);
    cut = cut_now();
    lua_sethook(L, hook, mask, count);
    for_contexts(pg_context_resume);
  }
  if (status == LUA_OK) {
    lua_pushboolean(L, true);
    lua_replace(L, 1);
    return lua_gettop(L);
  }
  lua_pushboolean(L, false);
  if (lua_istable(L, -2)) { /* else the error is that of the handler itself */
    lua_rawgeti(L, -2, 1);
    lua_rawgeti(L, -3, 2);
  } else {
    lua_pushvalue(L, -2);
    lua_pushliteral(L, "");
  }
  lua_pushstring(L, reasons[cut]);
  return 4;
}

static void unmask(void) {
  pthread_mutex_lock(&lock);
  if (atomic_fetch_sub(&call.masked, 1) == 1 && pgl_guard_cut()) for_contexts(pg_context_cancel);
  pthread_mutex_unlock(&lock);
}

/* core.uninterrupted(f, …): f's results; cut off before it begins or not at all. */
static int uninterrupted(lua_State *L) {
  luaL_checktype(L, 1, LUA_TFUNCTION);
  pthread_mutex_lock(&lock);
  const int cut = atomic_load(&call.masked) ? CUT_NONE : pgl_guard_cut();
  if (!cut) atomic_fetch_add(&call.masked, 1);
  pthread_mutex_unlock(&lock);
  if (cut) {
    lua_pushstring(L, reasons[cut]);
    return lua_error(L);
  }
  int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
  unmask();
  return status == LUA_OK ? lua_gettop(L) : lua_error(L);
}

static const luaL_Reg functions[] = {
    {"guard", guard}, {"uninterrupted", uninterrupted}, {NULL, NULL}};

void pgl_open_guard(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
}
