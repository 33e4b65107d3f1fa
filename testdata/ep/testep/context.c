#include "context.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // guards users of all contexts

struct context *new_context(const char *sdk, const char *hardware) {
  struct context *c = allocate(1, sizeof *c);
  *c = (struct context){.users = 1, .sdk = copy_text(sdk), .hardware = copy_text(hardware)};
  return c;
}

struct context *keep_context(struct context *c) {
  pthread_mutex_lock(&lock);
  c->users++;
  pthread_mutex_unlock(&lock);
  return c;
}

void drop_context(struct context *c) {
  if (!c) return;
  pthread_mutex_lock(&lock);
  bool last = --c->users == 0;
  pthread_mutex_unlock(&lock);
  if (!last) return;
  for (size_t i = 0; i < c->programs; i++) free_program(c->program[i]);
  for (size_t i = 0; i < c->weights; i++) {
    free(c->weight[i]->owned);
    free(c->weight[i]->file);
    free(c->weight[i]);
  }
  free(c->program);
  free(c->weight);
  free(c->binary);
  free(c->sdk);
  free(c->hardware);
  free(c);
}

static struct weight *copy_weight(struct context *c, const float *data, uint64_t count) {
  size_t size = count * sizeof *data;
  struct weight *w = allocate(1, sizeof *w);
  float *copy = allocate(count, sizeof *copy);
  if (size) memcpy(copy, data, size);
  *w = (struct weight){.count = count, .data = copy, .owned = copy};
  // Programs point to weights, which stay where they are when this array moves.
  c->weight = grow(c->weight, c->weights, sizeof *c->weight);
  c->weight[c->weights++] = w;
  return w;
}

uint32_t add_weight(struct context *c, const float *data, uint64_t count) {
  size_t size = count * sizeof *data;
  for (size_t i = 0; i < c->weights; i++) {
    const struct weight *w = c->weight[i];
    if (!w->file && w->count == count && (size == 0 || memcmp(w->data, data, size) == 0))
      return (uint32_t)i;
  }
  copy_weight(c, data, count);
  return (uint32_t)c->weights - 1;
}

uint32_t refer_weight(
    struct context *c, const float *data, uint64_t count, const char *file, uint64_t offset) {
  for (size_t i = 0; i < c->weights; i++) {
    const struct weight *w = c->weight[i];
    if (w->file && w->count == count && w->offset == offset && strcmp(w->file, file) == 0)
      return (uint32_t)i;
  }
  struct weight *w = copy_weight(c, data, count);
  w->file = copy_text(file);
  w->offset = offset;
  return (uint32_t)c->weights - 1;
}

// read_range reads a whole range, or says false: the file may end before it.
static bool read_range(int fd, uint8_t *data, uint64_t size, uint64_t offset) {
  while (size) {
    ssize_t n = pread(fd, data, size, (off_t)offset);
    if (n <= 0) return false;
    data += n;
    offset += (uint64_t)n;
    size -= (uint64_t)n;
  }
  return true;
}

static OrtStatus *read_weight(struct weight *w, const char *path) {
  struct stat st;
  uint64_t size = w->count * sizeof *w->data; // decode has bounded both
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return fail(ORT_NO_SUCHFILE, "weights \"%s\": cannot be opened", path);
  bool there = fstat(fd, &st) == 0 && w->offset <= (uint64_t)st.st_size &&
               size <= (uint64_t)st.st_size - w->offset;
  void *data = there ? malloc(size ? size : 1) : NULL;
  bool whole = data && read_range(fd, data, size, w->offset);
  close(fd);
  if (!whole) {
    free(data);
    return fail(ORT_INVALID_GRAPH, "weights \"%s\": no %llu bytes from %llu on", path,
        (unsigned long long)size, (unsigned long long)w->offset);
  }
  w->data = w->owned = data;
  return NULL;
}

OrtStatus *read_weights(struct context *c, const char *directory) {
  for (size_t i = 0; i < c->weights; i++) {
    struct weight *w = c->weight[i];
    if (!w->file || w->data) continue;
    if (!is_below(w->file))
      return fail(ORT_INVALID_GRAPH,
          "weights \"%.100s\": not the name of a file in the source model's directory or below",
          w->file);
    if (!directory)
      return fail(
          ORT_INVALID_ARGUMENT, "ep.context_source_model_path has to say where \"%s\" is", w->file);
    char *path = format_text("%s%s", directory, w->file);
    OrtStatus *failed = read_weight(w, path);
    free(path);
    TRY(failed);
  }
  return NULL;
}

OrtStatus *add_program(struct context *c, struct program *p) {
  if (find_program(c, p->name)) {
    OrtStatus *failed = fail(ORT_INVALID_ARGUMENT,
        "partition \"%s\" is in the context already: ep.context_node_name_prefix makes names "
        "unique",
        p->name);
    free_program(p);
    return failed;
  }
  c->program = grow(c->program, c->programs, sizeof *c->program);
  c->program[c->programs++] = p;
  return NULL;
}

const struct program *find_program(const struct context *c, const char *name) {
  for (size_t i = 0; i < c->programs; i++) {
    if (strcmp(c->program[i]->name, name) == 0) return c->program[i];
  }
  return NULL;
}

uint64_t largest_scratch(const struct context *c) {
  uint64_t largest = 0;
  for (size_t i = 0; i < c->programs; i++) {
    uint64_t size = scratch_size(c->program[i]) * sizeof(float);
    if (size > largest) largest = size;
  }
  return largest;
}
