#include "ort.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

const OrtApi *ort;
const OrtEpApi *ort_ep;
const OrtModelEditorApi *ort_editor;
const char *ep_name = "EpcachedTestExecutionProvider";

const char *mutant = "";

bool is_mutant(const char *kind) { return strcmp(mutant, kind) == 0; }

OrtStatus *fail(OrtErrorCode code, const char *format, ...) {
  if (is_mutant("plain errors")) code = ORT_FAIL;
  char text[1024];
  size_t used = (size_t)snprintf(text, sizeof text / 2, "%s: ", ep_name);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + used, sizeof text - used, format, arguments);
  va_end(arguments);
  return ort->CreateStatus(code, text);
}

void *allocate(size_t count, size_t size) {
  void *p = calloc(count ? count : 1, size);
  if (!p) {
    fprintf(stderr, "%s: out of memory\n", ep_name);
    abort();
  }
  return p;
}

void *grow(void *array, size_t count, size_t size) {
  // Doubled at every power of two, so that adding n things copies about 2n of them.
  if (count & (count - 1)) return array;
  void *larger = allocate(count ? 2 * count : 1, size);
  if (count) memcpy(larger, array, count * size);
  free(array);
  return larger;
}

char *copy_text(const char *text) {
  size_t size = strlen(text) + 1;
  return memcpy(allocate(size, 1), text, size);
}

char *format_text(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(NULL, 0, format, arguments);
  va_end(arguments);
  char *text = allocate(length < 0 ? 1 : (size_t)length + 1, 1);
  va_start(arguments, format);
  if (length > 0) vsnprintf(text, (size_t)length + 1, format, arguments);
  va_end(arguments);
  return text;
}

bool is_below(const char *name) {
  if (*name == '/' || !*name) return false;
  for (const char *part = name; part; part = strchr(part, '/') ? strchr(part, '/') + 1 : NULL) {
    if (strncmp(part, "..", 2) == 0 && (part[2] == '/' || !part[2])) return false;
  }
  return true;
}

bool has_suffix(const char *text, const char *suffix) {
  size_t length = strlen(text), end = strlen(suffix);
  return length >= end && strcmp(text + length - end, suffix) == 0;
}

void add_bytes(struct bytes *b, const void *data, size_t size) {
  if (size > b->room - b->size) {
    size_t room = 2 * b->room + size;
    uint8_t *larger = allocate(room, 1);
    if (b->size) memcpy(larger, b->data, b->size);
    free(b->data);
    b->data = larger;
    b->room = room;
  }
  if (size) memcpy(b->data + b->size, data, size);
  b->size += size;
}

static OrtStatus *read_all(int file, const char *path, struct bytes *out) {
  struct stat info;
  if (fstat(file, &info) != 0)
    return fail(ORT_FAIL, "cannot read \"%s\": %s", path, strerror(errno));
  if (!S_ISREG(info.st_mode)) return fail(ORT_FAIL, "cannot read \"%s\": not a regular file", path);
  uint8_t *data = malloc((size_t)info.st_size + 1);
  if (!data)
    return fail(
        ORT_FAIL, "cannot read \"%s\": no memory for %lld bytes", path, (long long)info.st_size);
  size_t done = 0;
  while (done < (size_t)info.st_size) {
    ssize_t n = read(file, data + done, (size_t)info.st_size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      OrtStatus *failed = fail(ORT_FAIL, "cannot read \"%s\": %s", path, strerror(errno));
      free(data);
      return failed;
    }
    if (n == 0) break; // it has been cut since; whoever parses it will see
    done += (size_t)n;
  }
  *out = (struct bytes){.data = data, .size = done, .room = (size_t)info.st_size + 1};
  return NULL;
}

OrtStatus *read_file(const char *path, struct bytes *out) {
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0)
    return fail(errno == ENOENT ? ORT_NO_SUCHFILE : ORT_FAIL, "cannot open \"%s\": %s", path,
        strerror(errno));
  OrtStatus *failed = read_all(file, path, out);
  close(file); // only read
  return failed;
}

static bool write_all(int file, const struct bytes *b) {
  for (size_t done = 0; done < b->size;) {
    ssize_t n = write(file, b->data + done, b->size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    done += (size_t)n;
  }
  return true;
}

OrtStatus *write_file(const char *path, const struct bytes *b) {
  char *temporary = format_text("%s.part", path);
  OrtStatus *failed = NULL;
  int file = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  bool written = file >= 0 && write_all(file, b);
  if (file >= 0 && close(file) != 0) written = false;
  if (!written || rename(temporary, path) != 0) {
    failed = fail(ORT_FAIL, "cannot write \"%s\": %s", path, strerror(errno));
    unlink(temporary); // may not exist
  }
  free(temporary);
  return failed;
}
