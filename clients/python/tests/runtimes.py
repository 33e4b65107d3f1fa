"""The runtimes that the tests can use: the directories in EPCACHED_RUNTIMES, as
testdata/fetch-runtimes makes them.
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = os.environ.get("EPCACHED_RUNTIMES", "")
RUNTIMES = sorted(Path(DIRECTORY).glob("*-*")) if DIRECTORY else []
# One ONNX Runtime for this process, and the provider packages of two of them.
OWN = [path for path in RUNTIMES if path.name in ("openvino-1.8.1", "qnn-2.7.0")]

# If the variable is set, missing runtimes are an error, so that CI does not skip tests.
assert RUNTIMES or not DIRECTORY, f"EPCACHED_RUNTIMES: no runtimes in {DIRECTORY}"
