#include "ep.h"

#include <stdlib.h>
#include <string.h>

#include "compatibility.h"
#include "compute.h"
#include "fault.h"
#include "graph.h"
#include "node.h"
#include "workspace.h"

static const char *ORT_API_CALL get_name(const OrtEp *base) NO_EXCEPTION {
  (void)base;
  return ep_name;
}

static OrtStatus *ORT_API_CALL get_capability(
    OrtEp *base, const OrtGraph *graph, OrtEpGraphSupportInfo *support) NO_EXCEPTION {
  return choose_nodes(graph, &((struct ep *)base)->options, support);
}

// is_compiled tells whether a partition is one EPContext node.
static OrtStatus *is_compiled(const OrtGraph *graph, bool *yes) {
  const OrtNode **nodes = NULL;
  size_t count = 0;
  bool context = false;
  *yes = false;
  OrtStatus *failed = graph_nodes(graph, &nodes, &count);
  if (!failed && count == 1) failed = is_context_node(nodes[0], &context, yes);
  free(nodes);
  return failed;
}

static OrtStatus *compile_all(struct ep *ep, const OrtGraph **graphs, const OrtNode **fused,
    size_t count, OrtNodeComputeInfo **infos, OrtNode **nodes) {
  bool compiled = false;
  TRY(is_compiled(graphs[0], &compiled)); // never mixed: see choose_nodes
  if (!compiled) return compile_partitions(ep, graphs, fused, count, infos, nodes);
  TRY(load_partitions(ep, graphs, fused, count, infos));
  return NULL;
}

static OrtStatus *ORT_API_CALL compile(OrtEp *base, const OrtGraph **graphs, const OrtNode **fused,
    size_t count, OrtNodeComputeInfo **infos, OrtNode **nodes) NO_EXCEPTION {
  struct ep *ep = (struct ep *)base;
  if (count == 0) return NULL;
  for (size_t i = 0; i < count; i++) infos[i] = NULL;
  // One lock for the workspace and all that follows from it. Sessions that do not share do not
  // wait.
  if (ep->options.share) lock_workspace();
  OrtStatus *failed = compile_all(ep, graphs, fused, count, infos, nodes);
  // The last session leaves nothing behind, also when it failed: the next one is the first of
  // another group.
  if (ep->options.share && ep->options.stop_share) clear_workspace();
  if (ep->options.share) unlock_workspace();
  if (failed) {
    for (size_t i = 0; i < count; i++) {
      free_compute_info(infos[i]);
      infos[i] = NULL;
    }
  }
  return failed;
}

static void ORT_API_CALL release_compute_infos(
    OrtEp *base, OrtNodeComputeInfo **infos, size_t count) NO_EXCEPTION {
  (void)base;
  for (size_t i = 0; i < count; i++) free_compute_info(infos[i]);
}

static const char *ORT_API_CALL compatibility_info(
    OrtEp *base, const OrtGraph *graph) NO_EXCEPTION {
  (void)graph;
  return ((struct ep *)base)->compatibility;
}

OrtStatus *new_ep(const struct release *release, const char *hardware, bool absent,
    const OrtSessionOptions *session, const OrtLogger *logger, OrtEp **out) {
  struct ep *ep = allocate(1, sizeof *ep);
  *ep = (struct ep){.release = release, .hardware = hardware, .absent = absent, .logger = logger};
  ep->base.ort_version_supported = ORT_API_VERSION;
  ep->base.GetName = get_name;
  ep->base.GetCapability = get_capability;
  ep->base.Compile = compile;
  ep->base.ReleaseNodeComputeInfos = release_compute_infos;
  ep->base.GetCompiledModelCompatibilityInfo = compatibility_info;
  OrtStatus *failed = read_options(session, release, &ep->options);
  if (!failed && ep->options.target) ep->hardware = ep->options.target;
  ep->compatibility = compatibility_string(release->sdk, ep->hardware);
  if (!failed) failed = fault_at(ep->options.faults, "create");
  if (failed) {
    free_ep(&ep->base);
    return failed;
  }
  *out = &ep->base;
  return NULL;
}

void free_ep(OrtEp *base) {
  struct ep *ep = (struct ep *)base;
  if (!ep) return;
  free_options(&ep->options);
  free(ep->compatibility);
  free(ep);
}

void warn(const struct ep *ep, const char *text) {
  OrtStatus *failed = ort->Logger_LogMessage(
      ep->logger, ORT_LOGGING_LEVEL_WARNING, text, ORT_FILE, __LINE__, __func__);
  if (failed) ort->ReleaseStatus(failed); // a message that is not written is no reason to stop
}

char *directory_of(const char *path) {
  const char *slash = strrchr(path, '/');
  return format_text("%.*s", slash ? (int)(slash - path) + 1 : 0, path);
}
