/* Optimizers as descriptors: registry, defaults, ranges; and what must hold for all of them:
 * groups, zero gradients, learning rate 0, decay exactly once, RowNorm's bound and bits. */
#include "core/random.h"
#include "core/tensor_ops.h"
#include "optimizer_job.h"

/* ---- registry, defaults, ranges ------------------------------------------------------------- */
TEST(registry) {
  static const char *const names[] = {
      "adamw",       "muon",          "rownorm", "sgd",     "lion",   "signsgd", "scale",
      "rmnp",        "sinkgd",        "moga",    "scion",   "modula", "normuon", "lausu",
      "equidistant", "greedy_radial", "exact",   "shampoo", "soap",   "kfac",    "frozen"};
  for (size_t i = 0; i < PG_COUNT(names); i++) {
    const pg_optimizer *o = pg_optimizer_find(names[i]);
    CHECK(o && pg_optimizer_at(i) == o, "%s", names[i]);
    if (!o) continue;
    double values[PG_MAX_HYPERS];
    size_t count = 0;
    for (size_t k = 0; k < o->hyper_count; k++) count += o->hypers[k].kind == PG_HYPER_PAIR ? 2 : 1;
    CHECK(count <= PG_MAX_HYPERS && o->slot_count <= PG_MAX_SLOTS, "%s", names[i]);
    pg_optimizer_defaults(o, values);
    for (size_t k = count; k < PG_MAX_HYPERS; k++) CHECK(values[k] == 0, "unused values are 0");
    /* Every default is allowed, except where a value must be given. */
    int lr = pg_optimizer_hyper_index(o, "lr", NULL);
    if (lr >= 0 && isnan(values[lr])) {
      CHECK(pg_optimizer_check(ctx, o, values) == PG_EINVAL, "%s without lr", names[i]);
      CHECK(strstr(pg_context_message(ctx), "lr has no default"), "%s", pg_context_message(ctx));
      values[lr] = 1e-3;
    }
    CHECK(pg_optimizer_check(ctx, o, values) == 0, "%s", pg_context_message(ctx));
    if (o->increment)
      CHECK(lr >= 0 && pg_optimizer_hyper_index(o, "weight_decay", NULL) >= 0, "%s", names[i]);
  }
  CHECK(pg_optimizer_at(PG_COUNT(names)) == NULL, "past the end");
  CHECK(pg_optimizer_find("adam") == NULL && pg_optimizer_find(NULL) == NULL, "unknown names");
  const pg_optimizer *frozen = pg_optimizer_find("frozen");
  CHECK(!frozen->increment && !frozen->slot_count && !frozen->hyper_count, "frozen does nothing");
}

TEST(hypers_are_found_by_name) {
  const pg_optimizer *o = pg_optimizer_find("adamw");
  const pg_hyper *h = NULL;
  double values[PG_MAX_HYPERS];
  pg_optimizer_defaults(o, values);
  CHECK(pg_optimizer_hyper_index(o, "betas", &h) == 1 && h->kind == PG_HYPER_PAIR, "betas");
  CHECK(values[1] == 0.9 && values[2] == 0.999, "the pair's two values");
  CHECK(pg_optimizer_hyper_index(o, "eps", &h) == 3 && values[3] == 1e-10, "after the pair");
  CHECK(pg_optimizer_hyper_index(o, "weight_decay", NULL) == 4 && values[4] == 0.1, "last");
  CHECK(pg_optimizer_hyper_index(o, "momentum", NULL) == -1, "unknown");
}

