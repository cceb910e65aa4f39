/* Opening safetensors: everything that headers claim is checked before any of it is used, so that
 * the rest can trust offsets and sizes. Reading is in safetensors_read.c, writing in
 * safetensors_write.c.
 *
 * Layout: 8 bytes of little-endian header length n; n bytes of JSON, one object {name: {"dtype":,
 * "shape":, "data_offsets": [begin, end]}} with an optional "__metadata__" of strings; then the
 * data, which the tensors cover without gaps, offsets counting from its start.
 *
 * A folder has them in model.safetensors, or in the files that model.safetensors.index.json names:
 * {"weight_map": {tensor: file}}. */
#include "safetensors_internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors data is little-endian");

#define HEADER_LIMIT 100000000
#define NAME_SHOWN PG__NAME_SHOWN
#define MEMBER_LIMIT 4096

typedef struct dtype_info {
  const char *name;
  int bytes;
} dtype_info;
static const dtype_info dtypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
    {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
    {"F32", 4},  {"I64", 8}, {"U64", 8}, {"F64", 8},     {"C64", 8},
};

static int dtype_bytes(const char *name) {
  for (size_t i = 0; i < PG_COUNT(dtypes); i++)
    if (strcmp(dtypes[i].name, name) == 0) return dtypes[i].bytes;
  return 0;
}

static int bad(pg_safetensors *file, const pg__member *m, const char *name, const char *what) {
  return pg_fail(file->context, PG_EFORMAT, "'%s': tensor \"%.*s\": %s", m->path, NAME_SHOWN, name,
                 what);
}

/* Element size, shape and range of one header entry; `data` bytes of data start at `start`. */
static int parse_entry(pg_safetensors *file, const pg__member *m, const char *name, json_t *value,
                       int64_t start, int64_t data, pg_safetensors_entry *entry) {
  const char *dtype = json_string_value(json_object_get(value, "dtype"));
  const json_t *shape = json_object_get(value, "shape");
  const json_t *offsets = json_object_get(value, "data_offsets");
  if (!json_is_object(value)) return bad(file, m, name, "its description is not an object");
  if (!dtype) return bad(file, m, name, "\"dtype\" is missing or not a string");
  const int unit = dtype_bytes(dtype);
  if (!unit)
    return pg_fail(file->context, PG_EFORMAT, "'%s': tensor \"%.*s\": type \"%.40s\" is unknown",
                   m->path, NAME_SHOWN, name, dtype);
  if (!json_is_array(shape)) return bad(file, m, name, "\"shape\" is missing or not an array");
  if (json_array_size(shape) > PG_COUNT(entry->shape))
    return bad(file, m, name, "more than 8 dimensions");
  *entry = (pg_safetensors_entry){.name = name, .dtype = dtype, .member = (int)(m - file->members)};
  entry->ndim = (int)json_array_size(shape);
  int64_t bytes = unit;
  bool overflow = false, zero = false;
  for (int i = 0; i < entry->ndim; i++) {
    const json_t *size = json_array_get(shape, (size_t)i);
    const int64_t n = json_integer_value(size);
    if (!json_is_integer(size) || n < 0)
      return bad(file, m, name, "a size in \"shape\" is not a non-negative integer");
    entry->shape[i] = n;
    if (n == 0)
      zero = true;
    else
      overflow |= __builtin_mul_overflow(bytes, n, &bytes);
  }
  if (zero)
    bytes = 0;
  else if (overflow)
    return bad(file, m, name, "\"shape\" has more than 2^63 bytes");
  if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
      !json_is_integer(json_array_get(offsets, 0)) || !json_is_integer(json_array_get(offsets, 1)))
    return bad(file, m, name, "\"data_offsets\" is missing or not two integers");
  const int64_t begin = json_integer_value(json_array_get(offsets, 0));
  const int64_t end = json_integer_value(json_array_get(offsets, 1));
  if (begin < 0 || end < begin || end > data)
    return pg_fail(file->context, PG_EFORMAT,
                   "'%s': tensor \"%.*s\": data_offsets [%lld, %lld] leave the %lld bytes of data",
                   m->path, NAME_SHOWN, name, (long long)begin, (long long)end, (long long)data);
  if (end - begin != bytes)
    return pg_fail(file->context, PG_EFORMAT,
                   "'%s': tensor \"%.*s\": shape and type %s need %lld bytes, data_offsets give "
                   "%lld",
                   m->path, NAME_SHOWN, name, dtype, (long long)bytes, (long long)(end - begin));
  entry->offset = start + begin;
  entry->bytes = bytes;
  return 0;
}

