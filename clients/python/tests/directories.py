"""State directories for daemons of tests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MEMORY = "/dev/shm"
ENOUGH = 4 << 30


def short_directory(prefix: str) -> Path:
    """Makes a directory with a path short enough for a socket. It is in memory if there is
    enough, so that tests do not wait for a disk.
    """
    try:
        free = os.statvfs(MEMORY)
        parent = MEMORY if free.f_bavail * free.f_frsize >= ENOUGH else None
    except OSError:
        parent = None
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
