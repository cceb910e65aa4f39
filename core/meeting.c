/* Messages between ranks that rendezvous.c brings together. */
#include "meeting_internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct sending {
  uv_write_t request;
  pg__packet p;
} sending;

static void sent(uv_write_t *request, int status) {
  (void)status; /* a lost connection is noticed by its reader */
  free(request);
}

void pg__meeting_send(pg__connection *l, const pg__packet *p) {
  sending *s = l->open && !l->closing ? malloc(sizeof *s) : NULL;
  if (!s) return;
  s->p = *p;
  uv_buf_t buffer = uv_buf_init((char *)&s->p, sizeof s->p);
  if (uv_write(&s->request, (uv_stream_t *)&l->tcp, &buffer, 1, sent) < 0) free(s);
}

pg__packet pg__meeting_packet(const pg__meeting *m, enum pg__packet_kind kind) {
  pg__packet p = {.magic = MAGIC,
                  .kind = kind,
                  .rank = m->public.rank,
                  .world = m->public.world,
                  .sequence = m->sequence,
                  .session = m->session};
  return p;
}

void pg__meeting_send_all(pg__meeting *m, const pg__packet *p, const pg__connection *except) {
  for (int i = 0; i < m->used; i++)
    if (&m->links[i] != except && (m->public.rank != 0 || m->links[i].rank > 0))
      pg__meeting_send(&m->links[i], p);
}

static void closed(uv_handle_t *handle) {
  pg__connection *l = handle->data;
  l->open = l->closing = false;
}

void pg__meeting_close_link(pg__connection *l) {
  if (!l->open || l->closing) return;
  l->closing = true;
  uv_close((uv_handle_t *)&l->tcp, closed);
}

static bool valid_rank(const pg__meeting *m, int rank) {
  return rank >= 0 && rank < m->public.world;
}

/* A connection ended: with a farewell as it should, else the process at its end is gone. Before all
 * have met that ends nothing: a rank may come again, and who is not rank 0 may be restarted. */
static void lost(pg__connection *l) {
  pg__meeting *m = l->meeting;
  const bool hub = m->public.rank == 0;
  const int rank = hub ? l->rank : m->session ? 0 : -1;
  pg__meeting_close_link(l);
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
  pg__packet p = pg__meeting_packet(m, FAILURE);
  p.rank = rank;
  snprintf(p.text, sizeof p.text, "rank %d failed: its process ended without a word", rank);
  pg__comm_note(&m->public, rank, p.text);
  if (hub) pg__meeting_send_all(m, &p, l);
}

static void refuse(pg__connection *l, int rank, const char *text) {
  pg__packet answer = pg__meeting_packet(l->meeting, REFUSED);
  answer.rank = rank;
  answer.session = 0;
  snprintf(answer.text, sizeof answer.text, "%s", text);
  pg__meeting_send(l, &answer);
}

static void hello(pg__connection *l, const pg__packet *p) {
  pg__meeting *m = l->meeting;
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
  pg__packet answer = pg__meeting_packet(m, ACCEPTED);
  pg__meeting_send(l, &answer);
  l->rank = p->rank;
  l->joined = p->sequence == 0;
  m->joined += l->joined;
}

/* From a rank of this meeting. */
static void take(pg__connection *l, const pg__packet *p) {
  pg__meeting *m = l->meeting;
  const bool hub = m->public.rank == 0;
  switch (p->kind) {
  case WELCOME: m->welcome = true; break;
  case DATA:
    memcpy(m->data, p->text, sizeof m->data);
    m->has_data = true;
    break;
  case WAITING:
    if (p->sequence == m->sequence && valid_rank(m, p->rank)) m->waiting[p->rank] = true;
    if (hub) pg__meeting_send_all(m, p, l);
    break;
  case FAREWELL: m->gone[hub ? l->rank : 0] = true; break;
  case FAILURE:
    if (!valid_rank(m, p->rank)) break;
    pg__comm_note(&m->public, p->rank, p->text);
    if (hub) pg__meeting_send_all(m, p, l);
    break;
  default: break;
  }
}

/* A message counts when it opens a connection, or belongs to this meeting. */
static void sort_message(pg__connection *l, const pg__packet *p) {
  pg__meeting *m = l->meeting;
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
  pg__connection *l = handle->data;
  (void)suggested;
  *buffer = uv_buf_init((char *)&l->in + l->have, (unsigned)(sizeof l->in - l->have));
}

