#include "program.h"

#include <stdlib.h>
#include <string.h>

enum op op_of(const char *type) {
  if (strcmp(type, "Add") == 0) return OP_ADD;
  if (strcmp(type, "Mul") == 0) return OP_MUL;
  if (strcmp(type, "Relu") == 0) return OP_RELU;
  if (strcmp(type, "MatMul") == 0) return OP_MATMUL;
  return OP_NONE;
}

void free_program(struct program *p) {
  if (!p) return;
  free(p->name);
  free(p->output);
  free(p->value);
  free(p->step);
  free(p->weight);
  free(p);
}

int64_t elements(const struct shape *s) {
  if (s->rank > MAX_RANK) return -1;
  int64_t count = 1;
  for (uint32_t i = 0; i < s->rank; i++) {
    int64_t dim = s->dims[i];
    if (dim < 0 || dim > MAX_ELEMENTS) return -1;
    if (dim && count > MAX_ELEMENTS / dim) return -1;
    count *= dim;
  }
  return count;
}

static bool equal_shapes(const struct shape *a, const struct shape *b) {
  return a->rank == b->rank && memcmp(a->dims, b->dims, a->rank * sizeof *a->dims) == 0;
}

// dim_at gives a dimension counted from the right, 1 beyond the left end: as broadcasting sees it.
// skip leaves out so many on the right.
static int64_t dim_at(const struct shape *s, uint32_t skip, uint32_t right) {
  return right + skip < s->rank ? s->dims[s->rank - 1 - skip - right] : 1;
}

static bool broadcasts(
    const struct shape *a, const struct shape *b, const struct shape *out, uint32_t skip) {
  uint32_t rank = a->rank > b->rank ? a->rank : b->rank;
  if (out->rank != rank) return false;
  for (uint32_t i = 0; i + skip < rank; i++) {
    int64_t x = dim_at(a, skip, i), y = dim_at(b, skip, i);
    if (x != y && x != 1 && y != 1) return false;
    if (dim_at(out, skip, i) != (x == 1 ? y : x)) return false;
  }
  return true;
}

bool check_shapes(
    enum op op, const struct shape *a, const struct shape *b, const struct shape *out) {
  if (elements(a) < 0 || elements(out) < 0 || (op != OP_RELU && elements(b) < 0)) return false;
  switch (op) {
  case OP_RELU: return equal_shapes(a, out);
  case OP_ADD:
  case OP_MUL: return broadcasts(a, b, out, 0);
  case OP_MATMUL:
    if (a->rank < 2 || b->rank < 2 || !broadcasts(a, b, out, 2)) return false;
    return dim_at(a, 0, 0) == dim_at(b, 0, 1) && dim_at(out, 0, 1) == dim_at(a, 0, 1) &&
           dim_at(out, 0, 0) == dim_at(b, 0, 0);
  default: return false;
  }
}

const char *check_program(const struct program *p) {
  bool *known = allocate(p->values, sizeof *known);
  const char *wrong = NULL;
  for (uint32_t i = 0; i < p->values && !wrong; i++) {
    const struct value *v = &p->value[i];
    int64_t count = elements(&v->shape);
    known[i] = v->from != FROM_STEP;
    if (count < 0) wrong = "shape";
    if (v->from > FROM_STEP) wrong = "value";
    if (v->from == FROM_INPUT && v->index >= p->inputs) wrong = "input";
    if (v->from == FROM_WEIGHT && (!p->weight[i] || p->weight[i]->count != (uint64_t)count))
      wrong = "weight";
  }
  for (uint32_t i = 0; i < p->steps && !wrong; i++) {
    const struct step *s = &p->step[i];
    uint32_t b = s->op == OP_RELU ? s->a : s->b;
    if (s->a >= p->values || b >= p->values || s->out >= p->values || !known[s->a] || !known[b] ||
        known[s->out]) {
      wrong = "step";
    } else if (!check_shapes(
                   s->op, &p->value[s->a].shape, &p->value[b].shape, &p->value[s->out].shape)) {
      wrong = "step's shapes";
    } else {
      known[s->out] = true;
    }
  }
  bool *given = allocate(p->values, sizeof *given);
  for (uint32_t i = 0; i < p->outputs && !wrong; i++) {
    uint32_t v = p->output[i];
    // Each output has memory of its own, which a step writes.
    if (v >= p->values || !known[v] || given[v] || p->value[v].from != FROM_STEP)
      wrong = "output";
    else
      given[v] = true;
  }
  free(given);
  free(known);
  return wrong;
}

static bool is_output(const struct program *p, uint32_t value, uint32_t *position) {
  for (uint32_t i = 0; i < p->outputs; i++) {
    if (p->output[i] == value) {
      *position = i;
      return true;
    }
  }
  return false;
}

