/* Ranks that find each other through MASTER_ADDR and MASTER_PORT. Rank 0 listens, the others
 * connect; the connections stay, so that a failure, or the end of a process, is heard of at once.
 * Rank 0 passes on what it hears. Messages have one size; the loop runs only inside these calls. */
#include "comm_internal.h"

#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#define MAGIC 0x50474531 /* "PGE1" */
#define RETRY_MS 100     /* between attempts to connect */
#define GRACE 2.0        /* seconds in which a rank that waits answers */

enum kind { HELLO = 1, WELCOME, REFUSED, DATA, FAILURE, WAITING, FAREWELL };

typedef struct packet {
  uint32_t magic, kind;
  int32_t rank, world; /* of the sender; FAILURE: the rank that failed */
  int64_t sequence;
  char text[900];
} packet;

struct meeting;
typedef struct connection {
  uv_tcp_t tcp;
  struct meeting *meeting;
  packet in;
  size_t have; /* bytes of `in` */
  int rank;    /* -1 until it said hello */
  bool open, closing;
} connection;

typedef struct meeting {
  pg_comm public;
  uv_loop_t loop;
  uv_tcp_t listener;
  uv_timer_t timer;
  uv_connect_t connecting;
  connection *links;                /* rank 0: [world], by arrival; others: [1], to rank 0 */
  int used, joined;                 /* rank 0: links used, ranks that said hello */
  bool welcome, listening, leaving; /* leaving: failures end no waits any more */
  bool has_data;
  char data[PG__RENDEZVOUS_BYTES];
  bool *waiting, *gone; /* [world]: answered in this wait; said farewell */
  int64_t sequence, polled;
  double asked;
  bool answered;
  int error;     /* libuv's, of the last attempt to connect */
  uint64_t next; /* when the next one is due, uv_hrtime */
  struct sockaddr_storage address;
} meeting;

typedef struct sending {
  uv_write_t request;
  packet p;
} sending;

static void sent(uv_write_t *request, int status) {
  (void)status; /* a lost connection is noticed by its reader */
  free(request);
}

static void send_packet(connection *l, const packet *p) {
  sending *s = l->open && !l->closing ? malloc(sizeof *s) : NULL;
  if (!s) return;
  s->p = *p;
  uv_buf_t buffer = uv_buf_init((char *)&s->p, sizeof s->p);
  if (uv_write(&s->request, (uv_stream_t *)&l->tcp, &buffer, 1, sent) < 0) free(s);
}

static packet make_packet(const meeting *m, enum kind kind) {
  packet p = {.magic = MAGIC,
              .kind = kind,
              .rank = m->public.rank,
              .world = m->public.world,
              .sequence = m->sequence};
  return p;
}

/* To all other ranks, but not back to `except`: from rank 0 directly, else through it. */
static void send_all(meeting *m, const packet *p, const connection *except) {
  for (int i = 0; i < m->used; i++)
    if (&m->links[i] != except && (m->public.rank != 0 || m->links[i].rank > 0))
      send_packet(&m->links[i], p);
}

static void closed(uv_handle_t *handle) {
  connection *l = handle->data;
  l->open = l->closing = false;
}

static void close_link(connection *l) {
  if (!l->open || l->closing) return;
  l->closing = true;
  uv_close((uv_handle_t *)&l->tcp, closed);
}

/* A connection ended: with a farewell as it should, else the process at its end is gone. */
static void lost(connection *l) {
  meeting *m = l->meeting;
  const int rank = m->public.rank == 0 ? l->rank : 0;
  close_link(l);
  if (rank < 0 || m->gone[rank]) return;
  m->gone[rank] = true;
  if (m->public.failed_rank >= 0) return;
  packet p = make_packet(m, FAILURE);
  p.rank = rank;
  snprintf(p.text, sizeof p.text, "rank %d failed: its process ended without a word", rank);
  pg__comm_note(&m->public, rank, p.text);
  if (m->public.rank == 0) send_all(m, &p, l);
}

static void hello(connection *l, const packet *p) {
  meeting *m = l->meeting;
  packet answer = make_packet(m, REFUSED);
  bool taken = false;
  for (int i = 0; i < m->used; i++) taken |= m->links[i].rank == p->rank;
  if (p->world != m->public.world)
    snprintf(answer.text, sizeof answer.text, "rank %d has WORLD_SIZE = %d, rank 0 has %d", p->rank,
             p->world, m->public.world);
  else if (p->rank < 1 || p->rank >= m->public.world || taken)
    snprintf(answer.text, sizeof answer.text, "two processes are rank %d", p->rank);
  if (answer.text[0]) {
    send_packet(l, &answer);
    pg__comm_note(&m->public, p->rank, answer.text);
    return;
  }
  l->rank = p->rank;
  m->joined++;
}

