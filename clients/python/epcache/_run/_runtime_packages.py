"""The packages of ONNX Runtime in the directory of `epcachectl run --runtime`, which replace the
program's own.

Other packages in that directory are ignored. If its onnxruntime is for another Python, only its
execution providers are used.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ._environment import runtime

if TYPE_CHECKING:
    import importlib.metadata
    from collections.abc import Iterable
    from importlib.machinery import ModuleSpec

_CORE = "onnxruntime"


def runtime_spec(name: str) -> ModuleSpec | None:
    """Returns the spec of a module of ONNX Runtime in the directory; None if the program's own is
    to be used.
    """
    directory = runtime()
    if not directory or (name == _CORE and not _fits(directory)):
        return None
    import importlib.machinery  # only here, because most programs have no --runtime

    return importlib.machinery.PathFinder.find_spec(name, [directory])


def runtime_distributions(name: str) -> Iterable[importlib.metadata.Distribution]:
    directory = runtime()
    if not directory or (name == _CORE and not _fits(directory)):
        return []
    import importlib.metadata

    context = importlib.metadata.DistributionFinder.Context(name=name, path=[directory])
    return importlib.metadata.MetadataPathFinder.find_distributions(context)


def _fits(directory: str) -> bool:
    """Whether the directory's onnxruntime is for this Python."""
    import glob

    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-"
    for wheel in glob.glob(os.path.join(glob.escape(directory), "onnxruntime*.dist-info", "WHEEL")):
        with open(wheel, encoding="utf-8") as file:
            lines = [line for line in file if line.startswith("Tag:")]
        if any(f" {tag}" in line for line in lines):
            return True
    return False
