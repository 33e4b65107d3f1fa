// The shared workspace: what sessions with ep.share_ep_contexts pass on to each other in one
// process. When models are compiled it holds the context that all sessions of the group compile
// into, and the name of the binary, which the first one decides. When compiled models are loaded it
// holds the graphs of binaries that were read and that no session has taken yet.
#ifndef TESTEP_WORKSPACE_H
#define TESTEP_WORKSPACE_H

#include "context.h"

// Whoever uses the workspace holds its lock from the first look to the last change, so that
// sessions which are made at the same time come one after the other.
void lock_workspace(void);
void unlock_workspace(void);

// group is what is being compiled. The workspace owns it.
struct group {
  struct context *context;
  char *path; // of the binary
};

// current_group gives the group of this process; NULL before the first session and after the last.
struct group *current_group(void);
struct group *begin_group(struct context *context, const char *path);
void end_group(void);

// find_graph gives the graph of a binary that stands in the file at path, if a session before has
// read that file and left the graph, and takes it out of the workspace. The file is known by what
// it is, not by its name: another file under the same path is another binary. The context has a
// user more. Without a path any binary will do, as long as only one has such a graph.
const struct program *take_graph(const char *path, const char *name, struct context **context);

// leave_graphs puts the graphs of a context that was read from path into the workspace, but for
// those in taken, which sessions have.
void leave_graphs(
    const char *path, struct context *context, const struct program *const *taken, size_t count);

// clear_workspace forgets everything.
void clear_workspace(void);

#endif
