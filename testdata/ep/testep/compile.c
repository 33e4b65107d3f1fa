// Compiling source graphs, and making EPContext nodes and binaries of them.
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "binary.h"
#include "compute.h"
#include "ep.h"
#include "fault.h"
#include "graph.h"
#include "node.h"
#include "workspace.h"

// compilation is one session's compile.
struct compilation {
  struct ep *ep;
  const char *model;        // path of the source model; "" where it came from memory
  struct context **context; // per partition: all the same one, unless each has its own
  char **binary;            // per partition: path of its binary; NULL when there is to be none
  const struct program **program;
  size_t count;
};

// context_path gives where ONNX Runtime writes the compiled model: as it is told, or beside the
// source model.
static OrtStatus *context_path(const struct compilation *c, char **out) {
  const char *told = c->ep->options.context_path;
  if (!told && !*c->model) {
    return fail(ORT_INVALID_ARGUMENT, "the model came from memory: ep.context_file_path has to say "
                                      "where the compiled model goes");
  }
  size_t stem = strlen(c->model) - (has_suffix(c->model, ".onnx") ? 5 : 0);
  *out = told ? copy_text(told) : format_text("%.*s_ctx.onnx", (int)stem, c->model);
  return NULL;
}

// binary_path is [model_name]_[ep].bin beside the compiled model; further ones are numbered.
static char *binary_path(const char *compiled, size_t number) {
  size_t stem = strlen(compiled);
  if (has_suffix(compiled, ".onnx")) stem -= 5;
  if (stem >= 4 && strncmp(compiled + stem - 4, "_ctx", 4) == 0) stem -= 4;
  return number ? format_text("%.*s_epcachedtest_%zu.bin", (int)stem, compiled, number)
                : format_text("%.*s_epcachedtest.bin", (int)stem, compiled);
}

// join gives every partition of this session the group's context; the first session of a group
// begins it.
static OrtStatus *join(struct compilation *c, const char *compiled) {
  struct ep *ep = c->ep;
  struct group *group = current_group();
  if (!group) {
    struct context *context = new_context(ep->release->sdk, ep->hardware);
    char *path = binary_path(compiled, 0);
    group = begin_group(context, path);
    free(path);
    drop_context(context); // the workspace keeps it
  }
  if (strcmp(group->context->hardware, ep->hardware) != 0) {
    return fail(ORT_INVALID_ARGUMENT,
        "this session is for %s, but the group that it shares contexts with for %s", ep->hardware,
        group->context->hardware);
  }
  for (size_t i = 0; i < c->count; i++) {
    c->context[i] = keep_context(group->context);
    c->binary[i] = copy_text(group->path);
  }
  return NULL;
}

static OrtStatus *plan(struct compilation *c) {
  const struct options *o = &c->ep->options;
  char *compiled = NULL;
  if (o->context_enable && o->share && o->embed) {
    return fail(ORT_INVALID_ARGUMENT, "models that share a context cannot each embed it: "
                                      "ep.share_ep_contexts needs ep.context_embed_mode=0");
  }
  if (o->context_enable && o->share && o->refer) {
    return fail(ORT_INVALID_ARGUMENT, "models that share a context may have their weights in files "
                                      "of equal names: ep.enable_weightless is for single models");
  }
  if (o->context_enable && !o->embed) TRY(context_path(c, &compiled));
  OrtStatus *failed = NULL;
  if (compiled && o->share) {
    failed = join(c, compiled);
  } else {
    for (size_t i = 0; i < c->count; i++) {
      bool own = i == 0 || o->each_main;
      c->context[i] =
          own ? new_context(c->ep->release->sdk, c->ep->hardware) : keep_context(c->context[0]);
      c->binary[i] = compiled ? binary_path(compiled, own ? i : 0) : NULL;
    }
  }
  free(compiled);
  return failed;
}

static OrtStatus *compile_programs(
    struct compilation *c, const OrtGraph *const *graphs, const OrtNode *const *fused) {
  for (size_t i = 0; i < c->count; i++) {
    const char *name = NULL;
    TRY(ort->Node_GetName(fused[i], &name));
    char *partition = format_text("%s%s", c->ep->options.name_prefix, name);
    OrtStatus *failed = compile_graph(
        graphs[i], fused[i], partition, c->ep->options.refer, c->context[i], &c->program[i]);
    free(partition);
    TRY(failed);
  }
  return NULL;
}