static void take(connection *l, const packet *p) {
  meeting *m = l->meeting;
  const bool hub = m->public.rank == 0;
  switch (p->kind) {
  case HELLO:
    if (hub && l->rank < 0) hello(l, p);
    break;
  case WELCOME: m->welcome = true; break;
  case REFUSED: pg__comm_note(&m->public, m->public.rank, p->text); break;
  case DATA:
    memcpy(m->data, p->text, sizeof m->data);
    m->has_data = true;
    break;
  case WAITING:
    if (p->sequence == m->sequence && p->rank >= 0 && p->rank < m->public.world)
      m->waiting[p->rank] = true;
    if (hub) send_all(m, p, l);
    break;
  case FAREWELL: m->gone[hub ? l->rank < 0 ? 0 : l->rank : 0] = true; break;
  case FAILURE:
    pg__comm_note(&m->public, p->rank, p->text);
    if (hub) send_all(m, p, l);
    break;
  default: break;
  }
}

static void room(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer) {
  connection *l = handle->data;
  (void)suggested;
  *buffer = uv_buf_init((char *)&l->in + l->have, (unsigned)(sizeof l->in - l->have));
}

static void received(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer) {
  connection *l = stream->data;
  (void)buffer;
  if (n < 0) {
    lost(l);
    return;
  }
  l->have += (size_t)n;
  if (l->have < sizeof l->in) return;
  l->have = 0;
  l->in.text[sizeof l->in.text - 1] = 0;
  if (l->in.magic == MAGIC)
    take(l, &l->in);
  else
    close_link(l); /* somebody else */
}

static int open_link(meeting *m, connection *l) {
  l->meeting = m;
  l->rank = -1;
  l->have = 0;
  l->closing = false;
  l->open = uv_tcp_init(&m->loop, &l->tcp) == 0;
  l->tcp.data = l;
  return l->open ? 0 : -1;
}

static void start_reading(connection *l) {
  uv_tcp_nodelay(&l->tcp, 1);
  uv_read_start((uv_stream_t *)&l->tcp, room, received);
}

static void arrived(uv_stream_t *listener, int status) {
  meeting *m = listener->data;
  if (status < 0 || m->used == m->public.world) return;
  connection *l = &m->links[m->used];
  if (open_link(m, l) < 0) return;
  m->used++;
  if (uv_accept(listener, (uv_stream_t *)&l->tcp) < 0)
    close_link(l);
  else
    start_reading(l);
}

static void connected(uv_connect_t *request, int status) {
  connection *l = request->handle->data;
  meeting *m = l->meeting;
  m->error = status;
  if (status < 0) {
    close_link(l);
    return;
  }
  start_reading(l);
  packet p = make_packet(m, HELLO);
  send_packet(l, &p);
}

static void tick(uv_timer_t *timer) {
  (void)timer; /* only ends a wait of the loop */
}

/* One more attempt to reach rank 0, when none is under way and it is time. */
static void attempt(meeting *m) {
  connection *l = &m->links[0];
  if (l->open || uv_hrtime() < m->next || open_link(m, l) < 0) return;
  m->next = uv_hrtime() + RETRY_MS * 1000000ull;
  m->used = 1;
  m->error = uv_tcp_connect(&m->connecting, &l->tcp, (struct sockaddr *)&m->address, connected);
  if (m->error < 0) close_link(l);
}

static int resolve(meeting *m, const pg_launcher *launch, char *message, size_t size) {
  struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found = NULL;
  char port[16];
  const char *host = launch->master[0] ? launch->master : "127.0.0.1";
  if (!launch->master[0] && launch->local_size < launch->world) {
    snprintf(message, size, "MASTER_ADDR is not set: expected the host of rank 0");
    return PG_EINVAL;
  }
  snprintf(port, sizeof port, "%d", launch->port);
  const int error = getaddrinfo(host, port, &hints, &found);
  if (error || !found) {
    snprintf(message, size, "MASTER_ADDR = %s is not a host that this machine knows: %s", host,
             gai_strerror(error));
    return PG_ENOENT;
  }
  memcpy(&m->address, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  return 0;
}

static int listen_for_ranks(meeting *m, const pg_launcher *launch, char *message, size_t size) {
  struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)launch->port)};
  struct sockaddr_in any4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)launch->port)};
  uv_tcp_init(&m->loop, &m->listener);
  m->listener.data = m;
  m->listening = true;
  int error = uv_tcp_bind(&m->listener, (struct sockaddr *)&any, 0); /* IPv4 as well */
  if (error == UV_EAFNOSUPPORT) error = uv_tcp_bind(&m->listener, (struct sockaddr *)&any4, 0);
  if (!error) error = uv_listen((uv_stream_t *)&m->listener, 128, arrived);
  if (!error) return 0;
  snprintf(message, size, "MASTER_PORT = %d: rank 0 cannot listen there: %s", launch->port,
           uv_strerror(error));
  return PG_EIO;
}

