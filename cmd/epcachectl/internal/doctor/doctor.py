"""Checks one Python as an application would use it, for epcachectl doctor --python.

    python -c SCRIPT                     what ONNX Runtime there is
    python -c SCRIPT NAME LIBRARY MODEL OPTIONS
                                         whether a plugin execution provider makes a session with
                                         it; a model in hexadecimal digits, provider options in JSON

Prints one line of JSON behind MARK: vendors' libraries print, too.
"""

import json
import os
import sys

MARK = "epcachectl-doctor:"


def core_packages():
    """Lists the installed packages that carry onnxruntime itself, and all others of the family,
    with versions.
    """
    import importlib.metadata

    cores, family = [], {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if not name.startswith("onnxruntime") and name != "epcache":
            continue
        family[name] = distribution.version
        if any(str(f) == "onnxruntime/__init__.py" for f in distribution.files or []):
            cores.append(name + " " + distribution.version)
    return cores, family


def look():
    import importlib.util

    cores, family = core_packages()
    out = {
        "executable": sys.executable,
        "version": sys.version.split()[0],
        "cores": sorted(cores),
        "packages": family,
        "epcache": importlib.util.find_spec("epcache") is not None,
    }
    try:
        import onnxruntime

        out["ort_version"] = onnxruntime.__version__
        out["site"] = os.path.dirname(os.path.dirname(os.path.abspath(onnxruntime.__file__)))
        out["providers"] = onnxruntime.get_available_providers()
        out["plugins"] = hasattr(onnxruntime, "register_execution_provider_library")
    except Exception as e:
        out["error"] = f"{type(e).__name__}: {e}"
    return out


def start(name, library, model, options):
    import onnxruntime

    try:
        onnxruntime.register_execution_provider_library(name, library)
        devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == name]
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}
    if not devices:
        return {"devices": []}
    settings = onnxruntime.SessionOptions()
    try:
        settings.add_provider_for_devices(devices[:1], json.loads(options))
        # Some providers can be registered and fail only here; by default ONNX Runtime would fall
        # back to the CPU.
        session = onnxruntime.InferenceSession(bytes.fromhex(model), settings, enable_fallback=0)
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}
    if name not in session.get_providers():
        return {"error": "a session with its devices runs on " + ", ".join(session.get_providers())}
    return {"devices": [d.device.type.name for d in devices]}


result = start(*sys.argv[1:5]) if len(sys.argv) > 1 else look()
print(MARK + json.dumps(result), flush=True)
os._exit(0)  # because some libraries crash when they are unloaded
