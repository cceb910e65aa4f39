/* The gradient bottleneck: values by hand, against an explicit orthonormal basis in fp64, over a
 * panel, on subspaces and factors, and refusals.
 *
 * The bar: a logit of d products is off by (d + 2) u |h| |u| at most, and so, relative to itself,
 * is every e^z; p - e_c, its norm, and its product with U each add the rounding of their sums,
 * which are blocked: with |z| <= 8 here, 2 (8 (d + 2) + d + 16) u for a ratio of two such. */
#include "core/bottleneck.h"
#include "core/model_internal.h"
#include "core/panel.h"
#include "data_files.h"
#include "model_support.h"
#include "reference_model.h"

static double bar_of(int64_t d) {
  return 2 * (8 * ((double)d + 2) + (double)d + 16) * UNIT_ROUNDOFF;
}

static float *normals(int64_t n, uint64_t stream, double scale) {
  float *x = malloc((size_t)n * sizeof *x);
  pg_normals(11, stream, 0, (size_t)n, x);
  for (int64_t i = 0; i < n; i++) x[i] = (float)(scale * x[i]);
  return x;
}

/* Orthonormal columns that span those of w [rows, k]: Gram-Schmidt, twice. */
static double *basis_of(const double *w, int64_t rows, int64_t k) {
  double *q = reference_alloc(rows * k);
  memcpy(q, w, (size_t)(rows * k) * sizeof *q);
  for (int64_t j = 0; j < k; j++) {
    for (int again = 0; again < 2; again++)
      for (int64_t l = 0; l < j; l++) {
        double along = 0;
        for (int64_t i = 0; i < rows; i++) along += q[i * k + j] * q[i * k + l];
        for (int64_t i = 0; i < rows; i++) q[i * k + j] -= along * q[i * k + l];
      }
    double squares = 0;
    for (int64_t i = 0; i < rows; i++) squares += q[i * k + j] * q[i * k + j];
    for (int64_t i = 0; i < rows; i++) q[i * k + j] /= sqrt(squares);
  }
  return q;
}

/* One position from its logits z [rows], which become p - e_c. */
static pg_kept by_hand(double *z, const double *q, int64_t rows, int64_t k, int64_t target) {
  double top = -INFINITY, total = 0, squares = 0, kept = 0;
  for (int64_t v = 0; v < rows; v++) top = fmax(top, z[v]);
  for (int64_t v = 0; v < rows; v++) total += exp(z[v] - top);
  const double loss = top + log(total) - z[target];
  for (int64_t v = 0; v < rows; v++) {
    z[v] = exp(z[v] - top) / total - (v == target);
    squares += z[v] * z[v];
  }
  for (int64_t j = 0; j < k; j++) {
    double along = 0;
    for (int64_t v = 0; v < rows; v++) along += q[v * k + j] * z[v];
    kept += along * along;
  }
  return (pg_kept){sqrt(kept / squares), sqrt(squares), loss, target};
}

TEST(a_head_of_one_column_by_hand) {
  pg_context *ctx = open_context(1);
  const float u[] = {1, 0, 0}, h[] = {0};
  pg_tensor *head = make_matrix(ctx, u, 3, 1), *hidden = make_matrix(ctx, h, 1, 1);
  pg_bottleneck b;
  pg_kept kept;
  /* p = 1/3 each: g = (-2, 1, 1)/3, of which (-2, 0, 0)/3 gets through */
  MUST(ctx, pg_bottleneck_states(head, hidden, (int32_t[]){0}, 1, &b, &kept));
  CHECK_CLOSE(kept.kept, 2 / sqrt(6), 8 * UNIT_ROUNDOFF);
  CHECK_CLOSE(kept.norm, sqrt(6) / 3, 8 * UNIT_ROUNDOFF);
  CHECK_CLOSE(kept.loss, log(3), 8 * UNIT_ROUNDOFF);
  CHECK_CLOSE(b.baseline, sqrt(1 / 3.), 1e-15);
  CHECK(b.rank == 1 && b.classes == 3 && b.condition == 1, "condition %g", b.condition);
  MUST(ctx, pg_bottleneck_states(head, hidden, (int32_t[]){1}, -2, &b, &kept));
  CHECK_CLOSE(kept.kept, 1 / sqrt(6), 8 * UNIT_ROUNDOFF);
  CHECK_CLOSE(kept.norm, sqrt(6) / 3, 8 * UNIT_ROUNDOFF);
  pg_tensor_free(head);
  pg_tensor_free(hidden);
  pg_context_free(ctx);
}

