#define _GNU_SOURCE // dladdr
#include "release.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static void set(char **field, const char *value) {
  free(*field);
  *field = value && *value ? copy_text(value) : NULL;
}

static char **field_of(struct release *r, const char *key) {
  if (strcmp(key, "name") == 0) return &r->name;
  if (strcmp(key, "ops") == 0) return &r->ops;
  if (strcmp(key, "single") == 0) return &r->single;
  if (strcmp(key, "plain") == 0) return &r->plain;
  if (strcmp(key, "least") == 0) return &r->least;
  if (strcmp(key, "version") == 0) return &r->version;
  if (strcmp(key, "sdk") == 0) return &r->sdk;
  if (strcmp(key, "driver") == 0) return &r->driver;
  if (strcmp(key, "hardware.0") == 0) return &r->hardware[0];
  if (strcmp(key, "hardware.1") == 0) return &r->hardware[1];
  if (strcmp(key, "verdict") == 0) return &r->verdict;
  if (strcmp(key, "mutant") == 0) return &r->mutant;
  if (strcmp(key, "fault") == 0) return &r->faults;
  return NULL;
}

static char *trim(char *text) {
  while (*text == ' ' || *text == '\t') text++;
  size_t length = strlen(text);
  while (length && strchr(" \t\r", text[length - 1])) text[--length] = '\0';
  return text;
}

// parse reads lines "key = value"; empty ones, and those that begin with #, are left out.
static OrtStatus *parse(struct release *r, char *text, const char *path) {
  char *rest = NULL;
  for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
    line = trim(line);
    if (!*line || *line == '#') continue;
    char *equals = strchr(line, '=');
    if (equals) *equals = '\0';
    char **field = equals ? field_of(r, trim(line)) : NULL;
    if (!field)
      return fail(ORT_INVALID_ARGUMENT, "\"%s\": line \"%s\": not KEY = VALUE with a known key",
          path, line);
    set(field, trim(equals + 1));
  }
  return NULL;
}

static OrtStatus *parse_file(struct release *r, const char *path) {
  struct bytes content = {0};
  OrtStatus *failed = read_file(path, &content);
  if (failed) {
    if (ort->GetErrorCode(failed) != ORT_NO_SUCHFILE) return failed;
    ort->ReleaseStatus(failed); // nothing but defaults
    return NULL;
  }
  add_bytes(&content, "", 1);
  failed = parse(r, (char *)content.data, path);
  free(content.data);
  return failed;
}

// release_path replaces the library's ".so" by ".release".
static char *release_path(void) {
  Dl_info self;
  if (!dladdr((void *)&read_release, &self) || !self.dli_fname) return NULL;
  const char *name = self.dli_fname;
  size_t length = strlen(name) - (has_suffix(name, ".so") ? 3 : 0);
  return format_text("%.*s.release", (int)length, name);
}

OrtStatus *read_release(struct release *r) {
  *r = (struct release){.version = copy_text("1.0.0"),
      .sdk = copy_text("1.0.0"),
      .driver = copy_text("1.0"),
      .hardware = {copy_text("sim-1"), copy_text("sim-2")}};
  char *path = release_path();
  if (!path) return fail(ORT_FAIL, "cannot tell where this library is");
  OrtStatus *failed = parse_file(r, path);
  free(path);
  TRY(failed);
  if (!r->version || !r->sdk || !r->driver || !r->hardware[0] || !r->hardware[1])
    return fail(ORT_INVALID_ARGUMENT, "release: a value is empty");
  if (getenv("EPCACHED_TEST_EP_VERDICT")) set(&r->verdict, getenv("EPCACHED_TEST_EP_VERDICT"));
  if (getenv("EPCACHED_TEST_EP_FAULT")) set(&r->faults, getenv("EPCACHED_TEST_EP_FAULT"));
  return NULL;
}

void free_release(struct release *r) {
  free(r->name);
  free(r->ops);
  free(r->single);
  free(r->plain);
  free(r->least);
  free(r->version);
  free(r->sdk);
  free(r->driver);
  for (int i = 0; i < DEVICES; i++) free(r->hardware[i]);
  free(r->verdict);
  free(r->mutant);
  free(r->faults);
  *r = (struct release){0};
}
