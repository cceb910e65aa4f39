/* The loader: order, splits, state, errors and faults (SPEC §2, REFERENCE A2, CASES 1 to 5). */
#include "core/json.h"
#include "core/random.h"
#include "data_files.h"
#include <errno.h>
#include <sys/syscall.h>

static pg_context *ctx;
static char folder[64];

/* ---- faults: libuv reads through pread, which this program replaces ---- */
static struct {
  _Atomic bool on;
  _Atomic size_t most;                           /* bytes per read, 0: all */
  _Atomic int interrupt, sleep_ms, error, reads; /* reads: counted while on */
} fault; /* read by the pool's threads, some of them behind the test's back */

static void end_faults(void) {
  fault.on = false;
  fault.most = 0;
  fault.interrupt = fault.sleep_ms = fault.error = fault.reads = 0;
}

static ssize_t faulty_pread(int fd, void *data, size_t size, off_t offset) {
  if (fault.on) {
    const int n = ++fault.reads;
    if (fault.sleep_ms) usleep((useconds_t)fault.sleep_ms * 1000);
    if (fault.error || (fault.interrupt && n % fault.interrupt == 0)) {
      errno = fault.error ? fault.error : EINTR;
      return -1;
    }
    if (fault.most && size > fault.most) size = fault.most;
  }
  return syscall(SYS_pread64, fd, data, size, offset);
}
__attribute__((visibility("default"))) ssize_t pread(int fd, void *data, size_t size, off_t offset);
ssize_t pread(int fd, void *data, size_t size, off_t offset) {
  return faulty_pread(fd, data, size, offset);
}
__attribute__((visibility("default"))) ssize_t pread64(int fd, void *data, size_t size,
                                                       off_t offset);
ssize_t pread64(int fd, void *data, size_t size, off_t offset) {
  return faulty_pread(fd, data, size, offset);
}

/* ---- helpers --------------------------------------------------------------------------------- */
static pg_loader_options options(int64_t time, int64_t batch, int64_t micro) {
  return (pg_loader_options){.folder = folder,
                             .pattern = "*_train_*.bin",
                             .time = time,
                             .batch = batch,
                             .micro = micro,
                             .world = 1,
                             .vocab = 65536,
                             .shuffle = true};
}

static pg_loader *must_open(const pg_loader_options *o) {
  pg_loader *loader = NULL;
  int status = pg_loader_open(ctx, o, &loader);
  CHECK(status == 0, "%s", pg_context_message(ctx));
  if (status < 0) exit(unit_report() + 1);
  return loader;
}

static void must_next(pg_loader *loader, int32_t *inputs, int32_t *targets) {
  int status = pg_loader_next(loader, inputs, targets);
  CHECK(status == 0, "%s", pg_context_message(ctx));
}

static void expect(int status, int want, const char *const *parts) {
  const char *message = pg_context_message(ctx);
  CHECK(status == want, "status %d, want %d: %s", status, want, message);
  for (; *parts; parts++) CHECK(strstr(message, *parts), "\"%s\" lacks \"%s\"", message, *parts);
}
#define EXPECT(status, want, ...) expect((status), (want), (const char *const[]){__VA_ARGS__, NULL})

/* Three shards of 1000, 30 (too small for a batch of 8 sequences of 5) and 500 distinct tokens. */
static void make_three(void) {
  data_folder(folder);
  data_count_shard(ctx, data_path(folder, "x_train_1.bin"), 0, 1000, 65536);
  data_count_shard(ctx, data_path(folder, "x_train_2.bin"), 10000, 30, 65536);
  data_count_shard(ctx, data_path(folder, "x_train_3.bin"), 20000, 500, 65536);
}

