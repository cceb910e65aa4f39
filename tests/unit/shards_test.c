/* Shards: format checks, digest, scan, writing (SPEC §2, REFERENCE A2, CASES 1 and 4). */
#include "core/files.h"
#include "data_files.h"

static pg_context *ctx;
static char folder[64];

static void expect_bad(const char *what, const char *part) {
  pg_shards *shards = (pg_shards *)1;
  int status = pg_shards_open(ctx, folder, "*_train_*.bin", &shards);
  const char *message = pg_context_message(ctx);
  CHECK(status == PG_EFORMAT && shards == NULL, "%s: %d", what, status);
  CHECK(strstr(message, part) && strstr(message, "x_train_1.bin"), "%s: \"%s\" lacks \"%s\"", what,
        message, part);
}

TEST(lists_the_golden_shards_in_order) {
  pg_shards *s = NULL;
  int status = pg_shards_open(ctx, PG_TEST_DIR "/golden/trajectory", "*_train_*.bin", &s);
  CHECK(status == 0, "%s", pg_context_message(ctx));
  if (status < 0) return;
  CHECK(s->count == 3);
  CHECK(strcmp(s->shards[0].name, "fineweb_train_000001.bin") == 0);
  CHECK(s->shards[0].tokens == 1100 && s->shards[1].tokens == 900 && s->shards[2].tokens == 1417);
  CHECK(s->tokens == 3417 && s->shards[0].bytes == 3224);
  /* T 16, batch 8: floor(1099/16)/8 = 8, floor(899/16)/8 = 7, floor(1416/16)/8 = 11 */
  CHECK(pg_shards_updates_per_epoch(s, 16, 8) == 26);
  CHECK(pg_shards_updates_per_epoch(s, 16, 0) == 0);
  pg_shards_free(s);
}

TEST(names_what_is_missing) {
  pg_shards *s;
  CHECK(pg_shards_open(ctx, "/nonexistent/folder", "*.bin", &s) == PG_ENOENT);
  CHECK(strstr(pg_context_message(ctx), "/nonexistent/folder"), "%s", pg_context_message(ctx));
  data_folder(folder);
  CHECK(pg_shards_open(ctx, folder, "*_train_*.bin", &s) == PG_ENOENT);
  CHECK(strstr(pg_context_message(ctx), "*_train_*.bin"), "%s", pg_context_message(ctx));
  data_folder_remove(folder);
}

TEST(refuses_bad_headers_and_sizes) {
  uint16_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  data_folder(folder);
  char *path = data_path(folder, "x_train_1.bin");
  data_raw_shard(path, 20240521, 1, 8, 0, tokens, 8);
  expect_bad("magic", "20240521");
  data_raw_shard(path, PG_SHARD_MAGIC, 2, 8, 0, tokens, 8);
  expect_bad("version", "version is 2");
  data_raw_shard(path, PG_SHARD_MAGIC, 1, 9, 0, tokens, 8);
  expect_bad("count one larger", "1042 bytes, but it is 1040");
  data_raw_shard(path, PG_SHARD_MAGIC, 1, 7, 0, tokens, 8);
  expect_bad("count one smaller", "1038 bytes, but it is 1040");
  data_raw_shard(path, PG_SHARD_MAGIC, 1, 1, 0, tokens, 1);
  expect_bad("one token", "at least 2");
  data_raw_shard(path, PG_SHARD_MAGIC, 1, -8, 0, tokens, 8);
  expect_bad("negative count", "-8");
  data_raw_shard(path, PG_SHARD_MAGIC, 1, 8, 77, tokens, 8);
  expect_bad("reserved word", "77");
  data_raw_shard(path, PG_SHARD_MAGIC, 1, 8, 0, tokens, 8);
  CHECK(truncate(path, 1023) == 0);
  expect_bad("short header", "1023");
  CHECK(truncate(path, 0) == 0);
  expect_bad("empty", "0 bytes");
  CHECK(unlink(path) == 0 && mkdir(path, 0777) == 0);
  expect_bad("folder", "regular");
  data_folder_remove(folder);
}

