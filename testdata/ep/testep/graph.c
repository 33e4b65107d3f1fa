#include "graph.h"

#include <stdlib.h>
#include <string.h>

#include "node.h"

OrtStatus *node_inputs(const OrtNode *node, struct values *out) {
  *out = (struct values){0};
  TRY(ort->Node_GetNumInputs(node, &out->count));
  out->value = allocate(out->count, sizeof *out->value);
  return ort->Node_GetInputs(node, out->value, out->count);
}

OrtStatus *node_outputs(const OrtNode *node, struct values *out) {
  *out = (struct values){0};
  TRY(ort->Node_GetNumOutputs(node, &out->count));
  out->value = allocate(out->count, sizeof *out->value);
  return ort->Node_GetOutputs(node, out->value, out->count);
}

OrtStatus *graph_nodes(const OrtGraph *graph, const OrtNode ***nodes, size_t *count) {
  TRY(ort->Graph_GetNumNodes(graph, count));
  *nodes = allocate(*count, sizeof **nodes);
  return ort->Graph_GetNodes(graph, *nodes, *count);
}

OrtStatus *value_name(const OrtValueInfo *value, const char **name) {
  *name = "";
  return value ? ort->GetValueInfoName(value, name) : NULL;
}

// shape_of gives the shape of a float tensor whose shape is known. Others get found = false.
static OrtStatus *shape_of(const OrtValueInfo *value, struct shape *shape, bool *found) {
  *found = false;
  *shape = (struct shape){0};
  if (!value) return NULL;
  const OrtTypeInfo *type = NULL; // belongs to the value, as what it gives does
  const OrtTensorTypeAndShapeInfo *tensor = NULL;
  enum ONNXType kind = ONNX_TYPE_UNKNOWN;
  TRY(ort->GetValueInfoTypeInfo(value, &type));
  if (!type) return NULL;
  TRY(ort->GetOnnxTypeFromTypeInfo(type, &kind));
  if (kind != ONNX_TYPE_TENSOR) return NULL;
  TRY(ort->CastTypeInfoToTensorInfo(type, &tensor));
  ONNXTensorElementDataType element = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  TRY(ort->GetTensorElementType(tensor, &element));
  size_t rank = 0;
  TRY(ort->GetDimensionsCount(tensor, &rank));
  if (element != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || rank > MAX_RANK) return NULL;
  shape->rank = (uint32_t)rank;
  if (rank) TRY(ort->GetDimensions(tensor, shape->dims, rank)); // -1 where free
  *found = elements(shape) >= 0;
  return NULL;
}

// operands is what a node computes; op is OP_NONE where this EP cannot. A Gemm is a MatMul and,
// with c, an Add.
struct operands {
  enum op op;
  const OrtValueInfo *a, *b, *c, *out; // b is NULL for Relu, c for all but Gemm
  struct shape shape_a, shape_b, shape_c, shape_out;
};

static OrtStatus *read_shapes(struct operands *o) {
  bool a = false, b = true, c = true, out = false;
  TRY(shape_of(o->a, &o->shape_a, &a));
  if (o->b) TRY(shape_of(o->b, &o->shape_b, &b));
  if (o->c) TRY(shape_of(o->c, &o->shape_c, &c));
  TRY(shape_of(o->out, &o->shape_out, &out));
  // Shapes come from inference; an operator is only taken where they say what it makes.
  bool sound = a && b && c && out && check_shapes(o->op, &o->shape_a, &o->shape_b, &o->shape_out);
  if (!sound || (o->c && !check_shapes(OP_ADD, &o->shape_out, &o->shape_c, &o->shape_out)))
    o->op = OP_NONE;
  return NULL;
}

// is_plain_gemm tells whether a Gemm is a MatMul and an Add: ONNX Runtime makes such nodes of these
// two before it asks EPs.
static OrtStatus *is_plain_gemm(const OrtNode *node, bool *yes) {
  int64_t trans_a = 0, trans_b = 0;
  float alpha = 1, beta = 1;
  TRY(read_int(node, "transA", &trans_a));
  TRY(read_int(node, "transB", &trans_b));
  TRY(read_float(node, "alpha", &alpha));
  TRY(read_float(node, "beta", &beta));
  *yes = !trans_a && !trans_b && alpha == 1 && beta == 1;
  return NULL;
}

