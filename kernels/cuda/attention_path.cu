/* Which attention a call takes: cuDNN's or the kernel of attention.cu.
 *
 * cuDNN is taken where its plugin loads and has an algorithm for the shape. That depends on nothing
 * but the machine and the shape, so that equal calls give equal bits. PG_ATTENTION=plain or cudnn
 * in the environment overrules; cuDNN asked for by name and impossible is an error.
 *
 * A call whose workspace would exceed MOST_WORKSPACE runs in parts, whole sequences or heads of one
 * sequence: on sm_90 the deterministic backward stores time x time values of every head at hand. */
#include "attention_path.cuh"

#include <dlfcn.h>
#include <limits.h>
#include <new>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static constexpr size_t MOST_WORKSPACE = (size_t)256 << 20;
static constexpr int64_t TILE = 128; /* positions of cuDNN's largest tiles */

enum wish { ANY, PLAIN, CUDNN };

struct pg_cuda_attention {
  enum wish wish;
  const pg_cudnn_api *api;
  pg_cudnn *cudnn; /* NULL: why */
  bool tried;
  char version[64], why[256];
};

void pg__cuda_attention_free(pg_queue *q) {
  if (!q->attention) return;
  if (q->attention->api) q->attention->api->close(q->attention->cudnn);
  free(q->attention);
  q->attention = NULL;
}

/* ---- loading ------------------------------------------------------------------------------- */
/* The plugin beside the file that holds this code. */
static const pg_cudnn_api *load_plugin(char *why, size_t size) {
  const pg_cudnn_api *(*symbol)(void) = NULL;
  char folder[PATH_MAX], path[PATH_MAX + sizeof PG_CUDNN_PLUGIN];
  Dl_info self;
  snprintf(why, size, "this build has no cuDNN plugin (" PG_CUDNN_PLUGIN ")");
  if (!dladdr((const void *)pg_cuda_kernels, &self) || !self.dli_fname ||
      !realpath(self.dli_fname, folder))
    return NULL;
  *strrchr(folder, '/') = 0;
  snprintf(path, sizeof path, "%s/" PG_CUDNN_PLUGIN, folder);
  FILE *file = fopen(path, "re");
  if (!file) return NULL;
  fclose(file);
  /* Never closed, as CUDA's other libraries. */
  void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle) *(void **)&symbol = dlsym(handle, "pg_cudnn_plugin");
  if (symbol) return symbol();
  const char *reason = dlerror();
  snprintf(why, size, "the cuDNN plugin does not load: %.200s", reason ? reason : path);
  return NULL;
}

/* The queue's state; NULL with a text in the queue. */
static pg_cuda_attention *state_of(pg_queue *q) {
  if (q->attention) return q->attention;
  const char *wish = getenv("PG_ATTENTION");
  const bool plain = wish && strcmp(wish, "plain") == 0;
  const bool forced = wish && strcmp(wish, "cudnn") == 0;
  if (wish && wish[0] && !plain && !forced) {
    pg_cuda_refuse(q, "PG_ATTENTION is \"%.32s\"; it must be \"plain\" or \"cudnn\"", wish);
    return NULL;
  }
  q->attention = (pg_cuda_attention *)calloc(1, sizeof *q->attention);
  if (!q->attention)
    pg_cuda_refuse(q, "no host memory for attention");
  else
    q->attention->wish = plain ? PLAIN : forced ? CUDNN : ANY;
  return q->attention;
}

/* Loads and starts cuDNN, at the first call. */
static void start(pg_queue *q, pg_cuda_attention *a) {
  if (a->tried) return;
  a->tried = true;
  if (!(a->api = load_plugin(a->why, sizeof a->why))) return;
  char text[sizeof a->why] = "";
  pg_cudnn_options options = {};
  options.device = q->device;
  options.stream = q->stream;
  pg_cuda_enter(q);
  if (a->api->open(&options, &a->cudnn, text, sizeof text) == 0)
    snprintf(a->version, sizeof a->version, "%.63s", text);
  else
    snprintf(a->why, sizeof a->why, "%s", text);
  cudaGetLastError();
}

