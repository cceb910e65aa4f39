/* The harness of the measurements: operands, repeats between time stamps, peaks. */
#include "bench.h"
#include "random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SECONDS 0.2 /* of repeats */
#define LEAST 3
#define MOST 30
#define UNKNOWN_CACHE ((int64_t)64 << 20)

static int wait_for(pg_context *ctx) {
  return pg__kernel_status(ctx, ctx->kernels->synchronize(ctx->queue), "synchronize");
}

static int64_t cache_bytes(pg_context *ctx) {
  pg_device device;
  if (pg_context_describe(ctx, &device) < 0 || device.cache_bytes <= 0) return UNKNOWN_CACHE;
  return device.cache_bytes;
}

/* ---- operands ----------------------------------------------------------------------------- */
static void *operand(pg__bench *b, size_t bytes) {
  void *memory = NULL;
  if (b->status < 0) return NULL;
  if (b->operand_count == PG__BENCH_OPERANDS) {
    b->status = pg_fail(b->context, PG_EINVAL, "a measurement has too many operands");
    return NULL;
  }
  b->status = pg__alloc(b->context, bytes, "a measured kernel's operands", &memory);
  if (b->status < 0) return NULL;
  b->operands[b->operand_count].memory = memory;
  b->operands[b->operand_count++].bytes = bytes;
  b->operand_bytes += bytes;
  return memory;
}

void *pg__bench_zeros(pg__bench *b, size_t bytes) {
  pg_context *ctx = b->context;
  void *memory = operand(b, bytes);
  int status = 0;
  if (!memory) return NULL;
  PG_LAUNCH(ctx, zero, memory, bytes);
fail:
  b->status = status;
  return status < 0 ? NULL : memory;
}

/* Drawn on the host, a slab that repeats: nothing here depends on values being independent. */
#define SLAB ((int64_t)1 << 18)

void *pg__bench_normals(pg__bench *b, pg_dtype type, int64_t count, double scale) {
  pg_context *ctx = b->context;
  char *memory = operand(b, (size_t)count * pg_dtype_size(type));
  float *slab = malloc((size_t)SLAB * sizeof *slab);
  void *wide = NULL;
  const size_t bytes = (size_t)SLAB * sizeof *slab;
  int status = b->status;
  if (!memory) goto fail;
  if (!slab) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory to draw operands");
    goto fail;
  }
  pg_normals(1, (uint64_t)b->operand_count, 0, (size_t)SLAB, slab);
  for (int64_t i = 0; i < SLAB; i++) slab[i] *= (float)scale;
  if (type != PG_F32) {
    PG_TRY(pg__alloc(ctx, bytes, "operands", &wide));
    PG_LAUNCH(ctx, upload, wide, slab, bytes);
  }
  for (int64_t at = 0; at < count; at += SLAB) {
    int64_t size = pg__min(SLAB, count - at);
    if (type == PG_F32)
      PG_LAUNCH(ctx, upload, memory + at * 4, slab, (size_t)size * sizeof *slab);
    else
      PG_LAUNCH(ctx, convert, PG_F32, wide, type, memory + at * 2, size);
  }
fail:
  if (wide) pg__release(ctx, wide, bytes);
  free(slab);
  b->status = status;
  return status < 0 ? NULL : memory;
}

int32_t *pg__bench_ids(pg__bench *b, int64_t count, int64_t limit) {
  pg_context *ctx = b->context;
  int32_t *memory = operand(b, (size_t)count * sizeof *memory), *ids = NULL;
  int status = b->status;
  if (!memory) goto fail;
  if (!(ids = malloc((size_t)count * sizeof *ids))) {
    status = pg_fail(ctx, PG_ENOMEM, "no memory to draw ids");
    goto fail;
  }
  for (int64_t i = 0; i < count; i++) {
    uint32_t words[4];
    pg_philox(1, 2, (uint64_t)i, words);
    /* Ranks fall off like 1/rank: limit^u, u uniform in [0, 1). */
    ids[i] = (int32_t)pg__min(limit - 1, (int64_t)pow((double)limit, words[0] * 0x1p-32) - 1);
  }
  PG_LAUNCH(ctx, upload, memory, ids, (size_t)count * sizeof *ids);
fail:
  free(ids);
  b->status = status;
  return status < 0 ? NULL : memory;
}

