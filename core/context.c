/* Contexts: choice of device and threads, the last error's text, cancellation. */
#include "internal.h"

#include <assert.h>
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Whole CPUs of a control group's quota in microseconds per period; 0: none or unknown. */
static int quota_cpus(void) {
  double quota = 0, period = 0;
  FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re"); /* version 2: "QUOTA PERIOD" or "max PERIOD" */
  if (f) {
    if (fscanf(f, "%lf %lf", &quota, &period) != 2) quota = 0;
    fclose(f);
  } else { /* version 1; a quota of -1 is none */
    if ((f = fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "re"))) {
      if (fscanf(f, "%lf", &quota) != 1) quota = 0;
      fclose(f);
    }
    if ((f = fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "re"))) {
      if (fscanf(f, "%lf", &period) != 1) period = 0;
      fclose(f);
    }
  }
  if (!(quota > 0) || !(period > 0) || quota / period >= PG_MAX_THREADS) return 0;
  const int whole = (int)(quota / period);
  return whole < quota / period ? whole + 1 : whole;
}

/* CPUs in this thread's affinity mask, at most a control group's quota; OMP_NUM_THREADS, when it
 * starts with a number, is the user's own choice and goes first. */
static int default_threads(void) {
  const char *text = getenv("OMP_NUM_THREADS");
  if (text) {
    char *end;
    const long n = strtol(text, &end, 10);
    if (end != text && n >= 1) return n < PG_MAX_THREADS ? (int)n : PG_MAX_THREADS;
  }
  int n = 1;
  cpu_set_t *set = CPU_ALLOC(PG_MAX_THREADS * 8); /* larger than any machine: CPU_SETSIZE is not */
  if (set) {
    const size_t size = CPU_ALLOC_SIZE(PG_MAX_THREADS * 8);
    CPU_ZERO_S(size, set);
    if (sched_getaffinity(0, size, set) == 0) n = CPU_COUNT_S(size, set);
    CPU_FREE(set);
  }
  const int quota = quota_cpus();
  if (quota > 0 && quota < n) n = quota;
  return n < 1 ? 1 : n > PG_MAX_THREADS ? PG_MAX_THREADS : n;
}

/* Start a queue on one backend; PG_EDEVICE with a text otherwise. */
static int start(pg_context *ctx, bool cuda, char *text, size_t size) {
  const pg_queue_options options = {.threads = ctx->threads, .device = ctx->device_index};
  char why[384] = "";
  if (cuda) {
    ctx->kernels = pg__cuda_kernels(why, sizeof why);
  } else if (!(ctx->kernels = pg_cpu_kernels(NULL))) {
    snprintf(why, sizeof why, "this build has no kernels for this CPU");
  }
  if (ctx->kernels && ctx->kernels->queue_new(&options, &ctx->queue, why, sizeof why) == 0 &&
      ctx->queue)
    return 0;
  ctx->queue = NULL;
  snprintf(text, size, "device \"%s\" is not available: %s", cuda ? "cuda" : "cpu",
           why[0] ? why : "no reason given");
  return PG_EDEVICE;
}

double pg__now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int pg_context_new(const pg_context_options *options, pg_context **out, char *message,
                   size_t size) {
  const char *device = options && options->device ? options->device : "auto";
  const int threads = options ? options->threads : 0;
  const int index = options ? options->device_index : 0;
  const bool any = strcmp(device, "auto") == 0, cuda = strcmp(device, "cuda") == 0;
  pg_context *ctx = NULL;
  char text[512] = "";
  int status;

  *out = NULL;
  if (message && size) message[0] = 0;
  if (!any && !cuda && strcmp(device, "cpu") != 0) {
    snprintf(text, sizeof text,
             "there is no device \"%.32s\"; devices are \"cpu\", \"cuda\", \"auto\"", device);
    status = PG_EDEVICE;
    goto fail;
  }
  if (index < 0) {
    snprintf(text, sizeof text, "device_index is %d; devices count from 0", index);
    status = PG_EINVAL;
    goto fail;
  }
  if (threads < 0 || threads > PG_MAX_THREADS) {
    snprintf(text, sizeof text, "threads is %d; it must be 0 (all) to %d", threads, PG_MAX_THREADS);
    status = PG_EINVAL;
    goto fail;
  }
  if (!(ctx = calloc(1, sizeof *ctx))) {
    snprintf(text, sizeof text, "a context does not fit in memory");
    status = PG_ENOMEM;
    goto fail;
  }
  ctx->threads = threads ? threads : default_threads();
  ctx->device_index = index;
  status = any || cuda ? start(ctx, true, text, sizeof text) : PG_EDEVICE;
  if (status < 0 && !cuda) status = start(ctx, false, text, sizeof text);
  if (status < 0) goto fail;
  *out = ctx;
  return 0;

fail:
  if (message && size) snprintf(message, size, "%s", text);
  free(ctx);
  return status;
}

void pg_context_free(pg_context *ctx) {
  if (!ctx) return;
  assert(ctx->live_tensors == 0 && "tensors outlive their context");
  assert(ctx->bytes == 0 && "device memory outlives its context");
  pg_profile_free(ctx->profile);
  pg__drop_spares(ctx);
  ctx->kernels->queue_free(ctx->queue);
  free(ctx);
}

