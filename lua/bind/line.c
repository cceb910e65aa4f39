/* core.line: reading lines from a terminal with libedit: editing, history, completion. The
 * terminal keeps its signals: SIGINT ends the line with "interrupt" instead of the process when
 * core.signals handles it. */
#include "bind.h"
#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

#define PGL_EDITOR "perigee.editor"

/* The uservalue is the function that completes. */
typedef struct editor {
  EditLine *edit;
  History *history;
  char prompt[64];
  char path[4096]; /* the history's file; "": none */
  lua_State *L;    /* while a line is read */
  bool interrupted;
  bool held; /* `next` was read and not yet used */
  char next;
} editor;

static editor *check_editor(lua_State *L) {
  editor *e = luaL_checkudata(L, 1, PGL_EDITOR);
  if (!e->edit) luaL_error(L, "this editor is closed");
  return e;
}

static editor *editor_of(EditLine *edit) {
  editor *e = NULL;
  el_get(edit, EL_CLIENTDATA, &e);
  return e;
}

static char *show_prompt(EditLine *edit) {
  return editor_of(edit)->prompt;
}

/* One byte of the terminal: 1, 0 at the end, -1 when a signal ends the line. A byte that arrived
 * after the signal belongs to the next line. */
static int read_byte(editor *e, char *byte) {
  for (;;) {
    if (pgl_signals_pending()) {
      e->interrupted = true;
      return -1;
    }
    if (e->held) {
      *byte = e->next;
      e->held = false;
      return 1;
    }
    ssize_t got = read(STDIN_FILENO, byte, 1);
    if (got < 0 && errno == EINTR) continue; /* or the window has changed */
    if (got != 1 || !pgl_signals_pending()) return (int)got;
    e->next = *byte;
    e->held = true;
  }
}

static int read_character(EditLine *edit, wchar_t *out) {
  editor *e = editor_of(edit);
  mbstate_t state = {0};
  for (;;) {
    char byte = 0;
    const int got = read_byte(e, &byte);
    if (got <= 0) return got;
    size_t taken = mbrtowc(out, &byte, 1, &state);
    if (taken == (size_t)-2) continue;
    if (taken != (size_t)-1) return 1;
    state = (mbstate_t){0};
  }
}

/* The tab key: the function gets the line up to the cursor, and returns the text to insert and the
 * text to show below the line, each a string or nil. */
static unsigned char complete(EditLine *edit, int key) {
  editor *e = editor_of(edit);
  lua_State *L = e->L;
  const LineInfo *line = el_line(edit);
  unsigned char answer = CC_ERROR;
  (void)key;
  const int top = lua_gettop(L);
  if (!lua_checkstack(L, 8) || lua_getiuservalue(L, 1, 1) != LUA_TFUNCTION) return CC_ERROR;
  lua_pushlstring(L, line->buffer, (size_t)(line->cursor - line->buffer));
  if (lua_pcall(L, 1, 2, 0) == LUA_OK) {
    const char *insert = lua_tostring(L, -2), *show = lua_tostring(L, -1);
    if (show) {
      printf("\n%s\n", show);
      fflush(stdout);
      answer = CC_REDISPLAY;
    }
    if (insert && *insert && el_insertstr(edit, insert) == 0)
      answer = show ? CC_REDISPLAY : CC_REFRESH;
  }
  lua_settop(L, top);
  return answer;
}

/* core.line{ history = path, complete = function } -> editor, or nil, text, name */
static int line_open(lua_State *L) {
  static const char *const keys[] = {"history", "complete", NULL};
  const char *path = NULL;
  HistEvent event;
  lua_settop(L, 1);
  pgl_table(L, 1, "line", keys);
  pgl_get_string(L, 1, "line", "history", &path);
  editor *e = lua_newuserdatauv(L, sizeof *e, 1);
  memset(e, 0, sizeof *e);
  luaL_setmetatable(L, PGL_EDITOR);
  if (pgl_raw(L, 1, "complete")) lua_setiuservalue(L, -2, 1);
  /* Characters instead of bytes; numbers keep their decimal point. */
  if (!setlocale(LC_CTYPE, "") || MB_CUR_MAX == 1) setlocale(LC_CTYPE, "C.UTF-8");
  e->history = history_init();
  e->edit = el_init("perigee", stdin, stdout, stderr);
  if (!e->history || !e->edit) return pgl_fail_text(L, PG_ENOMEM, "no memory to edit lines");
  history(e->history, &event, H_SETSIZE, 5000);
  history(e->history, &event, H_SETUNIQUE, 1);
  if (path && strlen(path) < sizeof e->path) {
    strcpy(e->path, path);
    history(e->history, &event, H_LOAD, path); /* there is none at first */
  }
  el_set(e->edit, EL_CLIENTDATA, e);
  el_set(e->edit, EL_SIGNAL, 0);
  el_set(e->edit, EL_EDITOR, "emacs");
  el_set(e->edit, EL_PROMPT, show_prompt);
  el_set(e->edit, EL_HIST, history, e->history);
  el_set(e->edit, EL_GETCFN, read_character);
  el_set(e->edit, EL_ADDFN, "perigee-complete", "complete", complete);
  el_set(e->edit, EL_BIND, "^I", "perigee-complete", NULL);
  el_set(e->edit, EL_BIND, "^R", "em-inc-search-prev", NULL);
  el_source(e->edit, NULL);
  return 1;
}

/* editor:read(prompt) -> the line without its end, or nil, "interrupt" | "end" */
static int editor_read(lua_State *L) {
  editor *e = check_editor(L);
  int count = 0;
  snprintf(e->prompt, sizeof e->prompt, "%s", pgl_string(L, 2, "prompt"));
  lua_settop(L, 1); /* complete finds the editor there */
  e->L = L;
  e->interrupted = false;
  fflush(stdout);
  const char *line = el_gets(e->edit, &count);
  e->L = NULL;
  if (e->interrupted || (line && count > 0 && line[count - 1] != '\n' && pgl_signals_pending())) {
    el_reset(e->edit);
    line = NULL;
    e->interrupted = true;
  }
  if (!line || count <= 0) {
    lua_pushnil(L);
    lua_pushstring(L, e->interrupted ? "interrupt" : "end");
    return 2;
  }
  if (line[count - 1] == '\n') count--;
  lua_pushlstring(L, line, (size_t)count);
  return 1;
}

/* editor:add(line): to the history and its file, which is this user's alone. */
static int editor_add(lua_State *L) {
  editor *e = check_editor(L);
  HistEvent event;
  history(e->history, &event, H_ENTER, pgl_string(L, 2, "line"));
  if (e->path[0]) history(e->history, &event, H_SAVE, e->path);
  return 0;
}

static int editor_close(lua_State *L) {
  editor *e = luaL_checkudata(L, 1, PGL_EDITOR);
  if (e->edit) el_end(e->edit);
  if (e->history) history_end(e->history);
  e->edit = NULL;
  e->history = NULL;
  return 0;
}

static const luaL_Reg methods[] = {
    {"read", editor_read}, {"add", editor_add}, {"close", editor_close}, {NULL, NULL}};
static const luaL_Reg functions[] = {{"line", line_open}, {NULL, NULL}};

void pgl_open_line(lua_State *L) {
  luaL_newmetatable(L, PGL_EDITOR);
  lua_pushcfunction(L, editor_close);
  lua_setfield(L, -2, "__gc");
  lua_pushcfunction(L, editor_close);
  lua_setfield(L, -2, "__close");
  luaL_newlib(L, methods);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
  luaL_setfuncs(L, functions, 0);
}
