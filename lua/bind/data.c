/* Shards, schedules, and preparing a dataset. */
#include "bind.h"
#include <limits.h>
#include <string.h>

static void release_shards(void *shards) {
  pg_shards_free(shards);
}

/* Open the shards that arguments 2 (folder) and 3 (pattern) name, into a box pushed here. */
static int open_shards(lua_State *L, pg_shards **out, void ***box) {
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  const char *folder = pgl_string(L, 2, "folder"), *pattern = pgl_string(L, 3, "pattern");
  *box = pgl_own(L, release_shards);
  int status = pg_shards_open(pgl_check(L, 1, &pgl_context_kind)->resource, folder, pattern, out);
  if (status < 0) return pgl_fail(L, ctx, status);
  **box = *out;
  return 0;
}

/* core.shards(ctx, folder, pattern) -> { {name, bytes, tokens}..., tokens = total } */
static int data_shards(lua_State *L) {
  pg_shards *shards = NULL;
  void **box;
  int failed = open_shards(L, &shards, &box);
  if (failed) return failed;
  lua_createtable(L, (int)shards->count, 1);
  for (size_t i = 0; i < shards->count; i++) {
    lua_createtable(L, 0, 3);
    pgl_set_string(L, "name", shards->shards[i].name);
    pgl_set_integer(L, "bytes", shards->shards[i].bytes);
    pgl_set_integer(L, "tokens", shards->shards[i].tokens);
    lua_rawseti(L, -2, (lua_Integer)i + 1);
  }
  pgl_set_integer(L, "tokens", shards->tokens);
  pgl_disown(box);
  return 1;
}

/* core.shard_scan(ctx, folder, pattern, i) -> largest token, its offset in the shard (from 0) */
static int data_shard_scan(lua_State *L) {
  const int64_t i = pgl_integer(L, 4, "i", 1, INT64_MAX);
  pg_shards *shards = NULL;
  void **box;
  int failed = open_shards(L, &shards, &box);
  if (failed) return failed;
  if ((uint64_t)i > shards->count)
    return luaL_error(L, "shard_scan: shard %I of %I", (LUAI_UACINT)i, (LUAI_UACINT)shards->count);
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  int32_t largest = 0;
  int64_t at = 0;
  int status = pg_shard_scan(ctx, &shards->shards[i - 1], &largest, &at);
  pgl_disown(box);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_pushinteger(L, largest);
  lua_pushinteger(L, at);
  return 2;
}

/* core.updates_per_epoch(ctx, folder, pattern, time, sequences) */
static int data_updates_per_epoch(lua_State *L) {
  const int64_t time = pgl_integer(L, 4, "time", 1, INT64_MAX);
  const int64_t sequences = pgl_integer(L, 5, "sequences", 1, INT64_MAX);
  pg_shards *shards = NULL;
  void **box;
  int failed = open_shards(L, &shards, &box);
  if (failed) return failed;
  lua_pushinteger(L, pg_shards_updates_per_epoch(shards, time, sequences));
  pgl_disown(box);
  return 1;
}

static int hash_folder(lua_State *L, int (*hash)(pg_context *, const char *, char[65])) {
  pg_context *ctx = pgl_check(L, 1, &pgl_context_kind)->resource;
  char hex[65];
  int status = hash(ctx, pgl_string(L, 2, "folder"), hex);
  if (status < 0) return pgl_fail(L, ctx, status);
  lua_pushstring(L, hex);
  return 1;
}

/* core.digest(ctx, folder) -> 64 hex digits, of the shards' names and sizes */
static int data_digest(lua_State *L) {
  return hash_folder(L, pg_shards_digest);
}

/* core.sample(ctx, folder) -> 64 hex digits, of samples of their tokens */
static int data_sample(lua_State *L) {
  return hash_folder(L, pg_shards_sample);
}

/* ---- preparing ----------------------------------------------------------------------------------
 */
/* The progress function runs inside pg_prepare; the core knows no failing one, so an error cancels
 * the work, waits on the Lua stack, and is raised again afterwards. */
typedef struct preparation {
  lua_State *L;
  pg_context *context;
  int function, error; /* stack indices */
  bool failed;
} preparation;

static int call_progress(lua_State *L) {
  lua_pushstring(L, lua_touserdata(L, 2));
  lua_replace(L, 2);
  lua_call(L, 2, 0);
  return 0;
}

static void report_progress(void *self, const char *what, double fraction) {
  preparation *p = self;
  lua_State *L = p->L;
  if (p->failed || !lua_checkstack(L, 8)) return;
  lua_pushcfunction(L, call_progress);
  lua_pushvalue(L, p->function);
  lua_pushlightuserdata(L, (void *)what);
  lua_pushnumber(L, fraction);
  if (lua_pcall(L, 3, 0, 0) == LUA_OK) return;
  lua_replace(L, p->error);
  p->failed = true;
  pg_context_cancel(p->context);
}

static void push_report(lua_State *L, const pg_prepare_report *report) {
  lua_createtable(L, 0, 7);
  pgl_set_integer(L, "vocab", report->vocab);
  pgl_set_integer(L, "train_tokens", report->train_tokens);
  pgl_set_integer(L, "val_tokens", report->val_tokens);
  pgl_set_integer(L, "train_shards", report->train_shards);
  pgl_set_integer(L, "val_shards", report->val_shards);
  pgl_set_integer(L, "bytes", report->bytes);
  pgl_set_string(L, "digest", report->digest);
}

