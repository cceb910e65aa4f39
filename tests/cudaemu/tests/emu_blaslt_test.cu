/* The emulated cuBLASLt against a plain loop in fp64: storage orders, transposes, padded leading
 * dimensions, batches, alpha and beta, fp32 and bf16, and its checks. */
#include "tests/cudaemu/tests/emu_unit.h"
#include <cmath>
#include <cstdint>
#include <cublasLt.h>
#include <cuda_bf16.h>

static unsigned state = 1;
static float next_value() {
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 16) / 32768.0f - 1.0f;
}

struct matrix { /* a batch of stored matrices with padding that has to stay NaN */
  int rows, columns, batch;
  bool by_rows, half;
  int64_t ld, stride;
  std::vector<float> host;
  void *device = nullptr;
  cublasLtMatrixLayout_t layout = nullptr;

  matrix(int r, int c, int n, bool row_order, bool bf16)
      : rows(r), columns(c), batch(n), by_rows(row_order), half(bf16) {
    ld = (by_rows ? columns : rows) + 3;
    stride = ld * (by_rows ? rows : columns) + 5;
    host.assign((size_t)(stride * batch), NAN);
    for (int b = 0; b < batch; b++)
      for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
          float v = next_value();
          at(b, i, j) = half ? __bfloat162float(__float2bfloat16(v)) : v;
        }
    cudaMalloc(&device, bytes());
    upload();
    int32_t order = by_rows ? CUBLASLT_ORDER_ROW : CUBLASLT_ORDER_COL;
    cublasLtMatrixLayoutCreate(&layout, half ? CUDA_R_16BF : CUDA_R_32F, (uint64_t)rows,
                               (uint64_t)columns, ld);
    cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof order);
    cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch,
                                     sizeof batch);
    cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                     sizeof stride);
  }
  ~matrix() {
    cublasLtMatrixLayoutDestroy(layout);
    cudaFree(device);
  }
  size_t bytes() const { return host.size() * (half ? 2 : 4); }
  float &at(int b, int i, int j) {
    return host[(size_t)(b * stride + (by_rows ? i * ld + j : j * ld + i))];
  }
  void upload() {
    if (!half) {
      cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice);
      return;
    }
    std::vector<__nv_bfloat16> packed;
    for (float v : host) packed.push_back(__float2bfloat16(v));
    cudaMemcpy(device, packed.data(), bytes(), cudaMemcpyHostToDevice);
  }
  void download() {
    cudaDeviceSynchronize();
    if (!half) {
      cudaMemcpy(host.data(), device, bytes(), cudaMemcpyDeviceToHost);
      return;
    }
    std::vector<__nv_bfloat16> packed(host.size());
    cudaMemcpy(packed.data(), device, bytes(), cudaMemcpyDeviceToHost);
    for (size_t i = 0; i < host.size(); i++) host[i] = __bfloat162float(packed[i]);
  }
};

struct multiplier {
  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t desc;
  cublasLtMatmulPreference_t preference;
  cublasLtMatmulHeuristicResult_t found;
  void *workspace;
  static constexpr size_t workspace_bytes = 4 << 20;
  multiplier(bool ta, bool tb, uint32_t alignment) {
    int32_t a = ta ? CUBLAS_OP_T : CUBLAS_OP_N, b = tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof a);
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof b);
    cublasLtMatmulPreferenceCreate(&preference);
    size_t most = workspace_bytes;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                         &most, sizeof most);
    for (int i = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
         i <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES; i++)
      cublasLtMatmulPreferenceSetAttribute(preference, (cublasLtMatmulPreferenceAttributes_t)i,
                                           &alignment, sizeof alignment);
    cudaMalloc(&workspace, workspace_bytes);
  }
  ~multiplier() {
    cudaFree(workspace);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatmulDescDestroy(desc);
    cublasLtDestroy(handle);
  }
  cublasStatus_t find(const matrix &a, const matrix &b, const matrix &c) {
    int n = 0;
    return cublasLtMatmulAlgoGetHeuristic(handle, desc, a.layout, b.layout, c.layout, c.layout,
                                          preference, 1, &found, &n);
  }
  /* The result goes to c; `addend`, another matrix or part of one, lies as c does. */
  cublasStatus_t run(const matrix &a, const matrix &b, const matrix &c, float alpha, float beta,
                     const char *a_pointer = nullptr, const void *addend = nullptr) {
    const void *at = a_pointer ? a_pointer : a.device;
    return cublasLtMatmul(handle, desc, &alpha, at, a.layout, b.device, b.layout, &beta,
                          addend ? addend : c.device, c.layout, c.device, c.layout, &found.algo,
                          workspace, workspace_bytes, nullptr);
  }
};

