// Faults on demand: what real EPs do by accident. Written KIND@STAGE, several separated by commas.
#ifndef TESTEP_FAULT_H
#define TESTEP_FAULT_H

#include "ort.h"

// Kinds: "hang" never returns, "crash" is a SIGSEGV, "abort" a SIGABRT, "exit" ends the process
// with status 0 as if all were well, "fail" returns ORT_EP_FAIL. Stages: "register", "probe",
// "judge", "create", "compile", "load", "run".

// check_faults refuses a text that names no known kinds and stages.
OrtStatus *check_faults(const char *faults);

// fault_at does what faults ask for at a stage. faults may be NULL.
OrtStatus *fault_at(const char *faults, const char *stage);

#endif
