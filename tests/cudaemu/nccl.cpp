/* NCCL between processes (or communicators of one process) over shared memory. A collective is cut
 * into chunks. Every rank copies chunk c of its data into its own slot c % 2 and counts it as
 * written; when all ranks have written chunk c, each reads the others' slots, in rank order, so
 * that all get the same bits, and counts it as read. A slot is written again when all have read it.
 * Each slot also says which call it belongs to: different calls on different ranks, which hang on
 * GPUs, are reported. A call never blocks: it is work on a stream that finds its peers absent and
 * is tried again. */
#include "cudaemu.h"
#include "emu.h"
#include <atomic>
#include <cstdio>
#include <cuda_bf16.h>
#include <ctime>
#include <fcntl.h>
#include <memory>
#include <nccl.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

using namespace emu;

enum { MAX_RANKS = 64, CHUNK = 256 << 10, SLOTS = 2 };
enum collective { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST };
static const char *const names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                    "ncclBroadcast"};

struct call {
  int kind, type, op, root;
  uint64_t count, number; /* elements in the caller's terms; the communicator's n-th collective */
  bool operator==(const call &o) const {
    return kind == o.kind && type == o.type && op == o.op && root == o.root && count == o.count &&
           number == o.number;
  }
};
struct peer {
  std::atomic<uint64_t> written, read; /* chunks */
  call of[SLOTS];
};
struct shared { /* zero when created */
  std::atomic<int> ranks, joined, gone;
  peer peers[MAX_RANKS];
};

struct ncclComm {
  shared *memory;
  char *slots; /* [ranks][SLOTS][CHUNK] */
  size_t bytes;
  std::string name;
  int rank, ranks, device;
  uint64_t calls, finished, chunk;
  std::atomic<bool> aborted;
};

static size_t type_bytes(int type) {
  switch (type) {
  case ncclInt8:
  case ncclUint8: return 1;
  case ncclBfloat16: return 2;
  case ncclInt32:
  case ncclUint32:
  case ncclFloat32: return 4;
  case ncclInt64:
  case ncclUint64:
  case ncclFloat64: return 8;
  default: return 0;
  }
}

static std::string describe(const call &c) {
  char text[160];
  snprintf(text, sizeof text, "%s of %zu elements of type %d (operation %d, root %d), call %zu",
           names[c.kind], (size_t)c.count, c.type, c.op, c.root, (size_t)c.number);
  return text;
}

/* ---- reduction in rank order ----------------------------------------------------------------- */
template <class T> static T join(int op, T a, T b) {
  if (op == ncclProd) return (T)(a * b);
  if (op == ncclMax) return a < b ? b : a;
  if (op == ncclMin) return b < a ? b : a;
  return (T)(a + b);
}
template <class T, class In, class Out>
static void reduce(void *out, const std::vector<const char *> &from, size_t first, size_t n, int op,
                   In in, Out to) {
  for (size_t i = 0; i < n; i++) {
    T sum = in(from[0], first + i);
    for (size_t r = 1; r < from.size(); r++) sum = join<T>(op, sum, in(from[r], first + i));
    if (op == ncclAvg) sum = (T)(sum / (T)from.size());
    to(out, i, sum);
  }
}
template <class T>
static void reduce_plain(void *out, const std::vector<const char *> &from, size_t first, size_t n,
                         int op) {
  reduce<T>(
      out, from, first, n, op, [](const char *p, size_t i) { return ((const T *)p)[i]; },
      [](void *p, size_t i, T v) { ((T *)p)[i] = v; });
}
static void reduce_any(int type, void *out, const std::vector<const char *> &from, size_t first,
                       size_t n, int op) {
  switch (type) {
  case ncclFloat32: reduce_plain<float>(out, from, first, n, op); break;
  case ncclFloat64: reduce_plain<double>(out, from, first, n, op); break;
  case ncclInt32: reduce_plain<int32_t>(out, from, first, n, op); break;
  case ncclUint32: reduce_plain<uint32_t>(out, from, first, n, op); break;
  case ncclInt64: reduce_plain<int64_t>(out, from, first, n, op); break;
  case ncclUint64: reduce_plain<uint64_t>(out, from, first, n, op); break;
  case ncclInt8: reduce_plain<int8_t>(out, from, first, n, op); break;
  case ncclUint8: reduce_plain<uint8_t>(out, from, first, n, op); break;
  default:
    reduce<float>(
        out, from, first, n, op,
        [](const char *p, size_t i) { return __bfloat162float(((const __nv_bfloat16 *)p)[i]); },
        [](void *p, size_t i, float v) { ((__nv_bfloat16 *)p)[i] = __float2bfloat16(v); });
  }
}

/* ---- progress
 * ------------------------------------------------------------------------------------ */
struct progress {
  ncclComm *comm;
  call what;
  const char *send;
  char *receive;
  uint64_t done; /* elements */
  bool sent;     /* the current chunk */
};

