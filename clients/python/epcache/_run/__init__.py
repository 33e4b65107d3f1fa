"""What `epcachectl run` puts into Python programs: ONNX Runtime's classes are replaced by
epcache's, the programs unchanged.

hook/sitecustomize.py notices the import of onnxruntime, and calls `take_over` before the program
sees the package. From then on onnxruntime.InferenceSession and SessionOptions are those of
_classes.py, wherever ONNX Runtime itself has these names. epcache keeps the original ones. Whatever
happens is appended to a report (_report.py), which epcachectl reads at the end of the program.

Many programs import onnxruntime and make no session, so all that makes sessions is imported with
the first one; until then as little as can be is.

Nothing here may stop a program that would run without it.
"""

from __future__ import annotations

import sys
from types import ModuleType

from . import _report
from ._runtime_packages import runtime_distributions, runtime_spec

__all__ = ["runtime_distributions", "runtime_spec", "original", "take_over"]

OLDEST = (1, 24)  # with compiled execution providers as plugins

# Where ONNX Runtime has the classes.
_PLACES = {
    "InferenceSession": ("onnxruntime", "onnxruntime.capi.onnxruntime_inference_collection"),
    "SessionOptions": (
        "onnxruntime",
        "onnxruntime.capi._pybind_state",
        "onnxruntime.capi.onnxruntime_pybind11_state",
    ),
}

original: ModuleType | None = None  # onnxruntime with its own classes, once it has been taken over


def take_over(ort: ModuleType) -> None:
    """Replaces the classes in onnxruntime, which has just been imported. Reports why not, where
    that cannot be.
    """
    try:
        _report.watch(ort)
        why = _too_old(str(getattr(ort, "__version__", "")))
        if not why:
            _replace(ort)
    except Exception as error:
        why = f"epcache cannot replace its sessions: {type(error).__name__}: {error}"
    _report.imported(why)


def _too_old(version: str) -> str:
    try:
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"the version of onnxruntime is {version!r}, which epcache does not understand"
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return (
            f"onnxruntime {version} is older than {oldest}, the first with plugin execution "
            "providers"
        )
    return ""


def _replace(ort: ModuleType) -> None:
    global original
    if original is None:  # else it is a reload
        original = ModuleType(ort.__name__, ort.__doc__)
        original.__dict__.update(ort.__dict__)
    from . import _classes

    for name, places in _PLACES.items():
        for place in places:
            setattr(sys.modules[place], name, getattr(_classes, name))
    _classes.watch_library()
