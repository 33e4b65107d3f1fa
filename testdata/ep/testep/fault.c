#include "fault.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static OrtStatus *happen(const char *kind, const char *stage) {
  if (strcmp(kind, "hang") == 0) {
    for (;;) pause();
  }
  if (strcmp(kind, "crash") == 0) raise(SIGSEGV);
  if (strcmp(kind, "abort") == 0) abort();
  if (strcmp(kind, "exit") == 0) _exit(0);
  return fail(ORT_EP_FAIL, "asked to fail at %s", stage);
}

static bool is_one_of(const char *word, const char *const *list) {
  for (; *list; list++) {
    if (strcmp(word, *list) == 0) return true;
  }
  return false;
}

// walk goes through KIND@STAGE,KIND@STAGE. With a stage it does those of that stage, without one it
// only checks.
static OrtStatus *walk(const char *faults, const char *stage) {
  static const char *const kinds[] = {"hang", "crash", "abort", "exit", "fail", NULL};
  static const char *const stages[] = {
      "register", "probe", "judge", "create", "compile", "load", "run", NULL};
  if (!faults) return NULL;
  char *list = copy_text(faults), *rest = NULL;
  OrtStatus *failed = NULL;
  for (char *one = strtok_r(list, ",", &rest); one && !failed; one = strtok_r(NULL, ",", &rest)) {
    char *at = strchr(one, '@');
    if (at) *at = '\0';
    if (!at || !is_one_of(one, kinds) || !is_one_of(at + 1, stages)) {
      failed = fail(ORT_INVALID_ARGUMENT, "fault \"%s\": not KIND@STAGE", faults);
    } else if (stage && strcmp(at + 1, stage) == 0) {
      failed = happen(one, stage);
    }
  }
  free(list);
  return failed;
}

OrtStatus *check_faults(const char *faults) { return walk(faults, NULL); }

OrtStatus *fault_at(const char *faults, const char *stage) { return walk(faults, stage); }
