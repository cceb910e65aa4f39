/* How a context finds the CUDA plugin: beside a copy of this program in a folder of its own, where
 * the plugin is missing, broken, refuses, or works. */
#include "core/context.h"
#include "core/internal.h"
#include "unit.h"

#include <limits.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the copy: DEVICE INDEX -> a line on standard output ---------------------------------- */
static int child(const char *device, const char *index) {
  pg_context *ctx;
  pg_device d;
  char message[512];
  pg_context_options options = {.device = device, .device_index = atoi(index), .threads = 1};
  int status = pg_context_new(&options, &ctx, message, sizeof message);
  if (status < 0) {
    printf("%s %s\n", pg_error_name(status), message);
    return 0;
  }
  if (pg_context_describe(ctx, &d) < 0) return 1;
  printf("%s, %s, %d of %d, %lld of %lld\n", pg_context_device(ctx), d.name, d.index, d.count,
         (long long)d.memory_free, (long long)d.memory_total);
  pg_context_free(ctx);
  return 0;
}

/* ---- the tests ---------------------------------------------------------------------------- */
static char folder[] = "/tmp/perigee-XXXXXX";

static void shell(const char *format, ...) {
  char command[3 * PATH_MAX];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(command, sizeof command, format, arguments);
  va_end(arguments);
  CHECK(system(command) == 0, "%s", command);
}

/* The copy's line. */
static const char *ask(const char *environment, const char *device, int index) {
  static char line[600];
  char command[PATH_MAX];
  snprintf(command, sizeof command, "cd / && %s %s/bin/program %s %d", environment, folder, device,
           index);
  FILE *f = popen(command, "r");
  line[0] = 0;
  if (!f || !fgets(line, sizeof line, f)) snprintf(line, sizeof line, "nothing");
  CHECK(f && pclose(f) == 0, "%s", command);
  return line;
}
static bool says(const char *line, const char *part) {
  if (strstr(line, part)) return true;
  printf("  it said: %s", line);
  return false;
}

TEST(no_plugin) {
  CHECK(says(ask("", "cuda", 0), "EDEVICE device \"cuda\" is not available: this build has no CUDA "
                                 "plugin (perigee_cuda.so)"));
  CHECK(says(ask("", "auto", 0), "cpu, CPU, "));
  CHECK(says(ask("", "cpu", 0), "0 of 1, 0 of 0"));
  CHECK(says(ask("", "cpu", 1), "there is one CPU device, index 0, not 1"));
  CHECK(says(ask("", "cpu", -1), "EINVAL device_index is -1"));
}

TEST(broken_plugin) {
  shell("echo rubbish > %s/bin/perigee_cuda.so", folder);
  CHECK(says(ask("", "cuda", 0), "perigee_cuda.so does not load: "));
  CHECK(says(ask("", "auto", 0), "cpu, CPU, "));
  shell("rm %s/bin/perigee_cuda.so", folder);
}

/* Every place that a build or an installation uses. */
TEST(working_plugin) {
  static const char *const places[] = {"bin", "bin/lib", "bin/lib/perigee", "lib/perigee"};
  for (size_t i = 0; i < PG_COUNT(places); i++) {
    shell("mkdir -p %s/%s && cp %s %s/%s/perigee_cuda.so", folder, places[i], PG_FAKE_PLUGIN,
          folder, places[i]);
    CHECK(says(ask("", "cuda", 0), "cuda, Fake GPU, 0 of 1, 3 of 4"), "in %s", places[i]);
    if (i + 1 < PG_COUNT(places)) shell("rm %s/%s/perigee_cuda.so", folder, places[i]);
  }
  CHECK(says(ask("", "auto", 0), "cuda, Fake GPU"));
  CHECK(says(ask("", "cpu", 0), "cpu, CPU, "));
  CHECK(says(ask("", "cuda", 3), "EDEVICE device \"cuda\" is not available: there is no GPU 3, the "
                                 "driver sees 1"));
  CHECK(says(ask("FAKE_CUDA='driver 11.4 is too old'", "cuda", 0), "driver 11.4 is too old"));
  CHECK(says(ask("FAKE_CUDA='no driver'", "auto", 0), "cpu, CPU, "));
}

/* Started through PATH with a relative entry, from a folder that is then left. */
TEST(found_from_anywhere) {
  char command[PATH_MAX], line[200] = "";
  snprintf(command, sizeof command, "cd %s && PATH=bin:$PATH program cuda 0", folder);
  FILE *f = popen(command, "r");
  CHECK(f && fgets(line, sizeof line, f) && says(line, "cuda, Fake GPU"), "%s", line);
  if (f) pclose(f);
}

int main(int argc, char **argv) {
  if (argc == 3) return child(argv[1], argv[2]);
  if (!mkdtemp(folder)) return 1;
  shell("mkdir %s/bin && cp /proc/%d/exe %s/bin/program", folder, (int)getpid(), folder);
  RUN(no_plugin);
  RUN(broken_plugin);
  RUN(working_plugin);
  RUN(found_from_anywhere);
  shell("rm -r %s", folder);
  return unit_report();
}
