"""What descriptors this process has open."""

from __future__ import annotations

import gc
import os
import time


def open_descriptors() -> dict[int, str]:
    """Returns them by number, with what each leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one of listdir itself
    return found


def opened_since(before: dict[int, str], within: float = 5.0) -> dict[int, str]:
    """Returns what is open that was not open before, or leads to something else now.

    What is closed a moment late, by another thread or the collector, is waited for; what was open before may be closed.
    """
    until = time.monotonic() + within
    while True:
        gc.collect()
        new = {fd: name for fd, name in open_descriptors().items() if before.get(fd) != name}
        if not new or time.monotonic() > until:
            return new
        time.sleep(0.02)
