/* Contexts: errors, devices, threads, accounts, cancellation, denormals, arenas. */
#include "core/comm.h"
#include "core/internal.h"
#include "unit.h"

#include <sched.h>
#include <signal.h>

static pg_context *new_context(int threads) {
  pg_context *ctx;
  const pg_context_options options = {.device = "cpu", .threads = threads};
  if (pg_context_new(&options, &ctx, NULL, 0) < 0) abort();
  return ctx;
}

/* Allocations that cannot succeed are asked for; under AddressSanitizer they shall return NULL. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) {
  return "allocator_may_return_null=1";
}

TEST(every_error_has_a_name) {
#define CHECK_NAME(name, value, text, meaning)                                                     \
  CHECK(name == (value) && strcmp(pg_error_name(name), text) == 0);                                \
  CHECK(strcmp(pg_error_meaning(name), meaning) == 0);
  PG_ERRORS(CHECK_NAME)
  CHECK(strcmp(pg_error_name(0), "OK") == 0);
  CHECK(strcmp(pg_error_name(1), "EUNKNOWN") == 0);
  CHECK(strcmp(pg_error_name(PG_ERROR_LAST_), "EUNKNOWN") == 0, "a code outside the list");
  CHECK(pg_error_meaning(12345)[0] != 0);
}

TEST(devices) {
  char path[4096], message[600];
  const char *const cpu[] = {"cpu", NULL, "auto"}, *const missing[] = {"cuda:1", "tpu", ""};
  /* Where there is a CUDA plugin, "auto" may be a GPU: tests/unit/plugin_test.c. */
  const bool plugin = pg__cuda_plugin(path, sizeof path);
  for (int i = 0; i < (plugin ? 1 : 3); i++) {
    const pg_context_options options = {.device = cpu[i], .threads = 1};
    pg_context *ctx;
    CHECK(pg_context_new(&options, &ctx, NULL, 0) == 0);
    CHECK(strcmp(pg_context_device(ctx), "cpu") == 0, "%s", pg_context_device(ctx));
    CHECK(pg_context_threads(ctx) == 1);
    CHECK(strcmp(pg_context_message(ctx), "") == 0);
    pg_context_free(ctx);
  }
  for (int i = 0; i < 3; i++) {
    const pg_context_options options = {.device = missing[i]};
    pg_context *ctx = (pg_context *)&ctx;
    CHECK(pg_context_new(&options, &ctx, message, sizeof message) == PG_EDEVICE);
    CHECK(!ctx && strstr(message, missing[i]) && strstr(message, "\"cpu\", \"cuda\""), "%s",
          message);
    CHECK(pg_context_new(&options, &ctx, NULL, 0) == PG_EDEVICE);
    char tiny[4];
    CHECK(pg_context_new(&options, &ctx, tiny, sizeof tiny) == PG_EDEVICE && strlen(tiny) == 3);
  }
  pg_context_free(NULL);
}

static int threads_by_default(const char *omp) {
  pg_context *ctx;
  if (omp)
    setenv("OMP_NUM_THREADS", omp, 1);
  else
    unsetenv("OMP_NUM_THREADS");
  if (pg_context_new(NULL, &ctx, NULL, 0) < 0) return -1;
  const int threads = pg_context_threads(ctx);
  pg_context_free(ctx);
  return threads;
}

TEST(default_threads) {
  const char *before = getenv("OMP_NUM_THREADS");
  char *saved = before ? strdup(before) : NULL;
  cpu_set_t all, one;
  sched_getaffinity(0, sizeof all, &all);
  const int cpus = CPU_COUNT(&all), unset = threads_by_default(NULL);
  CHECK(unset >= 1 && unset <= cpus, "%d threads on %d CPUs", unset, cpus);
  CHECK(threads_by_default("3") == 3);
  CHECK(threads_by_default("2,4") == 2, "the outermost level of a list");
  CHECK(threads_by_default("nonsense") == unset);
  CHECK(threads_by_default("0") == unset);
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++)
    if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
  CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
  CHECK(threads_by_default(NULL) == 1, "bound to one CPU");
  CHECK(sched_setaffinity(0, sizeof all, &all) == 0);
  if (saved)
    setenv("OMP_NUM_THREADS", saved, 1);
  else
    unsetenv("OMP_NUM_THREADS");
  free(saved);
  pg_context *ctx;
  char message[200];
  const pg_context_options bad = {.threads = -1}, huge = {.threads = 1 << 20};
  CHECK(pg_context_new(&bad, &ctx, message, sizeof message) == PG_EINVAL);
  CHECK(strstr(message, "-1"), "%s", message);
  CHECK(pg_context_new(&huge, &ctx, message, sizeof message) == PG_EINVAL);
}

