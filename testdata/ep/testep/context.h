// A context: the graphs (programs) of one or more models, and the weights that they share. It is
// what a context binary holds.
#ifndef TESTEP_CONTEXT_H
#define TESTEP_CONTEXT_H

#include "program.h"

struct context {
  int users; // whoever holds a pointer to it; guarded by the one lock of context.c
  char *sdk, *hardware;
  size_t weights, programs;
  struct weight **weight;
  struct program **program;
  void *binary; // what it was read from, which weights point into; NULL for one that was compiled
                // here
};

struct context *new_context(const char *sdk, const char *hardware);

// keep_context adds a user, and gives the context; drop_context frees it after the last one. Both
// may be called from any thread.
struct context *keep_context(struct context *c);
void drop_context(struct context *c);

// add_weight gives the context's weight of these bytes: one that it has already, or a copy.
uint32_t add_weight(struct context *c, const float *data, uint64_t count);

// refer_weight is add_weight for one that stands in a file of the source model: binaries only say
// where.
uint32_t refer_weight(
    struct context *c, const float *data, uint64_t count, const char *file, uint64_t offset);

// read_weights reads weights that are in files, whose names are relative to directory. NULL: it is
// unknown, and such weights cannot be read.
OrtStatus *read_weights(struct context *c, const char *directory);

// add_program hands a program over to the context. A name that is taken is refused, and the program
// freed.
OrtStatus *add_program(struct context *c, struct program *p);

// find_program gives NULL when there is none of that name.
const struct program *find_program(const struct context *c, const char *name);

// largest_scratch gives the bytes that the hungriest program needs besides inputs, outputs and
// weights: attribute max_size.
uint64_t largest_scratch(const struct context *c);

#endif
