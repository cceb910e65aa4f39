/* Multiples that wait. An optimizer written in Lua ends in something like x:mul(-lr), and the
 * update multiplies by a factor anyway: so t:mul(number) of a large matrix that nothing else shows
 * makes a tensor that stands for factor times t. pgl_check_tensor, which all uses of either tensor
 * go through, makes the numbers first; only the update takes the factor as it is. Both round alike.
 *
 * Invariant: a tensor r with r->scaled is what its storage's `scaled` points to, and beside it only
 * the tensor that it was made from, if that is still there, is of this storage. */
#include "bind.h"

#define LEAST_ELEMENTS (1 << 16) /* smaller ones cost too little */

bool pgl_scale_later(pgl_tensor *r, const pgl_tensor *t, double factor) {
  const pg_tensor *from = t->tensor;
  struct pg_storage *storage = from->storage;
  if (t->owner || storage->lent || storage->references != 1 || from->dtype != PG_F32 ||
      from->ndim != 2 || pg_tensor_elements(from) < LEAST_ELEMENTS || !pg_tensor_contiguous(from))
    return false;
  if (pg_tensor_view(from, 0, from->ndim, from->shape, from->stride, &r->tensor) < 0) return false;
  r->scaled = true;
  r->factor = factor;
  storage->scaled = r;
  return true;
}

void pgl_scale_now(lua_State *L, pgl_tensor *r) {
  pg_tensor *view = r->tensor, *made = NULL;
  /* In place once the other tensor is gone. */
  const bool alone = view->storage->references == 1;
  const int status =
      pg_tensor_scalar("mul", view, r->factor, false, alone ? view : NULL, alone ? NULL : &made);
  if (status < 0) luaL_error(L, "%s", pg_context_message(view->context));
  pgl_scale_never(r);
  if (!made) return;
  r->tensor = made;
  pg_tensor_free(view);
}

void pgl_scale_never(pgl_tensor *r) {
  if (!r->scaled) return;
  r->tensor->storage->scaled = NULL;
  r->scaled = false;
}
