/* Device memory with accounts, and the bump allocator over one piece of it. */
#include "internal.h"

#include <assert.h>
#include <stdio.h>

/* While ctx->bytes stays, the peak can only come from what the backend holds. */
void pg__note_peak(pg_context *ctx) {
  int64_t held = ctx->kernels->held(ctx->queue);
  for (int i = 0; i < PG__SPARES; i++) held += (int64_t)ctx->spares[i].bytes;
  ctx->peak_bytes = pg__max(ctx->peak_bytes, ctx->bytes + held);
}

/* Spare memory of exactly this size, or NULL. */
static void *take_spare(pg_context *ctx, size_t bytes) {
  for (int i = 0; i < PG__SPARES; i++) {
    void *memory = ctx->spares[i].memory;
    if (!memory || ctx->spares[i].bytes != bytes) continue;
    ctx->spares[i] = (pg__spare){0};
    return memory;
  }
  return NULL;
}

/* Keeps it in place of the oldest. */
static void keep_spare(pg_context *ctx, void *memory, size_t bytes) {
  void *oldest = ctx->spares[PG__SPARES - 1].memory;
  if (oldest) ctx->kernels->release(ctx->queue, oldest);
  for (int i = PG__SPARES - 1; i > 0; i--) ctx->spares[i] = ctx->spares[i - 1];
  ctx->spares[0] = (pg__spare){memory, bytes};
}

void pg__drop_spares(pg_context *ctx) {
  for (int i = 0; i < PG__SPARES; i++) {
    if (ctx->spares[i].memory) ctx->kernels->release(ctx->queue, ctx->spares[i].memory);
    ctx->spares[i] = (pg__spare){0};
  }
}

int pg__alloc(pg_context *ctx, size_t bytes, const char *what, void **out) {
  int status = -1;
  *out = take_spare(ctx, bytes);
  if (*out) {
    pg__note_peak(ctx);
    ctx->bytes += (int64_t)bytes;
    return 0;
  }
  /* Half the address space is never there; beyond it the signed accounts would wrap. */
  if (bytes <= (size_t)INT64_MAX / 2)
    status = ctx->kernels->alloc(ctx->queue, bytes ? bytes : 1, out);
  if (status == -1 && ctx->spares[0].memory && bytes <= (size_t)INT64_MAX / 2) {
    pg__drop_spares(ctx);
    status = ctx->kernels->alloc(ctx->queue, bytes ? bytes : 1, out);
  }
  if (status < -1) return pg__kernel_status(ctx, status, "alloc");
  if (status < 0 || !*out) {
    *out = NULL;
    pg_device_info device;
    char free_text[64] = "";
    if (ctx->kernels->device_info(ctx->queue, &device) == 0 && device.memory_total > 0)
      snprintf(free_text, sizeof free_text, ", %.3f of %.3f GiB are free",
               (double)device.memory_free / 0x1p30, (double)device.memory_total / 0x1p30);
    return pg_fail(ctx, PG_ENOMEM,
                   "%s: no room for %zu bytes (%.3f GiB) on device \"%s\"; %.3f GiB are in use%s",
                   what, bytes, (double)bytes / 0x1p30, ctx->kernels->name,
                   (double)ctx->bytes / 0x1p30, free_text);
  }
  pg__note_peak(ctx);
  ctx->bytes += (int64_t)bytes;
  return 0;
}

void pg__release(pg_context *ctx, void *memory, size_t bytes) {
  if (!memory) return;
  pg__note_peak(ctx);
  if (ctx->keep_spares && bytes >= PG__SPARE_LEAST)
    keep_spare(ctx, memory, bytes);
  else
    ctx->kernels->release(ctx->queue, memory);
  ctx->bytes -= (int64_t)bytes;
  assert(ctx->bytes >= 0);
}

int pg__arena_new(pg_context *ctx, size_t size, const char *what, pg_arena *out) {
  void *memory;
  *out = (pg_arena){0};
  const int status = pg__alloc(ctx, size, what, &memory);
  if (status < 0) return status;
  *out = (pg_arena){.context = ctx, .memory = memory, .size = size};
  return 0;
}

void pg__arena_free(pg_arena *arena) {
  if (!arena || !arena->memory) return;
  pg__release(arena->context, arena->memory, arena->size);
  *arena = (pg_arena){0};
}

void *pg__arena_take(pg_arena *arena, size_t bytes) {
  const size_t size = pg__arena_size(bytes);
  assert(size <= arena->size - arena->used && "an arena was sized too small");
  if (size > arena->size - arena->used) return NULL;
  void *memory = arena->memory + arena->used;
  arena->used += size;
  return memory;
}