/* ---- the choice ---------------------------------------------------------------------------- */
/* How a call is cut: parts of `batch` sequences and `heads` heads, the last ones smaller. */
struct parts {
  int64_t batch, heads;
  size_t workspace; /* of the largest */
};

static int64_t part_of(int64_t whole, int64_t most) {
  const int64_t count = pg_blocks(whole, most < 1 ? 1 : most);
  return pg_blocks(whole, count);
}

/* Plans a part, and the smaller one that is left over; keeps the larger workspace. */
static int plan_parts(pg_cuda_attention *a, const pg_cudnn_shape &whole, parts *p, char *why,
                      size_t size) {
  p->workspace = 0;
  for (int last_batch = 0; last_batch < 2; last_batch++)
    for (int last_heads = 0; last_heads < 2; last_heads++) {
      pg_cudnn_shape s = whole;
      size_t workspace = 0;
      s.batch = last_batch ? whole.batch % p->batch : p->batch;
      s.heads = last_heads ? whole.heads % p->heads : p->heads;
      if (s.batch == 0 || s.heads == 0) continue;
      if (a->api->plan(a->cudnn, &s, &workspace, why, size) < 0) return -1;
      if (workspace > p->workspace) p->workspace = workspace;
    }
  return 0;
}

/* 1 and the parts: cuDNN; 0 and a reason: the plain kernel; -1: neither as asked. */
static int choose(pg_queue *q, pg_dtype type, const pg_cudnn_shape &whole, bool aligned, parts *p,
                  char *why, size_t size) {
  pg_cuda_attention *a = state_of(q);
  if (!a) return -1;
  if (a->wish == PLAIN) {
    snprintf(why, size, "PG_ATTENTION=plain");
    return 0;
  }
  why[0] = 0;
  if (type != PG_BF16) {
    snprintf(why, size, "cuDNN's attention is bf16 only, this one is fp32");
  } else if (!aligned || whole.head_dim % 8 != 0) {
    snprintf(why, size, "cuDNN reads 16 bytes at a time: head_dim is %lld, not a multiple of 8",
             (long long)whole.head_dim);
    if (!aligned) snprintf(why, size, "a tensor does not lie on 16 bytes");
  } else if (a->wish == ANY && whole.batch == 1 && whole.time % TILE != 0) {
    /* Generation asks for every length once: building a graph costs more than it saves. */
    snprintf(why, size, "a single sequence of %lld positions, not a multiple of %lld",
             (long long)whole.time, (long long)TILE);
  } else {
    start(q, a);
    p->batch = whole.batch, p->heads = whole.heads;
    int status = a->cudnn ? plan_parts(a, whole, p, why, size) : -1;
    if (!a->cudnn) snprintf(why, size, "%s", a->why);
    if (status == 0 && p->workspace > MOST_WORKSPACE) {
      const double pairs = (double)whole.batch * (double)whole.heads;
      const int64_t fit = (int64_t)(pairs * (double)MOST_WORKSPACE / (double)p->workspace);
      p->batch = part_of(whole.batch, fit / whole.heads);
      p->heads = p->batch > 1 ? whole.heads : part_of(whole.heads, fit);
      status = plan_parts(a, whole, p, why, size);
    }
    cudaGetLastError(); /* of a refused graph */
    if (status == 0) return 1;
  }
  if (a->wish != CUDNN) return 0;
  return pg_cuda_refuse(q, "PG_ATTENTION=cudnn cannot be met: %s", why);
}

static pg_cudnn_shape shape_of(int64_t batch, int64_t time, int64_t heads, int64_t head_dim,
                               bool backward) {
  pg_cudnn_shape s = {};
  s.batch = batch, s.time = time, s.heads = heads, s.head_dim = head_dim;
  s.ld = heads * head_dim;
  s.backward = backward;
  return s;
}

