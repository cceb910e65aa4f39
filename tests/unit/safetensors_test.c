/* Safetensors: what is written reads back and is laid out as the format says; types are converted;
 * every lie a header can tell is refused (CASES 9) with little memory. */
#include "core/files.h"
#include "core/safetensors.h"
#include "temporary.h"
#include "unit.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

static pg_context *ctx;

/* A file of this header length field, header text, and data. */
static const char *make_file(uint64_t length, const char *header, size_t header_size,
                             const void *data, size_t size) {
  const char *path = temporary_path("made.safetensors");
  FILE *f = fopen(path, "wb");
  fwrite(&length, 1, 8, f);
  fwrite(header, 1, header_size, f);
  if (size) fwrite(data, 1, size, f);
  fclose(f);
  return path;
}
static const char *make(const char *header, const void *data, size_t size) {
  return make_file(strlen(header), header, strlen(header), data, size);
}

static pg_safetensors *open_made(const char *header, const void *data, size_t size) {
  pg_safetensors *file;
  CHECK(pg_safetensors_open(ctx, make(header, data, size), &file) == 0, "%s",
        pg_context_message(ctx));
  return file;
}

static long peak_kilobytes(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

TEST(header_lengths_are_checked) {
  const long before = peak_kilobytes();
  pg_safetensors *file;
  for (size_t size = 0; size <= 7; size++) {
    put_file(temporary_path("short"), "\1\0\0\0\0\0\0\0", size);
    CHECK(pg_safetensors_open(ctx, temporary_path("short"), &file) == PG_EFORMAT && !file,
          "%zu bytes", size);
    CHECK(strstr(pg_context_message(ctx), "too short"), "%s", pg_context_message(ctx));
  }
  static const uint64_t lengths[] = {
      0,         1,         15,         INT64_MAX,      UINT64_MAX,
      INT64_MIN, 100000001, UINT32_MAX, UINT64_MAX - 7, 16 + 8 - 7 /* file size - 7 */};
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
    for (size_t header = 0; header <= 16; header += 16) {
      const char *path = make_file(lengths[i], "{\"a\":{}}        ", header, NULL, 0);
      CHECK(pg_safetensors_open(ctx, path, &file) == PG_EFORMAT && !file, "length %llu, %zu bytes",
            (unsigned long long)lengths[i], 8 + header);
    }
  CHECK(pg_safetensors_open(ctx, temporary_path("none"), &file) == PG_ENOENT && !file);
  CHECK(pg_safetensors_open(ctx, temporary_folder, &file) == PG_ENOENT && !file);
  CHECK(strstr(pg_context_message(ctx), "expected model.safetensors"), "%s",
        pg_context_message(ctx));
  CHECK(peak_kilobytes() - before < 4096, "%ld kB more", peak_kilobytes() - before);
}

TEST(false_headers_are_refused) {
  static const struct {
    const char *header, *message;
  } cases[] = {
      /* 8 bytes of data follow each. */
      {"[]", "not a JSON object"},
      {"{\"a\":1}", "not an object"},
      {"{", "header, line 1"},
      {"{}", "end at byte"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", "data_offsets"},
      {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", "\"dtype\" is missing"},
      {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", "\"shape\" is missing"},
      {"{\"a\":{\"dtype\":\"F99\",\"shape\":[2],\"data_offsets\":[0,8]}}", "F99"},
      {"{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", "\"dtype\""},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.0],\"data_offsets\":[0,8]}}",
       "non-negative integer"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", "non-negative integer"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":\"2\",\"data_offsets\":[0,8]}}", "\"shape\""},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,8]}}", "8 dim"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", "need 12 bytes"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", "need 4 bytes"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,12]}}", "leave the 8 bytes"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", "leave the 8 bytes"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}", "leave the 8 bytes"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]}}", "data_offsets"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0.0,8.0]}}", "data_offsets"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296,4294967296],"
       "\"data_offsets\":[0,8]}}",
       "2^63"},
      /* 2^62 elements of 8 bytes: the product is a multiple of 2^64. */
      {"{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952,8],\"data_offsets\":[0,0]}}",
       "2^63"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[9223372036854775808],\"data_offsets\":[0,8]}}",
       "line 1"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", "end at byte"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", "do not begin"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
       "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
       "overlap"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
       "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
       "overlap"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
       "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
       "uplicate"},
      {"{\"__metadata__\":{\"x\":1},\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"
       "}",
       "not a string"},
      {"{\"__metadata__\":[],\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
       "not an object"},
  };
  const char data[8] = {0};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    pg_safetensors *file = (pg_safetensors *)&file;
    CHECK(pg_safetensors_open(ctx, make(cases[i].header, data, 8), &file) == PG_EFORMAT && !file,
          "case %zu", i);
    CHECK(strstr(pg_context_message(ctx), cases[i].message), "case %zu: %s", i,
          pg_context_message(ctx));
    CHECK(strstr(pg_context_message(ctx), "made.safetensors"), "case %zu names no file", i);
  }
}

