"""The model as the daemon gets it: open files, never paths."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from typing import Protocol, Union

from . import _errors, _session_keys
from ._fields import dataclass


class HasFileno(Protocol):
    """An open file."""

    def fileno(self) -> int: ...


# The session config entry that says where external data lies.
(DIRECTORY_ENTRY,) = _session_keys.DIRECTORY
# The first ONNX Runtime that goes by it for a model that is loaded by path. Those before do so for
# bytes only.
ENTRY_FOR_PATHS = (1, 28)

ModelSource = Union[str, "os.PathLike[str]", bytes, HasFileno]


@dataclass(frozen=True)
class Model:
    """A model that is open for reading. The descriptor is this object's maker's to close."""

    fd: int
    name: str  # for people
    # changes when the file does; equal for two names of one file in one directory
    stamp: tuple[int, ...]
    path: str  # of the graph; "" if that is not known
    directory: str  # where external data lies; "" if that is not known
    external: Callable[[str], int] | None

    def open_external(self, location: str) -> int:
        """Returns a descriptor of the external data at `location`, which is the caller's to close.

        The location is relative to the model's directory; that it does not leave it was checked.
        Symbolic links are followed, with this process's rights: caches of model hubs are made of
        them.
        """
        if self.external is not None:
            return self.external(location)
        if not self.directory:
            raise _errors.BadModel(
                f"model {self.name!r} refers to external data {location!r}, and has no directory"
            )
        path = os.path.join(self.directory, location)
        try:
            return open_regular(path)
        except OSError as error:
            facts = {"file": location}
            raise _errors.BadModel(
                f"external data of model {self.name!r}: {path}: {error.strerror}", facts=facts
            ) from error


@contextlib.contextmanager
def open_model(
    source: ModelSource,
    external: Callable[[str], int] | None,
    directory: str | None = None,
    ort_version: str = "",
) -> Iterator[Model]:
    """Yields the model, open; what was opened here is closed afterwards. A path that cannot be
    opened is an OSError.

    `directory` is the value of DIRECTORY_ENTRY, None without one: external data is looked for where
    this version of ONNX Runtime does.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        descriptor, path, opened = _memory_file(bytes(source)), "", True
        beside = "."
    elif isinstance(source, (str, os.PathLike)):
        path = os.path.abspath(os.fspath(source))
        descriptor, opened = open_regular(path), True
        # The directory as it is spelled: where the path is a link, the data lies beside the link,
        # as ONNX Runtime has it.
        beside = os.path.dirname(path)
    else:
        descriptor, opened = source.fileno(), False
        path = getattr(source, "name", "")
        path = os.path.abspath(path) if isinstance(path, str) and path else ""
        beside = os.path.dirname(path)
    if directory and not (path and before(ort_version, ENTRY_FOR_PATHS)):
        beside = os.path.abspath(directory)
    try:
        stamp = (*stamp_of(descriptor), hash(beside))
        yield Model(
            descriptor, os.path.basename(path) or "model.onnx", stamp, path, beside, external
        )
    finally:
        if opened:
            os.close(descriptor)


def before(version: str, first: tuple[int, int]) -> bool:
    """Whether a version such as "1.24.4" comes before the first one; one that is not known does
    not.
    """
    parts = version.split(".")[:2]
    return (
        len(parts) == 2 and all(part.isdigit() for part in parts) and tuple(map(int, parts)) < first
    )


def open_regular(path: str) -> int:
    """Opens a regular file for reading. Anything else is an error, at once: opening a FIFO would
    wait for a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _errors.BadModel(f"{path}: not a regular file", facts={"file": path})
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def stamp_of(file: str | int) -> tuple[int, ...]:
    """Returns what changes when a file does, of a path or a descriptor; nothing for one that is not
    there.
    """
    try:
        info = os.stat(file)
    except FileNotFoundError:
        return ()
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _memory_file(data: bytes) -> int:
    """Puts bytes into a sealed memory file, which no process can change while the daemon reads."""
    descriptor = os.memfd_create("model.onnx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise
