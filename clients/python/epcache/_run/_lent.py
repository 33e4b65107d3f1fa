"""The packages of ONNX Runtime in the folder of `epcachectl run --runtime`, which come before the program's own.

Only these: whatever else stands in that folder is not the program's. A folder with an onnxruntime for another Python
lends its execution providers alone.
"""

from __future__ import annotations

import glob
import importlib.machinery
import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

from ._settings import settings

if TYPE_CHECKING:
    import importlib.metadata

_CORE = "onnxruntime"


def lent_spec(name: str) -> ModuleSpec | None:
    """Returns where the folder has this module, a package of ONNX Runtime's; None where the program's own is to be taken."""
    folder = _folder()
    if not folder or (name == _CORE and not _fits(folder)):
        return None
    return importlib.machinery.PathFinder.find_spec(name, [folder])


def lent_distributions(name: str) -> Iterable[importlib.metadata.Distribution]:
    folder = _folder()
    if not folder or (name == _CORE and not _fits(folder)):
        return []
    import importlib.metadata  # only here: it takes longer than the rest of this package

    context = importlib.metadata.DistributionFinder.Context(name=name, path=[folder])
    return importlib.metadata.MetadataPathFinder.find_distributions(context)


def _folder() -> str:
    try:
        return settings().runtime
    except ValueError:
        return ""  # take_over finds it as well, and says so


def _fits(folder: str) -> bool:
    """Whether the folder's onnxruntime is for this Python."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-"
    for wheel in glob.glob(os.path.join(glob.escape(folder), "onnxruntime*.dist-info", "WHEEL")):
        with open(wheel, encoding="utf-8") as file:
            lines = [line for line in file if line.startswith("Tag:")]
        if any(f" {tag}" in line for line in lines):
            return True
    return False
