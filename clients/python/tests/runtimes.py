"""The runtimes that the tests can use: the folders in EPCACHED_RUNTIMES, as testdata/fetch-runtimes
makes them.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = os.environ.get("EPCACHED_RUNTIMES", "")
RUNTIMES = sorted(Path(FOLDER).glob("*-*")) if FOLDER else []

# Where it is set, it is meant: tests that are skipped in CI test nothing.
assert RUNTIMES or not FOLDER, f"EPCACHED_RUNTIMES: no runtimes in {FOLDER}"