/* ---- repeats ------------------------------------------------------------------------------ */
static int begin(pg__bench *b) {
  pg_context *ctx = b->context;
  int status = b->status;
  if (status < 0) return status;
  /* Few operands are in the caches' smaller part, which less removes. */
  b->sweep_bytes = b->sweep_capacity;
  if (b->sweep_bytes > 64 * b->operand_bytes) b->sweep_bytes = 64 * b->operand_bytes;
  PG_TRY(wait_for(ctx));
  b->started = pg__now();
fail:
  return status;
}

/* Between the warm-up and the first repeat: how many there will be. */
static int after_warmup(pg__bench *b) {
  int status;
  PG_TRY(wait_for(b->context));
  const double seconds = pg__now() - b->started;
  b->result->repeats = (int)fmin(MOST, fmax(LEAST, SECONDS / fmax(seconds, 1e-9)));
  PG_TRY(pg_profile_start(b->context));
fail:
  return status;
}

bool pg__bench_next(pg__bench *b, int *out) {
  pg_context *ctx = b->context;
  int status = 0;
  if (b->round == 0) PG_TRY(begin(b));
  if (b->round == 1) PG_TRY(after_warmup(b));
  if (b->round > 1 && b->round > b->result->repeats) {
    *out = 0;
    return false;
  }
  PG_LAUNCH(ctx, zero, b->sweep, b->sweep_bytes);
  b->round++;
  *out = 0;
  return true;
fail:
  *out = status;
  return false;
}

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

/* The median of the last operation of every repeat: what came before it is the sweep. */
static int evaluate(pg__bench *b, const pg_profile *profile) {
  size_t count, repeats = (size_t)b->result->repeats;
  const pg_profile_event *events = pg_profile_events(profile, &count);
  double seconds[MOST];
  if (!repeats || repeats > MOST || count % repeats)
    return pg_fail(b->context, PG_ESTATE, "a measurement of %zu repeats recorded %zu operations",
                   repeats, count);
  for (size_t i = 0; i < repeats; i++) {
    const pg_profile_event *e = &events[(i + 1) * (count / repeats) - 1];
    seconds[i] = e->end - e->begin;
    b->result->operation = e->operation;
    b->result->bytes = e->bytes;
    b->result->flops = e->flops;
  }
  qsort(seconds, repeats, sizeof *seconds, ascending);
  b->result->seconds =
      repeats % 2 ? seconds[repeats / 2] : (seconds[repeats / 2 - 1] + seconds[repeats / 2]) / 2;
  return 0;
}

static int measure(pg__bench *b, int (*run)(pg__bench *b)) {
  pg_context *ctx = b->context;
  b->round = b->operand_count = b->status = 0;
  b->operand_bytes = 0;
  pg_profile *profile = NULL;
  int status = run(b);
  if (ctx->profile) { /* also after a failure, whose text stays */
    char message[sizeof ctx->message];
    memcpy(message, ctx->message, sizeof message);
    int stopped = pg_profile_stop(ctx, &profile);
    if (status < 0)
      memcpy(ctx->message, message, sizeof message);
    else
      status = stopped;
  }
  if (status == 0) status = evaluate(b, profile);
  pg_profile_free(profile);
  for (int i = 0; i < b->operand_count; i++)
    pg__release(ctx, b->operands[i].memory, b->operands[i].bytes);
  return status;
}

/* `sizes` is not needed for peaks. */
static int open_bench(pg_context *ctx, const pg_bench_sizes *sizes, pg__bench *b) {
  memset(b, 0, sizeof *b);
  if (ctx->profile) return pg_fail(ctx, PG_ESTATE, "this context records a profile already");
  b->context = ctx;
  b->sizes = sizes;
  b->n = sizes ? sizes->batch * sizes->config.context : 0;
  b->sweep_capacity = (size_t)cache_bytes(ctx) / 4 * 5;
  return pg__alloc(ctx, b->sweep_capacity, "what empties the caches", &b->sweep);
}

static void close_bench(pg__bench *b) {
  if (b->sweep) pg__release(b->context, b->sweep, b->sweep_capacity);
}

