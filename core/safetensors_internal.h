/* An opened set of safetensors files, shared by the files that open and read it. */
#ifndef PG_SAFETENSORS_INTERNAL_H
#define PG_SAFETENSORS_INTERNAL_H

#include "files.h"
#include "internal.h"
#include "json.h"
#include "safetensors.h"

#define PG__NAME_SHOWN 200 /* bytes of a file's own text that messages repeat */

typedef struct pg__member {
  char *path;
  int fd;
  json_t *header; /* owns its entries' names and types */
} pg__member;

struct pg_safetensors {
  pg_context *context;
  char *path; /* as given: of a file or a folder */
  pg__member *members;
  size_t member_count;
  pg_safetensors_entry *entries; /* member by member, in each header's order */
  size_t count;
  size_t *by_name; /* indices of entries sorted by name */
};

static inline const char *pg__member_path(const pg_safetensors *file,
                                          const pg_safetensors_entry *entry) {
  return file->members[entry->member].path;
}

#endif
