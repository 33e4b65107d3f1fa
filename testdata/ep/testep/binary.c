#include "binary.h"

#include <stdlib.h>
#include <string.h>

static const char magic[8] = "EPCTEST";

// IN_FILE marks a number of floats that stand in a file of the source model.
#define IN_FILE ((uint64_t)1 << 63)

enum { SIZE_AT = 16, CHECKSUM_AT = 24, HEADER = 32, WEIGHT_ALIGNMENT = 64 };

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the binary's numbers are written as they stand in memory"
#endif

static uint64_t checksum(const uint8_t *data, size_t size) {
  uint64_t sum = 14695981039346656037u;
  for (size_t i = 0; i < size; i++) sum = (sum ^ data[i]) * 1099511628211u;
  return sum;
}

static void pad(struct bytes *out, size_t alignment) {
  static const uint8_t zeros[WEIGHT_ALIGNMENT];
  add_bytes(out, zeros, (alignment - out->size % alignment) % alignment);
}

static void put32(struct bytes *out, uint32_t n) {
  pad(out, sizeof n);
  add_bytes(out, &n, sizeof n);
}

static void put64(struct bytes *out, uint64_t n) {
  pad(out, sizeof n);
  add_bytes(out, &n, sizeof n);
}

static void put_text(struct bytes *out, const char *text) {
  put32(out, (uint32_t)strlen(text));
  add_bytes(out, text, strlen(text));
}

static void put_program(struct bytes *out, const struct program *p) {
  put_text(out, p->name);
  put32(out, p->inputs);
  put32(out, p->outputs);
  put32(out, p->values);
  put32(out, p->steps);
  for (uint32_t i = 0; i < p->outputs; i++) put32(out, p->output[i]);
  for (uint32_t i = 0; i < p->values; i++) {
    const struct value *v = &p->value[i];
    put32(out, v->from);
    put32(out, v->index);
    put32(out, v->shape.rank);
    put32(out, 0);
    for (uint32_t d = 0; d < v->shape.rank; d++) put64(out, (uint64_t)v->shape.dims[d]);
  }
  for (uint32_t i = 0; i < p->steps; i++) {
    put32(out, p->step[i].op);
    put32(out, p->step[i].a);
    put32(out, p->step[i].b);
    put32(out, p->step[i].out);
  }
}

void encode(const struct context *c, struct bytes *out) {
  *out = (struct bytes){0};
  add_bytes(out, magic, sizeof magic);
  put32(out, BINARY_FORMAT);
  put32(out, 0);
  put64(out, 0); // size and checksum are known at the end
  put64(out, 0);
  put_text(out, c->sdk);
  put_text(out, c->hardware);
  put64(out, c->weights);
  for (size_t i = 0; i < c->weights; i++) {
    const struct weight *w = c->weight[i];
    put64(out, w->count | (w->file ? IN_FILE : 0));
    if (w->file) {
      put_text(out, w->file);
      put64(out, w->offset);
      continue;
    }
    pad(out, WEIGHT_ALIGNMENT);
    add_bytes(out, w->data, w->count * sizeof(float));
  }
  put64(out, c->programs);
  for (size_t i = 0; i < c->programs; i++) put_program(out, c->program[i]);
  uint64_t size = out->size, sum = checksum(out->data + HEADER, out->size - HEADER);
  memcpy(out->data + SIZE_AT, &size, sizeof size);
  memcpy(out->data + CHECKSUM_AT, &sum, sizeof sum);
}

// reader goes through foreign bytes. After the first thing that is not there everything it gives is
// zero, and bad says so.
struct reader {
  const uint8_t *data;
  size_t size, at;
  bool bad;
};

static const uint8_t *get(struct reader *r, size_t alignment, uint64_t size) {
  size_t at = r->at + (alignment - r->at % alignment) % alignment;
  if (r->bad || at > r->size || size > r->size - at) {
    r->bad = true;
    return NULL;
  }
  r->at = at + size;
  return r->data + at;
}

static uint32_t get32(struct reader *r) {
  uint32_t n = 0;
  const uint8_t *p = get(r, sizeof n, sizeof n);
  if (p) memcpy(&n, p, sizeof n);
  return n;
}

static uint64_t get64(struct reader *r) {
  uint64_t n = 0;
  const uint8_t *p = get(r, sizeof n, sizeof n);
  if (p) memcpy(&n, p, sizeof n);
  return n;
}

static char *get_text(struct reader *r) {
  uint32_t length = get32(r);
  const uint8_t *p = get(r, 1, length);
  return p ? format_text("%.*s", (int)length, (const char *)p) : copy_text("");
}

// get_count reads how many things follow, each of at least so many bytes: what cannot fit into the
// rest is not believed, and no memory taken for it.
static uint32_t get_count(struct reader *r, size_t least) {
  uint32_t n = get32(r);
  if (n > (r->size - r->at) / least) r->bad = true;
  return r->bad ? 0 : n;
}

