// The library's two entry points, and the factory that makes an EP for each session.
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "compatibility.h"
#include "ep.h"
#include "fault.h"
#include "workspace.h"

#define EXPORT __attribute__((visibility("default")))

#define VENDOR "epcached"

// VIRTUAL_HARDWARE is the architecture of the device that is not there.
#define VIRTUAL_HARDWARE "sim-virtual"

struct factory {
  OrtEpFactory base; // first, as in struct ep
  struct release release;
  OrtHardwareDevice *virtual_device; // NULL where none was asked for
};

static const char *ORT_API_CALL get_name(const OrtEpFactory *base) NO_EXCEPTION {
  (void)base;
  return ep_name;
}

static const char *ORT_API_CALL get_vendor(const OrtEpFactory *base) NO_EXCEPTION {
  (void)base;
  return VENDOR;
}

static uint32_t ORT_API_CALL get_vendor_id(const OrtEpFactory *base) NO_EXCEPTION {
  (void)base;
  return 0xECAC;
}

static const char *ORT_API_CALL get_version(const OrtEpFactory *base) NO_EXCEPTION {
  return ((const struct factory *)base)->release.version;
}

// add_device lists a device of this EP on a hardware device, unless there is no room for more.
static OrtStatus *add_device(struct factory *f, const OrtHardwareDevice *hardware, const char *id,
    const char *architecture, OrtEpDevice **devices, size_t max, size_t *count) {
  if (*count >= max) return NULL;
  OrtKeyValuePairs *metadata = NULL;
  ort->CreateKeyValuePairs(&metadata);
  ort->AddKeyValuePair(metadata, "device_id", id);
  ort->AddKeyValuePair(metadata, "hardware_architecture", architecture);
  ort->AddKeyValuePair(metadata, "os_driver_version", f->release.driver);
  OrtStatus *failed = ort_ep->CreateEpDevice(&f->base, hardware, metadata, NULL, &devices[*count]);
  ort->ReleaseKeyValuePairs(metadata);
  if (!failed) ++*count;
  return failed;
}

// allows_virtual tells whether the application asked for devices that are not there. ONNX Runtime
// sets this for libraries that are registered under a name with ".virtual" at its end.
static OrtStatus *allows_virtual(bool *yes) {
  OrtKeyValuePairs *entries = NULL;
  TRY(ort_ep->GetEnvConfigEntries(&entries));
  const char *value = ort->GetKeyValue(entries, "allow_virtual_devices");
  *yes = value && strcmp(value, "1") == 0;
  ort->ReleaseKeyValuePairs(entries);
  return NULL;
}

static OrtStatus *add_virtual(struct factory *f, OrtEpDevice **devices, size_t max, size_t *count) {
  bool allowed = false;
  TRY(allows_virtual(&allowed));
  if (!allowed) return NULL;
  if (!f->virtual_device) {
    OrtKeyValuePairs *metadata = NULL;
    ort->CreateKeyValuePairs(&metadata);
    ort->AddKeyValuePair(metadata, "is_virtual", "1");
    OrtStatus *failed = ort_ep->CreateHardwareDevice(OrtHardwareDeviceType_NPU,
        get_vendor_id(&f->base), 1, VENDOR, metadata, &f->virtual_device);
    ort->ReleaseKeyValuePairs(metadata);
    TRY(failed);
  }
  return add_device(f, f->virtual_device, "virtual", VIRTUAL_HARDWARE, devices, max, count);
}

static OrtStatus *ORT_API_CALL get_supported_devices(OrtEpFactory *base,
    const OrtHardwareDevice *const *hardware, size_t hardware_count, OrtEpDevice **devices,
    size_t max, size_t *count) NO_EXCEPTION {
  struct factory *f = (struct factory *)base;
  *count = 0;
  TRY(fault_at(f->release.faults, "probe"));
  for (size_t i = 0; i < hardware_count; i++) {
    if (ort->HardwareDevice_Type(hardware[i]) != OrtHardwareDeviceType_CPU) continue;
    // The simulated accelerators stand on the first CPU.
    TRY(add_device(f, hardware[i], "0", f->release.hardware[0], devices, max, count));
    TRY(add_device(f, hardware[i], "1", f->release.hardware[1], devices, max, count));
    break;
  }
  return add_virtual(f, devices, max, count);
}

static OrtStatus *ORT_API_CALL create_ep(OrtEpFactory *base,
    const OrtHardwareDevice *const *devices, const OrtKeyValuePairs *const *metadata, size_t count,
    const OrtSessionOptions *session, const OrtLogger *logger, OrtEp **ep) NO_EXCEPTION {
  struct factory *f = (struct factory *)base;
  (void)devices;
  if (count == 0) return fail(ORT_INVALID_ARGUMENT, "no device is named");
  TRY(fault_at(f->release.faults, "create"));
  // Of several devices the first one computes.
  const char *id = ort->GetKeyValue(metadata[0], "device_id");
  if (id && strcmp(id, "virtual") == 0)
    return new_ep(&f->release, VIRTUAL_HARDWARE, true, session, logger, ep);
  return new_ep(
      &f->release, f->release.hardware[id && strcmp(id, "1") == 0], false, session, logger, ep);
}