TEST(messages) {
  pg_context *ctx = new_context(1);
  CHECK(pg_fail(ctx, PG_EIO, "value %d of '%s'", 7, "x") == PG_EIO);
  CHECK(strcmp(pg_context_message(ctx), "value 7 of 'x'") == 0);
  /* The present message may be an argument of the next. */
  pg_fail(ctx, PG_EIO, "outer: %s", pg_context_message(ctx));
  CHECK(strcmp(pg_context_message(ctx), "outer: value 7 of 'x'") == 0, "%s",
        pg_context_message(ctx));
  /* A long one is cut at a whole UTF-8 character, whatever its alignment. */
  char text[3001];
  for (size_t shift = 0; shift < 3; shift++) {
    memset(text, 'x', shift);
    for (size_t i = shift; i + 3 <= sizeof text; i += 3) memcpy(text + i, "\u20ac", 3);
    text[sizeof text - 1] = 0;
    pg_fail(ctx, PG_EIO, "%s", text);
    const char *got = pg_context_message(ctx);
    const size_t n = strlen(got);
    CHECK(n < 1024 && n > 1000 && strcmp(got + n - 3, "...") == 0, "%zu bytes", n);
    CHECK((n - 3 - shift) % 3 == 0 && strncmp(got, text, n - 3) == 0, "shift %zu", shift);
  }
  CHECK(pg_fail(NULL, PG_EIO, "nobody") == PG_EIO);
  pg_context_free(ctx);
}

static pg_context *signalled;
static void on_signal(int number) {
  (void)number;
  pg_context_cancel(signalled);
}

TEST(cancel_from_a_signal_handler) {
  pg_context *ctx = signalled = new_context(1);
  CHECK(!pg_context_cancelled(ctx));
  signal(SIGUSR1, on_signal);
  raise(SIGUSR1);
  signal(SIGUSR1, SIG_DFL);
  CHECK(pg_context_cancelled(ctx));
  pg_context_resume(ctx);
  CHECK(!pg_context_cancelled(ctx));
  pg_context_free(ctx);
}

/* A denormal halved and doubled, as this thread computes now: 0 when flushed. */
static float through_denormal(void) {
  volatile float x = 1.5e-38f; /* half of it is denormal */
  volatile float half = x * 0.5f;
  return half * 2.0f;
}

TEST(launches_leave_the_denormals_of_the_host_alone) {
  pg_context *ctx = new_context(2);
  void *memory;
  int status = 0, flushed = 0;
  CHECK(pg__alloc(ctx, 1 << 20, "numbers", &memory) == 0);
  const pg_view x = {memory, 512, 1};
  PG_LAUNCH(ctx, zero, memory, 1 << 20);
  PG_LAUNCH(ctx, scalar, PG_ADD, x, 1.0, false, 512, 512, x);
fail:
  CHECK(status == 0);
  CHECK(through_denormal() != 0, "the calling thread");
#pragma omp parallel num_threads(2) reduction(+ : flushed)
  flushed += through_denormal() == 0;
  CHECK(flushed == 0, "%d OpenMP threads", flushed);
  pg__release(ctx, memory, 1 << 20);
  pg_context_free(ctx);
}

TEST(device_memory_is_accounted) {
  pg_context *ctx = new_context(1);
  void *a = NULL, *b = NULL;
  CHECK(pg__alloc(ctx, 1000, "a", &a) == 0 && pg__alloc(ctx, 0, "b", &b) == 0);
  CHECK(a && b && a != b && (uintptr_t)a % 64 == 0);
  CHECK(pg_context_bytes(ctx) == 1000 && pg_context_peak_bytes(ctx) == 1000);
  pg__release(ctx, a, 1000);
  pg__release(ctx, b, 0);
  pg__release(ctx, NULL, 5);
  CHECK(pg_context_bytes(ctx) == 0 && pg_context_peak_bytes(ctx) == 1000);
  const size_t too_much[] = {(size_t)1 << 60, SIZE_MAX};
  for (int i = 0; i < 2; i++) {
    CHECK(pg__alloc(ctx, too_much[i], "a thing", &a) == PG_ENOMEM && !a);
    CHECK(strstr(pg_context_message(ctx), "a thing"), "%s", pg_context_message(ctx));
  }
  CHECK(pg_context_bytes(ctx) == 0);
  pg_context_free(ctx);
}