TEST(well_formed_headers) {
  const float data[3] = {1, 2, 3};
  pg_safetensors *file = open_made(
      "{\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]},"
      "\"__metadata__\":{\"format\":\"pt\"},"
      "\"empty\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,0,9],\"data_offsets\":[4,4]},"
      "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4],\"more\":1}}   ",
      data, 12);
  CHECK(pg_safetensors_count(file) == 3);
  CHECK(strcmp(pg_safetensors_at(file, 0)->name, "b") == 0, "the header's order");
  CHECK(pg_safetensors_at(file, 3) == NULL && pg_safetensors_find(file, "c") == NULL);
  const pg_safetensors_entry *a = pg_safetensors_find(file, "a");
  CHECK(a && a->ndim == 0 && a->bytes == 4 && pg_safetensors_find(file, "empty")->bytes == 0);
  float got[2] = {0};
  CHECK(pg_safetensors_read_f32(file, a, 0, 1, got) == 0 && got[0] == 1);
  const pg_safetensors_entry *b = pg_safetensors_find(file, "b");
  CHECK(pg_safetensors_read_f32(file, b, 1, 1, got) == 0 && got[0] == 3);
  static const int64_t bad[][2] = {{0, 3},  {2, 1},         {-1, 1},       {3, 0},
                                   {0, -1}, {1, INT64_MAX}, {INT64_MAX, 1}};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    CHECK(pg_safetensors_read_f32(file, b, bad[i][0], bad[i][1], got) == PG_EINVAL, "case %zu", i);
  }
  static const int64_t bytes[][2] = {{-1, 1}, {0, 9},         {9, 0},        {5, 4},
                                     {0, -1}, {1, INT64_MAX}, {INT64_MAX, 1}};
  for (size_t i = 0; i < sizeof bytes / sizeof bytes[0]; i++)
    CHECK(pg_safetensors_read(file, b, bytes[i][0], got, bytes[i][1]) == PG_EINVAL, "case %zu", i);
  CHECK(pg_safetensors_read_f32(file, b, 2, 0, got) == 0);
  CHECK(strcmp(pg_safetensors_metadata(file, "format"), "pt") == 0);
  CHECK(pg_safetensors_metadata(file, "other") == NULL);
  /* The file shrinks while it is open. */
  CHECK(truncate(temporary_path("made.safetensors"), 100) == 0);
  CHECK(pg_safetensors_read_f32(file, b, 0, 2, got) == PG_EFORMAT);
  CHECK(strstr(pg_context_message(ctx), "truncated"), "%s", pg_context_message(ctx));
  pg_safetensors_close(file);
  pg_safetensors_close(NULL);
  file = open_made("{}", NULL, 0);
  CHECK(pg_safetensors_count(file) == 0);
  pg_safetensors_close(file);
}

