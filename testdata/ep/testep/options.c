#include "options.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "fault.h"

// provider_option gives the name of this EP's option: ONNX Runtime adds provider options to the
// session's as "ep.", the EP's name in lower case and a dot before their names. NULL: it is another
// option.
static const char *provider_option(const char *key) {
  size_t length = strlen(ep_name);
  bool ours = strncmp(key, "ep.", 3) == 0 && strncasecmp(key + 3, ep_name, length) == 0 &&
              key[3 + length] == '.';
  return ours ? key + 3 + length + 1 : NULL;
}

static bool is_on(const char *value) { return value && strcmp(value, "1") == 0; }

static char *take(const OrtKeyValuePairs *pairs, const char *key) {
  const char *value = ort->GetKeyValue(pairs, key);
  return value && *value ? copy_text(value) : NULL;
}

static void read_session(const OrtKeyValuePairs *pairs, struct options *o) {
  o->context_enable = is_on(ort->GetKeyValue(pairs, "ep.context_enable"));
  o->context_path = take(pairs, "ep.context_file_path");
  o->embed = is_on(ort->GetKeyValue(pairs, "ep.context_embed_mode"));
  o->name_prefix = take(pairs, "ep.context_node_name_prefix");
  if (!o->name_prefix) o->name_prefix = copy_text("");
  o->share = is_on(ort->GetKeyValue(pairs, "ep.share_ep_contexts"));
  o->stop_share = is_on(ort->GetKeyValue(pairs, "ep.stop_share_ep_contexts"));
  o->weightless = is_on(ort->GetKeyValue(pairs, "ep.enable_weightless_ep_context_nodes"));
  o->refer = is_on(ort->GetKeyValue(pairs, "ep.enable_weightless"));
  o->source_path = take(pairs, "ep.context_source_model_path");
}

// choose sets a field to whether the value is the second of two words.
static OrtStatus *choose(
    const char *name, const char *value, const char *no, const char *yes, bool *field) {
  if (strcmp(value, no) != 0 && strcmp(value, yes) != 0)
    return fail(ORT_INVALID_ARGUMENT, "option %s=%s: %s or %s", name, value, no, yes);
  *field = strcmp(value, yes) == 0;
  return NULL;
}

static OrtStatus *read_provider(const char *name, const char *value, struct options *o) {
  if (strcmp(name, "partition") == 0) return choose(name, value, "group", "node", &o->split);
  if (strcmp(name, "primaries") == 0) return choose(name, value, "one", "each", &o->each_main);
  if (strcmp(name, "check") == 0) return choose(name, value, "0", "1", &o->check);
  if (strcmp(name, "ops") == 0) {
    free(o->ops);
    o->ops = copy_text(value);
    return NULL;
  }
  if (strcmp(name, "notes") == 0) {
    o->notes = *value ? copy_text(value) : NULL;
    return NULL;
  }
  if (strcmp(name, "target") == 0) {
    o->target = *value ? copy_text(value) : NULL;
    return NULL;
  }
  if (strcmp(name, "delay") == 0) {
    char *end = NULL;
    o->delay = strtol(value, &end, 10);
    return *value && !*end && o->delay >= 0 && o->delay <= 3600000
               ? NULL
               : fail(ORT_INVALID_ARGUMENT, "option delay=%s: milliseconds, up to an hour", value);
  }
  if (strcmp(name, "fault") == 0) {
    o->faults = *value ? copy_text(value) : NULL;
    return check_faults(o->faults);
  }
  return fail(ORT_INVALID_ARGUMENT,
      "option %s: there are check, delay, fault, notes, ops, partition, primaries, target", name);
}

OrtStatus *read_options(
    const OrtSessionOptions *session, const struct release *release, struct options *out) {
  *out =
      (struct options){.ops = copy_text(release->ops ? release->ops : "Add,Gemm,MatMul,Mul,Relu"),
          .single = is_on(release->single),
          .least = release->least ? strtoll(release->least, NULL, 10) : 0,
          .check = true};
  OrtKeyValuePairs *pairs = NULL;
  TRY(ort->GetSessionOptionsConfigEntries(session, &pairs));
  read_session(pairs, out);
  const char *const *keys = NULL, *const *values = NULL;
  size_t count = 0;
  ort->GetKeyValuePairs(pairs, &keys, &values, &count);
  OrtStatus *failed = NULL;
  for (size_t i = 0; i < count && !failed; i++) {
    const char *name = provider_option(keys[i]);
    if (name) failed = read_provider(name, values[i], out);
  }
  ort->ReleaseKeyValuePairs(pairs);
  return failed;
}

void free_options(struct options *o) {
  free(o->context_path);
  free(o->name_prefix);
  free(o->source_path);
  free(o->ops);
  free(o->notes);
  free(o->target);
  free(o->faults);
  *o = (struct options){0};
}
