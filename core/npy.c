/* .npy: "\x93NUMPY", two bytes of version, the header's length (2 bytes in version 1.0, else 4,
 * little-endian), a Python dictionary such as
 *   {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
 * padded with blanks, then the elements without gaps.
 * Source: numpy.lib.format's documentation. */
#include "npy.h"
#include "files.h"
#include "internal.h"
#include "numbers.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, ".npy files are written little-endian");

#define HEADER_LIMIT 65536 /* far more than a description of four dimensions needs */
#define BUFFER ((int64_t)1 << 20)

/* The dictionary, as it is read. */
typedef struct reader {
  pg_context *context;
  const char *path, *at, *end;
  char descr[32];
  pg__number type;
  bool fortran;
  int ndim;
  int64_t shape[PG_MAX_DIMS];
} reader;

static int malformed(const reader *r, const char *what) {
  return pg_fail(r->context, PG_EFORMAT, "'%s' is not a .npy file that can be read: %s", r->path,
                 what);
}

static void skip_blanks(reader *r) {
  while (r->at < r->end && isspace((unsigned char)*r->at)) r->at++;
}

/* Take `c`, after blanks. */
static bool take(reader *r, char c) {
  skip_blanks(r);
  if (r->at == r->end || *r->at != c) return false;
  r->at++;
  return true;
}

static bool take_word(reader *r, const char *word) {
  const size_t length = strlen(word);
  skip_blanks(r);
  if ((size_t)(r->end - r->at) < length || memcmp(r->at, word, length) != 0) return false;
  r->at += length;
  return true;
}

/* A string in single or double quotes, without escapes. */
static bool take_string(reader *r, char *out, size_t size) {
  size_t n = 0;
  skip_blanks(r);
  if (r->at == r->end || (*r->at != '\'' && *r->at != '"')) return false;
  const char quote = *r->at++;
  for (; r->at < r->end && *r->at != quote; r->at++) {
    if (!isprint((unsigned char)*r->at) || *r->at == '\\' || n + 1 == size) return false;
    out[n++] = *r->at;
  }
  out[n] = '\0';
  return r->at++ < r->end;
}

/* "<f4": order, kind, bytes. */
static int parse_descr(reader *r) {
  static const struct {
    const char *name;
    pg__number type;
  } types[] = {{"f2", PG__F16},  {"f4", PG__F32}, {"f8", PG__F64}, {"V2", PG__BF16},
               {"b1", PG__BOOL}, {"i1", PG__I8},  {"u1", PG__U8},  {"i2", PG__I16},
               {"u2", PG__U16},  {"i4", PG__I32}, {"u4", PG__U32}, {"i8", PG__I64},
               {"u8", PG__U64}};
  const char *name = r->descr + 1;
  for (size_t i = 0; i < PG_COUNT(types) && strchr("<>|=", r->descr[0]) && r->descr[0]; i++)
    if (strcmp(name, types[i].name) == 0) r->type = types[i].type;
  if (r->type == PG__NONE)
    return pg_fail(r->context, PG_EUNSUPPORTED,
                   "'%s' holds elements of type '%s'; floats f2, f4, f8, bfloat16 (V2), integers "
                   "and bool can be read",
                   r->path, r->descr);
  if (r->descr[0] == '>' && pg__number_bytes(r->type) > 1)
    return pg_fail(r->context, PG_EUNSUPPORTED,
                   "'%s' is big-endian ('%s'); save it as '<%s': a.astype('<%s')", r->path,
                   r->descr, name, name);
  return 0;
}

