// The context binary, as it stands in a file or in an EPContext node.
//
//   0   8 bytes   "EPCTEST" and a zero
//   8   u32       format: BINARY_FORMAT
//   12  u32       zero
//   16  u64       size of all, in bytes
//   24  u64       checksum: FNV-1a, 64 bits, of everything from byte 32 on
//   32  text      SDK version
//       text      hardware architecture
//       u64       number of weights, then each: u64 number of floats; padding to a multiple of 64
//       from the beginning; the floats. Those of one that
//                 stands in the source model's external data are left out: the number has bit 63
//                 set, and text file, u64 offset follow
//       u64       number of programs, then each:
//         text    name of the partition
//         u32     inputs, outputs, values, steps
//         u32     the value of each output
//                 each value: u32 from, index, rank, zero; i64 of each dimension
//                 each step: u32 op, a, b, out
//
// Numbers are little-endian. A text is a u32 length and its bytes. Before each number stand zeros
// up to a multiple of its size. Weights stand in it as they stand in the model, so that binaries of
// like models have long runs of bytes in common.
#ifndef TESTEP_BINARY_H
#define TESTEP_BINARY_H

#include "context.h"

enum { BINARY_FORMAT = 1 };

// encode writes a context. The same context gives the same bytes.
void encode(const struct context *c, struct bytes *out);

// decode reads a context, and takes b's memory over, whatever it returns. Bytes that are not a
// sound binary are ORT_INVALID_GRAPH; without check their checksum is not looked at. where names
// the binary in errors.
OrtStatus *decode(struct bytes *b, bool check, const char *where, struct context **out);

#endif
