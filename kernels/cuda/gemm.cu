/* Dense products on cuBLASLt, the only place that calls it.
 *
 * cuBLASLt is asked in its own column-major order: a row-major C = op(A) op(B) is the column-major
 * C' = op(B)' op(A)', so the operands change places and keep their transposes; what it calls C is
 * our addend D, and its D our C. Sums run in fp32
 * (CUBLAS_COMPUTE_32F: no TF32), and where a product is split along k the parts are joined in fp32,
 * so that bf16 results are rounded once. What the heuristic chose is kept by shape. */
#include "cuda.cuh"

#include <cublasLt.h>
#include <limits.h>
#include <map>
#include <new>
#include <string.h>

static constexpr size_t MOST_PLANS = 1024; /* a host may multiply any shapes: bounds the memory */

/* All that an algorithm may depend on; plain data without padding, ordered by its bytes. */
struct shape {
  int64_t m, n, k, lda, ldb, ldc, batch, stride_a, stride_b, stride_c;
  int32_t transpose_a, transpose_b, type_in, type_out;
  uint32_t align_a, align_b, align_c, align_d; /* in bytes; of the result C and the addend D */
};
static bool operator<(const shape &a, const shape &b) {
  return memcmp(&a, &b, sizeof a) < 0;
}

struct plan {
  cublasLtMatmulDesc_t product;
  cublasLtMatrixLayout_t first, second, result; /* in cuBLASLt's order: B, A, C */
  cublasLtMatmulAlgo_t algorithm;
};

struct pg_cuda_products {
  cublasLtHandle_t handle;
  void *workspace;
  std::map<shape, plan> plans;
};

static void free_plan(plan &p) {
  if (p.product) cublasLtMatmulDescDestroy(p.product);
  for (cublasLtMatrixLayout_t layout : {p.first, p.second, p.result})
    if (layout) cublasLtMatrixLayoutDestroy(layout);
  p = {};
}

static void forget_plans(pg_cuda_products *s) {
  for (auto &entry : s->plans) free_plan(entry.second);
  s->plans.clear();
}

void pg__cuda_products_free(pg_queue *q) {
  pg_cuda_products *s = q->products;
  if (!s) return;
  forget_plans(s);
  if (s->handle) cublasLtDestroy(s->handle);
  pg_cuda_release(q, s->workspace);
  delete s;
  q->products = NULL;
}

/* What earlier work left behind is more telling than cuBLASLt's answer to it. */
static int fail(pg_queue *q, const char *call, const shape &s, cublasStatus_t status) {
  const cudaError_t earlier = cudaStreamQuery(q->stream);
  if (earlier != cudaSuccess && earlier != cudaErrorNotReady) return pg_cuda_fail(q, call, earlier);
  cudaGetLastError();
  return pg_cuda_refuse(q,
                        "%.*s: %s for [%lld,%lld] x [%lld,%lld], %s, leading dimensions %lld, "
                        "%lld, %lld, batch %lld",
                        (int)strcspn(call, "("), call, cublasLtGetStatusName(status),
                        (long long)s.m, (long long)s.k, (long long)s.k, (long long)s.n,
                        s.type_in == PG_F32    ? "fp32"
                        : s.type_out == PG_F32 ? "bf16 to fp32"
                                               : "bf16",
                        (long long)s.lda, (long long)s.ldb, (long long)s.ldc, (long long)s.batch);
}
#define TRY(call)                                                                                  \
  do {                                                                                             \
    cublasStatus_t status_ = (call);                                                               \
    if (status_ != CUBLAS_STATUS_SUCCESS) return fail(q, #call, s, status_);                       \
  } while (0)

static cudaDataType_t cuda_type(int32_t type) {
  return type == PG_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* A row-major [rows, columns] matrix, which is column-major [columns, rows]. */
static cublasStatus_t make_layout(cublasLtMatrixLayout_t *out, int32_t type, int64_t rows,
                                  int64_t columns, int64_t ld, int64_t batch, int64_t stride) {
  const int32_t count = (int32_t)batch;
  cublasStatus_t status =
      cublasLtMatrixLayoutCreate(out, cuda_type(type), (uint64_t)columns, (uint64_t)rows, ld);
  if (status == CUBLAS_STATUS_SUCCESS && batch > 1)
    status = cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                              sizeof count);
  if (status == CUBLAS_STATUS_SUCCESS && batch > 1)
    status = cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                              &stride, sizeof stride);
  return status;
}

static cublasStatus_t find_algorithm(pg_cuda_products *products, const shape &s,
                                     cublasLtMatmulPreference_t preference, plan *p) {
  const size_t workspace = PG_CUDA_WORKSPACE;
  const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  const struct {
    cublasLtMatmulPreferenceAttributes_t attribute;
    const void *value;
    size_t bytes;
  } settings[] = {
      {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
      {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &s.align_b, sizeof s.align_b},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &s.align_a, sizeof s.align_a},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &s.align_d, sizeof s.align_d},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &s.align_c, sizeof s.align_c},
  };
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  for (auto &setting : settings) {
    cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(preference, setting.attribute,
                                                                 setting.value, setting.bytes);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(products->handle, p->product, p->first, p->second, p->result,
                                     p->result, preference, 1, &found, &count);
  if (status == CUBLAS_STATUS_SUCCESS && count < 1) status = CUBLAS_STATUS_NOT_SUPPORTED;
  if (status == CUBLAS_STATUS_SUCCESS) p->algorithm = found.algo;
  return status;
}

