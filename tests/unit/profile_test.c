/* Profiles: what they record of an update, the trace, and that they change nothing. */
#include "core/json.h"
#include "core/perigee.h"
#include "kernels/cost.h"
#include "model_support.h"
#include "temporary.h"

#define LAYERS 2
#define WIDTH 32
#define VOCAB 97
#define CONTEXT 16
#define SEQUENCES 4
#define MICRO 2

static pg_context *ctx;

typedef struct trial {
  pg_model *model;
  pg_run *run;
} trial;

static trial open_trial(void) {
  static const char *const names[PG_ROLES] = {"adamw", "muon", "rownorm"};
  trial t;
  pg_model_config c;
  pg_model_config_default(&c);
  c.layers = LAYERS, c.width = WIDTH, c.heads = 2, c.head_dim = 16, c.mlp = 64;
  c.context = CONTEXT, c.vocab = VOCAB;
  MUST(ctx, pg_model_config_resolve(ctx, &c));
  MUST(ctx, pg_model_new(ctx, &c, &t.model));
  MUST(ctx, pg_model_init(t.model, 0));
  pg_run_options options = {
      .data = temporary_folder, .sequences = SEQUENCES, .micro = MICRO, .max_norm = 1};
  MUST(ctx, pg_run_new(t.model, &options, &t.run));
  for (size_t i = 0; i < pg_model_count(t.model); i++) {
    pg_parameter *p = pg_model_parameter(t.model, i);
    const pg_optimizer *o = pg_optimizer_find(names[p->role]);
    double hypers[PG_MAX_HYPERS];
    pg_optimizer_defaults(o, hypers);
    hypers[pg_optimizer_hyper_index(o, "lr", NULL)] = 1e-2;
    MUST(ctx, pg_run_assign(t.run, o, hypers, false, &p, 1, NULL));
  }
  return t;
}

static void close_trial(trial *t) {
  pg_run_free(t->run);
  pg_model_free(t->model);
}

static pg_profile *profile_step(trial *t) {
  pg_profile *profile = NULL;
  pg_step step;
  MUST(ctx, pg_profile_start(ctx));
  MUST(ctx, pg_run_step(t->run, &step));
  MUST(ctx, pg_profile_stop(ctx, &profile));
  return profile;
}

TEST(one_recording_at_a_time) {
  pg_profile *profile = NULL;
  CHECK(pg_profile_stop(ctx, &profile) == PG_ESTATE && !profile, "stop without start");
  MUST(ctx, pg_profile_start(ctx));
  CHECK(pg_profile_start(ctx) == PG_ESTATE, "a second start");
  MUST(ctx, pg_profile_stop(ctx, &profile));
  size_t events, rows;
  pg_profile_events(profile, &events);
  pg_profile_rows(profile, &rows);
  CHECK(events == 0 && rows == 0, "%zu events, %zu rows of nothing", events, rows);
  CHECK(pg_profile_seconds(profile) >= 0, "%g s", pg_profile_seconds(profile));
  pg_profile_free(profile);
  pg_profile_free(NULL);
  /* A context that is freed while it records leaves nothing behind. */
  pg_context *other;
  MUST(ctx, pg_context_new(&(pg_context_options){.device = "cpu"}, &other, NULL, 0));
  MUST(other, pg_profile_start(other));
  pg_context_free(other);
}