TEST(ranges) {
  const double nan = NAN, inf = INFINITY;
  const struct {
    const char *optimizer, *hyper;
    int offset;
    double value;
    bool allowed;
    const char *says; /* part of the message */
  } cases[] = {
      {"adamw", "lr", 0, 0, true, ""},
      {"adamw", "lr", 0, -1e-9, false,
       "lr = -1e-09 is not allowed; it must be finite and at least"},
      {"adamw", "lr", 0, nan, false, "lr = nan"},
      {"adamw", "lr", 0, inf, false, "lr = inf"},
      {"adamw", "betas", 0, 0, true, ""},
      {"adamw", "betas", 0, 1, false, "betas[1] = 1 is not allowed; it must be from 0 to 1 (excl"},
      {"adamw", "betas", 1, 1.5, false, "betas[2] = 1.5"},
      {"adamw", "betas", 1, nan, false, "betas[2] = nan"},
      {"adamw", "eps", 0, 0, false, "eps = 0"},
      {"adamw", "eps", 0, 1e-60, false, "eps = 1e-60"},
      {"adamw", "weight_decay", 0, -0.1, false, "weight_decay = -0.1"},
      {"adamw", "weight_decay", 0, 0, true, ""},
      {"muon", "momentum", 0, 1, false, "momentum = 1"},
      {"muon", "momentum", 0, 0, true, ""},
      {"muon", "nesterov", 0, 0.5, false, "nesterov is 0.5; it must be true or false"},
      {"muon", "nesterov", 0, nan, false, "nesterov is nan"},
      {"muon", "nesterov", 0, 0, true, ""},
      {"muon", "steps", 0, 0, true, ""},
      {"muon", "steps", 0, 2.5, false, "steps = 2.5 is not allowed; it must be an integer from 0"},
      {"muon", "steps", 0, -1, false, "steps = -1"},
      {"muon", "steps", 0, 1e9, false, "steps = 1000000000"},
      {"muon", "eps", 0, 0, true, ""},
      {"muon", "eps", 0, -1, false, "eps = -1"},
      {"rownorm", "beta", 0, 1, false, "beta = 1"},
      {"rownorm", "beta", 0, 0, true, ""},
      {"rownorm", "eps", 0, 0, false, "eps = 0 is not allowed; it must be finite and above 0"},
      {"rownorm", "eps", 0, nan, false, "eps = nan"},
      {"rownorm", "project", 0, 2, true, ""},
      {"rownorm", "project", 0, 3, false, "one of \"none\", \"outer\", \"both\""},
      {"rownorm", "project", 0, -1, false, "project"},
      {"rownorm", "project", 0, nan, false, "project"},
      {"sgd", "momentum", 0, 1, false, "momentum = 1"},
      {"sgd", "momentum", 0, 0.9, true, ""},
      {"sgd", "weight_decay", 0, inf, false, "weight_decay = inf"},
      {"lion", "betas", 1, 1, false, "betas[2] = 1"},
      {"signsgd", "beta", 0, 1, false, "beta = 1"},
      {"scale", "axis", 0, 2, false, "one of \"rows\", \"columns\""},
      {"rmnp", "eps", 0, 0, false, "eps = 0"},
      {"sinkgd", "steps", 0, 0.5, false, "steps = 0.5"},
      {"moga", "p", 0, 1, true, ""},
      {"muon", "coefficients", 0, 3, false, "\"quintic\", \"polar_express\", \"dion\""},
      {"muon", "scale", 0, 4, false, "\"spectral\", \"mup\", \"rms\", \"nuclear\""},
      {"scion", "alpha", 0, 0, false, "alpha = 0"},
      {"scion", "alpha", 0, 1, true, ""},
      {"modula", "map", 0, 2, false, "\"linear\", \"embed\""},
      {"normuon", "beta2", 0, 1, false, "beta2 = 1"},
      {"lausu", "map", 0, 3, false, "\"row\", \"right_polar\", \"hybrid\""},
      {"moga", "p", 0, 0.99, false, "p = 0.99"},
  };
  for (size_t i = 0; i < PG_COUNT(cases); i++) {
    const pg_optimizer *o = pg_optimizer_find(cases[i].optimizer);
    double values[PG_MAX_HYPERS];
    pg_optimizer_defaults(o, values);
    values[pg_optimizer_hyper_index(o, "lr", NULL)] = 1e-3;
    values[pg_optimizer_hyper_index(o, cases[i].hyper, NULL) + cases[i].offset] = cases[i].value;
    int status = pg_optimizer_check(ctx, o, values);
    CHECK(status == (cases[i].allowed ? 0 : PG_EINVAL), "%s.%s = %g: %d", cases[i].optimizer,
          cases[i].hyper, cases[i].value, status);
    if (!cases[i].allowed) {
      const char *message = pg_context_message(ctx);
      CHECK(strstr(message, cases[i].says) && strstr(message, cases[i].optimizer), "%s", message);
    }
  }
}

