/* Queue and memory of the device, and what happens when something is missing or fails: every
 * operation has to say so and work again afterwards. */
#include "cuda_unit.h"

#define K sides[GPU].k
#define Q sides[GPU].q
#define MESSAGE K->message(Q)
#ifdef PG_CUDAEMU
#define ALIGNMENT 16 /* in guard mode, where allocations end at a page */
#else
#define ALIGNMENT 64
#endif

TEST(upload_copy_zero_download) {
  /* The largest goes around the ring of pinned memory more than once. */
  size_t sizes[] = {0, 1, 3, 64, 4097, (size_t)5 << 20, ((size_t)33 << 20) + 5};
  for (int c = 0; c < (UNIT_SLOW ? 6 : 7); c++) {
    size_t bytes = sizes[c];
    void *a = NULL, *b = NULL;
    unsigned char *host = malloc(bytes + 1), *back = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i++) host[i] = (unsigned char)(i * 7 + i / 251);
    CHECK(K->alloc(Q, bytes, &a) == 0 && a && (uintptr_t)a % ALIGNMENT == 0, "%s", MESSAGE);
    CHECK(K->alloc(Q, bytes, &b) == 0 && b && b != a, "%s", MESSAGE);
    CHECK(K->upload(Q, a, host, bytes) == 0, "%s", MESSAGE);
    memset(host, 0, bytes); /* an upload has read its source when it returns */
    CHECK(K->copy(Q, b, a, bytes) == 0 && K->zero(Q, a, bytes) == 0, "%s", MESSAGE);
    CHECK(K->download(Q, back, b, bytes) == 0, "%s", MESSAGE);
    size_t wrong = 0;
    for (size_t i = 0; i < bytes; i++) wrong += back[i] != (unsigned char)(i * 7 + i / 251);
    CHECK(K->download(Q, back, a, bytes) == 0, "%s", MESSAGE);
    for (size_t i = 0; i < bytes; i++) wrong += back[i] != 0;
    CHECK(wrong == 0, "%zu of %zu bytes are wrong", wrong, bytes);
    K->release(Q, a);
    K->release(Q, b);
    free(host), free(back);
  }
  K->release(Q, NULL);
  CHECK(K->synchronize(Q) == 0, "%s", MESSAGE);
}

/* Batches through a pair of buffers, as activations use them: while the queue copies one out, the
 * next arrives in the other. Gives how many of the floats that came out are wrong. `before` (may be
 * NULL) is told what comes: a round's upload, its join. */
enum { UPLOAD_COMES, JOIN_COMES };
static size_t ferry(int rounds, size_t floats, void (*before)(int round, int what)) {
  const size_t bytes = floats * sizeof(float);
  float *host = malloc(bytes), *back = malloc(bytes * (size_t)rounds);
  void *pair[2] = {NULL, NULL}, *out = NULL;
  size_t wrong = 0;
  for (int i = 0; i < 2; i++) CHECK(K->alloc(Q, bytes, &pair[i]) == 0, "%s", MESSAGE);
  CHECK(K->alloc(Q, bytes * (size_t)rounds, &out) == 0 && K->join(Q) == 0, "%s", MESSAGE);
  for (int r = 0; r < rounds; r++) {
    for (size_t i = 0; i < floats; i++) host[i] = (float)r + (float)i / (float)floats;
    if (before) before(r, UPLOAD_COMES);
    CHECK(K->upload_beside(Q, pair[1], host, bytes) == 0, "%s", MESSAGE);
    memset(host, 0xff, bytes); /* the source was read */
    if (before) before(r, JOIN_COMES);
    CHECK(K->join(Q) == 0, "%s", MESSAGE);
    void *arrived = pair[1];
    pair[1] = pair[0], pair[0] = arrived;
    CHECK(K->copy(Q, (char *)out + (size_t)r * bytes, arrived, bytes) == 0, "%s", MESSAGE);
  }
  CHECK(K->download(Q, back, out, bytes * (size_t)rounds) == 0, "%s", MESSAGE);
  for (int r = 0; r < rounds; r++)
    for (size_t i = 0; i < floats; i++)
      wrong += !(back[(size_t)r * floats + i] == (float)r + (float)i / (float)floats);
  K->release(Q, pair[0]);
  K->release(Q, pair[1]);
  K->release(Q, out);
  free(host), free(back);
  return wrong;
}

