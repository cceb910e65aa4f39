/* Writing safetensors: the header first, padded with blanks so that the data begins at a multiple
 * of 8 bytes, then every tensor's bytes in the given order through one bounded buffer. */
#include "files.h"
#include "internal.h"
#include "json.h"
#include "safetensors.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BUFFER ((int64_t)1 << 20)

static int64_t item_bytes(const pg_named_tensor *item) {
  if (item->make) {
    int64_t elements = 1;
    for (int i = 0; i < item->ndim; i++) elements *= item->shape[i];
    return elements * (int64_t)pg_dtype_size(item->dtype);
  }
  if (!item->tensor) return item->ones * 4;
  return pg_tensor_elements(item->tensor) * (int64_t)pg_dtype_size(item->tensor->dtype);
}

/* {"dtype":, "shape":, "data_offsets":} of one tensor whose data start at `begin`. */
static json_t *describe(const pg_named_tensor *item, int64_t begin) {
  const pg_tensor *t = item->tensor;
  const int64_t *dims = item->make ? item->shape : t ? t->shape : &item->ones;
  const int ndim = item->make ? item->ndim : t ? t->ndim : 1;
  const pg_dtype dtype = item->make ? item->dtype : t ? t->dtype : PG_F32;
  json_t *shape = json_array();
  for (int i = 0; i < ndim; i++) json_array_append_new(shape, json_integer(dims[i]));
  return json_pack("{s:s, s:o, s:[I, I]}", "dtype", pg_dtype_name(dtype), "shape", shape,
                   "data_offsets", (json_int_t)begin, (json_int_t)(begin + item_bytes(item)));
}

/* The 8-byte length and the header as one malloc'ed text of *size bytes. */
static int make_header(pg_context *ctx, const pg_named_tensor *tensors, size_t count,
                       const char *const *metadata, char **out, size_t *size) {
  int status = 0;
  int64_t begin = 0;
  char *text = NULL;
  json_t *header = json_object(), *strings = NULL;

  *out = NULL;
  if (metadata && metadata[0]) {
    strings = json_object();
    for (size_t i = 0; metadata[i] && metadata[i + 1]; i += 2)
      if (json_object_set_new(strings, metadata[i], json_string(metadata[i + 1])) < 0) {
        status = pg_fail(ctx, PG_EINVAL, "metadata \"%.200s\" is not UTF-8 text", metadata[i]);
        goto fail;
      }
    json_object_set(header, "__metadata__", strings);
  }
  for (size_t i = 0; i < count; i++) {
    const char *name = tensors[i].name;
    if (strcmp(name, "__metadata__") == 0 || json_object_get(header, name)) {
      status = pg_fail(ctx, PG_EINVAL, "tensor name \"%.200s\" is %s", name,
                       strcmp(name, "__metadata__") == 0 ? "reserved" : "given twice");
      goto fail;
    }
    if (!tensors[i].tensor && !tensors[i].make && tensors[i].ones < 0) {
      status = pg_fail(ctx, PG_EINVAL, "tensor \"%.200s\" has %lld ones; 0 or more are allowed",
                       name, (long long)tensors[i].ones);
      goto fail;
    }
    if (json_object_set_new(header, name, describe(&tensors[i], begin)) < 0) {
      status = pg_fail(ctx, PG_EINVAL, "tensor name \"%.200s\" is not UTF-8 text", name);
      goto fail;
    }
    begin += item_bytes(&tensors[i]);
  }
  text = pg__json_print(header, 0);
  const size_t length = text ? strlen(text) : 0;
  const uint64_t padded = (length + 7) & ~(size_t)7;
  if (!text || !(*out = malloc(8 + padded))) {
    status = pg_fail(ctx, PG_ENOMEM, "a safetensors header of %zu tensors does not fit in memory",
                     count);
    goto fail;
  }
  memcpy(*out, &padded, 8);
  memcpy(*out + 8, text, length);
  memset(*out + 8 + length, ' ', padded - length);
  *size = 8 + padded;
fail:
  free(text);
  json_decref(strings);
  json_decref(header);
  return status;
}

static int write_item(pg_context *ctx, int fd, const char *path, const pg_named_tensor *item,
                      char *buffer) {
  const int64_t bytes = item_bytes(item);
  const pg_tensor *t = item->tensor;
  pg_tensor *clone = NULL;
  int status = 0;
  if (item->make) {
    PG_TRY(item->make(item, &clone));
    t = clone;
  } else if (t && !pg_tensor_contiguous(t)) {
    PG_TRY(pg_tensor_clone(t, &clone));
    t = clone;
  }
  for (int64_t done = 0; done < bytes; done += BUFFER) {
    const int64_t n = pg__min(BUFFER, bytes - done);
    if (pg_context_cancelled(ctx)) {
      status = pg_fail(ctx, PG_ECANCELED, "writing '%s' was cancelled", path);
      goto fail;
    }
    if (t)
      PG_LAUNCH(ctx, download, buffer, (const char *)t->data + done, (size_t)n);
    else
      for (int64_t i = 0; i < n / 4; i++) ((float *)(void *)buffer)[i] = 1;
    PG_TRY(pg_file_write_all(ctx, fd, path, buffer, (size_t)n));
  }
fail:
  pg_tensor_free(clone);
  return status;
}

int pg_safetensors_write(pg_context *ctx, const char *path, const pg_named_tensor *tensors,
                         size_t count, const char *const *metadata) {
  int fd = -1, status;
  bool created = false;
  struct stat info;
  size_t size = 0;
  char *header = NULL, *buffer = malloc((size_t)BUFFER);

  if (!buffer) {
    status =
        pg_fail(ctx, PG_ENOMEM, "writing '%s' needs %lld bytes of memory", path, (long long)BUFFER);
    goto fail;
  }
  PG_TRY(make_header(ctx, tensors, count, metadata, &header, &size));
  PG_TRY(pg__open(ctx, path, O_WRONLY | O_CREAT | O_TRUNC, &fd));
  created = true;
  PG_TRY(pg_file_write_all(ctx, fd, path, header, size));
  for (size_t i = 0; i < count; i++) PG_TRY(write_item(ctx, fd, path, &tensors[i], buffer));
  PG_TRY(pg__sync(ctx, fd, path));
  status = pg__close(ctx, fd, path);
  fd = -1;
fail:
  if (fd >= 0) close(fd);
  /* The path may name a device, which stays. */
  if (status < 0 && created && stat(path, &info) == 0 && S_ISREG(info.st_mode)) unlink(path);
  free(header);
  free(buffer);
  return status;
}
