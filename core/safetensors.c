/* Reading safetensors: open checks everything the header claims before any of it is used, so that
 * the rest can trust offsets and sizes. Writing is in safetensors_write.c.
 *
 * Layout: 8 bytes of little-endian header length n; n bytes of JSON, one object {name: {"dtype":,
 * "shape":, "data_offsets": [begin, end]}} with an optional "__metadata__" of strings; then the
 * data, which the tensors cover without gaps, offsets counting from its start. */
#include "safetensors.h"
#include "files.h"
#include "internal.h"
#include "json.h"
#include "numbers.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors data is little-endian");

#define HEADER_LIMIT 100000000
#define NAME_SHOWN 200 /* bytes of a file's own text that messages repeat */

struct pg_safetensors {
  pg_context *context;
  char *path;
  int fd;
  json_t *header;                /* owns the entries' names and types */
  pg_safetensors_entry *entries; /* in the header's order */
  size_t count;
  size_t *by_name; /* indices of entries sorted by name */
};

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

static int bad(pg_safetensors *file, const char *name, const char *what) {
  return pg_fail(file->context, PG_EFORMAT, "'%s': tensor \"%.*s\": %s", file->path, NAME_SHOWN,
                 name, what);
}

/* Element size, shape and range of one header entry; `data` bytes of data start at `start`. */
static int parse_entry(pg_safetensors *file, const char *name, json_t *value, int64_t start,
                       int64_t data, pg_safetensors_entry *entry) {
  const char *dtype = json_string_value(json_object_get(value, "dtype"));
  const json_t *shape = json_object_get(value, "shape");
  const json_t *offsets = json_object_get(value, "data_offsets");
  if (!json_is_object(value)) return bad(file, name, "its description is not an object");
  if (!dtype) return bad(file, name, "\"dtype\" is missing or not a string");
  const int unit = dtype_bytes(dtype);
  if (!unit)
    return pg_fail(file->context, PG_EFORMAT, "'%s': tensor \"%.*s\": type \"%.40s\" is unknown",
                   file->path, NAME_SHOWN, name, dtype);
  if (!json_is_array(shape)) return bad(file, name, "\"shape\" is missing or not an array");
  if (json_array_size(shape) > PG_COUNT(entry->shape))
    return bad(file, name, "more than 8 dimensions");
  *entry = (pg_safetensors_entry){.name = name, .dtype = dtype};
  entry->ndim = (int)json_array_size(shape);
  int64_t bytes = unit;
  bool overflow = false, zero = false;
  for (int i = 0; i < entry->ndim; i++) {
    const json_t *size = json_array_get(shape, (size_t)i);
    const int64_t n = json_integer_value(size);
    if (!json_is_integer(size) || n < 0)
      return bad(file, name, "a size in \"shape\" is not a non-negative integer");
    entry->shape[i] = n;
    if (n == 0)
      zero = true;
    else
      overflow |= __builtin_mul_overflow(bytes, n, &bytes);
  }
  if (zero)
    bytes = 0;
  else if (overflow)
    return bad(file, name, "\"shape\" has more than 2^63 bytes");
  if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
      !json_is_integer(json_array_get(offsets, 0)) || !json_is_integer(json_array_get(offsets, 1)))
    return bad(file, name, "\"data_offsets\" is missing or not two integers");
  const int64_t begin = json_integer_value(json_array_get(offsets, 0));
  const int64_t end = json_integer_value(json_array_get(offsets, 1));
  if (begin < 0 || end < begin || end > data)
    return pg_fail(file->context, PG_EFORMAT,
                   "'%s': tensor \"%.*s\": data_offsets [%lld, %lld] leave the %lld bytes of data",
                   file->path, NAME_SHOWN, name, (long long)begin, (long long)end, (long long)data);
  if (end - begin != bytes)
    return pg_fail(file->context, PG_EFORMAT,
                   "'%s': tensor \"%.*s\": shape and type %s need %lld bytes, data_offsets give "
                   "%lld",
                   file->path, NAME_SHOWN, name, dtype, (long long)bytes, (long long)(end - begin));
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

/* The tensors cover [start, size) once, without gaps. Uses by_name as scratch. */
static int check_cover(pg_safetensors *file, int64_t start, int64_t size) {
  int64_t at = start;
  for (size_t i = 0; i < file->count; i++) file->by_name[i] = i;
  qsort_r(file->by_name, file->count, sizeof(size_t), compare_offsets, file->entries);
  for (size_t i = 0; i < file->count; i++) {
    const pg_safetensors_entry *entry = &file->entries[file->by_name[i]];
    if (entry->offset != at)
      return bad(file, entry->name,
                 entry->offset < at ? "its data overlap another tensor's"
                                    : "its data do not begin where the previous tensor's end");
    at += entry->bytes;
  }
  if (at != size)
    return pg_fail(file->context, PG_EFORMAT,
                   "'%s' has %lld bytes, but its tensors end at byte %lld", file->path,
                   (long long)size, (long long)at);
  return 0;
}

