"""`epcachectl run` for Python programs: replaces ONNX Runtime's classes by epcache's, without a
change of the program.

hook/sitecustomize.py intercepts the import of onnxruntime, and calls `take_over` before the program
gets the package. From then on onnxruntime.InferenceSession, ModelCompiler and SessionOptions are
those of _classes.py, everywhere ONNX Runtime itself has these names. epcache keeps the original
ones. Events are appended to a report (_report.py), which epcachectl reads at the end of the
program.

Many programs import onnxruntime without making a session, so the code for sessions is imported with
the first one. Nothing here may stop a program that would run without epcache.
"""

from __future__ import annotations

import sys
from types import ModuleType

from . import _report
from ._runtime_packages import runtime_distributions, runtime_spec

__all__ = ["runtime_distributions", "runtime_spec", "original", "take_over"]

OLDEST = (1, 24)  # the first version with plugin execution providers

# The modules in which ONNX Runtime has the classes.
_PLACES = {
    "InferenceSession": ("onnxruntime", "onnxruntime.capi.onnxruntime_inference_collection"),
    "ModelCompiler": ("onnxruntime", "onnxruntime.capi.onnxruntime_inference_collection"),
    "SessionOptions": (
        "onnxruntime",
        "onnxruntime.capi._pybind_state",
        "onnxruntime.capi.onnxruntime_pybind11_state",
    ),
}

original: ModuleType | None = None  # onnxruntime with its original classes, after take_over


def take_over(ort: ModuleType) -> None:
    """Replaces the classes in onnxruntime, which has just been imported. If that is not possible,
    the reason is reported.
    """
    try:
        _report.watch(ort)
        why = _too_old(str(getattr(ort, "__version__", "")))
        if not why:
            _replace(ort)
    except Exception as error:
        why = f"epcache cannot replace its session classes: {type(error).__name__}: {error}"
    _report.imported(why)


def _too_old(version: str) -> str:
    try:
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"onnxruntime has the version {version!r}, which epcache cannot parse"
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return (
            f"onnxruntime {version} is older than {oldest}, the first with plugin execution "
            "providers"
        )
    return ""


def _replace(ort: ModuleType) -> None:
    global original
    if original is None:  # otherwise onnxruntime is reloaded
        original = ModuleType(ort.__name__, ort.__doc__)
        original.__dict__.update(ort.__dict__)
    from . import _classes

    for name, places in _PLACES.items():
        for place in places:
            setattr(sys.modules[place], name, getattr(_classes, name))
    _classes.watch_library()
