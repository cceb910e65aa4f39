/* Fibers: a stack each and a switch between them that saves what a call preserves. ucontext would
 * make a system call per switch. The sanitizers are told of every switch; under TSan each fiber is
 * a thread of its own, and switching orders nothing. */
#include "emu.h"
#include <new>
#include <sys/mman.h>
#include <unistd.h>

extern "C" void cudaemu_switch(void **save, void *load);
#if defined(__x86_64__)
__asm__(".text\n.globl cudaemu_switch\n.hidden cudaemu_switch\n"
        ".type cudaemu_switch,@function\ncudaemu_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp,(%rdi)\n  movq %rsi,%rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n"
        ".size cudaemu_switch,.-cudaemu_switch\n");
enum { FRAME_WORDS = 8, FRAME_ENTRY = 6 }; /* six registers, the entry, its (absent) caller */
#elif defined(__aarch64__)
__asm__(".text\n.globl cudaemu_switch\n.hidden cudaemu_switch\n"
        ".type cudaemu_switch,%function\ncudaemu_switch:\n"
        "  sub sp,sp,#160\n"
        "  stp x19,x20,[sp]\n  stp x21,x22,[sp,#16]\n  stp x23,x24,[sp,#32]\n"
        "  stp x25,x26,[sp,#48]\n  stp x27,x28,[sp,#64]\n  stp x29,x30,[sp,#80]\n"
        "  stp d8,d9,[sp,#96]\n  stp d10,d11,[sp,#112]\n"
        "  stp d12,d13,[sp,#128]\n  stp d14,d15,[sp,#144]\n"
        "  mov x9,sp\n  str x9,[x0]\n  mov sp,x1\n"
        "  ldp x19,x20,[sp]\n  ldp x21,x22,[sp,#16]\n  ldp x23,x24,[sp,#32]\n"
        "  ldp x25,x26,[sp,#48]\n  ldp x27,x28,[sp,#64]\n  ldp x29,x30,[sp,#80]\n"
        "  ldp d8,d9,[sp,#96]\n  ldp d10,d11,[sp,#112]\n"
        "  ldp d12,d13,[sp,#128]\n  ldp d14,d15,[sp,#144]\n"
        "  add sp,sp,#160\n  ret\n"
        ".size cudaemu_switch,.-cudaemu_switch\n");
enum { FRAME_WORDS = 20, FRAME_ENTRY = 11 };
#else
#error "the emulation's context switch is written for x86-64 and aarch64"
#endif

namespace emu {

struct fiber {
  void *stack_pointer;
  const void *bottom; /* of the stack, as ASan wants it */
  size_t bytes;
  void *fake_stack, *tsan;
};

enum { FIBERS = 2 * 1024 };
static fiber pool[FIBERS];
static fiber host;

bool tsan_present() {
  return __tsan_create_fiber != nullptr;
}
bool asan_present() {
  return __asan_poison_memory_region != nullptr;
}
void order_after(void *token) {
  if (__tsan_acquire) __tsan_acquire(token);
}
void order_before(void *token) {
  if (__tsan_release) __tsan_release(token);
}

/* The launching thread; its ASan bounds are learned at the first switch away from it. */
void host_is_current() {
  if (__tsan_get_current_fiber) host.tsan = __tsan_get_current_fiber();
}
fiber *host_fiber() {
  return &host;
}

static void (*first_entry)();
static fiber *arriving_from;

static void arrived(void *fake_stack) {
  if (!__sanitizer_finish_switch_fiber) return;
  const void *bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(fake_stack, &bottom, &bytes);
  if (arriving_from == &host) host.bottom = bottom, host.bytes = bytes;
}

static void start() {
  arrived(nullptr);
  first_entry();
  __builtin_trap();
}

/* Sanitizers enlarge frames. Stacks are staggered: at equal offsets from a page all threads' locals
 * would compete for the same cache sets. */
fiber *fiber_get(unsigned index, void (*entry)()) {
  fiber *f = &pool[index];
  first_entry = entry;
  if (f->stack_pointer) return f;
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  size_t bytes = asan_present() || tsan_present() ? (size_t)256 << 10 : (size_t)64 << 10;
  char *map = (char *)mmap(nullptr, bytes + 2 * page, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED || mprotect(map, page, PROT_NONE) != 0)
    cudaemu_die("no memory for the stacks of a block");
  f->bottom = map + page;
  f->bytes = bytes + page - index % 21 * 192;
  void **frame = (void **)((uintptr_t)f->bottom + f->bytes) - FRAME_WORDS;
  frame[FRAME_ENTRY] = (void *)start;
  f->stack_pointer = frame;
  if (__tsan_create_fiber) f->tsan = __tsan_create_fiber(0);
  return f;
}

void fiber_switch(fiber *from, fiber *to) {
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to->tsan, 1 /* orders nothing */);
  if (__sanitizer_start_switch_fiber)
    __sanitizer_start_switch_fiber(&from->fake_stack, to->bottom, to->bytes);
  arriving_from = from;
  cudaemu_switch(&from->stack_pointer, to->stack_pointer);
  arrived(from->fake_stack);
}

} // namespace emu
