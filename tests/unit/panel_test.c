/* Panels: which positions (SPEC section 4), their hash and refusals; the Hilbert RMS over them
 * against double precision; and the validation loss over groups of sequences (SPEC section 2). */
#include "core/panel.h"
#include "core/files.h"
#include "model_support.h"

static pg_context *ctx;
static char folder[] = "/tmp/perigee-XXXXXX";

static char *in_folder(const char *name) {
  static char path[256];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  return path;
}

/* A validation shard of `count` tokens below vocab, the same for the same stream. */
static int32_t *write_shard(const char *name, int64_t count, int64_t vocab, uint64_t stream) {
  int32_t *ids = make_ids(count, vocab, stream);
  MUST(ctx, pg_shard_write(ctx, in_folder(name), ids, count));
  return ids;
}

static pg_panel *panel(const char *pattern, int64_t time, int64_t tokens, int64_t ranks,
                       int64_t micro) {
  pg_panel *p = NULL;
  pg_panel_options o = {tokens, ranks, micro, false};
  MUST(ctx, pg_panel_new(ctx, folder, pattern, time, 65536, &o, &p));
  CHECK(pg_panel_tokens(p) == tokens, "tokens");
  return p;
}

/* The panel holds, in order, `lengths[i]` tokens from ids[starts[i]]. */
static void check_pieces(const pg_panel *p, const int32_t *ids, size_t count, const int64_t *starts,
                         const int64_t *lengths) {
  int64_t at = 0;
  CHECK(p->count == count, "%zu pieces, want %zu", p->count, count);
  for (size_t i = 0; i < count && i < p->count; i++) {
    CHECK(p->pieces[i].length == lengths[i] && p->pieces[i].first == at, "piece %zu: %lld at %lld",
          i, (long long)p->pieces[i].length, (long long)p->pieces[i].first);
    CHECK(!memcmp(p->ids + at, ids + starts[i], (size_t)lengths[i] * sizeof *ids), "piece %zu", i);
    const int64_t last = at + lengths[i] - 1;
    const int32_t *seen;
    int32_t target;
    CHECK(pg_panel_length(p, i) == lengths[i], "length %zu", i);
    CHECK(pg_panel_context(p, last, lengths[i] + 5, &seen, &target) == lengths[i] &&
              seen == p->ids + at && target == ids[starts[i] + lengths[i]],
          "the context of the last position of piece %zu", i);
    CHECK(pg_panel_context(p, last, 1, &seen, &target) == 1 && seen == p->ids + last, "n = 1");
    CHECK(pg_panel_context(p, at, 9, &seen, &target) == 1 && seen == p->ids + at, "the first");
    at += lengths[i];
  }
  CHECK(pg_panel_sequences(p) == count && at == p->tokens, "every position is in a piece");
}

/* ---- positions --------------------------------------------------------------------------------
 */
TEST(published_panels) {
  /* 8192 tokens over 8 ranks: the first 1024 positions of sequences 32r, 16r, 8r. */
  const int64_t micros[] = {32, 16, 8};
  int32_t *ids = write_shard("p_val_0.bin", 256 * 2048 + 1, 65536, 1);
  for (int k = 0; k < 3; k++) {
    pg_panel *p = panel("p_val_*.bin", 2048, 8192, 8, micros[k]);
    int64_t starts[8], lengths[8];
    for (int r = 0; r < 8; r++) starts[r] = micros[k] * r * 2048, lengths[r] = 1024;
    check_pieces(p, ids, 8, starts, lengths);
    pg_panel_free(p);
  }
  /* One GPU reads sequences 0 to 3 whole: another panel. */
  pg_panel *p = panel("p_val_*.bin", 2048, 8192, 1, 32);
  check_pieces(p, ids, 4, (int64_t[]){0, 2048, 4096, 6144}, (int64_t[]){2048, 2048, 2048, 2048});
  pg_panel_free(p);
  free(ids);
  remove(in_folder("p_val_0.bin"));
}