TEST(parts_add_up) {
  trial t = open_trial();
  pg_step step;
  MUST(ctx, pg_run_step(t.run, &step));
  pg_profile *profile = profile_step(&t);
  size_t count, row_count;
  const pg_profile_event *events = pg_profile_events(profile, &count);
  const pg_profile_row *rows = pg_profile_rows(profile, &row_count);
  const double total = pg_profile_seconds(profile);
  double at = 0, parts = 0, summed = 0, by_part[PG_PARTS] = {0};
  int64_t calls = 0, part_calls[PG_PARTS] = {0};
  for (size_t i = 0; i < count; i++) {
    CHECK(events[i].begin >= at && events[i].end >= events[i].begin, "%s: %g after %g to %g",
          events[i].operation, at, events[i].begin, events[i].end);
    at = events[i].end;
    by_part[events[i].part] += events[i].end - events[i].begin;
    part_calls[events[i].part]++;
  }
  CHECK(count > 100 && total >= at, "%zu events until %g, stopped at %g", count, at, total);
  for (int p = 0; p < PG_PARTS; p++) {
    double seconds = pg_profile_part_seconds(profile, (pg_part)p);
    CHECK_CLOSE(seconds, by_part[p], 1e-12);
    CHECK((part_calls[p] > 0) == (p != PG_PART_COMMUNICATION), "%s: %lld calls",
          pg_part_name((pg_part)p), (long long)part_calls[p]);
    parts += seconds;
  }
  CHECK(parts <= total, "the parts last %g s of %g s", parts, total);
  for (size_t i = 0; i < row_count; i++) {
    CHECK(i == 0 || rows[i].seconds <= rows[i - 1].seconds, "row %zu is longer", i);
    summed += rows[i].seconds;
    calls += rows[i].calls;
  }
  CHECK_CLOSE(summed, parts, 1e-9);
  CHECK(calls == (int64_t)count, "%lld calls of %zu", (long long)calls, count);
  pg_profile_free(profile);
  close_trial(&t);
}

/* Every weight but the embedding's takes part in one product forward and two backward, once per
 * token: 6 FLOP. */
TEST(products_are_counted) {
  trial t = open_trial();
  const pg_model_config *c = pg_model_get_config(t.model);
  const double tokens = SEQUENCES * CONTEXT, head = VOCAB * WIDTH;
  const double weights = (double)pg_model_config_weights(c) - 2 * head;
  pg_profile *profile = profile_step(&t);
  size_t count;
  const pg_profile_row *rows = pg_profile_rows(profile, &count);
  double flops[PG_PARTS] = {0};
  double newton_schulz = 0;
  int64_t loads = 0, joins = 0; /* tokens and targets of a micro-batch each join */
  for (size_t i = 0; i < count; i++) {
    flops[rows[i].part] += rows[i].flops;
    if (!strcmp(rows[i].operation, "loader")) loads = rows[i].calls;
    if (!strcmp(rows[i].operation, "join")) joins += rows[i].calls;
    if (!strcmp(rows[i].operation, "cross_entropy"))
      CHECK(rows[i].part == PG_PART_HEAD, "a cross entropy for %s", pg_part_name(rows[i].part));
    if (!strcmp(rows[i].caller, "muon")) newton_schulz += rows[i].flops;
    if (!strcmp(rows[i].operation, "apply"))
      CHECK(rows[i].part == PG_PART_OPTIMIZER, "apply for %s", pg_part_name(rows[i].part));
  }
  CHECK_CLOSE(flops[PG_PART_GEMM], 6 * weights * tokens, 1e-12);
  CHECK_CLOSE(flops[PG_PART_HEAD], 6 * head * tokens, 1e-12);
  /* Causal, 2 + 5 products of T (T + 1) / 2 by head_dim multiply-adds. */
  CHECK_CLOSE(flops[PG_PART_ATTENTION],
              7.0 * SEQUENCES * LAYERS * (double)(c->heads * c->head_dim) * CONTEXT * (CONTEXT + 1),
              1e-12);
  CHECK(flops[PG_PART_OPTIMIZER] > 0 && newton_schulz == flops[PG_PART_OPTIMIZER],
        "%g FLOP in the optimizer, %g of them Muon's", flops[PG_PART_OPTIMIZER], newton_schulz);
  CHECK(loads == SEQUENCES / MICRO && joins == 2 * loads, "%lld micro-batches, %lld joins",
        (long long)loads, (long long)joins);
  pg_profile_free(profile);
  close_trial(&t);
}