static int parse_header(pg_safetensors *file, int64_t start, int64_t size) {
  int status;
  const char *name;
  json_t *value;
  if (!json_is_object(file->header))
    return pg_fail(file->context, PG_EFORMAT, "'%s': the header is not a JSON object", file->path);
  const size_t limit = json_object_size(file->header);
  file->entries = calloc(limit + 1, sizeof *file->entries);
  file->by_name = calloc(limit + 1, sizeof *file->by_name);
  if (!file->entries || !file->by_name)
    return pg_fail(file->context, PG_ENOMEM, "the %zu entries of '%s' do not fit in memory", limit,
                   file->path);
  json_object_foreach(file->header, name, value) {
    if (strcmp(name, "__metadata__") == 0) {
      const char *key;
      json_t *item;
      if (!json_is_object(value)) return bad(file, name, "it is not an object");
      json_object_foreach(value, key, item) {
        if (!json_is_string(item)) return bad(file, name, "a value is not a string");
      }
      continue;
    }
    PG_TRY(parse_entry(file, name, value, start, size - start, &file->entries[file->count]));
    file->count++;
  }
  PG_TRY(check_cover(file, start, size));
  for (size_t i = 0; i < file->count; i++) file->by_name[i] = i;
  qsort_r(file->by_name, file->count, sizeof(size_t), compare_names, file->entries);
fail:
  return status;
}

int pg_safetensors_open(pg_context *ctx, const char *path, pg_safetensors **out) {
  int status;
  int64_t size;
  uint64_t length;
  char *text = NULL, *what = NULL;
  pg_safetensors *file = calloc(1, sizeof *file);

  *out = NULL;
  if (file) file->fd = -1;
  if (!file || !(file->path = strdup(path))) {
    status = pg_fail(ctx, PG_ENOMEM, "opening '%s' does not fit in memory", path);
    goto fail;
  }
  file->context = ctx;
  PG_TRY(pg__open_regular(ctx, path, &file->fd, &size));
  if (size < 8) {
    status = pg_fail(ctx, PG_EFORMAT,
                     "'%s' has %lld bytes: too short for a safetensors file's header length", path,
                     (long long)size);
    goto fail;
  }
  PG_TRY(pg_file_pread(ctx, file->fd, path, 0, &length, 8));
  if (length > HEADER_LIMIT || (int64_t)length > size - 8) {
    status = pg_fail(ctx, PG_EFORMAT,
                     "'%s': a header length of %llu bytes; the file has %lld after it and at most "
                     "%d are allowed",
                     path, (unsigned long long)length, (long long)(size - 8), HEADER_LIMIT);
    goto fail;
  }
  if (!(text = malloc(length + 1)) || asprintf(&what, "'%s': header", path) < 0) {
    status = pg_fail(ctx, PG_ENOMEM, "the header of '%s' (%llu bytes) does not fit in memory", path,
                     (unsigned long long)length);
    goto fail;
  }
  PG_TRY(pg_file_pread(ctx, file->fd, path, 8, text, length));
  PG_TRY(pg__json_parse(ctx, text, length, what, &file->header));
  PG_TRY(parse_header(file, 8 + (int64_t)length, size));
  *out = file;
  file = NULL;
fail:
  free(text);
  free(what);
  pg_safetensors_close(file);
  return status;
}

void pg_safetensors_close(pg_safetensors *file) {
  if (!file) return;
  if (file->fd >= 0) close(file->fd);
  json_decref(file->header);
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
  return json_string_value(json_object_get(json_object_get(file->header, "__metadata__"), key));
}

/* ---- reading --------------------------------------------------------------------------- */
int pg_safetensors_read(pg_safetensors *file, const pg_safetensors_entry *entry, int64_t offset,
                        void *out, int64_t bytes) {
  if (offset < 0 || bytes < 0 || offset > entry->bytes || bytes > entry->bytes - offset)
    return pg_fail(file->context, PG_EINVAL,
                   "tensor \"%.*s\": %lld bytes from byte %lld were asked for; it has %lld",
                   NAME_SHOWN, entry->name, (long long)bytes, (long long)offset,
                   (long long)entry->bytes);
  return pg_file_pread(file->context, file->fd, file->path, entry->offset + offset, out,
                       (size_t)bytes);
}

