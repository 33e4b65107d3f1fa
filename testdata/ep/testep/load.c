// Loading EPContext nodes from their context binaries.
#include <stdlib.h>
#include <string.h>

#include "binary.h"
#include "compatibility.h"
#include "compute.h"
#include "ep.h"
#include "fault.h"
#include "graph.h"
#include "node.h"
#include "workspace.h"

// opened is a context that this session uses. Several nodes may name one file: it is read once.
struct opened {
  char *path; // NULL for one from within the model
  struct context *context;
};

// loading is one session's load.
struct loading {
  struct ep *ep;
  char *directory; // that file names are relative to
  struct opened *opened;
  size_t opened_count;
  struct context_node *node;
  struct context **context; // per partition, like what follows
  const struct program **program;
  size_t count;
};

// find_directory: beside the model, or, for a model from memory, where ep.context_file_path says
// that it stands.
static OrtStatus *find_directory(struct loading *l, const OrtGraph *graph) {
  const char *model = NULL;
  TRY(ort->Graph_GetModelPath(graph, &model));
  const char *path = model && *model ? model : l->ep->options.context_path;
  l->directory = path ? directory_of(path) : NULL;
  return NULL;
}

static OrtStatus *binary_file(const struct loading *l, const struct context_node *n, char **path) {
  const char *name = n->cache.data ? (const char *)n->cache.data : "";
  if (strlen(name) != n->cache.size || !is_below(name)) {
    return fail(ORT_INVALID_GRAPH,
        "ep_cache_context \"%.100s\": not the name of a file in the model's directory or below",
        name);
  }
  if (!l->directory)
    return fail(ORT_INVALID_ARGUMENT,
        "the model came from memory: ep.context_file_path has to say where \"%s\" is", name);
  *path = format_text("%s%s", l->directory, name);
  return NULL;
}

// check_target applies the rule of the compatibility string to a binary.
static OrtStatus *check_target(const struct ep *ep, const struct context *c, const char *where) {
  char *string = compatibility_string(c->sdk, c->hardware);
  OrtCompiledModelCompatibility verdict = judge_string(ep->release, ep->hardware, string);
  free(string);
  if (verdict == OrtCompiledModelCompatibility_EP_SUPPORTED_OPTIMAL) return NULL;
  if (verdict == OrtCompiledModelCompatibility_EP_SUPPORTED_PREFER_RECOMPILATION) {
    char *text = format_text(
        "%s: context binary %s was made with SDK %s; compiling it again with %s may make it faster",
        ep_name, where, c->sdk, ep->release->sdk);
    warn(ep, text);
    free(text);
    return NULL;
  }
  return fail(ORT_INVALID_GRAPH, "context binary %s is for SDK %s on %s, this is SDK %s on %s",
      where, c->sdk, c->hardware, ep->release->sdk, ep->hardware);
}

// read_sources: weights that stand in the source model's files are where
// ep.context_source_model_path says that this model is, else beside this one.
static OrtStatus *read_sources(const struct loading *l, struct context *c) {
  const char *source = l->ep->options.source_path;
  char *directory = source ? directory_of(source) : NULL;
  OrtStatus *failed = read_weights(c, directory ? directory : l->directory);
  free(directory);
  return failed;
}

static OrtStatus *add_opened(
    struct loading *l, struct bytes *b, const char *path, struct context **out) {
  const char *where = path ? path : "in the model";
  struct context *c = NULL;
  TRY(decode(b, l->ep->options.check, where, &c));
  OrtStatus *failed = check_target(l->ep, c, where);
  if (!failed) failed = read_sources(l, c);
  if (failed) {
    drop_context(c);
    return failed;
  }
  l->opened = grow(l->opened, l->opened_count, sizeof *l->opened);
  l->opened[l->opened_count++] =
      (struct opened){.path = path ? copy_text(path) : NULL, .context = c};
  *out = c;
  return NULL;
}

static OrtStatus *open_file(struct loading *l, const char *path, struct context **out) {
  for (size_t i = 0; i < l->opened_count; i++) {
    if (l->opened[i].path && strcmp(l->opened[i].path, path) == 0) {
      *out = l->opened[i].context;
      return NULL;
    }
  }
  struct bytes b = {0};
  TRY(read_file(path, &b));
  return add_opened(l, &b, path, out);
}

static OrtStatus *use(struct loading *l, size_t i, struct context *c, const char *where) {
  l->program[i] = find_program(c, l->node[i].partition);
  if (!l->program[i])
    return fail(
        ORT_INVALID_GRAPH, "context binary %s has no graph \"%s\"", where, l->node[i].partition);
  l->context[i] = keep_context(c);
  return NULL;
}

static OrtStatus *load_file(struct loading *l, size_t i, const char *path) {
  if (l->ep->options.share) {
    l->program[i] = take_graph(path, l->node[i].partition, &l->context[i]);
    if (l->program[i]) return check_target(l->ep, l->context[i], path);
  }
  struct context *c = NULL;
  TRY(open_file(l, path, &c));
  return use(l, i, c, path);
}

static OrtStatus *load_primary(struct loading *l, size_t i) {
  struct context_node *n = &l->node[i];
  if (n->embed) {
    struct bytes b = n->cache;
    struct context *c = NULL;
    n->cache = (struct bytes){0}; // handed over
    TRY(add_opened(l, &b, NULL, &c));
    return use(l, i, c, "in the model");
  }
  char *path = NULL;
  TRY(binary_file(l, n, &path));
  OrtStatus *failed = load_file(l, i, path);
  free(path);
  return failed;
}

