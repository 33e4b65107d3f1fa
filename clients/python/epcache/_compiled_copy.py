"""Copies a compiled model out of the cache, for use without a daemon."""

from __future__ import annotations

import contextlib
import filecmp
import io
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping

from . import _errors
from ._artefact import Artefact, is_clean
from ._fields import dataclass
from ._graph_names import renamed_contexts


@dataclass(frozen=True)
class Compiled:
    """A copy of a compiled model. Load `path` with exactly these options."""

    path: str  # of the graph
    files: list[str]  # paths of all files; the last is the graph
    provider_options: dict[str, dict[str, str]]  # by execution provider
    session_options: dict[str, str]  # session config entries
    graph_optimization_level: str  # "" if any level works
    outcome: str  # "hit", "compiled" or "waited"
    build: str  # build key, 64 hex digits
    request_key: str  # 64 hex digits


def copy_artefact(artefact: Artefact, directory: str, overwrite: bool, name: str = "") -> Compiled:
    """Writes the files of an open artefact into the directory, which is created if necessary. If
    `name` is not "", the graph gets this name, and its binaries those that ONNX Runtime would use.

    Each file is written atomically, and the graph last, when the others are durable. A graph that
    is replaced is removed first, so that it never exists beside another build's files. Raises
    FileExistsError, before anything is written, if a file exists with other content and
    `overwrite` is false.
    """
    beside = os.path.dirname(artefact.graph)
    sources: dict[str, str | bytes] = {}
    for file in (f.name for f in artefact.files):
        if not is_clean(file) or os.path.commonpath([beside, file]) != beside:
            raise _errors.ProtocolError(f"the file {file!r} is outside the graph's directory")
        sources[os.path.relpath(file, beside or ".")] = f"/proc/self/fd/{artefact.fd}/{file}"
    graph = os.path.relpath(artefact.graph, beside or ".")
    if graph not in sources:
        raise _errors.ProtocolError(f"the graph {artefact.graph!r} is not one of the files")
    if name and name != graph:
        graph, sources = name, _renamed(sources, graph, name)
    os.makedirs(directory, exist_ok=True)
    existing = {name for name in sources if os.path.exists(os.path.join(directory, name))}
    same = {name for name in existing if _is_same(sources[name], os.path.join(directory, name))}
    if different := sorted(existing - same):
        if not overwrite:
            raise FileExistsError(
                f"{os.path.join(directory, different[0])} exists with other content; "
                "overwrite=True replaces it"
            )
    # Of a group, the graphs of the other models are also last.
    graphs = {os.path.relpath(m.graph, beside or ".") for m in artefact.members} | {graph}
    names = sorted(sources, key=lambda name: (name in graphs, name == graph))
    written = [name for name in names if name not in same]
    for name in graphs.intersection(written):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))
    for name in written:
        if name in graphs:
            _sync_directories(os.path.join(directory, one) for one in written if one not in graphs)
        _copy(sources[name], os.path.join(directory, name))
    return Compiled(
        path=os.path.join(directory, graph),
        files=[os.path.join(directory, name) for name in names],
        provider_options=artefact.provider_options,
        session_options=_with_new_paths(
            artefact.load_options(), os.path.dirname(artefact.path), directory
        ),
        graph_optimization_level=artefact.graph_optimization_level,
        outcome=artefact.outcome,
        build=artefact.build,
        request_key=artefact.request_key,
    )


def _renamed(sources: Mapping[str, str | bytes], graph: str, name: str) -> dict[str, str | bytes]:
    """Returns the files with another name for the graph. Execution providers begin the names of
    binaries with the graph's name, without its extension.
    """
    old, new = os.path.splitext(graph)[0], os.path.splitext(name)[0]
    names = {
        one: new + one.removeprefix(old) if one.startswith(old) else one
        for one in sources
        if one != graph
    }
    if len({name, *names.values()}) != len(sources):
        raise ValueError(f"name {name!r}: a file beside the graph has this name")
    with open(sources[graph], "rb") as file:
        model = renamed_contexts(file.read(), names)
    return {name: model, **{names[one]: sources[one] for one in names}}


def _is_same(source: str | bytes, path: str) -> bool:
    if isinstance(source, str):
        return filecmp.cmp(source, path, shallow=False)
    with open(path, "rb") as file:
        return file.read(len(source) + 1) == source


def _copy(source: str | bytes, path: str) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".epcache-", dir=os.path.dirname(path) or ".")
    try:
        opened = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")
        with opened as one, open(descriptor, "wb") as other:
            shutil.copyfileobj(one, other, 1 << 20)
            other.flush()
            os.fchmod(other.fileno(), 0o644)
            os.fsync(other.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is raised
            os.unlink(temporary)
        raise


def _sync_directories(paths: Iterable[str]) -> None:
    """Makes the names of these files durable."""
    for directory in {os.path.dirname(path) or "." for path in paths}:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _with_new_paths(options: Mapping[str, str], old: str, new: str) -> dict[str, str]:
    """Returns the options with paths below `old` changed to paths below `new`."""
    return {
        key: os.path.abspath(os.path.join(new, value.removeprefix(old + "/")))
        if value.startswith(old + "/")
        else value
        for key, value in options.items()
    }