/* (3, 4), (3,) or (). */
static int parse_shape(reader *r) {
  int64_t spread = 8; /* bytes at the widest type, with empty dimensions taken as 1 */
  if (!take(r, '(')) return malformed(r, "'shape' is not a tuple");
  for (;;) {
    int64_t size = 0;
    if (take(r, ')')) return 0;
    if (r->at == r->end || !isdigit((unsigned char)*r->at))
      return malformed(r, "'shape' holds something else than whole numbers");
    for (; r->at < r->end && isdigit((unsigned char)*r->at); r->at++)
      if (__builtin_mul_overflow(size, 10, &size) ||
          __builtin_add_overflow(size, *r->at - '0', &size))
        return malformed(r, "a size in 'shape' does not fit into 64 bits");
    if (r->at < r->end && *r->at == 'L') r->at++; /* as Python 2 wrote it */
    if (r->ndim == PG_MAX_DIMS)
      return pg_fail(r->context, PG_EUNSUPPORTED,
                     "'%s' has more than %d dimensions; at most %d are supported", r->path,
                     PG_MAX_DIMS, PG_MAX_DIMS);
    if (__builtin_mul_overflow(spread, pg__max(size, 1), &spread))
      return malformed(r, "'shape' stands for more than 2^63 bytes");
    r->shape[r->ndim++] = size;
    if (take(r, ',')) continue;
    if (r->ndim == 1 || !take(r, ')')) return malformed(r, "'shape' is not a tuple");
    return 0;
  }
}

static int parse_header(reader *r) {
  bool descr = false, order = false, shape = false;
  char key[32];
  int status = 0;
  if (!take(r, '{')) return malformed(r, "its header is not a dictionary");
  while (!take(r, '}')) {
    if (!take_string(r, key, sizeof key) || !take(r, ':'))
      return malformed(r, "its header is not a dictionary");
    if (strcmp(key, "descr") == 0 && !descr) {
      descr = true;
      if (!take_string(r, r->descr, sizeof r->descr))
        return malformed(r, "'descr' is not one simple type");
    } else if (strcmp(key, "fortran_order") == 0 && !order) {
      order = true;
      r->fortran = take_word(r, "True");
      if (!r->fortran && !take_word(r, "False"))
        return malformed(r, "'fortran_order' is neither True nor False");
    } else if (strcmp(key, "shape") == 0 && !shape) {
      shape = true;
      PG_TRY(parse_shape(r));
    } else {
      return malformed(r, "its header has a key that is unknown or given twice");
    }
    if (take(r, ',')) continue;
    if (!take(r, '}')) return malformed(r, "its header is not a dictionary");
    break;
  }
  skip_blanks(r);
  if (r->at != r->end) return malformed(r, "something follows the dictionary in its header");
  if (!descr || !order || !shape)
    return malformed(r, "its header lacks 'descr', 'fortran_order' or 'shape'");
  status = parse_descr(r);
fail:
  return status;
}

/* Magic and header of the file; *start is where the elements begin. `header` receives the text. */
static int read_header(reader *r, int fd, int64_t bytes, char **header, int64_t *start) {
  unsigned char head[12] = {0};
  int status;
  const char *short_text = "it is shorter than its header";
  if (bytes < 10) return malformed(r, short_text);
  PG_TRY(pg_file_pread(r->context, fd, r->path, 0, head, 10));
  if (memcmp(head, "\x93NUMPY", 6) != 0)
    return malformed(r, "it does not begin with \"\\x93NUMPY\"");
  if (head[6] < 1 || head[6] > 3 || head[7] != 0)
    return pg_fail(r->context, PG_EUNSUPPORTED,
                   "'%s' has format version %d.%d; 1.0, 2.0 and 3.0 can be read", r->path, head[6],
                   head[7]);
  int64_t length = head[8] | head[9] << 8;
  *start = 10;
  if (head[6] > 1) {
    if (bytes < 12) return malformed(r, short_text);
    PG_TRY(pg_file_pread(r->context, fd, r->path, 10, head + 10, 2));
    length |= (int64_t)head[10] << 16 | (int64_t)head[11] << 24;
    *start = 12;
  }
  if (length > HEADER_LIMIT) return malformed(r, "its header is longer than 64 KiB");
  if (length > bytes - *start) return malformed(r, short_text);
  if (!(*header = malloc((size_t)length + 1)))
    return pg_fail(r->context, PG_ENOMEM, "the header of '%s' does not fit in memory", r->path);
  PG_TRY(pg_file_pread(r->context, fd, r->path, *start, *header, (size_t)length));
  *start += length;
  r->at = *header;
  r->end = *header + length;
  status = parse_header(r);
fail:
  return status;
}