TEST(slot_shapes) {
  const struct {
    pg_slot_shape shape;
    int ndim;
    int64_t a, b;
  } cases[] = {{PG_SLOT_MATRIX, 2, 5, 3},         {PG_SLOT_ROW, 1, 5, 1},
               {PG_SLOT_COLUMN, 1, 3, 1},         {PG_SLOT_ROWS_SQUARE, 2, 5, 5},
               {PG_SLOT_COLUMNS_SQUARE, 2, 3, 3}, {PG_SLOT_SCALAR, 0, 1, 1}};
  for (size_t i = 0; i < PG_COUNT(cases); i++) {
    pg_slot slot = {"s", cases[i].shape, PG_F32};
    int64_t shape[2];
    int ndim = pg_slot_dims(&slot, 5, 3, shape);
    CHECK(ndim == cases[i].ndim && shape[0] == cases[i].a && shape[1] == cases[i].b, "%zu", i);
  }
}

/* ---- groups, bits, edges -----------------------------------------------------------------------
 */
TEST(muon_groups_equal_single_updates) {
  /* Five 600 x 700 matrices exceed the scratch limit together, so that the group is split; each
   * must come out as it does alone. */
  job all = job_new("muon", 5, 600, 700);
  set(&all, "steps", 1);
  float *noise = malloc(600 * 700 * sizeof *noise);
  for (size_t i = 0; i < 5; i++) {
    pg_normals(3, i, 0, 600 * 700, noise);
    CHECK(pg_tensor_write(all.g[i], noise) == 0, "write");
  }
  increment(&all, 1e-2);
  for (size_t i = 0; i < 5; i++) {
    job one = job_new("muon", 1, 600, 700);
    set(&one, "steps", 1);
    CHECK(pg_tensor_copy(one.g[0], all.g[i]) == 0, "copy");
    increment(&one, 1e-2);
    float *a = read_floats(all.s[i]), *b = read_floats(one.s[0]);
    double error = 0, norm = 0;
    for (int k = 0; k < 600 * 700; k++) {
      error += (a[k] - b[k]) * (a[k] - b[k]);
      norm += b[k] * b[k];
    }
    /* A batched product may sum in another order: U sqrt(700) at most. */
    CHECK(norm > 0 && sqrt(error / norm) <= 27 * U, "matrix %zu: %g", i, sqrt(error / norm));
    free(a);
    free(b);
    job_free(&one);
  }
  free(noise);
  job_free(&all);
}

TEST(rownorm_has_the_bits_of_its_tensor_form) {
  /* m:lerp_(g, 1 - beta); m:div_rows(m:row_norms() + eps (1 - beta^n)):mul(-lr) */
  job j = job_new("rownorm", 1, 67, 33);
  pg_tensor *m = matrix(67, 33);
  float noise[67 * 33];
  double beta = get(&j, "beta", 0), eps = get(&j, "eps", 0);
  set(&j, "lr", 3e-3);
  for (int n = 1; n <= 5; n++) {
    double lr = 3e-3 * n / 5;
    pg_tensor *norms = NULL, *s = NULL;
    pg_normals(5, (uint64_t)n, 0, PG_COUNT(noise), noise);
    memset(noise + 33, 0, 33 * sizeof *noise);
    CHECK(pg_tensor_write(j.g[0], noise) == 0, "write");
    increment(&j, lr);
    CHECK(pg_tensor_lerp(m, j.g[0], 1 - beta) == 0, "lerp");
    CHECK(pg_tensor_reduce("norm", m, 1, &norms) == 0, "norm");
    CHECK(pg_tensor_scalar("add", norms, eps * (1 - pow(beta, n)), false, norms, NULL) == 0, "add");
    CHECK(pg_tensor_rows_op("div", m, norms, NULL, &s) == 0, "div");
    CHECK(pg_tensor_scalar("mul", s, -lr, false, s, NULL) == 0, "mul");
    float *a = read_floats(j.s[0]), *b = read_floats(s);
    CHECK(memcmp(a, b, sizeof noise) == 0, "update %d", n);
    free(a);
    free(b);
    a = read_floats(j.slots[0][0]);
    b = read_floats(m);
    CHECK(memcmp(a, b, sizeof noise) == 0, "buffer %d", n);
    free(a);
    free(b);
    pg_tensor_free(norms);
    pg_tensor_free(s);
  }
  pg_tensor_free(m);
  job_free(&j);
}

