/* Shared objects that are loaded when first needed. */
#ifndef PG_PLUGIN_H
#define PG_PLUGIN_H

#include <stdbool.h>
#include <stddef.h>

/* Whether `file` lies beside the program or module that holds this code, or where an installation
 * puts it; its path. */
bool pg__plugin_path(const char *file, char *path, size_t size);

/* Find `file`, load it, and look `symbol` up. -1 with a text in message[size] when one of these
 * fails. */
int pg__plugin_symbol(const char *file, const char *symbol, void **out, char *message, size_t size);

#endif