TEST(types_are_converted) {
  char header[300];
  float got[65536];
  /* Every half: value by the definition, sign (1 + f/1024) 2^(e-15), f 2^-24 below. */
  static uint16_t halves[65536];
  for (int i = 0; i < 65536; i++) halves[i] = (uint16_t)i;
  snprintf(header, sizeof header,
           "{\"h\":{\"dtype\":\"F16\",\"shape\":[256,256],\"data_offsets\":[0,131072]}}");
  pg_safetensors *file = open_made(header, halves, sizeof halves);
  CHECK(pg_safetensors_read_f32(file, pg_safetensors_at(file, 0), 0, 65536, got) == 0);
  for (int i = 0; i < 65536; i++) {
    const int e = i >> 10 & 31, f = i & 1023;
    double want = e == 31 ? (f ? NAN : INFINITY)
                  : e     ? ldexp(1 + f / 1024.0, e - 15)
                          : ldexp(f, -24);
    if (i >> 15) want = -want;
    CHECK(isnan(want) ? isnan(got[i]) : got[i] == want, "half %04x: %g", i, got[i]);
    CHECK(!!signbit(got[i]) == i >> 15, "sign of half %04x", i);
  }
  /* The same bits as BF16 are the upper halves of fp32 numbers. */
  memcpy(strstr(header, "F16"), "I16", 3);
  pg_safetensors_close(file);
  file = open_made(header, halves, sizeof halves);
  CHECK(pg_safetensors_read_f32(file, pg_safetensors_at(file, 0), 0, 1, got) == PG_EFORMAT);
  CHECK(strstr(pg_context_message(ctx), "I16"), "%s", pg_context_message(ctx));
  pg_safetensors_close(file);
  snprintf(header, sizeof header,
           "{\"h\":{\"dtype\":\"BF16\",\"shape\":[65536],\"data_offsets\":[0,131072]}}");
  file = open_made(header, halves, sizeof halves);
  CHECK(pg_safetensors_read_f32(file, pg_safetensors_at(file, 0), 1, 65535, got) == 0);
  for (uint32_t i = 1; i < 65536; i++) {
    uint32_t bits;
    memcpy(&bits, &got[i - 1], 4);
    CHECK(bits == i << 16, "bf16 %04x: %08x", i, bits);
  }
  pg_safetensors_close(file);
  const double wide[6] = {0.1, -1e300, 1e-50, 3, NAN, 16777217};
  file = open_made("{\"d\":{\"dtype\":\"F64\",\"shape\":[6],\"data_offsets\":[0,48]}}", wide, 48);
  CHECK(pg_safetensors_read_f32(file, pg_safetensors_at(file, 0), 0, 6, got) == 0);
  CHECK(got[0] == 0.1f && got[1] == -INFINITY && got[2] == 0 && got[3] == 3 && isnan(got[4]) &&
        got[5] == 16777216);
  pg_safetensors_close(file);
}

static pg_tensor *counted(pg_dtype dtype, int64_t rows, int64_t columns) {
  const int64_t shape[2] = {rows, columns};
  const size_t bytes = (size_t)(rows * columns) * pg_dtype_size(dtype);
  pg_tensor *t;
  unsigned char *data = malloc(bytes + 1);
  for (size_t i = 0; i < bytes; i++) data[i] = (unsigned char)(i * 131 >> 3 & 0x3f);
  if (pg_tensor_new(ctx, dtype, 2, shape, &t) < 0 || pg_tensor_write(t, data) < 0) abort();
  free(data);
  return t;
}

static bool equal(const pg_tensor *a, const pg_tensor *b) {
  const size_t bytes = (size_t)pg_tensor_elements(a) * pg_dtype_size(a->dtype);
  char *x = malloc(bytes), *y = malloc(bytes);
  const bool same =
      pg_tensor_read(a, x) == 0 && pg_tensor_read(b, y) == 0 && memcmp(x, y, bytes) == 0;
  free(x);
  free(y);
  return same;
}

