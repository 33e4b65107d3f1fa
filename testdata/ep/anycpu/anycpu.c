// anycpu: lets OpenVINO's plugin EP offer its CPU device on a processor that is not Intel's. For
// tests only.
//
// The plugin lists a CPU device only where the vendor id that ONNX Runtime reports is Intel's; its
// code runs on any x86-64. This library takes the plugin's place, loads the plugin from beside
// itself, and hands it a copy of the OrtApi table in which HardwareDevice_VendorId answers "Intel"
// for CPUs. ONNX Runtime itself and its callers keep the true table, and so report the true vendor.
//
// Names and layout come from the public headers, see ../headers. The vendor's library is found
// under the name VENDOR_LIBRARY.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "onnxruntime_c_api.h"

#define VENDOR_LIBRARY "libvendor_openvino_plugin.so"
#define EXPORT __attribute__((visibility("default")))

enum { INTEL = 0x8086 };

// The running ONNX Runtime may be newer than the headers, and its table longer: room for more, all
// of which is copied.
enum { MAX_SLOTS = 1024 };

static const OrtApiBase *real_base;
static const OrtApi *real_api;
static OrtApiBase our_base;
static union {
  OrtApi api;
  void *slots[MAX_SLOTS];
} our_api;
static void *vendor; // the plugin; it stays loaded, as ONNX Runtime would keep it

static uint32_t ORT_API_CALL vendor_id(const OrtHardwareDevice *device) NO_EXCEPTION {
  if (real_api->HardwareDevice_Type(device) == OrtHardwareDeviceType_CPU) return INTEL;
  return real_api->HardwareDevice_VendorId(device);
}

struct search {
  uintptr_t address;
  uintptr_t end; // of the segment that holds address
};

static int find_segment(struct dl_phdr_info *library, size_t size, void *data) {
  (void)size;
  struct search *s = data;
  for (int i = 0; i < library->dlpi_phnum; i++) {
    const ElfW(Phdr) *p = &library->dlpi_phdr[i];
    uintptr_t start = library->dlpi_addr + p->p_vaddr;
    if (p->p_type == PT_LOAD && start <= s->address && s->address < start + p->p_memsz) {
      s->end = start + p->p_memsz;
      return 1;
    }
  }
  return 0;
}

// copy_table copies the table without knowing its length: as much as there is room for, and no byte
// beyond the segment that it stands in. What follows the table is copied as well and never looked
// at.
static int copy_table(const OrtApi *table) {
  struct search s = {.address = (uintptr_t)table};
  if (!dl_iterate_phdr(find_segment, &s)) return 0;
  size_t length = s.end - s.address;
  memcpy(&our_api, table, length < sizeof our_api ? length : sizeof our_api);
  our_api.api.HardwareDevice_VendorId = vendor_id;
  return 1;
}

static const OrtApi *ORT_API_CALL get_api(uint32_t version) NO_EXCEPTION {
  const OrtApi *table = real_base->GetApi(version);
  if (table == NULL) return NULL;
  if (table != real_api) {
    if (!copy_table(table)) return table;
    real_api = table;
  }
  return &our_api.api;
}

static OrtStatus *fail(const char *why) {
  return real_base->GetApi(ORT_API_VERSION)
      ->CreateStatus(ORT_FAIL, why ? why : "anycpu: unknown error");
}

static OrtStatus *load_vendor(void) {
  if (vendor) return NULL;
  Dl_info self;
  if (!dladdr((void *)&load_vendor, &self))
    return fail("anycpu: cannot tell where this library is");
  const char *slash = strrchr(self.dli_fname, '/');
  int directory = slash ? (int)(slash - self.dli_fname) + 1 : 0;
  char path[PATH_MAX];
  int n = snprintf(path, sizeof path, "%.*s%s", directory, self.dli_fname, VENDOR_LIBRARY);
  if (n < 0 || (size_t)n >= sizeof path) return fail("anycpu: path is too long");
  vendor = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return vendor ? NULL : fail(dlerror());
}

// CreateEpFactories and ReleaseEpFactory are what ONNX Runtime looks for in an EP library.
EXPORT OrtStatus *CreateEpFactories(const char *name, const OrtApiBase *base,
    const OrtLogger *logger, OrtEpFactory **factories, size_t max, size_t *count) {
  real_base = base;
  our_base.GetApi = get_api;
  our_base.GetVersionString = base->GetVersionString;
  OrtStatus *failed = load_vendor();
  if (failed) return failed;
  CreateEpApiFactoriesFn create = (CreateEpApiFactoriesFn)dlsym(vendor, "CreateEpFactories");
  if (!create) return fail(dlerror());
  return create(name, &our_base, logger, factories, max, count);
}

EXPORT OrtStatus *ReleaseEpFactory(OrtEpFactory *factory) {
  ReleaseEpApiFactoryFn release = (ReleaseEpApiFactoryFn)dlsym(vendor, "ReleaseEpFactory");
  if (!release) return fail(dlerror());
  return release(factory);
}
