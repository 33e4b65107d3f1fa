// A compiled partition: a list of steps over numbered values. All shapes are known, and all
// elements are floats.
#ifndef TESTEP_PROGRAM_H
#define TESTEP_PROGRAM_H

#include "ort.h"

enum { MAX_RANK = 8 };

// MAX_ELEMENTS bounds each tensor, so that sizes in bytes and offsets cannot overflow.
#define MAX_ELEMENTS ((int64_t)1 << 32)

struct shape {
  uint32_t rank;
  int64_t dims[MAX_RANK];
};

// Operators, as they stand in binaries.
enum op { OP_NONE = 0, OP_ADD = 1, OP_MUL = 2, OP_RELU = 3, OP_MATMUL = 4 };

enum op op_of(const char *type);

// Where a value comes from.
enum { FROM_INPUT = 0, FROM_WEIGHT = 1, FROM_STEP = 2 };

struct value {
  uint32_t from;
  uint32_t index; // number of the input, or of the context's weight; 0 for steps
  struct shape shape;
};

// step computes the value out from a and, but for Relu, b.
struct step {
  uint32_t op, a, b, out;
};

// weight is a constant tensor. Weights of equal bytes are one weight, whichever graph they come
// from.
struct weight {
  uint64_t count;    // of floats
  const float *data; // NULL for one of a file until read_weights
  void *owned;       // memory to free with it; NULL where data points into a binary that was read
  char *file; // not NULL: it stands in this file of the source model's external data, relative to
              // that model, and not in binaries
  uint64_t offset; // in the file
};

struct program {
  char *name; // the partition's, unique in its context
  uint32_t inputs, outputs, values, steps;
  uint32_t *output;    // values, in the order of the fused node's outputs
  struct value *value; // inputs first or not: each tells where it comes from
  struct step *step;
  const struct weight **weight; // per value: its weight, or NULL
};

void free_program(struct program *p);

// elements counts a shape's elements; -1 when the shape is not sound, or the tensor too large.
int64_t elements(const struct shape *s);

// check_shapes tells whether an operator makes out of a and b. b is not looked at for Relu.
bool check_shapes(
    enum op op, const struct shape *a, const struct shape *b, const struct shape *out);

// check_program tells what is wrong with a program, or NULL. A program that passes can be run on
// any tensors of its inputs' shapes.
const char *check_program(const struct program *p);

// scratch_size is the number of floats that a run needs for values that are neither inputs, weights
// nor outputs.
uint64_t scratch_size(const struct program *p);

// run_program computes: inputs and outputs in the program's order, scratch of scratch_size floats.
// It may run several times at once.
void run_program(
    const struct program *p, const float *const *inputs, float *const *outputs, float *scratch);

#endif
