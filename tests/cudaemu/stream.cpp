/* Streams and events. Work carries increasing sequence numbers over the whole process; running a
 * stream up to a number runs first what that work waits for, which always has lower numbers. Eager
 * streams run at once as far as they can (work that waits for another rank stays queued), lazy ones
 * only for somebody who waits: a query runs one piece of work after it has answered. Random ones
 * are lazy, but after each piece that is queued a few run, the first of any stream: so work on two
 * streams comes in every order that events leave open. */
#include "cudaemu.h"
#include "emu.h"
#include <deque>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

namespace emu {

struct work {
  uint64_t sequence;
  std::string name;
  std::function<bool()> run;
  stream *after; /* with after_sequence: what an event stands for */
  uint64_t after_sequence;
};
struct stream {
  int device;
  bool null, blocking, destroyed;
  std::deque<work> pending;
  uint64_t last;
};
struct event {
  stream *of;
  uint64_t sequence;
  double time; /* ms */
  bool timed, destroyed;
};

static uint64_t sequence;
/* Never freed: events and the end of the process may still name them. */
static std::vector<stream *> &streams() {
  static auto *list = new std::vector<stream *>;
  return *list;
}
static std::vector<event *> &events() {
  static auto *list = new std::vector<event *>;
  return *list;
}

static stream *null_stream(int which) {
  for (stream *s : streams())
    if (s->null && s->device == which) return s;
  streams().push_back(new stream{which, true, true, false, {}, 0});
  return streams().back();
}

stream *get_stream(cudaStream_t handle) {
  if (!handle || handle == cudaStreamLegacy) return null_stream(device);
  for (stream *s : streams())
    if ((cudaStream_t)s == handle && !s->null && !s->destroyed) return s;
  return nullptr;
}

static event *get_event(cudaEvent_t handle) {
  for (event *e : events())
    if ((cudaEvent_t)e == handle && !e->destroyed) return e;
  return nullptr;
}

bool advance(stream *s, uint64_t upto) {
  if (s->pending.empty() || s->pending.front().sequence > upto) return true;
  device_access open; /* once for all that runs now: it costs a system call per allocation */
  while (!s->pending.empty() && s->pending.front().sequence <= upto) {
    work &w = s->pending.front();
    if (s->blocking) /* the legacy rule: the null stream and the others wait for each other */
      for (size_t i = 0; i < streams().size(); i++) {
        stream *t = streams()[i];
        if (t != s && t->device == s->device && t->blocking && (s->null || t->null) &&
            !advance(t, w.sequence))
          return false;
      }
    if (w.after && !advance(w.after, w.after_sequence)) return false;
    if (sticky == cudaSuccess) {
      if (injected("execute"))
        sticky = cudaErrorIllegalAddress;
      else if (!w.run())
        return false;
    }
    s->pending.pop_front();
  }
  return true;
}

/* None, one, two, ... pieces, one on average. */
static void run_some() {
  for (uint64_t bits = random_bits(); bits & 1; bits = random_bits()) {
    std::vector<stream *> busy;
    for (stream *s : streams())
      if (!s->pending.empty()) busy.push_back(s);
    if (busy.empty()) return;
    stream *s = busy[(bits >> 1) % busy.size()];
    advance(s, s->pending.front().sequence);
  }
}

static cudaError_t append(stream *s, work w) {
  s->pending.push_back(std::move(w));
  s->last = s->pending.back().sequence = ++sequence;
  if (!set().lazy) advance(s, s->last);
  if (set().shuffled) run_some();
  return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t handle, const char *name, std::function<bool()> run) {
  stream *s = get_stream(handle);
  if (!s || s->device != device) return fail(cudaErrorInvalidResourceHandle);
  return append(s, {0, name, std::move(run), nullptr, 0});
}

/* Waits for other ranks without the lock, so that another thread can abort their communicator. The
 * other rank may be a stream of this process: while one is held up, all move. */
static cudaError_t wait_upto(stream *s, uint64_t upto) {
  const double begin = seconds();
  if (!s->pending.empty() && s->pending.front().sequence <= upto) trace("wait");
  while (!advance(s, upto)) {
    if (seconds() - begin > set().nccl_timeout)
      cudaemu_die("%s waited %g seconds for another rank", s->pending.front().name.c_str(),
                  set().nccl_timeout);
    for (size_t i = 0; i < streams().size(); i++) advance(streams()[i], streams()[i]->last);
    lock.unlock();
    usleep(50);
    lock.lock();
  }
  return sticky != cudaSuccess ? fail(sticky) : cudaSuccess;
}

cudaError_t wait_stream(stream *s) {
  return wait_upto(s, s->last);
}

cudaError_t wait_device(int which) {
  cudaError_t error = cudaSuccess;
  for (size_t i = 0; i < streams().size(); i++)
    if (streams()[i]->device == which && !error) error = wait_stream(streams()[i]);
  return error;
}

static cudaError_t query(stream *s, uint64_t upto) {
  if (!s->pending.empty() && !set().lazy) advance(s, upto);
  if (s->pending.empty() || s->pending.front().sequence > upto)
    return sticky != cudaSuccess ? fail(sticky) : cudaSuccess;
  if (set().lazy) advance(s, s->pending.front().sequence);
  return cudaErrorNotReady;
}

} // namespace emu