/* ---- order ----------------------------------------------------------------------------------- */
TEST(small_sequential_case) {
  int32_t in[8], out[8];
  data_folder(folder);
  data_count_shard(ctx, data_path(folder, "x_train_1.bin"), 0, 21, 100);
  pg_loader_options o = options(4, 0, 2);
  o.shuffle = false;
  pg_loader *l = must_open(&o);
  CHECK(pg_loader_batches(l) == 2);
  for (int pass = 0; pass < 2; pass++) {
    for (int group = 0; group < 2; group++) {
      must_next(l, in, out);
      for (int i = 0; i < 8; i++)
        CHECK(in[i] == 8 * group + i && out[i] == in[i] + 1, "%d: %d %d", i, in[i], out[i]);
    }
    EXPECT(pg_loader_next(l, in, out), PG_EDATA, folder, "2 groups of 2");
    CHECK(pg_loader_rewind(l) == 0);
  }
  pg_loader_close(l);
  o.micro = 1;
  o.world = 2;
  for (o.rank = 0; o.rank < 2; o.rank++) {
    l = must_open(&o);
    must_next(l, in, out);
    for (int i = 0; i < 4; i++) CHECK(in[i] == 4 * o.rank + i && out[i] == in[i] + 1);
    pg_loader_close(l);
  }
  data_folder_remove(folder);
}

TEST(published_small_order) {
  /* 129 tokens, T 4, batch 4, seed 31: groups 7,3,1,5,4,2,6,0 */
  static const int groups[8] = {7, 3, 1, 5, 4, 2, 6, 0};
  int32_t in[16], out[16];
  data_folder(folder);
  data_count_shard(ctx, data_path(folder, "x_train_1.bin"), 0, 129, 1000);
  pg_loader_options o = options(4, 4, 4);
  o.seed = 31;
  pg_loader *l = must_open(&o);
  CHECK(pg_loader_batches(l) == 8);
  for (int g = 0; g < 8; g++) {
    must_next(l, in, out);
    for (int i = 0; i < 16; i++) CHECK(in[i] == 16 * groups[g] + i && out[i] == in[i] + 1);
  }
  CHECK(pg_loader_rewind(l) == PG_ESTATE);
  pg_loader_close(l);
  data_folder_remove(folder);
}

TEST(first_batch_of_the_golden_trajectory) {
  int32_t in[8 * 16], out[8 * 16];
  json_t *root = NULL;
  int status = pg__json_load(ctx, PG_TEST_DIR "/golden/trajectory/expected.json", 0, &root);
  CHECK(status == 0, "%s", pg_context_message(ctx));
  if (status < 0) return;
  const json_t *first = json_object_get(root, "first_batch");
  pg_loader_options o = options(16, 8, 8);
  o.folder = PG_TEST_DIR "/golden/trajectory";
  o.seed = 3;
  pg_loader *l = must_open(&o);
  must_next(l, in, out);
  int64_t sum = 0;
  for (int i = 0; i < 8 * 16; i++) sum += in[i];
  for (size_t i = 0; i < 16; i++) {
    CHECK(in[i] == json_integer_value(json_array_get(json_object_get(first, "inputs_row0"), i)));
    CHECK(out[i] == json_integer_value(json_array_get(json_object_get(first, "targets_row0"), i)));
  }
  CHECK(sum == json_integer_value(json_object_get(first, "input_sum")), "%lld", (long long)sum);
  pg_loader_close(l);
  json_decref(root);
}

