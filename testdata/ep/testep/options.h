// What a session asks of the EP: ONNX Runtime's own options for EPContext models, and this EP's
// provider options.
#ifndef TESTEP_OPTIONS_H
#define TESTEP_OPTIONS_H

#include "release.h"

struct options {
  // ONNX Runtime's
  bool context_enable; // ep.context_enable
  char *context_path;  // ep.context_file_path; NULL: not set
  bool embed;          // ep.context_embed_mode
  char *name_prefix;   // ep.context_node_name_prefix, for partition names; "" when not set
  bool share;          // ep.share_ep_contexts
  bool stop_share;     // ep.stop_share_ep_contexts
  bool weightless;     // ep.enable_weightless_ep_context_nodes: weights stay in the model, and are
                       // inputs of the EPContext nodes
  bool refer; // ep.enable_weightless: binaries only say where in the source model's external data
              // the weights stand
  char *source_path; // ep.context_source_model_path; NULL: not set

  // this EP's
  char *ops;      // operators that it takes, separated by commas; default: all that it knows
  bool single;    // of the release: one node is taken
  int64_t least;  // of the release: elements of a node's output
  char *target;   // hardware architecture to compile for; NULL: the device's
  bool split;     // partition=node: one partition per node, instead of as few as possible
  bool each_main; // primaries=each: a binary of its own for each partition, instead of one for all
  bool check;     // check=0: binaries are not compared with their checksum, as most EPs do not
  char *notes;    // attribute notes of the EPContext nodes; NULL: none
  long delay;     // milliseconds that a compile takes longer
  char *faults;   // NULL or see fault.h
};

// read_options copies what is needed: the session options are gone after the call. Unknown provider
// options are refused.
OrtStatus *read_options(
    const OrtSessionOptions *session, const struct release *release, struct options *out);
void free_options(struct options *o);

#endif