static void received(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer) {
  pg__connection *l = stream->data;
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

int pg__meeting_open_link(pg__meeting *m, pg__connection *l) {
  l->meeting = m;
  l->rank = -1;
  l->have = 0;
  l->since = uv_hrtime();
  l->closing = false;
  l->open = uv_tcp_init(&m->loop, &l->tcp) == 0;
  l->tcp.data = l;
  return l->open ? 0 : -1;
}

void pg__meeting_read(pg__connection *l) {
  uv_tcp_nodelay(&l->tcp, 1);
  uv_read_start((uv_stream_t *)&l->tcp, room, received);
}

static void tick(uv_timer_t *timer) {
  (void)timer; /* only ends a wait of the loop */
}

bool pg__meeting_wait(pg__meeting *m, bool (*done)(const pg__meeting *m),
                      void (*again)(pg__meeting *m), double seconds) {
  const uint64_t end = uv_hrtime() + (uint64_t)(seconds * 1e9);
  while (!done(m) && (m->public.failed_rank < 0 || m->leaving) && uv_hrtime() < end) {
    if (again) again(m);
    uv_timer_start(&m->timer, tick, RETRY_MS, 0);
    uv_run(&m->loop, UV_RUN_ONCE);
  }
  return done(m);
}

static bool got_data(const pg__meeting *m) {
  return m->has_data;
}
bool pg__meeting_nothing_queued(const pg__meeting *m) {
  for (int i = 0; i < m->used; i++)
    if (m->links[i].open && !m->links[i].closing &&
        uv_stream_get_write_queue_size((const uv_stream_t *)&m->links[i].tcp) > 0)
      return false;
  return true;
}
static bool all_gone(const pg__meeting *m) {
  for (int i = 0; i < m->used; i++)
    if (m->links[i].open && !m->links[i].closing && (m->public.rank > 0 || m->links[i].rank > 0) &&
        !m->gone[m->public.rank == 0 ? m->links[i].rank : 0])
      return false;
  return true;
}

static int broadcast(pg_comm *comm, pg_queue *queue, void *data, int64_t bytes, int root) {
  pg__meeting *m = (pg__meeting *)comm;
  (void)queue, (void)root; /* always rank 0 */
  if (comm->rank == 0) {
    pg__packet p = pg__meeting_packet(m, DATA);
    memcpy(p.text, data, (size_t)bytes);
    pg__meeting_send_all(m, &p, NULL);
    pg__meeting_wait(m, pg__meeting_nothing_queued, NULL, comm->timeout);
    return comm->failed_rank < 0 ? 0 : -1;
  }
  if (pg__meeting_wait(m, got_data, NULL, comm->timeout)) {
    memcpy(data, m->data, (size_t)bytes);
    return 0;
  }
  char text[sizeof comm->failure];
  snprintf(text, sizeof text, "rank 0 did not begin within %g s", comm->timeout);
  pg__comm_note(comm, 0, text);
  return -1;
}

void pg__meeting_report(pg_comm *comm) {
  pg__meeting *m = (pg__meeting *)comm;
  pg__packet p = pg__meeting_packet(m, FAILURE);
  p.rank = comm->failed_rank;
  memcpy(p.text, comm->failure, sizeof comm->failure);
  pg__meeting_send_all(m, &p, NULL);
  uv_run(&m->loop, UV_RUN_NOWAIT);
}

static int poll_others(pg_comm *comm, int64_t sequence, const char *operation, double waited) {
  pg__meeting *m = (pg__meeting *)comm;
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
    pg__packet p = pg__meeting_packet(m, WAITING);
    m->answered = true;
    pg__meeting_send_all(m, &p, NULL);
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
  pg__meeting_report(comm);
  return -1;
}

void pg__meeting_stop_listening(pg__meeting *m) {
  if (m->listening) uv_close((uv_handle_t *)&m->listener, NULL);
  m->listening = false;
  for (int i = 0; m->public.rank == 0 && i < m->used; i++)
    if (m->links[i].rank < 0) pg__meeting_close_link(&m->links[i]);
}

void pg__meeting_close(pg_comm *comm) {
  pg__meeting *m = (pg__meeting *)comm;
  pg__packet p = pg__meeting_packet(m, FAREWELL);
  pg__meeting_send_all(m, &p, NULL);
  m->leaving = true;
  pg__meeting_wait(m, all_gone, NULL, comm->failed_rank < 0 ? GRACE : 5 * GRACE);
  pg__meeting_wait(m, pg__meeting_nothing_queued, NULL, GRACE);
  for (int i = 0; i < m->used; i++) pg__meeting_close_link(&m->links[i]);
  pg__meeting_stop_listening(m);
  uv_close((uv_handle_t *)&m->timer, NULL);
  uv_run(&m->loop, UV_RUN_DEFAULT);
  uv_loop_close(&m->loop);
  free(m->links);
  free(m->waiting);
  free(m->gone);
  free(m->told);
  free(m);
}

const pg__comm_ops pg__meeting_ops = {.broadcast = broadcast,
                                      .poll = poll_others,
                                      .report = pg__meeting_report,
                                      .close = pg__meeting_close};