static OrtStatus *read_operands(const OrtNode *node, struct operands *o) {
  *o = (struct operands){0};
  const char *type = NULL, *domain = NULL;
  TRY(ort->Node_GetOperatorType(node, &type));
  TRY(ort->Node_GetDomain(node, &domain));
  if (domain && *domain && strcmp(domain, "ai.onnx") != 0) return NULL;
  enum op op = op_of(type);
  bool gemm = strcmp(type, "Gemm") == 0, plain = false;
  if (gemm) TRY(is_plain_gemm(node, &plain));
  if (plain) op = OP_MATMUL;
  if (op == OP_NONE) return NULL;
  struct values in = {0}, out = {0};
  OrtStatus *failed = node_inputs(node, &in);
  if (!failed) failed = node_outputs(node, &out);
  size_t least = op == OP_RELU ? 1 : 2, most = gemm ? 3 : least;
  if (!failed && in.count >= least && in.count <= most && out.count == 1) {
    *o = (struct operands){.op = op,
        .a = in.value[0],
        .b = op == OP_RELU ? NULL : in.value[1],
        .c = in.count == 3 ? in.value[2] : NULL,
        .out = out.value[0]};
    failed = read_shapes(o);
  }
  free(in.value);
  free(out.value);
  return failed;
}

// is_listed finds a word among those that commas separate.
static bool is_listed(const char *list, const char *word) {
  size_t length = strlen(word);
  for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
    if (strncmp(at, word, length) == 0 && (at[length] == ',' || !at[length])) return true;
  }
  return false;
}

// Choosing nodes
// --------------------------------------------------------------------------------

// candidate is a node while groups are formed.
struct candidate {
  bool ours, done;
  struct values in, out;
};

static void free_candidates(struct candidate *c, size_t count) {
  for (size_t i = 0; i < count; i++) {
    free(c[i].in.value);
    free(c[i].out.value);
  }
  free(c);
}

static OrtStatus *read_candidates(
    const OrtNode *const *nodes, size_t count, const struct options *o, struct candidate *c) {
  for (size_t i = 0; i < count; i++) {
    struct operands operands;
    const char *type = NULL;
    size_t subgraphs = 0;
    TRY(ort->Node_GetOperatorType(nodes[i], &type));
    TRY(read_operands(nodes[i], &operands));
    TRY(ort->Node_GetNumSubgraphs(nodes[i], &subgraphs));
    c[i].ours = operands.op != OP_NONE && subgraphs == 0 && is_listed(o->ops, type) &&
                elements(&operands.shape_out) >= o->least;
    TRY(node_inputs(nodes[i], &c[i].in));
    TRY(node_outputs(nodes[i], &c[i].out));
  }
  return NULL;
}

static OrtStatus *makes(const struct candidate *c, const char *name, bool *yes) {
  *yes = false;
  for (size_t i = 0; i < c->out.count && !*yes; i++) {
    const char *made = "";
    TRY(value_name(c->out.value[i], &made));
    *yes = *made && strcmp(made, name) == 0;
  }
  return NULL;
}

// is_ready tells whether all that a node needs has been done. A subgraph's needs from outside are
// among the node's implicit inputs, which count too.
static OrtStatus *is_ready(const OrtNode *const *nodes, const struct candidate *c, size_t count,
    size_t node, bool *ready) {
  size_t implicit = 0;
  TRY(ort->Node_GetNumImplicitInputs(nodes[node], &implicit));
  const OrtValueInfo **needs = allocate(c[node].in.count + implicit, sizeof *needs);
  if (c[node].in.count) memcpy(needs, c[node].in.value, c[node].in.count * sizeof *needs);
  OrtStatus *failed =
      implicit ? ort->Node_GetImplicitInputs(nodes[node], needs + c[node].in.count, implicit)
               : NULL;
  *ready = true;
  for (size_t i = 0; i < c[node].in.count + implicit && *ready && !failed; i++) {
    const char *name = "";
    failed = value_name(needs[i], &name);
    for (size_t k = 0; k < count && *name && *ready && !failed; k++) {
      bool made = false;
      if (!c[k].done) failed = makes(&c[k], name, &made);
      if (made) *ready = false;
    }
  }
  free(needs);
  return failed;
}

// sweep does all nodes of one kind that can be done, and lists them in group.
static OrtStatus *sweep(const OrtNode *const *nodes, struct candidate *c, size_t count, bool ours,
    const OrtNode **group, size_t *size) {
  *size = 0;
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t i = 0; i < count; i++) {
      bool ready = false;
      if (c[i].done || c[i].ours != ours) continue;
      TRY(is_ready(nodes, c, count, i, &ready));
      if (!ready) continue;
      c[i].done = progress = true;
      group[(*size)++] = nodes[i];
    }
  }
  return NULL;
}

static OrtStatus *take(
    const OrtNode *const *nodes, size_t count, bool drop_weights, OrtEpGraphSupportInfo *support) {
  OrtNodeFusionOptions fusion = {
      .ort_version_supported = ORT_API_VERSION, .drop_constant_initializers = drop_weights};
  return count ? ort_ep->EpGraphSupportInfo_AddNodesToFuse(support, nodes, count, &fusion) : NULL;
}

