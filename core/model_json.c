/* config.json of a model, as transformers has it for Qwen3ForCausalLM: written with Perigee's
 * additions under "perigee", and read from anybody's folder. What would make another function of
 * the weights than SPEC section 1 is refused by name. */
#include "checkpoint_internal.h"

#include <stdlib.h>
#include <string.h>

#define CONFIG_LIMIT ((int64_t)16 << 20)
#define SHOWN 80 /* bytes of a value that messages repeat */

/* ---- writing --------------------------------------------------------------------------- */
/* What tests of cause change about the head; NULL when they change nothing. */
static json_t *head_json(const pg_head_config *h) {
  if (!h->rank && !h->extra && !h->backward_rank && !h->drop_residual) return NULL;
  return json_pack("{s:I, s:I, s:I, s:I, s:b}", "rank", (json_int_t)h->rank, "extra",
                   (json_int_t)h->extra, "backward_rank", (json_int_t)h->backward_rank,
                   "backward_seed", (json_int_t)h->backward_seed, "residual", !h->drop_residual);
}

json_t *pg__model_config_json(const pg_model_config *c) {
  return json_pack(
      "{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:{s:s, s:f}, s:s, s:b, s:b,"
      " s:f, s:b, s:f, s:s, s:s, s:{s:s, s:f, s:[f,f,f], s:o*}}",
      "architectures", "Qwen3ForCausalLM", "model_type", "qwen3",                              //
      "vocab_size", (json_int_t)c->vocab, "hidden_size", (json_int_t)c->width,                 //
      "num_hidden_layers", (json_int_t)c->layers, "num_attention_heads", (json_int_t)c->heads, //
      "num_key_value_heads", (json_int_t)c->heads, "head_dim", (json_int_t)c->head_dim,        //
      "intermediate_size", (json_int_t)c->mlp,                                                 //
      "max_position_embeddings", (json_int_t)c->context,                                       //
      "rms_norm_eps", c->norm_eps, "rope_theta", c->rope_base,                                 //
      "rope_parameters", "rope_type", "default", "rope_theta", c->rope_base,                   //
      "hidden_act", "silu", "attention_bias", 0, "tie_word_embeddings", 0,                     //
      "attention_dropout", 0.0, "use_sliding_window", 0,                                       //
      "initializer_range", c->init_std[PG_BACKBONE],                                           //
      "torch_dtype", "float32", "dtype", "float32",                                            //
      "perigee", "version", PG_VERSION, "logit_scale", c->logit_scale,                         //
      "init_std", c->init_std[0], c->init_std[1], c->init_std[2], "head", head_json(&c->head));
}

/* ---- reading --------------------------------------------------------------------------- */
typedef struct reading {
  pg_context *context;
  const char *file;
} reading;

static int refuse(const reading *r, const char *key, const json_t *value, const char *allowed) {
  char *text = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
  int status = pg_fail(r->context, PG_EUNSUPPORTED, "%s: %s = %.*s is not supported; allowed: %s",
                       r->file, key, SHOWN, text ? text : "(none)", allowed);
  free(text);
  return status;
}

static int bad(const reading *r, const char *key, const char *expected) {
  return pg_fail(r->context, PG_EFORMAT, "%s: \"%s\" must be %s", r->file, key, expected);
}

static int need_count(const reading *r, const json_t *object, const char *key, int64_t *out) {
  return pg__json_count(r->context, r->file, object, key, out);
}

static int need_real(const reading *r, const json_t *object, const char *key, double *out) {
  const json_t *value = json_object_get(object, key);
  if (!json_is_number(value)) return bad(r, key, "a number");
  *out = json_number_value(value);
  return 0;
}

static bool absent(const json_t *value) {
  return !value || json_is_null(value);
}

static bool is_text(const json_t *value, const char *text) {
  return json_is_string(value) && strcmp(json_string_value(value), text) == 0;
}

/* What Qwen3ForCausalLM can be told and this model cannot do. */
static int check_function(const reading *r, const json_t *root) {
  static const char *const off[] = {"tie_word_embeddings", "attention_bias", "use_sliding_window"};
  int status = 0;
  const json_t *value = json_object_get(root, "model_type");
  if (!is_text(value, "qwen3")) PG_TRY(refuse(r, "model_type", value, "\"qwen3\""));
  value = json_object_get(root, "architectures");
  if (!absent(value) &&
      (json_array_size(value) != 1 || !is_text(json_array_get(value, 0), "Qwen3ForCausalLM")))
    PG_TRY(refuse(r, "architectures", value, "[\"Qwen3ForCausalLM\"]"));
  for (size_t i = 0; i < PG_COUNT(off); i++) {
    value = json_object_get(root, off[i]);
    if (!absent(value) && !json_is_false(value)) PG_TRY(refuse(r, off[i], value, "false"));
  }
  value = json_object_get(root, "quantization_config");
  if (!absent(value)) PG_TRY(refuse(r, "quantization_config", value, "null"));
  value = json_object_get(root, "hidden_act");
  if (!absent(value) && !is_text(value, "silu")) PG_TRY(refuse(r, "hidden_act", value, "\"silu\""));
  value = json_object_get(root, "attention_dropout");
  if (!absent(value) && !(json_is_number(value) && json_number_value(value) == 0))
    PG_TRY(refuse(r, "attention_dropout", value, "0"));
  value = json_object_get(root, "layer_types");
  for (size_t i = 0; i < json_array_size(value); i++)
    if (!is_text(json_array_get(value, i), "full_attention"))
      PG_TRY(refuse(r, "layer_types", json_array_get(value, i), "\"full_attention\""));
fail:
  return status;
}