static void ORT_API_CALL release_ep(OrtEpFactory *base, OrtEp *ep) NO_EXCEPTION {
  (void)base;
  free_ep(ep);
}

static OrtStatus *ORT_API_CALL validate(OrtEpFactory *base, const OrtHardwareDevice *const *devices,
    size_t count, const char *string, OrtCompiledModelCompatibility *verdict) NO_EXCEPTION {
  const struct release *r = &((struct factory *)base)->release;
  // The simulated accelerators are all on one hardware device, so it does not tell which of them is
  // meant; the virtual device is one of its own.
  bool virtual = count > 0 && ort->HardwareDevice_Type(devices[0]) != OrtHardwareDeviceType_CPU;
  TRY(fault_at(r->faults, "judge"));
  if (r->verdict) return verdict_named(r->verdict, verdict);
  *verdict = judge_string(r, virtual ? VIRTUAL_HARDWARE : NULL, string);
  return NULL;
}

// The EP computes in ordinary memory and on the calling thread: no allocators, no copying, no
// streams.
static OrtStatus *ORT_API_CALL create_allocator(OrtEpFactory *base, const OrtMemoryInfo *memory,
    const OrtKeyValuePairs *options, OrtAllocator **allocator) NO_EXCEPTION {
  (void)base, (void)memory, (void)options;
  *allocator = NULL;
  return NULL;
}

static void ORT_API_CALL release_allocator(
    OrtEpFactory *base, OrtAllocator *allocator) NO_EXCEPTION {
  (void)base, (void)allocator;
}

static OrtStatus *ORT_API_CALL create_data_transfer(
    OrtEpFactory *base, OrtDataTransferImpl **transfer) NO_EXCEPTION {
  (void)base;
  *transfer = NULL;
  return NULL;
}

static bool ORT_API_CALL is_stream_aware(const OrtEpFactory *base) NO_EXCEPTION {
  (void)base;
  return false;
}

static void free_factory(struct factory *f) {
  if (f->virtual_device) ort_ep->ReleaseHardwareDevice(f->virtual_device);
  free_release(&f->release);
  free(f);
}

// open_tables takes ONNX Runtime's functions. An ONNX Runtime that is older than the headers this
// was built with does not have all of them.
static OrtStatus *open_tables(const OrtApiBase *base) {
  ort = base->GetApi(ORT_API_VERSION);
  if (!ort) {
    ort = base->GetApi(1); // enough to say so
    return fail(ORT_NOT_IMPLEMENTED, "needs ONNX Runtime 1.%d or later, this is %s",
        ORT_API_VERSION, base->GetVersionString());
  }
  ort_ep = ort->GetEpApi();
  ort_editor = ort->GetModelEditorApi();
  return ort_ep && ort_editor
             ? NULL
             : fail(ORT_NOT_IMPLEMENTED, "this ONNX Runtime was built without what EPs need");
}

#ifdef BY_NAME
// Vendors' code opens libraries of its package by names without a version.
static OrtStatus *open_by_name(void) {
  return dlopen(BY_NAME, RTLD_NOW) ? NULL : fail(ORT_FAIL, dlerror());
}
#else
static OrtStatus *open_by_name(void) { return NULL; }
#endif

// CreateEpFactories is the first function that ONNX Runtime calls.
EXPORT OrtStatus *CreateEpFactories(const char *name, const OrtApiBase *base,
    const OrtLogger *logger, OrtEpFactory **factories, size_t max, size_t *count) {
  (void)name; // EPs have their own
  (void)logger;
  TRY(open_tables(base));
  TRY(open_by_name());
  if (max < 1) return fail(ORT_INVALID_ARGUMENT, "no room for a factory");
  struct factory *f = allocate(1, sizeof *f);
  OrtStatus *failed = read_release(&f->release);
  if (!failed) failed = check_faults(f->release.faults);
  if (!failed && f->release.name)
    ep_name = copy_text(f->release.name); // ONNX Runtime asks for it while the library stays loaded
  if (!failed && f->release.mutant) mutant = copy_text(f->release.mutant);
  if (!failed) failed = fault_at(f->release.faults, "register");
  if (failed) {
    free_factory(f);
    return failed;
  }
  f->base.ort_version_supported = ORT_API_VERSION;
  f->base.GetName = get_name;
  f->base.GetVendor = get_vendor;
  f->base.GetVendorId = get_vendor_id;
  f->base.GetVersion = get_version;
  f->base.GetSupportedDevices = get_supported_devices;
  f->base.CreateEp = create_ep;
  f->base.ReleaseEp = release_ep;
  f->base.ValidateCompiledModelCompatibilityInfo = validate;
  f->base.CreateAllocator = create_allocator;
  f->base.ReleaseAllocator = release_allocator;
  f->base.CreateDataTransfer = create_data_transfer;
  f->base.IsStreamAware = is_stream_aware;
  factories[0] = &f->base;
  *count = 1;
  return NULL;
}

EXPORT OrtStatus *ReleaseEpFactory(OrtEpFactory *factory) {
  lock_workspace();
  clear_workspace();
  unlock_workspace();
  free_factory((struct factory *)factory);
  return NULL;
}
