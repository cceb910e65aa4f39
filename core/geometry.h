/* Diagnostics of the head (SPEC §4). All are pure: they change no weight, slot, random state or
 * data position. Non-finite input is PG_ENONFINITE with the place. */
#ifndef PG_GEOMETRY_H
#define PG_GEOMETRY_H

#include "comm.h"
#include "data.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Exact row diameter D(S) = max_{i<j} ||s_i - s_j||_2 and the pair that attains it. */
typedef struct pg_diameter {
  double value;          /* evaluated in fp64 on the rows themselves */
  int64_t first, second; /* 0-based rows, first < second; -1, -1 when the value is 0 */
  double lower, upper;   /* R <= D <= 2 R, R = max_i ||s_i - mean row||, rounded outwards: O(V d) */
  double multiply_adds;  /* work done */
  double seconds;
} pg_diameter;
/* matrix: fp32, 2-D, contiguous columns. */
int pg_geometry_diameter(const pg_tensor *matrix, pg_diameter *out);

/* A panel: a fixed set of validation positions, as one hashed object. Rank r of `ranks` contributes
 * its first tokens/ranks (+1 for the first tokens % ranks ranks) positions of its own slices of the
 * sequential validation stream in groups of micro * ranks sequences, so that a published panel can
 * be had on any machine. */
typedef struct pg_panel pg_panel;
typedef struct pg_panel_options {
  int64_t tokens;
  int64_t ranks; /* 0: 1 */
  int64_t micro; /* 0: 1. With one rank it does not matter */
  /* Of the k sequences that a rank's tokens take, the j-th is number floor(j n / k) of the n that
   * it reads, instead of the j-th: all of the stream has a share, not its beginning alone. */
  bool spread;
} pg_panel_options;
/* Reads the validation shards `pattern` in `folder`; more tokens than they hold is PG_EDATA with
 * both numbers. vocab checks ids as the loader does. */
int pg_panel_new(pg_context *ctx, const char *folder, const char *pattern, int64_t time,
                 int64_t vocab, const pg_panel_options *options, pg_panel **out);
void pg_panel_free(pg_panel *panel);
int64_t pg_panel_tokens(const pg_panel *panel);
/* 16 hex digits over the options and all token ids. */
const char *pg_panel_hash(const pg_panel *panel);
/* The number of its sequences, and of the positions of each; sequence < count. */
size_t pg_panel_sequences(const pg_panel *panel);
int64_t pg_panel_length(const pg_panel *panel, size_t sequence);
/* What a model sees at `position` (0 <= position < tokens): the last min(n, count so far) ids of
 * its sequence up to there, in the panel's memory. Returns how many; *target is the token after. */
int64_t pg_panel_context(const pg_panel *panel, int64_t position, int64_t n, const int32_t **ids,
                         int32_t *target);

/* Hilbert range of every panel position under `model`'s present weights (after the update) and
 * head increment `matrix` [V, d]: delta = logit_scale * (max_i (S h)_i - min_i (S h)_i).
 * *rms = sqrt(mean delta^2), squares summed in fp64. `ranges` (host, [tokens], may be NULL). */
int pg_hilbert(const pg_model *model, pg_activations *a, const pg_panel *panel,
               const pg_tensor *matrix, double *rms, float *ranges);
/* The same, the panel's sequences shared out over the ranks of `comm`; equal results on all. */
int pg_hilbert_shared(const pg_model *model, pg_activations *a, const pg_panel *panel,
                      const pg_tensor *matrix, pg_comm *comm, double *rms, float *ranges);

/* Cross entropy of the token after each panel position (host, [tokens]). */
int pg_panel_losses(const pg_model *model, pg_activations *a, const pg_panel *panel, float *losses);
/* Hilbert's distance between the distributions of two models at every panel position, the range of
 * z_to - z_from: |change of a position's cross entropy| is at most that. The models share the
 * context and the vocabulary and may differ in all else; `a` serves `from`, `b` serves `to`. */
int pg_hilbert_between(const pg_model *from, pg_activations *a, const pg_model *to,
                       pg_activations *b, const pg_panel *panel, double *rms, float *ranges);

/* Mean over `batches` groups of the loader's micro-batch means (SPEC §2), from its start. The
 * loader is sequential with micro sequences per call; it is rewound first. Polls cancellation. */
int pg_validate(const pg_model *model, pg_activations *a, pg_loader *loader, int64_t batches,
                double *loss);
/* The same over the ranks of `comm`, each with a loader of its rank: the mean over all of them. */
int pg_validate_shared(const pg_model *model, pg_activations *a, pg_loader *loader, int64_t batches,
                       pg_comm *comm, double *loss);

#ifdef __cplusplus
}
#endif
#endif
