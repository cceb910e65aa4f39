/* The communicator over MPI, for ranks on CPUs. Every collective is a nonblocking one that is
 * polled, so that a wait can end: with a failure that another rank reports on a second
 * communicator, or because a rank does not come. A rank that waited too long asks who else waits;
 * who does not answer is the one that is missing.
 *
 * All ranks get the same bits: each element is summed in one place, or in an order that differs
 * only by the commutation of two terms. */
#include "../comm_internal.h"

#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_REQUESTS 64
#define CHUNK ((int64_t)1 << 28) /* elements of one collective; MPI counts in int */
/* A rank inside MPI answers within this many seconds, however busy the machine is. */
#define GRACE 2.0
/* After a failure the others have this long to hear of it. */
#define FAREWELL 10.0

enum { TAG_FAILURE = 1, TAG_WAITING, TAG_FAREWELL };

typedef struct note {
  int64_t sequence;
  int rank; /* that failed first */
  char text[sizeof((pg_comm *)0)->failure];
} note;

typedef struct mpi_comm {
  pg_comm public;
  MPI_Comm data, watch;
  MPI_Request requests[MAX_REQUESTS];
  int count;
  int64_t sequence;      /* of the operation last begun */
  const char *operation; /* its name, for messages */
  bool *waiting;         /* [world]: answered in this wait */
  bool *gone, *missing;  /* [world]: knows of a failure; did not come */
  MPI_Request *sends;    /* [world]: the farewells */
  bool answered;         /* the others know that this rank waits */
  bool parted;           /* MPI is not called any more */
  double asked;          /* seconds waited when this rank asked; -1: not yet */
  int64_t polled;        /* the operation that the last call of poll was about */
} mpi_comm;

static bool open_already, healthy = true;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int failed(mpi_comm *c, int rank, const char *text) {
  pg__comm_note(&c->public, rank, text);
  healthy = false;
  return -1;
}

/* Send a note to all others, and wait for nothing: a rank that hangs takes no messages. The memory
 * stays, since there are few notes and the last ones are under way when the process ends. */
static void send_all(mpi_comm *c, int tag) {
  note *n = calloc(1, sizeof *n);
  if (!n) return;
  n->sequence = c->sequence;
  n->rank = c->public.failed_rank;
  memcpy(n->text, c->public.failure, sizeof n->text);
  for (int r = 0; r < c->public.world; r++) {
    MPI_Request request = MPI_REQUEST_NULL;
    if (r == c->public.rank) continue;
    MPI_Isend(n, sizeof *n, MPI_BYTE, r, tag, c->watch, &request);
    if (tag == TAG_FAREWELL)
      c->sends[r] = request;
    else if (request != MPI_REQUEST_NULL)
      MPI_Request_free(&request);
  }
}

/* Take the notes that have come. */
static void listen_to_others(mpi_comm *c) {
  for (;;) {
    int flag = 0;
    MPI_Status from;
    note n;
    if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, c->watch, &flag, &from) != MPI_SUCCESS || !flag)
      return;
    if (MPI_Recv(&n, sizeof n, MPI_BYTE, from.MPI_SOURCE, from.MPI_TAG, c->watch,
                 MPI_STATUS_IGNORE) != MPI_SUCCESS)
      return;
    n.text[sizeof n.text - 1] = 0;
    if (from.MPI_TAG == TAG_WAITING) {
      if (n.sequence != c->sequence) continue;
      c->waiting[from.MPI_SOURCE] = true;
    } else {
      if (from.MPI_TAG == TAG_FAREWELL) c->gone[from.MPI_SOURCE] = true;
      failed(c, n.rank, n.text);
    }
  }
}

/* After a failure every rank says farewell and waits for those of the others, so that nobody is
 * ended by the launcher before it has heard the reason. MPI is not called any more afterwards: an
 * operation that the others complete later must not write to memory that is in other use then. So
 * whoever leaves an operation incomplete parts at once. */
static void part(mpi_comm *c) {
  bool all = c->parted;
  if (all) return;
  c->parted = true;
  for (int r = 0; r < c->public.world; r++) c->sends[r] = MPI_REQUEST_NULL;
  send_all(c, TAG_FAREWELL);
  for (double end = now() + FAREWELL; !all && now() < end;) {
    listen_to_others(c);
    all = true;
    for (int r = 0; r < c->public.world; r++) {
      int sent;
      MPI_Test(&c->sends[r], &sent, MPI_STATUS_IGNORE);
      all = all && (r == c->public.rank || c->missing[r] || (sent && c->gone[r]));
    }
    if (!all) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  }
}

static void report(pg_comm *comm) {
  mpi_comm *c = (mpi_comm *)comm;
  healthy = false;
  send_all(c, TAG_FAILURE);
  if (c->count) part(c);
}