/* Everything but frozen. */
static const char *trained[64];
static size_t trained_count;
static void list_trained(void) {
  const pg_optimizer *o;
  for (size_t i = 0; (o = pg_optimizer_at(i)) && trained_count < PG_COUNT(trained); i++)
    if (o->increment) trained[trained_count++] = o->name;
}

/* A slot that is zero without gradients: no basis, nothing of a head's inputs. */
static bool is_moving(const pg_optimizer *o, size_t slot) {
  return !o->moments || o->slots[slot].shape == PG_SLOT_MATRIX
             ? !strstr(o->slots[slot].name, "basis")
             : false;
}
static bool has_factors(const pg_optimizer *o) {
  for (size_t s = 0; s < o->slot_count; s++)
    if (o->slots[s].shape == PG_SLOT_COLUMNS_FACTOR) return true;
  return false;
}

TEST(zero_gradients) {
  for (size_t k = 0; k < trained_count; k++)
    for (int variant = 0; variant < 3; variant++) {
      job j = job_new(trained[k], 1, 6, 4);
      set(&j, "lr", 1e-2);
      if (strcmp(trained[k], "muon") == 0 && variant) set(&j, "eps", variant == 1 ? 0 : 1e-30);
      if (strcmp(trained[k], "rownorm") == 0) {
        set(&j, "project", variant);
        set(&j, "eps", variant == 1 ? 1e-300 : 1e-8);
      }
      if (strcmp(trained[k], "scion") == 0) set(&j, "map", variant + 1);
      if (strcmp(trained[k], "lausu") == 0) set(&j, "map", variant);
      if (strcmp(trained[k], "modula") == 0) set(&j, "map", variant % 2);
      if (strcmp(trained[k], "equidistant") == 0) set(&j, "adaptive", variant % 2);
      if (strcmp(trained[k], "greedy_radial") == 0) set(&j, "rescale", variant % 2);
      if (strcmp(trained[k], "sgd") == 0) set(&j, "momentum", variant * 0.4);
      const double zero[36] = {0}; /* also a factor of the rows */
      for (int n = 0; n < 3; n++) {
        increment(&j, 1e-2);
        check_matrix(trained[k], j.s[0], zero, 0);
      }
      for (size_t s = 0; s < j.o->slot_count; s++)
        if (is_moving(j.o, s)) check_matrix("slot", j.slots[0][s], zero, 0);
      /* One row without gradient, the others with one. */
      double g[24];
      for (int i = 0; i < 24; i++) g[i] = i / 4 == 2 ? 0 : i - 11.5;
      write_doubles(j.g[0], g);
      increment(&j, 1e-2);
      float *f = read_floats(j.s[0]);
      for (int i = 0; i < 24; i++) {
        CHECK(isfinite(f[i]), "%s: %g", trained[k], f[i]);
        /* A projection moves the row by the mean; what the optimizer itself gives it is 0. */
        bool projected = (strcmp(trained[k], "rownorm") == 0 && variant) ||
                         strcmp(trained[k], "equidistant") == 0 || strcmp(trained[k], "exact") == 0;
        if (i / 4 == 2 && !projected) CHECK(f[i] == 0, "%s: %g", trained[k], f[i]);
      }
      free(f);
      job_free(&j);
    }
}

