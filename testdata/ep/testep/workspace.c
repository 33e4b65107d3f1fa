#include "workspace.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static pthread_mutex_t lock =
    PTHREAD_MUTEX_INITIALIZER; // held between lock_workspace and unlock_workspace

static struct group group; // context is NULL where there is none

// graph is one that was read and that nobody has taken.
struct graph {
  struct stat file;
  struct context *context;
  const struct program *program;
};

static struct graph *waiting;
static size_t waiting_count;

void lock_workspace(void) { pthread_mutex_lock(&lock); }

void unlock_workspace(void) { pthread_mutex_unlock(&lock); }

struct group *current_group(void) { return group.context ? &group : NULL; }

struct group *begin_group(struct context *context, const char *path) {
  group = (struct group){.context = keep_context(context), .path = copy_text(path)};
  return &group;
}

void end_group(void) {
  drop_context(group.context);
  free(group.path);
  group = (struct group){0};
}

// same_file does not compare st_ctim, which changes with every further name that a file gets.
static bool same_file(const struct stat *a, const struct stat *b) {
  return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
         a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static void forget(size_t i) {
  drop_context(waiting[i].context);
  waiting[i] = waiting[--waiting_count];
}

const struct program *take_graph(const char *path, const char *name, struct context **context) {
  struct stat file;
  if (path && stat(path, &file) != 0) return NULL; // reading it will say why
  size_t found = 0, at = 0;
  for (size_t i = 0; i < waiting_count; i++) {
    if (strcmp(waiting[i].program->name, name) != 0 ||
        (path && !same_file(&file, &waiting[i].file)))
      continue;
    found++;
    at = i;
  }
  if (found != 1) return NULL;
  const struct program *p = waiting[at].program;
  *context = keep_context(waiting[at].context);
  forget(at);
  return p;
}

static bool is_waiting(const struct stat *file, const char *name) {
  for (size_t i = 0; i < waiting_count; i++) {
    if (same_file(file, &waiting[i].file) && strcmp(waiting[i].program->name, name) == 0)
      return true;
  }
  return false;
}

void leave_graphs(
    const char *path, struct context *context, const struct program *const *taken, size_t count) {
  struct stat file;
  if (stat(path, &file) != 0)
    return; // gone since it was read: the next session reads what is there then
  for (size_t i = 0; i < context->programs; i++) {
    const struct program *p = context->program[i];
    bool used = is_waiting(&file, p->name);
    for (size_t k = 0; k < count; k++) used = used || taken[k] == p;
    if (used) continue;
    waiting = grow(waiting, waiting_count, sizeof *waiting);
    waiting[waiting_count++] =
        (struct graph){.file = file, .context = keep_context(context), .program = p};
  }
}

void clear_workspace(void) {
  while (waiting_count) forget(waiting_count - 1);
  end_group();
}