/* The peak counts what the backend held beside the tensors, when it held it. */
TEST(peak_counts_the_backend) {
  pg_context *ctx = new_context(1);
  const int64_t rows = 300, d = 64, bytes = rows * d * (int64_t)sizeof(float);
  pg_farthest far;
  void *x, *y;
  float one = 1;
  CHECK(pg__alloc(ctx, (size_t)bytes, "a cloud", &x) == 0);
  CHECK(ctx->kernels->zero(ctx->queue, x, (size_t)bytes) == 0);
  CHECK(ctx->kernels->upload(ctx->queue, x, &one, sizeof one) == 0);
  CHECK(pg_context_peak_bytes(ctx) == bytes);
  CHECK(ctx->kernels->diameter(ctx->queue, x, rows, d, NULL, &far) == 0 && far.value == 1);
  /* A copy of the cloud, gone again before the next allocation. */
  CHECK(pg__alloc(ctx, (size_t)bytes / 2, "later", &y) == 0);
  int64_t peak = pg_context_peak_bytes(ctx);
  CHECK(peak >= 2 * bytes && peak < 2 * bytes + bytes / 2, "%lld", (long long)peak);
  pg__release(ctx, x, (size_t)bytes);
  pg__release(ctx, y, (size_t)bytes / 2);
  CHECK(pg_context_bytes(ctx) == 0 && pg_context_peak_bytes(ctx) == peak);
  pg_context_free(ctx);
}

TEST(arena) {
  pg_context *ctx = new_context(1);
  pg_arena arena;
  CHECK(pg__arena_size(1) == 256 && pg__arena_size(256) == 256 && pg__arena_size(257) == 512);
  CHECK(pg__arena_new(ctx, pg__arena_size(100) + pg__arena_size(300), "buffers", &arena) == 0);
  char *a = pg__arena_take(&arena, 100), *b = pg__arena_take(&arena, 300);
  CHECK(a && b == a + 256 && arena.used == arena.size);
  arena.used = 0;
  CHECK(pg__arena_take(&arena, 700) == a, "rewound");
  pg__arena_free(&arena);
  pg__arena_free(&arena);
  CHECK(pg_context_bytes(ctx) == 0);
  pg_context_free(ctx);
}

TEST(the_communicator_of_one) {
  pg_context *ctx = new_context(1);
  pg_comm *comm = pg_comm_self();
  double d[2] = {1, -2};
  uint64_t u[1] = {9};
  CHECK(pg_comm_rank(comm) == 0 && pg_comm_world(comm) == 1 && comm == pg_comm_self());
  CHECK(pg_comm_sum(comm, ctx, NULL, 0) == 0 && pg_comm_finish(comm, ctx) == 0);
  CHECK(pg_comm_sum_f64(comm, ctx, d, 2) == 0 && d[0] == 1 && d[1] == -2);
  CHECK(pg_comm_max_f64(comm, ctx, d, 2) == 0 && d[0] == 1 && d[1] == -2);
  CHECK(pg_comm_broadcast_host(comm, ctx, u, 8, 0) == 0 && u[0] == 9);
  CHECK(pg_comm_meet(comm, ctx, "a test", d, 2) == 0 && d[0] == 1 && d[1] == -2);
  pg_comm_fail(comm, "there is nobody to tell");
  CHECK(pg_comm_failure(comm, NULL)[0] == 0 && pg_comm_meet(comm, ctx, "it", NULL, 0) == 0);
  pg_comm_close(comm);
  pg_context_free(ctx);
}

int main(void) {
  RUN(every_error_has_a_name);
  RUN(devices);
  RUN(default_threads);
  RUN(messages);
  RUN(cancel_from_a_signal_handler);
  RUN(launches_leave_the_denormals_of_the_host_alone);
  RUN(device_memory_is_accounted);
  RUN(peak_counts_the_backend);
  RUN(arena);
  RUN(the_communicator_of_one);
  return unit_report();
}
