// The compatibility string of compiled models, and the verdict on another's string. The same rule
// decides when a binary is loaded.
#ifndef TESTEP_COMPATIBILITY_H
#define TESTEP_COMPATIBILITY_H

#include "release.h"

// compatibility_string names everything that a binary depends on:
// "epcachedtest;format=1;sdk=1.0.0;hw=sim-1".
char *compatibility_string(const char *sdk, const char *hardware);

// judge_string gives the verdict of a release on a compatibility string. hardware is the
// architecture that would run it; NULL: any of the release's.
OrtCompiledModelCompatibility judge_string(
    const struct release *r, const char *hardware, const char *string);

// verdict_named gives the verdict of a name: "optimal", "prefer_recompilation", "unsupported" or
// "not_applicable".
OrtStatus *verdict_named(const char *name, OrtCompiledModelCompatibility *verdict);

#endif