int pg_cuda_attention_path(pg_queue *q, pg_dtype type, int64_t batch, int64_t time, int64_t heads,
                           int64_t head_dim, char *text, size_t size) {
  char why[2][320];
  int cudnn[2];
  parts p;
  for (int backward = 0; backward < 2; backward++) {
    cudnn[backward] = choose(q, type, shape_of(batch, time, heads, head_dim, backward), true, &p,
                             why[backward], sizeof why[backward]);
    if (cudnn[backward] < 0) return -1;
  }
  if (!(cudnn[0] && cudnn[1]) && pg__cuda_plain_attention(q, batch, time, heads, head_dim) < 0)
    return -1;
  const char *version = q->attention->version;
  if (cudnn[0] && cudnn[1])
    snprintf(text, size, "%s", version);
  else if (!cudnn[0] && !cudnn[1])
    snprintf(text, size, "plain kernel: %s", why[0]);
  else
    snprintf(text, size, "%s forward, %s backward: %s", cudnn[0] ? version : "plain kernel",
             cudnn[1] ? version : "plain kernel", why[cudnn[0] ? 1 : 0]);
  return 0;
}

int pg__cuda_cudnn_workspace(pg_queue *q, const pg_workload *w, int64_t *bytes) {
  char why[320];
  parts p;
  *bytes = 0;
  if (w->batch <= 0 || w->time <= 0 || w->heads <= 0) return 0;
  for (int backward = 0; backward < 2; backward++) {
    const pg_cudnn_shape s = shape_of(w->batch, w->time, w->heads, w->head_dim, backward);
    const int cudnn = choose(q, w->type, s, true, &p, why, sizeof why);
    if (cudnn < 0) return -1;
    if (cudnn > 0 && (int64_t)p.workspace > *bytes) *bytes = (int64_t)p.workspace;
  }
  return 0;
}

/* ---- running ------------------------------------------------------------------------------- */
static void *at(const void *tensor, int64_t element) {
  return tensor ? (char *)tensor + element * 2 : NULL;
}

int pg__cuda_cudnn_attention(pg_queue *q, pg_dtype type, const pg_cudnn_tensors &t, int64_t batch,
                             int64_t time, int64_t heads, int64_t head_dim) {
  const pg_cudnn_shape whole = shape_of(batch, time, heads, head_dim, t.dout != NULL);
  const void *const pointers[] = {t.query, t.key,    t.value, t.out,   t.lse,
                                  t.dout,  t.dquery, t.dkey,  t.dvalue};
  uintptr_t bits = 0;
  char why[320];
  void *workspace = NULL;
  parts p;
  if (batch <= 0 || heads <= 0 || time <= 0) return 0;
  for (const void *pointer : pointers) bits |= (uintptr_t)pointer;
  const int cudnn = choose(q, type, whole, (bits & 15) == 0, &p, why, sizeof why);
  if (cudnn <= 0) return cudnn;
  if (p.workspace && pg_cuda_scratch(q, p.workspace, &workspace) < 0) return -1;
  pg_cuda_enter(q);
  for (int64_t b = 0; b < batch; b += p.batch)
    for (int64_t h = 0; h < heads; h += p.heads) {
      const int64_t first = b * time * whole.ld + h * head_dim;
      pg_cudnn_shape s = whole;
      pg_cudnn_tensors part = {at(t.query, first),  at(t.key, first),  at(t.value, first),
                               at(t.out, first),    at(t.lse, 0),      at(t.dout, first),
                               at(t.dquery, first), at(t.dkey, first), at(t.dvalue, first)};
      part.lse = (float *)t.lse + (b * heads + h) * time;
      s.batch = batch - b < p.batch ? batch - b : p.batch;
      s.heads = heads - h < p.heads ? heads - h : p.heads;
      if (q->attention->api->run(q->attention->cudnn, &s, &part, workspace, why, sizeof why) < 0) {
        const cudaError_t earlier = cudaGetLastError();
        if (earlier != cudaSuccess) return pg_cuda_fail(q, "cuDNN attention", earlier);
        if (q->attention->wish != CUDNN) return 0; /* every output is written anew */
        return pg_cuda_refuse(q, "PG_ATTENTION=cudnn cannot be met: %s", why);
      }
    }
  return pg_cuda_launched(q, "cuDNN attention", cudaSuccess) < 0 ? -1 : 1;
}
