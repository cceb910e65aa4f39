/* Preparing a dataset: texts to shards, in bounded memory.
 *
 * Texts are read in chunks that end where the pieces of the pre-tokeniser end, once to count words
 * when a tokenizer is trained, and once to encode. The ids go to one file first, since the split
 * depends on their number, and from there into the shards. All of it happens in OUT.tmp-PID, which
 * becomes OUT by a rename; until then nothing is called OUT. */
#include "data.h"
#include "files.h"
#include "internal.h"
#include "json.h"
#include "shards_internal.h"
#include "tokenizer_internal.h"
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHUNK ((size_t)4 << 20) /* bytes of text at a time */
#define BLOCK (1 << 19)         /* tokens at a time */
#define DEFAULT_SHARD 100000000 /* as in the published data */
#define LEAST_SHARD 4           /* so that no shard is left with one token */
#define BYTES_PER_TEXT_BYTE 1   /* disk: ids are written twice, about 0.5 bytes each */
#define LARGEST_VOCAB ((int64_t)UINT16_MAX + 1)

typedef struct source {
  int64_t bytes;
  struct timespec modified;
  char sha256[65];
} source;

typedef struct preparing {
  pg_context *context;
  const pg_prepare_options *options;
  const char *name;
  char *out, *temporary, *ids_path;
  int64_t shard_tokens, text_bytes, done_bytes, tokens;
  source *sources;
  pg_tokenizer *tokenizer;
  int ids_fd;
  pg__ids ids;
  uint16_t *block; /* [BLOCK] */
} preparing;

static void report(const preparing *p, const char *what, double fraction) {
  if (p->options->progress) p->options->progress(p->options->self, what, fraction);
}

/* ---- texts in chunks ------------------------------------------------------------------------- */
typedef struct chunks {
  pg_context *context;
  const char *path;
  int fd;
  char *buffer;
  size_t size, capacity, taken;
  bool ended;
} chunks;

static int chunks_open(pg_context *ctx, const char *path, chunks *c) {
  *c = (chunks){.context = ctx, .path = path, .fd = open(path, O_RDONLY | O_CLOEXEC)};
  if (c->fd >= 0) return 0;
  return pg_fail(ctx, errno == ENOENT ? PG_ENOENT : PG_EIO, "text %s cannot be opened: %s", path,
                 strerror(errno));
}

static void chunks_close(chunks *c) {
  if (c->fd >= 0) close(c->fd);
  free(c->buffer);
}

