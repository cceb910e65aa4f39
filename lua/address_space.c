/* OpenBLAS maps two buffers of 128 MiB when it is loaded, and where it cannot it tries for ever.
 * That happens before main(), so the program looks for this much room before its libraries start:
 * .preinit_array runs when all are mapped and none is initialised. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define ROOM ((size_t)272 << 20) /* and some for what starts before OpenBLAS */

static void require_room(void) {
  static const char text[] =
      "perigee: ENOMEM: 272 MiB of address space are needed to start and cannot be mapped; "
      "see ulimit -v and ulimit -d\n";
  void *room = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) {
    ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    (void)written;
    _exit(EXIT_FAILURE);
  }
  munmap(room, ROOM);
}

typedef void initialiser(void);
__attribute__((section(".preinit_array"), used)) static initialiser *before_libraries =
    require_room;