uint64_t scratch_size(const struct program *p) {
  uint64_t total = 0;
  uint32_t position;
  for (uint32_t i = 0; i < p->values; i++) {
    if (p->value[i].from == FROM_STEP && !is_output(p, i, &position))
      total += (uint64_t)elements(&p->value[i].shape);
  }
  return total;
}

// strides gives, per dimension of out, how far a step in it moves in s: 0 where s is broadcast.
// skip leaves out so many dimensions on the right.
static void strides(
    const struct shape *s, const struct shape *out, uint32_t skip, int64_t *result) {
  int64_t distance = 1;
  for (uint32_t i = 0; i < skip && i < s->rank; i++) distance *= s->dims[s->rank - 1 - i];
  for (uint32_t i = 0; i + skip < out->rank; i++) {
    int64_t dim = dim_at(s, skip, i);
    result[out->rank - 1 - skip - i] = dim == 1 ? 0 : distance;
    distance *= dim;
  }
}

// walk goes through the positions of out's dimensions, but for skip on the right, in row-major
// order, and keeps the offsets into two operands.
struct walk {
  uint32_t rank;
  int64_t at[MAX_RANK], stride_a[MAX_RANK], stride_b[MAX_RANK];
  int64_t a, b;
};

static struct walk start_walk(
    const struct shape *a, const struct shape *b, const struct shape *out, uint32_t skip) {
  struct walk w = {.rank = out->rank - skip};
  strides(a, out, skip, w.stride_a);
  strides(b, out, skip, w.stride_b);
  return w;
}

static void next(struct walk *w, const struct shape *out) {
  for (uint32_t i = w->rank; i-- > 0;) {
    w->a += w->stride_a[i];
    w->b += w->stride_b[i];
    if (++w->at[i] < out->dims[i]) return;
    w->a -= w->at[i] * w->stride_a[i];
    w->b -= w->at[i] * w->stride_b[i];
    w->at[i] = 0;
  }
}

static void run_elementwise(enum op op, const struct shape *sa, const float *a,
    const struct shape *sb, const float *b, const struct shape *so, float *out) {
  struct walk w = start_walk(sa, sb, so, 0);
  int64_t count = elements(so);
  for (int64_t i = 0; i < count; i++) {
    out[i] = op == OP_ADD ? a[w.a] + b[w.b] : a[w.a] * b[w.b];
    next(&w, so);
  }
}

// multiply adds in order of k for each element of the result, row by row of b for the sake of the
// processor's cache.
static void multiply(
    const float *a, const float *b, float *out, int64_t rows, int64_t inner, int64_t columns) {
  memset(out, 0, (size_t)(rows * columns) * sizeof *out);
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t k = 0; k < inner; k++) {
      float x = a[i * inner + k];
      for (int64_t j = 0; j < columns; j++) out[i * columns + j] += x * b[k * columns + j];
    }
  }
}

static void run_matmul(const struct shape *sa, const float *a, const struct shape *sb,
    const float *b, const struct shape *so, float *out) {
  struct walk w = start_walk(sa, sb, so, 2);
  int64_t rows = dim_at(so, 0, 1), columns = dim_at(so, 0, 0), inner = dim_at(sa, 0, 0),
          total = elements(so);
  if (total == 0) return;
  for (int64_t done = 0; done < total; done += rows * columns) {
    multiply(a + w.a, b + w.b, out + done, rows, inner, columns);
    next(&w, so);
  }
}

static void run_step(
    const struct program *p, const struct step *s, const float *a, const float *b, float *out) {
  const struct shape *sa = &p->value[s->a].shape, *so = &p->value[s->out].shape;
  if (s->op == OP_RELU) {
    int64_t count = elements(so);
    for (int64_t i = 0; i < count; i++) out[i] = a[i] > 0 ? a[i] : 0;
    return;
  }
  const struct shape *sb = &p->value[s->b].shape;
  if (s->op == OP_MATMUL)
    run_matmul(sa, a, sb, b, so, out);
  else
    run_elementwise(s->op, sa, a, sb, b, so, out);
}

void run_program(
    const struct program *p, const float *const *inputs, float *const *outputs, float *scratch) {
  const float **data = allocate(p->values, sizeof *data);
  float **room = allocate(p->values, sizeof *room);
  for (uint32_t i = 0; i < p->values; i++) {
    const struct value *v = &p->value[i];
    uint32_t position;
    if (v->from == FROM_INPUT)
      data[i] = inputs[v->index];
    else if (v->from == FROM_WEIGHT)
      data[i] = p->weight[i]->data;
    else if (is_output(p, i, &position))
      room[i] = outputs[position];
    else {
      room[i] = scratch;
      scratch += elements(&v->shape);
    }
    if (room[i]) data[i] = room[i];
  }
  for (uint32_t i = 0; i < p->steps; i++) {
    const struct step *s = &p->step[i];
    run_step(p, s, data[s->a], s->op == OP_RELU ? NULL : data[s->b], room[s->out]);
  }
  free(room);
  free(data);
}
