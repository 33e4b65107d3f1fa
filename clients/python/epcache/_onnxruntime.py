"""The application's ONNX Runtime, with the classes that it came with.

No other module here imports onnxruntime: under `epcachectl run` that package has other classes (see
_run), and what epcache makes for itself is not for the cache.
"""

from __future__ import annotations

import sys

import onnxruntime

_run = sys.modules.get(f"{__package__}._run")  # which has been loaded by now, if it ever is

ort = (_run.original if _run is not None else None) or onnxruntime
