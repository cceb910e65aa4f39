/* Ranks that find each other through MASTER_ADDR and MASTER_PORT. Rank 0 listens, the others
 * connect; the connections stay, so that a failure, or the end of a process, is heard of at once.
 * Rank 0 passes on what it hears. Messages have one size; the loop runs only inside these calls.
 *
 * Whoever knows the port can connect: port scanners, health checks, ranks of another job. Only a
 * hello that names this job, its number of ranks and a rank that has not come yet makes a
 * connection count; nothing else on it has an effect, and a refusal tells the newcomer alone. Rank
 * 0 stops listening when all have come, so that another job can use the port. A number drawn by
 * rank 0 marks the messages of one meeting. */
#include "comm_internal.h"

#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#define MAGIC 0x50474532 /* "PGE2", the version of this protocol */
#define RETRY_MS 100     /* between attempts to connect */
#define GRACE 2.0        /* seconds in which a rank that waits answers */
#define LINGER 10.0      /* in which a failure at the start is told to whoever comes */
#define SILENCE 5.0      /* after which a connection without a hello is closed */
#define STRANGERS 64     /* connections without a hello at a time */

enum kind { HELLO = 1, ACCEPTED, WELCOME, REFUSED, DATA, FAILURE, WAITING, FAREWELL };

typedef struct packet {
  uint32_t magic, kind;
  int32_t rank, world; /* of the sender; FAILURE, REFUSED: the rank that failed */
  int64_t sequence;    /* HELLO: 1 when a failure follows and the rank does not come */
  uint64_t session;    /* 0 in a hello and in a refusal */
  char text[900];      /* HELLO: the job */
} packet;

struct meeting;
typedef struct connection {
  uv_tcp_t tcp;
  struct meeting *meeting;
  packet in;
  size_t have;                /* bytes of `in` */
  int rank;                   /* -1 until it said hello */
  uint64_t since;             /* it is open, uv_hrtime */
  bool open, closing, joined; /* joined: counted in the meeting's */
} connection;

typedef struct meeting {
  pg_comm public;
  uv_loop_t loop;
  uv_tcp_t listener;
  uv_timer_t timer;
  uv_connect_t connecting;
  connection *links; /* rank 0: [used], free ones are not open; others: [1], to rank 0 */
  int used, joined;  /* rank 0: world + STRANGERS; ranks that said hello */
  uint64_t session;  /* others: 0 until rank 0 accepted the hello */
  char job[sizeof((pg_launcher *)0)->job];
  char place[320];   /* of rank 0, for messages */
  char refused[400]; /* rank 0: why a newcomer was refused or left; others: how rank 0 left */
  bool welcome, listening, leaving; /* leaving: failures end no waits any more */
  bool failing;                     /* this rank only comes to tell its failure */
  bool has_data;
  char data[PG__RENDEZVOUS_BYTES];
  bool *waiting, *gone; /* [world]: answered in this wait; said farewell */
  bool *told;           /* [world]: rank 0: heard of the failure that ends the start */
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
              .sequence = m->sequence,
              .session = m->session};
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

static bool valid_rank(const meeting *m, int rank) {
  return rank >= 0 && rank < m->public.world;
}

/* A connection ended: with a farewell as it should, else the process at its end is gone. Before all
 * have met that ends nothing: a rank may come again, and who is not rank 0 may be restarted. */
static void lost(connection *l) {
  meeting *m = l->meeting;
  const bool hub = m->public.rank == 0;
  const int rank = hub ? l->rank : m->session ? 0 : -1;
  close_link(l);
  if (!hub && rank < 0) snprintf(m->refused, sizeof m->refused, "closes the connection");
  if (rank < 0 || m->gone[rank]) return;
  if (hub && !m->welcome) {
    l->rank = -1;
    m->joined -= l->joined;
    l->joined = false;
    snprintf(m->refused, sizeof m->refused, "rank %d came and left", rank);
    return;
  }
  m->gone[rank] = true;
  if (m->public.failed_rank >= 0) return;
  packet p = make_packet(m, FAILURE);
  p.rank = rank;
  snprintf(p.text, sizeof p.text, "rank %d failed: its process ended without a word", rank);
  pg__comm_note(&m->public, rank, p.text);
  if (hub) send_all(m, &p, l);
}