/* Until `done`, a failure or the timeout; false after the last two. */
static bool wait_for(meeting *m, bool (*done)(const meeting *m), void (*again)(meeting *m),
                     double seconds) {
  const uint64_t end = uv_hrtime() + (uint64_t)(seconds * 1e9);
  while (!done(m) && (m->public.failed_rank < 0 || m->leaving) && uv_hrtime() < end) {
    if (again) again(m);
    uv_timer_start(&m->timer, tick, RETRY_MS, 0);
    uv_run(&m->loop, UV_RUN_ONCE);
  }
  return done(m);
}

static bool all_joined(const meeting *m) {
  return m->joined == m->public.world - 1;
}
static bool welcomed(const meeting *m) {
  return m->welcome;
}
static bool got_data(const meeting *m) {
  return m->has_data;
}
static bool nothing_queued(const meeting *m) {
  for (int i = 0; i < m->used; i++)
    if (m->links[i].open && !m->links[i].closing &&
        uv_stream_get_write_queue_size((const uv_stream_t *)&m->links[i].tcp) > 0)
      return false;
  return true;
}
static bool all_gone(const meeting *m) {
  for (int i = 0; i < m->used; i++)
    if (m->links[i].open && !m->links[i].closing &&
        !m->gone[m->public.rank == 0 ? m->links[i].rank < 0 ? 0 : m->links[i].rank : 0])
      return false;
  return true;
}

static int broadcast(pg_comm *comm, pg_queue *queue, void *data, int64_t bytes, int root) {
  meeting *m = (meeting *)comm;
  (void)queue, (void)root; /* always rank 0 */
  if (comm->rank == 0) {
    packet p = make_packet(m, DATA);
    memcpy(p.text, data, (size_t)bytes);
    send_all(m, &p, NULL);
    wait_for(m, nothing_queued, NULL, comm->timeout);
    return comm->failed_rank < 0 ? 0 : -1;
  }
  if (wait_for(m, got_data, NULL, comm->timeout)) {
    memcpy(data, m->data, (size_t)bytes);
    return 0;
  }
  char text[sizeof comm->failure];
  snprintf(text, sizeof text, "rank 0 did not begin within %g s", comm->timeout);
  pg__comm_note(comm, 0, text);
  return -1;
}

static void report(pg_comm *comm) {
  meeting *m = (meeting *)comm;
  packet p = make_packet(m, FAILURE);
  p.rank = comm->failed_rank;
  memcpy(p.text, comm->failure, sizeof comm->failure);
  send_all(m, &p, NULL);
  uv_run(&m->loop, UV_RUN_NOWAIT);
}

static int poll_others(pg_comm *comm, int64_t sequence, const char *operation, double waited) {
  meeting *m = (meeting *)comm;
  char text[sizeof comm->failure];
  if (sequence != m->polled) {
    memset(m->waiting, 0, (size_t)comm->world * sizeof *m->waiting);
    m->asked = -1;
    m->answered = false;
  }
  m->polled = m->sequence = sequence;
  uv_run(&m->loop, UV_RUN_NOWAIT);
  if (comm->failed_rank >= 0) return -1;
  bool others = false;
  for (int r = 0; !m->answered && r < comm->world; r++) others |= m->waiting[r];
  if (!m->answered && (others || waited > comm->timeout)) {
    packet p = make_packet(m, WAITING);
    m->answered = true;
    send_all(m, &p, NULL);
  }
  if (m->asked < 0 && waited > comm->timeout) m->asked = waited;
  if (m->asked < 0 || waited - m->asked < GRACE) return 0;
  int first = comm->rank;
  for (int r = comm->world - 1; r >= 0; r--)
    if (r != comm->rank && !m->waiting[r]) m->gone[first = r] = true;
  if (first == comm->rank)
    snprintf(text, sizeof text, "%s did not end within %g s although all ranks wait in it",
             operation, comm->timeout);
  else
    snprintf(text, sizeof text, "rank %d did not come to %s within %g s", first, operation,
             comm->timeout);
  pg__comm_note(comm, first, text);
  report(comm);
  return -1;
}

