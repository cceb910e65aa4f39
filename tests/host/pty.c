/* host_pty SCRIPT COMMAND [ARGUMENT…]: runs a command in a terminal of 100 x 30 and types to it as
 * the lines of SCRIPT say; prints what the terminal showed. Lines of the script:
 *   > TEXT   type TEXT and the return key       ^X      the control key X, as in ^C, ^D, ^I
 *   + TEXT   type TEXT alone                    < TEXT  wait until TEXT is shown (20 s at most)
 *   ! NAME   send SIGINT, SIGTERM or SIGKILL    . N     wait N milliseconds
 * Keys other than ^C wait until the command edits a line.
 * Afterwards the terminal stays until the command ends, 20 s at most. The exit code is that of the
 * command, 128 + n after signal n, or 99 when a text never came. */
#include <errno.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE = 20000, NEVER_CAME = 99, SIZE = 1 << 20 };

static int terminal;
static char shown[SIZE]; /* everything that was shown */
static size_t length, seen;
static bool leaving; /* ^D was the last key: it is lost when the editor was not ready */

static long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Read what the command writes within `milliseconds`; false when it has closed the terminal. */
static bool listen_to(long milliseconds) {
  struct pollfd fd = {.fd = terminal, .events = POLLIN};
  if (poll(&fd, 1, (int)milliseconds) <= 0) return true;
  if (length + 4096 >= SIZE) exit(NEVER_CAME);
  ssize_t got = read(terminal, shown + length, 4096);
  if (got <= 0) return false;
  length += (size_t)got;
  shown[length] = '\0';
  return true;
}

static bool wait_for(const char *text) {
  const long end = now() + PATIENCE;
  for (;;) {
    char *found = strstr(shown + seen, text);
    if (found) {
      seen = (size_t)(found - shown) + strlen(text);
      return true;
    }
    if (now() >= end || !listen_to(50)) return strstr(shown + seen, text) != NULL;
  }
}

static void type(const char *text, size_t size) {
  if (write(terminal, text, size) < 0) perror("host_pty: write");
}

/* Keys belong to the line editor: wait until it has the terminal. */
static void wait_for_editor(void) {
  struct termios mode;
  for (long end = now() + PATIENCE; now() < end; listen_to(5))
    if (tcgetattr(terminal, &mode) == 0 && !(mode.c_lflag & ICANON)) return;
}

static bool obey(char *line, pid_t child) {
  line[strcspn(line, "\n")] = '\0';
  char *text = line[0] && line[1] == ' ' ? line + 2 : line + 1;
  if (line[0] == '>' || line[0] == '+' || (line[0] == '^' && line[1] != 'C')) wait_for_editor();
  switch (line[0]) {
  case '>':
    type(text, strlen(text));
    type("\r", 1);
    return true;
  case '+': type(text, strlen(text)); return true;
  case '^':
    leaving = line[1] == 'D';
    type(&(char){(char)(line[1] & 31)}, 1);
    return true;
  case '<':
    if (wait_for(text)) return true;
    fprintf(stderr, "host_pty: '%s' never came\n", text);
    return false;
  case '!':
    kill(child, strcmp(text, "SIGINT") == 0    ? SIGINT
                : strcmp(text, "SIGTERM") == 0 ? SIGTERM
                                               : SIGKILL);
    return true;
  case '.':
    for (long end = now() + atol(text); now() < end;) listen_to(20);
    return true;
  default: return true;
  }
}

int main(int argc, char **argv) {
  struct winsize size = {.ws_row = 30, .ws_col = 100};
  char line[4096];
  int status = 0;
  FILE *script = argc > 2 ? fopen(argv[1], "r") : NULL;
  if (!script) {
    fprintf(stderr, "usage: host_pty SCRIPT COMMAND [ARGUMENT...]\n");
    return 2;
  }
  pid_t child = forkpty(&terminal, NULL, NULL, &size);
  if (child < 0) return 2;
  if (child == 0) {
    setenv("TERM", "xterm", 1);
    execvp(argv[2], argv + 2);
    _exit(127);
  }
  bool good = true;
  while (good && fgets(line, sizeof line, script)) good = obey(line, child);
  long again = now() + 500;
  for (long end = now() + (good ? PATIENCE : 0); now() < end;) {
    if (!listen_to(50)) break;
    if (!leaving || now() < again) continue;
    type("\4", 1);
    again += 500;
  }
  if (waitpid(child, &status, WNOHANG) == 0) {
    if (good) usleep(200000);
    if (waitpid(child, &status, WNOHANG) == 0) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
    }
  }
  fwrite(shown, 1, length, stdout);
  fclose(script);
  if (!good) return NEVER_CAME;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
