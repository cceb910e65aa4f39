/* Sizes of a model: defaults, the paper's presets, checks. */
#include "model_internal.h"
#include <ctype.h>
#include <math.h>
#include <string.h>

const char *pg_role_name(pg_role role) {
  static const char *const names[PG_ROLES] = {"embedding", "backbone", "head"};
  return (unsigned)role < PG_ROLES ? names[role] : "unknown";
}

void pg_model_config_default(pg_model_config *config) {
  *config = (pg_model_config){
      .norm_eps = 1e-6, .rope_base = 1e4, .logit_scale = 1, .init_std = {0.02, 0.02, 0.02}};
}

int pg_model_config_preset(pg_context *ctx, const char *name, pg_model_config *config) {
  static const struct {
    const char *name;
    int64_t width, heads;
  } presets[] = {{"190m", 512, 8}, {"380m", 768, 12}, {"640m", 1024, 16}};
  char plain[16];
  size_t length = 0;
  for (const char *c = name; *c && length < sizeof plain - 1; c++)
    if (!strchr("-_.", *c)) plain[length++] = (char)tolower((unsigned char)*c);
  plain[length] = 0;
  for (size_t i = 0; i < PG_COUNT(presets); i++) {
    if (strcmp(plain, presets[i].name)) continue;
    pg_model_config_default(config);
    config->layers = 32;
    config->width = presets[i].width;
    config->heads = presets[i].heads;
    config->head_dim = 64;
    config->mlp = 4 * presets[i].width;
    config->vocab = 50257;
    config->context = 2048;
    return 0;
  }
  return pg_fail(ctx, PG_ENOENT, "no model preset is called \"%.40s\"; there are 190m, 380m, 640m",
                 name);
}

/* With these bounds a model has below 2^59 weights, so that 16 bytes for each (value, gradient, two
 * slots) are still counted in 64 bits. What fits the machine is for the allocation to say. */
#define MAX_LAYERS 4096
#define MAX_SIZE 1048576
#define MAX_MLP 16777216
#define MAX_IDS 2147483647

static int check_size(pg_context *ctx, const char *field, int64_t value, int64_t least,
                      int64_t most) {
  if (value >= least && value <= most) return 0;
  return pg_fail(ctx, PG_EINVAL, "model.%s is %lld; allowed: %lld to %lld", field, (long long)value,
                 (long long)least, (long long)most);
}

int64_t pg_model_classes(const pg_model_config *c) {
  return c->vocab + c->head.extra;
}

static int check_head(pg_context *ctx, const pg_model_config *c) {
  const pg_head_config *h = &c->head;
  int status;
  PG_TRY(check_size(ctx, "head.rank", h->rank, 0, c->width));
  PG_TRY(check_size(ctx, "head.extra", h->extra, 0, MAX_IDS - c->vocab));
  PG_TRY(check_size(ctx, "head.backward_rank", h->backward_rank, 0, c->width));
  PG_TRY(check_size(ctx, "head.backward_seed", h->backward_seed, 0, INT64_MAX));
  if (h->backward_seed && !h->backward_rank)
    return pg_fail(ctx, PG_EINVAL,
                   "model.head.backward_seed is %lld without model.head.backward_rank, whose "
                   "subspace it draws",
                   (long long)h->backward_seed);
  const int64_t columns = h->rank ? h->rank : c->width;
  if (h->drop_residual && columns >= pg_model_classes(c))
    return pg_fail(ctx, PG_EINVAL,
                   "model.head.residual cannot be off: the %lld columns of a head of %lld rows "
                   "leave no residual",
                   (long long)columns, (long long)pg_model_classes(c));
fail:
  return status;
}

int pg_model_config_resolve(pg_context *ctx, pg_model_config *config) {
  pg_model_config c = *config;
  int status;
  PG_TRY(check_size(ctx, "layers", c.layers, 0, MAX_LAYERS));
  PG_TRY(check_size(ctx, "width", c.width, 1, MAX_SIZE));
  PG_TRY(check_size(ctx, "heads", c.heads, 1, MAX_SIZE));
  if (c.head_dim == 0) c.head_dim = 64;
  PG_TRY(check_size(ctx, "head_dim", c.head_dim, 2, MAX_SIZE));
  if (c.head_dim % 2)
    return pg_fail(ctx, PG_EINVAL,
                   "model.head_dim is %lld; it must be even, since RoPE rotates pairs",
                   (long long)c.head_dim);
  if (c.heads * c.head_dim > MAX_MLP)
    return pg_fail(ctx, PG_EINVAL, "model.heads x model.head_dim is %lld x %lld; allowed: up to %d",
                   (long long)c.heads, (long long)c.head_dim, MAX_MLP);
  if (c.mlp == 0) c.mlp = 4 * c.width;
  PG_TRY(check_size(ctx, "mlp", c.mlp, 1, MAX_MLP));
  PG_TRY(check_size(ctx, "vocab", c.vocab, 2, MAX_IDS));
  PG_TRY(check_size(ctx, "context", c.context, 1, MAX_SIZE));
  if (!(c.norm_eps > 0 && c.norm_eps <= 1))
    return pg_fail(ctx, PG_EINVAL, "model.norm_eps is %g; allowed: above 0, up to 1", c.norm_eps);
  if (!(c.rope_base > 0 && isfinite(c.rope_base)))
    return pg_fail(ctx, PG_EINVAL, "model.rope_base is %g; allowed: above 0, finite", c.rope_base);
  if (!(c.logit_scale > 0 && c.logit_scale <= 1e30))
    return pg_fail(ctx, PG_EINVAL, "model.logit_scale is %g; allowed: above 0, up to 1e30",
                   c.logit_scale);
  for (int role = 0; role < PG_ROLES; role++)
    if (!(c.init_std[role] >= 0 && c.init_std[role] <= 1e6))
      return pg_fail(ctx, PG_EINVAL, "model.init_std of the %s is %g; allowed: 0 to 1e6",
                     pg_role_name((pg_role)role), c.init_std[role]);
  PG_TRY(check_head(ctx, &c));
  *config = c;
  return 0;
fail:
  return status;
}

int64_t pg_model_config_weights(const pg_model_config *c) {
  /* In 128 bits: below 2^127 for any five positive sizes within the bounds above. */
  __int128 attention = (__int128)4 * c->width * (c->heads * c->head_dim);
  __int128 block = attention + (__int128)3 * c->width * c->mlp;
  const int64_t classes = pg_model_classes(c), rank = c->head.rank;
  __int128 head = rank ? (__int128)(classes + c->width) * rank : (__int128)classes * c->width;
  __int128 all = block * c->layers + (__int128)c->vocab * c->width + head;
  return all > INT64_MAX ? INT64_MAX : (int64_t)all;
}

bool pg__model_config_matches(const pg_model_config *a, const pg_model_config *b) {
  return a->layers == b->layers && a->width == b->width && a->heads == b->heads &&
         a->head_dim == b->head_dim && a->mlp == b->mlp && a->vocab == b->vocab &&
         a->context == b->context && a->norm_eps == b->norm_eps && a->rope_base == b->rope_base &&
         a->head.rank == b->head.rank && a->head.extra == b->head.extra &&
         a->head.backward_rank == b->head.backward_rank &&
         a->head.backward_seed == b->head.backward_seed &&
         a->head.drop_residual == b->head.drop_residual;
}
