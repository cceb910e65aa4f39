/* The part of cuBLASLt that a GEMM wrapper needs: descriptors, the heuristic and the product, in
 * fp32 and bf16 with fp32 accumulation, either storage order, transposes, strided batches. Operands
 * are copied to fp32 and multiplied by OpenBLAS. Every matrix has to lie inside one allocation, to
 * be aligned as the heuristic was told, and the result must not overlap an operand. */
#include "cudaemu.h"
#include "emu.h"
#include <cblas.h>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <vector>

using namespace emu;

struct matmul {
  cublasComputeType_t compute;
  cudaDataType scale;
  int32_t transpose_a, transpose_b, pointer_mode, epilogue;
};
struct layout {
  cudaDataType type;
  int32_t order, batch;
  uint64_t rows, columns;
  int64_t ld, stride;
};
struct preference {
  uint64_t workspace;
  uint32_t alignment[4]; /* A, B, C, D in bytes */
};
enum { MAGIC = 0x656d7500, WORKSPACE = 1 << 14 };

static matmul *of(cublasLtMatmulDesc_t d) {
  return reinterpret_cast<matmul *>(d);
}
static layout *of(cublasLtMatrixLayout_t l) {
  return reinterpret_cast<layout *>(l);
}
static preference *of(cublasLtMatmulPreference_t p) {
  return reinterpret_cast<preference *>(p);
}

static size_t element(const layout &l) {
  return l.type == CUDA_R_32F ? 4 : 2;
}
/* Of one matrix of the batch, from its first to past its last element. */
static int64_t extent(const layout &l) {
  bool row = l.order == CUBLASLT_ORDER_ROW;
  int64_t lines = (int64_t)(row ? l.rows : l.columns), length = (int64_t)(row ? l.columns : l.rows);
  return lines && length ? (lines - 1) * l.ld + length : 0;
}
static size_t batch_bytes(const layout &l) {
  return (size_t)((l.batch - 1) * l.stride + extent(l)) * element(l);
}

static cublasStatus_t valid(const matmul &d, const layout &a, const layout &b, const layout &c,
                            const layout &out) {
  uint64_t m = d.transpose_a ? a.columns : a.rows, k = d.transpose_a ? a.rows : a.columns;
  uint64_t n = d.transpose_b ? b.rows : b.columns;
  if ((d.transpose_b ? b.columns : b.rows) != k || c.rows != m || c.columns != n || out.rows != m ||
      out.columns != n)
    return CUBLAS_STATUS_INVALID_VALUE;
  for (const layout *l : {&a, &b, &c, &out}) {
    if (l->batch != out.batch || l->batch < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (l->order != CUBLASLT_ORDER_COL && l->order != CUBLASLT_ORDER_ROW)
      return CUBLAS_STATUS_NOT_SUPPORTED;
    if (l->ld < (int64_t)(l->order == CUBLASLT_ORDER_ROW ? l->columns : l->rows))
      return CUBLAS_STATUS_INVALID_VALUE;
    if ((l->rows | l->columns) >> 31) return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  bool half = a.type == CUDA_R_16BF && b.type == CUDA_R_16BF &&
              (out.type == CUDA_R_16BF || out.type == CUDA_R_32F);
  bool full = a.type == CUDA_R_32F && b.type == CUDA_R_32F && out.type == CUDA_R_32F;
  if ((!half && !full) || c.type != out.type || d.compute != CUBLAS_COMPUTE_32F ||
      d.scale != CUDA_R_32F || d.epilogue != CUBLASLT_EPILOGUE_DEFAULT || c.order != out.order)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  return CUBLAS_STATUS_SUCCESS;
}

/* Of everything an algorithm may depend on. */
static uint64_t fingerprint(const matmul &d, const layout &a, const layout &b, const layout &out) {
  uint64_t h = (uint64_t)d.transpose_a * 2 + (uint64_t)d.transpose_b;
  for (const layout *l : {&a, &b, &out})
    for (uint64_t v : {l->rows, l->columns, (uint64_t)l->ld, (uint64_t)l->type, (uint64_t)l->order,
                       (uint64_t)l->batch, (uint64_t)l->stride})
      h = (h ^ v) * 0x100000001b3u + (h >> 29);
  return h;
}

/* Rows of op(X) one after the other. */
static void load(std::vector<float> &to, const void *from, const layout &l, bool transpose) {
  int64_t rows = (int64_t)(transpose ? l.columns : l.rows);
  int64_t columns = (int64_t)(transpose ? l.rows : l.columns);
  bool contiguous = (l.order == CUBLASLT_ORDER_ROW) != transpose; /* rows of op(X) in memory */
  to.resize((size_t)(rows * columns));
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) {
      int64_t at = contiguous ? i * l.ld + j : j * l.ld + i;
      to[(size_t)(i * columns + j)] = l.type == CUDA_R_32F
                                          ? ((const float *)from)[at]
                                          : __bfloat162float(((const __nv_bfloat16 *)from)[at]);
    }
}
static void store(void *to, const layout &l, const std::vector<float> &from) {
  for (int64_t i = 0; i < (int64_t)l.rows; i++)
    for (int64_t j = 0; j < (int64_t)l.columns; j++) {
      int64_t at = l.order == CUBLASLT_ORDER_ROW ? i * l.ld + j : j * l.ld + i;
      float v = from[(size_t)(i * (int64_t)l.columns + j)];
      if (l.type == CUDA_R_32F)
        ((float *)to)[at] = v;
      else
        ((__nv_bfloat16 *)to)[at] = __float2bfloat16(v);
    }
}

static void multiply(const matmul &d, float alpha, const void *a, const layout &la, const void *b,
                     const layout &lb, float beta, const void *c, const layout &lc, void *out,
                     const layout &lo) {
  const int m = (int)lo.rows, n = (int)lo.columns, k = (int)(d.transpose_a ? la.rows : la.columns);
  std::vector<float> x, y, z((size_t)m * (size_t)n);
  for (int64_t i = 0; i < lo.batch; i++) {
    auto slice = [i](const void *p, const layout &l) {
      return (const char *)p + (size_t)(i * l.stride) * element(l);
    };
    load(x, slice(a, la), la, d.transpose_a);
    load(y, slice(b, lb), lb, d.transpose_b);
    if (beta != 0) load(z, slice(c, lc), lc, false);
    if (m && n)
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, n, k, alpha, x.data(),
                  k > 0 ? k : 1, y.data(), n, beta, z.data(), n);
    store((void *)slice(out, lo), lo, z);
  }
}