using namespace emu;
#define ENTER(name, error)                                                                         \
  std::lock_guard<std::recursive_mutex> hold(lock);                                                \
  if (cudaError_t e_ = enter(name, error)) return e_
#define STREAM(s, handle)                                                                          \
  stream *s = get_stream(handle);                                                                  \
  if (!s) return fail(cudaErrorInvalidResourceHandle)
#define EVENT(e, handle)                                                                           \
  event *e = get_event(handle);                                                                    \
  if (!e) return fail(cudaErrorInvalidResourceHandle)

cudaError_t cudaemu_launch(const char *text, dim3 grid, dim3 block, size_t smem,
                           cudaStream_t handle, cudaemu_body *body,
                           const cudaemu_argument *arguments, int count) {
  std::shared_ptr<cudaemu_body> owned(body);
  ENTER("launch", cudaErrorLaunchFailure);
  const char *kernel = text + (text[0] == '('); /* without template arguments */
  if (injected(std::string(kernel, strcspn(kernel, "<,)")).c_str()))
    return fail(cudaErrorLaunchFailure);
  const uint64_t threads = (uint64_t)block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 ||
      !threads || block.x > 1024 || block.y > 1024 || block.z > 64 || threads > 1024)
    return fail(cudaErrorInvalidConfiguration);
  if (smem > set().shared) return fail(cudaErrorInvalidValue);
  check_arguments(text, arguments, count);
  return enqueue(handle, text, [=] {
    device_access open;
    kernel_text = text;
    run_grid({text, grid, block, smem, owned.get()});
    check_slack();
    return true;
  });
}

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int) {
  ENTER("cudaStreamCreate", cudaErrorMemoryAllocation);
  trace("cudaStreamCreate");
  streams().push_back(new stream{device, false, flags != cudaStreamNonBlocking, false, {}, 0});
  *out = (cudaStream_t)streams().back();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *out) {
  return cudaStreamCreateWithPriority(out, cudaStreamDefault, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  ENTER("cudaStreamDestroy", cudaErrorUnknown);
  STREAM(s, handle);
  if (s->null) return fail(cudaErrorInvalidResourceHandle);
  cudaError_t error = wait_stream(s);
  s->destroyed = true;
  return error;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  ENTER("cudaStreamSynchronize", cudaErrorUnknown);
  STREAM(s, handle);
  return skipped("cudaStreamSynchronize") ? cudaSuccess : wait_stream(s);
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ENTER("cudaStreamQuery", cudaErrorUnknown);
  STREAM(s, handle);
  return query(s, s->last);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  ENTER("cudaStreamWaitEvent", cudaErrorUnknown);
  STREAM(s, handle);
  EVENT(e, event_handle);
  if (!e->of || skipped("cudaStreamWaitEvent")) return cudaSuccess;
  return append(s, {0, "cudaStreamWaitEvent", [] { return true; }, e->of, e->sequence});
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  ENTER("cudaDeviceGetStreamPriorityRange", cudaErrorUnknown);
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ENTER("cudaDeviceSynchronize", cudaErrorUnknown);
  return wait_device(device);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *data) {
  ENTER("cudaLaunchHostFunc", cudaErrorUnknown);
  return enqueue(handle, "cudaLaunchHostFunc", [=] { return function(data), true; });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  ENTER("cudaEventCreate", cudaErrorMemoryAllocation);
  trace("cudaEventCreate");
  events().push_back(new event{nullptr, 0, 0, !(flags & cudaEventDisableTiming), false});
  *out = (cudaEvent_t)events().back();
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *out) {
  return cudaEventCreateWithFlags(out, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  ENTER("cudaEventDestroy", cudaErrorUnknown);
  EVENT(e, handle);
  e->destroyed = true;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  ENTER("cudaEventRecord", cudaErrorUnknown);
  STREAM(s, stream_handle);
  EVENT(e, handle);
  e->of = s;
  e->sequence = sequence + 1; /* what append gives */
  return append(s, {0, "cudaEventRecord",
                    [=] {
                      e->time = seconds() * 1e3;
                      return true;
                    },
                    nullptr, 0});
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  ENTER("cudaEventSynchronize", cudaErrorUnknown);
  EVENT(e, handle);
  if (!e->of || skipped("cudaEventSynchronize")) return cudaSuccess;
  return wait_upto(e->of, e->sequence);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  ENTER("cudaEventQuery", cudaErrorUnknown);
  EVENT(e, handle);
  return e->of ? query(e->of, e->sequence) : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *out, cudaEvent_t first, cudaEvent_t second) {
  ENTER("cudaEventElapsedTime", cudaErrorUnknown);
  EVENT(a, first);
  EVENT(b, second);
  if (!a->timed || !b->timed || !a->of || !b->of) return fail(cudaErrorInvalidResourceHandle);
  for (event *e : {a, b})
    if (!e->of->pending.empty() && e->of->pending.front().sequence <= e->sequence)
      return cudaErrorNotReady;
  *out = (float)(b->time - a->time);
  return cudaSuccess;
}
}