// group_nodes sweeps through the graph: first all nodes of others that can run, then all of ours,
// and so on. Each group of ours is a run of neighbours in one topological order, so no path leaves
// it and comes back, as ONNX Runtime asks of nodes that become one.
static OrtStatus *group_nodes(const OrtNode *const *nodes, struct candidate *c, size_t count,
    const struct options *o, const OrtNode **group, OrtEpGraphSupportInfo *support) {
  size_t others = 0, ours = 0;
  do {
    TRY(sweep(nodes, c, count, false, group, &others));
    TRY(sweep(nodes, c, count, true, group, &ours));
    for (size_t i = 0; o->split && i < ours; i++) TRY(take(group + i, 1, !o->weightless, support));
    if (!o->split) TRY(take(group, ours, !o->weightless, support));
  } while (others || ours);
  return NULL;
}

static OrtStatus *take_first(const OrtNode *const *nodes, const struct candidate *c, size_t count,
    bool drop_weights, OrtEpGraphSupportInfo *support) {
  for (size_t i = 0; i < count; i++) {
    if (c[i].ours) return take(nodes + i, 1, drop_weights, support);
  }
  return NULL;
}

static OrtStatus *choose_to_compile(const OrtNode *const *nodes, size_t count,
    const struct options *o, OrtEpGraphSupportInfo *support) {
  struct candidate *c = allocate(count, sizeof *c);
  const OrtNode **group = allocate(count, sizeof *group);
  OrtStatus *failed = read_candidates(nodes, count, o, c);
  if (!failed && o->single) failed = take_first(nodes, c, count, !o->weightless, support);
  if (!failed && !o->single) failed = group_nodes(nodes, c, count, o, group, support);
  free(group);
  free_candidates(c, count);
  return failed;
}

static OrtStatus *choose_contexts(
    const OrtNode *const *nodes, size_t count, bool *any, OrtEpGraphSupportInfo *support) {
  for (size_t i = 0; i < count; i++) {
    bool context = false, ours = false;
    TRY(is_context_node(nodes[i], &context, &ours));
    *any = *any || context;
    if (ours) TRY(take(&nodes[i], 1, false, support));
  }
  return NULL;
}

OrtStatus *choose_nodes(
    const OrtGraph *graph, const struct options *o, OrtEpGraphSupportInfo *support) {
  const OrtNode *parent = NULL, **nodes = NULL;
  size_t count = 0;
  TRY(ort->Graph_GetParentNode(graph, &parent));
  if (parent) return NULL; // bodies of If, Loop and Scan are left to others
  bool contexts = false;
  OrtStatus *failed = graph_nodes(graph, &nodes, &count);
  if (!failed) failed = choose_contexts(nodes, count, &contexts, support);
  if (!failed && !contexts) failed = choose_to_compile(nodes, count, o, support);
  free(nodes);
  return failed;
}

// Compiling
// --------------------------------------------------------------------------------

// builder is a program that grows, with the names of its values.
struct builder {
  struct program *program;
  const char **name;
  struct context *context;
  bool refer; // weights that the source model has in files stay there
};

static bool find_value(const struct builder *b, const char *name, uint32_t *value) {
  for (uint32_t i = 0; i < b->program->values; i++) {
    if (strcmp(b->name[i], name) == 0) {
      *value = i;
      return true;
    }
  }
  return false;
}

static uint32_t new_value(
    struct builder *b, const char *name, uint32_t from, uint32_t index, const struct shape *shape) {
  struct program *p = b->program;
  p->value = grow(p->value, p->values, sizeof *p->value);
  p->weight = grow(p->weight, p->values, sizeof *p->weight);
  b->name = grow(b->name, p->values, sizeof *b->name);
  p->value[p->values] = (struct value){.from = from, .index = index, .shape = *shape};
  p->weight[p->values] = from == FROM_WEIGHT ? b->context->weight[index] : NULL;
  b->name[p->values] = name;
  return p->values++;
}