static void weights_of(const trial *t, char hex[65]) {
  char joined[65 * 32] = "", *data = NULL;
  size_t size = 0;
  for (size_t i = 0; i < pg_model_count(t->model); i++) {
    const pg_tensor *value = pg_model_parameter(t->model, i)->value;
    size = (size_t)pg_tensor_elements(value) * sizeof(float);
    data = malloc(size);
    MUST(ctx, pg_tensor_read(value, data));
    pg_sha256(data, size, hex);
    strncat(joined, hex, sizeof joined - strlen(joined) - 1);
    free(data);
  }
  pg_sha256(joined, strlen(joined), hex);
}

TEST(no_bit_changes) {
  char plain[65], recorded[65];
  for (int profiled = 0; profiled < 2; profiled++) {
    trial t = open_trial();
    pg_step step;
    for (int update = 0; update < 3; update++)
      if (profiled)
        pg_profile_free(profile_step(&t));
      else
        MUST(ctx, pg_run_step(t.run, &step));
    weights_of(&t, profiled ? recorded : plain);
    close_trial(&t);
  }
  CHECK(!strcmp(plain, recorded), "weights %s, with a profile %s", plain, recorded);
}

/* The file is JSON, holds every operation once at its time, and nothing lies outside the
 * recording. The locale has a decimal comma. */
TEST(trace_is_complete) {
  trial t = open_trial();
  pg_profile *profile = profile_step(&t);
  const char *path = temporary_path("trace.json");
  json_t *root = NULL;
  size_t count, operations = 0, blocks = 0, i;
  const pg_profile_event *events = pg_profile_events(profile, &count);
  comma_locale();
  MUST(ctx, pg_profile_write(ctx, profile, path));
  setlocale(LC_NUMERIC, "C");
  MUST(ctx, pg__json_load(ctx, path, 0, &root));
  json_t *list = json_object_get(root, "traceEvents"), *e;
  json_array_foreach(list, i, e) {
    const char *name = json_string_value(json_object_get(e, "name"));
    const double ts = json_number_value(json_object_get(e, "ts"));
    const double dur = json_number_value(json_object_get(e, "dur"));
    if (strcmp(json_string_value(json_object_get(e, "ph")), "X") != 0) continue;
    CHECK(ts >= 0 && dur >= 0 && ts + dur <= 1e6 * pg_profile_seconds(profile) + 0.01,
          "%s from %g us for %g us", name, ts, dur);
    if (json_integer_value(json_object_get(e, "tid")) == 1) {
      blocks += strstr(name, "block") != NULL;
      continue;
    }
    const pg_profile_event *want = &events[operations++];
    CHECK(!strcmp(name, want->operation), "%s, not %s", name, want->operation);
    /* Rounded to a nanosecond. */
    CHECK(fabs(ts - 1e6 * want->begin) < 6e-4 && fabs(dur - 1e6 * (want->end - want->begin)) < 6e-4,
          "%s: %.6f us for %.6f us", name, ts, dur);
  }
  CHECK(operations == count, "%zu operations of %zu", operations, count);
  CHECK(blocks == 2 * LAYERS * SEQUENCES / MICRO, "%zu spans of blocks", blocks);
  CHECK(pg_profile_write(ctx, profile, "/no/such/folder/trace.json") == PG_ENOENT, "%s",
        pg_context_message(ctx));
  json_decref(root);
  pg_profile_free(profile);
  close_trial(&t);
}

/* Recording ends with an update that fails, and the spans that it left open do no harm. */
TEST(a_failed_update_is_recorded) {
  trial t = open_trial();
  pg_profile *profile = NULL;
  pg_step step;
  size_t count;
  MUST(ctx, pg_profile_start(ctx));
  pg_context_cancel(ctx);
  CHECK(pg_run_step(t.run, &step) == PG_ECANCELED, "%s", pg_context_message(ctx));
  pg_context_resume(ctx);
  MUST(ctx, pg_run_step(t.run, &step));
  MUST(ctx, pg_profile_stop(ctx, &profile));
  pg_profile_events(profile, &count);
  CHECK(count > 100, "%zu events", count);
  MUST(ctx, pg_profile_write(ctx, profile, temporary_path("failed.json")));
  pg_profile_free(profile);
  close_trial(&t);
}