/* An error of MPI itself: this rank's own failure, unless another is known. */
static int refused(mpi_comm *c, int code) {
  char reason[MPI_MAX_ERROR_STRING] = "", text[sizeof c->public.failure];
  int length;
  MPI_Error_string(code, reason, &length);
  snprintf(text, sizeof text, "rank %d failed: MPI, %s: %s", c->public.rank, c->operation, reason);
  const bool first = c->public.failed_rank < 0;
  failed(c, c->public.rank, text);
  if (first) report(&c->public);
  part(c);
  return -1;
}

/* The wait has lasted too long and those who could answer have: name who is missing. */
static int name_missing(mpi_comm *c) {
  char text[sizeof c->public.failure], missing[200] = "";
  int first = -1, count = 0;
  size_t used = 0;
  for (int r = 0; r < c->public.world; r++) {
    if (r == c->public.rank || c->waiting[r]) continue;
    if (first < 0) first = r;
    if (count++ < 16)
      used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%d", used ? ", " : "", r);
  }
  if (count)
    snprintf(text, sizeof text, "rank %s did not come to %s within %g s", missing, c->operation,
             c->public.timeout);
  else
    snprintf(text, sizeof text, "%s did not end within %g s although all ranks wait in it",
             c->operation, c->public.timeout);
  failed(c, first < 0 ? c->public.rank : first, text);
  for (int r = 0; r < c->public.world; r++) c->missing[r] = r != c->public.rank && !c->waiting[r];
  report(&c->public);
  return -1;
}

static int poll_others(pg_comm *comm, int64_t sequence, const char *operation, double waited) {
  mpi_comm *c = (mpi_comm *)comm;
  if (sequence != c->polled) { /* another wait than at the last call */
    memset(c->waiting, 0, (size_t)comm->world * sizeof *c->waiting);
    c->asked = -1;
    c->answered = false;
  }
  c->polled = c->sequence = sequence;
  c->operation = operation;
  listen_to_others(c);
  if (comm->failed_rank >= 0) return -1;
  bool asked_by_others = false;
  for (int r = 0; !c->answered && r < comm->world; r++) asked_by_others |= c->waiting[r];
  if (!c->answered && (asked_by_others || waited > comm->timeout)) {
    c->answered = true;
    send_all(c, TAG_WAITING);
  }
  if (c->asked < 0 && waited > comm->timeout) c->asked = waited;
  return c->asked >= 0 && waited - c->asked > GRACE ? name_missing(c) : 0;
}

/* Until all requests are complete. */
static int finish(pg_comm *comm, pg_queue *queue) {
  (void)queue;
  mpi_comm *c = (mpi_comm *)comm;
  double start = now(), waited = 0;
  for (int64_t turn = 0;; turn++) {
    int done = 0, code = MPI_Testall(c->count, c->requests, &done, MPI_STATUSES_IGNORE);
    if (code != MPI_SUCCESS) return refused(c, code);
    if (done) break;
    if (turn % 16 == 0) {
      waited = now() - start;
      if (poll_others(comm, c->sequence, c->operation, waited) < 0) {
        part(c);
        return -1;
      }
    }
    /* Ranks may outnumber CPUs: give way at once, and sleep when it takes long. */
    if (waited < 0.02)
      sched_yield();
    else
      nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
  }
  c->count = 0;
  return 0;
}

static int begin(mpi_comm *c, const char *operation) {
  if (c->count == MAX_REQUESTS && finish(&c->public, NULL) < 0) return -1;
  c->sequence++;
  c->operation = operation;
  listen_to_others(c);
  if (c->public.failed_rank < 0) return 0;
  if (c->count) part(c);
  return -1;
}

static int all_reduce(pg_comm *comm, pg_queue *queue, void *data, int64_t count, pg__comm_type type,
                      pg__comm_op op) {
  static const struct {
    MPI_Datatype type;
    int64_t size;
  } types[] = {[PG__COMM_F32] = {MPI_FLOAT, 4}, [PG__COMM_F64] = {MPI_DOUBLE, 8}};
  mpi_comm *c = (mpi_comm *)comm;
  for (int64_t first = 0; first < count; first += CHUNK) {
    if (begin(c, queue ? "a sum of gradients" : "an exchange of numbers") < 0) return -1;
    int n = (int)(count - first < CHUNK ? count - first : CHUNK);
    int code =
        MPI_Iallreduce(MPI_IN_PLACE, (char *)data + first * types[type].size, n, types[type].type,
                       op == PG__COMM_SUM ? MPI_SUM : MPI_MAX, c->data, &c->requests[c->count]);
    if (code != MPI_SUCCESS) return refused(c, code);
    c->count++;
  }
  return queue ? 0 : finish(comm, NULL);
}

static int broadcast(pg_comm *comm, pg_queue *queue, void *data, int64_t bytes, int root) {
  mpi_comm *c = (mpi_comm *)comm;
  for (int64_t first = 0; first < bytes; first += CHUNK) {
    if (begin(c, queue ? "an exchange of weights" : "an exchange of data") < 0) return -1;
    int n = (int)(bytes - first < CHUNK ? bytes - first : CHUNK);
    int code = MPI_Ibcast((char *)data + first, n, MPI_BYTE, root, c->data, &c->requests[c->count]);
    if (code != MPI_SUCCESS) return refused(c, code);
    c->count++;
  }
  return queue ? 0 : finish(comm, NULL);
}

