/* core.socket: Unix sockets of one user, never blocking. Both ends check who is at the other one
 * (SO_PEERCRED), and the folder that holds the socket is closed to others. */
#include "bind.h"
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define PGL_SOCKET "perigee.socket"

typedef struct unix_socket {
  int fd; /* -1: closed */
  pid_t owner;
  char path[sizeof((struct sockaddr_un *)0)->sun_path]; /* of a listener: removed by close */
} unix_socket;

static unix_socket *push_socket(lua_State *L) {
  unix_socket *s = lua_newuserdatauv(L, sizeof *s, 0);
  memset(s, 0, sizeof *s);
  s->fd = -1;
  luaL_setmetatable(L, PGL_SOCKET);
  return s;
}

static unix_socket *check_socket(lua_State *L, int arg) {
  unix_socket *s = luaL_checkudata(L, arg, PGL_SOCKET);
  if (s->fd < 0) luaL_error(L, "this socket is closed");
  return s;
}

int pgl_socket_descriptor(lua_State *L, int arg) {
  return check_socket(L, arg)->fd;
}

static int socket_close(lua_State *L) {
  unix_socket *s = luaL_checkudata(L, 1, PGL_SOCKET);
  /* A process forked from the listening one leaves the file alone. */
  if (s->fd >= 0 && s->path[0] && s->owner == getpid()) unlink(s->path);
  if (s->fd >= 0) close(s->fd);
  s->fd = -1;
  return 0;
}

