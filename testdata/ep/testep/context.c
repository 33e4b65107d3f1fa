#include "context.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

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
    free(c->weight[i]);
  }
  free(c->program);
  free(c->weight);
  free(c->binary);
  free(c->sdk);
  free(c->hardware);
  free(c);
}

uint32_t add_weight(struct context *c, const float *data, uint64_t count) {
  size_t size = count * sizeof *data;
  for (size_t i = 0; i < c->weights; i++) {
    const struct weight *w = c->weight[i];
    if (w->count == count && (size == 0 || memcmp(w->data, data, size) == 0)) return (uint32_t)i;
  }
  struct weight *w = allocate(1, sizeof *w);
  float *copy = allocate(count, sizeof *copy);
  if (size) memcpy(copy, data, size);
  *w = (struct weight){.count = count, .data = copy, .owned = copy};
  // Programs point to weights, which stay where they are when this array moves.
  c->weight = grow(c->weight, c->weights, sizeof *c->weight);
  c->weight[c->weights] = w;
  return (uint32_t)c->weights++;
}

OrtStatus *add_program(struct context *c, struct program *p) {
  if (find_program(c, p->name)) {
    OrtStatus *failed = fail(ORT_INVALID_ARGUMENT, "partition \"%s\" is in the context already: ep.context_node_name_prefix makes names unique", p->name);
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