/* All elements, converted, in the file's order. */
static int read_elements(reader *r, int fd, int64_t start, pg_tensor *t) {
  pg_context *ctx = r->context;
  const int64_t elements = pg_tensor_elements(t), unit = pg__number_bytes(r->type);
  const int64_t chunk = pg__min(BUFFER / 8, elements);
  const bool integers = pg__number_is_integer(r->type);
  int status = 0;
  char *raw = malloc((size_t)(chunk * unit) + 1), *numbers = malloc((size_t)chunk * 4 + 1);
  if (!raw || !numbers) {
    status = pg_fail(ctx, PG_ENOMEM, "reading '%s' needs %lld bytes of host memory", r->path,
                     (long long)(chunk * (unit + 4)));
    goto fail;
  }
  for (int64_t done = 0; done < elements; done += chunk) {
    const int64_t n = pg__min(chunk, elements - done);
    int64_t bad = 0, place = -1;
    if (pg_context_cancelled(ctx)) {
      status = pg_fail(ctx, PG_ECANCELED, "reading '%s' was cancelled", r->path);
      goto fail;
    }
    PG_TRY(pg_file_pread(ctx, fd, r->path, start + done * unit, raw, (size_t)(n * unit)));
    if (integers)
      place = pg__numbers_i32(r->type, raw, n, (int32_t *)(void *)numbers, &bad);
    else
      pg__numbers_f32(r->type, raw, n, (float *)(void *)numbers);
    if (place >= 0) {
      status = r->type == PG__U64 && bad < 0
                   ? pg_fail(ctx, PG_EUNSUPPORTED, "'%s': element %lld is %llu, outside 32 bits",
                             r->path, (long long)(done + place), (unsigned long long)bad)
                   : pg_fail(ctx, PG_EUNSUPPORTED, "'%s': element %lld is %lld, outside 32 bits",
                             r->path, (long long)(done + place), (long long)bad);
      goto fail;
    }
    PG_LAUNCH(ctx, upload, (char *)t->data + done * 4, numbers, (size_t)n * 4);
  }
fail:
  free(raw);
  free(numbers);
  return status;
}

/* A tensor of reversed sizes, turned around: the array that Fortran order meant. */
static int turn_around(pg_tensor **t) {
  const pg_tensor *from = *t;
  pg_tensor *view = NULL, *turned = NULL;
  int64_t shape[PG_MAX_DIMS] = {0}, stride[PG_MAX_DIMS] = {0};
  int status;
  for (int i = 0; i < from->ndim; i++) {
    shape[i] = from->shape[from->ndim - 1 - i];
    stride[i] = from->stride[from->ndim - 1 - i];
  }
  PG_TRY(pg_tensor_view(from, 0, from->ndim, shape, stride, &view));
  PG_TRY(pg_tensor_clone(view, &turned));
  pg_tensor_free(*t);
  *t = turned;
fail:
  pg_tensor_free(view);
  return status;
}