static void refuse(connection *l, int rank, const char *text) {
  packet answer = make_packet(l->meeting, REFUSED);
  answer.rank = rank;
  answer.session = 0;
  snprintf(answer.text, sizeof answer.text, "%s", text);
  send_packet(l, &answer);
}

static void hello(connection *l, const packet *p) {
  meeting *m = l->meeting;
  char why[700] = "";
  bool taken = false;
  for (int i = 0; i < m->used; i++) taken |= m->links[i].open && m->links[i].rank == p->rank;
  if (strncmp(p->text, m->job, sizeof m->job) != 0)
    snprintf(why, sizeof why,
             "port %.120s of rank 0 is used by another job (%.200s, this is %.200s)", m->place,
             m->job[0] ? m->job : "without a name", p->text[0] ? p->text : "one without");
  else if (p->world != m->public.world)
    snprintf(why, sizeof why, "rank %d has WORLD_SIZE = %d, rank 0 has %d", p->rank, p->world,
             m->public.world);
  else if (p->rank < 1 || p->rank >= m->public.world)
    snprintf(why, sizeof why, "rank %d is not allowed: expected 1 to %d", p->rank,
             m->public.world - 1);
  else if (m->public.failed_rank >= 0) {
    m->told[p->rank] = true;
    refuse(l, m->public.failed_rank, m->public.failure);
    return;
  } else if (taken)
    snprintf(why, sizeof why, "two processes are rank %d", p->rank);
  if (why[0]) {
    snprintf(m->refused, sizeof m->refused, "%.*s", (int)sizeof m->refused - 1, why);
    refuse(l, p->rank, why);
    return;
  }
  packet answer = make_packet(m, ACCEPTED);
  send_packet(l, &answer);
  l->rank = p->rank;
  l->joined = p->sequence == 0;
  m->joined += l->joined;
}

/* From a rank of this meeting. */
static void take(connection *l, const packet *p) {
  meeting *m = l->meeting;
  const bool hub = m->public.rank == 0;
  switch (p->kind) {
  case WELCOME: m->welcome = true; break;
  case DATA:
    memcpy(m->data, p->text, sizeof m->data);
    m->has_data = true;
    break;
  case WAITING:
    if (p->sequence == m->sequence && valid_rank(m, p->rank)) m->waiting[p->rank] = true;
    if (hub) send_all(m, p, l);
    break;
  case FAREWELL: m->gone[hub ? l->rank : 0] = true; break;
  case FAILURE:
    if (!valid_rank(m, p->rank)) break;
    pg__comm_note(&m->public, p->rank, p->text);
    if (hub) send_all(m, p, l);
    break;
  default: break;
  }
}

/* A message counts when it opens a connection, or belongs to this meeting. */
static void sort_message(connection *l, const packet *p) {
  meeting *m = l->meeting;
  const bool hub = m->public.rank == 0, known = hub ? l->rank > 0 : m->session != 0;
  if (p->magic != MAGIC || (hub && !known && p->kind != HELLO))
    lost(l); /* somebody else */
  else if (hub && !known)
    hello(l, p);
  else if (!hub && p->kind == REFUSED && p->session == m->session)
    pg__comm_note(&m->public, valid_rank(m, p->rank) ? p->rank : m->public.rank, p->text);
  else if (!hub && !known && p->kind == ACCEPTED)
    m->session = p->session;
  else if (known && p->session == m->session)
    take(l, p);
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
  sort_message(l, &l->in);
}

static int open_link(meeting *m, connection *l) {
  l->meeting = m;
  l->rank = -1;
  l->have = 0;
  l->since = uv_hrtime();
  l->closing = false;
  l->open = uv_tcp_init(&m->loop, &l->tcp) == 0;
  l->tcp.data = l;
  return l->open ? 0 : -1;
}

static void start_reading(connection *l) {
  uv_tcp_nodelay(&l->tcp, 1);
  uv_read_start((uv_stream_t *)&l->tcp, room, received);
}

static void turned_away(uv_handle_t *handle) {
  free(handle);
}

