/* The unit tests' harness: a test file lists TEST(name) functions in main through RUN(name).
 * Every test prints "ok NAME" or "not ok NAME" with the failed check; main returns unit_report(),
 * which prints the count that tools/check adds up. */
#ifndef PG_UNIT_H
#define PG_UNIT_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int unit_passed, unit_failed, unit_bad;

#define TEST(name) static void test_##name(void)
#define CHECK(condition, ...)                                                                      \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      unit_bad++;                                                                                  \
      printf("  %s:%d: %s failed: ", __FILE__, __LINE__, #condition);                              \
      printf(" " __VA_ARGS__);                                                                     \
      printf("\n");                                                                                \
    }                                                                                              \
  } while (0)
#define CHECK_CLOSE(got, want, relative)                                                           \
  CHECK(fabs((double)(got) - (double)(want)) <= (relative)*fmax(fabs((double)(want)), 1e-300),     \
        "got %.17g, want %.17g, relative error %.3g > %.3g", (double)(got), (double)(want),        \
        fabs((double)(got) - (double)(want)) / fmax(fabs((double)(want)), 1e-300),                 \
        (double)(relative))
#define RUN(name)                                                                                  \
  do {                                                                                             \
    unit_bad = 0;                                                                                  \
    test_##name();                                                                                 \
    if (unit_bad)                                                                                  \
      unit_failed++;                                                                               \
    else                                                                                           \
      unit_passed++;                                                                               \
    printf("%s %s\n", unit_bad ? "not ok" : "ok", #name);                                          \
    fflush(stdout);                                                                                \
  } while (0)

/* What a test that runs on every device makes its context with: PG_TEST_DEVICE, or the CPU. */
static inline const char *unit_device(void) {
  const char *device = getenv("PG_TEST_DEVICE");
  return device && *device ? device : "cpu";
}

static inline int unit_report(void) {
  printf("unit: %d passed, %d failed\n", unit_passed, unit_failed);
  return unit_failed != 0;
}

#endif