/* The order written out plainly: epochs of shuffled shards of shuffled batches. */
TEST(several_epochs_follow_the_rule) {
  static const int64_t tokens[3] = {1000, 30, 500}, firsts[3] = {0, 10000, 20000};
  int32_t in[8 * 5], out[8 * 5];
  make_three();
  pg_loader_options o = options(5, 8, 8);
  o.seed = 77;
  pg_loader *l = must_open(&o);
  int64_t served = 0;
  pg_loader_state state;
  for (uint64_t epoch = 0; epoch < 3; epoch++) {
    int64_t shards[3], order[64];
    pg_pcg64 rng;
    pg_pcg64_seed(&rng, (uint64_t[]){77, epoch, 0}, 3);
    pg_shuffle(&rng, shards, 3);
    for (int s = 0; s < 3; s++) {
      int64_t n = (tokens[shards[s]] - 1) / 5 / 8;
      pg_pcg64_seed(&rng, (uint64_t[]){77, epoch, (uint64_t)shards[s], 1}, 4);
      pg_shuffle(&rng, order, n);
      for (int64_t b = 0; b < n; b++) {
        pg_loader_get_state(l, &state);
        CHECK(state.epoch == (int64_t)epoch && state.batches == served++);
        must_next(l, in, out);
        for (int i = 0; i < 40; i++)
          CHECK(in[i] == firsts[shards[s]] + order[b] * 40 + i && out[i] == in[i] + 1);
      }
    }
  }
  /* Shards 1 and 3 give 24 and 12 batches; the second has none. */
  CHECK(pg_loader_batches(l) == 36 && served == 3 * 36);
  pg_loader_close(l);
  data_folder_remove(folder);
}

TEST(three_batches_serve_ten_updates) {
  int32_t in[8], out[8];
  data_folder(folder);
  data_count_shard(ctx, data_path(folder, "x_train_1.bin"), 0, 25, 100);
  pg_loader_options o = options(4, 2, 2);
  pg_loader *l = must_open(&o);
  pg_loader_state state;
  for (int update = 0; update < 10; update++) {
    pg_loader_get_state(l, &state);
    CHECK(state.epoch == update / 3);
    must_next(l, in, out);
  }
  pg_loader_close(l);
  data_folder_remove(folder);
}

TEST(any_split_gives_the_same_batches) {
  enum { T = 5, B = 8, UPDATES = 50 };
  static int32_t want[UPDATES][B * T], got[B * T], in[B * T], out[B * T];
  uint64_t hashes[UPDATES];
  make_three();
  pg_loader_options o = options(T, B, B);
  pg_loader *l = must_open(&o);
  for (int u = 0; u < UPDATES; u++) {
    must_next(l, want[u], out);
    hashes[u] = pg_loader_batch_hash(l);
    for (int v = 0; v < u % 36; v++) CHECK(u >= 36 || hashes[u] != hashes[v]);
  }
  pg_loader_close(l);
  for (int64_t world = 1; world <= 8; world *= 2)
    for (int64_t micro = 1; micro * world <= B; micro *= 2) {
      pg_loader *ranks[8];
      for (int64_t r = 0; r < world; r++) {
        o.rank = r;
        o.world = world;
        o.micro = micro;
        o.depth = (int)(1 + r);
        ranks[r] = must_open(&o);
      }
      for (int u = 0; u < UPDATES; u++) {
        uint64_t sum = 0;
        for (int64_t r = 0; r < world; r++) {
          for (int64_t m = 0; m < B / (micro * world); m++) {
            must_next(ranks[r], in, out);
            memcpy(got + (m * micro * world + r * micro) * T, in, (size_t)(micro * T) * 4);
          }
          sum += pg_loader_batch_hash(ranks[r]);
        }
        CHECK(memcmp(got, want[u], sizeof got) == 0, "world %d micro %d update %d", (int)world,
              (int)micro, u);
        CHECK(sum == hashes[u], "world %d micro %d update %d", (int)world, (int)micro, u);
      }
      for (int64_t r = 0; r < world; r++) pg_loader_close(ranks[r]);
    }
  data_folder_remove(folder);
}