static int make_plan(pg_queue *q, const shape &s, plan *p) {
  const int32_t op_a = s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int32_t op_b = s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  TRY(cublasLtMatmulDescCreate(&p->product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  TRY(cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_TRANSA, &op_b, sizeof op_b));
  TRY(cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_TRANSB, &op_a, sizeof op_a));
  TRY(make_layout(&p->first, s.type_in, s.transpose_b ? s.n : s.k, s.transpose_b ? s.k : s.n, s.ldb,
                  s.batch, s.stride_b));
  TRY(make_layout(&p->second, s.type_in, s.transpose_a ? s.k : s.m, s.transpose_a ? s.m : s.k,
                  s.lda, s.batch, s.stride_a));
  TRY(make_layout(&p->result, s.type_out, s.m, s.n, s.ldc, s.batch, s.stride_c));
  cublasLtMatmulPreference_t preference;
  TRY(cublasLtMatmulPreferenceCreate(&preference));
  cublasStatus_t status = find_algorithm(q->products, s, preference, p);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS) return fail(q, "cublasLtMatmulAlgoGetHeuristic", s, status);
  return 0;
}

static int start(pg_queue *q, const shape &s) {
  if (!q->products && !(q->products = new (std::nothrow) pg_cuda_products()))
    return pg_cuda_refuse(q, "no host memory for cuBLASLt");
  if (!q->products->handle) TRY(cublasLtCreate(&q->products->handle));
  if (!q->products->workspace) return pg_cuda_take(q, PG_CUDA_WORKSPACE, &q->products->workspace);
  return 0;
}

/* C = beta D, which is all that is left of a product over k = 0. */
template <class T>
static __global__ void scale_matrix(const T *d, int64_t n, int64_t ldc, int64_t stride, float beta,
                                    T *c) {
  const int64_t row = blockIdx.y * stride + blockIdx.x * ldc;
  for (int64_t j = threadIdx.x; j < n; j += blockDim.x)
    pg_store(c + row + j, beta == 0 ? 0 : beta * pg_load(d + row + j));
}

/* The largest power of two up to 256 that divides the address and, in batches, the stride. */
static uint32_t alignment(const void *p, int64_t stride, pg_dtype type) {
  const uintptr_t bits =
      (uintptr_t)p | (uintptr_t)(stride * (type == PG_BF16 ? 2 : 4)) | (uintptr_t)256;
  return (uint32_t)(bits & (~bits + 1));
}

int pg_cuda_gemm(pg_queue *q, const pg_gemm *g) {
  const int64_t batch = g->batch > 1 ? g->batch : 1;
  const bool half = g->type_a == PG_BF16;
  const void *addend = g->addend ? g->addend : g->c;
  if (g->type_a != g->type_b || (!half && g->type_c != PG_F32))
    return pg_cuda_refuse(q, "a product of these types: A and B are both fp32 with C fp32, or both "
                             "bf16");
  for (int64_t side : {g->m, g->n, g->k, g->lda, g->ldb, g->ldc, batch})
    if (side > INT_MAX) return pg_cuda_refuse(q, "a matrix side exceeds %d", INT_MAX);
  if (g->m <= 0 || g->n <= 0) return 0;
  if (g->k <= 0) {
    PG_CUDA_TYPED(g->type_c, T,
                  PG_CUDA_LAUNCH(q, scale_matrix<T>, dim3((unsigned)g->m, (unsigned)batch),
                                 PG_CUDA_BLOCK, 0, (const T *)addend, g->n, g->ldc, g->stride_c,
                                 g->beta, (T *)g->c));
    return 0;
  }
  shape s;
  memset(&s, 0, sizeof s);
  s.m = g->m, s.n = g->n, s.k = g->k;
  s.lda = g->lda, s.ldb = g->ldb, s.ldc = g->ldc;
  s.batch = batch;
  if (batch > 1) s.stride_a = g->stride_a, s.stride_b = g->stride_b, s.stride_c = g->stride_c;
  s.transpose_a = g->transpose_a, s.transpose_b = g->transpose_b;
  s.type_in = g->type_a, s.type_out = g->type_c;
  s.align_a = alignment(g->a, s.stride_a, g->type_a);
  s.align_b = alignment(g->b, s.stride_b, g->type_b);
  s.align_c = alignment(g->c, s.stride_c, g->type_c);
  s.align_d = alignment(addend, s.stride_c, g->type_c);
  pg_cuda_enter(q);
  if (start(q, s) < 0) return -1;
  pg_cuda_products *products = q->products;
  plan *p = NULL;
  try {
    if (products->plans.size() >= MOST_PLANS && !products->plans.count(s)) forget_plans(products);
    p = &products->plans[s];
  } catch (const std::bad_alloc &) {
    return pg_cuda_refuse(q, "no host memory for a product's plan");
  }
  if (!p->product && make_plan(q, s, p) < 0) {
    free_plan(*p);
    return -1;
  }
  TRY(cublasLtMatmul(products->handle, p->product, &g->alpha, g->b, p->first, g->a, p->second,
                     &g->beta, addend, p->result, g->c, p->result, &p->algorithm,
                     products->workspace, PG_CUDA_WORKSPACE, q->stream));
  return pg_cuda_launched(q, "cublasLtMatmul", cudaSuccess);
}