TEST(positions) {
  int32_t *ids = write_shard("q_val_0.bin", 33, 65536, 2);
  pg_panel *p = panel("q_val_*.bin", 4, 8, 3, 1); /* 8 over 3 ranks: 3, 3, 2 */
  check_pieces(p, ids, 3, (int64_t[]){0, 4, 8}, (int64_t[]){3, 3, 2});
  pg_panel_free(p);
  p = panel("q_val_*.bin", 2, 8, 3, 2); /* rank r reads sequences 2r and 2r + 1 */
  check_pieces(p, ids, 5, (int64_t[]){0, 2, 4, 6, 8}, (int64_t[]){2, 1, 2, 1, 2});
  pg_panel_free(p);
  p = panel("q_val_*.bin", 2, 9, 2, 1); /* rank 0: 5 from sequences 0, 2, 4; rank 1: 4 from 1, 3 */
  check_pieces(p, ids, 5, (int64_t[]){0, 4, 8, 2, 6}, (int64_t[]){2, 2, 1, 2, 2});
  pg_panel_free(p);
  p = panel("q_val_*.bin", 4, 2, 5, 1); /* more ranks than tokens */
  check_pieces(p, ids, 2, (int64_t[]){0, 4}, (int64_t[]){1, 1});
  pg_panel_free(p);
  p = panel("q_val_*.bin", 4, 7, 0, 0); /* 0 stands for one rank */
  check_pieces(p, ids, 2, (int64_t[]){0, 4}, (int64_t[]){4, 3});
  pg_panel_free(p);
  p = panel("q_val_*.bin", 4, 32, 8, 1); /* all there is */
  pg_panel_free(p);
  free(ids);
  remove(in_folder("q_val_0.bin"));
}

TEST(groups_end_with_shards) {
  /* Five sequences of 2, then four. Two ranks: groups of two, the fifth sequence is in none. */
  int32_t *a = write_shard("r_val_0.bin", 11, 65536, 3),
          *b = write_shard("r_val_1.bin", 9, 65536, 4);
  int32_t both[20];
  memcpy(both, a, 11 * sizeof *a);
  memcpy(both + 11, b, 9 * sizeof *b);
  pg_panel *p = panel("r_val_*.bin", 2, 12, 2, 1);
  check_pieces(p, both, 6, (int64_t[]){0, 4, 11, 2, 6, 13}, (int64_t[]){2, 2, 2, 2, 2, 2});
  pg_panel_free(p);
  /* One rank reads all nine, whatever its micro-batch. */
  p = panel("r_val_*.bin", 2, 18, 1, 4);
  check_pieces(p, both, 9, (int64_t[]){0, 2, 4, 6, 8, 11, 13, 15, 17},
               (int64_t[]){2, 2, 2, 2, 2, 2, 2, 2, 2});
  pg_panel_free(p);
  pg_panel_options o = {17, 2, 1, false};
  CHECK(pg_panel_new(ctx, folder, "r_val_*.bin", 2, 65536, &o, &p) == PG_EDATA && !p, "17 of 16");
  CHECK(strstr(pg_context_message(ctx), "17 tokens") && strstr(pg_context_message(ctx), "16"), "%s",
        pg_context_message(ctx));
  free(a);
  free(b);
  remove(in_folder("r_val_0.bin"));
  remove(in_folder("r_val_1.bin"));
}

TEST(spread_over_the_stream) {
  /* Five sequences of 2, then four: nine of one rank. The j-th of k is number floor(9 j / k). */
  int32_t *a = write_shard("v_val_0.bin", 11, 65536, 6),
          *b = write_shard("v_val_1.bin", 9, 65536, 7);
  int32_t both[20];
  memcpy(both, a, 11 * sizeof *a);
  memcpy(both + 11, b, 9 * sizeof *b);
  pg_panel *p = NULL, *q = NULL;
  pg_panel_options o = {.tokens = 5, .spread = true};
  MUST(ctx, pg_panel_new(ctx, folder, "v_val_*.bin", 2, 65536, &o, &p));
  check_pieces(p, both, 3, (int64_t[]){0, 6, 13}, (int64_t[]){2, 2, 1}); /* numbers 0, 3, 6 */
  o.spread = false;
  MUST(ctx, pg_panel_new(ctx, folder, "v_val_*.bin", 2, 65536, &o, &q));
  CHECK(strcmp(pg_panel_hash(p), pg_panel_hash(q)), "another panel, another hash");
  pg_panel_free(p);
  pg_panel_free(q);
  /* All there is comes in the stream's order: the same positions, but declared as spread. */
  o = (pg_panel_options){.tokens = 18, .spread = true};
  MUST(ctx, pg_panel_new(ctx, folder, "v_val_*.bin", 2, 65536, &o, &p));
  check_pieces(p, both, 9, (int64_t[]){0, 2, 4, 6, 8, 11, 13, 15, 17},
               (int64_t[]){2, 2, 2, 2, 2, 2, 2, 2, 2});
  pg_panel_free(p);
  /* Two ranks, groups of 2: rank 0 reads those at 0, 4, 11, 15, rank 1 the next. */
  o = (pg_panel_options){.tokens = 8, .ranks = 2, .micro = 1, .spread = true};
  MUST(ctx, pg_panel_new(ctx, folder, "v_val_*.bin", 2, 65536, &o, &p));
  check_pieces(p, both, 4, (int64_t[]){0, 11, 2, 13}, (int64_t[]){2, 2, 2, 2});
  pg_panel_free(p);
  o.tokens = 17;
  CHECK(pg_panel_new(ctx, folder, "v_val_*.bin", 2, 65536, &o, &p) == PG_EDATA && !p, "17 of 16");
  free(a);
  free(b);
  remove(in_folder("v_val_0.bin"));
  remove(in_folder("v_val_1.bin"));
}