TEST(hidden_states_of_any_origin_against_an_explicit_basis) {
  static const int64_t counts[] = {1, 37};
  enum { V = 97, D = 18 };
  pg_context *ctx = open_context(2);
  for (size_t s = 0; s < PG_COUNT(counts); s++) {
    const int64_t n = counts[s];
    const double scale = s ? 0.5 : 1;
    float *u = normals(V * D, 1, 0.4), *h = normals(n * D, 2, 1), *again;
    int32_t *targets = make_ids(n, V, 3);
    pg_tensor *head = make_matrix(ctx, u, V, D), *hidden = make_matrix(ctx, h, n, D);
    pg_bottleneck b;
    pg_kept *kept = calloc((size_t)n, sizeof *kept);
    double *wide = reference_alloc(V * D), *z = reference_alloc(V), squares = 0;
    const int64_t tensors = pg_context_live_tensors(ctx), bytes = pg_context_bytes(ctx);
    for (int64_t i = 0; i < V * D; i++) wide[i] = u[i];
    double *q = basis_of(wide, V, D);
    MUST(ctx, pg_bottleneck_states(head, hidden, targets, scale, &b, kept));
    for (int64_t i = 0; i < n; i++) {
      for (int64_t v = 0; v < V; v++) {
        z[v] = 0;
        for (int64_t j = 0; j < D; j++) z[v] += scale * wide[v * D + j] * h[i * D + j];
        CHECK(fabs(z[v]) <= 8, "the bar supposes logits up to 8: %g", z[v]);
      }
      const pg_kept want = by_hand(z, q, V, D, targets[i]);
      CHECK_CLOSE(kept[i].kept, want.kept, bar_of(D));
      CHECK_CLOSE(kept[i].norm, want.norm, bar_of(D));
      CHECK_CLOSE(kept[i].loss, want.loss, bar_of(D));
      CHECK(kept[i].target == targets[i], "target");
      squares += kept[i].kept * kept[i].kept;
    }
    CHECK_CLOSE(b.baseline, sqrt(18 / 97.), 1e-15);
    CHECK(b.condition >= 1 && b.condition < 2.7 * sqrt(18), "condition %g", b.condition);
    printf("  kept %.3f in the rms, a random subspace %.3f\n", sqrt(squares / (double)n),
           b.baseline);
    again = read_floats(head);
    CHECK(memcmp(u, again, V * D * sizeof *u) == 0, "the head changed");
    free(again);
    CHECK(pg_context_live_tensors(ctx) == tensors && pg_context_bytes(ctx) == bytes, "left over");
    /* and of the whole gradient G = sum g h^T */
    float *g = calloc(V * D, sizeof *g);
    double *total = reference_alloc(V * D), all = 0, through = 0, got;
    for (int64_t i = 0; i < n; i++) {
      for (int64_t v = 0; v < V; v++) {
        z[v] = 0;
        for (int64_t j = 0; j < D; j++) z[v] += scale * wide[v * D + j] * h[i * D + j];
      }
      by_hand(z, q, V, D, targets[i]);
      for (int64_t v = 0; v < V; v++)
        for (int64_t j = 0; j < D; j++) total[v * D + j] += z[v] * h[i * D + j];
    }
    for (int64_t i = 0; i < V * D; i++) g[i] = (float)total[i];
    for (int64_t i = 0; i < V * D; i++) all += (double)g[i] * g[i];
    for (int64_t k = 0; k < D; k++)
      for (int64_t j = 0; j < D; j++) {
        double along = 0;
        for (int64_t v = 0; v < V; v++) along += q[v * D + k] * g[v * D + j];
        through += along * along;
      }
    pg_tensor *gradient = make_matrix(ctx, g, V, D);
    MUST(ctx, pg_bottleneck_gradient(head, gradient, &got));
    CHECK_CLOSE(got, sqrt(through / all), bar_of(D));
    MUST(ctx, pg_bottleneck_gradient(head, head, &got));
    CHECK_CLOSE(got, 1, bar_of(D));
    pg_tensor_free(gradient);
    free(g);
    free(total);
    pg_tensor_free(head);
    pg_tensor_free(hidden);
    free(u);
    free(h);
    free(targets);
    free(kept);
    free(wide);
    free(z);
    free(q);
  }
  CHECK(pg_context_live_tensors(ctx) == 0 && pg_context_bytes(ctx) == 0, "left over");
  pg_context_free(ctx);
}

