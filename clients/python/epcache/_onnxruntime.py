"""The application's ONNX Runtime, with its original classes.

Other modules import onnxruntime from here only, because under `epcachectl run` that package has
replaced classes (see _run), which epcache itself must not use.
"""

from __future__ import annotations

import sys

import onnxruntime

_run = sys.modules.get(f"{__package__}._run")  # under epcachectl run it is loaded by now

ort = (_run.original if _run is not None else None) or onnxruntime
