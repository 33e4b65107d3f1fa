"""The runtimes that the tests can use: the directories in EPCACHED_RUNTIMES, as
testdata/fetch-runtimes makes them.
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = os.environ.get("EPCACHED_RUNTIMES", "")
RUNTIMES = sorted(Path(DIRECTORY).glob("*-*")) if DIRECTORY else []

# Where it is set, it is meant: tests that are skipped in CI test nothing.
assert RUNTIMES or not DIRECTORY, f"EPCACHED_RUNTIMES: no runtimes in {DIRECTORY}"