TEST(learning_rate_zero) {
  /* The first update of a warmup: increments exactly 0, slots as at any other rate. */
  for (size_t k = 0; k < trained_count; k++) {
    job a = job_new(trained[k], 1, 6, 4), b = job_new(trained[k], 1, 6, 4);
    float noise[24], *f;
    set(&a, "lr", 1);
    set(&b, "lr", 1);
    pg_normals(1, k, 0, 24, noise);
    CHECK(pg_tensor_write(a.g[0], noise) == 0 && pg_tensor_write(b.g[0], noise) == 0, "write");
    /* SOAP's first step is 0 at any rate. */
    increment(&a, 0), increment(&b, 0.5);
    increment(&a, 0), increment(&b, 0.5);
    const double zero[24] = {0};
    check_matrix(trained[k], a.s[0], zero, 0);
    double moved = 0;
    for (size_t s = 0; s < a.o->slot_count; s++) {
      float *x = read_floats(a.slots[0][s]), *y = read_floats(b.slots[0][s]);
      const int64_t n = pg_tensor_elements(a.slots[0][s]);
      CHECK(memcmp(x, y, (size_t)n * sizeof *x) == 0, "%s slot %zu", trained[k], s);
      for (int64_t i = 0; i < n; i++) moved += fabsf(x[i]);
      free(x);
      free(y);
    }
    CHECK(moved > 0 || !a.o->slot_count, "%s: slots advance", trained[k]);
    f = read_floats(b.s[0]);
    CHECK(f[0] != 0, "%s: the other moves", trained[k]);
    free(f);
    job_free(&a);
    job_free(&b);
  }
}

TEST(decay_is_applied_once) {
  /* lr * weight_decay = 0.1 and no gradient: every weight is 0.9 times what it was, rounded once,
   * and no optimizer puts decay into its increment. */
  for (size_t k = 0; k < trained_count; k++) {
    job j = job_new(trained[k], 1, 7, 5);
    float w[35];
    set(&j, "lr", 0.5);
    set(&j, "weight_decay", 0.2);
    pg_normals(2, 2, 0, 35, w);
    CHECK(pg_tensor_write(j.w[0], w) == 0, "write");
    increment(&j, 0.5);
    apply(&j, 0.5);
    float *f = read_floats(j.w[0]), keep = (float)0.9;
    for (int i = 0; i < 35; i++) CHECK(f[i] == keep * w[i], "%s: %g of %g", trained[k], f[i], w[i]);
    free(f);
    job_free(&j);
  }
}

/* An optimizer that applies its increments itself gives the bits of the two phases, whether the
 * increments are kept or not: slots, weights, copies. */