static void get_weights(struct reader *r, struct context *c) {
  uint64_t count = get64(r);
  for (uint64_t i = 0; i < count && !r->bad; i++) {
    uint64_t floats = get64(r);
    struct weight *w = allocate(1, sizeof *w);
    if (floats & IN_FILE) {
      *w = (struct weight){.count = floats & ~IN_FILE, .file = get_text(r)};
      w->offset = get64(r);
      if (w->count > (uint64_t)MAX_ELEMENTS) r->bad = true;
    } else {
      if (floats > r->size / sizeof(float)) r->bad = true;
      *w = (struct weight){.count = floats,
          .data = (const float *)get(
              r, WEIGHT_ALIGNMENT, floats * sizeof(float))}; // aligned, for the binary itself is
    }
    c->weight = grow(c->weight, c->weights, sizeof *c->weight);
    c->weight[c->weights++] = w;
  }
}

static void get_value(struct reader *r, const struct context *c, struct program *p, uint32_t i) {
  struct value *v = &p->value[i];
  v->from = get32(r);
  v->index = get32(r);
  v->shape.rank = get32(r);
  get32(r);
  if (v->shape.rank > MAX_RANK) {
    r->bad = true;
    v->shape.rank = 0;
  }
  for (uint32_t d = 0; d < v->shape.rank; d++) v->shape.dims[d] = (int64_t)get64(r);
  if (v->from == FROM_WEIGHT && v->index < c->weights) p->weight[i] = c->weight[v->index];
}

static struct program *get_program(struct reader *r, const struct context *c) {
  struct program *p = allocate(1, sizeof *p);
  p->name = get_text(r);
  p->inputs = get_count(r, 1);
  p->outputs = get_count(r, sizeof(uint32_t));
  p->values = get_count(r, 4 * sizeof(uint32_t));
  p->steps = get_count(r, 4 * sizeof(uint32_t));
  p->output = allocate(p->outputs, sizeof *p->output);
  p->value = allocate(p->values, sizeof *p->value);
  p->weight = allocate(p->values, sizeof *p->weight);
  p->step = allocate(p->steps, sizeof *p->step);
  for (uint32_t i = 0; i < p->outputs; i++) p->output[i] = get32(r);
  for (uint32_t i = 0; i < p->values; i++) get_value(r, c, p, i);
  for (uint32_t i = 0; i < p->steps; i++) {
    struct step *s = &p->step[i];
    s->op = get32(r);
    s->a = get32(r);
    s->b = get32(r);
    s->out = get32(r);
  }
  return p;
}

static OrtStatus *invalid(const char *where, const char *what) {
  return fail(ORT_INVALID_GRAPH, "context binary %s: %s", where, what);
}

static OrtStatus *get_programs(struct reader *r, struct context *c, const char *where) {
  uint64_t count = get64(r);
  for (uint64_t i = 0; i < count && !r->bad; i++) {
    struct program *p = get_program(r, c);
    const char *wrong = r->bad ? "it ends too early" : check_program(p);
    if (wrong) {
      free_program(p);
      return invalid(where, wrong);
    }
    OrtStatus *failed = add_program(c, p);
    if (failed) {
      ort->ReleaseStatus(failed);
      return invalid(where, "two graphs of one name");
    }
  }
  return NULL;
}

static OrtStatus *get_header(struct reader *r, bool check, const char *where) {
  const uint8_t *start = get(r, 1, sizeof magic);
  if (!start || memcmp(start, magic, sizeof magic) != 0)
    return invalid(where, "not a context binary of this EP");
  uint32_t format = get32(r);
  get32(r);
  uint64_t size = get64(r), sum = get64(r);
  if (r->bad) return invalid(where, "it ends too early");
  if (format != BINARY_FORMAT)
    return fail(ORT_INVALID_GRAPH, "context binary %s: format %u, this EP reads format %u", where,
        format, BINARY_FORMAT);
  if (!check) return NULL;
  if (size != r->size)
    return fail(ORT_INVALID_GRAPH, "context binary %s: %zu bytes, it was written with %llu", where,
        r->size, (unsigned long long)size);
  return sum == checksum(r->data + HEADER, r->size - HEADER)
             ? NULL
             : invalid(where, "checksum does not match");
}

OrtStatus *decode(struct bytes *b, bool check, const char *where, struct context **out) {
  // Weights are used where they stand, so the binary has to begin at a multiple of their alignment.
  struct reader r = {.size = b->size};
  void *aligned = NULL;
  if (posix_memalign(&aligned, WEIGHT_ALIGNMENT, b->size ? b->size : 1) != 0) {
    free(b->data);
    *b = (struct bytes){0};
    return fail(ORT_FAIL, "context binary %s: no memory for %zu bytes", where, r.size);
  }
  if (b->size) memcpy(aligned, b->data, b->size);
  free(b->data);
  *b = (struct bytes){0};
  r.data = aligned;
  OrtStatus *failed = get_header(&r, check, where);
  if (failed) {
    free(aligned);
    return failed;
  }
  char *sdk = get_text(&r), *hardware = get_text(&r);
  struct context *c = new_context(sdk, hardware);
  free(sdk);
  free(hardware);
  c->binary = aligned;
  get_weights(&r, c);
  failed = get_programs(&r, c, where);
  if (!failed && r.bad) failed = invalid(where, "it ends too early");
  if (failed)
    drop_context(c);
  else
    *out = c;
  return failed;
}
