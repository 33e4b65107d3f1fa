"""Finds the programs of epcached, and starts them without inherited descriptors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from collections.abc import Sequence

DIRECTORIES = (
    "/usr/libexec/epcached",
    "/usr/lib/epcached",
    "/usr/local/libexec/epcached",
    "/usr/local/lib/epcached",
)


def find(program: str, variable: str, directories: Sequence[str]) -> str:
    """Returns the program's path: the variable's value, else beside this package, in PATH or in
    `directories`; "" if it is not found.
    """
    if named := os.environ.get(variable):
        return os.path.abspath(named)
    import shutil

    paths = (os.path.join(directory, program) for directory in directories)
    return (
        installed(program)
        or shutil.which(program)
        or next((path for path in paths if os.access(path, os.X_OK)), "")
    )


def installed(program: str) -> str:
    """Returns the path of the program that was installed with this package, "" if there is none."""
    packages = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    prefix = os.path.dirname(os.path.dirname(os.path.dirname(packages)))
    # The first is that of pip install --target, the second that of an environment.
    for directory in (os.path.join(packages, "bin"), os.path.join(prefix, "bin")):
        if os.access(path := os.path.join(directory, program), os.X_OK):
            return path
    return ""


def only_descriptors(given: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns file actions for os.posix_spawn: the child gets these descriptors, numbered from 0,
    and no others.
    """
    actions: list[tuple[int, ...]] = [
        (os.POSIX_SPAWN_DUP2, one, number) for number, one in enumerate(given)
    ]
    # posix_spawn closes no number above the limit, which may have been lowered since that was
    # opened; the daemon closes it then
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    above = len(given)
    return actions + [
        (os.POSIX_SPAWN_CLOSE, one)
        for one in _inheritable()
        if one >= above and (one < limit or limit == resource.RLIM_INFINITY)
    ]


def move_above_10(descriptor: int) -> int:
    """Moves the descriptor to a number of 10 or above and returns that, so that dup2 in a child to
    the numbers from 0 does not overwrite it.
    """
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    finally:
        os.close(descriptor)


def _inheritable() -> list[int]:
    """Returns the descriptors that a child would inherit, such as the pipes of a shell."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            if os.get_inheritable(int(name)):
                found.append(int(name))
    return found
