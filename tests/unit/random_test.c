/* Philox against its published known answers, normals, and NumPy's data order (REFERENCE, data
 * order; tests/golden/data_order.json, made with NumPy). */
#include "core/files.h"
#include "core/random.h"
#include "unit.h"

#include <inttypes.h>
#include <jansson.h>

TEST(philox_known_answers) {
  /* The three vectors of the Random123 distribution for philox4x32-10: counter, key, output. */
  static const struct {
    uint64_t index, stream, seed;
    uint32_t want[4];
  } cases[] = {
      {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {UINT64_MAX, UINT64_MAX, UINT64_MAX, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {0x85a308d3243f6a88,
       0x0370734413198a2e,
       0x299f31d0a4093822,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (size_t i = 0; i < 3; i++) {
    uint32_t out[4];
    pg_philox(cases[i].seed, cases[i].stream, cases[i].index, out);
    CHECK(memcmp(out, cases[i].want, sizeof out) == 0, "case %zu: %08x %08x %08x %08x", i, out[0],
          out[1], out[2], out[3]);
  }
}

TEST(normals_do_not_depend_on_how_they_are_drawn) {
  enum { N = 1000 };
  float all[N], part[N];
  pg_normals(7, 11, 0, N, all);
  for (size_t first = 0, n = 1; first < N; first += n, n = n % 13 + 1) {
    if (n > N - first) n = N - first;
    pg_normals(7, 11, first, n, part);
    CHECK(memcmp(part, all + first, n * sizeof *part) == 0, "draws %zu to %zu differ", first,
          first + n);
  }
  /* Large enough to be drawn by several threads. */
  const size_t many = 200001;
  float *big = malloc(many * sizeof *big), *tail = malloc(1000 * sizeof *tail);
  pg_normals(7, 11, 3, many, big);
  CHECK(memcmp(big, all + 3, (N - 3) * sizeof *big) == 0);
  pg_normals(7, 11, 3 + many - 1000, 1000, tail);
  CHECK(memcmp(tail, big + many - 1000, 1000 * sizeof *tail) == 0);
  free(big);
  free(tail);
}

TEST(normals_are_box_muller_of_philox) {
  uint32_t words[4];
  float out[4];
  pg_philox(3, 4, 5, words);
  pg_normals(3, 4, 20, 4, out);
  for (int pair = 0; pair < 2; pair++) {
    const double u = (words[2 * pair] + 0.5) / 4294967296.0;
    const double v = (words[2 * pair + 1] + 0.5) / 4294967296.0;
    const double radius = sqrt(-2 * log(u));
    /* One rounding to fp32 of an fp64 value good to a few 1e-16: 2^-24 and a little. */
    CHECK_CLOSE(out[2 * pair], radius * cos(2 * M_PI * v), 6e-8);
    CHECK_CLOSE(out[2 * pair + 1], radius * sin(2 * M_PI * v), 6e-8);
  }
}

TEST(normals_have_the_right_moments) {
  const size_t n = 1 << 20;
  float *x = malloc(n * sizeof *x);
  for (uint64_t seed = 0; seed < 3; seed++) {
    double sum = 0, square = 0, fourth = 0, lag = 0;
    size_t beyond = 0;
    pg_normals(seed, pg_hash_name("lm_head.weight"), 0, n, x);
    for (size_t i = 0; i < n; i++) {
      const double v = x[i];
      sum += v;
      square += v * v;
      fourth += v * v * v * v;
      beyond += fabs(v) > 3;
      if (i) lag += v * x[i - 1];
    }
    /* Five standard errors: mean 1/sqrt(n), square sqrt(2/n), fourth sqrt(96/n), lag 1/sqrt(n),
     * share beyond 3 sigma p = 0.0026998 with sqrt(p/n). */
    const double e = 5 / sqrt((double)n);
    CHECK(fabs(sum / n) < e, "mean %g", sum / n);
    CHECK(fabs(square / n - 1) < e * sqrt(2), "variance %g", square / n);
    CHECK(fabs(fourth / n - 3) < e * sqrt(96), "fourth moment %g", fourth / n);
    CHECK(fabs(lag / n) < e, "lag-one covariance %g", lag / n);
    CHECK(fabs((double)beyond / n - 0.0026998) < e * sqrt(0.0027), "beyond three: %zu", beyond);
  }
  free(x);
}

TEST(hash_of_names_is_fnv1a) {
  CHECK(pg_hash_name("") == 0xcbf29ce484222325);
  CHECK(pg_hash_name("a") == 0xaf63dc4c8601ec8c);
  CHECK(pg_hash_name("foobar") == 0x85944171f73967e8);
}

TEST(seed_sequence_words) {
  static const uint32_t want[8] = {2968811710, 3677149159, 745650761, 2884920346,
                                   2642120001, 549907821,  574372308, 742431198};
  const uint64_t zeros[3] = {0, 0, 0};
  uint32_t out[8];
  pg_seed_sequence(zeros, 3, out);
  CHECK(memcmp(out, want, sizeof out) == 0, "SeedSequence([0,0,0])");
  pg_seed_sequence(zeros, 1, out);
  CHECK(memcmp(out, want, sizeof out) == 0, "SeedSequence(0)");
  /* An integer of two words is the same as its two words, low first; also past the pool of 4. */
  const uint64_t wide[3] = {0x500000004, 0x900000008, 0xb0000000a};
  const uint64_t narrow[6] = {4, 5, 8, 9, 10, 11};
  uint32_t other[8];
  pg_seed_sequence(wide, 3, out);
  pg_seed_sequence(narrow, 6, other);
  CHECK(memcmp(out, other, sizeof out) == 0, "words of wide integers");
}

TEST(pcg64_states_and_draws) {
  const uint64_t a[4] = {0, 0, 0, 1}, b[4] = {31, 0, 0, 1};
  pg_pcg64 rng;
  pg_pcg64_seed(&rng, a, 3);
  /* The published state is the one before the first draw. */
  CHECK(rng.state_high == 0x1aa1b5345996452d && rng.state_low == 0x09585eb7a69561e3,
        "state %016" PRIx64 "%016" PRIx64, rng.state_high, rng.state_low);
  CHECK(rng.increment_high == 0x418ddadb3af71a82 && rng.increment_low == 0x588133bc447873a9);
  CHECK(pg_pcg64_next64(&rng) == 0xa30febcfd9c2825f);
  CHECK(pg_pcg64_next64(&rng) == 0x4510bdf882d9d721);
  CHECK(pg_pcg64_next64(&rng) == 0x0a7d3da94ecde8b8);
  pg_pcg64_seed(&rng, a, 3);
  CHECK(pg_pcg64_next32(&rng) == 0xd9c2825f, "the low half comes first");
  CHECK(pg_pcg64_next32(&rng) == 0xa30febcf, "then the stored high half");
  pg_pcg64_seed(&rng, a, 4);
  CHECK(pg_pcg64_next64(&rng) == 0x4c5b44eb64dc3e89);
  CHECK(pg_pcg64_next64(&rng) == 0xadb15598ce82c0cd);
  pg_pcg64_seed(&rng, b, 4);
  CHECK(pg_pcg64_next64(&rng) == 0x3c0754069c995858);
}

/* malloc'ed order of n under this entropy. */
static int64_t *shuffled(const uint64_t *entropy, size_t count, int64_t n) {
  pg_pcg64 rng;
  int64_t *order = malloc((size_t)n * sizeof *order);
  pg_pcg64_seed(&rng, entropy, count);
  pg_shuffle(&rng, order, n);
  return order;
}

/* First 16 hex digits of the SHA-256 of the comma-joined order. */
static void digest(const int64_t *order, int64_t n, char out[17]) {
  char *text = malloc((size_t)n * 12 + 1), hex[65];
  size_t used = 0;
  for (int64_t i = 0; i < n; i++)
    used += (size_t)sprintf(text + used, "%s%" PRId64, i ? "," : "", order[i]);
  pg_sha256(text, used, hex);
  memcpy(out, hex, 16);
  out[16] = 0;
  free(text);
}

TEST(published_orders) {
  static const struct {
    uint64_t entropy[4];
    size_t count;
    int64_t n, start[10];
    size_t known;
    const char *digest;
  } cases[] = {
      {{42}, 1, 10, {5, 6, 0, 7, 3, 2, 4, 9, 1, 8}, 10, NULL},
      {{0, 0, 0}, 3, 10, {4, 6, 2, 7, 3, 5, 9, 0, 8, 1}, 10, NULL},
      {{1, 0, 0}, 3, 10, {8, 4, 7, 0, 1, 2, 5, 9, 6, 3}, 10, NULL},
      {{2, 0, 0}, 3, 10, {2, 0, 7, 6, 9, 5, 3, 4, 8, 1}, 10, NULL},
      {{0, 1, 0}, 3, 10, {9, 1, 3, 8, 7, 6, 0, 4, 2, 5}, 10, NULL},
      {{0, 0, 0}, 3, 3, {2, 0, 1}, 3, NULL},
      {{1, 0, 0}, 3, 3, {0, 1, 2}, 3, NULL},
      {{2, 0, 0}, 3, 3, {2, 0, 1}, 3, NULL},
      {{31, 0, 0, 1}, 4, 8, {7, 3, 1, 5, 4, 2, 6, 0}, 8, NULL},
      {{0, 0, 0}, 3, 890, {208, 519, 121, 597, 508, 577, 366, 74}, 8, "74f1a62b3c6cabae"},
      {{1, 0, 0}, 3, 890, {730, 44, 380, 774, 602, 377, 154, 821}, 8, "7cad5ae4bb720658"},
      {{2, 0, 0}, 3, 890, {455, 664, 684, 730, 23, 694, 602, 0}, 8, "2bce723b2c0c6686"},
      {{0, 1, 0}, 3, 890, {791, 44, 862, 362, 529, 459, 52, 265}, 8, "e4831fb16963b288"},
      {{0, 0, 208, 1}, 4, 190, {114, 33, 105, 120, 126, 65}, 6, "a588d98f01e5b520"},
      {{1, 0, 730, 1}, 4, 190, {68, 166, 55, 138, 15, 110}, 6, "83f459fb2a2bb12f"},
      {{2, 0, 455, 1}, 4, 190, {176, 100, 48, 1, 39, 11}, 6, "27a36d271261c6fc"},
      {{0, 0, 519, 1}, 4, 190, {85, 81, 100, 103, 149, 160}, 6, "2b188adb2c4835e6"},
  };
  for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
    int64_t *order = shuffled(cases[c].entropy, cases[c].count, cases[c].n);
    char got[17];
    CHECK(memcmp(order, cases[c].start, cases[c].known * sizeof *order) == 0,
          "case %zu starts %" PRId64 " %" PRId64 " %" PRId64, c, order[0], order[1], order[2]);
    digest(order, cases[c].n, got);
    if (cases[c].digest) CHECK(strcmp(got, cases[c].digest) == 0, "case %zu: %s", c, got);
    free(order);
  }
}

/* entropy as decimal strings or numbers. */
static size_t read_entropy(const json_t *list, uint64_t out[16]) {
  const size_t n = json_array_size(list);
  for (size_t i = 0; i < n && i < 16; i++) {
    const json_t *item = json_array_get(list, i);
    out[i] = json_is_string(item) ? strtoull(json_string_value(item), NULL, 10)
                                  : (uint64_t)json_integer_value(item);
  }
  return n;
}

static json_t *golden(const char *part) {
  json_error_t error;
  json_t *all = json_load_file(PG_TEST_DIR "/golden/data_order.json", 0, &error);
  CHECK(all, "%s", error.text);
  json_t *list = json_incref(json_object_get(all, part));
  CHECK(json_array_size(list) > 0, "no \"%s\" in the golden data", part);
  json_decref(all);
  return list;
}

/* Whether order[k] is list[k] for all of the list. */
static int equal_part(const int64_t *order, const json_t *list) {
  size_t k;
  json_t *item;
  json_array_foreach(list, k, item) {
    if (order[k] != json_integer_value(item)) return 0;
  }
  return json_array_size(list) > 0;
}

TEST(golden_small_orders) {
  json_t *list = golden("small"), *item;
  size_t i;
  uint64_t entropy[16];
  json_array_foreach(list, i, item) {
    const json_t *want = json_object_get(item, "order");
    const int64_t n = json_integer_value(json_object_get(item, "n"));
    const size_t count = read_entropy(json_object_get(item, "entropy"), entropy);
    int64_t *order = shuffled(entropy, count, n);
    CHECK(json_array_size(want) == (size_t)n && equal_part(order, want), "order %zu", i);
    free(order);
  }
  json_decref(list);
}

TEST(golden_large_orders) {
  json_t *list = golden("large"), *item;
  size_t i;
  uint64_t entropy[16];
  json_array_foreach(list, i, item) {
    const char *want = json_string_value(json_object_get(item, "sha256_of_little_endian_int64"));
    const int64_t n = json_integer_value(json_object_get(item, "n"));
    const size_t count = read_entropy(json_object_get(item, "entropy"), entropy);
    int64_t *order = shuffled(entropy, count, n);
    char hex[65];
    pg_sha256(order, (size_t)n * sizeof *order, hex);
    CHECK(want && strcmp(hex, want) == 0, "order %zu: %s", i, hex);
    CHECK(equal_part(order, json_object_get(item, "first8")), "order %zu", i);
    CHECK(equal_part(order + n - 8, json_object_get(item, "last8")), "order %zu", i);
    free(order);
  }
  json_decref(list);
}

TEST(golden_raw_draws) {
  json_t *list = golden("raw"), *item, *value;
  size_t i, k;
  uint64_t entropy[16];
  json_array_foreach(list, i, item) {
    const size_t count = read_entropy(json_object_get(item, "entropy"), entropy);
    uint32_t words[8];
    pg_pcg64 rng;
    pg_seed_sequence(entropy, count, words);
    pg_pcg64_seed(&rng, entropy, count);
    CHECK(json_array_size(json_object_get(item, "seedseq_state8_u32")) == 8);
    json_array_foreach(json_object_get(item, "seedseq_state8_u32"), k, value) {
      CHECK(words[k] == json_integer_value(value), "entropy %zu word %zu", i, k);
    }
    CHECK(json_array_size(json_object_get(item, "pcg64_first4")) == 4);
    json_array_foreach(json_object_get(item, "pcg64_first4"), k, value) {
      const uint64_t want = strtoull(json_string_value(value), NULL, 10);
      CHECK(pg_pcg64_next64(&rng) == want, "entropy %zu draw %zu", i, k);
    }
  }
  json_decref(list);
}

int main(void) {
  RUN(philox_known_answers);
  RUN(normals_do_not_depend_on_how_they_are_drawn);
  RUN(normals_are_box_muller_of_philox);
  RUN(normals_have_the_right_moments);
  RUN(hash_of_names_is_fnv1a);
  RUN(seed_sequence_words);
  RUN(pcg64_states_and_draws);
  RUN(published_orders);
  RUN(golden_small_orders);
  RUN(golden_large_orders);
  RUN(golden_raw_draws);
  return unit_report();
}
