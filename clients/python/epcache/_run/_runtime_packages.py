"""The packages of ONNX Runtime in the folder of `epcachectl run --runtime`, which come before the
program's own.

Only these: whatever else stands in that folder is not the program's. A folder with an onnxruntime
for another Python lends its execution providers alone.
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
    """Returns where the folder has this module, a package of ONNX Runtime's; None where the
    program's own is to be taken.
    """
    folder = runtime()
    if not folder or (name == _CORE and not _fits(folder)):
        return None
    import importlib.machinery  # only here, as below: most programs are lent nothing

    return importlib.machinery.PathFinder.find_spec(name, [folder])


def runtime_distributions(name: str) -> Iterable[importlib.metadata.Distribution]:
    folder = runtime()
    if not folder or (name == _CORE and not _fits(folder)):
        return []
    import importlib.metadata

    context = importlib.metadata.DistributionFinder.Context(name=name, path=[folder])
    return importlib.metadata.MetadataPathFinder.find_distributions(context)


def _fits(folder: str) -> bool:
    """Whether the folder's onnxruntime is for this Python."""
    import glob

    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-"
    for wheel in glob.glob(os.path.join(glob.escape(folder), "onnxruntime*.dist-info", "WHEEL")):
        with open(wheel, encoding="utf-8") as file:
            lines = [line for line in file if line.startswith("Tag:")]
        if any(f" {tag}" in line for line in lines):
            return True
    return False