TEST(refusals) {
  int32_t *ids = write_shard("s_val_0.bin", 9, 100, 5);
  pg_panel *p = NULL;
  pg_panel_options o = {9, 1, 1, false};
  CHECK(pg_panel_new(ctx, folder, "s_val_*.bin", 4, 100, &o, &p) == PG_EDATA && !p, "9 of 8");
  CHECK(strstr(pg_context_message(ctx), "9 tokens") && strstr(pg_context_message(ctx), "8 in"),
        "%s", pg_context_message(ctx));
  const pg_panel_options bad[] = {{0, 1, 1, false},
                                  {-3, 1, 1, false},
                                  {8, -1, 1, false},
                                  {8, 1, -1, false},
                                  {INT64_MIN, 0, 0, false}};
  for (size_t i = 0; i < PG_COUNT(bad); i++)
    CHECK(pg_panel_new(ctx, folder, "s_val_*.bin", 4, 100, &bad[i], &p) == PG_EINVAL, "%zu", i);
  /* Sizes far beyond the data are refused for that, before memory is asked for. */
  const pg_panel_options large[] = {
      {INT64_MAX, 1, 1, false}, {1, 2, INT64_MAX, false}, {INT64_MAX, INT64_MAX, 1, false}};
  for (size_t i = 0; i < PG_COUNT(large); i++)
    CHECK(pg_panel_new(ctx, folder, "s_val_*.bin", 4, 100, &large[i], &p) < 0 && !p, "%zu", i);
  o = (pg_panel_options){8, 1, 1, false};
  CHECK(pg_panel_new(ctx, folder, "t_val_*.bin", 4, 100, &o, &p) == PG_ENOENT, "no shard");
  ids[2] = 100;
  MUST(ctx, pg_shard_write(ctx, in_folder("s_val_0.bin"), ids, 9));
  CHECK(pg_panel_new(ctx, folder, "s_val_*.bin", 4, 100, &o, &p) == PG_EDATA && !p, "vocabulary");
  CHECK(strstr(pg_context_message(ctx), "100"), "%s", pg_context_message(ctx));
  free(ids);
  remove(in_folder("s_val_0.bin"));
}

TEST(hashes) {
  int32_t *ids = write_shard("h_val_0.bin", 65, 100, 6);
  const pg_panel_options options[] = {
      {16, 1, 1, false}, {16, 2, 1, false}, {16, 2, 2, false}, {15, 1, 1, false}};
  char hash[8][17];
  size_t count = 0;
  pg_panel *p = NULL;
  for (size_t i = 0; i < PG_COUNT(options); i++) {
    MUST(ctx, pg_panel_new(ctx, folder, "h_val_*.bin", 8, 100, &options[i], &p));
    strcpy(hash[count++], pg_panel_hash(p));
    pg_panel_free(p);
  }
  p = panel("h_val_*.bin", 4, 16, 1, 1); /* the same tokens in sequences of another length */
  strcpy(hash[count++], pg_panel_hash(p));
  pg_panel_free(p);
  ids[15]++; /* one token differs */
  MUST(ctx, pg_shard_write(ctx, in_folder("h_val_0.bin"), ids, 65));
  p = panel("h_val_*.bin", 8, 16, 1, 1);
  strcpy(hash[count++], pg_panel_hash(p));
  pg_panel_free(p);
  for (size_t i = 0; i < count; i++) {
    CHECK(strlen(hash[i]) == 16 && strspn(hash[i], "0123456789abcdef") == 16, "%s", hash[i]);
    for (size_t k = 0; k < i; k++) CHECK(strcmp(hash[i], hash[k]), "%zu and %zu are alike", i, k);
  }
  ids[15]--;
  ids[40]++; /* a token outside the panel */
  MUST(ctx, pg_shard_write(ctx, in_folder("h_val_0.bin"), ids, 65));
  p = panel("h_val_*.bin", 8, 16, 1, 7); /* one rank: micro does not matter */
  CHECK(!strcmp(pg_panel_hash(p), hash[0]), "the same panel has the same hash");
  pg_panel_free(p);
  free(ids);
  remove(in_folder("h_val_0.bin"));
}

