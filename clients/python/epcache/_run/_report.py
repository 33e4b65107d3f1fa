"""The report of this process, for the summary that epcachectl prints at the end of the program.

Each event is a line of JSON, which is appended at once, so that a killed process loses none.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import ModuleType
from typing import Any

VARIABLE = "EPCACHE_RUN_REPORT"

# ONNX Runtime's own library, under any package's name for it; not those of execution providers.
_CORE = r"/libonnxruntime(-[^/_]*)?\.so[^/]*$"
# Packages that make sessions in C++ and not through ONNX Runtime's Python classes.
_NATIVE = ("onnxruntime_genai", "onnxruntime.training")

_watched = ""  # the directory of the onnxruntime package with the replaced classes


def add(kind: str, **facts: Any) -> None:
    """Appends a line. Best effort: an error does not affect the program."""
    import json

    line = json.dumps({"kind": kind, "pid": os.getpid(), **facts}, default=str)
    _append(line.encode("utf-8", "backslashreplace"))


def imported(why: str) -> None:
    """Reports the import of onnxruntime, and why its classes could not be replaced, if so. The
    common case does not import json.
    """
    if why:
        add("onnxruntime", why=why)
    else:
        _append(b'{"kind": "onnxruntime", "pid": %d}' % os.getpid())


def _append(line: bytes) -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return
    try:
        # A single write, so that lines of several processes do not mix.
        os.write(descriptor, line + b"\n")
    except OSError:
        pass
    finally:
        os.close(descriptor)


def watch(ort: ModuleType) -> None:
    """Makes this process report at its end which uses of ONNX Runtime bypassed epcache."""
    global _watched
    if not _watched:
        atexit.register(_report_others)
    _watched = os.path.dirname(os.path.realpath(str(ort.__file__)))


def _report_others() -> None:
    for name in _NATIVE:
        if name in sys.modules:
            add("other", what=name, why="it creates its sessions in C++")
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.rstrip("\n").partition("/")[2] for line in maps}
    except OSError:
        return
    import re

    core = re.compile(_CORE)
    for path in sorted("/" + path for path in paths):
        if core.search(path) and not os.path.realpath(path).startswith(_watched + os.sep):
            add(
                "other",
                what=path,
                why="another ONNX Runtime library, which is not that of the package onnxruntime",
            )