TEST(digest_is_the_published_one) {
  char hex[65] = "", again[65] = "";
  data_folder(folder);
  CHECK(pg_shards_digest(ctx, folder, hex) == PG_ENOENT);
  data_count_shard(ctx, data_path(folder, "fineweb_train_000001.bin"), 0, 21, 100);
  data_count_shard(ctx, data_path(folder, "fineweb_val_000000.bin"), 0, 9, 100);
  CHECK(pg_shards_digest(ctx, folder, hex) == 0, "%s", pg_context_message(ctx));
  CHECK(strcmp(hex, "d184795448e12cb3c4d4d589f96111db45348d1812fb9c9bb9ecf165568d6515") == 0, "%s",
        hex);
  /* A file of another split does not belong to it. */
  data_count_shard(ctx, data_path(folder, "fineweb_test_000000.bin"), 0, 9, 100);
  CHECK(pg_shards_digest(ctx, folder, again) == 0 && strcmp(hex, again) == 0);
  /* Splits with other names: every *.bin file does. */
  CHECK(rename(data_path(folder, "fineweb_train_000001.bin"), data_path(folder, "a.bin")) == 0);
  CHECK(rename(data_path(folder, "fineweb_val_000000.bin"), data_path(folder, "b.bin")) == 0);
  CHECK(unlink(data_path(folder, "fineweb_test_000000.bin")) == 0);
  CHECK(pg_shards_digest(ctx, folder, hex) == 0, "%s", pg_context_message(ctx));
  pg_sha256("a.bin\t1066\t21\nb.bin\t1042\t9\n", 27, again);
  CHECK(strcmp(hex, again) == 0);
  data_folder_remove(folder);
}

/* 100 blocks of 4 KiB, of which 64 are read. */
TEST(a_sample_sees_what_the_digest_does_not) {
  enum { TOKENS = 100 * 2048 };
  char digest[65] = "", again[65] = "", hex[65] = "", changed[65] = "";
  const uint16_t mark = 4242, zero = 0;
  data_folder(folder);
  CHECK(pg_shards_sample(ctx, folder, hex) == PG_ENOENT);
  const char *path = data_path(folder, "x_train_1.bin");
  data_sparse_shard(path, TOKENS);
  data_sparse_shard(data_path(folder, "x_val_0.bin"), 9);
  CHECK(pg_shards_digest(ctx, folder, digest) == 0);
  CHECK(pg_shards_sample(ctx, folder, hex) == 0, "%s", pg_context_message(ctx));
  const int64_t seen[5] = {0, 2047, TOKENS - 2048, TOKENS - 1, TOKENS / 63 * 31};
  for (int i = 0; i < 5; i++) {
    data_poke(path, seen[i], &mark, 1);
    CHECK(pg_shards_sample(ctx, folder, changed) == 0 && strcmp(hex, changed) != 0, "token %lld",
          (long long)seen[i]);
    data_poke(path, seen[i], &zero, 1);
  }
  CHECK(pg_shards_sample(ctx, folder, changed) == 0 && strcmp(hex, changed) == 0);
  CHECK(pg_shards_digest(ctx, folder, again) == 0 && strcmp(digest, again) == 0);
  data_folder_remove(folder);
}

TEST(digest_of_the_papers_dataset) {
  char hex[65] = "", name[64];
  data_folder(folder);
  for (int i = 1; i <= 890; i++) {
    snprintf(name, sizeof name, "fineweb_train_%06d.bin", i);
    data_sparse_shard(data_path(folder, name), 100000000);
  }
  data_sparse_shard(data_path(folder, "fineweb_val_000000.bin"), 100000000);
  CHECK(pg_shards_digest(ctx, folder, hex) == 0, "%s", pg_context_message(ctx));
  CHECK(strcmp(hex, "87edf1844351c445e687ea865215b5fecff3a8b8052dff5b7263ea30712376f4") == 0, "%s",
        hex);
  /* The first training sequence of seed 0 starts at token 59,768,832 of file 000209 and of seed 1
   * at 35,651,584 of file 000731. */
  uint16_t mark = 4242;
  data_poke(data_path(folder, "fineweb_train_000209.bin"), 59768832, &mark, 1);
  data_poke(data_path(folder, "fineweb_train_000731.bin"), 35651584, &mark, 1);
  for (uint64_t seed = 0; seed < 2; seed++) {
    pg_loader_options o = {.folder = folder,
                           .pattern = "*_train_*.bin",
                           .time = 2048,
                           .batch = 256,
                           .micro = 1,
                           .world = 1,
                           .vocab = 50257,
                           .seed = seed,
                           .shuffle = true};
    pg_loader *loader;
    int32_t inputs[2048], targets[2048];
    CHECK(pg_loader_open(ctx, &o, &loader) == 0, "%s", pg_context_message(ctx));
    CHECK(loader && pg_loader_batches(loader) == 190 * 890);
    CHECK(pg_loader_next(loader, inputs, targets) == 0, "%s", pg_context_message(ctx));
    CHECK(inputs[0] == mark && inputs[1] == 0 && targets[0] == 0);
    pg_loader_close(loader);
  }
  data_folder_remove(folder);
}

