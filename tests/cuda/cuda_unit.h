/* Agreement of the CUDA kernels with their CPU twins: the same call on the same elements on both
 * sides, results compared. The tests run on the emulated device in CI and on a real one as they
 * are; what only the emulation can do stands under PG_CUDAEMU.
 *
 *   twin x = normals(PG_BF16, n * d, 1), y = poisoned(PG_BF16, n * d);
 *   BOTH(rmsnorm_forward, PG_BF16, P(x), n, d, 1e-6f, P(y), NULL);
 *   CHECK_AGREE("rmsnorm", &y);
 *   drop_twins();
 *
 * Bounds, as ||got - want|| / ||want||:
 *  - fp32: 1e-5. Sums of some thousand products in another order differ by 1e-7 to 1e-6; products
 *    rounded to TF32 would differ by 3e-4.
 *  - bf16: both sides compute in fp32 and round results to 8 bits. Where their fp32 values, 1e-7 to
 *    1e-6 apart, straddle a tie, the results differ by 2^-8: one element in some thousand. One
 *    element of four times the root mean square is 4 * 2^-8 / sqrt(n) of the whole, and 1e-3 allows
 *    for one element in fifteen. Kernels that also round inside (attention) name 1e-2. */
#ifndef PG_CUDA_UNIT_H
#define PG_CUDA_UNIT_H

#include "kernels/kernels.h"
#include "tests/unit/unit.h"

#if defined(__SANITIZE_THREAD__)
#define UNIT_SLOW 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNIT_SLOW 1
#endif
#endif
/* Whether the largest sizes are left out: race detection, and compute-sanitizer on a real device,
 * take 20 times longer. */
#ifndef UNIT_SLOW
#define UNIT_SLOW (getenv("PG_TEST_SMALL") != NULL)
#endif

#ifdef PG_PLUGIN_PATH
#include <dlfcn.h>
#endif

#ifdef PG_CUDAEMU
void cudaemu_reload(void);
/* Sets (NULL: unsets) a variable of the emulation from here on. */
static inline void emulate(const char *name, const char *value) {
  if (value)
    setenv(name, value, 1);
  else
    unsetenv(name);
  cudaemu_reload();
}
#endif

enum { CPU, GPU };
static struct side {
  const pg_kernels *k;
  pg_queue *q;
} sides[2];
static __attribute__((unused)) int side_; /* of the call that BOTH makes */

static inline const pg_kernels *cuda_table(void) {
#ifdef PG_PLUGIN_PATH
  void *plugin = dlopen(PG_PLUGIN_PATH, RTLD_NOW);
  const pg_kernels *(*table)(void) = NULL;
  if (plugin) *(void **)&table = dlsym(plugin, "pg_cuda_kernels");
  if (!table) {
    printf("%s\n", dlerror());
    exit(1);
  }
  return table();
#else
  return pg_cuda_kernels();
#endif
}

/* Leaves with status 77 where there is no device. */
static inline void open_sides(void) {
  const pg_queue_options options = {.threads = 1};
  char why[256];
  sides[CPU].k = &pg_cpu_base_kernels;
  sides[GPU].k = cuda_table();
  for (int s = 0; s < 2; s++)
    if (sides[s].k->queue_new(&options, &sides[s].q, why, sizeof why) < 0) {
      printf("%s: %s\n", sides[s].k->name, why);
      exit(77);
    }
}
static inline int close_sides(void) {
  for (int s = 0; s < 2; s++) sides[s].k->queue_free(sides[s].q);
  return unit_report();
}

/* One call of the table on one side. */
#define ON(s, op, ...)                                                                             \
  do {                                                                                             \
    side_ = (s);                                                                                   \
    CHECK(sides[s].k->op(sides[s].q, __VA_ARGS__) == 0, #op " on %s: %s", sides[s].k->name,        \
          sides[s].k->message(sides[s].q));                                                        \
  } while (0)
#define BOTH(op, ...)                                                                              \
  do {                                                                                             \
    ON(CPU, op, __VA_ARGS__);                                                                      \
    ON(GPU, op, __VA_ARGS__);                                                                      \
  } while (0)

/* ---- twins: the same elements on both sides ---------------------------------------------------
 */
typedef struct twin {
  pg_dtype type;
  int64_t n;
  void *at[2];
} twin;
#define P(t) ((t).at[side_])
#define F(t, offset) ((float *)(t).at[side_] + (offset))

static struct made {
  int side;
  void *memory;
} made[512];
static int made_count;

static inline size_t type_size(pg_dtype type) {
  return type == PG_BF16 ? 2 : type == PG_F64 ? 8 : 4;
}
static inline size_t twin_bytes(const twin *t) {
  return (size_t)t->n * type_size(t->type);
}
static inline void *keep(int s, size_t bytes) {
  void *memory = NULL;
  if (made_count == (int)(sizeof made / sizeof *made)) abort();
  if (sides[s].k->alloc(sides[s].q, bytes, &memory) < 0) {
    printf("%s\n", sides[s].k->message(sides[s].q));
    exit(1);
  }
  made[made_count].side = s;
  made[made_count++].memory = memory;
  return memory;
}
static inline void drop_twins(void) {
  while (made_count) {
    made_count--;
    sides[made[made_count].side].k->release(sides[made[made_count].side].q,
                                            made[made_count].memory);
  }
}
/* From host memory. */
static inline twin twin_of(pg_dtype type, int64_t n, const void *host) {
  twin t = {type, n, {NULL, NULL}};
  for (int s = 0; s < 2; s++) {
    t.at[s] = keep(s, twin_bytes(&t));
    if (sides[s].k->upload(sides[s].q, t.at[s], host, twin_bytes(&t)) < 0) abort();
  }
  return t;
}
/* Bytes 0xff: NaN in every type of floating point. */
static inline twin poisoned(pg_dtype type, int64_t n) {
  size_t bytes = (size_t)n * type_size(type);
  void *host = malloc(bytes + 1);
  memset(host, 0xff, bytes);
  twin t = twin_of(type, n, host);
  free(host);
  return t;
}
static inline twin clone(const twin *from) {
  return twin_of(from->type, from->n, from->at[CPU]);
}