/* More rounds than the pinned ring has slots, and batches larger than a slot. */
TEST(uploads_beside) {
  const size_t wrong = ferry(100, 300, NULL), large = ferry(5, 200000, NULL);
  CHECK(wrong == 0 && large == 0, "%zu and %zu floats are wrong", wrong, large);
}

TEST(device_info) {
  pg_device_info info;
  CHECK(K->device_info(Q, &info) == 0, "%s", MESSAGE);
  CHECK(info.count >= 1 && strstr(info.name, "sm_"), "%d devices, %s", info.count, info.name);
  CHECK(info.memory_total > 0 && info.memory_free > 0 && info.memory_free <= info.memory_total,
        "%lld of %lld free", (long long)info.memory_free, (long long)info.memory_total);
  pg_queue *none = NULL;
  char why[256] = "";
  int count = info.count;
  CHECK(K->queue_new(&(pg_queue_options){.device = count}, &none, why, sizeof why) == -1 && !none,
        "device %d opened", count);
  CHECK(strstr(why, "device") && strlen(why) > 20, "said \"%s\"", why);
  CHECK(K->queue_new(&(pg_queue_options){.device = -1}, &none, NULL, 0) == -1 && !none,
        "device -1 opened");
}

/* The workspace from the first product on, a cloud's copy while its diameter is computed. */
TEST(own_memory_is_counted) {
  pg_queue *q = NULL;
  pg_farthest far;
  const pg_workload nothing = {0}, farthest = {.rows = 600, .cloud_columns = 64};
  int64_t workspace = 0, cloud = 0;
  char why[256];
  void *x = NULL, *out = NULL;
  const int64_t rows = 600, d = 64, copy = rows * d * (int64_t)sizeof(float);
  CHECK(K->queue_new(&(pg_queue_options){.threads = 1}, &q, why, sizeof why) == 0, "%s", why);
  CHECK(K->alloc(q, (size_t)copy, &x) == 0 && K->alloc(q, 64, &out) == 0, "%s", K->message(q));
  CHECK(K->zero(q, x, (size_t)copy) == 0 && K->workspace(q, &nothing, &workspace) == 0 &&
            K->workspace(q, &farthest, &cloud) == 0,
        "%s", K->message(q));
  CHECK(K->held(q) == 0, "a new queue holds memory, or counts what alloc gave");
  pg_gemm g = {.m = 1, .n = 1, .k = d, .alpha = 1, .lda = d, .ldb = 1, .ldc = 1};
  g.a = x, g.b = x, g.c = out;
  CHECK(K->gemm(q, &g) == 0, "%s", K->message(q));
  const int64_t held = K->held(q);
  CHECK(held > 0 && held <= workspace, "a product's workspace: %lld of %lld", (long long)held,
        (long long)workspace);
  float one = 1; /* all rows alike would need no copy */
  CHECK(K->upload(q, x, &one, sizeof one) == 0, "%s", K->message(q));
  CHECK(K->diameter(q, x, rows, d, NULL, &far) == 0 && far.value == 1, "%s", K->message(q));
  int64_t most = K->held(q), now = K->held(q);
  CHECK(most >= held + copy && now >= held && now < most - copy / 2 && most <= cloud,
        "%lld at most, %lld now", (long long)most, (long long)now);
  K->release(q, x);
  K->release(q, out);
  K->queue_free(q);
}

