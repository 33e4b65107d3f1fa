// What this installation of the EP is: its versions, its driver and its devices. They come from a
// small text file beside the library, so that a test makes a new release, or updates the driver, by
// writing a file.
#ifndef TESTEP_RELEASE_H
#define TESTEP_RELEASE_H

#include "ort.h"

enum { DEVICES = 2 };

struct release {
  char *name;    // of the EP; NULL: see ep_name
  char *version; // of the EP: semantic versioning
  char *sdk;     // "MAJOR.MINOR.PATCH"; one major version loads the binaries of another minor one
  char *driver;  // os_driver_version of the devices
  char *hardware[DEVICES]; // hardware architecture of each device
  char *
      ops; // NULL, or the operators that it knows, in place of all: option ops narrows them further
  char *single; // NULL, or "1": it takes one node of a session's graph and leaves the others, as
                // ONNX Runtime's example EP does
  char
      *least; // NULL, or how many elements the output of a node has at least, for the EP to take it
  char *plain;   // NULL, or "1": it makes no EPContext nodes, as EPs without a compiled form
  char *verdict; // NULL, or what every compatibility string is judged: see compatibility.h
  char *mutant;  // NULL, or which guideline it breaks: see mutant
  char *faults;  // NULL, or faults that happen before there are provider options: see fault.h
};

// read_release reads LIBRARY.release, where the library is LIBRARY.so. Without that file everything
// is at its default. The environment goes before the file: EPCACHED_TEST_EP_VERDICT,
// EPCACHED_TEST_EP_FAULT.
OrtStatus *read_release(struct release *r);
void free_release(struct release *r);

#endif