static char *slot(const ncclComm *c, int rank, uint64_t chunk) {
  return c->slots + ((size_t)rank * SLOTS + chunk % SLOTS) * CHUNK;
}

static bool all_peers(const ncclComm *c, std::atomic<uint64_t> peer::*counter, uint64_t least) {
  for (int r = 0; r < c->ranks; r++)
    if ((c->memory->peers[r].*counter).load(std::memory_order_acquire) < least) return false;
  return true;
}

static void take_chunk(progress &p, size_t n) {
  const ncclComm *c = p.comm;
  const size_t bytes = type_bytes(p.what.type), count = (size_t)p.what.count;
  std::vector<const char *> from;
  for (int r = 0; r < c->ranks; r++) from.push_back(slot(c, r, c->chunk));
  if (p.what.kind == ALL_REDUCE) {
    reduce_any(p.what.type, p.receive + p.done * bytes, from, 0, n, p.what.op);
  } else if (p.what.kind == REDUCE_SCATTER) { /* the part of the chunk that is ours */
    size_t begin = std::max((size_t)p.done, (size_t)c->rank * count);
    size_t end = std::min((size_t)p.done + n, ((size_t)c->rank + 1) * count);
    if (begin < end)
      reduce_any(p.what.type, p.receive + (begin - (size_t)c->rank * count) * bytes, from,
                 begin - (size_t)p.done, end - begin, p.what.op);
  } else if (p.what.kind == ALL_GATHER) {
    for (size_t r = 0; r < from.size(); r++)
      memcpy(p.receive + (r * count + p.done) * bytes, from[r], n * bytes);
  } else {
    memcpy(p.receive + p.done * bytes, from[(size_t)p.what.root], n * bytes);
  }
}

/* False when a peer is late. */
static bool run(progress &p) {
  ncclComm *c = p.comm;
  peer *me = &c->memory->peers[c->rank];
  const size_t bytes = type_bytes(p.what.type), most = CHUNK / bytes;
  const uint64_t total =
      p.what.kind == REDUCE_SCATTER ? p.what.count * (uint64_t)c->ranks : p.what.count;
  if (p.what.number != c->finished && !c->aborted) return false; /* on another stream, earlier */
  while (p.done < total) {
    if (c->aborted) return true;
    size_t n = (size_t)std::min<uint64_t>(total - p.done, most);
    if (!p.sent) {
      if (c->chunk >= SLOTS && !all_peers(c, &peer::read, c->chunk - SLOTS + 1)) return false;
      if (p.what.kind != BROADCAST || p.what.root == c->rank)
        memcpy(slot(c, c->rank, c->chunk), p.send + p.done * bytes, n * bytes);
      me->of[c->chunk % SLOTS] = p.what;
      me->written.store(c->chunk + 1, std::memory_order_release);
      p.sent = true;
    }
    if (!all_peers(c, &peer::written, c->chunk + 1)) return false;
    for (int r = 0; r < c->ranks; r++)
      if (!(c->memory->peers[r].of[c->chunk % SLOTS] == p.what))
        cudaemu_die("ranks of a communicator disagree:\n  rank %d: %s\n  rank %d: %s", c->rank,
                    describe(p.what).c_str(), r,
                    describe(c->memory->peers[r].of[c->chunk % SLOTS]).c_str());
    take_chunk(p, n);
    me->read.store(++c->chunk, std::memory_order_release);
    p.done += n;
    p.sent = false;
  }
  c->finished++;
  return true;
}

/* ---- groups: calls between ncclGroupStart and ncclGroupEnd are queued at its end ---------------
 */
struct deferred {
  cudaStream_t stream;
  int device;
  progress state;
};
static thread_local int depth;
static thread_local std::vector<deferred> *group;
static thread_local std::vector<ncclComm *> *joining;

static ncclResult_t submit(const deferred &d) {
  auto state = std::make_shared<progress>(d.state);
  const int before = device;
  device = d.device;
  cudaError_t error = enqueue(d.stream, names[d.state.what.kind], [state] {
    device_access open;
    return run(*state);
  });
  device = before;
  return error ? ncclUnhandledCudaError : ncclSuccess;
}

#define ENTER(name)                                                                                \
  std::lock_guard<std::recursive_mutex> hold(lock);                                                \
  if (enter(name, cudaErrorUnknown)) return ncclUnhandledCudaError