TEST(written_files_read_back) {
  const char *path = temporary_path("written.safetensors");
  pg_tensor *big = counted(PG_F32, 700, 500), *half = counted(PG_BF16, 3, 5);
  pg_tensor *flags = counted(PG_I32, 1, 3), *wide = counted(PG_F64, 2, 2), *none, *flip, *scalar;
  const int64_t shape[2] = {500, 700}, stride[2] = {1, 500}, zero[2] = {0, 4};
  CHECK(pg_tensor_view(big, 0, 2, shape, stride, &flip) == 0);
  CHECK(pg_tensor_new(ctx, PG_F32, 2, zero, &none) == 0);
  CHECK(pg_tensor_new(ctx, PG_F32, 0, NULL, &scalar) == 0 &&
        pg_tensor_write(scalar, &(float){2.5f}) == 0);
  const pg_named_tensor tensors[] = {
      {.name = "zebra", .tensor = big},   {.name = "a\"b\u20ac", .tensor = half},
      {.name = "flags", .tensor = flags}, {.name = "gain", .ones = 300000},
      {.name = "wide", .tensor = wide},   {.name = "none", .tensor = none},
      {.name = "flip", .tensor = flip},   {.name = "scalar", .tensor = scalar}};
  const size_t count = sizeof tensors / sizeof tensors[0];
  const char *const metadata[] = {"format", "pt", "note", "x", NULL};
  const int64_t live = pg_context_live_tensors(ctx);
  CHECK(pg_safetensors_write(ctx, path, tensors, count, metadata) == 0, "%s",
        pg_context_message(ctx));
  CHECK(pg_context_live_tensors(ctx) == live);
  pg_safetensors *file;
  CHECK(pg_safetensors_open(ctx, path, &file) == 0, "%s", pg_context_message(ctx));
  CHECK(pg_safetensors_count(file) == count);
  int64_t at = -1;
  for (size_t i = 0; i < count; i++) {
    const pg_safetensors_entry *e = pg_safetensors_at(file, i);
    const pg_tensor *t = tensors[i].tensor;
    CHECK(strcmp(e->name, tensors[i].name) == 0, "the given order");
    if (i == 0)
      CHECK(e->offset % 8 == 0, "data begin at byte %lld", (long long)e->offset);
    else
      CHECK(e->offset == at, "tensor %zu", i);
    at = e->offset + e->bytes;
    if (!t) {
      CHECK(e->ndim == 1 && e->shape[0] == 300000 && strcmp(e->dtype, "F32") == 0);
      float *ones = malloc(300000 * sizeof *ones);
      CHECK(pg_safetensors_read_f32(file, e, 0, 300000, ones) == 0);
      for (int k = 0; k < 300000; k++) CHECK(ones[k] == 1, "one %d", k);
      free(ones);
      continue;
    }
    CHECK(e->ndim == t->ndim && strcmp(e->dtype, pg_dtype_name(t->dtype)) == 0);
    char *want = malloc((size_t)e->bytes + 1), *got = malloc((size_t)e->bytes + 1);
    CHECK(pg_tensor_read(t, want) == 0 && pg_safetensors_read(file, e, 0, got, e->bytes) == 0);
    CHECK(memcmp(want, got, (size_t)e->bytes) == 0, "tensor %zu", i);
    /* And into a tensor on the device. */
    pg_tensor *back;
    CHECK(pg_tensor_new(ctx, t->dtype, t->ndim, t->shape, &back) == 0);
    CHECK(pg_safetensors_read_tensor(file, e->name, back) == 0, "%s", pg_context_message(ctx));
    CHECK(pg_tensor_read(back, got) == 0 && memcmp(want, got, (size_t)e->bytes) == 0);
    pg_tensor_free(back);
    free(want);
    free(got);
  }
  struct stat info;
  stat(path, &info);
  CHECK(at == info.st_size, "nothing after the last tensor");
  CHECK(strcmp(pg_safetensors_metadata(file, "note"), "x") == 0);
  /* Into a strided tensor, with conversion, and refusals. */
  pg_tensor *target = counted(PG_F32, 700, 500), *view, *one = counted(PG_F32, 1, 1);
  CHECK(pg_tensor_view(target, 0, 2, shape, stride, &view) == 0);
  CHECK(pg_safetensors_read_tensor(file, "flip", view) == 0);
  CHECK(equal(target, big), "flipped twice");
  CHECK(pg_safetensors_read_tensor(file, "zebra", one) == PG_EFORMAT);
  CHECK(strstr(pg_context_message(ctx), "350000") && strstr(pg_context_message(ctx), "zebra"), "%s",
        pg_context_message(ctx));
  CHECK(pg_safetensors_read_tensor(file, "missing", one) == PG_ENOENT);
  CHECK(pg_safetensors_read_tensor(file, "flags", half) == PG_EFORMAT);
  pg_tensor *flags_like = counted(PG_F32, 1, 3), *half_f32 = counted(PG_F32, 5, 3);
  CHECK(pg_safetensors_read_tensor(file, "flags", flags_like) == PG_EFORMAT,
        "I32 is not converted");
  CHECK(pg_safetensors_read_tensor(file, "a\"b\u20ac", half_f32) == 0, "same element count");
  pg_context_cancel(ctx);
  CHECK(pg_safetensors_read_tensor(file, "zebra", target) == PG_ECANCELED);
  pg_context_resume(ctx);
  pg_safetensors_close(file);
  pg_tensor *const all[] = {big,    half,   flags, wide, none,       flip,
                            scalar, target, view,  one,  flags_like, half_f32};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) pg_tensor_free(all[i]);
}

