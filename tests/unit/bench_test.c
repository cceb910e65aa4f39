/* The measurements of perigee bench: every kernel has one, and what they report makes sense. How
 * long anything takes is not judged. */
#include "core/bench.h"
#include "core/perigee.h"
#include "model_support.h"

static pg_context *ctx;

static pg_bench_sizes small_sizes(pg_dtype compute) {
  pg_bench_sizes s = {.batch = 3, .compute = compute};
  pg_model_config_default(&s.config);
  s.config.layers = 2, s.config.width = 24, s.config.heads = 3, s.config.head_dim = 8;
  s.config.mlp = 40, s.config.vocab = 97, s.config.context = 5;
  MUST(ctx, pg_model_config_resolve(ctx, &s.config));
  return s;
}

/* Operations that do no work on data, or none that the queue's time stamps see. */
static bool is_kernel(const char *name) {
  static const char *const others[] = {"alloc",         "release",   "synchronize",   "device_info",
                                       "upload_beside", "join",      "timestamp",     "elapsed",
                                       "peak",          "workspace", "attention_path"};
  for (size_t i = 0; i < PG_COUNT(others); i++)
    if (!strcmp(name, others[i])) return false;
  return true;
}

TEST(every_kernel_is_measured) {
  static const char *const names[] = {
#define NAME(op) #op,
      PG_KERNELS(NAME)
#undef NAME
  };
  for (int t = 0; t < 2; t++) {
    const pg_bench_sizes sizes = small_sizes(t ? PG_BF16 : PG_F32);
    const int64_t before = pg_context_bytes(ctx);
    pg_kernel_time *times = NULL;
    size_t count;
    MUST(ctx, pg_bench_kernels(ctx, &sizes, &times, &count));
    CHECK(pg_context_bytes(ctx) == before, "%lld bytes are left",
          (long long)(pg_context_bytes(ctx) - before));
    for (size_t i = 0; i < PG_COUNT(names); i++) {
      size_t found = 0;
      for (size_t j = 0; j < count; j++) found += !strcmp(times[j].operation, names[i]);
      CHECK((found > 0) == is_kernel(names[i]),
            "%s has %zu measurements; core/bench_kernels.c lists them", names[i], found);
    }
    for (size_t j = 0; j < count; j++) {
      const pg_kernel_time *m = &times[j];
      CHECK(m->seconds >= 0 && isfinite(m->seconds) && m->repeats >= 3, "%s %s: %g s, %d times",
            m->operation, m->shape, m->seconds, m->repeats);
      CHECK(m->bytes > 0 && m->shape[0], "%s: %g bytes, \"%s\"", m->operation, m->bytes, m->shape);
      CHECK(strcmp(m->operation, "gemm") != 0 || m->type == PG_F32 || t, "%s in bf16", m->shape);
      if (strstr(m->shape, "logits: "))
        CHECK(!strcmp(m->shape, "logits: 15 x 97 x 24") && m->flops == 2.0 * 15 * 97 * 24,
              "%s: %g FLOP", m->shape, m->flops);
    }
    free(times);
  }
}

TEST(peaks_are_positive) {
  const int64_t before = pg_context_bytes(ctx);
  pg_peak peak;
  MUST(ctx, pg_bench_peak(ctx, &peak));
  CHECK(peak.bytes_per_second > 0 && isfinite(peak.bytes_per_second), "%g bytes/s",
        peak.bytes_per_second);
  CHECK(peak.copy_bytes >= 64 << 20, "a copy of %lld bytes", (long long)peak.copy_bytes);
  for (int t = 0; t < 2; t++)
    CHECK(peak.flops_per_second[t] > 0 && isfinite(peak.flops_per_second[t]), "%g FLOP/s",
          peak.flops_per_second[t]);
  CHECK(pg_context_bytes(ctx) == before, "memory is left");
}

/* What cannot be measured is refused and leaves the context as it was. */
TEST(failures_leave_nothing) {
  pg_bench_sizes sizes = small_sizes(PG_F32);
  pg_kernel_time *times = NULL;
  pg_profile *profile;
  pg_peak peak;
  size_t count;
  const int64_t before = pg_context_bytes(ctx);
  MUST(ctx, pg_profile_start(ctx));
  CHECK(pg_bench_kernels(ctx, &sizes, &times, &count) == PG_ESTATE && !times, "while recording");
  CHECK(pg_bench_peak(ctx, &peak) == PG_ESTATE, "peak while recording");
  MUST(ctx, pg_profile_stop(ctx, &profile));
  pg_profile_free(profile);
  sizes.config.vocab = INT64_C(1) << 56; /* its operands do not exist anywhere */
  CHECK(pg_bench_kernels(ctx, &sizes, &times, &count) == PG_ENOMEM && !times, "%s",
        pg_context_message(ctx));
  CHECK(!ctx->profile && pg_context_bytes(ctx) == before, "%lld bytes are left",
        (long long)(pg_context_bytes(ctx) - before));
}

int main(void) {
  char message[256] = "";
  pg_context_options options = {.device = getenv("PG_TEST_DEVICE"), .threads = 2};
  if (!options.device) options.device = "cpu";
  if (pg_context_new(&options, &ctx, message, sizeof message) < 0) {
    printf("%s\n", message);
    return 1;
  }
  RUN(every_kernel_is_measured);
  RUN(peaks_are_positive);
  RUN(failures_leave_nothing);
  pg_context_free(ctx);
  return unit_report();
}