static void arrived(uv_stream_t *listener, int status) {
  meeting *m = listener->data;
  connection *l = NULL;
  if (status < 0) return;
  for (int i = 0; i < m->used && !l; i++)
    if (!m->links[i].open) l = &m->links[i];
  if (!l) { /* a rank tries again */
    uv_tcp_t *full = calloc(1, sizeof *full);
    if (!full) return;
    uv_tcp_init(&m->loop, full);
    uv_accept(listener, (uv_stream_t *)full);
    uv_close((uv_handle_t *)full, turned_away);
    return;
  }
  if (open_link(m, l) < 0) return;
  if (uv_accept(listener, (uv_stream_t *)&l->tcp) < 0)
    close_link(l);
  else
    start_reading(l);
}

/* Rank 0, while it waits for hellos. */
static void close_silent(meeting *m) {
  for (int i = 0; i < m->used; i++)
    if (m->links[i].open && m->links[i].rank < 0 &&
        uv_hrtime() - m->links[i].since > (uint64_t)(SILENCE * 1e9))
      close_link(&m->links[i]);
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
  p.sequence = m->failing;
  snprintf(p.text, sizeof p.text, "%s", m->job);
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
  do uv_random(NULL, NULL, &m->session, sizeof m->session, 0, NULL);
  while (m->session == 0);
  int error = uv_tcp_bind(&m->listener, (struct sockaddr *)&any, 0); /* IPv4 as well */
  if (error == UV_EAFNOSUPPORT) error = uv_tcp_bind(&m->listener, (struct sockaddr *)&any4, 0);
  if (!error) error = uv_listen((uv_stream_t *)&m->listener, 128, arrived);
  if (!error) return 0;
  snprintf(message, size, "MASTER_PORT = %d: rank 0 cannot listen there: %s%s", launch->port,
           uv_strerror(error),
           error == UV_EADDRINUSE ? " (by another job, perhaps): expected a free port" : "");
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
static bool all_told(const meeting *m) {
  for (int r = 1; r < m->public.world; r++)
    if (!m->told[r]) return false;
  return true;
}
static bool accepted(const meeting *m) {
  return m->session != 0;
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
    if (m->links[i].open && !m->links[i].closing && (m->public.rank > 0 || m->links[i].rank > 0) &&
        !m->gone[m->public.rank == 0 ? m->links[i].rank : 0])
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

static void stop_listening(meeting *m) {
  if (m->listening) uv_close((uv_handle_t *)&m->listener, NULL);
  m->listening = false;
  for (int i = 0; m->public.rank == 0 && i < m->used; i++)
    if (m->links[i].rank < 0) close_link(&m->links[i]);
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
  stop_listening(m);
  uv_close((uv_handle_t *)&m->timer, NULL);
  uv_run(&m->loop, UV_RUN_DEFAULT);
  uv_loop_close(&m->loop);
  free(m->links);
  free(m->waiting);
  free(m->gone);
  free(m->told);
  free(m);
}

static const pg__comm_ops ops = {
    .broadcast = broadcast, .poll = poll_others, .report = report, .close = close_meeting};

/* Rank 0: who has not come. */
static void name_absent(const meeting *m, char *message, size_t size) {
  char list[200] = "";
  size_t length = 0;
  for (int r = 1, named = 0; r < m->public.world && named < 16; r++) {
    bool here = false;
    for (int i = 0; i < m->used; i++) here |= m->links[i].open && m->links[i].rank == r;
    if (here) continue;
    length += (size_t)snprintf(list + length, sizeof list - length, "%s%d", named ? ", " : "", r);
    named++;
  }
  snprintf(message, size, "rank %s did not come to rank 0 at port %s within %g s%s%s%s", list,
           m->place, m->public.timeout, m->refused[0] ? " (" : "", m->refused,
           m->refused[0] ? ")" : "");
}

/* Rank 0 until all have come, or it is over: then whoever comes is told why. */
static int receive_ranks(meeting *m, const char *failure, char *message, size_t size) {
  if (failure)
    pg__comm_note(&m->public, 0, failure);
  else if (wait_for(m, all_joined, close_silent, m->public.timeout)) {
    packet p = make_packet(m, WELCOME);
    m->welcome = true;
    send_all(m, &p, NULL);
    wait_for(m, nothing_queued, NULL, GRACE);
    stop_listening(m);
    return 0;
  }
  if (m->public.failed_rank < 0) {
    char text[sizeof m->public.failure];
    name_absent(m, message, size);
    snprintf(text, sizeof text, "rank 0 failed: %.*s", (int)sizeof text - 20, message);
    pg__comm_note(&m->public, 0, text);
    for (int r = 1; r < m->public.world; r++) m->told[r] = true; /* nobody else is waited for */
  } else
    snprintf(message, size, "%s", m->public.failure);
  for (int i = 0; i < m->used; i++)
    if (m->links[i].open && m->links[i].rank > 0) m->told[m->links[i].rank] = true;
  packet p = make_packet(m, FAILURE);
  p.rank = m->public.failed_rank;
  memcpy(p.text, m->public.failure, sizeof p.text);
  send_all(m, &p, NULL);
  m->leaving = true;
  wait_for(m, all_told, close_silent, LINGER);
  wait_for(m, nothing_queued, NULL, GRACE);
  return PG_EPEER;
}

static int go_to_first(meeting *m, const char *failure, char *message, size_t size) {
  const bool met = failure ? wait_for(m, accepted, attempt, m->public.timeout)
                           : wait_for(m, welcomed, attempt, m->public.timeout + GRACE);
  if (met && failure) {
    pg__comm_note(&m->public, m->public.rank, failure);
    report(&m->public);
    m->leaving = true;
    wait_for(m, nothing_queued, NULL, GRACE);
  } else if (met)
    return 0;
  if (m->public.failed_rank >= 0)
    snprintf(message, size, "%s", m->public.failure);
  else if (m->error < 0)
    snprintf(message, size, "rank 0 at %s, cannot be reached: %s (waited %g s)", m->place,
             uv_strerror(m->error), m->public.timeout);
  else
    snprintf(message, size, "rank 0 at %s, %s (waited %g s)", m->place,
             m->session           ? "does not hear of all ranks"
             : m->refused[0] != 0 ? m->refused
                                  : "does not answer",
             m->public.timeout);
  return PG_EPEER;
}

static int start(const pg_comm_options *options, const char *failure, pg_comm **out, char *message,
                 size_t size) {
  const pg_launcher *launch = options->launch;
  const size_t world = (size_t)launch->world, used = launch->rank == 0 ? world + STRANGERS : 1;
  int status = 0;
  meeting *m = calloc(1, sizeof *m);
  *out = NULL;
  if (m) {
    m->links = calloc(used, sizeof *m->links);
    m->waiting = calloc(world, sizeof *m->waiting);
    m->gone = calloc(world, sizeof *m->gone);
    m->told = calloc(world, sizeof *m->told);
  }
  if (!m || !m->links || !m->waiting || !m->gone || !m->told || uv_loop_init(&m->loop) < 0) {
    if (m) free(m->links), free(m->waiting), free(m->gone), free(m->told);
    free(m);
    snprintf(message, size, "no memory for %d ranks", launch->world);
    return PG_ENOMEM;
  }
  uv_timer_init(&m->loop, &m->timer);
  m->used = (int)used;
  m->polled = -1;
  m->failing = failure != NULL;
  memcpy(m->job, launch->job, sizeof m->job);
  if (launch->rank == 0)
    snprintf(m->place, sizeof m->place, "%d", launch->port);
  else
    snprintf(m->place, sizeof m->place, "%s, port %d",
             launch->master[0] ? launch->master : "127.0.0.1", launch->port);
  m->public = (pg_comm){.name = "rendezvous",
                        .ops = &ops,
                        .rank = launch->rank,
                        .world = launch->world,
                        .timeout = options->timeout,
                        .failed_rank = -1};
  status = launch->rank == 0 ? listen_for_ranks(m, launch, message, size)
                             : resolve(m, launch, message, size);
  if (status < 0) goto fail;
  status = launch->rank == 0 ? receive_ranks(m, failure, message, size)
                             : go_to_first(m, failure, message, size);
  if (status < 0) goto fail;
  *out = &m->public;
  return 0;
fail:
  for (size_t r = 0; r < world; r++) m->gone[r] = true;
  close_meeting(&m->public);
  return status;
}

int pg__rendezvous_open(const pg_comm_options *options, pg_comm **out, char *message, size_t size) {
  return start(options, NULL, out, message, size);
}

void pg__rendezvous_fail(const pg_comm_options *options, const char *failure) {
  char message[1024];
  pg_comm *none;
  pg_comm_options brief = *options;
  if (!(brief.timeout > 0) || brief.timeout > LINGER) brief.timeout = LINGER;
  start(&brief, failure, &none, message, sizeof message);
}
