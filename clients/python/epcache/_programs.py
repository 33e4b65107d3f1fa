"""Finds the programs of epcached, and starts them without inherited descriptors."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence

DIRECTORIES = (
    "/usr/libexec/epcached",
    "/usr/lib/epcached",
    "/usr/local/libexec/epcached",
    "/usr/local/lib/epcached",
)


def find(program: str, variable: str, directories: Sequence[str]) -> str:
    """Returns the program's path, "" where there is none: what the variable names, else where this
    package's programs were put.
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
    """Returns the program that came with this package, "" for a package that came without."""
    packages = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    prefix = os.path.dirname(os.path.dirname(os.path.dirname(packages)))
    # Beside the packages with pip --target; in the environment's directory of programs else.
    for directory in (os.path.join(packages, "bin"), os.path.join(prefix, "bin")):
        if os.access(path := os.path.join(directory, program), os.X_OK):
            return path
    return ""


def exactly(given: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the actions by which os.posix_spawn gives a child these descriptors, numbered from 0,
    and no others.
    """
    actions: list[tuple[int, ...]] = [
        (os.POSIX_SPAWN_DUP2, one, number) for number, one in enumerate(given)
    ]
    return actions + [(os.POSIX_SPAWN_CLOSE, one) for one in _inheritable() if one >= len(given)]


def high(descriptor: int) -> int:
    """Moves the descriptor to a number above those that the worker expects, because descriptors are
    moved to those one after the other, and returns that number.
    """
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    finally:
        os.close(descriptor)


def _inheritable() -> list[int]:
    """Returns the descriptors that a child would inherit, such as the pipes of a shell."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.get_inheritable(int(name)):
                found.append(int(name))
    return found