/* core.prepare(ctx, { texts, out, tokenizer, vocab, val_fraction, shard_tokens, name, progress })
 */
static int data_prepare(lua_State *L) {
  static const char *const keys[] = {"texts",        "out",  "tokenizer", "vocab", "val_fraction",
                                     "shard_tokens", "name", "progress",  "field", NULL};
  const char *what = "prepare";
  pg_prepare_options options = {.vocab = 4096, .val_fraction = 0.05, .name = "text"};
  pgl_object *context = pgl_check(L, 1, &pgl_context_kind);
  lua_settop(L, 2);
  pgl_table(L, 2, what, keys);
  pgl_need(L, pgl_get_string(L, 2, what, "out", &options.out), what, "out");
  pgl_get_string(L, 2, what, "tokenizer", &options.tokenizer);
  pgl_get_string(L, 2, what, "name", &options.name);
  pgl_get_string(L, 2, what, "field", &options.field);
  pgl_get_integer(L, 2, what, "vocab", 1, INT64_MAX, &options.vocab);
  pgl_get_integer(L, 2, what, "shard_tokens", 0, INT64_MAX, &options.shard_tokens);
  pgl_get_number(L, 2, what, "val_fraction", &options.val_fraction);
  if (!pgl_raw(L, 2, "progress")) lua_pushnil(L); /* 3 */
  if (!lua_isnil(L, 3) && lua_type(L, 3) != LUA_TFUNCTION)
    return luaL_error(L, "prepare.progress: a function expected, got %s", pgl_describe(L, 3));
  lua_pushnil(L);                                     /* 4: the error of the progress function */
  pgl_need(L, pgl_raw(L, 2, "texts"), what, "texts"); /* 5 */
  luaL_checktype(L, 5, LUA_TTABLE);
  options.text_count = (size_t)lua_rawlen(L, 5);
  if (options.text_count == 0) return luaL_error(L, "prepare.texts: at least one file expected");
  const char **texts = lua_newuserdatauv(L, sizeof *texts * options.text_count, 0);
  for (size_t i = 0; i < options.text_count; i++) {
    if (lua_rawgeti(L, 5, (lua_Integer)i + 1) != LUA_TSTRING)
      return luaL_error(L, "prepare.texts: file names expected, got %s", pgl_describe(L, -1));
    texts[i] = lua_tostring(L, -1);
    lua_pop(L, 1);
  }
  options.texts = texts;

  pgl_check_open(L, context, "context");
  pg_context *ctx = context->resource;
  char message[sizeof ctx->message] = "";
  preparation p = {L, ctx, 3, 4, false};
  pg_prepare_report report;
  if (!lua_isnil(L, 3)) {
    options.progress = report_progress;
    options.self = &p;
  }
  pgl_hold(context); /* the progress function may close it */
  int status = pg_prepare(ctx, &options, &report);
  if (status < 0) snprintf(message, sizeof message, "%s", pg_context_message(ctx));
  if (p.failed) pg_context_resume(ctx);
  pgl_drop(context);
  if (p.failed) {
    lua_settop(L, 4);
    return lua_error(L);
  }
  if (status < 0) return pgl_fail_text(L, status, message);
  push_report(L, &report);
  return 1;
}

/* ---- schedules
 * ------------------------------------------------------------------------------------ */
/* core.schedule_warmup(fraction, total) -> W, or nil, text, name */
static int schedule_warmup(lua_State *L) {
  struct pg_context scratch;
  int64_t warmup = 0;
  const double fraction = pgl_number(L, 1, "fraction");
  const int64_t total = pgl_integer(L, 2, "total", 1, INT64_MAX);
  pgl_scratch(&scratch);
  int status = pg_schedule_warmup(&scratch, fraction, total, &warmup);
  if (status < 0) {
    lua_pushnil(L);
    lua_pushfstring(L, "%s: %s", pg_error_name(status), pg_context_message(&scratch));
    lua_pushstring(L, pg_error_name(status));
    return 3;
  }
  lua_pushinteger(L, warmup);
  return 1;
}

/* core.warmup_cosine(t, total, W, floor) */
static int schedule_warmup_cosine(lua_State *L) {
  const int64_t total = pgl_integer(L, 2, "total", 1, INT64_MAX);
  const int64_t t = pgl_integer(L, 1, "t", 0, total - 1);
  const int64_t warmup = pgl_integer(L, 3, "W", 0, total - 1);
  lua_pushnumber(L, pg_schedule_warmup_cosine(t, total, warmup, pgl_number(L, 4, "floor")));
  return 1;
}

static const luaL_Reg functions[] = {{"shards", data_shards},
                                     {"shard_scan", data_shard_scan},
                                     {"updates_per_epoch", data_updates_per_epoch},
                                     {"digest", data_digest},
                                     {"sample", data_sample},
                                     {"prepare", data_prepare},
                                     {"schedule_warmup", schedule_warmup},
                                     {"warmup_cosine", schedule_warmup_cosine},
                                     {NULL, NULL}};

void pgl_open_data(lua_State *L) {
  luaL_setfuncs(L, functions, 0);
}
