/* Generation: the most likely token, the distribution at a temperature, top_k, seeds. */
#include "core/generate.h"
#include "model_support.h"

static const shape small = {2, 16, 2, 8, 24, 31, 1, 12};

typedef struct fixture {
  pg_context *ctx;
  pg_model *model;
  pg_activations *activations;
  int32_t prompt[20];
  float logits[31]; /* after the prompt */
} fixture;

static void open_fixture(fixture *f) {
  const void *hidden;
  f->ctx = open_context(1);
  pg_model_config c = make_config(&small);
  f->model = make_model(f->ctx, &c, 8);
  MUST(f->ctx, pg_activations_new(f->ctx, &c, PG_F32, 1, 12, PG_KEEP_NOTHING, &f->activations));
  int32_t *ids = make_ids(20, 31, 6);
  memcpy(f->prompt, ids, sizeof f->prompt);
  free(ids);
  MUST(f->ctx, pg_model_forward(f->model, f->activations, f->prompt + 8, 1, 12, &hidden));
  MUST(f->ctx, pg_head_logits(f->model, f->activations, 11, f->logits));
}

static void close_fixture(fixture *f) {
  pg_activations_free(f->activations);
  pg_model_free(f->model);
  CHECK(pg_context_live_tensors(f->ctx) == 0 && pg_context_bytes(f->ctx) == 0, "left over");
  pg_context_free(f->ctx);
}

static int32_t next(fixture *f, double temperature, int64_t top_k, uint64_t seed, uint64_t index) {
  pg_generate_options options = {.temperature = temperature, .top_k = top_k, .seed = seed};
  int32_t token = -1;
  MUST(f->ctx, pg_generate_next(f->model, f->activations, f->prompt, 20, &options, index, &token));
  return token;
}

static int32_t most_likely(const fixture *f) {
  int32_t best = 0;
  for (int32_t v = 1; v < 31; v++)
    if (f->logits[v] > f->logits[best]) best = v;
  return best;
}

TEST(temperature_zero_and_top_1_take_the_most_likely_token) {
  fixture f;
  open_fixture(&f);
  for (uint64_t i = 0; i < 5; i++) {
    CHECK(next(&f, 0, 0, i, i) == most_likely(&f), "temperature 0");
    CHECK(next(&f, 0, 7, i, i) == most_likely(&f), "temperature 0, top 7");
    CHECK(next(&f, 5, 1, i, i) == most_likely(&f), "top 1");
    CHECK(next(&f, 1e-300, 0, i, i) == most_likely(&f), "temperature 1e-300");
  }
  close_fixture(&f);
}

TEST(a_seed_gives_the_same_text_again) {
  fixture f;
  int same_seed = 0, other_seed = 0;
  open_fixture(&f);
  for (uint64_t i = 0; i < 40; i++) {
    int32_t token = next(&f, 1.5, 0, 3, i);
    CHECK(token >= 0 && token < 31, "token %d", (int)token);
    same_seed += token == next(&f, 1.5, 0, 3, i);
    other_seed += token == next(&f, 1.5, 0, 4, i);
  }
  CHECK(same_seed == 40 && other_seed < 40, "%d and %d of 40", same_seed, other_seed);
  close_fixture(&f);
}

/* Draws at the frequencies of softmax(z / temperature) over the `kept` most likely tokens. */
static void check_frequencies(fixture *f, double temperature, int64_t top_k) {
  enum { DRAWS = 4000 };
  int counts[31] = {0};
  double p[31], total = 0;
  for (int v = 0; v < 31; v++) {
    int above = 0;
    for (int w = 0; w < 31; w++) above += f->logits[w] > f->logits[v];
    p[v] = top_k && above >= top_k ? 0 : exp(f->logits[v] / temperature);
    total += p[v];
  }
  for (uint64_t i = 0; i < DRAWS; i++) counts[next(f, temperature, top_k, 12, i)]++;
  for (int v = 0; v < 31; v++) {
    double want = DRAWS * p[v] / total, deviation = sqrt(want * (1 - p[v] / total));
    CHECK(p[v] > 0 || counts[v] == 0, "token %d is not among the top %d", v, (int)top_k);
    /* Five standard deviations, and one count for rare tokens. */
    CHECK(fabs(counts[v] - want) <= 5 * deviation + 1, "token %d: %d, want %.1f", v, counts[v],
          want);
  }
}

TEST(tokens_come_at_their_probability) {
  fixture f;
  open_fixture(&f);
  check_frequencies(&f, 1, 0);
  check_frequencies(&f, 2.5, 0);
  check_frequencies(&f, 1.5, 4);
  close_fixture(&f);
}

TEST(only_the_last_context_counts_and_short_prompts_work) {
  fixture f;
  int32_t token, before;
  pg_generate_options options = {.temperature = 0};
  open_fixture(&f);
  before = next(&f, 0, 0, 0, 0);
  for (int i = 0; i < 8; i++) f.prompt[i] = (f.prompt[i] + 1) % 31;
  CHECK(next(&f, 0, 0, 0, 0) == before, "older tokens were read");
  for (int64_t count = 1; count <= 12; count++)
    MUST(f.ctx, pg_generate_next(f.model, f.activations, f.prompt, count, &options, 0, &token));
  close_fixture(&f);
}

TEST(bad_requests_are_refused) {
  fixture f;
  int32_t token;
  open_fixture(&f);
  const struct {
    pg_generate_options options;
    int64_t count;
    int status;
    const char *text;
  } bad[] = {{{.temperature = -1}, 1, PG_EINVAL, "temperature is -1"},
             {{.temperature = NAN}, 1, PG_EINVAL, "temperature"},
             {{.temperature = INFINITY}, 1, PG_EINVAL, "temperature"},
             {{.top_k = -3}, 1, PG_EINVAL, "top_k is -3"},
             {{.temperature = 0}, 0, PG_EINVAL, "at least one token"}};
  for (size_t i = 0; i < PG_COUNT(bad); i++) {
    int status = pg_generate_next(f.model, f.activations, f.prompt, bad[i].count, &bad[i].options,
                                  0, &token);
    CHECK(status == bad[i].status && strstr(pg_context_message(f.ctx), bad[i].text), "%zu: %s", i,
          pg_context_message(f.ctx));
  }
  pg_generate_options plain = {.temperature = 0};
  f.prompt[19] = 31;
  CHECK(pg_generate_next(f.model, f.activations, f.prompt, 20, &plain, 0, &token) == PG_EDATA,
        "a token outside the vocabulary");
  f.prompt[19] = 0;
  float *head = read_floats(pg_model_head(f.model)->value);
  head[5 * 16] = NAN;
  MUST(f.ctx, pg_tensor_write(pg_model_head(f.model)->value, head));
  CHECK(pg_generate_next(f.model, f.activations, f.prompt, 20, &plain, 0, &token) == PG_ENONFINITE,
        "a NaN in the head");
  CHECK(strstr(pg_context_message(f.ctx), "token 5"), "%s", pg_context_message(f.ctx));
  free(head);
  close_fixture(&f);
}

int main(void) {
  RUN(temperature_zero_and_top_1_take_the_most_likely_token);
  RUN(a_seed_gives_the_same_text_again);
  RUN(tokens_come_at_their_probability);
  RUN(only_the_last_context_counts_and_short_prompts_work);
  RUN(bad_requests_are_refused);
  return unit_report();
}
