/* Ranks that find each other through MASTER_ADDR and MASTER_PORT. Rank 0 listens, the others
 * connect; the connections stay, so that a failure, or the end of a process, is heard of at once.
 * Rank 0 passes on what it hears. Messages have one size; the loop runs only inside these calls.
 *
 * Whoever knows the port can connect: port scanners, health checks, ranks of another job. Only a
 * hello that names this job, its number of ranks and a rank that has not come yet makes a
 * connection count; nothing else on it has an effect, and a refusal tells the newcomer alone. Rank
 * 0 stops listening when all have come, so that another job can use the port. A number drawn by
 * rank 0 marks the messages of one meeting. */
#include "meeting_internal.h"

#include <netdb.h>
#include <stdlib.h>
#include <string.h>

#define LINGER 10.0  /* in which a failure at the start is told to whoever comes */
#define SILENCE 5.0  /* after which a connection without a hello is closed */
#define STRANGERS 64 /* connections without a hello at a time */

static void turned_away(uv_handle_t *handle) {
  free(handle);
}

static void arrived(uv_stream_t *listener, int status) {
  pg__meeting *m = listener->data;
  pg__connection *l = NULL;
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
  if (pg__meeting_open_link(m, l) < 0) return;
  if (uv_accept(listener, (uv_stream_t *)&l->tcp) < 0)
    pg__meeting_close_link(l);
  else
    pg__meeting_read(l);
}

/* Rank 0, while it waits for hellos. */
static void close_silent(pg__meeting *m) {
  for (int i = 0; i < m->used; i++)
    if (m->links[i].open && m->links[i].rank < 0 &&
        uv_hrtime() - m->links[i].since > (uint64_t)(SILENCE * 1e9))
      pg__meeting_close_link(&m->links[i]);
}

static void connected(uv_connect_t *request, int status) {
  pg__connection *l = request->handle->data;
  pg__meeting *m = l->meeting;
  m->error = status;
  if (status < 0) {
    pg__meeting_close_link(l);
    return;
  }
  pg__meeting_read(l);
  pg__packet p = pg__meeting_packet(m, HELLO);
  p.sequence = m->failing;
  snprintf(p.text, sizeof p.text, "%s", m->job);
  pg__meeting_send(l, &p);
}

/* One more attempt to reach rank 0, when none is under way and it is time. */
static void attempt(pg__meeting *m) {
  pg__connection *l = &m->links[0];
  if (l->open || uv_hrtime() < m->next || pg__meeting_open_link(m, l) < 0) return;
  m->next = uv_hrtime() + RETRY_MS * 1000000ull;
  m->error = uv_tcp_connect(&m->connecting, &l->tcp, (struct sockaddr *)&m->address, connected);
  if (m->error < 0) pg__meeting_close_link(l);
}

static int resolve(pg__meeting *m, const pg_launcher *launch, char *message, size_t size) {
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

static int listen_for_ranks(pg__meeting *m, const pg_launcher *launch, char *message, size_t size) {
  struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)launch->port)};
  struct sockaddr_in any4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)launch->port)};
  uv_tcp_init(&m->loop, &m->listener);
  m->listener.data = m;
  m->listening = true;
  do uv_random(NULL, NULL, &m->session, sizeof m->session, 0, NULL);
  while (m->session == 0);
  int error;
  if (launch->listener > 0) {
    error = uv_tcp_open(&m->listener, launch->listener);
  } else {
    error = uv_tcp_bind(&m->listener, (struct sockaddr *)&any, 0); /* IPv4 as well */
    if (error == UV_EAFNOSUPPORT) error = uv_tcp_bind(&m->listener, (struct sockaddr *)&any4, 0);
  }
  if (!error) error = uv_listen((uv_stream_t *)&m->listener, 128, arrived);
  if (!error) return 0;
  snprintf(message, size, "MASTER_PORT = %d: rank 0 cannot listen there: %s%s", launch->port,
           uv_strerror(error),
           error == UV_EADDRINUSE ? " (by another job, perhaps): expected a free port" : "");
  return PG_EIO;
}

static bool all_joined(const pg__meeting *m) {
  return m->joined == m->public.world - 1;
}
static bool all_told(const pg__meeting *m) {
  for (int r = 1; r < m->public.world; r++)
    if (!m->told[r]) return false;
  return true;
}
static bool accepted(const pg__meeting *m) {
  return m->session != 0;
}
static bool welcomed(const pg__meeting *m) {
  return m->welcome;
}
/* Rank 0: who has not come. */
static void name_absent(const pg__meeting *m, char *message, size_t size) {
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
static int receive_ranks(pg__meeting *m, const char *failure, char *message, size_t size) {
  if (failure)
    pg__comm_note(&m->public, 0, failure);
  else if (pg__meeting_wait(m, all_joined, close_silent, m->public.timeout)) {
    pg__packet p = pg__meeting_packet(m, WELCOME);
    m->welcome = true;
    pg__meeting_send_all(m, &p, NULL);
    pg__meeting_wait(m, pg__meeting_nothing_queued, NULL, GRACE);
    pg__meeting_stop_listening(m);
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
  pg__packet p = pg__meeting_packet(m, FAILURE);
  p.rank = m->public.failed_rank;
  memcpy(p.text, m->public.failure, sizeof p.text);
  pg__meeting_send_all(m, &p, NULL);
  m->leaving = true;
  pg__meeting_wait(m, all_told, close_silent, LINGER);
  pg__meeting_wait(m, pg__meeting_nothing_queued, NULL, GRACE);
  return PG_EPEER;
}

static int go_to_first(pg__meeting *m, const char *failure, char *message, size_t size) {
  const bool met = failure ? pg__meeting_wait(m, accepted, attempt, m->public.timeout)
                           : pg__meeting_wait(m, welcomed, attempt, m->public.timeout + GRACE);
  if (met && failure) {
    pg__comm_note(&m->public, m->public.rank, failure);
    pg__meeting_report(&m->public);
    m->leaving = true;
    pg__meeting_wait(m, pg__meeting_nothing_queued, NULL, GRACE);
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
  pg__meeting *m = calloc(1, sizeof *m);
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
                        .ops = &pg__meeting_ops,
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
  pg__meeting_close(&m->public);
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