/* ---- over a panel ------------------------------------------------------------------------------
 */
enum { V = 97, D = 18, TIME = 9, N = 40 };

/* The subspace of a model: columns that span what gets through, [classes, rank]. */
static double *span_of(const pg_model *model, int64_t classes, int64_t rank) {
  pg_tensor *u;
  MUST(pg_model_context(model), pg_model_head_matrix(model, &u));
  float *head = read_floats(u), *q = model->basis ? read_floats(model->basis) : NULL;
  double *span = reference_alloc(classes * rank);
  const pg_parameter *outer = pg_model_head(model);
  float *a = read_floats(outer->value);
  const bool narrowed = q && outer->columns > rank;
  for (int64_t v = 0; v < classes; v++)
    for (int64_t j = 0; j < rank; j++) {
      if (!narrowed) span[v * rank + j] = a[v * rank + j];
      for (int64_t l = 0; narrowed && l < D; l++)
        span[v * rank + j] += (double)head[v * D + l] * q[j * D + l];
    }
  free(head);
  free(q);
  free(a);
  pg_tensor_free(u);
  return span;
}

TEST(over_a_panel_of_every_kind_of_head) {
  static const struct {
    pg_head_config head;
    int64_t rank;
  } kinds[] = {{{0}, D},
               {{.extra = 6}, D},
               {{.rank = 5}, 5},
               {{.backward_rank = 4}, 4},
               {{.rank = 5, .backward_rank = 3}, 3},
               {{.rank = 5, .backward_rank = 7}, 5}};
  char folder[64];
  data_folder(folder);
  pg_context *ctx = open_context(2);
  data_count_shard(ctx, data_path(folder, "x_val_000000.bin"), 3, 300, V);
  for (size_t i = 0; i < PG_COUNT(kinds); i++)
    for (int narrow = 0; narrow < 2; narrow++) {
      pg_model_config c = make_config(&(shape){1, D, 3, 6, 20, V, 2, TIME});
      pg_activations *a;
      pg_panel *panel;
      pg_bottleneck b;
      pg_kept kept[N];
      float losses[N];
      int64_t at = 0;
      c.head = kinds[i].head;
      pg_model *model = make_model(ctx, &c, 4);
      if (narrow) MUST(ctx, pg_model_set_compute(model, PG_BF16));
      MUST(ctx, pg_activations_new(ctx, &c, pg_model_compute(model), 2, TIME, PG_KEEP_NOTHING, &a));
      MUST(ctx, pg_panel_new(ctx, folder, "*_val_*.bin", TIME, V, &(pg_panel_options){.tokens = N},
                             &panel));
      MUST(ctx, pg_bottleneck_panel(model, a, panel, NULL, &b, kept));
      MUST(ctx, pg_panel_losses(model, a, panel, losses));
      const int64_t classes = pg_model_classes(&c), rank = kinds[i].rank;
      CHECK(b.rank == rank && b.classes == classes, "kind %zu: rank %lld of %lld", i,
            (long long)b.rank, (long long)b.classes);
      double *span = span_of(model, classes, rank), *q = basis_of(span, classes, rank);
      double *z = reference_alloc(classes);
      pg_tensor *u;
      MUST(ctx, pg_model_head_matrix(model, &u));
      float *head = read_floats(u);
      for (size_t s = 0; s < panel->count; s++) {
        const int64_t length = panel->pieces[s].length;
        const void *hidden;
        MUST(ctx,
             pg_model_forward(model, a, panel->ids + panel->pieces[s].first, 1, length, &hidden));
        float *h = malloc((size_t)(length * D) * sizeof *h);
        uint16_t *half = malloc((size_t)(length * D) * sizeof *half);
        int status = 0;
        PG_LAUNCH(ctx, download, narrow ? (void *)half : (void *)h, hidden,
                  (size_t)(length * D) * (narrow ? 2 : 4));
      fail:
        CHECK(status == 0, "download");
        for (int64_t j = 0; narrow && j < length * D; j++) {
          const uint32_t bits = (uint32_t)half[j] << 16;
          memcpy(&h[j], &bits, sizeof bits);
        }
        for (int64_t t = 0; t < length; t++, at++) {
          for (int64_t v = 0; v < classes; v++) {
            z[v] = 0;
            for (int64_t j = 0; j < D; j++) z[v] += (double)head[v * D + j] * h[t * D + j];
          }
          const pg_kept want = by_hand(z, q, classes, rank, panel->targets[at]);
          CHECK_CLOSE(kept[at].kept, want.kept, bar_of(D));
          CHECK_CLOSE(kept[at].norm, want.norm, bar_of(D));
          CHECK_CLOSE(kept[at].loss, losses[at], narrow ? 0.05 : bar_of(D));
        }
        free(h);
        free(half);
      }
      CHECK(at == N, "positions");
      free(head);
      free(span);
      free(q);
      free(z);
      pg_tensor_free(u);
      pg_panel_free(panel);
      pg_activations_free(a);
      pg_model_free(model);
    }
  CHECK(pg_context_live_tensors(ctx) == 0 && pg_context_bytes(ctx) == 0, "left over");
  pg_context_free(ctx);
  data_folder_remove(folder);
}

