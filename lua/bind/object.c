/* Counted objects behind the userdata, and boxes for C resources.
 *
 * Invariant: an object's resource, once acquired, exists while users > 0, and before close() also
 * while readers > 0; the struct exists while references > 0; users and readers are references. */
#include "bind.h"
#include <stdlib.h>

#define PGL_BOX "perigee.box"

void pgl_watch(pgl_object *o) {
  o->references++;
}

void pgl_unwatch(pgl_object *o) {
  while (o && --o->references == 0) {
    pgl_object *parent = o->parent;
    free(o);
    o = parent;
  }
}

/* Free the resource as soon as nobody needs it any more. */
static void settle(pgl_object *o) {
  if (o->released || o->users > 0 || (o->readers > 0 && !o->closed)) return;
  o->released = true;
  if (o->resource) o->kind->release(o);
  o->resource = NULL;
  if (o->parent) pgl_drop(o->parent);
}

void pgl_hold(pgl_object *o) {
  o->users++;
  o->references++;
}

void pgl_drop(pgl_object *o) {
  o->users--;
  settle(o);
  pgl_unwatch(o);
}

void pgl_read(pgl_object *o) {
  o->readers++;
  o->references++;
}

void pgl_unread(pgl_object *o) {
  o->readers--;
  settle(o);
  pgl_unwatch(o);
}

pgl_object *pgl_new(lua_State *L, const pgl_kind *kind, pgl_object *parent) {
  pgl_object **box = lua_newuserdatauv(L, sizeof *box, kind->uservalues);
  *box = NULL;
  luaL_setmetatable(L, kind->type);
  /* Making the userdata may have run finalisers that closed the parent. */
  if (parent) pgl_check_open(L, parent, parent->kind->name);
  pgl_object *o = calloc(1, sizeof *o);
  if (!o) luaL_error(L, "%s: out of memory", kind->name);
  o->kind = kind;
  if (parent) {
    o->parent = parent;
    pgl_hold(parent);  /* given back with the resource */
    pgl_watch(parent); /* given back with the struct */
  }
  pgl_hold(o);  /* given back by close() or __gc */
  pgl_watch(o); /* given back by __gc */
  *box = o;
  return o;
}

void pgl_check_open(lua_State *L, const pgl_object *o, const char *what) {
  for (const pgl_object *at = o; at; at = at->parent) {
    if (!at->closed) continue;
    if (at == o && what == o->kind->name) luaL_error(L, "this %s is closed", what);
    luaL_error(L, "this %s cannot be used: its %s is closed", what, at->kind->name);
  }
}

pgl_object *pgl_check(lua_State *L, int arg, const pgl_kind *kind) {
  pgl_object *o = *(pgl_object **)luaL_checkudata(L, arg, kind->type);
  if (!o) luaL_error(L, "this %s is closed", kind->name);
  pgl_check_open(L, o, kind->name);
  return o;
}

pgl_object *pgl_root(pgl_object *o) {
  while (o->parent) o = o->parent;
  return o;
}

pg_context *pgl_context(pgl_object *o) {
  return pgl_root(o)->resource;
}

static const pgl_kind *upvalue_kind(lua_State *L) {
  return lua_touserdata(L, lua_upvalueindex(1));
}

static int object_close(lua_State *L) {
  pgl_object *o = *(pgl_object **)luaL_checkudata(L, 1, upvalue_kind(L)->type);
  if (o && !o->closed) {
    o->closed = true;
    pgl_drop(o);
  }
  return 0;
}

static int object_collect(lua_State *L) {
  pgl_object **box = luaL_checkudata(L, 1, upvalue_kind(L)->type), *o = *box;
  *box = NULL;
  if (!o) return 0;
  if (!o->closed) pgl_drop(o);
  pgl_unwatch(o);
  return 0;
}

static int object_tostring(lua_State *L) {
  pgl_object *o = *(pgl_object **)luaL_checkudata(L, 1, upvalue_kind(L)->type);
  lua_pushfstring(L, "%s%s: %p", upvalue_kind(L)->name, !o || o->closed ? " (closed)" : "",
                  (void *)o);
  return 1;
}

void pgl_define(lua_State *L, const pgl_kind *kind, const luaL_Reg *methods) {
  static const luaL_Reg meta[] = {{"__gc", object_collect},
                                  {"__close", object_close},
                                  {"__tostring", object_tostring},
                                  {NULL, NULL}};
  luaL_newmetatable(L, kind->type);
  lua_pushlightuserdata(L, (void *)kind);
  luaL_setfuncs(L, meta, 1);
  lua_newtable(L);
  luaL_setfuncs(L, methods, 0);
  lua_pushlightuserdata(L, (void *)kind);
  lua_pushcclosure(L, object_close, 1);
  lua_setfield(L, -2, "close");
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}

/* ---- boxes ------------------------------------------------------------------------------- */
typedef struct box {
  void *resource; /* first: pgl_own returns its address */
  void (*release)(void *resource);
} box;

void pgl_disown(void **slot) {
  box *b = (box *)slot;
  void *resource = b->resource;
  b->resource = NULL;
  if (resource) b->release(resource);
}

static int box_collect(lua_State *L) {
  pgl_disown(luaL_checkudata(L, 1, PGL_BOX));
  return 0;
}

void **pgl_own(lua_State *L, void (*release)(void *resource)) {
  box *b = lua_newuserdatauv(L, sizeof *b, 0);
  b->resource = NULL;
  b->release = release;
  if (luaL_newmetatable(L, PGL_BOX)) {
    lua_pushcfunction(L, box_collect);
    lua_setfield(L, -2, "__gc");
    lua_pushcfunction(L, box_collect);
    lua_setfield(L, -2, "__close");
  }
  lua_setmetatable(L, -2);
  /* Closed when the calling function returns or raises, not whenever garbage is collected: what it
   * owns may belong to a context that the script closes next. */
  lua_toclose(L, -1);
  return &b->resource;
}