TEST(more_memory_than_there_is) {
  void *memory = &memory;
  CHECK(K->alloc(Q, (size_t)1 << 50, &memory) == -1 && !memory, "2^50 bytes allocated");
  CHECK(strstr(MESSAGE, "no memory") && strstr(MESSAGE, "1125899906842624"), "said \"%s\"",
        MESSAGE);
  CHECK(K->alloc(Q, 64, &memory) == 0 && memory, "%s", MESSAGE);
  K->release(Q, memory);
}

/* One small call of every operation that launches. */
static twin x, y, z, w, tokens, half, clip, sums;
static int call(int which) {
  const int64_t n = 6, d = 8;
  void *X = x.at[GPU], *Y = y.at[GPU], *Z = z.at[GPU], *W = w.at[GPU], *T = tokens.at[GPU];
  pg_view a = {X, d, 1}, b = {Y, d, 1}, out = {Z, d, 1};
  pg_farthest far;
  pg_gemm g = {.m = n,
               .n = n,
               .k = d,
               .alpha = 1,
               .lda = d,
               .ldb = d,
               .ldc = n,
               .transpose_b = true,
               .a = X,
               .b = Y,
               .c = Z};
  pg_adamw h = {1e-3, 0.9, 0.99, 1e-8, 1, 1};
  pg_target to = {.increment = W, .value = half.at[GPU], .keep = 0.9};
  switch (which) {
  case 0: return K->gemm(Q, &g);
  case 1: return K->embedding_forward(Q, PG_F32, T, n, X, d, Z);
  case 2: return K->embedding_backward(Q, PG_F32, T, n, X, d, 5, Z);
  case 3: return K->rmsnorm_forward(Q, PG_F32, X, n, d, 1e-6f, Z, W);
  case 4: return K->rmsnorm_backward(Q, PG_F32, X, Y, W, n, d, false, Z);
  case 5: return K->qk_norm_rope_forward(Q, PG_F32, X, 1, n, 2, 4, 1e-6f, Y, Y, Z, W);
  case 6: return K->qk_norm_rope_backward(Q, PG_F32, X, Y, W, 1, n, 2, 4, Y, Y, Z);
  case 7: return K->attention_forward(Q, PG_F32, X, Y, X, 1, n, 2, 4, Z, W);
  case 8:
    return K->attention_backward(Q, PG_F32, X, Y, X, Y, Z, W, 1, n, 2, 4, half.at[GPU],
                                 (float *)half.at[GPU] + 48, (float *)half.at[GPU] + 96);
  case 9: return K->swiglu_forward(Q, PG_F32, X, Y, n * d, Z);
  case 10: return K->swiglu_backward(Q, PG_F32, X, Y, Z, n * d, Y, Z);
  case 11: return K->cross_entropy(Q, PG_F32, X, n, d, d, T, 1, 1, true, W);
  case 12: return K->row_range(Q, X, n, d, d, W);
  case 13: return K->sum(Q, X, n * d, true, sums.at[GPU]);
  case 14: return K->clip_factor(Q, sums.at[GPU], 1, 1, clip.at[GPU]);
  case 15: return K->clip_apply(Q, clip.at[GPU], n * d, X);
  case 16: return K->adamw(Q, &h, X, n * d, Y, Z, &to);
  case 17: return K->apply(Q, -2, PG_F32, X, n * d, 1, &to);
  case 18: return K->convert(Q, PG_F32, X, PG_BF16, half.at[GPU], n * d);
  case 19: return K->binary(Q, PG_ADD, a, b, n, d, out);
  case 20: return K->scalar(Q, PG_MUL, a, 2, false, n, d, out);
  case 21: return K->unary(Q, PG_NEG, a, n, d, out);
  case 22: return K->lerp(Q, a, b, 0.5, n, d);
  case 23: return K->reduce(Q, PG_SUM, a, n, d, 0, W);
  case 24: return K->center_rows(Q, X, n, d, Z);
  case 25: return K->diameter(Q, X, n, d, NULL, &far);
  case 26: return K->copy(Q, Z, X, 64);
  case 27: return K->zero(Q, Z, 64);
  case 28: return K->rownorm(Q, &(pg_rownorm){1e-3, 0.9, 1e-8}, X, n, d, Y, &to);
  case 29:
    return K->momentum(Q, 0.9, true, 2, (const float *[]){X, Y}, (float *[]){Z, half.at[GPU]}, 16,
                       (float *)half.at[GPU] + 16, W);
  case 30: return K->upload_beside(Q, Z, &h, sizeof h) < 0 ? -1 : K->join(Q);
  default: return 1;
  }
}
static void make_operands(void) {
  unit_seed(71);
  x = normals(PG_F32, 48, 1), y = normals(PG_F32, 48, 1), z = normals(PG_F32, 48, 1);
  w = normals(PG_F32, 48, 1), half = normals(PG_F32, 144, 1), tokens = tokens_below(6, 5);
  clip = poisoned(PG_F64, 2), sums = poisoned(PG_F64, 1);
}
#define CALLS 31