/* The hash sees every token, its place, and the place of its sequence. */
TEST(hash_sees_every_change) {
  int32_t in[8], out[8];
  uint16_t tokens[9] = {5, 1, 2, 3, 5, 1, 2, 3, 5};
  uint64_t seen[32];
  int count = 0;
  for (int change = -1; change < 9; change++) {
    for (int swap = 0; swap < 2; swap++) {
      uint16_t t[9];
      memcpy(t, tokens, sizeof t);
      if (change >= 0) t[change] ^= 8;
      if (swap && change < 0) t[5] = 2, t[6] = 1;
      if (swap && change >= 0) t[(change + 1) % 9] ^= 16;
      data_folder(folder);
      data_raw_shard(data_path(folder, "x_train_1.bin"), PG_SHARD_MAGIC, 1, 9, 0, t, 9);
      pg_loader_options o = options(4, 2, 2);
      pg_loader *l = must_open(&o);
      must_next(l, in, out);
      seen[count] = pg_loader_batch_hash(l);
      for (int i = 0; i < count; i++) CHECK(seen[i] != seen[count]);
      count++;
      pg_loader_close(l);
      data_folder_remove(folder);
    }
  }
}

/* ---- position -------------------------------------------------------------------------------- */
TEST(position_is_exact_with_reads_in_flight) {
  enum { T = 5, B = 8, UPDATES = 80 };
  static int32_t want[UPDATES][B * T], in[B * T], out[B * T];
  static uint64_t hashes[UPDATES];
  pg_loader_state states[UPDATES];
  make_three();
  pg_loader_options o = options(T, B, B);
  pg_loader *l = must_open(&o);
  for (int u = 0; u < UPDATES; u++) {
    pg_loader_get_state(l, &states[u]);
    must_next(l, want[u], out);
    hashes[u] = pg_loader_batch_hash(l);
  }
  pg_loader_close(l);
  /* A new loader from each state; and one loader thrown about, from the middle of a batch too. */
  o.micro = 2;
  o.depth = 7;
  pg_loader *other = must_open(&o);
  o.micro = 4;
  for (int u = 0; u < UPDATES; u++) {
    pg_loader_state now;
    int at = (u * 37) % UPDATES;
    CHECK(pg_loader_set_state(other, &states[at]) == 0, "%s", pg_context_message(ctx));
    for (int m = 0; m < 1 + u % 4; m++) {
      pg_loader_get_state(other, &now);
      CHECK(memcmp(&now, &states[at], sizeof now) == 0, "in the middle of update %d", at);
      must_next(other, in, out);
      CHECK(memcmp(in, want[at] + m * 2 * T, 2 * T * 4) == 0);
    }
    l = must_open(&o);
    CHECK(pg_loader_set_state(l, &states[u]) == 0, "%s", pg_context_message(ctx));
    for (int v = u; v < u + 3 && v < UPDATES; v++) {
      must_next(l, in, out);
      must_next(l, in + 4 * T, out);
      CHECK(memcmp(in, want[v], sizeof in) == 0 && pg_loader_batch_hash(l) == hashes[v]);
    }
    pg_loader_close(l);
  }
  pg_loader_close(other);
  data_folder_remove(folder);
}

TEST(positions_that_do_not_exist_are_refused) {
  int32_t in[40], out[40];
  make_three();
  pg_loader_options o = options(5, 8, 8);
  pg_loader *l = must_open(&o);
  static const pg_loader_state bad[] = {{-1, 0, 0, 0},       {0, 3, 0, 0},  {0, -1, 0, 0},
                                        {0, 0, 25, 0},       {0, 0, -1, 0}, {0, 0, 0, -1},
                                        {INT64_MAX, 0, 0, 0}};
  must_next(l, in, out);
  int32_t second[40];
  pg_loader_state state, after;
  pg_loader_get_state(l, &state);
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    EXPECT(pg_loader_set_state(l, &bad[i]), PG_EDATA, "data position");
    pg_loader_get_state(l, &after);
    CHECK(memcmp(&state, &after, sizeof state) == 0);
  }
  must_next(l, in, out);
  CHECK(pg_loader_set_state(l, &state) == 0);
  must_next(l, second, out);
  CHECK(memcmp(in, second, sizeof in) == 0);
  pg_loader_close(l);
  data_folder_remove(folder);
}