int pg_npy_read(pg_context *ctx, const char *path, pg_tensor **out) {
  reader r = {.context = ctx, .path = path};
  pg_tensor *t = NULL;
  char *header = NULL;
  int fd = -1, status;
  int64_t bytes, start = 0, need = 0, shape[PG_MAX_DIMS] = {0};

  *out = NULL;
  PG_TRY(pg__open_regular(ctx, path, &fd, &bytes));
  PG_TRY(read_header(&r, fd, bytes, &header, &start));
  need = pg__number_bytes(r.type); /* parse_shape has checked the product */
  for (int i = 0; i < r.ndim; i++) need *= r.shape[i];
  if (need != bytes - start) {
    status = pg_fail(ctx, PG_EFORMAT,
                     "'%s' %s: its header stands for %lld bytes of elements, %lld follow", path,
                     need > bytes - start ? "is truncated" : "does not end with its array",
                     (long long)need, (long long)(bytes - start));
    goto fail;
  }
  for (int i = 0; i < r.ndim; i++) shape[i] = r.shape[r.fortran ? r.ndim - 1 - i : i];
  PG_TRY(
      pg__tensor_new_raw(ctx, pg__number_is_integer(r.type) ? PG_I32 : PG_F32, r.ndim, shape, &t));
  PG_TRY(read_elements(&r, fd, start, t));
  if (r.fortran && r.ndim > 1) PG_TRY(turn_around(&t));
  *out = t;
  t = NULL;
fail:
  if (fd >= 0) close(fd);
  free(header);
  pg_tensor_free(t);
  return status;
}

/* ---- writing ------------------------------------------------------------------------------- */
/* Magic, version, length and dictionary: a multiple of 64 bytes, as NumPy aligns it. */
static size_t make_header(const pg_tensor *t, char text[256]) {
  const char *descr = t->dtype == PG_F32   ? "<f4"
                      : t->dtype == PG_F64 ? "<f8"
                      : t->dtype == PG_I32 ? "<i4"
                                           : "<V2";
  size_t n = 10;
  n += (size_t)sprintf(text + n, "{'descr': '%s', 'fortran_order': False, 'shape': (", descr);
  for (int i = 0; i < t->ndim; i++)
    n += (size_t)sprintf(text + n, i ? " %lld," : "%lld,", (long long)t->shape[i]);
  if (t->ndim > 1) n--; /* one element keeps its comma */
  n += (size_t)sprintf(text + n, "), }");
  while ((n + 1) % 64) text[n++] = ' ';
  text[n++] = '\n';
  memcpy(text, "\x93NUMPY\x01\x00", 8);
  text[8] = (char)((n - 10) & 255);
  text[9] = (char)((n - 10) >> 8);
  return n;
}

int pg_npy_write(pg_context *ctx, const char *path, const pg_tensor *t) {
  const int64_t bytes = pg_tensor_elements(t) * (int64_t)pg_dtype_size(t->dtype);
  pg_tensor *clone = NULL;
  char header[256], *buffer = malloc((size_t)BUFFER);
  bool created = false;
  struct stat info;
  int fd = -1, status;

  if (!buffer) {
    status =
        pg_fail(ctx, PG_ENOMEM, "writing '%s' needs %lld bytes of memory", path, (long long)BUFFER);
    goto fail;
  }
  if (!pg_tensor_contiguous(t)) {
    PG_TRY(pg_tensor_clone(t, &clone));
    t = clone;
  }
  PG_TRY(pg__open(ctx, path, O_WRONLY | O_CREAT | O_TRUNC, &fd));
  created = true;
  PG_TRY(pg_file_write_all(ctx, fd, path, header, make_header(t, header)));
  for (int64_t done = 0; done < bytes; done += BUFFER) {
    const int64_t n = pg__min(BUFFER, bytes - done);
    if (pg_context_cancelled(ctx)) {
      status = pg_fail(ctx, PG_ECANCELED, "writing '%s' was cancelled", path);
      goto fail;
    }
    PG_LAUNCH(ctx, download, buffer, (const char *)t->data + done, (size_t)n);
    PG_TRY(pg_file_write_all(ctx, fd, path, buffer, (size_t)n));
  }
  PG_TRY(pg__sync(ctx, fd, path));
  status = pg__close(ctx, fd, path);
  fd = -1;
fail:
  if (fd >= 0) close(fd);
  if (status < 0 && created && stat(path, &info) == 0 && S_ISREG(info.st_mode)) unlink(path);
  pg_tensor_free(clone);
  free(buffer);
  return status;
}