TEST(scan_finds_the_largest_token) {
  int32_t largest = -1;
  int64_t at = -1;
  pg_shards *s = NULL;
  data_folder(folder);
  char *path = data_path(folder, "x_train_1.bin");
  data_sparse_shard(path, 3000001);
  uint16_t big = 65535, small = 50257;
  data_poke(path, 100, &small, 1);
  data_poke(path, 2999999, &big, 1);
  data_poke(path, 3000000, &big, 1);
  CHECK(pg_shards_open(ctx, folder, "*.bin", &s) == 0, "%s", pg_context_message(ctx));
  CHECK(pg_shard_scan(ctx, &s->shards[0], &largest, &at) == 0, "%s", pg_context_message(ctx));
  CHECK(largest == 65535 && at == 2999999, "%d at %lld", largest, (long long)at);
  pg_context_cancel(ctx);
  CHECK(pg_shard_scan(ctx, &s->shards[0], &largest, &at) == PG_ECANCELED);
  pg_context_resume(ctx);
  CHECK(truncate(path, 5000) == 0);
  CHECK(pg_shard_scan(ctx, &s->shards[0], &largest, &at) == PG_EFORMAT);
  pg_shards_free(s);
  data_folder_remove(folder);
}

TEST(writes_what_it_reads_and_nothing_on_failure) {
  int32_t tokens[5] = {0, 65535, 7, 50256, 1}, large[3] = {1, 65536, 2}, negative[3] = {1, 2, -1};
  data_folder(folder);
  char *path = data_path(folder, "x_train_1.bin");
  CHECK(pg_shard_write(ctx, path, large, 3) == PG_EFORMAT);
  CHECK(strstr(pg_context_message(ctx), "65536 at offset 1"), "%s", pg_context_message(ctx));
  CHECK(pg_shard_write(ctx, path, negative, 3) == PG_EFORMAT);
  CHECK(pg_shard_write(ctx, path, tokens, 1) == PG_EINVAL);
  CHECK(rmdir(folder) == 0, "something was left");
  CHECK(mkdir(folder, 0777) == 0);
  CHECK(pg_shard_write(ctx, path, tokens, 5) == 0, "%s", pg_context_message(ctx));
  unsigned char bytes[1034 + 1] = {0};
  FILE *f = fopen(path, "rb");
  CHECK(f && fread(bytes, 1, sizeof bytes, f) == 1034);
  if (f) fclose(f);
  static const unsigned char want[] = {0, 0, 0xff, 0xff, 7, 0, 0x50, 0xc4, 1, 0};
  CHECK(memcmp(bytes + 1024, want, 10) == 0);
  CHECK(bytes[8] == 5 && bytes[9] == 0 && bytes[4] == 1);
  CHECK(pg_shard_write(ctx, "/nonexistent/x.bin", tokens, 5) == PG_ENOENT);
  data_folder_remove(folder);
}

int main(void) {
  ctx = data_context();
  RUN(lists_the_golden_shards_in_order);
  RUN(names_what_is_missing);
  RUN(refuses_bad_headers_and_sizes);
  RUN(digest_is_the_published_one);
  RUN(a_sample_sees_what_the_digest_does_not);
  RUN(digest_of_the_papers_dataset);
  RUN(scan_finds_the_largest_token);
  RUN(writes_what_it_reads_and_nothing_on_failure);
  pg_context_free(ctx);
  return unit_report();
}
