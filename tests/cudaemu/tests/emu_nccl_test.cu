/* Collectives between processes: results, groups, a rank that is late or missing, and different
 * calls on different ranks. Every rank is a child process. */
#include "tests/cudaemu/tests/emu_unit.h"
#include <cmath>
#include <cuda_bf16.h>
#include <nccl.h>

/* Runs body(rank, id) in `ranks` processes; the exit status of each. */
template <class F>
static std::vector<int> on_ranks(int ranks, F body, std::vector<std::string> *said = nullptr) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  std::vector<pid_t> children;
  std::vector<int> status, pipes;
  fflush(stdout);
  for (int rank = 0; rank < ranks; rank++) {
    int ends[2];
    if (pipe(ends)) return status;
    children.push_back(fork());
    if (children.back() == 0) {
      if (said) dup2(ends[1], 2);
      unit_bad = 0;
      body(rank, id);
      fflush(stdout);
      _exit(unit_bad ? 1 : 0);
    }
    close(ends[1]);
    pipes.push_back(ends[0]);
  }
  for (size_t i = 0; i < children.size(); i++) {
    int s;
    char buffer[1024];
    ssize_t n;
    if (said) said->push_back("");
    while ((n = read(pipes[i], buffer, sizeof buffer)) > 0)
      if (said) said->back().append(buffer, (size_t)n);
    close(pipes[i]);
    waitpid(children[i], &s, 0);
    status.push_back(WIFEXITED(s) ? WEXITSTATUS(s) : 128);
  }
  return status;
}
#define CHECK_NCCL(call)                                                                           \
  do {                                                                                             \
    ncclResult_t r_ = (call);                                                                      \
    CHECK(r_ == ncclSuccess, "%s", ncclGetErrorString(r_));                                        \
  } while (0)

/* Integers small enough that sums are exact in every order. */
static float value(int rank, size_t i) {
  return (float)((i * 7 + (size_t)rank * 13) % 101);
}
static void collectives(int rank, int ranks, ncclUniqueId id, size_t n) {
  ncclComm_t comm;
  cudaStream_t s;
  CHECK_NCCL(ncclCommInitRank(&comm, ranks, id, rank));
  CHECK_CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  std::vector<float> mine;
  for (size_t i = 0; i < n * (size_t)ranks; i++) mine.push_back(value(rank, i));
  device_array<float> send(mine), all(mine), part(n), gathered(n * (size_t)ranks), one(n);
  CHECK_NCCL(ncclAllReduce(all.p, all.p, all.n, ncclFloat, ncclSum, comm, s));
  CHECK_NCCL(ncclGroupStart());
  CHECK_NCCL(ncclReduceScatter(send.p, part.p, n, ncclFloat, ncclMax, comm, s));
  CHECK_NCCL(ncclAllGather(part.p, gathered.p, n, ncclFloat, comm, s));
  CHECK_NCCL(ncclGroupEnd());
  CHECK_NCCL(ncclBroadcast(send.p, one.p, n, ncclFloat, ranks - 1, comm, s));
  CHECK_CUDA(cudaStreamSynchronize(s));
  std::vector<float> sums = all.host(), most = gathered.host(), last = one.host();
  size_t wrong = 0;
  for (size_t i = 0; i < sums.size(); i++) {
    float sum = 0, largest = 0;
    for (int r = 0; r < ranks; r++) sum += value(r, i), largest = fmaxf(largest, value(r, i));
    wrong += sums[i] != sum || most[i] != largest || (i < n && last[i] != value(ranks - 1, i));
  }
  CHECK(wrong == 0, "rank %d: %zu of %zu elements", rank, wrong, sums.size());
  CHECK_NCCL(ncclCommDestroy(comm));
  cudaStreamDestroy(s);
}
TEST(collectives_over_processes) {
  for (int ranks : {1, 2, 3})
    for (size_t n : {(size_t)1, (size_t)1000, (size_t)100003}) {
      std::vector<int> status =
          on_ranks(ranks, [&](int rank, ncclUniqueId id) { collectives(rank, ranks, id, n); });
      for (int s : status) CHECK(s == 0, "%d ranks, %zu elements: status %d", ranks, n, s);
    }
}