// load_secondary looks for a graph in the contexts of this session's primary nodes, and then in
// what other sessions left.
static OrtStatus *load_secondary(struct loading *l, size_t i) {
  struct context *found = NULL;
  for (size_t k = 0; k < l->opened_count; k++) {
    struct context *c = l->opened[k].context;
    if (!find_program(c, l->node[i].partition)) continue;
    if (found)
      return fail(
          ORT_INVALID_GRAPH, "graph \"%s\" stands in two primary contexts", l->node[i].partition);
    found = c;
  }
  if (found) return use(l, i, found, "of a primary node");
  if (l->ep->options.share) l->program[i] = take_graph(NULL, l->node[i].partition, &l->context[i]);
  return l->program[i] ? NULL
                       : fail(ORT_INVALID_GRAPH, "no primary context holds graph \"%s\"",
                             l->node[i].partition);
}

// load_graphs loads primary nodes first: secondary ones may stand before them.
static OrtStatus *load_graphs(struct loading *l) {
  for (size_t i = 0; i < l->count; i++) {
    if (l->node[i].main) TRY(load_primary(l, i));
  }
  for (size_t i = 0; i < l->count; i++) {
    if (!l->node[i].main) TRY(load_secondary(l, i));
  }
  if (!l->ep->options.share) return NULL;
  for (size_t k = 0; k < l->opened_count; k++) {
    if (l->opened[k].path)
      leave_graphs(l->opened[k].path, l->opened[k].context, l->program, l->count);
  }
  return NULL;
}

// places finds each value of the EPContext node among the fused node's, which may stand in another
// order.
static OrtStatus *places(const struct values *node, const struct values *fused, uint32_t wanted,
    const char *partition, uint32_t **out) {
  if (node->count != wanted)
    return fail(
        ORT_INVALID_GRAPH, "graph \"%s\" has other inputs or outputs than its node", partition);
  *out = allocate(wanted, sizeof **out);
  for (uint32_t i = 0; i < wanted; i++) {
    const char *name = "", *other = "";
    bool found = false;
    TRY(value_name(node->value[i], &name));
    for (size_t k = 0; k < fused->count && !found; k++) {
      TRY(value_name(fused->value[k], &other));
      found = strcmp(name, other) == 0;
      (*out)[i] = (uint32_t)k;
    }
    if (!found) return fail(ORT_INVALID_GRAPH, "node \"%s\" has no value \"%s\"", partition, name);
  }
  return NULL;
}

static OrtStatus *connect(const struct loading *l, size_t i, const OrtNode *node,
    const OrtNode *fused, OrtNodeComputeInfo **info) {
  struct values in = {0}, out = {0}, fused_in = {0}, fused_out = {0};
  uint32_t *input = NULL, *output = NULL;
  OrtStatus *failed = node_inputs(node, &in);
  if (!failed) failed = node_outputs(node, &out);
  if (!failed) failed = node_inputs(fused, &fused_in);
  if (!failed) failed = node_outputs(fused, &fused_out);
  if (!failed) failed = places(&in, &fused_in, l->program[i]->inputs, l->node[i].partition, &input);
  if (!failed)
    failed = places(&out, &fused_out, l->program[i]->outputs, l->node[i].partition, &output);
  if (!failed)
    *info = new_compute_info(l->context[i], l->program[i], input, output, l->ep->options.faults);
  free(input);
  free(output);
  free(in.value);
  free(out.value);
  free(fused_in.value);
  free(fused_out.value);
  return failed;
}

static OrtStatus *load_all(struct loading *l, const OrtNode *const *nodes,
    const OrtNode *const *fused, OrtNodeComputeInfo **infos) {
  for (size_t i = 0; i < l->count; i++) TRY(read_context_node(nodes[i], &l->node[i]));
  TRY(load_graphs(l));
  for (size_t i = 0; i < l->count; i++) TRY(connect(l, i, nodes[i], fused[i], &infos[i]));
  return NULL;
}

// only_nodes gives the one node of each partition.
static OrtStatus *only_nodes(const OrtGraph *const *graphs, size_t count, const OrtNode **out) {
  for (size_t i = 0; i < count; i++) {
    const OrtNode **nodes = NULL;
    size_t n = 0;
    OrtStatus *failed = graph_nodes(graphs[i], &nodes, &n);
    if (!failed && n != 1)
      failed = fail(ORT_EP_FAIL, "a partition of %zu nodes beside EPContext nodes", n);
    if (!failed) out[i] = nodes[0];
    free(nodes);
    TRY(failed);
  }
  return NULL;
}

OrtStatus *load_partitions(struct ep *ep, const OrtGraph *const *graphs,
    const OrtNode *const *fused, size_t count, OrtNodeComputeInfo **infos) {
  TRY(fault_at(ep->options.faults, "load"));
  if (ep->absent)
    return fail(
        ORT_EP_FAIL, "the device is virtual: models can be compiled for it here, but not run");
  if (ep->options.context_enable)
    return fail(ORT_INVALID_ARGUMENT, "the model is compiled already");
  struct loading l = {.ep = ep, .count = count};
  const OrtNode **nodes = allocate(count, sizeof *nodes);
  l.node = allocate(count, sizeof *l.node);
  l.context = allocate(count, sizeof *l.context);
  l.program = allocate(count, sizeof *l.program);
  OrtStatus *failed = only_nodes(graphs, count, nodes);
  if (!failed) failed = find_directory(&l, graphs[0]);
  if (!failed) failed = load_all(&l, nodes, fused, infos);
  for (size_t i = 0; i < count; i++) {
    free_context_node(&l.node[i]);
    drop_context(l.context[i]);
  }
  for (size_t i = 0; i < l.opened_count; i++) {
    free(l.opened[i].path);
    drop_context(l.opened[i].context);
  }
  free(l.opened);
  free(l.directory);
  free(l.node);
  free(l.context);
  free(l.program);
  free(nodes);
  return failed;
}