/* ---- Hilbert RMS ------------------------------------------------------------------------------
 */
static pg_tensor *tensor(const float *x, int64_t rows, int64_t columns) {
  pg_tensor *t = NULL;
  MUST(ctx, pg_tensor_new(ctx, PG_F32, 2, (int64_t[]){rows, columns}, &t));
  MUST(ctx, pg_tensor_write(t, x));
  return t;
}

/* A model without blocks whose final norm gives the hidden states r e_token: then column `token` of
 * the matrix holds the position's logits, over r. */
static pg_model *axes_model(int64_t vocab, int64_t width) {
  shape s = {0, width, 1, 2, 8, vocab, 1, 8};
  pg_model_config c = make_config(&s);
  pg_model *model = make_model(ctx, &c, 1);
  float *e = calloc((size_t)(vocab * width), sizeof *e);
  /* So large that eps under the norm's root is 1e-12 of the square's mean. */
  for (int64_t i = 0; i < vocab && i < width; i++) e[i * width + i] = 1e3f * sqrtf((float)width);
  MUST(ctx, pg_tensor_write(pg_model_embedding(model)->value, e));
  free(e);
  return model;
}

TEST(published_ranges) {
  /* Logits (1,-2,4), (3,3,-1): ranges 6, 4. Logits (1,3), (2,2), (-4,0): 2, 0, 4. */
  int32_t *ids = write_shard("u_val_0.bin", 9, 2, 7);
  const float three[6] = {1, 3, -2, 3, 4, -1}, two[6] = {1, 2, -4, 3, 2, 0};
  float ranges[3], scaled[6];
  double rms = 0;
  pg_activations *a;

  pg_model *model = axes_model(3, 2);
  MUST(ctx, pg_activations_new(ctx, pg_model_get_config(model), PG_F32, 1, 8, PG_KEEP_NOTHING, &a));
  for (int i = 0; i < 9; i++) ids[i] = i % 2;
  MUST(ctx, pg_shard_write(ctx, in_folder("u_val_0.bin"), ids, 9));
  pg_panel *p = panel("u_val_*.bin", 8, 2, 1, 1);
  for (int i = 0; i < 6; i++) scaled[i] = three[i] / sqrtf(2);
  pg_tensor *t = tensor(scaled, 3, 2);
  for (int again = 0; again < 2; again++) {
    MUST(ctx, pg_hilbert(model, a, p, t, &rms, ranges));
    CHECK_CLOSE(rms, 5.0990195135927845, 4 * UNIT_ROUNDOFF);
    CHECK_CLOSE(ranges[0], 6, 4 * UNIT_ROUNDOFF);
    CHECK_CLOSE(ranges[1], 4, 4 * UNIT_ROUNDOFF);
  }
  pg_tensor_free(t);
  pg_panel_free(p);
  pg_activations_free(a);
  pg_model_free(model);

  model = axes_model(3, 3); /* matrix [3, 3] whose third row repeats the first */
  MUST(ctx, pg_activations_new(ctx, pg_model_get_config(model), PG_F32, 1, 8, PG_KEEP_NOTHING, &a));
  for (int i = 0; i < 9; i++) ids[i] = i % 3;
  MUST(ctx, pg_shard_write(ctx, in_folder("u_val_0.bin"), ids, 9));
  p = panel("u_val_*.bin", 8, 3, 1, 1);
  float m[9];
  for (int j = 0; j < 3; j++) {
    m[j] = m[6 + j] = two[j] / sqrtf(3);
    m[3 + j] = two[3 + j] / sqrtf(3);
  }
  t = tensor(m, 3, 3);
  MUST(ctx, pg_hilbert(model, a, p, t, &rms, NULL));
  CHECK_CLOSE(rms, 2.581988897471611, 4 * UNIT_ROUNDOFF);
  pg_tensor_free(t);
  pg_panel_free(p);
  pg_activations_free(a);
  pg_model_free(model);
  free(ids);
  remove(in_folder("u_val_0.bin"));
}