TEST(refused_writes_leave_no_file) {
  const char *path = temporary_path("refused.safetensors");
  pg_tensor *t = counted(PG_F32, 600, 1000);
  const pg_named_tensor twice[] = {{.name = "a", .tensor = t}, {.name = "a", .tensor = t}};
  const pg_named_tensor reserved[] = {{.name = "__metadata__", .tensor = t}};
  const pg_named_tensor bytes[] = {{.name = "\xff", .tensor = t}},
                        few[] = {{.name = "a", .ones = -1}};
  CHECK(pg_safetensors_write(ctx, path, twice, 2, NULL) == PG_EINVAL);
  CHECK(strstr(pg_context_message(ctx), "given twice"), "%s", pg_context_message(ctx));
  CHECK(pg_safetensors_write(ctx, path, reserved, 1, NULL) == PG_EINVAL);
  CHECK(pg_safetensors_write(ctx, path, bytes, 1, NULL) == PG_EINVAL);
  CHECK(pg_safetensors_write(ctx, path, few, 1, NULL) == PG_EINVAL);
  const char *const metadata[] = {"k", "\xff", NULL};
  CHECK(pg_safetensors_write(ctx, path, twice, 1, metadata) == PG_EINVAL);
  CHECK(symlink("/dev/full", path) == 0);
  CHECK(pg_safetensors_write(ctx, path, twice, 1, NULL) == PG_ENOSPC);
  CHECK(access(path, F_OK) == 0, "a device must stay");
  unlink(path);
  struct rlimit before, small;
  getrlimit(RLIMIT_FSIZE, &before);
  small = before;
  small.rlim_cur = 1 << 20;
  signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  CHECK(pg_safetensors_write(ctx, path, twice, 1, NULL) == PG_ENOSPC, "%s",
        pg_context_message(ctx));
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, SIG_DFL);
  pg_context_cancel(ctx);
  CHECK(pg_safetensors_write(ctx, path, twice, 1, NULL) == PG_ECANCELED);
  pg_context_resume(ctx);
  CHECK(access(path, F_OK) != 0, "a file is left");
  CHECK(pg_safetensors_write(ctx, path, NULL, 0, NULL) == 0, "no tensors at all");
  pg_safetensors *file;
  CHECK(pg_safetensors_open(ctx, path, &file) == 0 && pg_safetensors_count(file) == 0);
  pg_safetensors_close(file);
  pg_tensor_free(t);
}

/* ---- several files ------------------------------------------------------------------------- */
static const char *put_text(const char *name, const char *text) {
  const char *path = temporary_path(name);
  put_file(path, text, strlen(text));
  return path;
}

/* One tensor of four bytes, as a file of the folder "several". */
static void put_member(const char *name, const char *tensor, float value) {
  char header[128], inside[160];
  snprintf(header, sizeof header,
           "{\"%s\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", tensor);
  snprintf(inside, sizeof inside, "several/%s", name);
  const char *made = make(header, &value, sizeof value);
  CHECK(rename(made, temporary_path(inside)) == 0);
}