/* ---- bad data -------------------------------------------------------------------------------- */
TEST(tokens_outside_the_vocabulary_are_located) {
  int32_t in[8], out[8];
  static const uint16_t bad[2] = {50257, 65535};
  static const int64_t at[3] = {0, 11, 24}; /* 24 is only ever a target, the very last */
  for (int b = 0; b < 2; b++)
    for (int k = 0; k < 3; k++) {
      data_folder(folder);
      data_count_shard(ctx, data_path(folder, "x_train_1.bin"), 0, 25, 100);
      data_poke(data_path(folder, "x_train_1.bin"), at[k], &bad[b], 1);
      pg_loader_options o = options(4, 2, 2);
      o.vocab = 50257;
      pg_loader *l = must_open(&o);
      char offset[32], value[32];
      snprintf(offset, sizeof offset, "offset %d ", (int)at[k]);
      snprintf(value, sizeof value, "id %d ", bad[b]);
      int status = 0;
      for (int u = 0; u < 3 && status == 0; u++) status = pg_loader_next(l, in, out);
      EXPECT(status, PG_EDATA, "x_train_1.bin", offset, value, "50257 tokens");
      EXPECT(pg_loader_next(l, in, out), PG_EDATA, offset); /* and again, not the next batch */
      pg_loader_close(l);
      data_folder_remove(folder);
    }
}

TEST(too_little_data_states_both_numbers) {
  pg_loader *l = (pg_loader *)1;
  make_three();
  pg_loader_options o = options(5, 200, 200);
  EXPECT(pg_loader_open(ctx, &o, &l), PG_EDATA, "199 sequences", "200", folder);
  CHECK(l == NULL);
  o = options(INT64_MAX / 2, 8, 8);
  EXPECT(pg_loader_open(ctx, &o, &l), PG_EDATA, "0 sequences");
  o = options(5, 8, 8);
  o.shuffle = false;
  o.world = 25;
  EXPECT(pg_loader_open(ctx, &o, &l), PG_EDATA, "199 sequences", "200");
  data_folder_remove(folder);
}

