/* How much memory this machine can still give to this process: what the kernel calls available,
 * with free swap, within the limits of the control groups that the process is in. */
#include "internal.h"

#include <stdio.h>
#include <string.h>

/* The number after `key` at the start of a line of a file; -1 when there is none. */
static int64_t number_in(const char *path, const char *key) {
  char line[512];
  const size_t length = strlen(key);
  int64_t value = -1;
  FILE *f = fopen(path, "re");
  if (!f) return -1;
  while (value < 0 && fgets(line, sizeof line, f)) {
    long long found;
    if (strncmp(line, key, length) == 0 && sscanf(line + length, "%lld", &found) == 1)
      value = found;
  }
  fclose(f);
  return value;
}

/* What a group may still take: -1 without a limit. Pages of files that were not used lately are
 * counted as used by the group, and are given back when it needs memory. */
static int64_t left_in(const char *folder, const char *limit_name, const char *used_name,
                       const char *cached_key) {
  char path[4400];
  snprintf(path, sizeof path, "%s/%s", folder, limit_name);
  const int64_t limit = number_in(path, "");
  snprintf(path, sizeof path, "%s/%s", folder, used_name);
  const int64_t used = number_in(path, "");
  snprintf(path, sizeof path, "%s/memory.stat", folder);
  const int64_t cached = number_in(path, cached_key);
  if (limit < 0 || used < 0) return -1; /* "max", or no such files */
  return pg__max(0, limit - used + pg__max(0, cached));
}

static void lower(int64_t *available, int64_t left) {
  if (left >= 0 && (*available < 0 || left < *available)) *available = left;
}

/* Each group's limit holds for all groups below it. */
static void lower_to_groups(const char *root, const char *mount, char *group, bool second,
                            int64_t *available) {
  char folder[4300];
  for (;;) {
    snprintf(folder, sizeof folder, "%s%s%s", root, mount, group);
    lower(available, second ? left_in(folder, "memory.max", "memory.current", "inactive_file ")
                            : left_in(folder, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                      "total_inactive_file "));
    char *slash = strrchr(group, '/');
    if (!slash) return;
    *slash = 0;
  }
}

int64_t pg__host_memory(const char *root) {
  char path[4200], line[4096];
  int64_t available;
  snprintf(path, sizeof path, "%s/proc/meminfo", root);
  available = number_in(path, "MemAvailable:");
  if (available >= 0) available = 1024 * (available + pg__max(0, number_in(path, "SwapFree:")));

  snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
  FILE *f = fopen(path, "re");
  while (f && fgets(line, sizeof line, f)) {
    line[strcspn(line, "\n")] = 0;
    char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
    if (!group) continue;
    *group++ = 0;
    if (strcmp(names + 1, "") == 0)
      lower_to_groups(root, "/sys/fs/cgroup", group, true, &available);
    else if (strcmp(names + 1, "memory") == 0)
      lower_to_groups(root, "/sys/fs/cgroup/memory", group, false, &available);
  }
  if (f) fclose(f);
  return pg__max(0, available);
}
