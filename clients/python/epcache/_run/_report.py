"""What happened in this process, for the summary that epcachectl prints at the end of the program.

A line of JSON for each thing, appended at once: a process that is killed takes nothing along.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import ModuleType
from typing import Any

VARIABLE = "EPCACHE_RUN_REPORT"

# ONNX Runtime's own library, under whichever name a package gave it; not those of execution
# providers.
_CORE = r"/libonnxruntime(-[^/_]*)?\.so[^/]*$"
# Packages that make sessions in C++, with ONNX Runtime's library and not through its Python
# classes.
_NATIVE = ("onnxruntime_genai", "onnxruntime.training")

_watched = ""  # the directory of the onnxruntime that was taken over


def add(kind: str, **facts: Any) -> None:
    """Appends a line. A report that cannot be written is dropped: the program does not notice."""
    import json

    line = json.dumps({"kind": kind, "pid": os.getpid(), **facts}, default=str)
    _append(line.encode("utf-8", "backslashreplace"))


def imported(why: str) -> None:
    """Says that onnxruntime was imported, and why it could not be taken over, if so. The common
    case needs no JSON.
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
        # One write: lines of several processes do not mix.
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
            add("other", what=name, why="it makes its sessions in C++")
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
                why="another library of ONNX Runtime, which does not belong to the package "
                "onnxruntime",
            )