/* A model with blocks, an odd vocabulary, a scale of the logits, and an increment. */
enum { VOCAB = 31, TIME = 12, WIDTH = 8 };
static pg_model *block_model(void) {
  shape s = {2, WIDTH, 2, 4, 12, VOCAB, 1, TIME};
  pg_model_config c = make_config(&s);
  c.logit_scale = 1.5;
  return make_model(ctx, &c, 3);
}

TEST(hilbert_of_prefixes) {
  /* Pieces of three lengths, in two sizes of activations, against whole sequences passed one by one
   * and products in double precision. */
  int32_t *ids = write_shard("v_val_0.bin", 20 * TIME + 1, VOCAB, 8);
  pg_model *model = block_model();
  float s[VOCAB * WIDTH];
  pg_normals(4, 4, 0, PG_COUNT(s), s);
  pg_tensor *t = tensor(s, VOCAB, WIDTH);
  pg_panel *p =
      panel("v_val_*.bin", TIME, 3 * 17 - 1, 3, 2); /* 17, 17, 16: pieces 12+5, 12+5, 12+4 */
  pg_activations *small, *large;
  MUST(ctx, pg_activations_new(ctx, pg_model_get_config(model), PG_F32, 1, TIME, PG_KEEP_NOTHING,
                               &small));
  MUST(ctx, pg_activations_new(ctx, pg_model_get_config(model), PG_F32, 5, TIME, PG_KEEP_NOTHING,
                               &large));
  float ranges[50], other[50], host[TIME * WIDTH];
  double rms, again, sum = 0;
  MUST(ctx, pg_hilbert(model, small, p, t, &rms, ranges));
  MUST(ctx, pg_hilbert(model, large, p, t, &again, other));
  const int64_t starts[6] = {0, 1, 2, 3, 4, 5};
  CHECK(p->count == 6, "%zu pieces", p->count);
  for (size_t i = 0; i < p->count; i++) {
    const void *hidden;
    MUST(ctx, pg_model_forward(model, small, ids + starts[i] * TIME, 1, TIME, &hidden));
    CHECK(ctx->kernels->download(ctx->queue, host, hidden, sizeof host) == 0, "download");
    for (int64_t k = 0; k < p->pieces[i].length; k++) {
      double low = INFINITY, high = -INFINITY, largest = 0;
      for (int v = 0; v < VOCAB; v++) {
        double z = 0, magnitude = 0;
        for (int j = 0; j < WIDTH; j++) {
          z += 1.5 * s[v * WIDTH + j] * host[k * WIDTH + j];
          magnitude += 1.5 * fabs((double)s[v * WIDTH + j] * host[k * WIDTH + j]);
        }
        low = fmin(low, z);
        high = fmax(high, z);
        largest = fmax(largest, magnitude);
      }
      /* Products of 8 in fp32, and hidden states that shorter passes round differently: two blocks
       * of sums over 12 at most, some 100 U of their size in all. */
      double bar = 100 * UNIT_ROUNDOFF * largest;
      int64_t at = p->pieces[i].first + k;
      CHECK(fabs(ranges[at] - (high - low)) <= bar, "position %lld: %g, want %g", (long long)at,
            ranges[at], high - low);
      CHECK(fabs(other[at] - ranges[at]) <= bar, "position %lld in a larger pass", (long long)at);
      sum += (double)ranges[at] * ranges[at];
    }
  }
  CHECK_CLOSE(rms, sqrt(sum / 50), 1e-14);
  CHECK_CLOSE(again, rms, 100 * UNIT_ROUNDOFF);
  MUST(ctx, pg_hilbert(model, small, p, t, &again, NULL));
  CHECK(again == rms, "the same bits again");
  pg_activations_free(small);
  pg_activations_free(large);
  pg_panel_free(p);
  pg_tensor_free(t);
  pg_model_free(model);
  free(ids);
  remove(in_folder("v_val_0.bin"));
}

