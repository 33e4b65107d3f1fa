// Running a program as ONNX Runtime asks for it.
#ifndef TESTEP_COMPUTE_H
#define TESTEP_COMPUTE_H

#include "context.h"

// new_compute_info makes the computation of one fused node; it is a user of the context. input
// gives, for each input of the program, its place among the fused node's inputs, and output
// likewise; both are copied. faults may be NULL and is copied.
OrtNodeComputeInfo *new_compute_info(struct context *c, const struct program *p,
    const uint32_t *input, const uint32_t *output, const char *faults);
void free_compute_info(OrtNodeComputeInfo *info);

#endif