static bool same_user(int fd) {
  struct ucred peer;
  socklen_t size = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

/* nil, text, name when `path` is too long for an address; nothing otherwise. */
static int set_address(lua_State *L, struct sockaddr_un *address, const char *path) {
  char text[160];
  *address = (struct sockaddr_un){.sun_family = AF_UNIX};
  const size_t most = sizeof address->sun_path - 1;
  if (strlen(path) <= most) {
    strcpy(address->sun_path, path);
    return 0;
  }
  snprintf(text, sizeof text, "the socket's path has %zu bytes, at most %zu are allowed",
           strlen(path), most);
  return pgl_fail_text(L, PG_EIO, text);
}

/* Make `folder` for this user alone, or check that it is. */
static int private_folder(lua_State *L, const char *folder) {
  struct stat s;
  char text[512];
  if (mkdir(folder, 0700) != 0 && errno != EEXIST)
    return pgl_fail_errno(L, errno, "make the folder", folder);
  if (lstat(folder, &s) != 0) return pgl_fail_errno(L, errno, "look at", folder);
  if (S_ISDIR(s.st_mode) && s.st_uid == geteuid() && (s.st_mode & 077) == 0) return 0;
  snprintf(text, sizeof text, "%.300s must be a folder of this user with mode 0700", folder);
  return pgl_fail_text(L, PG_EIO, text);
}

/* folder() -> where this user's sockets are: in the runtime directory, else in /tmp. */
static int socket_folder(lua_State *L) {
  const char *runtime = getenv("XDG_RUNTIME_DIR");
  struct stat s;
  if (runtime && runtime[0] == '/' && stat(runtime, &s) == 0 && S_ISDIR(s.st_mode) &&
      s.st_uid == geteuid())
    lua_pushfstring(L, "%s/perigee", runtime);
  else
    lua_pushfstring(L, "/tmp/perigee-%d", (int)geteuid());
  return 1;
}

/* listen(folder, name) -> socket, path. The folder is made with mode 0700, the socket is 0600. */
static int socket_listen(lua_State *L) {
  const char *folder = pgl_string(L, 1, "folder"), *name = pgl_string(L, 2, "name");
  struct sockaddr_un address;
  lua_settop(L, 2);
  int failed = private_folder(L, folder);
  if (failed) return failed;
  const char *path = lua_pushfstring(L, "%s/%s", folder, name);
  if ((failed = set_address(L, &address, path))) return failed;
  unix_socket *s = push_socket(L);
  s->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  /* The mode of the descriptor is that of the file that bind makes. */
  if (s->fd < 0 || fchmod(s->fd, 0600) != 0 ||
      bind(s->fd, (struct sockaddr *)&address, sizeof address) != 0)
    return pgl_fail_errno(L, errno, "listen at", path);
  s->owner = getpid();
  strcpy(s->path, address.sun_path);
  if (listen(s->fd, 8) != 0) return pgl_fail_errno(L, errno, "listen at", path);
  lua_pushvalue(L, 3);
  return 2;
}

/* listener:accept() -> socket | nil when nobody waits | nil, text when somebody was refused */
static int socket_accept(lua_State *L) {
  unix_socket *listener = check_socket(L, 1);
  struct pollfd waiting = {.fd = listener->fd, .events = POLLIN};
  if (poll(&waiting, 1, 0) <= 0) return 0; /* accept makes a socket before it looks */
  const int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return 0;
  if (!same_user(fd)) {
    close(fd);
    lua_pushnil(L);
    lua_pushliteral(L, "another user was refused");
    return 2;
  }
  push_socket(L)->fd = fd; /* out of memory here loses a descriptor, and much else */
  return 1;
}

/* connect(path) -> socket */
static int socket_connect(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  struct sockaddr_un address;
  lua_settop(L, 1);
  int failed = set_address(L, &address, path);
  if (failed) return failed;
  unix_socket *s = push_socket(L);
  s->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (s->fd < 0 || connect(s->fd, (struct sockaddr *)&address, sizeof address) != 0)
    return pgl_fail_errno(L, errno, "connect to", path);
  if (!same_user(s->fd)) return pgl_fail_text(L, PG_EIO, "the socket belongs to another user");
  return 1;
}

/* abandoned(path) -> true when nobody has the socket in this file any more. A datagram socket is
 * refused by its kind when somebody does, so that a listener there never notices. */
static int socket_abandoned(lua_State *L) {
  const char *path = pgl_string(L, 1, "path");
  struct sockaddr_un address;
  lua_settop(L, 1);
  const int failed = set_address(L, &address, path);
  if (failed) return failed;
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return pgl_fail_errno(L, errno, "look at", path);
  const bool refused =
      connect(fd, (struct sockaddr *)&address, sizeof address) != 0 && errno == ECONNREFUSED;
  close(fd);
  lua_pushboolean(L, refused);
  return 1;
}

/* s:receive() -> what has arrived, "" when nothing has, nil at the end */
static int socket_receive(lua_State *L) {
  unix_socket *s = check_socket(L, 1);
  char buffer[1 << 16];
  ssize_t got = recv(s->fd, buffer, sizeof buffer, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    lua_pushliteral(L, "");
  } else if (got <= 0) {
    lua_pushnil(L);
  } else {
    lua_pushlstring(L, buffer, (size_t)got);
  }
  return 1;
}

/* s:send(text) -> bytes taken, 0 when the other end must read first; nil when it is gone */
static int socket_send(lua_State *L) {
  unix_socket *s = check_socket(L, 1);
  size_t size;
  const char *text = pgl_bytes(L, 2, "text", &size);
  ssize_t sent = size ? send(s->fd, text, size, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
  if (sent >= 0)
    lua_pushinteger(L, sent);
  else if (errno == EAGAIN || errno == EINTR)
    lua_pushinteger(L, 0);
  else
    lua_pushnil(L);
  return 1;
}

/* wait(list, seconds [, list of those to write to]): until one of them is ready, the time is over,
 * or a signal arrives; true when one is ready. */
static int socket_wait(lua_State *L) {
  struct pollfd fds[64];
  nfds_t count = 0;
  const double seconds = pgl_number(L, 2, "seconds");
  luaL_checktype(L, 1, LUA_TTABLE);
  for (int list = 1; list <= 3; list += 2)
    for (int64_t i = 1; lua_istable(L, list) && count < 64; i++) {
      if (lua_rawgeti(L, list, i) == LUA_TNIL) break;
      fds[count++] =
          (struct pollfd){.fd = check_socket(L, -1)->fd, .events = list == 1 ? POLLIN : POLLOUT};
      lua_pop(L, 1);
    }
  const double milliseconds = fmin(fmax(ceil(seconds * 1e3), 0), 1e6);
  lua_pushboolean(L, poll(fds, count, (int)milliseconds) > 0);
  return 1;
}

static const luaL_Reg methods[] = {{"accept", socket_accept},
                                   {"receive", socket_receive},
                                   {"send", socket_send},
                                   {"close", socket_close},
                                   {NULL, NULL}};
static const luaL_Reg functions[] = {{"folder", socket_folder},   {"listen", socket_listen},
                                     {"connect", socket_connect}, {"abandoned", socket_abandoned},
                                     {"wait", socket_wait},       {NULL, NULL}};

void pgl_open_socket(lua_State *L) {
  luaL_newmetatable(L, PGL_SOCKET);
  lua_pushcfunction(L, socket_close);
  lua_setfield(L, -2, "__gc");
  lua_pushcfunction(L, socket_close);
  lua_setfield(L, -2, "__close");
  luaL_newlib(L, methods);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
  luaL_newlib(L, functions);
  lua_setfield(L, -2, "socket");
}