static void check(const char *name, const void *p, const layout &l, const uint64_t *algorithm,
                  int which) {
  char what[64];
  snprintf(what, sizeof what, "cublasLtMatmul, matrix %s", name);
  require_device(p, batch_bytes(l), what);
  size_t alignment = algorithm ? algorithm[4 + which] : element(l);
  if (misalignment(p, alignment))
    cudaemu_die("%s: %p is not aligned to the %zu bytes that the heuristic was told", what, p,
                alignment);
}

static bool overlap(const void *p, const layout &a, const void *q, const layout &b) {
  return (uintptr_t)p < (uintptr_t)q + batch_bytes(b) &&
         (uintptr_t)q < (uintptr_t)p + batch_bytes(a);
}

#define ENTER(name)                                                                                \
  std::lock_guard<std::recursive_mutex> hold(lock);                                                \
  if (enter(name, cudaErrorUnknown)) return CUBLAS_STATUS_EXECUTION_FAILED

/* One attribute of a descriptor: copied when the size is the documented one. */
template <class T> static cublasStatus_t assign(T *field, const void *value, size_t bytes) {
  if (!value || bytes != sizeof *field) return CUBLAS_STATUS_INVALID_VALUE;
  memcpy(field, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t *out) {
  std::lock_guard<std::recursive_mutex> hold(lock);
  if (enter("cublasLtCreate", cudaErrorUnknown)) return CUBLAS_STATUS_NOT_INITIALIZED;
  *out = reinterpret_cast<cublasLtHandle_t>(new int(MAGIC));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  int *magic = reinterpret_cast<int *>(handle);
  if (!magic || *magic != MAGIC) return CUBLAS_STATUS_NOT_INITIALIZED;
  delete magic;
  return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion() {
  return CUBLAS_VERSION;
}
const char *cublasLtGetStatusName(cublasStatus_t status) {
#define NAME(code)                                                                                 \
  if (status == code) return #code
  NAME(CUBLAS_STATUS_SUCCESS);
  NAME(CUBLAS_STATUS_NOT_INITIALIZED);
  NAME(CUBLAS_STATUS_ALLOC_FAILED);
  NAME(CUBLAS_STATUS_INVALID_VALUE);
  NAME(CUBLAS_STATUS_EXECUTION_FAILED);
  NAME(CUBLAS_STATUS_NOT_SUPPORTED);
  return "CUBLAS_STATUS_UNKNOWN";
}
const char *cublasLtGetStatusString(cublasStatus_t status) {
  return cublasLtGetStatusName(status);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  ENTER("cublasLtMatmulDescCreate");
  *out = reinterpret_cast<cublasLtMatmulDesc_t>(
      new matmul{compute, scale, 0, 0, CUBLASLT_POINTER_MODE_HOST, CUBLASLT_EPILOGUE_DEFAULT});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
  delete of(d);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
  switch (attribute) {
  case CUBLASLT_MATMUL_DESC_TRANSA: return assign(&of(d)->transpose_a, value, bytes);
  case CUBLASLT_MATMUL_DESC_TRANSB: return assign(&of(d)->transpose_b, value, bytes);
  case CUBLASLT_MATMUL_DESC_POINTER_MODE: return assign(&of(d)->pointer_mode, value, bytes);
  case CUBLASLT_MATMUL_DESC_EPILOGUE: return assign(&of(d)->epilogue, value, bytes);
  default: return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t ld) {
  ENTER("cublasLtMatrixLayoutCreate");
  *out = reinterpret_cast<cublasLtMatrixLayout_t>(
      new layout{type, CUBLASLT_ORDER_COL, 1, rows, columns, ld, 0});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
  delete of(l);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes) {
  switch (attribute) {
  case CUBLASLT_MATRIX_LAYOUT_TYPE: return assign(&of(l)->type, value, bytes);
  case CUBLASLT_MATRIX_LAYOUT_ORDER: return assign(&of(l)->order, value, bytes);
  case CUBLASLT_MATRIX_LAYOUT_ROWS: return assign(&of(l)->rows, value, bytes);
  case CUBLASLT_MATRIX_LAYOUT_COLS: return assign(&of(l)->columns, value, bytes);
  case CUBLASLT_MATRIX_LAYOUT_LD: return assign(&of(l)->ld, value, bytes);
  case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return assign(&of(l)->batch, value, bytes);
  case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return assign(&of(l)->stride, value, bytes);
  default: return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out) {
  ENTER("cublasLtMatmulPreferenceCreate");
  *out = reinterpret_cast<cublasLtMatmulPreference_t>(new preference{0, {256, 256, 256, 256}});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
  delete of(p);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes) {
  switch (attribute) {
  case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return assign(&of(p)->workspace, value, bytes);
  case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
  case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
  case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
  case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
    return assign(&of(p)->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value,
                  bytes);
  case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return CUBLAS_STATUS_SUCCESS;
  default: return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

/* One algorithm, which wants workspace when it may have some. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
                                              cublasLtMatmulPreference_t p, int requested,
                                              cublasLtMatmulHeuristicResult_t *results,
                                              int *returned) {
  ENTER("cublasLtMatmulAlgoGetHeuristic");
  *returned = 0;
  cublasStatus_t status = valid(*of(d), *of(a), *of(b), *of(c), *of(out));
  if (status || requested < 1) return status ? status : CUBLAS_STATUS_INVALID_VALUE;
  memset(results, 0, sizeof *results);
  results->state = CUBLAS_STATUS_SUCCESS;
  results->workspaceSize = of(p)->workspace >= WORKSPACE ? WORKSPACE : 0;
  results->wavesCount = 1;
  uint64_t *data = results->algo.data;
  data[0] = MAGIC;
  data[1] = fingerprint(*of(d), *of(a), *of(b), *of(out));
  data[2] = results->workspaceSize;
  data[3] = 0;
  for (int i = 0; i < 4; i++) data[4 + i] = of(p)->alignment[i];
  *returned = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t la, const void *b,
                              cublasLtMatrixLayout_t lb, const void *beta, const void *c,
                              cublasLtMatrixLayout_t lc, void *out, cublasLtMatrixLayout_t lo,
                              const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  ENTER("cublasLtMatmul");
  if (!handle || *reinterpret_cast<int *>(handle) != MAGIC) return CUBLAS_STATUS_NOT_INITIALIZED;
  const matmul d = *of(desc);
  const layout A = *of(la), B = *of(lb), C = *of(lc), D = *of(lo);
  if (cublasStatus_t status = valid(d, A, B, C, D)) return status;
  const uint64_t *data = algo ? algo->data : nullptr;
  if (data && (data[0] != MAGIC || data[1] != fingerprint(d, A, B, D)))
    cudaemu_die("cublasLtMatmul: the algorithm was found for other shapes");
  if (data && workspace_bytes < data[2]) return CUBLAS_STATUS_INVALID_VALUE;
  const bool host_scalars = d.pointer_mode == CUBLASLT_POINTER_MODE_HOST;
  if (!host_scalars) require_device(alpha, 4, "alpha"), require_device(beta, 4, "beta");
  const float x = host_scalars ? *(const float *)alpha : 0;
  const float y = host_scalars ? *(const float *)beta : 0;
  check("A", a, A, data, 0);
  check("B", b, B, data, 1);
  if (!host_scalars || y != 0) check("C", c, C, data, 2);
  check("D", out, D, data, 3);
  if (workspace_bytes) require_device(workspace, workspace_bytes, "cublasLtMatmul, workspace");
  const bool added = !host_scalars || y != 0, in_place = c == out;
  if (overlap(out, D, a, A) || overlap(out, D, b, B) ||
      (added && !in_place && overlap(out, D, c, C)))
    cudaemu_die("cublasLtMatmul: the result overlaps an operand");
  cudaError_t error = enqueue(stream, "cublasLtMatmul", [=] {
    device_access open;
    /* Only what the algorithm asked for: the rest of a large one would cost more than the product.
     */
    memset(workspace, 0xff, std::min(workspace_bytes, (size_t)WORKSPACE));
    multiply(d, host_scalars ? x : *(const float *)alpha, a, A, b, B,
             host_scalars ? y : *(const float *)beta, c, C, out, D);
    return true;
  });
  return error ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}
}