int pg_bench_kernels(pg_context *ctx, const pg_bench_sizes *sizes, pg_kernel_time **out,
                     size_t *count) {
  pg__bench b;
  pg_kernel_time *times = calloc(pg__bench_case_count, sizeof *times);
  int status = open_bench(ctx, sizes, &b);
  *out = NULL;
  *count = pg__bench_case_count;
  if (!times) status = pg_fail(ctx, PG_ENOMEM, "no memory for results");
  for (size_t i = 0; i < pg__bench_case_count && status == 0; i++) {
    b.result = &times[i];
    status = measure(&b, pg__bench_cases[i].run);
  }
  close_bench(&b);
  if (status < 0)
    free(times);
  else
    *out = times;
  return status;
}

/* ---- peaks -------------------------------------------------------------------------------- */
/* Operands of the peaks, which no model gives. */
typedef struct peak_bench {
  pg__bench bench; /* first */
  pg_kernel_time time;
  pg_dtype type;
  int64_t side;
} peak_bench;

/* From and to are together twice the cache. */
static int run_copy(pg__bench *b) {
  const size_t bytes = (size_t)pg__max(cache_bytes(b->context), (int64_t)64 << 20);
  void *from = pg__bench_zeros(b, bytes), *to = pg__bench_zeros(b, bytes);
  int status;
  while (pg__bench_next(b, &status)) PG_LAUNCH(b->context, copy, to, from, bytes);
fail:
  return status;
}

static int run_square(pg__bench *b) {
  const peak_bench *p = (const peak_bench *)b;
  const int64_t n = p->side;
  const pg_dtype type = p->type;
  int status;
  pg_gemm g = {.transpose_b = true,
               .m = n,
               .n = n,
               .k = n,
               .alpha = 1,
               .lda = n,
               .ldb = n,
               .ldc = n,
               .type_a = type,
               .type_b = type,
               .type_c = type};
  g.a = pg__bench_normals(b, type, n * n, 1);
  g.b = pg__bench_normals(b, type, n * n, 1);
  g.c = pg__bench_zeros(b, (size_t)(n * n) * pg_dtype_size(type));
  while (pg__bench_next(b, &status)) PG_LAUNCH(b->context, gemm, &g);
fail:
  return status;
}

/* The loop in registers; 0 when there is none. */
static int loop_rate(pg_context *ctx, pg_dtype type, double *rate) {
  int status = 0;
  *rate = 0;
  for (int i = 0; i < 5; i++) {
    double flops = 0;
    PG_TRY(wait_for(ctx));
    const double start = pg__now();
    PG_LAUNCH(ctx, peak, type, &flops);
    const double seconds = pg__now() - start;
    if (flops > 0) *rate = fmax(*rate, flops / seconds);
  }
fail:
  return status;
}

/* Products of growing size until one takes 20 ms: what a launch costs no longer counts. */
static int product_rate(peak_bench *p, pg_dtype type, double *rate, int64_t *side) {
  int status = 0;
  p->type = type;
  for (p->side = 256; p->side <= 8192; p->side *= 2) {
    PG_TRY(measure(&p->bench, run_square));
    const double found = p->time.flops / fmax(p->time.seconds, 1e-12);
    if (found > *rate) {
      *rate = found;
      *side = p->side;
    }
    if (p->time.seconds > 0.02) break;
  }
fail:
  return status;
}

int pg_bench_peak(pg_context *ctx, pg_peak *out) {
  peak_bench p = {.side = 0};
  int status;
  memset(out, 0, sizeof *out);
  PG_TRY(open_bench(ctx, NULL, &p.bench));
  p.bench.result = &p.time;
  PG_TRY(measure(&p.bench, run_copy));
  out->bytes_per_second = p.time.bytes / fmax(p.time.seconds, 1e-12);
  out->copy_bytes = (int64_t)p.time.bytes / 2;
  for (int t = 0; t < 2; t++) {
    const pg_dtype type = t ? PG_BF16 : PG_F32;
    PG_TRY(loop_rate(ctx, type, &out->flops_per_second[t]));
    if (out->flops_per_second[t] > 0) continue;
    PG_TRY(product_rate(&p, type, &out->flops_per_second[t], &out->product[t]));
  }
fail:
  close_bench(&p.bench);
  return status;
}