TEST(costs) {
  pg_cost cost = {0};
  pg_queue *q = pg_cost_queue(&cost);
  const pg_kernels *k = &pg_cost_kernels;
#define COST(op, wanted_bytes, wanted_flops, ...)                                                  \
  do {                                                                                             \
    cost = (pg_cost){0};                                                                           \
    k->op(q, __VA_ARGS__);                                                                         \
    CHECK(cost.bytes == (wanted_bytes) && cost.flops == (wanted_flops), #op ": %g bytes, %g FLOP", \
          cost.bytes, cost.flops);                                                                 \
  } while (0)
  pg_gemm g = {.m = 3, .n = 5, .k = 7, .type_a = PG_BF16, .type_b = PG_BF16, .type_c = PG_F32};
  COST(gemm, 2 * 21 + 2 * 35 + 4 * 15, 2 * 105, &g);
  g.beta = 1, g.batch = 2;
  COST(gemm, 2 * (2 * 21 + 2 * 35 + 8 * 15), 2 * 210, &g);
  COST(copy, 200, 0, NULL, NULL, 100);
  COST(rmsnorm_forward, 2 * 4 * 30 + 4 * 5, 0, PG_F32, NULL, 5, 6, 1e-6f, NULL, (float *)&cost);
  COST(rmsnorm_forward, 2 * 2 * 30, 0, PG_BF16, NULL, 5, 6, 1e-6f, NULL, NULL);
  const float some = 0;
  pg_target to[2] = {{.increment = (float *)&cost}, {.value = (float *)&cost}};
  COST(adamw, 24 * 10, 0, NULL, NULL, 10, NULL, NULL, to);
  COST(rownorm, 20 * 15, 0, NULL, &some, 3, 5, NULL, to + 1);
  COST(momentum, 2 * (12 * 15 + 64), 0, .9, true, 2, NULL, NULL, 15, (float *)&cost, NULL);
  COST(rownorm, 8 * 15, 0, NULL, NULL, 3, 5, NULL, to);
  to[1].copy = (uint16_t *)&cost;
  COST(apply, (4 + 4) * 10 + (4 + 10) * 10, 0, 1, PG_F32, NULL, 10, 2, to);
  /* Two sequences of 4, 3 heads of 2: 10 scores each, four vectors a head, one statistic. */
  COST(attention_forward, 4 * (4 * 48 + 24), 2 * 2 * 6 * 10 * 2, PG_F32, NULL, NULL, NULL, 2, 4, 3,
       2, NULL, NULL);
  COST(binary, 4 * (12 + 4 + 12), 0, PG_ADD, ((pg_view){NULL, 4, 1}), ((pg_view){NULL, 0, 1}), 3, 4,
       ((pg_view){NULL, 4, 1}));
  pg_farthest found = {.multiply_adds = 50};
  COST(diameter, 4 * 12, 100, NULL, 3, 4, NULL, &found);
}

int main(void) {
  char message[256] = "";
  int32_t tokens[1200];
  pg_context_options options = {.device = unit_device(), .threads = 2};
  if (!options.device) options.device = "cpu";
  if (pg_context_new(&options, &ctx, message, sizeof message) < 0) {
    printf("%s\n", message);
    return 1;
  }
  for (int i = 0; i < 1200; i++) tokens[i] = (i * i / 7 + 3 * i) % VOCAB;
  MUST(ctx, pg_shard_write(ctx, temporary_path("x_train_0.bin"), tokens, 1200));
  RUN(one_recording_at_a_time);
  RUN(parts_add_up);
  RUN(products_are_counted);
  RUN(no_bit_changes);
  RUN(trace_is_complete);
  RUN(a_failed_update_is_recorded);
  RUN(costs);
  pg_file_remove_tree(ctx, temporary_folder);
  pg_context_free(ctx);
  return unit_report();
}
