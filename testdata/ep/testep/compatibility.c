#include "compatibility.h"

#include <stdlib.h>
#include <string.h>

#include "binary.h"

#define PREFIX "epcachedtest;"

char *compatibility_string(const char *sdk, const char *hardware) {
  return format_text(PREFIX "format=%u;sdk=%s;hw=%s", BINARY_FORMAT, sdk, hardware);
}

// value_in finds KEY=VALUE among those that semicolons separate, and gives a copy of the value.
static char *value_in(const char *string, const char *key) {
  size_t length = strlen(key);
  for (const char *part = string; part; part = strchr(part, ';') ? strchr(part, ';') + 1 : NULL) {
    if (strncmp(part, key, length) == 0 && part[length] == '=') {
      const char *value = part + length + 1;
      return format_text("%.*s", (int)strcspn(value, ";"), value);
    }
  }
  return NULL;
}

static bool same_major(const char *a, const char *b) {
  size_t length = strcspn(a, ".");
  return length == strcspn(b, ".") && strncmp(a, b, length) == 0;
}

static bool have_hardware(const struct release *r, const char *hardware, const char *wanted) {
  if (hardware) return strcmp(hardware, wanted) == 0;
  for (int i = 0; i < DEVICES; i++) {
    if (strcmp(r->hardware[i], wanted) == 0) return true;
  }
  return false;
}

OrtCompiledModelCompatibility judge_string(
    const struct release *r, const char *hardware, const char *string) {
  if (strncmp(string, PREFIX, strlen(PREFIX)) != 0)
    return OrtCompiledModelCompatibility_EP_NOT_APPLICABLE;
  char *format = value_in(string, "format"), *sdk = value_in(string, "sdk"),
       *wanted = value_in(string, "hw"), *ours = format_text("%u", BINARY_FORMAT);
  OrtCompiledModelCompatibility verdict = OrtCompiledModelCompatibility_EP_UNSUPPORTED;
  if (format && sdk && wanted && strcmp(format, ours) == 0 && have_hardware(r, hardware, wanted) &&
      same_major(sdk, r->sdk)) {
    verdict = strcmp(sdk, r->sdk) == 0
                  ? OrtCompiledModelCompatibility_EP_SUPPORTED_OPTIMAL
                  : OrtCompiledModelCompatibility_EP_SUPPORTED_PREFER_RECOMPILATION;
  }
  free(format);
  free(sdk);
  free(wanted);
  free(ours);
  return verdict;
}

OrtStatus *verdict_named(const char *name, OrtCompiledModelCompatibility *verdict) {
  static const struct {
    const char *name;
    OrtCompiledModelCompatibility verdict;
  } names[] = {{"not_applicable", OrtCompiledModelCompatibility_EP_NOT_APPLICABLE},
      {"optimal", OrtCompiledModelCompatibility_EP_SUPPORTED_OPTIMAL},
      {"prefer_recompilation", OrtCompiledModelCompatibility_EP_SUPPORTED_PREFER_RECOMPILATION},
      {"unsupported", OrtCompiledModelCompatibility_EP_UNSUPPORTED}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if (strcmp(name, names[i].name) == 0) {
      *verdict = names[i].verdict;
      return NULL;
    }
  }
  return fail(ORT_INVALID_ARGUMENT,
      "verdict \"%s\": there are optimal, prefer_recompilation, unsupported, not_applicable", name);
}