static void compare(unsigned bits, bool half_in, bool half_out) {
  const int m = 13, n = 7, k = 29, batch = 3;
  bool ta = bits & 1, tb = bits & 2, by_rows_ab = bits & 4, by_rows_c = bits & 8;
  float alpha = 0.75f, beta = bits & 16 ? 0.5f : 0.0f;
  const bool apart = bits & 32;
  matrix a(ta ? k : m, ta ? m : k, batch, by_rows_ab, half_in);
  matrix b(tb ? n : k, tb ? k : n, batch, by_rows_ab, half_in);
  matrix c(m, n, batch, by_rows_c, half_out);
  matrix d(m, n, batch, by_rows_c, half_out);
  std::vector<float> before = apart ? d.host : c.host;
  if (beta == 0 || apart) c.host.assign(c.host.size(), NAN), c.upload();
  multiplier with(ta, tb, 16);
  CHECK(with.find(a, b, c) == CUBLAS_STATUS_SUCCESS, "heuristic");
  CHECK(with.run(a, b, c, alpha, beta, nullptr, apart ? d.device : nullptr) ==
            CUBLAS_STATUS_SUCCESS,
        "matmul");
  c.download();
  size_t numbers = 0;
  for (float v : c.host) numbers += !std::isnan(v);
  CHECK(numbers == (size_t)m * n * batch, "%zu elements written", numbers);
  for (int l = 0; l < batch; l++)
    for (int i = 0; i < m; i++)
      for (int j = 0; j < n; j++) {
        double sum = 0, size = 0;
        for (int q = 0; q < k; q++) {
          double p = (double)(ta ? a.at(l, q, i) : a.at(l, i, q)) *
                     (double)(tb ? b.at(l, j, q) : b.at(l, q, j));
          sum += p, size += fabs(p);
        }
        double got = c.at(l, i, j);
        double old = before[(size_t)(&c.at(l, i, j) - c.host.data())];
        double want = alpha * sum + beta * old;
        /* k + 3 roundings of fp32 on the terms, and half a bf16 ulp on the result. */
        double bar = (k + 3) * 6e-8 * (alpha * size + fabs(beta * old)) +
                     (half_out ? 0x1p-8 * fabs(want) : 0);
        CHECK(fabs(got - want) <= bar, "case %u, (%d,%d,%d): %g, want %g", bits, l, i, j, got,
              want);
      }
}
TEST(products_against_a_plain_loop) {
  for (unsigned bits = 0; bits < 64; bits++) {
    compare(bits, false, false);
    compare(bits, true, false);
    compare(bits, true, true);
  }
}

TEST(limits_are_checked) {
  matrix a(8, 8, 1, true, false), b(8, 8, 1, true, false), c(8, 8, 1, true, false);
  matrix narrow(8, 5, 1, true, false), half(8, 8, 1, true, true);
  multiplier strict(false, false, 256), loose(false, false, 4);
  CHECK(strict.find(a, narrow, c) == CUBLAS_STATUS_INVALID_VALUE, "shapes that do not fit");
  CHECK(strict.find(a, half, c) == CUBLAS_STATUS_NOT_SUPPORTED, "mixed operand types");
  CHECK(strict.find(a, b, c) == CUBLAS_STATUS_SUCCESS && strict.found.workspaceSize, "workspace");
  const char *second = (const char *)a.device + 16;
  CHECK_REPORT(strict.run(a, b, c, 1, 0, second), "matrix A");
  CHECK(loose.find(a, b, c) == CUBLAS_STATUS_SUCCESS, "loose");
  CHECK_REPORT(loose.run(a, b, c, 1, 0, (const char *)a.device + 64), "bytes at offset 64 of");
  CHECK_REPORT(loose.run(a, b, c, 1, 0, (const char *)a.host.data()), "is host or freed memory");
  CHECK_REPORT(loose.run(a, a, a, 1, 0), "overlaps an operand");
  CHECK_REPORT(loose.run(a, b, c, 1, 1, nullptr, (const char *)a.device + 64),
               "bytes at offset 64");
  CHECK_REPORT(loose.run(a, narrow, narrow, 1, 0), "found for other shapes");
}

int main() {
  RUN(products_against_a_plain_loop);
  RUN(limits_are_checked);
  return unit_report();
}
