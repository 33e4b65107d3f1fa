"""Opens a model package as an application without epcached: by OrtModelPackageApi of ONNX Runtime's
C API.

    load_package.py LIBONNXRUNTIME PACKAGE EP EP_LIBRARY

prints the variants, which one ONNX Runtime selects for the execution provider, and whether a
session was created.
"""

import ctypes
import json
import sys
from ctypes import POINTER, byref, c_char_p, c_size_t, c_void_p

API_VERSION = 31

# Slots of OrtApi.
CREATE_ENV, CREATE_SESSION_OPTIONS, GET_ERROR_MESSAGE = 3, 10, 2
REGISTER_LIBRARY, GET_EP_DEVICES, APPEND_EP_V2, EP_DEVICE_EP_NAME = 301, 303, 304, 312
GET_MODEL_PACKAGE_API = 427

# Slots of OrtModelPackageApi.
CREATE_OPTIONS, CREATE_CONTEXT, VARIANT_NAMES, SELECT, SELECTED_NAME, CREATE_SESSION = (
    0,
    2,
    8,
    11,
    13,
    15,
)


def function(table, slot, result, *arguments):
    return ctypes.CFUNCTYPE(result, *arguments)(c_void_p.from_address(table + 8 * slot).value)


class Ort:
    def __init__(self, library):
        lib = ctypes.CDLL(library)
        lib.OrtGetApiBase.restype = c_void_p
        base = lib.OrtGetApiBase()
        self.api = function(base, 0, c_void_p, ctypes.c_uint32)(API_VERSION)
        if not self.api:
            raise SystemExit("this ONNX Runtime has no API %d" % API_VERSION)

    def call(self, table, slot, *arguments):
        """Calls a function that returns a status; an int argument is a pointer or a size."""
        kinds = [c_char_p if isinstance(a, bytes) else c_void_p for a in arguments]
        status = function(table, slot, c_void_p, *kinds)(*arguments)
        if status:
            raise RuntimeError(
                function(self.api, GET_ERROR_MESSAGE, c_char_p, c_void_p)(status).decode()
            )


def main(library, package, ep, ep_library):
    ort = Ort(library)
    env, options = c_void_p(), c_void_p()
    ort.call(ort.api, CREATE_ENV, 3, b"test", byref(env))
    ort.call(ort.api, REGISTER_LIBRARY, env, b"ep", ep_library.encode())
    devices, count = POINTER(c_void_p)(), c_size_t()
    ort.call(ort.api, GET_EP_DEVICES, env, byref(devices), byref(count))
    name_of = function(ort.api, EP_DEVICE_EP_NAME, c_char_p, c_void_p)
    own = [devices[i] for i in range(count.value) if name_of(devices[i]) == ep.encode()]
    ort.call(ort.api, CREATE_SESSION_OPTIONS, byref(options))
    ort.call(ort.api, APPEND_EP_V2, options, env, (c_void_p * 1)(own[0]), 1, None, None, 0)

    api = function(ort.api, GET_MODEL_PACKAGE_API, c_void_p)()
    chosen, context, component, session = c_void_p(), c_void_p(), c_void_p(), c_void_p()
    ort.call(api, CREATE_OPTIONS, env, options, byref(chosen))
    ort.call(api, CREATE_CONTEXT, package.encode(), byref(context))
    names = POINTER(c_char_p)()
    ort.call(api, VARIANT_NAMES, context, b"model", byref(names), byref(count))
    out = {"variants": [names[i].decode() for i in range(count.value)]}
    ort.call(api, SELECT, context, b"model", chosen, byref(component))
    name = c_char_p()
    ort.call(api, SELECTED_NAME, component, byref(name))
    out["selected"] = name.value.decode()
    try:
        ort.call(api, CREATE_SESSION, env, component, None, byref(session))
    except RuntimeError as e:
        out["error"] = str(e)
    print(json.dumps(out))
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
