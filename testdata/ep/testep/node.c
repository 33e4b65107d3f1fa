#include "node.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "graph.h"

// attribute gives NULL where the node does not have it.
static OrtStatus *attribute(const OrtNode *node, const char *name, const OrtOpAttr **out) {
  *out = NULL;
  OrtStatus *failed = ort->Node_GetAttributeByName(node, name, out);
  if (failed && ort->GetErrorCode(failed) == ORT_NOT_FOUND) {
    ort->ReleaseStatus(failed);
    *out = NULL;
    return NULL;
  }
  return failed;
}

OrtStatus *read_int(const OrtNode *node, const char *name, int64_t *value) {
  const OrtOpAttr *a = NULL;
  size_t size = 0;
  TRY(attribute(node, name, &a));
  return a ? ort->ReadOpAttr(a, ORT_OP_ATTR_INT, value, sizeof *value, &size) : NULL;
}

OrtStatus *read_float(const OrtNode *node, const char *name, float *value) {
  const OrtOpAttr *a = NULL;
  size_t size = 0;
  TRY(attribute(node, name, &a));
  return a ? ort->ReadOpAttr(a, ORT_OP_ATTR_FLOAT, value, sizeof *value, &size) : NULL;
}

static OrtStatus *read_text(const OrtNode *node, const char *name, struct bytes *out) {
  *out = (struct bytes){0};
  const OrtOpAttr *a = NULL;
  size_t size = 0;
  TRY(attribute(node, name, &a));
  if (a) {
    // The first call fails, and tells the size.
    OrtStatus *too_short = ort->ReadOpAttr(a, ORT_OP_ATTR_STRING, NULL, 0, &size);
    if (too_short) ort->ReleaseStatus(too_short);
  }
  out->data = malloc(size + 1);
  if (!out->data) return fail(ORT_FAIL, "attribute %s: no memory for %zu bytes", name, size);
  OrtStatus *failed = size ? ort->ReadOpAttr(a, ORT_OP_ATTR_STRING, out->data, size, &size) : NULL;
  if (failed) size = 0;
  out->data[size] = 0;
  out->size = size;
  out->room = size + 1;
  return failed;
}

OrtStatus *is_context_node(const OrtNode *node, bool *context, bool *ours) {
  const char *type = NULL, *domain = NULL;
  *context = *ours = false;
  TRY(ort->Node_GetOperatorType(node, &type));
  TRY(ort->Node_GetDomain(node, &domain));
  if (strcmp(type, "EPContext") != 0 || !domain || strcmp(domain, "com.microsoft") != 0)
    return NULL;
  struct bytes source;
  OrtStatus *failed = read_text(node, "source", &source);
  *context = true;
  *ours = !failed && strcmp((char *)source.data, ep_name) == 0;
  free(source.data);
  return failed;
}

OrtStatus *read_context_node(const OrtNode *node, struct context_node *out) {
  *out = (struct context_node){0};
  int64_t main = 1, embed = 1; // the schema's defaults
  struct bytes partition = {0};
  OrtStatus *failed = read_int(node, "main_context", &main);
  if (!failed) failed = read_int(node, "embed_mode", &embed);
  if (!failed) failed = read_text(node, "partition_name", &partition);
  if (!failed) failed = read_text(node, "ep_cache_context", &out->cache);
  out->main = main != 0;
  out->embed = embed != 0;
  out->partition = partition.data ? (char *)partition.data : copy_text("");
  if (failed) free_context_node(out);
  return failed;
}

void free_context_node(struct context_node *n) {
  free(n->cache.data);
  free(n->partition);
  *n = (struct context_node){0};
}

enum { MAX_ATTRIBUTES = 16 };

// attributes are released with the node made: CreateNode copies them.
struct attributes {
  OrtOpAttr *attribute[MAX_ATTRIBUTES];
  size_t count;
};

static OrtStatus *add_int(struct attributes *list, const char *name, int64_t value) {
  TRY(ort->CreateOpAttr(name, &value, 1, ORT_OP_ATTR_INT, &list->attribute[list->count]));
  list->count++;
  return NULL;
}

static OrtStatus *add_text(
    struct attributes *list, const char *name, const void *text, size_t size) {
  if (size == 0) return NULL; // left out is what empty means
  if (size > INT_MAX)
    return fail(ORT_EP_FAIL,
        "attribute %s: %zu bytes are too many for a model; compile with ep.context_embed_mode=0",
        name, size);
  TRY(ort->CreateOpAttr(name, text, (int)size, ORT_OP_ATTR_STRING, &list->attribute[list->count]));
  list->count++;
  return NULL;
}

static OrtStatus *add_all(
    struct attributes *list, const struct context_node *n, const struct node_facts *facts) {
  TRY(add_int(list, "main_context", n->main));
  TRY(add_int(list, "embed_mode", n->embed));
  // Only a primary node refers to a context.
  if (n->main) TRY(add_text(list, "ep_cache_context", n->cache.data, n->cache.size));
  TRY(add_text(list, "source", ep_name, strlen(ep_name)));
  TRY(add_text(list, "ep_sdk_version", facts->sdk, strlen(facts->sdk)));
  TRY(add_text(list, "hardware_architecture", facts->hardware, strlen(facts->hardware)));
  TRY(add_text(list, "partition_name", n->partition, strlen(n->partition)));
  TRY(add_text(list, "onnx_model_filename", facts->model, strlen(facts->model)));
  if (facts->notes) TRY(add_text(list, "notes", facts->notes, strlen(facts->notes)));
  return add_int(list, "max_size", facts->max_size);
}

static OrtStatus *names_of(const struct values *v, const char ***names) {
  *names = allocate(v->count, sizeof **names);
  for (size_t i = 0; i < v->count; i++) TRY(value_name(v->value[i], &(*names)[i]));
  return NULL;
}

OrtStatus *make_context_node(const OrtNode *fused, const struct context_node *n,
    const struct node_facts *facts, OrtNode **out) {
  struct values inputs = {0}, outputs = {0};
  const char **input = NULL, **output = NULL;
  struct attributes list = {0};
  OrtStatus *failed = node_inputs(fused, &inputs);
  if (!failed) failed = node_outputs(fused, &outputs);
  if (!failed) failed = names_of(&inputs, &input);
  if (!failed) failed = names_of(&outputs, &output);
  if (!failed) failed = add_all(&list, n, facts);
  const char *name = NULL; // ONNX Runtime finds by the equal name what to put in the fused node's
                           // place, so it gets no prefix
  if (!failed) failed = ort->Node_GetName(fused, &name);
  if (!failed) {
    failed = ort_editor->CreateNode("EPContext", "com.microsoft", name, input, inputs.count, output,
        outputs.count, list.attribute, list.count, out);
  }
  for (size_t i = 0; i < list.count; i++) ort->ReleaseOpAttr(list.attribute[i]);
  free(input);
  free(output);
  free(inputs.value);
  free(outputs.value);
  return failed;
}