TEST(applying_at_once) {
  const int64_t sizes[][2] = {{1, 1}, {7, 5}, {40, 33}, {64, 64}, {3, 1500}};
  for (size_t k = 0; k < trained_count; k++) {
    if (!pg_optimizer_find(trained[k])->applies) continue;
    for (size_t c = 0; c < PG_COUNT(sizes); c++)
      for (int keep = 0; keep < 2; keep++) {
        /* Decomposing large factors takes long. */
        if (sizes[c][1] > 1000 && has_factors(pg_optimizer_find(trained[k]))) continue;
        const size_t cells = (size_t)(sizes[c][0] * sizes[c][1]);
        job two = job_new(trained[k], 3, sizes[c][0], sizes[c][1]);
        job one = job_new(trained[k], 3, sizes[c][0], sizes[c][1]);
        float *noise = malloc(cells * sizeof *noise);
        set(&two, "lr", 1), set(&one, "lr", 1);
        set(&two, "weight_decay", .1), set(&one, "weight_decay", .1);
        for (int n = 0; n < 4; n++)
          for (size_t i = 0; i <= 3; i++) {
            if (i < 3) {
              pg_normals(17, k, (uint64_t)n * 100000 + i * 10000, (int64_t)cells, noise);
              CHECK(pg_tensor_write(one.g[i], noise) == 0, "write");
              CHECK(pg_tensor_copy(two.g[i], one.g[i]) == 0, "copy");
              if (n == 0) CHECK(pg_tensor_copy(two.w[i], one.g[i]) == 0, "copy");
              if (n == 0) CHECK(pg_tensor_copy(one.w[i], one.g[i]) == 0, "copy");
              continue;
            }
            increment(&two, 1e-2 * (n + 1));
            apply(&two, 1e-2 * (n + 1));
            update(&one, 1e-2 * (n + 1), true, keep);
          }
        free(noise);
        for (size_t i = 0; i < 3; i++) {
          uint16_t *copies[2] = {malloc(cells * 2), malloc(cells * 2)};
          CHECK(pg_tensor_read(one.copy[i], copies[0]) == 0, "read");
          CHECK(pg_tensor_read(two.copy[i], copies[1]) == 0, "read");
          CHECK(!memcmp(copies[0], copies[1], cells * 2), "%s: copy", trained[k]);
          free(copies[0]), free(copies[1]);
          for (size_t s = 0; s < one.o->slot_count + (keep ? 2 : 1); s++) {
            bool slot = s < one.o->slot_count, value = s == one.o->slot_count;
            const pg_tensor *got = slot ? one.slots[i][s] : value ? one.w[i] : one.s[i];
            float *a = read_floats(got);
            float *b = read_floats(slot ? two.slots[i][s] : value ? two.w[i] : two.s[i]);
            CHECK(!memcmp(a, b, (size_t)pg_tensor_elements(got) * sizeof *a), "%s %zu: %s",
                  trained[k], c,
                  slot    ? "slot"
                  : value ? "weights"
                          : "increment");
            free(a), free(b);
          }
        }
        job_free(&one), job_free(&two);
      }
  }
}

TEST(rownorm_diameter_bound) {
  /* D(S) <= 2 lr (1 + 1e-6), and rows that differ come close to it. */
  const int64_t rows = 80, columns = 5;
  for (int trial = 0; trial < 30; trial++) {
    job j = job_new("rownorm", 1, rows, columns);
    float noise[80 * 5];
    double lr = pow(10, -6 + trial % 7), worst = 0;
    set(&j, "lr", lr);
    for (int n = 0; n < 3; n++) {
      pg_normals(11, (uint64_t)trial, (uint64_t)n * 400, 400, noise);
      for (int i = 0; i < 400; i++) noise[i] *= powf(10, (float)(trial % 11 - 5) + (float)(i % 3));
      CHECK(pg_tensor_write(j.g[0], noise) == 0, "write");
      increment(&j, lr);
      float *s = read_floats(j.s[0]);
      for (int64_t a = 0; a < rows; a++)
        for (int64_t b = 0; b < a; b++) {
          double d = 0;
          for (int64_t c = 0; c < columns; c++) {
            double e = (double)s[a * columns + c] - s[b * columns + c];
            d += e * e;
          }
          worst = fmax(worst, sqrt(d));
        }
      free(s);
    }
    CHECK(worst <= 2 * lr * (1 + 1e-6) && worst > 1.5 * lr, "D = %.9g lr", worst / lr);
    job_free(&j);
  }
}

int main(void) {
  if (job_start() < 0) return 1;
  list_trained();
  RUN(registry);
  RUN(hypers_are_found_by_name);
  RUN(ranges);
  RUN(slot_shapes);
  RUN(muon_groups_equal_single_updates);
  RUN(rownorm_has_the_bits_of_its_tensor_form);
  RUN(zero_gradients);
  RUN(learning_rate_zero);
  RUN(decay_is_applied_once);
  RUN(applying_at_once);
  RUN(rownorm_diameter_bound);
  return job_end();
}