const char *pg_context_message(const pg_context *ctx) {
  return ctx->message;
}
const char *pg_context_device(const pg_context *ctx) {
  return ctx->kernels->name;
}
int pg_context_describe(pg_context *ctx, pg_device *out) {
  pg_device_info info = {0};
  int status;
  PG_LAUNCH(ctx, device_info, &info);
  *out = (pg_device){.index = ctx->device_index,
                     .count = info.count,
                     .memory_free = info.memory_free,
                     .memory_total = info.memory_total,
                     .cache_bytes = info.cache_bytes};
  memcpy(out->name, info.name, sizeof out->name);
fail:
  return status;
}
int64_t pg_context_available(pg_context *ctx) {
  pg_device_info info;
  if (ctx->kernels->device_info(ctx->queue, &info) < 0) return 0;
  return info.memory_total > 0 ? info.memory_free : pg__host_memory("");
}
int pg_context_attention(pg_context *ctx, bool bf16, int64_t batch, int64_t time, int64_t heads,
                         int64_t head_dim, char *text, size_t size) {
  int status = 0;
  if (batch < 1 || time < 1 || heads < 1 || head_dim < 1)
    return pg_fail(ctx, PG_EINVAL, "attention over [%lld,%lld,%lld,%lld]; every side is at least 1",
                   (long long)batch, (long long)time, (long long)heads, (long long)head_dim);
  PG_LAUNCH(ctx, attention_path, bf16 ? PG_BF16 : PG_F32, batch, time, heads, head_dim, text, size);
fail:
  return status;
}
int pg_context_threads(const pg_context *ctx) {
  return ctx->threads;
}
int64_t pg_context_bytes(const pg_context *ctx) {
  return ctx->bytes;
}
int64_t pg_context_peak_bytes(pg_context *ctx) {
  pg__note_peak(ctx);
  return ctx->peak_bytes;
}
int64_t pg_context_live_tensors(const pg_context *ctx) {
  return ctx->live_tensors;
}

/* One store to a volatile int: safe in a signal handler. */
void pg_context_cancel(pg_context *ctx) {
  __atomic_store_n(&ctx->cancel, 1, __ATOMIC_RELAXED);
}
void pg_context_resume(pg_context *ctx) {
  __atomic_store_n(&ctx->cancel, 0, __ATOMIC_RELAXED);
}
bool pg_context_cancelled(const pg_context *ctx) {
  return __atomic_load_n(&ctx->cancel, __ATOMIC_RELAXED) != 0;
}

int pg_fail(pg_context *ctx, int code, const char *format, ...) {
  if (!ctx) return code;
  /* Arguments may point into the present message, so the new one is made beside it. */
  char text[sizeof ctx->message];
  va_list arguments;
  va_start(arguments, format);
  const int wanted = vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (wanted < 0) {
    snprintf(text, sizeof text, "%s", pg_error_meaning(code));
  } else if ((size_t)wanted >= sizeof text) { /* cut before a UTF-8 sequence, not inside one */
    size_t end = sizeof text - 4;
    while (end > 0 && ((unsigned char)text[end] & 0xc0) == 0x80) end--;
    memcpy(text + end, "...", 4);
  }
  memcpy(ctx->message, text, sizeof text);
  return code;
}

int pg__fail_errno(pg_context *ctx, const char *action, const char *path, int error) {
  int code = PG_EIO;
  switch (error) {
  case ENOENT:
  case ENOTDIR: code = PG_ENOENT; break;
  case EEXIST:
  case ENOTEMPTY: code = PG_EEXIST; break;
  case ENOSPC:
  case EDQUOT:
  case EFBIG: code = PG_ENOSPC; break;
  case ENOMEM: code = PG_ENOMEM; break;
  default: break;
  }
  return pg_fail(ctx, code, "cannot %s '%s': %s", action, path, strerror(error));
}

/* " in update 7, block backward 3, model.layers.3.mlp.up_proj.weight", or less. */
static void say_where(const pg_context *ctx, char *text, size_t size) {
  const pg__place *p = ctx->depth ? &ctx->places[ctx->depth - 1] : NULL;
  char update[40] = "", number[24] = "", others[32] = "";
  if (ctx->update)
    snprintf(update, sizeof update, "update %lld%s", (long long)ctx->update, p ? ", " : "");
  if (p && p->number >= 0) snprintf(number, sizeof number, " %lld", (long long)p->number);
  if (p && p->others) snprintf(others, sizeof others, " and %zu more", p->others);
  snprintf(text, size, "%s%s%s%s%s%s%s", ctx->update || p ? " in " : "", update, p ? p->name : "",
           number, p && p->parameter ? ", " : "", p && p->parameter ? p->parameter : "", others);
}

int pg__kernel_status(pg_context *ctx, int status, const char *operation) {
  char where[256];
  if (status >= 0) return 0;
  const char *text = ctx->kernels->message(ctx->queue);
  say_where(ctx, where, sizeof where);
  return pg_fail(ctx, PG_EDEVICE, "device \"%s\": %s failed%s: %s", ctx->kernels->name, operation,
                 where, text && text[0] ? text : "no reason given");
}
