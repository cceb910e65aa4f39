/* A temporary folder per test program, small files in it, and a locale with a decimal comma. */
#ifndef PG_TEMPORARY_H
#define PG_TEMPORARY_H

#include <locale.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static char temporary_folder[64];

static inline const char *temporary_path(const char *name) {
  static char paths[4][256];
  static int turn;
  if (!temporary_folder[0]) {
    strcpy(temporary_folder, "/tmp/perigee-XXXXXX");
    if (!mkdtemp(temporary_folder)) abort();
  }
  char *path = paths[turn++ % 4];
  snprintf(path, sizeof paths[0], "%s/%s", temporary_folder, name);
  return path;
}

static inline void put_file(const char *path, const void *data, size_t size) {
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(data, 1, size, f) != size || fclose(f)) abort();
}

/* malloc'ed contents with a NUL after them. */
static inline char *get_file(const char *path, size_t *size) {
  *size = 0;
  FILE *f = fopen(path, "rb");
  if (!f) return NULL;
  fseek(f, 0, SEEK_END);
  *size = (size_t)ftell(f);
  rewind(f);
  char *text = calloc(1, *size + 1);
  if (!text || fread(text, 1, *size, f) != *size) abort();
  fclose(f);
  return text;
}

/* Set LC_NUMERIC to a locale whose decimal point is a comma; false where there is none. Bare
 * systems have only "C", so glibc is given the compiled form of such a locale: magic, field count,
 * offsets of the fields, then ",", ".", the grouping 3;3, both separators as wide characters, and
 * the name of the character set. */
static inline int comma_locale(void) {
  static const uint32_t head[8] = {0x20031114, 6, 32, 34, 36, 40, 44, 48};
  static const char tail[31] = ",\0.\0\3\3\0\0,\0\0\0.\0\0\0ANSI_X3.4-1968";
  static const char *const usual[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "de_DE"};
  for (size_t i = 0; i < sizeof usual / sizeof usual[0]; i++)
    if (setlocale(LC_NUMERIC, usual[i])) return localeconv()->decimal_point[0] == ',';
  char file[sizeof head + sizeof tail];
  memcpy(file, head, sizeof head);
  memcpy(file + sizeof head, tail, sizeof tail);
  mkdir(temporary_path("comma"), 0700);
  put_file(temporary_path("comma/LC_NUMERIC"), file, sizeof file);
  setenv("LOCPATH", temporary_folder, 1);
  const int set = setlocale(LC_NUMERIC, "comma") != NULL;
  unsetenv("LOCPATH");
  return set && localeconv()->decimal_point[0] == ',';
}

#endif
