/* Reading the tensors of an opened safetensors file: raw, as fp32, as 32-bit integers, into a
 * tensor through one bounded buffer. */
#include "numbers.h"
#include "safetensors_internal.h"

#include <stdlib.h>
#include <string.h>

/* ---- reading --------------------------------------------------------------------------- */
int pg_safetensors_read(pg_safetensors *file, const pg_safetensors_entry *entry, int64_t offset,
                        void *out, int64_t bytes) {
  if (offset < 0 || bytes < 0 || offset > entry->bytes || bytes > entry->bytes - offset)
    return pg_fail(file->context, PG_EINVAL,
                   "tensor \"%.*s\": %lld bytes from byte %lld were asked for; it has %lld",
                   PG__NAME_SHOWN, entry->name, (long long)bytes, (long long)offset,
                   (long long)entry->bytes);
  return pg_file_pread(file->context, file->members[entry->member].fd, pg__member_path(file, entry),
                       entry->offset + offset, out, (size_t)bytes);
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
                   pg__member_path(file, entry), PG__NAME_SHOWN, entry->name, entry->dtype);
  const int64_t unit = pg__number_bytes(type);
  const int64_t elements = entry->bytes / unit;
  if (first < 0 || count < 0 || first > elements || count > elements - first)
    return pg_fail(file->context, PG_EINVAL,
                   "tensor \"%.*s\": %lld elements from %lld were asked for; it has %lld",
                   PG__NAME_SHOWN, entry->name, (long long)count, (long long)first,
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
                     "'%s': tensor \"%.*s\": element %lld does not fit into 32 bits",
                     pg__member_path(file, entry), PG__NAME_SHOWN, entry->name,
                     (long long)(first + done + place));
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
    return pg_fail(ctx, PG_ENOENT, "'%s' has no tensor \"%.*s\"", file->path, PG__NAME_SHOWN, name);
  for (int i = 0; i < entry->ndim; i++) there *= entry->shape[i];
  if (entry->bytes == 0) there = 0;
  if (there != elements)
    return pg_fail(ctx, PG_EFORMAT, "'%s': tensor \"%.*s\" has %lld elements, %lld are expected",
                   pg__member_path(file, entry), PG__NAME_SHOWN, name, (long long)there,
                   (long long)elements);
  const bool integers = t->dtype == PG_I32 && pg__number_is_integer(pg__number_named(entry->dtype));
  if (t->dtype != PG_F32 && !integers && strcmp(entry->dtype, pg_dtype_name(t->dtype)) != 0)
    return pg_fail(ctx, PG_EFORMAT, "'%s': tensor \"%.*s\" has type %s, %s is expected",
                   pg__member_path(file, entry), PG__NAME_SHOWN, name, entry->dtype,
                   pg_dtype_name(t->dtype));
  /* A strided tensor is filled at once, a contiguous one through the bounded buffer. */
  const int64_t chunk = whole ? elements : pg__min(elements, BUFFER / unit);
  if (!(buffer = malloc((size_t)(chunk * unit) + 1))) {
    status = pg_fail(ctx, PG_ENOMEM, "reading tensor \"%.*s\" needs %lld bytes of host memory",
                     PG__NAME_SHOWN, name, (long long)(chunk * unit));
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
