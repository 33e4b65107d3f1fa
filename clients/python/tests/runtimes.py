"""The runtimes that the tests can use: the directories in EPCACHED_RUNTIMES, as
testdata/fetch-runtimes makes them.
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = os.environ.get("EPCACHED_RUNTIMES", "")
RUNTIMES = sorted(Path(DIRECTORY).glob("*-*")) if DIRECTORY else []

# If the variable is set, missing runtimes are an error, so that CI does not skip tests.
assert RUNTIMES or not DIRECTORY, f"EPCACHED_RUNTIMES: no runtimes in {DIRECTORY}"