TEST(what_cannot_be_measured_is_refused) {
  pg_context *ctx = open_context(1);
  float u[] = {1, 0, 0, 1, 1, 1}, h[] = {1, 2};
  int32_t target = 2;
  pg_bottleneck b;
  pg_kept kept;
  double share;
  pg_tensor *head = make_matrix(ctx, u, 3, 2), *hidden = make_matrix(ctx, h, 1, 2);
  MUST(ctx, pg_bottleneck_states(head, hidden, &target, 1, &b, &kept));
  target = 3;
  CHECK(pg_bottleneck_states(head, hidden, &target, 1, &b, &kept) == PG_EDATA, "target");
  target = 0;
  pg_tensor *square = make_matrix(ctx, u, 2, 2), *other = make_matrix(ctx, u, 2, 3);
  CHECK(pg_bottleneck_states(square, hidden, &target, 1, &b, &kept) == PG_EINVAL &&
            strstr(pg_context_message(ctx), "no bottleneck"),
        "%s", pg_context_message(ctx));
  CHECK(pg_bottleneck_states(head, other, &target, 1, &b, &kept) == PG_EINVAL, "widths");
  CHECK(pg_bottleneck_gradient(head, square, &share) == PG_EINVAL, "rows");
  float dependent[] = {1, 2, 2, 4, 3, 6};
  MUST(ctx, pg_tensor_write(head, dependent));
  CHECK(pg_bottleneck_states(head, hidden, &target, 1, &b, &kept) == PG_EINVAL &&
            strstr(pg_context_message(ctx), "linearly dependent"),
        "%s", pg_context_message(ctx));
  u[3] = NAN;
  MUST(ctx, pg_tensor_write(head, u));
  CHECK(pg_bottleneck_states(head, hidden, &target, 1, &b, &kept) == PG_ENONFINITE &&
            strstr(pg_context_message(ctx), "row 1, column 1"),
        "%s", pg_context_message(ctx));
  pg_tensor_free(head);
  pg_tensor_free(hidden);
  pg_tensor_free(square);
  pg_tensor_free(other);
  CHECK(pg_context_live_tensors(ctx) == 0 && pg_context_bytes(ctx) == 0, "left over");
  pg_context_free(ctx);
}

int main(void) {
  RUN(a_head_of_one_column_by_hand);
  RUN(hidden_states_of_any_origin_against_an_explicit_basis);
  RUN(over_a_panel_of_every_kind_of_head);
  RUN(what_cannot_be_measured_is_refused);
  return unit_report();
}
