/* A meeting of ranks over sockets: what rendezvous.c, which brings them together, and meeting.c,
 * which carries their messages from then on, share. */
#ifndef PG_MEETING_INTERNAL_H
#define PG_MEETING_INTERNAL_H

#include "comm_internal.h"

#include <uv.h>

#define MAGIC 0x50474532 /* "PGE2", the version of this protocol */
#define RETRY_MS 100     /* between attempts to connect, and looks at a wait */
#define GRACE 2.0        /* seconds in which a rank that waits answers */

enum pg__packet_kind { HELLO = 1, ACCEPTED, WELCOME, REFUSED, DATA, FAILURE, WAITING, FAREWELL };

typedef struct pg__packet {
  uint32_t magic, kind;
  int32_t rank, world; /* of the sender; FAILURE, REFUSED: the rank that failed */
  int64_t sequence;    /* HELLO: 1 when a failure follows and the rank does not come */
  uint64_t session;    /* 0 in a hello and in a refusal */
  char text[900];      /* HELLO: the job */
} pg__packet;

struct pg__meeting;
typedef struct pg__connection {
  uv_tcp_t tcp;
  struct pg__meeting *meeting;
  pg__packet in;
  size_t have;                /* bytes of `in` */
  int rank;                   /* -1 until it said hello */
  uint64_t since;             /* it is open, uv_hrtime */
  bool open, closing, joined; /* joined: counted in the meeting's */
} pg__connection;

typedef struct pg__meeting {
  pg_comm public;
  uv_loop_t loop;
  uv_tcp_t listener;
  uv_timer_t timer;
  uv_connect_t connecting;
  pg__connection *links; /* rank 0: [used], free ones are not open; others: [1], to rank 0 */
  int used, joined;      /* rank 0: world + STRANGERS; ranks that said hello */
  uint64_t session;      /* others: 0 until rank 0 accepted the hello */
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
} pg__meeting;

/* A packet of this rank, and ways to send it: over one connection; to all other ranks, but not back
 * to `except`: from rank 0 directly, else through it. */
pg__packet pg__meeting_packet(const pg__meeting *m, enum pg__packet_kind kind);
void pg__meeting_send(pg__connection *l, const pg__packet *p);
void pg__meeting_send_all(pg__meeting *m, const pg__packet *p, const pg__connection *except);
/* The failure that ended it, to all. */
void pg__meeting_report(pg_comm *comm);

int pg__meeting_open_link(pg__meeting *m, pg__connection *l);
void pg__meeting_read(pg__connection *l);
void pg__meeting_close_link(pg__connection *l);
void pg__meeting_stop_listening(pg__meeting *m);

/* Until `done`, a failure or the timeout; false after the last two. `again` runs now and then. */
bool pg__meeting_wait(pg__meeting *m, bool (*done)(const pg__meeting *m),
                      void (*again)(pg__meeting *m), double seconds);
bool pg__meeting_nothing_queued(const pg__meeting *m);
/* After a failure wait until the others have said farewell too, so that all have heard the reason;
 * rank 0 passes messages on meanwhile. Frees it. */
void pg__meeting_close(pg_comm *comm);

extern const pg__comm_ops pg__meeting_ops;

#endif
