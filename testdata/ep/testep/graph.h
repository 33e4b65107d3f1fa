// Reading ONNX Runtime's graphs: which nodes this EP takes, and what they compute.
#ifndef TESTEP_GRAPH_H
#define TESTEP_GRAPH_H

#include "context.h"
#include "options.h"

// values are inputs or outputs of a node; whoever gets them frees the array.
struct values {
  const OrtValueInfo **value;
  size_t count;
};

OrtStatus *node_inputs(const OrtNode *node, struct values *out);
OrtStatus *node_outputs(const OrtNode *node, struct values *out);
OrtStatus *graph_nodes(const OrtGraph *graph, const OrtNode ***nodes, size_t *count);

// value_name gives "" for an optional input that is left out.
OrtStatus *value_name(const OrtValueInfo *value, const char **name);

// choose_nodes tells ONNX Runtime which nodes this EP takes: EPContext nodes of this EP one by one,
// and nothing else where there are EPContext nodes; else groups of the nodes that it can compile.
OrtStatus *choose_nodes(
    const OrtGraph *graph, const struct options *o, OrtEpGraphSupportInfo *support);

// compile_graph turns a partition into a program of the context. fused gives the order of inputs
// and outputs. With refer weights that the source model has in files are not copied into binaries.
OrtStatus *compile_graph(const OrtGraph *graph, const OrtNode *fused, const char *name, bool refer,
    struct context *c, const struct program **out);

#endif