/* After a failure wait until the others have said farewell too, so that all have heard the reason;
 * rank 0 passes messages on meanwhile. */
static void close_meeting(pg_comm *comm) {
  meeting *m = (meeting *)comm;
  packet p = make_packet(m, FAREWELL);
  send_all(m, &p, NULL);
  m->leaving = true;
  wait_for(m, all_gone, NULL, comm->failed_rank < 0 ? GRACE : 5 * GRACE);
  wait_for(m, nothing_queued, NULL, GRACE);
  for (int i = 0; i < m->used; i++) close_link(&m->links[i]);
  if (m->listening) uv_close((uv_handle_t *)&m->listener, NULL);
  uv_close((uv_handle_t *)&m->timer, NULL);
  uv_run(&m->loop, UV_RUN_DEFAULT);
  uv_loop_close(&m->loop);
  free(m->links);
  free(m->waiting);
  free(m->gone);
  free(m);
}

static const pg__comm_ops ops = {
    .broadcast = broadcast, .poll = poll_others, .report = report, .close = close_meeting};

/* Rank 0: who has not come. */
static void name_absent(const meeting *m, int port, char *message, size_t size) {
  char list[200] = "";
  size_t length = 0;
  for (int r = 1, named = 0; r < m->public.world && named < 16; r++) {
    bool here = false;
    for (int i = 0; i < m->used; i++) here |= m->links[i].rank == r;
    if (here) continue;
    length += (size_t)snprintf(list + length, sizeof list - length, "%s%d", named ? ", " : "", r);
    named++;
  }
  snprintf(message, size, "rank %s did not come to rank 0 at port %d within %g s", list, port,
           m->public.timeout);
}

int pg__rendezvous_open(const pg_comm_options *options, pg_comm **out, char *message, size_t size) {
  const pg_launcher *launch = options->launch;
  const size_t world = (size_t)launch->world;
  int status = 0;
  meeting *m = calloc(1, sizeof *m);
  *out = NULL;
  if (m) {
    m->links = calloc(world, sizeof *m->links);
    m->waiting = calloc(world, sizeof *m->waiting);
    m->gone = calloc(world, sizeof *m->gone);
  }
  if (!m || !m->links || !m->waiting || !m->gone || uv_loop_init(&m->loop) < 0) {
    if (m) free(m->links), free(m->waiting), free(m->gone);
    free(m);
    snprintf(message, size, "no memory for %d ranks", launch->world);
    return PG_ENOMEM;
  }
  uv_timer_init(&m->loop, &m->timer);
  m->polled = -1;
  m->public = (pg_comm){.name = "rendezvous",
                        .ops = &ops,
                        .rank = launch->rank,
                        .world = launch->world,
                        .timeout = options->timeout,
                        .failed_rank = -1};
  status = launch->rank == 0 ? listen_for_ranks(m, launch, message, size)
                             : resolve(m, launch, message, size);
  if (status < 0) goto fail;
  if (launch->rank == 0) {
    const bool complete = wait_for(m, all_joined, NULL, options->timeout);
    packet p = make_packet(m, complete ? WELCOME : REFUSED);
    if (!complete) {
      if (m->public.failed_rank >= 0)
        snprintf(message, size, "%s", m->public.failure);
      else
        name_absent(m, launch->port, message, size);
      snprintf(p.text, sizeof p.text, "rank 0 failed: %s", message);
      status = PG_EPEER;
    }
    send_all(m, &p, NULL);
    wait_for(m, nothing_queued, NULL, GRACE);
  } else if (!wait_for(m, welcomed, attempt, options->timeout + GRACE)) {
    if (m->public.failed_rank >= 0)
      snprintf(message, size, "%s", m->public.failure);
    else if (m->error < 0)
      snprintf(message, size, "rank 0 at %s, port %d, cannot be reached: %s (waited %g s)",
               launch->master[0] ? launch->master : "127.0.0.1", launch->port,
               uv_strerror(m->error), options->timeout);
    else
      snprintf(message, size, "rank 0 at %s, port %d, does not answer (waited %g s)",
               launch->master[0] ? launch->master : "127.0.0.1", launch->port, options->timeout);
    status = PG_EPEER;
  }
  if (status < 0) goto fail;
  *out = &m->public;
  return 0;
fail:
  for (size_t r = 0; r < world; r++) m->gone[r] = true;
  close_meeting(&m->public);
  return status;
}