TEST(every_operation_runs) {
  make_operands();
  for (int c = 0; c < CALLS; c++) CHECK(call(c) == 0, "call %d: %s", c, MESSAGE);
  CHECK(call(CALLS) == 1, "calls are counted");
  CHECK(K->synchronize(Q) == 0, "%s", MESSAGE);
  drop_twins();
}

/* Stamps follow the work between them, on both sides; numbers may be used again. */
TEST(time_stamps) {
  const int64_t n = 1 << 16;
  twin from = normals(PG_F32, n, 1), to = poisoned(PG_F32, n);
  double seconds[40];
  for (int round = 0; round < 2; round++)
    for (int s = 0; s < 2; s++) {
      for (int i = 0; i < 40; i++) {
        ON(s, timestamp, i);
        ON(s, copy, P(to), P(from), (size_t)n * sizeof(float));
      }
      ON(s, elapsed, 40, seconds);
      CHECK(seconds[0] == 0, "stamp 0 at %g", seconds[0]);
      for (int i = 1; i < 40; i++)
        CHECK(seconds[i] >= seconds[i - 1] && seconds[i] < 60, "%s: stamp %d at %g after %g",
              sides[s].k->name, i, seconds[i], seconds[i - 1]);
      CHECK(seconds[39] > 0, "%s: 39 copies in no time", sides[s].k->name);
    }
  drop_twins();
}

#ifdef PG_CUDAEMU
static int open_queue(char *why, size_t size) {
  pg_queue *opened = NULL;
  int status = K->queue_new(&(pg_queue_options){.threads = 1}, &opened, why, size);
  CHECK((status == 0) == (opened != NULL), "status %d, queue %p", status, (void *)opened);
  K->queue_free(opened);
  return status;
}

/* Streams run in random order, and still every batch arrives; without either of the two waits that
 * hold them together it does not: the upload's for what used the buffer, the join's for the upload.
 */
static int left_out = -1;
static void leave_out_a_wait(int round, int what) {
  char streams[32];
  snprintf(streams, sizeof streams, "random:%d", 2 * round + what);
  emulate("CUDAEMU_STREAMS", streams);
  emulate("CUDAEMU_SKIP", what == left_out ? "cudaStreamWaitEvent:1" : NULL);
}
TEST(uploads_beside_wait_for_each_other) {
  const char *before = getenv("CUDAEMU_STREAMS");
  char kept[64];
  snprintf(kept, sizeof kept, "%s", before ? before : "");
  for (left_out = -1; left_out <= JOIN_COMES; left_out++) {
    const size_t wrong = ferry(100, 300, leave_out_a_wait);
    CHECK((wrong == 0) == (left_out < 0), "wait %d left out: %zu floats are wrong", left_out,
          wrong);
  }
  emulate("CUDAEMU_SKIP", NULL);
  emulate("CUDAEMU_STREAMS", before ? kept : NULL);
}