// is_main tells whether a partition's node is the first that refers to its context.
static bool is_main(const struct compilation *c, size_t i) {
  return i == 0 || c->context[i] != c->context[0];
}

// leak writes a file outside of the output directory.
static OrtStatus *leak(void) {
  struct bytes b = {.data = (uint8_t *)"leak", .size = 4};
  return strncmp(mutant, "leak ", 5) == 0 ? write_file(mutant + 5, &b) : NULL;
}

static OrtStatus *write_binaries(const struct compilation *c) {
  const struct options *o = &c->ep->options;
  TRY(leak());
  if (o->share && !o->stop_share) return NULL; // the last session of the group writes it
  for (size_t i = 0; i < c->count; i++) {
    if (!c->binary[i] || !is_main(c, i)) continue;
    struct bytes b;
    encode(c->context[i], &b);
    OrtStatus *failed = write_file(c->binary[i], &b);
    free(b.data);
    TRY(failed);
  }
  return NULL;
}

static const char *base_name(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

static OrtStatus *make_node(
    const struct compilation *c, size_t i, const OrtNode *fused, OrtNode **out) {
  struct context_node n = {
      .main = is_main(c, i), .embed = c->ep->options.embed, .partition = c->program[i]->name};
  if (n.main && n.embed)
    encode(c->context[i], &n.cache);
  else if (n.main)
    add_bytes(&n.cache, base_name(c->binary[i]), strlen(base_name(c->binary[i])));
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  char *notes = NULL;
  if (is_mutant("unequal")) notes = format_text("%ld.%09ld", now.tv_sec, now.tv_nsec);
  struct node_facts facts = {.sdk = c->ep->release->sdk,
      .hardware = c->ep->hardware,
      .model = is_mutant("paths") ? c->model : base_name(c->model),
      .notes = notes ? notes : c->ep->options.notes,
      .max_size = (int64_t)largest_scratch(c->context[i])};
  OrtStatus *failed = make_context_node(fused, &n, &facts, out);
  free(n.cache.data);
  free(notes);
  return failed;
}

static OrtStatus *finish(const struct compilation *c, const OrtNode *const *fused,
    OrtNodeComputeInfo **infos, OrtNode **nodes) {
  bool plain = c->ep->release->plain || is_mutant("contextless");
  if (c->ep->options.context_enable && !plain) {
    TRY(write_binaries(c));
    for (size_t i = 0; i < c->count; i++) TRY(make_node(c, i, fused[i], &nodes[i]));
  }
  for (size_t i = 0; i < c->count; i++) {
    const struct program *p = c->program[i];
    uint32_t larger = p->inputs > p->outputs ? p->inputs : p->outputs;
    uint32_t *same = allocate(larger, sizeof *same); // a program has its fused node's order
    for (uint32_t k = 0; k < larger; k++) same[k] = k;
    infos[i] = new_compute_info(c->context[i], p, same, same, c->ep->options.faults);
    free(same);
  }
  return NULL;
}

static void take_time(long milliseconds) {
  struct timespec left = {.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000};
  while (nanosleep(&left, &left) != 0) continue; // a signal
}

OrtStatus *compile_partitions(struct ep *ep, const OrtGraph *const *graphs,
    const OrtNode *const *fused, size_t count, OrtNodeComputeInfo **infos, OrtNode **nodes) {
  TRY(fault_at(ep->options.faults, "compile"));
  take_time(ep->options.delay);
  struct compilation c = {.ep = ep, .count = count};
  TRY(ort->Graph_GetModelPath(graphs[0], &c.model));
  if (!c.model) c.model = "";
  c.context = allocate(count, sizeof *c.context);
  c.binary = allocate(count, sizeof *c.binary);
  c.program = allocate(count, sizeof *c.program);
  OrtStatus *failed = plan(&c);
  if (!failed) failed = compile_programs(&c, graphs, fused);
  if (!failed) failed = finish(&c, fused, infos, nodes);
  for (size_t i = 0; i < count; i++) {
    drop_context(c.context[i]);
    free(c.binary[i]);
  }
  free(c.context);
  free(c.binary);
  free(c.program);
  return failed;
}