static ncclResult_t collect(int kind, const void *send, void *receive, size_t count, int type,
                            int op, int root, ncclComm_t c, cudaStream_t stream) {
  ENTER(names[kind]);
  if (!c || !type_bytes(type) || root < 0 || root >= c->ranks || op > ncclAvg)
    return ncclInvalidArgument;
  if (c->device != device) return ncclInvalidUsage;
  size_t bytes = count * type_bytes(type), all = bytes * (size_t)c->ranks;
  if (kind != BROADCAST || root == c->rank)
    require_device(send, kind == REDUCE_SCATTER ? all : bytes, names[kind]);
  require_device(receive, kind == ALL_GATHER ? all : bytes, names[kind]);
  call what = {kind, type, op, root, count, c->calls++};
  deferred d = {stream, device, {c, what, (const char *)send, (char *)receive, 0, false}};
  if (!depth) return submit(d);
  if (!group) group = new std::vector<deferred>;
  group->push_back(d);
  return ncclSuccess;
}

static ncclResult_t await_peers(ncclComm *c) {
  const double begin = seconds();
  while (c->memory->joined < c->ranks && !c->aborted) {
    if (seconds() - begin > set().nccl_timeout) {
      shm_unlink(c->name.c_str());
      return ncclSystemError;
    }
    usleep(200);
  }
  shm_unlink(c->name.c_str()); /* all have it mapped */
  return ncclSuccess;
}

extern "C" {

ncclResult_t ncclGetVersion(int *version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static unsigned serial;
  ENTER("ncclGetUniqueId");
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/perigee-nccl-%ld-%ld-%u-%lx", (long)getpid(),
           (long)t.tv_sec, serial++, (long)t.tv_nsec);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id, int rank) {
  {
    ENTER("ncclCommInitRank");
    if (ranks < 1 || ranks > MAX_RANKS || rank < 0 || rank >= ranks) return ncclInvalidArgument;
    auto *c = new ncclComm{};
    c->name.assign(id.internal, strnlen(id.internal, sizeof id.internal));
    c->rank = rank, c->ranks = ranks, c->device = device;
    size_t head = (sizeof(shared) + 4095) / 4096 * 4096;
    c->bytes = head + (size_t)ranks * SLOTS * CHUNK;
    int file = shm_open(c->name.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, (off_t)c->bytes) != 0) return delete c, ncclSystemError;
    void *map = mmap(nullptr, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (map == MAP_FAILED) return delete c, ncclSystemError;
    c->memory = (shared *)map;
    c->slots = (char *)map + head;
    int none = 0;
    if (!c->memory->ranks.compare_exchange_strong(none, ranks) && none != ranks)
      cudaemu_die("ncclCommInitRank: rank %d says %d ranks, another says %d", rank, ranks, none);
    c->memory->joined++;
    *out = c;
    if (depth) {
      if (!joining) joining = new std::vector<ncclComm *>;
      joining->push_back(c);
      return ncclSuccess;
    }
  }
  ncclResult_t result = await_peers(*out);
  if (result != ncclSuccess) {
    munmap((*out)->memory, (*out)->bytes);
    delete *out;
    *out = nullptr;
  }
  return result;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *) {
  return ncclCommInitRank(out, ranks, id, rank);
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t c) { /* its queued work finishes without its peers */
  if (!c) return ncclInvalidArgument;
  c->aborted = true;
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t c) {
  std::lock_guard<std::recursive_mutex> hold(lock);
  if (!c) return ncclSuccess;
  if (!c->aborted && wait_device(c->device)) return ncclUnhandledCudaError;
  munmap(c->memory, c->bytes);
  delete c;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error) {
  *error = c->aborted ? ncclInternalError : ncclSuccess;
  if (injected("ncclCommGetAsyncError")) *error = ncclRemoteError;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t c, int *ranks) {
  *ranks = c->ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank) {
  *rank = c->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t c, int *which) {
  *which = c->device;
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  return collect(ALL_REDUCE, send, receive, count, type, op, 0, c, s);
}
ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  return collect(REDUCE_SCATTER, send, receive, count, type, op, 0, c, s);
}
ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclComm_t c, cudaStream_t s) {
  return collect(ALL_GATHER, send, receive, count, type, 0, 0, c, s);
}
ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t c, cudaStream_t s) {
  return collect(BROADCAST, send, receive, count, type, 0, root, c, s);
}
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t c,
                       cudaStream_t s) {
  return collect(BROADCAST, buffer, buffer, count, type, 0, root, c, s);
}

ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (!depth) return ncclInvalidUsage;
  if (--depth) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  if (joining)
    for (ncclComm *c : *joining)
      if (result == ncclSuccess) result = await_peers(c);
  std::lock_guard<std::recursive_mutex> hold(lock);
  if (group) trace("ncclGroupEnd", (long long)group->size());
  if (group)
    for (const deferred &d : *group)
      if (result == ncclSuccess) result = submit(d);
  delete joining;
  delete group;
  joining = nullptr, group = nullptr;
  return result;
}

const char *ncclGetErrorString(ncclResult_t result) {
  static const char *const texts[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a network error",
                                      "operation in progress"};
  return (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}
const char *ncclGetLastError(ncclComm_t) {
  return "";
}
}
