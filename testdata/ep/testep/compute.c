#include "compute.h"

#include <stdlib.h>
#include <string.h>

#include "fault.h"

struct compute_info {
  OrtNodeComputeInfo base; // first, as in struct ep
  struct context *context;
  const struct program *program;
  uint32_t *input, *output;
  char *faults;
};

// There is no state: a program is not changed by running, so runs at the same time share it.
static OrtStatus *ORT_API_CALL create_state(
    OrtNodeComputeInfo *base, OrtNodeComputeContext *context, void **state) {
  (void)context;
  *state = base;
  return NULL;
}

static void ORT_API_CALL release_state(OrtNodeComputeInfo *base, void *state) {
  (void)base;
  (void)state;
}

static OrtStatus *check_tensor(
    const struct compute_info *info, const OrtValue *tensor, uint32_t input) {
  OrtTensorTypeAndShapeInfo *shape = NULL;
  TRY(ort->GetTensorTypeAndShape(tensor, &shape));
  size_t rank = 0;
  int64_t dims[MAX_RANK] = {0};
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  OrtStatus *failed = ort->GetTensorElementType(shape, &type);
  if (!failed) failed = ort->GetDimensionsCount(shape, &rank);
  if (!failed && rank > 0 && rank <= MAX_RANK) failed = ort->GetDimensions(shape, dims, rank);
  ort->ReleaseTensorTypeAndShapeInfo(shape);
  TRY(failed);
  const struct program *p = info->program;
  for (uint32_t i = 0; i < p->values; i++) {
    const struct value *v = &p->value[i];
    if (v->from != FROM_INPUT || v->index != input) continue;
    if (type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || rank != v->shape.rank ||
        memcmp(dims, v->shape.dims, rank * sizeof *dims) != 0) {
      return fail(ORT_INVALID_ARGUMENT,
          "input %u of \"%s\": type or shape is not the one it was compiled for", input, p->name);
    }
  }
  return NULL;
}

static OrtStatus *get_inputs(
    const struct compute_info *info, OrtKernelContext *kernel, const float **inputs) {
  for (uint32_t i = 0; i < info->program->inputs; i++) {
    const OrtValue *tensor = NULL;
    void *data = NULL;
    TRY(ort->KernelContext_GetInput(kernel, info->input[i], &tensor));
    TRY(check_tensor(info, tensor, i));
    TRY(ort->GetTensorMutableData((OrtValue *)tensor, &data)); // only read
    inputs[i] = data;
  }
  return NULL;
}

static OrtStatus *get_outputs(
    const struct compute_info *info, OrtKernelContext *kernel, float **outputs) {
  const struct program *p = info->program;
  for (uint32_t i = 0; i < p->outputs; i++) {
    const struct shape *s = &p->value[p->output[i]].shape;
    OrtValue *tensor = NULL;
    void *data = NULL;
    TRY(ort->KernelContext_GetOutput(kernel, info->output[i], s->dims, s->rank, &tensor));
    TRY(ort->GetTensorMutableData(tensor, &data));
    outputs[i] = data;
  }
  return NULL;
}

static OrtStatus *run(const struct compute_info *info, OrtKernelContext *kernel,
    const float **inputs, float **outputs) {
  TRY(get_inputs(info, kernel, inputs));
  TRY(get_outputs(info, kernel, outputs));
  uint64_t size = scratch_size(info->program);
  float *scratch =
      size <= SIZE_MAX / sizeof *scratch ? malloc((size ? size : 1) * sizeof *scratch) : NULL;
  if (!scratch)
    return fail(ORT_EP_FAIL, "no memory for %llu intermediate values", (unsigned long long)size);
  run_program(info->program, inputs, outputs, scratch);
  free(scratch);
  return NULL;
}

static OrtStatus *ORT_API_CALL compute(
    OrtNodeComputeInfo *base, void *state, OrtKernelContext *kernel) {
  (void)state;
  const struct compute_info *info = (const struct compute_info *)base;
  TRY(fault_at(info->faults, "run"));
  const float **inputs = allocate(info->program->inputs, sizeof *inputs);
  float **outputs = allocate(info->program->outputs, sizeof *outputs);
  OrtStatus *failed = run(info, kernel, inputs, outputs);
  free(inputs);
  free(outputs);
  return failed;
}

static uint32_t *copy_numbers(const uint32_t *numbers, uint32_t count) {
  uint32_t *copy = allocate(count, sizeof *copy);
  if (count) memcpy(copy, numbers, count * sizeof *copy);
  return copy;
}

OrtNodeComputeInfo *new_compute_info(struct context *c, const struct program *p,
    const uint32_t *input, const uint32_t *output, const char *faults) {
  struct compute_info *info = allocate(1, sizeof *info);
  *info = (struct compute_info){.base = {.ort_version_supported = ORT_API_VERSION,
                                    .CreateState = create_state,
                                    .Compute = compute,
                                    .ReleaseState = release_state},
      .context = keep_context(c),
      .program = p,
      .input = copy_numbers(input, p->inputs),
      .output = copy_numbers(output, p->outputs),
      .faults = faults ? copy_text(faults) : NULL};
  return &info->base;
}

void free_compute_info(OrtNodeComputeInfo *base) {
  struct compute_info *info = (struct compute_info *)base;
  if (!info) return;
  drop_context(info->context);
  free(info->input);
  free(info->output);
  free(info->faults);
  free(info);
}