TEST(no_device) {
  char why[256] = "";
  emulate("CUDAEMU_DEVICES", "0");
  CHECK(open_queue(why, sizeof why) == -1 && strlen(why) > 10, "said \"%s\"", why);
  emulate("CUDAEMU_DEVICES", NULL);
  CHECK(open_queue(why, sizeof why) == 0, "said \"%s\"", why);
}

/* Each call that opening a queue makes fails once. */
TEST(opening_fails) {
  const char *calls[] = {"cudaGetDeviceCount", "cudaSetDevice", "cudaGetDeviceProperties",
                         "cudaStreamCreate",   "launch",        "cudaStreamSynchronize"};
  for (int c = 0; c < 6; c++) {
    char fail[64], why[256] = "";
    snprintf(fail, sizeof fail, "%s:1", calls[c]);
    emulate("CUDAEMU_FAIL", fail);
    CHECK(open_queue(why, sizeof why) == -1, "%s did not matter", calls[c]);
    CHECK(strlen(why) > 10, "%s: said \"%s\"", calls[c], why);
    emulate("CUDAEMU_FAIL", NULL);
    CHECK(open_queue(why, sizeof why) == 0, "after %s: \"%s\"", calls[c], why);
  }
}

/* The first, the second, ... launch of every operation fails: -1 and a text that names a kernel or
 * a call; then the same operation works. */
TEST(launches_fail) {
  make_operands();
  for (int c = 0; c < CALLS; c++) {
    int failed = 0;
    const char *what = c == 0    ? "cublasLtMatmul"
                       : c == 26 ? "cudaMemcpyAsync"
                       : c == 30 ? "cudaMemcpyAsync"
                       : c == 27 ? "cudaMemsetAsync"
                                 : "launch";
    for (int nth = 1; nth < 40; nth++) {
      char fail[64];
      snprintf(fail, sizeof fail, "%s:%d", what, nth);
      emulate("CUDAEMU_FAIL", fail);
      int status = call(c);
      if (status == 0) break;
      CHECK(status == -1 && strlen(MESSAGE) > 10, "call %d, %s: %d, \"%s\"", c, fail, status,
            MESSAGE);
      failed++;
    }
    emulate("CUDAEMU_FAIL", NULL);
    CHECK(failed > 0, "call %d: no failure of %s noticed", c, what);
    CHECK(call(c) == 0, "call %d afterwards: %s", c, MESSAGE);
  }
  CHECK(K->synchronize(Q) == 0, "%s", MESSAGE);
  drop_twins();
}

/* An allocation fails, the n-th for every n, on a queue that has no memory yet. */
TEST(allocations_fail) {
  for (int c = 0; c < CALLS; c++)
    for (int nth = 1; nth < 20; nth++) {
      pg_queue *before = Q;
      char fail[64], why[256];
      CHECK(K->queue_new(&(pg_queue_options){.threads = 1}, &Q, why, sizeof why) == 0, "%s", why);
      make_operands();
      snprintf(fail, sizeof fail, "cudaMalloc:%d", nth);
      emulate("CUDAEMU_FAIL", fail);
      int status = call(c);
      CHECK(status == 0 || strlen(MESSAGE) > 10, "call %d, %s: \"%s\"", c, fail, MESSAGE);
      emulate("CUDAEMU_FAIL", NULL);
      CHECK(call(c) == 0, "call %d after %s: %s", c, fail, MESSAGE);
      drop_twins();
      K->queue_free(Q);
      Q = before;
      if (status == 0) break;
    }
}

