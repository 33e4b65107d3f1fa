"""What `epcachectl run` puts into Python programs: ONNX Runtime's classes are replaced by epcache's, the programs unchanged.

hook/sitecustomize.py notices the import of onnxruntime, and calls `take_over` before the program sees the package. From then on
onnxruntime.InferenceSession and SessionOptions are those of _session.py, wherever ONNX Runtime itself has these names. epcache
keeps the original ones. Whatever happens is appended to a report (_report.py), which epcachectl reads at the end of the program.

Nothing here may stop a program that would run without it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from . import _report
from ._lent import lent_distributions, lent_spec
from ._settings import settings

__all__ = ["lent_distributions", "lent_spec", "take_over"]

OLDEST = (1, 24)  # with compiled execution providers as plugins

# Where ONNX Runtime has the classes.
_PLACES = {
    "InferenceSession": ("onnxruntime", "onnxruntime.capi.onnxruntime_inference_collection"),
    "SessionOptions": ("onnxruntime", "onnxruntime.capi._pybind_state", "onnxruntime.capi.onnxruntime_pybind11_state"),
}


def take_over(ort: ModuleType) -> None:
    """Replaces the classes in onnxruntime, which has just been imported. Reports why not, where that cannot be."""
    version = str(getattr(ort, "__version__", ""))
    try:
        _report.watch(ort)
        why = _too_old(version)
        if not why:
            settings()  # what is wrong there is found before anything is replaced
            _replace(ort)
    except Exception as error:
        why = f"epcache cannot take over: {type(error).__name__}: {error}"
    _report.add("onnxruntime", version=version, file=str(getattr(ort, "__file__", "")), why=why)


def _too_old(version: str) -> str:
    try:
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"the version of onnxruntime is {version!r}, which epcache does not understand"
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"onnxruntime {version} is older than {oldest}, with which compiled execution providers begin"
    return ""


def _replace(ort: ModuleType) -> None:
    importlib.import_module("epcache._session_group")
    classes = importlib.import_module("epcache._run._session")
    users = [module for name, module in sys.modules.items() if name.startswith("epcache.") and getattr(module, "ort", None) is ort]
    if users:  # none: it is a reload
        # epcache gets an onnxruntime of its own, with the classes as they were: what it makes for itself is not for the cache.
        original = ModuleType(ort.__name__, ort.__doc__)
        original.__dict__.update(ort.__dict__)
        for user in users:
            setattr(user, "ort", original)
    for name, places in _PLACES.items():
        for place in places:
            setattr(sys.modules[place], name, getattr(classes, name))