static int compare_names(const void *a, const void *b, void *entries) {
  const pg_safetensors_entry *e = entries;
  return strcmp(e[*(const size_t *)a].name, e[*(const size_t *)b].name);
}
static int compare_offsets(const void *a, const void *b, void *entries) {
  const pg_safetensors_entry *x = (pg_safetensors_entry *)entries + *(const size_t *)a;
  const pg_safetensors_entry *y = (pg_safetensors_entry *)entries + *(const size_t *)b;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* The member's tensors, those from `first` on, cover [start, size) once, without gaps. Uses by_name
 * as scratch. */
static int check_cover(pg_safetensors *file, const pg__member *m, size_t first, int64_t start,
                       int64_t size) {
  int64_t at = start;
  for (size_t i = first; i < file->count; i++) file->by_name[i] = i;
  qsort_r(file->by_name + first, file->count - first, sizeof(size_t), compare_offsets,
          file->entries);
  for (size_t i = first; i < file->count; i++) {
    const pg_safetensors_entry *entry = &file->entries[file->by_name[i]];
    if (entry->offset != at)
      return bad(file, m, entry->name,
                 entry->offset < at ? "its data overlap another tensor's"
                                    : "its data do not begin where the previous tensor's end");
    at += entry->bytes;
  }
  if (at != size)
    return pg_fail(file->context, PG_EFORMAT,
                   "'%s' has %lld bytes, but its tensors end at byte %lld", m->path,
                   (long long)size, (long long)at);
  return 0;
}

/* Room for `more` entries, and one. */
static int grow(pg_safetensors *file, const pg__member *m, size_t more) {
  const size_t n = file->count + more + 1;
  pg_safetensors_entry *entries = realloc(file->entries, n * sizeof *entries);
  if (entries) file->entries = entries;
  size_t *by_name = realloc(file->by_name, n * sizeof *by_name);
  if (by_name) file->by_name = by_name;
  if (entries && by_name) return 0;
  return pg_fail(file->context, PG_ENOMEM, "the %zu entries of '%s' do not fit in memory", more,
                 m->path);
}

static int parse_header(pg_safetensors *file, const pg__member *m, int64_t start, int64_t size) {
  int status;
  const char *name;
  json_t *value;
  const size_t first = file->count;
  if (!json_is_object(m->header))
    return pg_fail(file->context, PG_EFORMAT, "'%s': the header is not a JSON object", m->path);
  PG_TRY(grow(file, m, json_object_size(m->header)));
  json_object_foreach(m->header, name, value) {
    if (strcmp(name, "__metadata__") == 0) {
      const char *key;
      json_t *item;
      if (!json_is_object(value)) return bad(file, m, name, "it is not an object");
      json_object_foreach(value, key, item) {
        if (!json_is_string(item)) return bad(file, m, name, "a value is not a string");
      }
      continue;
    }
    PG_TRY(parse_entry(file, m, name, value, start, size - start, &file->entries[file->count]));
    file->count++;
  }
  PG_TRY(check_cover(file, m, first, start, size));
fail:
  return status;
}

static int open_member(pg_safetensors *file, pg__member *m) {
  pg_context *ctx = file->context;
  int status;
  int64_t size;
  uint64_t length;
  char *text = NULL, *what = NULL;
  PG_TRY(pg__open_regular(ctx, m->path, &m->fd, &size));
  if (size < 8) {
    status = pg_fail(ctx, PG_EFORMAT,
                     "'%s' has %lld bytes: too short for a safetensors file's header length",
                     m->path, (long long)size);
    goto fail;
  }
  PG_TRY(pg_file_pread(ctx, m->fd, m->path, 0, &length, 8));
  if (length > HEADER_LIMIT || (int64_t)length > size - 8) {
    status = pg_fail(ctx, PG_EFORMAT,
                     "'%s': a header length of %llu bytes; the file has %lld after it and at most "
                     "%d are allowed",
                     m->path, (unsigned long long)length, (long long)(size - 8), HEADER_LIMIT);
    goto fail;
  }
  if (!(text = malloc(length + 1)) || asprintf(&what, "'%s': header", m->path) < 0) {
    what = NULL;
    status = pg_fail(ctx, PG_ENOMEM, "the header of '%s' (%llu bytes) does not fit in memory",
                     m->path, (unsigned long long)length);
    goto fail;
  }
  PG_TRY(pg_file_pread(ctx, m->fd, m->path, 8, text, length));
  PG_TRY(pg__json_parse(ctx, text, length, what, &m->header));
  PG_TRY(parse_header(file, m, 8 + (int64_t)length, size));
fail:
  free(text);
  free(what);
  return status;
}

/* The next member, of this path; a malloc'ed one is taken over. */
static int add_member(pg_safetensors *file, char *path) {
  pg__member *members = NULL;
  if (path) members = realloc(file->members, (file->member_count + 1) * sizeof *members);
  if (!members) {
    free(path);
    return pg_fail(file->context, PG_ENOMEM, "opening '%s' does not fit in memory", file->path);
  }
  file->members = members;
  members[file->member_count++] = (pg__member){.path = path, .fd = -1};
  return 0;
}

static char *inside(const char *folder, const char *name) {
  char *path;
  return asprintf(&path, "%s/%s", folder, name) < 0 ? NULL : path;
}

/* ---- several files --------------------------------------------------------------------- */
/* The files of an index, in the order in which they are first named. */
static int list_members(pg_safetensors *file, const char *index, const json_t *map) {
  int status = 0;
  const char *tensor;
  json_t *value, *seen = json_object();
  if (!json_is_object(map) || json_object_size(map) == 0)
    PG_TRY(pg_fail(file->context, PG_EFORMAT,
                   "'%s': \"weight_map\" is missing or not an object with tensors", index));
  json_object_foreach((json_t *)map, tensor, value) {
    const char *name = json_string_value(value);
    if (!name || !*name || strchr(name, '/') || !strcmp(name, ".."))
      PG_TRY(pg_fail(file->context, PG_EFORMAT,
                     "'%s': the file of tensor \"%.*s\" is not the name of a file beside it", index,
                     NAME_SHOWN, tensor));
    if (json_object_get(seen, name)) continue;
    if (json_object_size(seen) == MEMBER_LIMIT)
      PG_TRY(
          pg_fail(file->context, PG_EFORMAT, "'%s' names more than %d files", index, MEMBER_LIMIT));
    json_object_set_new(seen, name, json_true());
    PG_TRY(add_member(file, inside(file->path, name)));
  }
fail:
  json_decref(seen);
  return status;
}

/* Every tensor of the index is in the file that it names. */
static int check_map(const pg_safetensors *file, const char *index, const json_t *map) {
  const char *tensor;
  json_t *value;
  json_object_foreach((json_t *)map, tensor, value) {
    const char *name = json_string_value(value);
    const pg_safetensors_entry *e = pg_safetensors_find(file, tensor);
    if (!e || strcmp(strrchr(pg__member_path(file, e), '/') + 1, name) != 0)
      return pg_fail(file->context, PG_EFORMAT, "'%s': tensor \"%.*s\" is not in %.*s", index,
                     NAME_SHOWN, tensor, NAME_SHOWN, name);
  }
  return 0;
}

/* All members are there: sort the names, each of which there is once. */
static int sort_names(pg_safetensors *file) {
  for (size_t i = 0; i < file->count; i++) file->by_name[i] = i;
  qsort_r(file->by_name, file->count, sizeof(size_t), compare_names, file->entries);
  for (size_t i = 1; i < file->count; i++) {
    const pg_safetensors_entry *a = &file->entries[file->by_name[i - 1]];
    const pg_safetensors_entry *b = &file->entries[file->by_name[i]];
    if (strcmp(a->name, b->name) == 0)
      return pg_fail(file->context, PG_EFORMAT, "tensor \"%.*s\" is in '%s' and in '%s'",
                     NAME_SHOWN, a->name, pg__member_path(file, a), pg__member_path(file, b));
  }
  return 0;
}

static int open_members(pg_safetensors *file) {
  int status = 0;
  for (size_t i = 0; i < file->member_count; i++) PG_TRY(open_member(file, &file->members[i]));
  PG_TRY(sort_names(file));
fail:
  return status;
}

static int open_folder(pg_safetensors *file) {
  int status;
  struct stat info;
  json_t *root = NULL;
  char *index = inside(file->path, "model.safetensors.index.json");
  char *single = inside(file->path, "model.safetensors");
  if (!index || !single)
    PG_TRY(pg_fail(file->context, PG_ENOMEM, "opening '%s' does not fit in memory", file->path));
  if (stat(single, &info) == 0) { /* transformers prefers it, too */
    PG_TRY(add_member(file, single));
    single = NULL;
    PG_TRY(open_members(file));
  } else if (stat(index, &info) == 0) {
    PG_TRY(pg__json_load(file->context, index, HEADER_LIMIT, &root));
    const json_t *map = json_object_get(root, "weight_map");
    PG_TRY(list_members(file, index, map));
    PG_TRY(open_members(file));
    PG_TRY(check_map(file, index, map));
  } else {
    status = pg_fail(file->context, PG_ENOENT,
                     "folder '%s' has no weights: expected model.safetensors, or "
                     "model.safetensors.index.json with the files that it names",
                     file->path);
  }
fail:
  json_decref(root);
  free(index);
  free(single);
  return status;
}

int pg_safetensors_open(pg_context *ctx, const char *path, pg_safetensors **out) {
  int status;
  struct stat info;
  pg_safetensors *file = calloc(1, sizeof *file);
  *out = NULL;
  if (!file || !(file->path = strdup(path))) {
    status = pg_fail(ctx, PG_ENOMEM, "opening '%s' does not fit in memory", path);
    goto fail;
  }
  file->context = ctx;
  if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
    PG_TRY(open_folder(file));
  } else {
    PG_TRY(add_member(file, strdup(path)));
    PG_TRY(open_members(file));
  }
  *out = file;
  file = NULL;
fail:
  pg_safetensors_close(file);
  return status;
}

void pg_safetensors_close(pg_safetensors *file) {
  if (!file) return;
  for (size_t i = 0; i < file->member_count; i++) {
    if (file->members[i].fd >= 0) close(file->members[i].fd);
    json_decref(file->members[i].header);
    free(file->members[i].path);
  }
  free(file->members);
  free(file->entries);
  free(file->by_name);
  free(file->path);
  free(file);
}

size_t pg_safetensors_count(const pg_safetensors *file) {
  return file->count;
}

const pg_safetensors_entry *pg_safetensors_at(const pg_safetensors *file, size_t index) {
  return index < file->count ? &file->entries[index] : NULL;
}

const pg_safetensors_entry *pg_safetensors_find(const pg_safetensors *file, const char *name) {
  size_t low = 0, high = file->count;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    const pg_safetensors_entry *entry = &file->entries[file->by_name[middle]];
    const int order = strcmp(name, entry->name);
    if (order == 0) return entry;
    if (order < 0)
      high = middle;
    else
      low = middle + 1;
  }
  return NULL;
}

const char *pg_safetensors_metadata(const pg_safetensors *file, const char *key) {
  const json_t *metadata = json_object_get(file->members[0].header, "__metadata__");
  return json_string_value(json_object_get(metadata, key));
}
