"""Where daemons of tests have their state directories."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MEMORY = "/dev/shm"
ENOUGH = 4 << 30


def short_directory(prefix: str) -> Path:
    """Makes a directory with a path that is short enough for a socket, in memory if there is enough
    of it.

    So no test waits for a disk: daemons are killed in tests, but machines are not.
    """
    try:
        free = os.statvfs(MEMORY)
        parent = MEMORY if free.f_bavail * free.f_frsize >= ENOUGH else None
    except OSError:
        parent = None
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
