/* Plugins are looked for beside the file that holds this code, the program or the Lua module, and
 * where an installation puts them: a machine without a GPU or MPI needs none of their libraries,
 * and starting costs nothing. */
#include "plugin.h"
#include "internal.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

/* Below the folder of the program (build/, bin/, build/tests/) or of the module
 * (build/lib/perigee, lib/lua/5.4/perigee). */
static const char *const places[] = {"", "lib/", "lib/perigee/", "../lib/perigee/",
                                     "../../../perigee/"};

/* The folder, with a slash, of the file that this code was loaded from. */
static int own_folder(char *out, size_t size) {
  Dl_info self, program;
  char path[PATH_MAX] = "";
  if (!dladdr((const void *)places, &self) || !self.dli_fname) return -1;
  /* The program's own name may be relative to a folder that was left since. */
  bool in_program =
      dladdr((const void *)getauxval(AT_ENTRY), &program) && program.dli_fbase == self.dli_fbase;
  if (!realpath(in_program ? "/proc/self/exe" : self.dli_fname, path)) return -1;
  char *end = strrchr(path, '/');
  if (!end) return -1;
  end[1] = 0;
  return (size_t)snprintf(out, size, "%s", path) < size ? 0 : -1;
}

bool pg__plugin_path(const char *file, char *path, size_t size) {
  char folder[PATH_MAX];
  if (own_folder(folder, sizeof folder) < 0) return false;
  for (size_t i = 0; i < PG_COUNT(places); i++) {
    const size_t a = strlen(folder), b = strlen(places[i]), c = strlen(file);
    if (a + b + c >= size) continue;
    memcpy(path, folder, a);
    memcpy(path + a, places[i], b);
    memcpy(path + a + b, file, c + 1);
    if (access(path, F_OK) == 0) return true;
  }
  return false;
}

int pg__plugin_symbol(const char *file, const char *symbol, void **out, char *message,
                      size_t size) {
  char path[PATH_MAX];
  if (!pg__plugin_path(file, path, sizeof path)) {
    snprintf(message, size, "this build has no %s: what it needs was not there when it was built",
             file);
    return -1;
  }
  /* Never closed: neither CUDA's libraries nor MPI's survive that. */
  void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle && (*out = dlsym(handle, symbol))) return 0;
  const char *why = dlerror();
  snprintf(message, size, "%s does not load: %s", file, why ? why : path);
  return -1;
}

bool pg__cuda_plugin(char *path, size_t size) {
  return pg__plugin_path(PG_CUDA_PLUGIN, path, size);
}

const pg_kernels *pg__cuda_kernels(char *message, size_t size) {
  const pg_kernels *(*kernels)(void) = NULL;
  char path[PATH_MAX];
  if (!pg__cuda_plugin(path, sizeof path)) {
    snprintf(message, size, "this build has no CUDA plugin (" PG_CUDA_PLUGIN ")");
    return NULL;
  }
  if (pg__plugin_symbol(PG_CUDA_PLUGIN, "pg_cuda_kernels", (void **)&kernels, message, size) < 0)
    return NULL;
  return kernels();
}