/* Rotations: the base at top level (transformers 4) or in rope_parameters (5), and no scaling. */
static int read_rope(const reading *r, const json_t *root, double *base) {
  static const char *const places[] = {"rope_scaling", "rope_parameters"};
  int status = 0;
  bool found = !absent(json_object_get(root, "rope_theta"));
  if (found) PG_TRY(need_real(r, root, "rope_theta", base));
  for (size_t i = 0; i < PG_COUNT(places); i++) {
    const json_t *rope = json_object_get(root, places[i]);
    if (absent(rope)) continue;
    if (!json_is_object(rope)) PG_TRY(bad(r, places[i], "an object or null"));
    const json_t *type = json_object_get(rope, "rope_type");
    if (absent(type)) type = json_object_get(rope, "type");
    if (!absent(type) && !is_text(type, "default"))
      PG_TRY(refuse(r, "rope_type", type, "\"default\""));
    const json_t *share = json_object_get(rope, "partial_rotary_factor");
    if (!absent(share) && !(json_is_number(share) && json_number_value(share) == 1))
      PG_TRY(refuse(r, "partial_rotary_factor", share, "1"));
    if (absent(json_object_get(rope, "rope_theta"))) continue;
    double other = 0;
    PG_TRY(need_real(r, rope, "rope_theta", &other));
    if (found && other != *base)
      PG_TRY(pg_fail(r->context, PG_EFORMAT,
                     "%s: \"rope_theta\" is %.9g and, in \"%s\", %.9g: expected the same", r->file,
                     *base, places[i], other));
    *base = other;
    found = true;
  }
fail:
  return status;
}

static int read_own(const reading *r, const json_t *own, pg_model_config *c) {
  int status;
  PG_TRY(need_real(r, own, "logit_scale", &c->logit_scale));
  const json_t *deviations = json_object_get(own, "init_std");
  for (size_t i = 0; i < PG_ROLES && json_array_size(deviations) == PG_ROLES; i++)
    c->init_std[i] = json_number_value(json_array_get(deviations, i));
  const json_t *head = json_object_get(own, "head");
  if (!head) return 0;
  PG_TRY(need_count(r, head, "rank", &c->head.rank));
  PG_TRY(need_count(r, head, "extra", &c->head.extra));
  PG_TRY(need_count(r, head, "backward_rank", &c->head.backward_rank));
  PG_TRY(need_count(r, head, "backward_seed", &c->head.backward_seed));
  c->head.drop_residual = json_is_false(json_object_get(head, "residual"));
fail:
  return status;
}

/* Sizes; what transformers has a default for may be missing. */
static int read_sizes(const reading *r, const json_t *root, pg_model_config *c) {
  const struct {
    const char *key;
    int64_t *to;
  } sizes[] = {{"vocab_size", &c->vocab},         {"hidden_size", &c->width},
               {"num_hidden_layers", &c->layers}, {"num_attention_heads", &c->heads},
               {"intermediate_size", &c->mlp},    {"max_position_embeddings", &c->context}};
  static const char *const positive[] = {"intermediate_size", "head_dim"};
  int64_t groups;
  int status;
  for (size_t i = 0; i < PG_COUNT(sizes); i++)
    PG_TRY(need_count(r, root, sizes[i].key, sizes[i].to));
  groups = c->heads;
  c->head_dim = 128;
  if (json_object_get(root, "head_dim")) PG_TRY(need_count(r, root, "head_dim", &c->head_dim));
  if (!absent(json_object_get(root, "num_key_value_heads")))
    PG_TRY(need_count(r, root, "num_key_value_heads", &groups));
  if (groups != c->heads)
    PG_TRY(pg_fail(r->context, PG_EUNSUPPORTED,
                   "%s: num_key_value_heads = %lld is not supported; allowed: %lld, as "
                   "num_attention_heads",
                   r->file, (long long)groups, (long long)c->heads));
  for (size_t i = 0; i < PG_COUNT(positive); i++) { /* 0 would mean our default */
    const json_t *value = json_object_get(root, positive[i]);
    if (value && json_integer_value(value) < 1) PG_TRY(bad(r, positive[i], "at least 1"));
  }
  if (json_object_get(root, "rms_norm_eps"))
    PG_TRY(need_real(r, root, "rms_norm_eps", &c->norm_eps));
fail:
  return status;
}

int pg_checkpoint_config(pg_context *ctx, const char *path, pg_model_config *c) {
  char file[PG__PATH_MAX], message[sizeof ctx->message];
  json_t *root = NULL;
  int status;
  const reading r = {ctx, file};
  pg_model_config_default(c);
  PG_TRY(pg__join(ctx, path, "config.json", file));
  PG_TRY(pg__json_load(ctx, file, CONFIG_LIMIT, &root));
  if (!json_is_object(root)) PG_TRY(pg_fail(ctx, PG_EFORMAT, "%s is not a JSON object", file));
  PG_TRY(check_function(&r, root));
  PG_TRY(read_sizes(&r, root, c));
  PG_TRY(read_rope(&r, root, &c->rope_base));
  const json_t *own = json_object_get(root, "perigee");
  if (own) PG_TRY(read_own(&r, own, c));
  status = pg_model_config_resolve(ctx, c);
  if (status < 0) {
    memcpy(message, ctx->message, sizeof message);
    status = pg_fail(ctx, PG_EUNSUPPORTED, "%s: %s", file, message);
  }
fail:
  json_decref(root);
  return status;
}
