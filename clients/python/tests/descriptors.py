"""The open descriptors of this process."""

from __future__ import annotations

import gc
import os
import time


def open_descriptors() -> dict[int, str]:
    """Returns the open descriptors: number to target."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of listdir
    return found


def is_socket(name: str) -> bool:
    """Whether the target of a descriptor is a socket."""
    return name.startswith("socket:")


def opened_since(before: dict[int, str], within: float = 5.0) -> dict[int, str]:
    """Returns the descriptors that were opened since `before`, or that have another target now.
    Waits a moment for those that another thread or the garbage collector closes. A socket that
    replaced another one is a new connection after a timeout, so sockets count only if there are
    more than before.
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
