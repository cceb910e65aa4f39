/* A context: one device, its kernel table and queue, memory accounts, the text of the last error,
 * and the flag that cancels long operations.  Everything else in the core belongs to one context
 * and must be freed before it.  A context serves one thread at a time. */
#ifndef PG_CONTEXT_H
#define PG_CONTEXT_H

#include "error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pg_context pg_context;

#define PG_MAX_THREADS 1024

typedef struct pg_context_options {
  const char *device; /* "cpu", "cuda"; "auto" or NULL: cuda where it works, else cpu */
  int device_index;   /* which of the backend's devices, from 0 */
  int threads;        /* compute threads, at most PG_MAX_THREADS; 0: OMP_NUM_THREADS, else the CPUs
                         this process may run on, at most its control group's quota */
} pg_context_options;

/* Create a context. On failure *out is NULL and, since there is no context yet to hold a text,
 * `message` (of `size` bytes, may be NULL) receives one. */
int pg_context_new(const pg_context_options *options, pg_context **out, char *message, size_t size);
/* Free it; NULL is legal. Tensors still alive are a bug of the caller and are asserted on. */
void pg_context_free(pg_context *ctx);

/* Text of the last failure in this context ("" when none). Valid until the next failing call. */
const char *pg_context_message(const pg_context *ctx);
const char *pg_context_device(const pg_context *ctx); /* "cpu" or "cuda" */
/* What the context runs on. Memory in bytes, 0 where the system alone knows; the cache is a CPU's
 * last level or a GPU's L2, 0 when unknown. */
typedef struct pg_device {
  char name[128]; /* "NVIDIA H200, sm_90", "CPU, avx512" */
  int index, count;
  int64_t memory_free, memory_total, cache_bytes;
} pg_device;
int pg_context_describe(pg_context *ctx, pg_device *out);
/* Which attention the device uses for [batch, time, heads, head_dim], in fp32 or bf16, and why, as
 * one line in text[size]; empty where it has one only. It loads what such calls need, and fails
 * where they would: a shape that is beyond the device. */
int pg_context_attention(pg_context *ctx, bool bf16, int64_t batch, int64_t time, int64_t heads,
                         int64_t head_dim, char *text, size_t size);
int pg_context_threads(const pg_context *ctx);
/* Bytes that can still be allocated on the device: what is free on a GPU; on a CPU, what this
 * machine and the process's control group can give. 0: unknown. */
int64_t pg_context_available(pg_context *ctx);

/* Device memory held by tensors and arenas now, in bytes. */
int64_t pg_context_bytes(const pg_context *ctx);
/* The most that these and the backend (its workspace and scratch) have held together so far. Memory
 * that was released and is kept for the next to ask is not counted. */
int64_t pg_context_peak_bytes(pg_context *ctx);
/* Tensors (storages) alive: tests assert that it returns to its baseline. */
int64_t pg_context_live_tensors(const pg_context *ctx);

/* Ask the operation now running to stop with PG_ECANCELED at its next poll. Safe in a signal
 * handler and from any thread. pg_context_resume clears the flag. */
void pg_context_cancel(pg_context *ctx);
void pg_context_resume(pg_context *ctx);
bool pg_context_cancelled(const pg_context *ctx);

/* Record a message and return `code`, so that callers write `return pg_fail(ctx, PG_EINVAL, …)`.
 * Hosts may use it too, from callbacks. */
int pg_fail(pg_context *ctx, int code, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

#ifdef __cplusplus
}
#endif
#endif