static OrtStatus *new_weight(struct builder *b, const char *name, const OrtValueInfo *info,
    const struct shape *shape, uint32_t *value) {
  bool constant = false;
  TRY(ort->ValueInfo_IsConstantInitializer(info, &constant));
  const OrtValue *tensor = NULL;
  if (constant) TRY(ort->ValueInfo_GetInitializerValue(info, &tensor));
  if (!tensor)
    return fail(ORT_EP_FAIL,
        "value \"%s\" is neither an input, a weight nor computed in the partition", name);
  void *data = NULL;
  size_t size = 0;
  TRY(ort->GetTensorSizeInBytes(tensor, &size));
  TRY(ort->GetTensorMutableData((OrtValue *)tensor, &data)); // only read
  uint64_t count = (uint64_t)elements(shape);
  if (size != count * sizeof(float))
    return fail(ORT_EP_FAIL, "weight \"%s\": %zu bytes do not fit its shape", name, size);
  OrtExternalInitializerInfo *place = NULL;
  if (b->refer) TRY(ort->ValueInfo_GetExternalInitializerInfo(info, &place));
  uint32_t weight =
      place ? refer_weight(b->context, data, count, ort->ExternalInitializerInfo_GetFilePath(place),
                  (uint64_t)ort->ExternalInitializerInfo_GetFileOffset(place))
            : add_weight(b->context, data, count);
  if (place) ort->ReleaseExternalInitializerInfo(place);
  *value = new_value(b, name, FROM_WEIGHT, weight, shape);
  return NULL;
}

static OrtStatus *operand(
    struct builder *b, const OrtValueInfo *info, const struct shape *shape, uint32_t *value) {
  const char *name = "";
  TRY(value_name(info, &name));
  return find_value(b, name, value) ? NULL : new_weight(b, name, info, shape, value);
}

static uint32_t add_step(
    struct builder *b, struct step s, const char *name, const struct shape *shape) {
  s.out = new_value(b, name, FROM_STEP, 0, shape);
  b->program->step = grow(b->program->step, b->program->steps, sizeof s);
  b->program->step[b->program->steps++] = s;
  return s.out;
}

static OrtStatus *add_node(struct builder *b, const OrtNode *node) {
  struct operands o;
  struct step s = {0}, sum = {.op = OP_ADD};
  const char *name = "";
  TRY(read_operands(node, &o));
  if (o.op == OP_NONE) return fail(ORT_EP_FAIL, "a node was given that this EP did not choose");
  s.op = o.op;
  TRY(value_name(o.out, &name));
  TRY(operand(b, o.a, &o.shape_a, &s.a));
  if (o.b) TRY(operand(b, o.b, &o.shape_b, &s.b));
  if (o.c) TRY(operand(b, o.c, &o.shape_c, &sum.b));
  sum.a =
      add_step(b, s, o.c ? "" : name, &o.shape_out); // a product that is only summed has no name
  if (o.c) add_step(b, sum, name, &o.shape_out);
  return NULL;
}

static OrtStatus *add_inputs(struct builder *b, const struct values *in) {
  for (size_t i = 0; i < in->count; i++) {
    const char *name = "";
    struct shape shape;
    bool known = false;
    TRY(value_name(in->value[i], &name));
    TRY(shape_of(in->value[i], &shape, &known));
    if (!known) return fail(ORT_EP_FAIL, "input \"%s\": not a float tensor of known shape", name);
    new_value(b, name, FROM_INPUT, (uint32_t)i, &shape);
  }
  b->program->inputs = (uint32_t)in->count;
  return NULL;
}

static OrtStatus *add_outputs(struct builder *b, const struct values *out) {
  b->program->output = allocate(out->count, sizeof *b->program->output);
  for (size_t i = 0; i < out->count; i++) {
    const char *name = "";
    TRY(value_name(out->value[i], &name));
    if (!find_value(b, name, &b->program->output[i]))
      return fail(ORT_EP_FAIL, "output \"%s\" is not computed in the partition", name);
  }
  b->program->outputs = (uint32_t)out->count;
  return NULL;
}

static OrtStatus *build(struct builder *b, const OrtNode *const *nodes, size_t count,
    const struct values *in, const struct values *out) {
  TRY(add_inputs(b, in));
  for (size_t i = 0; i < count; i++) TRY(add_node(b, nodes[i])); // in topological order
  TRY(add_outputs(b, out));
  const char *wrong = check_program(b->program);
  return wrong ? fail(ORT_EP_FAIL, "partition \"%s\": bad %s", b->program->name, wrong) : NULL;
}

OrtStatus *compile_graph(const OrtGraph *graph, const OrtNode *fused, const char *name, bool refer,
    struct context *c, const struct program **out) {
  struct builder b = {.program = allocate(1, sizeof *b.program), .context = c, .refer = refer};
  b.program->name = copy_text(name);
  const OrtNode **nodes = NULL;
  struct values inputs = {0}, outputs = {0};
  size_t count = 0;
  OrtStatus *failed = graph_nodes(graph, &nodes, &count);
  if (!failed) failed = node_inputs(fused, &inputs);
  if (!failed) failed = node_outputs(fused, &outputs);
  if (!failed) failed = build(&b, nodes, count, &inputs, &outputs);
  free(nodes);
  free(inputs.value);
  free(outputs.value);
  free(b.name);
  if (failed) {
    free_program(b.program);
    return failed;
  }
  TRY(add_program(c, b.program));
  *out = b.program;
  return NULL;
}