int pg_safetensors_read_f32(pg_safetensors *file, const pg_safetensors_entry *entry, int64_t first,
                            int64_t count, float *out) {
  enum { BUFFER = 2048 };
  double buffer[BUFFER];
  const pg__number type = pg__number_named(entry->dtype);
  int status = 0;
  if (type == PG__NONE || pg__number_is_integer(type))
    return pg_fail(file->context, PG_EFORMAT,
                   "'%s': tensor \"%.*s\" has type %s; F32, BF16, F16 or F64 are expected",
                   file->path, NAME_SHOWN, entry->name, entry->dtype);
  const int64_t unit = pg__number_bytes(type);
  const int64_t elements = entry->bytes / unit;
  if (first < 0 || count < 0 || first > elements || count > elements - first)
    return pg_fail(file->context, PG_EINVAL,
                   "tensor \"%.*s\": %lld elements from %lld were asked for; it has %lld",
                   NAME_SHOWN, entry->name, (long long)count, (long long)first,
                   (long long)elements);
  if (type == PG__F32) return pg_safetensors_read(file, entry, first * 4, out, count * 4);
  for (int64_t done = 0; done < count;) {
    const int64_t n = pg__min(count - done, BUFFER);
    PG_TRY(pg_safetensors_read(file, entry, (first + done) * unit, buffer, n * unit));
    pg__numbers_f32(type, buffer, n, out + done);
    done += n;
  }
fail:
  return status;
}

/* `count` integers from element `first` on, in 32 bits. */
static int read_i32(pg_safetensors *file, const pg_safetensors_entry *entry, int64_t first,
                    int64_t count, int32_t *out) {
  enum { BUFFER = 2048 };
  int64_t buffer[BUFFER], bad = 0;
  const pg__number type = pg__number_named(entry->dtype);
  const int64_t unit = pg__number_bytes(type);
  int status = 0;
  for (int64_t done = 0; done < count;) {
    const int64_t n = pg__min(count - done, BUFFER);
    PG_TRY(pg_safetensors_read(file, entry, (first + done) * unit, buffer, n * unit));
    const int64_t place = pg__numbers_i32(type, buffer, n, out + done, &bad);
    if (place >= 0)
      return pg_fail(file->context, PG_EUNSUPPORTED,
                     "'%s': tensor \"%.*s\": element %lld does not fit into 32 bits", file->path,
                     NAME_SHOWN, entry->name, (long long)(first + done + place));
    done += n;
  }
fail:
  return status;
}

int pg_safetensors_read_tensor(pg_safetensors *file, const char *name, pg_tensor *t) {
  enum { BUFFER = 1 << 20 };
  pg_context *ctx = file->context;
  const pg_safetensors_entry *entry = pg_safetensors_find(file, name);
  const int64_t elements = pg_tensor_elements(t), unit = (int64_t)pg_dtype_size(t->dtype);
  const bool whole = !pg_tensor_contiguous(t);
  int64_t there = 1;
  char *buffer = NULL;
  int status;

  if (!entry)
    return pg_fail(ctx, PG_ENOENT, "'%s' has no tensor \"%.*s\"", file->path, NAME_SHOWN, name);
  for (int i = 0; i < entry->ndim; i++) there *= entry->shape[i];
  if (entry->bytes == 0) there = 0;
  if (there != elements)
    return pg_fail(ctx, PG_EFORMAT, "'%s': tensor \"%.*s\" has %lld elements, %lld are expected",
                   file->path, NAME_SHOWN, name, (long long)there, (long long)elements);
  const bool integers = t->dtype == PG_I32 && pg__number_is_integer(pg__number_named(entry->dtype));
  if (t->dtype != PG_F32 && !integers && strcmp(entry->dtype, pg_dtype_name(t->dtype)) != 0)
    return pg_fail(ctx, PG_EFORMAT, "'%s': tensor \"%.*s\" has type %s, %s is expected", file->path,
                   NAME_SHOWN, name, entry->dtype, pg_dtype_name(t->dtype));
  /* A strided tensor is filled at once, a contiguous one through the bounded buffer. */
  const int64_t chunk = whole ? elements : pg__min(elements, BUFFER / unit);
  if (!(buffer = malloc((size_t)(chunk * unit) + 1))) {
    status = pg_fail(ctx, PG_ENOMEM, "reading tensor \"%.*s\" needs %lld bytes of host memory",
                     NAME_SHOWN, name, (long long)(chunk * unit));
    goto fail;
  }
  status = 0;
  for (int64_t done = 0; done < elements; done += chunk) {
    const int64_t n = pg__min(chunk, elements - done);
    if (pg_context_cancelled(ctx)) {
      status = pg_fail(ctx, PG_ECANCELED, "reading '%s' was cancelled", file->path);
      goto fail;
    }
    if (t->dtype == PG_F32)
      PG_TRY(pg_safetensors_read_f32(file, entry, done, n, (float *)(void *)buffer));
    else if (integers)
      PG_TRY(read_i32(file, entry, done, n, (int32_t *)(void *)buffer));
    else
      PG_TRY(pg_safetensors_read(file, entry, done * unit, buffer, n * unit));
    if (whole)
      PG_TRY(pg_tensor_write(t, buffer));
    else
      PG_LAUNCH(ctx, upload, (char *)t->data + done * unit, buffer, (size_t)(n * unit));
  }
fail:
  free(buffer);
  return status;
}