TEST(hilbert_edges) {
  int32_t *ids = write_shard("w_val_0.bin", 4 * TIME + 1, VOCAB, 9);
  pg_model *model = block_model();
  pg_panel *p = panel("w_val_*.bin", TIME, 2 * TIME, 1, 1);
  pg_activations *a, *shorter;
  double rms, padded;
  float s[40 * WIDTH];
  MUST(ctx,
       pg_activations_new(ctx, pg_model_get_config(model), PG_F32, 2, TIME, PG_KEEP_NOTHING, &a));
  MUST(ctx, pg_activations_new(ctx, pg_model_get_config(model), PG_F32, 9, TIME - 1,
                               PG_KEEP_NOTHING, &shorter));

  /* The first update of a warmup. */
  pg_tensor *t = NULL, *view = NULL;
  MUST(ctx, pg_tensor_new(ctx, PG_F32, 2, (int64_t[]){VOCAB, WIDTH}, &t));
  MUST(ctx, pg_hilbert(model, a, p, t, &rms, NULL));
  CHECK(rms == 0, "an increment of 0: %g", rms);

  pg_normals(4, 5, 0, VOCAB * WIDTH, s);
  MUST(ctx, pg_tensor_write(t, s));
  MUST(ctx, pg_hilbert(model, a, p, t, &rms, NULL));
  pg_tensor_free(t);

  /* Rows of padding behind the vocabulary: never read (CASES 15). */
  for (int k = 0; k < 2; k++) {
    for (int i = VOCAB * WIDTH; i < 40 * WIDTH; i++) s[i] = k ? NAN : 1e4f;
    t = tensor(s, 40, WIDTH);
    MUST(ctx, pg_tensor_view(t, 0, 2, (int64_t[]){VOCAB, WIDTH}, (int64_t[]){WIDTH, 1}, &view));
    MUST(ctx, pg_hilbert(model, a, p, view, &padded, NULL));
    CHECK(padded == rms, "padding %d", k);
    pg_tensor_free(view);
    /* The whole storage is no head. */
    CHECK(pg_hilbert(model, a, p, t, &padded, NULL) == PG_EINVAL, "shape");
    CHECK(strstr(pg_context_message(ctx), "[31, 8]") && strstr(pg_context_message(ctx), "[40, 8]"),
          "%s", pg_context_message(ctx));
    pg_tensor_free(t);
  }

  /* Not finite: the place. */
  s[13 * WIDTH + 6] = INFINITY;
  t = tensor(s, VOCAB, WIDTH);
  CHECK(pg_hilbert(model, a, p, t, &padded, NULL) == PG_ENONFINITE, "infinite");
  CHECK(strstr(pg_context_message(ctx), "row 13, column 6 "), "%s", pg_context_message(ctx));
  s[13 * WIDTH + 6] = 0;
  MUST(ctx, pg_tensor_write(t, s));

  CHECK(pg_hilbert(model, shorter, p, t, &padded, NULL) == PG_EINVAL, "too short");
  pg_context_cancel(ctx);
  CHECK(pg_hilbert(model, a, p, t, &padded, NULL) == PG_ECANCELED, "cancelled");
  pg_context_resume(ctx);

  /* Weights that are not finite. */
  float nan = NAN;
  pg_tensor *one = NULL;
  pg_tensor *w = pg_model_parameter(model, 1)->value;
  MUST(ctx, pg_tensor_view(w, 0, 1, (int64_t[]){1}, (int64_t[]){1}, &one));
  MUST(ctx, pg_tensor_write(one, &nan));
  CHECK(pg_hilbert(model, a, p, t, &padded, NULL) == PG_ENONFINITE, "weights");
  pg_tensor_free(one);
  pg_tensor_free(t);
  pg_panel_free(p);
  pg_activations_free(a);
  pg_activations_free(shorter);
  pg_model_free(model);
  free(ids);
  remove(in_folder("w_val_0.bin"));
}

/* ---- validation -------------------------------------------------------------------------------
 */