static uint64_t unit_state = 1;
static inline void unit_seed(uint64_t seed) {
  unit_state = seed * 0x9e3779b97f4a7c15u + 1;
}
static inline double unit_uniform(void) { /* [0,1) */
  unit_state ^= unit_state << 13;
  unit_state ^= unit_state >> 7;
  unit_state ^= unit_state << 17;
  return (double)(unit_state >> 11) * 0x1p-53;
}
static inline float unit_normal(void) {
  double a = 1 - unit_uniform(), b = unit_uniform();
  return (float)(sqrt(-2 * log(a)) * cos(6.283185307179586 * b));
}
static inline int64_t unit_below(int64_t n) {
  return (int64_t)(unit_uniform() * (double)n);
}
static inline float bf16_value(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
/* Of a finite number, to nearest even. */
static inline uint16_t bf16_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
/* Normal deviates of the given scale, in F32 or BF16. */
static inline twin normals(pg_dtype type, int64_t n, double scale) {
  void *host = malloc((size_t)n * 4 + 1);
  for (int64_t i = 0; i < n; i++) {
    float x = (float)(scale * unit_normal());
    if (type == PG_BF16)
      ((uint16_t *)host)[i] = bf16_bits(x);
    else
      ((float *)host)[i] = x;
  }
  twin t = twin_of(type, n, host);
  free(host);
  return t;
}
static inline twin tokens_below(int64_t n, int64_t vocab) {
  int32_t *host = malloc((size_t)n * sizeof *host + 1);
  for (int64_t i = 0; i < n; i++) host[i] = (int32_t)unit_below(vocab);
  twin t = twin_of(PG_I32, n, host);
  free(host);
  return t;
}

/* ---- comparisons --------------------------------------------------------------------------- */
/* malloc'ed copy of the device's side. */
static inline void *from_gpu(const twin *t) {
  void *host = malloc(twin_bytes(t) + 1);
  if (sides[GPU].k->download(sides[GPU].q, host, t->at[GPU], twin_bytes(t)) < 0)
    printf("download: %s\n", sides[GPU].k->message(sides[GPU].q));
  return host;
}
static inline double value_of(pg_dtype type, const void *x, int64_t i) {
  switch (type) {
  case PG_BF16: return bf16_value(((const uint16_t *)x)[i]);
  case PG_F64: return ((const double *)x)[i];
  case PG_I32: return ((const int32_t *)x)[i];
  default: return ((const float *)x)[i];
  }
}
/* ||gpu - cpu|| / ||cpu||; infinite where an element of either is not finite. */
static inline double twin_error(const twin *t) {
  double difference = 0, size = 0;
  void *got = from_gpu(t);
  for (int64_t i = 0; i < t->n; i++) {
    double want = value_of(t->type, t->at[CPU], i), e = value_of(t->type, got, i) - want;
    difference += isfinite(e) ? e * e : INFINITY;
    size += want * want;
  }
  free(got);
  return size > 0 ? sqrt(difference / size) : sqrt(difference);
}
/* Elements whose bits differ; all NaN count as the same. */
static inline int64_t twin_differences(const twin *t, int64_t *first) {
  int64_t count = 0;
  void *got = from_gpu(t);
  for (int64_t i = 0; i < t->n; i++) {
    double a = value_of(t->type, t->at[CPU], i), b = value_of(t->type, got, i);
    if ((a == b && signbit(a) == signbit(b)) || (isnan(a) && isnan(b))) continue;
    if (!count++) *first = i;
  }
  free(got);
  return count;
}
static inline double unit_bound(const twin *t) {
  if (t->type != PG_BF16) return 1e-5;
  return fmax(1e-3, fmin(0x1p-8, 4 * 0x1p-8 / sqrt((double)t->n)));
}
#define CHECK_WITHIN(name, t, bound)                                                               \
  do {                                                                                             \
    double error_ = twin_error(t), bound_ = (bound);                                               \
    CHECK(error_ <= bound_, "%s, %s: error %.3g above %.3g", name,                                 \
          (t)->type == PG_BF16 ? "bf16" : "fp32", error_, bound_);                                 \
  } while (0)
#define CHECK_AGREE(name, t) CHECK_WITHIN(name, t, unit_bound(t))
#define CHECK_SAME(name, t)                                                                        \
  do {                                                                                             \
    int64_t at_ = 0, count_ = twin_differences(t, &at_);                                           \
    CHECK(count_ == 0, "%s: %lld of %lld elements differ, the first is %lld", name,                \
          (long long)count_, (long long)(t)->n, (long long)at_);                                   \
  } while (0)

#endif