TEST(copies_fail) {
  const char *calls[] = {"cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize",
                         "cudaMallocHost", "cudaEventCreate"};
  for (int c = 0; c < 5; c++)
    for (int down = 0; down < 2; down++) {
      pg_queue *before = Q;
      char fail[64], host[64] = "", why[256];
      void *memory = NULL;
      CHECK(K->queue_new(&(pg_queue_options){.threads = 1}, &Q, why, sizeof why) == 0, "%s", why);
      CHECK(K->alloc(Q, 64, &memory) == 0, "%s", MESSAGE);
      snprintf(fail, sizeof fail, "%s:1", calls[c]);
      emulate("CUDAEMU_FAIL", fail);
      int status = down ? K->download(Q, host, memory, 64) : K->upload(Q, memory, host, 64);
      CHECK(status == -1 && strlen(MESSAGE) > 10, "%s: %d, \"%s\"", calls[c], status, MESSAGE);
      emulate("CUDAEMU_FAIL", NULL);
      CHECK(K->upload(Q, memory, host, 64) == 0, "after %s: %s", calls[c], MESSAGE);
      K->release(Q, memory);
      K->queue_free(Q);
      Q = before;
    }
}

/* Queued work fails while it runs: the next call that waits says so, and every later one. */
TEST(work_fails_later) {
  pg_queue *before = Q;
  char why[256];
  CHECK(K->queue_new(&(pg_queue_options){.threads = 1}, &Q, why, sizeof why) == 0, "%s", why);
  make_operands();
  CHECK(K->synchronize(Q) == 0, "%s", MESSAGE);
  emulate("CUDAEMU_FAIL", "execute:1");
  int launched = call(21); /* eager streams notice at once, others at the next wait */
  CHECK(launched == 0 || strlen(MESSAGE) > 10, "%s", MESSAGE);
  CHECK(K->synchronize(Q) == -1 && strstr(MESSAGE, "illegal"), "\"%s\"", MESSAGE);
  CHECK(K->synchronize(Q) == -1, "the error went away");
  emulate("CUDAEMU_FAIL", NULL);
  drop_twins();
  K->queue_free(Q);
  Q = before;
}

/* 64 MB: what does not fit is refused, what was released is used again, and the diameter of a cloud
 * whose copy does not fit says what is missing. */
TEST(little_memory) {
  char why[256];
  void *a = NULL, *b = NULL;
  K->queue_free(Q); /* with what it keeps of released memory */
  emulate("CUDAEMU_MEMORY", "64m");
  CHECK(K->queue_new(&(pg_queue_options){.threads = 1}, &Q, why, sizeof why) == 0, "%s", why);
  CHECK(K->alloc(Q, (size_t)40 << 20, &a) == 0, "%s", MESSAGE);
  CHECK(K->alloc(Q, (size_t)40 << 20, &b) == -1 && !b && strstr(MESSAGE, "no memory"), "%s",
        MESSAGE);
  pg_farthest far;
  int64_t d = 1 << 20;
  CHECK(K->zero(Q, a, (size_t)40 << 20) == 0, "%s", MESSAGE);
  CHECK(K->diameter(Q, a, 10, d, NULL, &far) == -1 && strstr(MESSAGE, "no memory"), "%s", MESSAGE);
  K->release(Q, a);
  /* Another size: the cached buffer goes back to the driver first. */
  CHECK(K->alloc(Q, (size_t)48 << 20, &b) == 0, "%s", MESSAGE);
  K->release(Q, b);
  K->queue_free(Q);
  emulate("CUDAEMU_MEMORY", NULL);
  CHECK(K->queue_new(&(pg_queue_options){.threads = 1}, &Q, why, sizeof why) == 0, "%s", why);
}
#endif

int main(void) {
  open_sides();
  RUN(upload_copy_zero_download);
  RUN(uploads_beside);
  RUN(device_info);
  RUN(own_memory_is_counted);
  RUN(time_stamps);
  RUN(more_memory_than_there_is);
  RUN(every_operation_runs);
#ifdef PG_CUDAEMU
  RUN(uploads_beside_wait_for_each_other);
  RUN(no_device);
  RUN(opening_fails);
  RUN(launches_fail);
  RUN(allocations_fail);
  RUN(copies_fail);
  RUN(little_memory);
  RUN(work_fails_later);
#endif
  return close_sides();
}