TEST(validation) {
  enum { MICRO = 3, GROUPS = 4 };
  int32_t *ids = write_shard("x_val_0.bin", (GROUPS * MICRO + 2) * TIME + 1, VOCAB, 10);
  pg_model *model = block_model();
  pg_activations *one, *all, *shorter;
  MUST(ctx,
       pg_activations_new(ctx, pg_model_get_config(model), PG_F32, 1, TIME, PG_KEEP_NOTHING, &one));
  MUST(ctx, pg_activations_new(ctx, pg_model_get_config(model), PG_F32, MICRO, TIME,
                               PG_KEEP_NOTHING, &all));
  MUST(ctx, pg_activations_new(ctx, pg_model_get_config(model), PG_F32, 9, TIME - 1,
                               PG_KEEP_NOTHING, &shorter));
  pg_loader_options o = {.folder = folder,
                         .pattern = "x_val_*.bin",
                         .time = TIME,
                         .batch = MICRO,
                         .micro = MICRO,
                         .world = 1,
                         .vocab = VOCAB};
  pg_loader *loader = NULL, *shuffled = NULL;
  MUST(ctx, pg_loader_open(ctx, &o, &loader));
  CHECK(pg_loader_batches(loader) == GROUPS, "two sequences are in no group");

  for (int64_t batches = 1; batches <= GROUPS; batches++) {
    double loss, again, direct = 0;
    MUST(ctx, pg_validate(model, all, loader, batches, &loss));
    for (int64_t i = 0; i < batches * MICRO; i++) /* groups are of one size: the mean of all */
      direct += pass(model, one, ids + i * TIME, ids + i * TIME + 1, 1, TIME, 0) /
                (double)(batches * MICRO * TIME);
    /* Losses of some log V in fp32 of logits that are off by 100 U, averaged. */
    CHECK_CLOSE(loss, direct, 50 * UNIT_ROUNDOFF);
    MUST(ctx, pg_validate(model, all, loader, batches, &again)); /* it rewinds */
    CHECK(again == loss, "%lld groups again", (long long)batches);
    MUST(ctx, pg_validate(model, one, loader, batches, &again)); /* one sequence at a time */
    CHECK_CLOSE(again, loss, 50 * UNIT_ROUNDOFF);
  }

  double loss = 42;
  CHECK(pg_validate(model, all, loader, 0, &loss) == PG_EINVAL, "none");
  CHECK(pg_validate(model, all, loader, GROUPS + 1, &loss) == PG_EDATA, "more than there are");
  CHECK(strstr(pg_context_message(ctx), "5 groups") && strstr(pg_context_message(ctx), "has 4"),
        "%s", pg_context_message(ctx));
  CHECK(pg_validate(model, shorter, loader, 1, &loss) == PG_EINVAL, "too short");
  pg_context_cancel(ctx);
  CHECK(pg_validate(model, all, loader, 1, &loss) == PG_ECANCELED, "cancelled");
  pg_context_resume(ctx);
  o.shuffle = true;
  MUST(ctx, pg_loader_open(ctx, &o, &shuffled));
  CHECK(pg_validate(model, all, shuffled, 1, &loss) == PG_EINVAL, "shuffled");
  CHECK(loss == 42, "no result on failure");

  /* Equal logits: log V for every token. */
  MUST(ctx, pg_tensor_write(pg_model_head(model)->value, (float[VOCAB * WIDTH]){0}));
  MUST(ctx, pg_validate(model, all, loader, GROUPS, &loss));
  CHECK_CLOSE(loss, log(VOCAB), 2 * UNIT_ROUNDOFF);
  float *head = read_floats(pg_model_head(model)->value);
  head[5] = NAN;
  MUST(ctx, pg_tensor_write(pg_model_head(model)->value, head));
  CHECK(pg_validate(model, all, loader, 1, &loss) == PG_ENONFINITE, "NaN");
  free(head);

  pg_loader_close(loader);
  pg_loader_close(shuffled);
  pg_activations_free(one);
  pg_activations_free(all);
  pg_activations_free(shorter);
  pg_model_free(model);
  free(ids);
  remove(in_folder("x_val_0.bin"));
}

int main(void) {
  ctx = open_context(2);
  if (!mkdtemp(folder)) return 1;
  RUN(published_panels);
  RUN(positions);
  RUN(groups_end_with_shards);
  RUN(spread_over_the_stream);
  RUN(refusals);
  RUN(hashes);
  RUN(published_ranges);
  RUN(hilbert_of_prefixes);
  RUN(hilbert_edges);
  RUN(validation);
  unit_bad = 0;
  CHECK(pg_context_live_tensors(ctx) == 0, "%lld tensors left",
        (long long)pg_context_live_tensors(ctx));
  unit_failed += unit_bad != 0;
  pg_file_remove_tree(ctx, folder);
  pg_context_free(ctx);
  return unit_report();
}