TEST(a_folder_is_read_as_one_file) {
  static const char index[] = "several/model.safetensors.index.json";
  pg_safetensors *file;
  float x = 0;
  mkdir(temporary_path("several"), 0700);
  put_member("one.safetensors", "a", 1.5f);
  put_member("two.safetensors", "b", 2.5f);
  put_text(index, "{\"metadata\": {\"total_size\": 8}, \"weight_map\": "
                  "{\"b\": \"two.safetensors\", \"a\": \"one.safetensors\"}}");
  CHECK(pg_safetensors_open(ctx, temporary_path("several"), &file) == 0, "%s",
        pg_context_message(ctx));
  CHECK(pg_safetensors_count(file) == 2);
  const pg_safetensors_entry *a = pg_safetensors_find(file, "a");
  const pg_safetensors_entry *b = pg_safetensors_find(file, "b");
  CHECK(a && pg_safetensors_read_f32(file, a, 0, 1, &x) == 0 && x == 1.5f);
  CHECK(b && pg_safetensors_read_f32(file, b, 0, 1, &x) == 0 && x == 2.5f);
  CHECK(a->member == 1 && b->member == 0 && !pg_safetensors_find(file, "c"));
  CHECK(pg_safetensors_read_f32(file, b, 0, 2, &x) == PG_EINVAL);
  pg_safetensors_close(file);

  static const struct {
    const char *index, *message;
    int status;
  } cases[] = {
      {"{\"weight_map\": ", "line 1", PG_EFORMAT},
      {"[]", "\"weight_map\" is missing", PG_EFORMAT},
      {"{\"weight_map\": {}}", "\"weight_map\" is missing", PG_EFORMAT},
      {"{\"weight_map\": {\"a\": 1}}", "the file of tensor \"a\" is not the name", PG_EFORMAT},
      {"{\"weight_map\": {\"a\": \"\"}}", "the file of tensor \"a\" is not", PG_EFORMAT},
      {"{\"weight_map\": {\"a\": \"..\"}}", "the file of tensor \"a\" is not", PG_EFORMAT},
      {"{\"weight_map\": {\"a\": \"x/one.safetensors\"}}", "is not the name", PG_EFORMAT},
      {"{\"weight_map\": {\"a\": \"three.safetensors\"}}", "three.safetensors", PG_ENOENT},
      {"{\"weight_map\": {\"c\": \"one.safetensors\"}}", "\"c\" is not in one.safet", PG_EFORMAT},
      {"{\"weight_map\": {\"a\": \"two.safetensors\", \"b\": \"one.safetensors\"}}", "is not in",
       PG_EFORMAT},
      {"{\"weight_map\": {\"a\": \"one.safetensors\", \"b\": \"again.safetensors\"}}",
       "tensor \"a\" is in", PG_EFORMAT},
  };
  put_member("again.safetensors", "a", 3);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    put_text(index, cases[i].index);
    CHECK(pg_safetensors_open(ctx, temporary_path("several"), &file) == cases[i].status && !file,
          "%s", cases[i].index);
    CHECK(strstr(pg_context_message(ctx), cases[i].message), "%s: %s", cases[i].index,
          pg_context_message(ctx));
  }
  put_member("model.safetensors", "only", 7); /* which transformers takes, too */
  CHECK(pg_safetensors_open(ctx, temporary_path("several"), &file) == 0 &&
        pg_safetensors_find(file, "only"));
  pg_safetensors_close(file);
}

int main(void) {
  const pg_context_options options = {.threads = 1};
  if (pg_context_new(&options, &ctx, NULL, 0) < 0) return 1;
  RUN(header_lengths_are_checked);
  RUN(false_headers_are_refused);
  RUN(well_formed_headers);
  RUN(types_are_converted);
  RUN(written_files_read_back);
  RUN(refused_writes_leave_no_file);
  RUN(a_folder_is_read_as_one_file);
  if (pg_file_remove_tree(ctx, temporary_folder) < 0) unit_failed++;
  if (pg_context_live_tensors(ctx) != 0) unit_failed++;
  pg_context_free(ctx);
  return unit_report();
}