static void close_comm(pg_comm *comm) {
  mpi_comm *c = (mpi_comm *)comm;
  open_already = false;
  if (comm->failed_rank >= 0) {
    part(c);
    return; /* messages may be under way: the memory stays */
  }
  MPI_Comm_free(&c->watch);
  MPI_Comm_free(&c->data);
  free(c->waiting);
  free(c->gone);
  free(c->missing);
  free(c->sends);
  free(c);
}

static const pg__comm_ops ops = {.all_reduce = all_reduce,
                                 .broadcast = broadcast,
                                 .finish = finish,
                                 .poll = poll_others,
                                 .report = report,
                                 .close = close_comm};

/* MPI_Finalize waits for all ranks, so it is called only when all of them will come. */
static void finalize(void) {
  int done = 0;
  MPI_Finalized(&done);
  if (healthy && !open_already && !done) MPI_Finalize();
}

/* MPI's start waits for all ranks, for ever: another thread does, so that this one can stop
 * waiting. Afterwards one thread at a time calls MPI. */
static struct {
  pthread_mutex_t lock;
  pthread_cond_t over;
  bool done;
  int code;
} starting = {.lock = PTHREAD_MUTEX_INITIALIZER, .over = PTHREAD_COND_INITIALIZER};

static void *initialise(void *self) {
  int provided, code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
  (void)self;
  pthread_mutex_lock(&starting.lock);
  starting.code = code;
  starting.done = true;
  pthread_cond_signal(&starting.over);
  pthread_mutex_unlock(&starting.lock);
  return NULL;
}

static int start_mpi(double timeout, char *message, size_t size) {
  static bool begun;
  struct timespec end;
  pthread_t thread;
  int error = 0;
  if (!begun) {
    if (pthread_create(&thread, NULL, initialise, NULL) != 0) {
      snprintf(message, size, "no thread for MPI's start");
      return PG_ENOMEM;
    }
    pthread_detach(thread);
    begun = true;
  } else if (starting.done)
    return 0;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += (time_t)(timeout < 1e9 ? timeout : 1e9) + 1;
  pthread_mutex_lock(&starting.lock);
  while (!starting.done && error == 0)
    error = pthread_cond_timedwait(&starting.over, &starting.lock, &end);
  const bool done = starting.done;
  pthread_mutex_unlock(&starting.lock);
  if (!done) {
    snprintf(message, size, "another rank did not come to the start of MPI within %g s", timeout);
    return PG_EPEER;
  }
  if (starting.code != MPI_SUCCESS) {
    snprintf(message, size, "MPI does not start");
    return PG_EDEVICE;
  }
  atexit(finalize);
  return 0;
}

__attribute__((visibility("default"))) int pg__comm_plugin(const pg_comm_options *options,
                                                           pg_comm *boot, pg_comm **out,
                                                           char *message, size_t size) {
  const pg_launcher *launch = options->launch;
  int rank, world, status;
  (void)boot;
  *out = NULL;
  if (open_already) {
    snprintf(message, size, "this process has a communicator already; close that run first");
    return PG_ESTATE;
  }
  if ((status = start_mpi(options->timeout, message, size)) < 0) return status;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (world != launch->world || rank != launch->rank) {
    snprintf(message, size,
             "%s says rank %d of %d, MPI says rank %d of %d: start with mpirun, or with a plugin "
             "of srun that this MPI knows (srun --mpi=pmix or pmi2)",
             launch->by, launch->rank, launch->world, rank, world);
    return PG_EINVAL;
  }
  mpi_comm *c = calloc(1, sizeof *c);
  if (c) {
    c->waiting = calloc((size_t)world, sizeof *c->waiting);
    c->gone = calloc((size_t)world, sizeof *c->gone);
    c->missing = calloc((size_t)world, sizeof *c->missing);
    c->sends = calloc((size_t)world, sizeof *c->sends);
  }
  if (!c || !c->waiting || !c->gone || !c->missing || !c->sends ||
      MPI_Comm_dup(MPI_COMM_WORLD, &c->data) != MPI_SUCCESS ||
      MPI_Comm_dup(MPI_COMM_WORLD, &c->watch) != MPI_SUCCESS) {
    snprintf(message, size, "no memory for a communicator of %d ranks", world);
    return PG_ENOMEM;
  }
  MPI_Comm_set_errhandler(c->data, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(c->watch, MPI_ERRORS_RETURN);
  c->public = (pg_comm){.name = "mpi",
                        .ops = &ops,
                        .rank = rank,
                        .world = world,
                        .timeout = options->timeout,
                        .failed_rank = -1};
  c->operation = "the start";
  c->polled = -1;
  open_already = true;
  *out = &c->public;
  return 0;
}
