"""The open descriptors of this process."""

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


def is_socket(name: str) -> bool:
    """Tells whether a descriptor that leads there is a socket."""
    return name.startswith("socket:")


def opened_since(before: dict[int, str], within: float = 5.0) -> dict[int, str]:
    """Returns what is open that was not open before, or leads to something else now.

    What is closed a moment late, by another thread or the collector, is waited for; what was open
    before may be closed. A socket in the place of one that was closed is a new connection,
    after an answer that did not come in time: sockets count where there are more than before.
    """
    sockets = sum(map(is_socket, before.values()))
    until = time.monotonic() + within
    while True:
        gc.collect()
        now = open_descriptors()
        more = sum(map(is_socket, now.values())) > sockets
        new = {
            fd: name
            for fd, name in now.items()
            if before.get(fd) != name and (more or not is_socket(name))
        }
        if not new or time.monotonic() > until:
            return new
        time.sleep(0.02)