TEST(impossible_options_are_refused) {
  pg_loader *l = (pg_loader *)1;
  make_three();
  static const struct {
    int64_t time, batch, micro, rank, world, vocab;
    int depth;
    const char *part;
  } cases[] = {
      {0, 8, 8, 0, 1, 9, 0, "time is 0"},         {5, 0, 8, 0, 1, 9, 0, "0 sequences"},
      {5, 8, 0, 0, 1, 9, 0, "micro is 0"},        {5, 8, 3, 0, 1, 9, 0, "8 sequences"},
      {5, 8, 8, 1, 1, 9, 0, "rank is 1"},         {5, 8, 8, -1, 1, 9, 0, "rank is -1"},
      {5, 8, 8, 0, 0, 9, 0, "world is 0"},        {5, 8, 8, 0, 1, 0, 0, "vocab is 0"},
      {5, 8, 8, 0, 1, 9, -1, "depth is -1"},      {5, 8, 8, 0, 1, 9, 1 << 20, "depth is 1048576"},
      {5, 8, INT64_MAX, 0, 3, 9, 0, "too large"}, {5, 8, 4, 0, 4, 9, 0, "4 ranks"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    pg_loader_options o = options(cases[i].time, cases[i].batch, cases[i].micro);
    o.rank = cases[i].rank;
    o.world = cases[i].world;
    o.vocab = cases[i].vocab;
    o.depth = cases[i].depth;
    EXPECT(pg_loader_open(ctx, &o, &l), PG_EINVAL, cases[i].part);
    CHECK(l == NULL);
  }
  pg_loader_close(NULL);
  data_folder_remove(folder);
}

/* What happens to a file while a loader uses it, and the word the error must have. */
static void truncate_file(char *path) {
  CHECK(truncate(path, 1024 + 2 * 7) == 0);
}
static void replace_file(char *path) {
  data_count_shard(ctx, path, 500, 4001, 65536); /* written beside it and renamed */
}
static void write_file(char *path) {
  uint16_t x = 9;
  usleep(20000); /* past the clock tick of the file's time */
  data_poke(path, 3, &x, 1);
}
static void remove_file(char *path) {
  CHECK(unlink(path) == 0);
}

TEST(files_changed_while_in_use_are_named) {
  static int32_t in[8 * 50], out[8 * 50];
  static const struct {
    void (*change)(char *path);
    const char *word;
  } cases[] = {{truncate_file, "while in use"},
               {replace_file, "replaced"},
               {write_file, "written"},
               {remove_file, "removed"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int other_shard = 0; other_shard < 2; other_shard++) {
      data_folder(folder);
      char *first = data_path(folder, "x_train_1.bin"),
           *second = data_path(folder, "x_train_2.bin");
      data_count_shard(ctx, first, 0, 4001, 65536);
      data_count_shard(ctx, second, 0, 4001, 65536);
      pg_loader_options o = options(50, 8, 8);
      o.depth = 1;
      pg_loader *l = must_open(&o);
      must_next(l, in, out);
      cases[i].change(first);
      cases[i].change(second);
      int status = 0, served = 0;
      while (served < 100 && (status = pg_loader_next(l, in, out)) == 0) served++;
      CHECK(served == 0, "case %zu: %d micro-batches of a changed file", i, served);
      EXPECT(status, PG_EFORMAT, "x_train_", "while in use", cases[i].word);
      EXPECT(pg_loader_next(l, in, out), PG_EFORMAT, cases[i].word);
      pg_loader_close(l);
      data_folder_remove(folder);
    }
}

TEST(a_file_changed_before_its_turn_is_named) {
  static int32_t in[8 * 50], out[8 * 50];
  data_folder(folder);
  char *first = data_path(folder, "x_train_1.bin"), *second = data_path(folder, "x_train_2.bin");
  data_count_shard(ctx, first, 0, 4001, 65536);
  data_count_shard(ctx, second, 0, 4001, 65536);
  pg_loader_options o = options(50, 8, 8);
  o.shuffle = false;
  pg_loader *l = must_open(&o);
  replace_file(second);
  for (int i = 0; i < 10; i++) must_next(l, in, out); /* all of the first */
  EXPECT(pg_loader_next(l, in, out), PG_EFORMAT, "x_train_2.bin", "replaced");
  /* The error belongs to the position: from the start the first shard is served again. */
  CHECK(pg_loader_rewind(l) == 0);
  must_next(l, in, out);
  CHECK(in[0] == 0);
  pg_loader_close(l);
  data_folder_remove(folder);
}

/* ---- large files and faults ---- */
TEST(offsets_beyond_two_gigabytes) {
  enum { COUNT = (1 << 30) + (1 << 20), T = 1024 };
  static int32_t in[T], out[T];
  data_folder(folder);
  char *path = data_path(folder, "x_val_000000.bin");
  data_sparse_shard(path, COUNT);
  uint16_t mark[4] = {11, 22, 33, 44};
  /* The last whole window ends at the last token but 1023; T * floor((COUNT - 1) / T) + 1. */
  int64_t windows = (COUNT - 1) / T;
  data_poke(path, (windows - 1) * T, mark, 2);
  data_poke(path, windows * T - 1, mark + 2, 2);
  CHECK(1024 + 2 * (windows - 1) * T > (int64_t)1 << 31);
  pg_loader_options o = options(T, 1, 1);
  o.pattern = "*_val_*.bin";
  o.shuffle = false;
  pg_loader *l = must_open(&o);
  CHECK(pg_loader_batches(l) == windows);
  pg_loader_state state = {0, 0, windows - 2, windows - 2};
  CHECK(pg_loader_set_state(l, &state) == 0, "%s", pg_context_message(ctx));
  must_next(l, in, out);
  CHECK(in[0] == 0 && out[T - 1] == 11);
  must_next(l, in, out);
  CHECK(in[0] == 11 && in[1] == 22 && in[T - 1] == 33 && out[0] == 22 && out[T - 1] == 44);
  EXPECT(pg_loader_next(l, in, out), PG_EDATA, "ended");
  pg_loader_close(l);
  data_folder_remove(folder);
}

TEST(short_and_interrupted_reads_change_nothing) {
  static int32_t want[36 * 40], in[40], out[40];
  make_three();
  pg_loader_options o = options(5, 8, 8);
  pg_loader *l = must_open(&o);
  for (int u = 0; u < 36; u++) must_next(l, want + 40 * u, out);
  pg_loader_close(l);
  fault.on = true;
  fault.most = 7; /* of 82 bytes, odd so that tokens are split */
  fault.interrupt = 3;
  l = must_open(&o);
  for (int u = 0; u < 36; u++) {
    must_next(l, in, out);
    CHECK(memcmp(in, want + 40 * u, sizeof in) == 0 && out[0] == in[1]);
  }
  CHECK(fault.reads > 36 * 12, "too few reads were disturbed");
  pg_loader_close(l);
  end_faults();
  data_folder_remove(folder);
}

TEST(a_read_error_is_named) {
  int32_t in[40], out[40];
  make_three();
  pg_loader_options o = options(5, 8, 8);
  o.depth = 2;
  pg_loader *l = must_open(&o);
  must_next(l, in, out);
  must_next(l, in, out);
  fault.on = true;
  fault.error = EIO;
  int status = 0;
  for (int i = 0; i < 3 && status == 0; i++) status = pg_loader_next(l, in, out);
  EXPECT(status, PG_EIO, "x_train_", "cannot be read");
  end_faults();
  /* Setting the position anew, even to where it is, tries again. */
  pg_loader_state state;
  pg_loader_get_state(l, &state);
  CHECK(pg_loader_set_state(l, &state) == 0);
  must_next(l, in, out);
  pg_loader_close(l);
  data_folder_remove(folder);
}

TEST(waiting_is_measured_and_can_be_cancelled) {
  int32_t in[40], out[40];
  make_three();
  pg_loader_options o = options(5, 8, 8);
  o.depth = 1;
  fault.on = true;
  fault.sleep_ms = 40;
  pg_loader *l = must_open(&o);
  must_next(l, in, out);
  must_next(l, in, out);
  double wait = pg_loader_wait_seconds(l);
  CHECK(wait > 0.02 && wait < 60, "%g", wait);
  usleep(200000); /* the read ahead ends meanwhile */
  must_next(l, in, out);
  CHECK(pg_loader_wait_seconds(l) == wait, "a ready micro-batch costs no wait");
  fault.sleep_ms = 400;
  must_next(l, in, out); /* read ahead at 40 ms or 400 ms; the next one at 400 ms */
  pg_context_cancel(ctx);
  EXPECT(pg_loader_next(l, in, out), PG_ECANCELED, "cancelled");
  pg_context_resume(ctx);
  must_next(l, in, out);
  pg_loader_close(l);
  end_faults();
  data_folder_remove(folder);
}

int main(void) {
  ctx = data_context();
  RUN(small_sequential_case);
  RUN(published_small_order);
  RUN(first_batch_of_the_golden_trajectory);
  RUN(several_epochs_follow_the_rule);
  RUN(three_batches_serve_ten_updates);
  RUN(any_split_gives_the_same_batches);
  RUN(hash_sees_every_change);
  RUN(position_is_exact_with_reads_in_flight);
  RUN(positions_that_do_not_exist_are_refused);
  RUN(tokens_outside_the_vocabulary_are_located);
  RUN(too_little_data_states_both_numbers);
  RUN(impossible_options_are_refused);
  RUN(files_changed_while_in_use_are_named);
  RUN(a_file_changed_before_its_turn_is_named);
  RUN(offsets_beyond_two_gigabytes);
  RUN(short_and_interrupted_reads_change_nothing);
  RUN(a_read_error_is_named);
  RUN(waiting_is_measured_and_can_be_cancelled);
  pg_context_free(ctx);
  return unit_report();
}