TEST(two_communicators_of_one_process) {
  environment e("CUDAEMU_DEVICES", "2");
  ncclUniqueId id;
  ncclComm_t comm[2];
  CHECK_NCCL(ncclGetUniqueId(&id));
  CHECK_NCCL(ncclGroupStart());
  for (int r = 0; r < 2; r++) {
    cudaSetDevice(r);
    CHECK_NCCL(ncclCommInitRank(&comm[r], 2, id, r));
  }
  CHECK_NCCL(ncclGroupEnd());
  void *p[2];
  __nv_bfloat16 x[2] = {__float2bfloat16(1.5f), __float2bfloat16(2.0f)}, got[2];
  for (int r = 0; r < 2; r++) {
    cudaSetDevice(r);
    cudaMalloc(&p[r], 4);
    cudaMemcpy(p[r], x, 4, cudaMemcpyHostToDevice);
    CHECK_NCCL(ncclAllReduce(p[r], p[r], 2, ncclBfloat16, ncclSum, comm[r], nullptr));
  }
  for (int r = 0; r < 2; r++) {
    cudaSetDevice(r);
    CHECK_CUDA(cudaDeviceSynchronize());
    cudaMemcpy(got, p[r], 4, cudaMemcpyDeviceToHost);
    CHECK(__bfloat162float(got[0]) == 3 && __bfloat162float(got[1]) == 4, "device %d", r);
    cudaFree(p[r]);
    ncclCommDestroy(comm[r]);
  }
  cudaSetDevice(0);
}

TEST(different_calls_are_reported) {
  std::vector<std::string> said;
  std::vector<int> status = on_ranks(
      2,
      [](int rank, ncclUniqueId id) {
        ncclComm_t comm;
        ncclCommInitRank(&comm, 2, id, rank);
        device_array<float> x(8, 0);
        ncclAllReduce(x.p, x.p, rank ? 7 : 8, ncclFloat, ncclSum, comm, nullptr);
        cudaDeviceSynchronize();
      },
      &said);
  for (size_t r = 0; r < 2; r++)
    CHECK(status[r] == 86 && said[r].find("ranks of a communicator disagree") != said[r].npos &&
              said[r].find("7 elements") != said[r].npos,
          "rank %zu: status %d: %s", r, status[r], said[r].c_str());
}

/* A wait for a missing rank ends with a report; a watchdog that polls can abort before. */
TEST(a_missing_rank) {
  environment e("CUDAEMU_NCCL_TIMEOUT", "0.3");
  std::vector<std::string> said;
  std::vector<int> status = on_ranks(
      2,
      [](int rank, ncclUniqueId id) {
        ncclComm_t comm;
        ncclCommInitRank(&comm, 2, id, rank);
        device_array<float> x(8, 0);
        if (rank) return;
        ncclAllReduce(x.p, x.p, 8, ncclFloat, ncclSum, comm, nullptr);
        cudaDeviceSynchronize();
      },
      &said);
  CHECK(status[0] == 86 && said[0].find("ncclAllReduce waited 0.3 seconds") != said[0].npos,
        "status %d: %s", status[0], said[0].c_str());
  status = on_ranks(2, [](int rank, ncclUniqueId id) {
    ncclComm_t comm;
    CHECK_NCCL(ncclCommInitRank(&comm, 2, id, rank));
    device_array<float> x(8, 0);
    if (rank) return;
    CHECK_NCCL(ncclAllReduce(x.p, x.p, 8, ncclFloat, ncclSum, comm, nullptr));
    for (int i = 0; i < 20; i++) {
      CHECK(cudaStreamQuery(nullptr) == cudaErrorNotReady, "without its peer");
      usleep(1000);
    }
    CHECK_NCCL(ncclCommAbort(comm));
    CHECK_CUDA(cudaDeviceSynchronize());
    ncclCommDestroy(comm);
  });
  CHECK(status[0] == 0 && status[1] == 0, "abort: %d %d", status[0], status[1]);
  ncclUniqueId id;
  ncclComm_t comm;
  ncclGetUniqueId(&id);
  CHECK(ncclCommInitRank(&comm, 2, id, 0) == ncclSystemError, "alone");
}

int main() {
  RUN(collectives_over_processes);
  RUN(two_communicators_of_one_process);
  RUN(different_calls_are_reported);
  RUN(a_missing_rank);
  return unit_report();
}
