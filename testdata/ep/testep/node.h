// EPContext nodes: reading and making them.
#ifndef TESTEP_NODE_H
#define TESTEP_NODE_H

#include "ort.h"

// context_node is what an EPContext node of this EP says.
struct context_node {
  bool main;          // main_context
  bool embed;         // embed_mode
  struct bytes cache; // ep_cache_context: the binary itself, or its file's name, and a zero behind
                      // it that does not count
  char *partition;    // partition_name; never NULL
};

// is_context_node tells whether a node is an EPContext node of any EP, and whether it is this EP's.
OrtStatus *is_context_node(const OrtNode *node, bool *context, bool *ours);

OrtStatus *read_context_node(const OrtNode *node, struct context_node *out);
void free_context_node(struct context_node *n);

// read_int and read_float leave the value as it is where the node does not have the attribute.
OrtStatus *read_int(const OrtNode *node, const char *name, int64_t *value);
OrtStatus *read_float(const OrtNode *node, const char *name, float *value);

// node_facts is what a new EPContext node tells besides.
struct node_facts {
  const char *sdk, *hardware;
  const char *model; // file name of the source model; "" where it has none
  const char *notes; // NULL: none
  int64_t max_size;
};

// make_context_node makes a node with the inputs and outputs of the fused node.
OrtStatus *make_context_node(const OrtNode *fused, const struct context_node *n,
    const struct node_facts *facts, OrtNode **out);

#endif
