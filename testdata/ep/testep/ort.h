// What every file of this EP needs: ONNX Runtime's function tables, statuses, memory, text and
// bytes.
#ifndef TESTEP_ORT_H
#define TESTEP_ORT_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "onnxruntime_c_api.h"

// ep_name is the EP's one name, under whatever name the library was registered: it stands in
// `source` and in metadata keys of artefacts. The release says it (release.h); CreateEpFactories
// sets it, and it stays.
extern const char *ep_name;

// The tables of the running ONNX Runtime. CreateEpFactories sets them before anything else runs;
// afterwards they are only read.
extern const OrtApi *ort;
extern const OrtEpApi *ort_ep;
extern const OrtModelEditorApi *ort_editor;

// TRY leaves the function with the status of a call that failed.
#define TRY(call)                                                                                  \
  do {                                                                                             \
    OrtStatus *try_status_ = (call);                                                               \
    if (try_status_) return try_status_;                                                           \
  } while (0)

// mutant is how this installation breaks a guideline on purpose: see the README; "": it does not.
extern const char *mutant;
bool is_mutant(const char *kind);

// fail makes a status. The text begins with the EP's name, for it surfaces far from here.
OrtStatus *fail(OrtErrorCode code, const char *format, ...) __attribute__((format(printf, 2, 3)));

// allocate gives zeroed memory for count things of a size. It never gives NULL: a process that
// cannot have these few bytes ends. What is large, or of a size that a file tells, is allocated
// with malloc and checked.
void *allocate(size_t count, size_t size);

// grow makes room for one thing more in an array of count things, and gives its new place.
void *grow(void *array, size_t count, size_t size);

char *copy_text(const char *text);
char *format_text(const char *format, ...) __attribute__((format(printf, 1, 2)));

// is_below tells whether a name stays in a directory, or below: anything else could name any file
// of the machine.
bool is_below(const char *name);

bool has_suffix(const char *text, const char *suffix);

// bytes is a buffer that grows.
struct bytes {
  uint8_t *data;
  size_t size, room;
};

void add_bytes(struct bytes *b, const void *data, size_t size);

// read_file gives a whole file. The code tells a missing file (ORT_NO_SUCHFILE) from one that
// cannot be read (ORT_FAIL).
OrtStatus *read_file(const char *path, struct bytes *out);

// write_file replaces a file at once: whoever looks sees the old content, or the new one, never
// half of it.
OrtStatus *write_file(const char *path, const struct bytes *b);

#endif
