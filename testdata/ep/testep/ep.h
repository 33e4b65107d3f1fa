// The execution provider of one session.
#ifndef TESTEP_EP_H
#define TESTEP_EP_H

#include "options.h"
#include "release.h"

struct ep {
  OrtEp base;                    // first: ONNX Runtime's pointer to it is a pointer to this
  const struct release *release; // the factory's, which outlives it
  const char *hardware;          // architecture of the first device of the session, likewise
  bool absent;                   // that device is a virtual one
  struct options options;
  char *compatibility;
  const OrtLogger *logger;
};

OrtStatus *new_ep(const struct release *release, const char *hardware, bool absent,
    const OrtSessionOptions *session, const OrtLogger *logger, OrtEp **out);
void free_ep(OrtEp *ep);

// compile_partitions compiles source graphs; load_partitions takes EPContext nodes from their
// binaries. Both give the computations, in the order of the graphs; compile_partitions also the
// EPContext nodes where the session asks for them.
OrtStatus *compile_partitions(struct ep *ep, const OrtGraph *const *graphs,
    const OrtNode *const *fused, size_t count, OrtNodeComputeInfo **infos, OrtNode **nodes);
OrtStatus *load_partitions(struct ep *ep, const OrtGraph *const *graphs,
    const OrtNode *const *fused, size_t count, OrtNodeComputeInfo **infos);

// warn writes to the session's log.
void warn(const struct ep *ep, const char *text);

// directory_of gives the part of a path up to and with the last slash; "" where there is none.
char *directory_of(const char *path);

#endif