static int chunks_fill(chunks *c, size_t capacity) {
  if (capacity > c->capacity) {
    char *larger = realloc(c->buffer, capacity);
    if (!larger)
      return pg_fail(c->context, PG_ENOMEM, "no memory for %zu bytes of %s", capacity, c->path);
    c->buffer = larger;
    c->capacity = capacity;
  }
  while (!c->ended && c->size < c->capacity) {
    ssize_t n = read(c->fd, c->buffer + c->size, c->capacity - c->size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      return pg_fail(c->context, PG_EIO, "text %s cannot be read: %s", c->path, strerror(errno));
    if (n == 0) c->ended = true;
    c->size += (size_t)n;
  }
  return 0;
}

/* 1 and the next chunk, 0 at the end, negative on failure. A text without a place to cut is taken
 * whole. */
static int chunks_next(chunks *c, const char **text, size_t *size) {
  if (pg_context_cancelled(c->context))
    return pg_fail(c->context, PG_ECANCELED, "preparing %s was cancelled", c->path);
  if (c->taken) memmove(c->buffer, c->buffer + c->taken, c->size - c->taken);
  c->size -= c->taken;
  for (size_t capacity = CHUNK;; capacity = 2 * c->capacity) {
    int status = chunks_fill(c, capacity);
    if (status < 0) return status;
    c->taken = c->ended ? c->size : pg__safe_cut(c->buffer, c->size);
    if (c->taken > 0 || c->ended) break;
  }
  *text = c->buffer;
  *size = c->taken;
  return c->taken > 0;
}

/* ---- JSON Lines: a document a line ----------------------------------------------------------- */
static bool is_lines(const char *path) {
  const size_t n = strlen(path);
  return n > 6 && strcmp(path + n - 6, ".jsonl") == 0;
}

typedef struct lines {
  pg_context *context;
  const char *path, *field;
  FILE *file;
  char *line;
  size_t capacity;
  int64_t number, bytes; /* read so far */
  json_t *value;         /* of the line: owns the text given out */
} lines;

static int lines_open(const preparing *p, const char *path, lines *l) {
  *l = (lines){.context = p->context, .path = path, .file = fopen(path, "rbe")};
  l->field = p->options->field ? p->options->field : "text";
  if (l->file) return 0;
  return pg_fail(p->context, errno == ENOENT ? PG_ENOENT : PG_EIO, "text %s cannot be opened: %s",
                 path, strerror(errno));
}

static void lines_close(lines *l) {
  if (l->file) fclose(l->file);
  json_decref(l->value);
  free(l->line);
}

/* 1 and the next document, 0 at the end, negative on failure. Blank lines and empty documents are
 * passed over. */
static int lines_next(lines *l, const char **text, size_t *size) {
  for (;;) {
    char what[256];
    json_t *document;
    if (pg_context_cancelled(l->context))
      return pg_fail(l->context, PG_ECANCELED, "preparing %s was cancelled", l->path);
    errno = 0;
    const ssize_t n = getline(&l->line, &l->capacity, l->file);
    if (n < 0 && !feof(l->file))
      return pg_fail(l->context, errno == ENOMEM ? PG_ENOMEM : PG_EIO, "text %s cannot be read: %s",
                     l->path, strerror(errno));
    if (n < 0) return 0;
    l->number++;
    l->bytes += n;
    if (strspn(l->line, " \t\r\n") == (size_t)n) continue;
    json_decref(l->value);
    l->value = NULL;
    snprintf(what, sizeof what, "%.200s:%lld", l->path, (long long)l->number);
    const int status = pg__json_parse_text(l->context, l->line, (size_t)n, what, &l->value);
    if (status < 0) {
      l->value = NULL;
      return status;
    }
    document = json_object_get(l->value, l->field);
    if (!json_is_string(document))
      return pg_fail(l->context, PG_EFORMAT, "%s: %s, expected an object with a text \"%s\"", what,
                     !json_is_object(l->value) ? "not an object"
                     : document                ? "the field is not a text"
                                               : "the field is missing",
                     l->field);
    *text = json_string_value(document);
    *size = json_string_length(document);
    if (*size > 0) return 1;
  }
}

/* ---- checks ---------------------------------------------------------------------------------- */
static int check_name(pg_context *ctx, const char *name) {
  bool good = *name && *name != '.';
  /* Such a name would put shards of one split into the other. */
  if (strstr(name, "_train_") || strstr(name, "_val_"))
    return pg_fail(ctx, PG_EINVAL, "prepare: name \"%s\" must not contain _train_ or _val_", name);
  for (const char *s = name; *s; s++)
    good = good && (isalnum((unsigned char)*s) || strchr("._-", *s));
  if (good) return 0;
  return pg_fail(ctx, PG_EINVAL,
                 "prepare: name \"%s\"; allowed are letters, digits, '_', '-' and '.'", name);
}

static int check_options(preparing *p) {
  const pg_prepare_options *o = p->options;
  p->name = o->name ? o->name : "text";
  p->shard_tokens = o->shard_tokens ? o->shard_tokens : DEFAULT_SHARD;
  if (o->text_count < 1) return pg_fail(p->context, PG_EINVAL, "prepare: no text is given");
  if (!(o->val_fraction > 0 && o->val_fraction < 1))
    return pg_fail(p->context, PG_EINVAL,
                   "prepare: val_fraction is %g, allowed are numbers between 0 and 1",
                   o->val_fraction);
  if (p->shard_tokens < LEAST_SHARD || p->shard_tokens > INT32_MAX)
    return pg_fail(p->context, PG_EINVAL, "prepare: shard_tokens is %lld, allowed are %d to %d",
                   (long long)p->shard_tokens, LEAST_SHARD, INT32_MAX);
  if (!o->tokenizer && (o->vocab < 257 || o->vocab > LARGEST_VOCAB))
    return pg_fail(p->context, PG_EINVAL, "prepare: vocab is %lld, allowed are 257 to %lld",
                   (long long)o->vocab, (long long)LARGEST_VOCAB);
  return check_name(p->context, p->name);
}

static int check_texts(preparing *p) {
  p->sources = calloc(p->options->text_count, sizeof *p->sources);
  if (!p->sources) return pg_fail(p->context, PG_ENOMEM, "no memory for the list of texts");
  for (size_t i = 0; i < p->options->text_count; i++) {
    const char *path = p->options->texts[i];
    struct stat info;
    if (stat(path, &info) < 0)
      return pg_fail(p->context, errno == ENOENT || errno == ENOTDIR ? PG_ENOENT : PG_EIO,
                     "text %s cannot be examined: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode))
      return pg_fail(p->context, PG_EINVAL, "text %s is not a regular file", path);
    if (info.st_size == 0) return pg_fail(p->context, PG_EDATA, "text %s is empty", path);
    p->sources[i].bytes = info.st_size;
    p->sources[i].modified = info.st_mtim;
    p->text_bytes += info.st_size;
  }
  return 0;
}

/* OUT may be missing or an empty folder. Sets out (without a trailing slash) and temporary. */
static int check_out(preparing *p) {
  const char *path = p->options->out;
  if (!path || !*path) return pg_fail(p->context, PG_EINVAL, "prepare: no output folder is given");
  DIR *dir = opendir(path);
  if (!dir && errno != ENOENT)
    return pg_fail(p->context, errno == ENOTDIR ? PG_EEXIST : PG_EIO,
                   "output folder %s cannot be used: %s", path, strerror(errno));
  bool empty = true, shards = false;
  if (dir) {
    for (struct dirent *e; (e = readdir(dir));) {
      size_t n = strlen(e->d_name);
      if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
      empty = false;
      shards = shards || (n > 4 && strcmp(e->d_name + n - 4, ".bin") == 0);
    }
    closedir(dir);
  }
  if (!empty)
    return pg_fail(p->context, PG_EEXIST, "output folder %s %s; give a new or an empty one", path,
                   shards ? "holds shards already" : "is not empty");
  p->out = dir ? realpath(path, NULL) : strdup(path);
  if (!p->out) return pg_fail(p->context, PG_ENOMEM, "no memory for the path %s", path);
  for (size_t n = strlen(p->out); n > 1 && p->out[n - 1] == '/'; n--) p->out[n - 1] = 0;
  if (asprintf(&p->temporary, "%s.tmp-%ld", p->out, (long)getpid()) < 0) p->temporary = NULL;
  if (!p->temporary || asprintf(&p->ids_path, "%s/ids", p->temporary) < 0) p->ids_path = NULL;
  if (!p->ids_path) return pg_fail(p->context, PG_ENOMEM, "no memory for the path %s", path);
  return 0;
}

/* ---- tokenizer ------------------------------------------------------------------------------- */
static void report_merges(void *self, int64_t merges, int64_t total) {
  report(self, "training the tokenizer", total ? (double)merges / (double)total : 1);
}

static int train_on_lines(preparing *p, pg__trainer *trainer, const char *path, int64_t before) {
  int status, more;
  lines l;
  const char *text;
  size_t size;
  PG_TRY(lines_open(p, path, &l));
  while ((more = lines_next(&l, &text, &size)) > 0) {
    PG_TRY(pg__trainer_add(trainer, text, size));
    report(p, "counting words",
           (double)pg__min(before + l.bytes, p->text_bytes) / (double)p->text_bytes);
  }
  status = more;
fail:
  lines_close(&l);
  return status;
}

static int train(preparing *p) {
  int status, more = 0;
  pg__trainer *trainer = NULL;
  int64_t done = 0;
  PG_TRY(pg__trainer_new(p->context, &trainer));
  for (size_t i = 0; i < p->options->text_count; i++) {
    chunks c;
    const char *text;
    size_t size;
    if (is_lines(p->options->texts[i])) {
      PG_TRY(train_on_lines(p, trainer, p->options->texts[i], done));
      done += p->sources[i].bytes;
      continue;
    }
    status = chunks_open(p->context, p->options->texts[i], &c);
    while (status == 0 && (more = chunks_next(&c, &text, &size)) > 0) {
      status = pg__trainer_add(trainer, text, size);
      done += (int64_t)size;
      report(p, "counting words", pg__min(done, p->text_bytes) / (double)p->text_bytes);
    }
    chunks_close(&c);
    if (status == 0) status = more;
    if (status < 0) goto fail;
  }
  status = pg__trainer_finish(trainer, p->options->vocab, report_merges, p, &p->tokenizer);
fail:
  pg__trainer_free(trainer);
  return status;
}

static bool several_documents(const pg_prepare_options *o) {
  return o->text_count > 1 || is_lines(o->texts[0]);
}

static int get_tokenizer(preparing *p) {
  int status;
  if (p->options->tokenizer) {
    PG_TRY(pg_tokenizer_load(p->context, p->options->tokenizer, &p->tokenizer));
    int64_t vocab = pg_tokenizer_vocab(p->tokenizer);
    if (vocab > LARGEST_VOCAB)
      return pg_fail(p->context, PG_EFORMAT,
                     "tokenizer %s has ids up to %lld, which do not fit the 16 bits of a shard "
                     "(allowed are 0 to %d)",
                     p->options->tokenizer, (long long)vocab - 1, UINT16_MAX);
  } else {
    PG_TRY(train(p));
  }
  if (several_documents(p->options) && pg_tokenizer_end_of_text(p->tokenizer) < 0)
    return pg_fail(p->context, PG_EUNSUPPORTED,
                   "tokenizer %s has no %s token to put between documents", p->options->tokenizer,
                   PG_END_OF_TEXT);
  return 0;
fail:
  return status;
}

/* ---- encoding -------------------------------------------------------------------------------- */
static int write_ids(preparing *p) {
  for (int64_t at = 0; at < p->ids.count; at += BLOCK) {
    int64_t n = pg__min(BLOCK, p->ids.count - at);
    for (int64_t i = 0; i < n; i++) p->block[i] = (uint16_t)p->ids.data[at + i];
    int status = pg_file_write_all(p->context, p->ids_fd, p->ids_path, p->block, (size_t)n * 2);
    if (status < 0) return status;
  }
  p->tokens += p->ids.count;
  p->ids.count = 0;
  return 0;
}

/* The end-of-text token between documents. */
static void separate(preparing *p) {
  if (p->tokens == 0) return;
  p->ids.data[0] = pg_tokenizer_end_of_text(p->tokenizer); /* there was a text before */
  p->ids.count = 1;
}

static int check_unchanged(preparing *p, int fd, size_t index, int64_t bytes) {
  const source *s = &p->sources[index];
  struct stat info;
  if (fstat(fd, &info) == 0 && info.st_size == s->bytes && bytes == s->bytes &&
      info.st_mtim.tv_sec == s->modified.tv_sec && info.st_mtim.tv_nsec == s->modified.tv_nsec)
    return 0;
  return pg_fail(p->context, PG_EDATA, "text %s changed while it was read",
                 p->options->texts[index]);
}

static int encode_lines(preparing *p, size_t index) {
  int status, more;
  lines l;
  const char *text, *path = p->options->texts[index];
  size_t size;
  const int64_t before = p->done_bytes;
  PG_TRY(lines_open(p, path, &l));
  while ((more = lines_next(&l, &text, &size)) > 0) {
    separate(p);
    PG_TRY(pg__tokenizer_append(p->tokenizer, text, size, false, &p->ids));
    PG_TRY(write_ids(p));
    p->done_bytes = before + l.bytes;
    report(p, "encoding", (double)pg__min(p->done_bytes, p->text_bytes) / (double)p->text_bytes);
  }
  PG_TRY(more);
  PG_TRY(pg_file_sha256(p->context, path, p->sources[index].sha256));
  PG_TRY(check_unchanged(p, fileno(l.file), index, l.bytes));
fail:
  lines_close(&l);
  return status;
}

static int encode_text(preparing *p, size_t index) {
  int status, more;
  chunks c;
  const char *text, *path = p->options->texts[index];
  size_t size;
  int64_t bytes = 0;
  separate(p);
  PG_TRY(chunks_open(p->context, path, &c));
  while ((more = chunks_next(&c, &text, &size)) > 0) {
    PG_TRY(pg__tokenizer_append(p->tokenizer, text, size, false, &p->ids));
    PG_TRY(write_ids(p));
    bytes += (int64_t)size;
    p->done_bytes += (int64_t)size;
    report(p, "encoding", pg__min(p->done_bytes, p->text_bytes) / (double)p->text_bytes);
  }
  PG_TRY(more);
  PG_TRY(pg_file_sha256(p->context, path, p->sources[index].sha256));
  PG_TRY(check_unchanged(p, c.fd, index, bytes));
fail:
  chunks_close(&c);
  return status;
}

static int encode(preparing *p) {
  int status = 0;
  p->ids_fd = open(p->ids_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (p->ids_fd < 0)
    return pg_fail(p->context, PG_EIO, "%s cannot be created: %s", p->ids_path, strerror(errno));
  for (size_t i = 0; i < p->options->text_count && status == 0; i++)
    status = is_lines(p->options->texts[i]) ? encode_lines(p, i) : encode_text(p, i);
  return status;
}

/* ---- shards ---------------------------------------------------------------------------------- */
/* Tokens [first, first + count) as shards NAME_SPLIT_NNNNNN.bin, numbered from `number`. */
static int write_split(preparing *p, const char *split, int number, int64_t first, int64_t count,
                       int64_t *shards) {
  int status = 0;
  char *path = NULL;
  pg__shard_writer w = {.fd = -1};
  for (*shards = 0; count > 0; (*shards)++) {
    int64_t n = pg__min(count, p->shard_tokens);
    if (count - n == 1) n--; /* a shard has at least two tokens */
    free(path);
    if (asprintf(&path, "%s/%s_%s_%06lld.bin", p->temporary, p->name, split,
                 (long long)(number + *shards)) < 0) {
      path = NULL;
      PG_TRY(pg_fail(p->context, PG_ENOMEM, "no memory for a path"));
    }
    PG_TRY(pg__shard_writer_open(p->context, path, n, &w));
    for (int64_t end = first + n; first < end;) {
      int64_t m = pg__min(BLOCK, end - first);
      PG_TRY(pg_file_pread(p->context, p->ids_fd, p->ids_path, 2 * first, p->block, (size_t)m * 2));
      PG_TRY(pg__shard_writer_append(&w, p->block, m));
      first += m;
      report(p, "writing shards", (double)first / (double)p->tokens);
      if (pg_context_cancelled(p->context))
        PG_TRY(pg_fail(p->context, PG_ECANCELED, "preparing %s was cancelled", p->options->out));
    }
    PG_TRY(pg__shard_writer_close(&w));
    count -= n;
  }
fail:
  pg__shard_writer_abandon(&w);
  free(path);
  return status;
}

static int write_shards(preparing *p, pg_prepare_report *r) {
  int status;
  if (p->tokens < 4)
    return pg_fail(p->context, PG_EDATA,
                   "the texts have %lld tokens; training and validation need at least 2 each",
                   (long long)p->tokens);
  int64_t val = (int64_t)floor((double)p->tokens * p->options->val_fraction + 0.5);
  val = pg__max(2, pg__min(val, p->tokens - 2));
  r->val_tokens = val;
  r->train_tokens = p->tokens - val;
  PG_TRY(pg_file_require_space(p->context, p->temporary, 2 * p->tokens));
  PG_TRY(write_split(p, "train", 1, 0, r->train_tokens, &r->train_shards));
  PG_TRY(write_split(p, "val", 0, r->train_tokens, val, &r->val_shards));
  PG_TRY(pg_shards_digest(p->context, p->temporary, r->digest));
fail:
  return status;
}

/* ---- dataset.json ---------------------------------------------------------------------------- */
static json_t *sources_json(const preparing *p) {
  json_t *list = json_array();
  for (size_t i = 0; list && i < p->options->text_count; i++) {
    const char *path = p->options->texts[i], *slash = strrchr(path, '/');
    /* A file name need not be UTF-8; the hash identifies the text. */
    json_t *name = json_string(slash ? slash + 1 : path);
    json_t *item = json_pack("{s:o, s:I, s:s}", "name", name ? name : json_null(), "bytes",
                             (json_int_t)p->sources[i].bytes, "sha256", p->sources[i].sha256);
    if (json_array_append_new(list, item) < 0) {
      json_decref(list);
      list = NULL;
    }
  }
  return list;
}

static int write_description(preparing *p, const pg_prepare_report *r) {
  int status;
  char *tokenizer = NULL, *path = NULL, *text = NULL, sha256[65];
  json_t *root = NULL, *sources = NULL;
  if (asprintf(&tokenizer, "%s/tokenizer.json", p->temporary) < 0) tokenizer = NULL;
  if (asprintf(&path, "%s/dataset.json", p->temporary) < 0) path = NULL;
  if (!tokenizer || !path) PG_TRY(pg_fail(p->context, PG_ENOMEM, "no memory for a path"));
  PG_TRY(pg_tokenizer_save(p->tokenizer, tokenizer));
  PG_TRY(pg_file_sha256(p->context, tokenizer, sha256));
  if ((sources = sources_json(p)))
    root = json_pack(
        "{s:i, s:s, s:I, s:s, s:{s:I, s:I}, s:{s:I, s:I}, s:I, s:f, s:O, s:{s:s, s:s, s:b, s:I}}",
        "version", 1, "name", p->name, "vocab", (json_int_t)r->vocab, "digest", r->digest, "tokens",
        "train", (json_int_t)r->train_tokens, "val", (json_int_t)r->val_tokens, "shards", "train",
        (json_int_t)r->train_shards, "val", (json_int_t)r->val_shards, "shard_tokens",
        (json_int_t)p->shard_tokens, "val_fraction", p->options->val_fraction, "sources", sources,
        "tokenizer", "file", "tokenizer.json", "sha256", sha256, "trained",
        p->options->tokenizer == NULL, "end_of_text",
        (json_int_t)pg_tokenizer_end_of_text(p->tokenizer));
  if (root) text = pg__json_print(root, 2);
  if (!text) PG_TRY(pg_fail(p->context, PG_ENOMEM, "no memory to write %s", path));
  PG_TRY(pg_file_write_atomic(p->context, path, text, strlen(text)));
fail:
  free(text);
  free(tokenizer);
  free(path);
  json_decref(root);
  json_decref(sources);
  return status;
}

static int publish(preparing *p) {
  int status;
  PG_TRY(pg_file_sync(p->context, p->temporary));
  if (rename(p->temporary, p->out) < 0)
    return pg_fail(p->context, errno == EEXIST || errno == ENOTEMPTY ? PG_EEXIST : PG_EIO,
                   "output folder %s cannot be made from %s: %s", p->out, p->temporary,
                   strerror(errno));
  const char *slash = strrchr(p->out, '/');
  char *parent =
      slash ? strndup(p->out, slash == p->out ? 1 : (size_t)(slash - p->out)) : strdup(".");
  /* The folder is complete; a failure from here on could only concern its name after a crash. */
  if (parent) pg_file_sync(p->context, parent);
  free(parent);
  return 0;
fail:
  return status;
}

/* ---- the whole ------------------------------------------------------------------------------- */
/* Remove what was written and keep the failure's own text. */
static void clean_up(preparing *p) {
  char message[sizeof p->context->message];
  memcpy(message, p->context->message, sizeof message);
  pg_file_remove_tree(p->context, p->temporary);
  memcpy(p->context->message, message, sizeof message);
}

int pg_prepare(pg_context *ctx, const pg_prepare_options *options, pg_prepare_report *out) {
  int status;
  bool writing = false;
  pg_prepare_report r = {0};
  preparing p = {.context = ctx, .options = options, .ids_fd = -1};
  PG_TRY(check_options(&p));
  PG_TRY(check_texts(&p));
  PG_TRY(check_out(&p));
  PG_TRY(get_tokenizer(&p));
  p.block = malloc(BLOCK * sizeof *p.block);
  if (!p.block) PG_TRY(pg_fail(ctx, PG_ENOMEM, "no memory to prepare %s", options->out));
  writing = true;
  PG_TRY(pg_file_remove_tree(ctx, p.temporary)); /* of a process that died, with the same id */
  PG_TRY(pg_file_make_folders(ctx, p.temporary));
  PG_TRY(pg_file_require_space(ctx, p.temporary, p.text_bytes * BYTES_PER_TEXT_BYTE));
  PG_TRY(encode(&p));
  r.vocab = pg_tokenizer_vocab(p.tokenizer);
  r.bytes = p.text_bytes;
  PG_TRY(write_shards(&p, &r));
  if (unlink(p.ids_path) < 0)
    PG_TRY(pg_fail(ctx, PG_EIO, "%s cannot be removed: %s", p.ids_path, strerror(errno)));
  PG_TRY(write_description(&p, &r));
  PG_TRY(publish(&p));
  if (out) *out = r;
fail:
  if (p.ids_fd >= 0) close(p.ids_fd);
  if (status < 0 && writing) clean_up(&p);
  pg_tokenizer_free(p.tokenizer);
  free(p.ids.data);
  free(p.block);
  free(p.sources);
  free(p.out);
  free(p.temporary);
  free(p.ids_path);
  return status;
}
