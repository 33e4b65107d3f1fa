"""Models as open files. The daemon gets descriptors, never paths."""

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


# The session config entry with the directory of external data.
(DIRECTORY_ENTRY,) = _session_keys.DIRECTORY
# The first ONNX Runtime that uses it for models loaded by path. Earlier ones use it for bytes only.
ENTRY_FOR_PATHS = (1, 28)

ModelSource = Union[str, "os.PathLike[str]", bytes, HasFileno]


@dataclass(frozen=True)
class Model:
    """A model that is open for reading. It does not own the descriptor."""

    fd: int
    name: str  # for messages
    # changes when the file changes; equal for two names of one file in one directory
    stamp: tuple[int, ...]
    path: str  # of the graph; "" if not known
    directory: str  # of external data; "" if not known
    external: Callable[[str], int] | None
    # opened with the model, so that no later rename leads elsewhere; None if not known
    directory_fd: int | None = None

    def open_external(self, location: str) -> int:
        """Returns a descriptor of the external data at `location`, which the caller has to close.

        The location is relative to the model's directory, and was checked to stay inside it. As in
        ONNX Runtime the file has to be below that directory, or below the directory of the model's
        real path, because caches of model hubs consist of links; a file elsewhere may be one that
        only this user can read.
        """
        if self.external is not None:
            return self.external(location)
        if self.directory_fd is None:
            missing = f"{self.directory!r} cannot be opened" if self.directory else "is not known"
            raise _errors.BadModel(
                f"model {self.name!r} refers to external data {location!r}, but its directory "
                f"{missing}"
            )
        path = os.path.join(self.directory, location)
        facts = {"file": location}
        try:
            descriptor = open_regular(path, location, self.directory_fd)
            try:
                self._check_below(descriptor, location)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor
        except OSError as error:
            raise _errors.BadModel(
                f"external data of model {self.name!r}: {path}: {error.strerror}", facts=facts
            ) from error

    def _check_below(self, descriptor: int, location: str) -> None:
        """Raises BadModel if the open file is outside. Its name may lead elsewhere by now."""
        assert self.directory_fd is not None
        real = _real_path(descriptor)
        allowed = [_real_path(self.directory_fd)]
        if self.path:
            allowed.append(os.path.dirname(_real_path(self.fd)))
        if not any(real.startswith(above.rstrip("/") + "/") for above in allowed):
            raise _errors.BadModel(
                f"external data {location!r} of model {self.name!r} escapes model directory: it "
                f"is a link to {real}, and not below {allowed[0]}",
                facts={"file": location},
            )


@contextlib.contextmanager
def open_model(
    source: ModelSource,
    external: Callable[[str], int] | None,
    directory: str | None = None,
    ort_version: str = "",
) -> Iterator[Model]:
    """Yields the open model, and closes the files that it opened. Raises OSError for a path that
    cannot be opened.

    `directory` is the value of DIRECTORY_ENTRY, None without it. External data is looked for in the
    directory that this version of ONNX Runtime uses.
    """
    with contextlib.ExitStack() as stack:

        def opened(descriptor: int) -> int:
            stack.callback(os.close, descriptor)
            return descriptor

        if isinstance(source, (bytes, bytearray, memoryview)):
            descriptor, path, beside = opened(_memory_file(bytes(source))), "", "."
        elif isinstance(source, (str, os.PathLike)):
            path = os.path.abspath(os.fspath(source))
            # Without resolving links: ONNX Runtime looks for external data beside the link, too.
            beside = os.path.dirname(path)
        elif not hasattr(source, "fileno"):
            raise not_a_model(source)
        else:
            descriptor = source.fileno()
            path = getattr(source, "name", "")
            path = os.path.abspath(path) if isinstance(path, str) and path else ""
            beside = os.path.dirname(path)
        where = _directory(beside, stack)
        if isinstance(source, (str, os.PathLike)):
            descriptor = opened(open_regular(path, os.path.basename(path), where))
        if directory and not (path and before(ort_version, ENTRY_FOR_PATHS)):
            beside = os.path.abspath(directory)
            where = _directory(beside, stack)
        stamp = (*stamp_of(descriptor), hash(beside))
        name = display_name(os.path.basename(path)) or "model.onnx"
        yield Model(descriptor, name, stamp, path, beside, external, where)


def _directory(path: str, stack: contextlib.ExitStack) -> int | None:
    """Opens a directory, to be closed with the stack; None if that is not possible."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        return descriptor
    return None


def _real_path(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def not_a_model(source: object) -> TypeError:
    """Returns ONNX Runtime's error for a model of another type."""
    return TypeError(f"Unable to load from type '{type(source)}'")


def display_name(path: str) -> str:
    """Returns a path as text in UTF-8, with replacement characters for bytes that are none. Python
    has surrogates for them, and under LC_ALL=C for each byte of other characters.
    """
    return os.fsencode(path).decode("utf-8", "replace")


def before(version: str, first: tuple[int, int]) -> bool:
    """Whether a version such as "1.24.4" is earlier than `first`. An unknown version is not."""
    parts = version.split(".")[:2]
    return (
        len(parts) == 2 and all(part.isdigit() for part in parts) and tuple(map(int, parts)) < first
    )


def open_regular(path: str, name: str = "", directory: int | None = None) -> int:
    """Opens a regular file for reading, by its `name` in an open directory if there is one. Raises
    BadModel for anything else, without blocking on a FIFO.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path if directory is None else name, flags, dir_fd=directory)
    except OSError as error:
        error.filename = path
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _errors.BadModel(f"{path}: not a regular file", facts={"file": path})
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def stamp_of(file: str | int) -> tuple[int, ...]:
    """Returns a value that changes when the file changes, for a path or a descriptor; () if the
    file does not exist.
    """
    try:
        info = os.stat(file)
    except FileNotFoundError:
        return ()
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _memory_file(data: bytes) -> int:
    """Returns a sealed memory file with the bytes, which cannot change while the daemon reads."""
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
