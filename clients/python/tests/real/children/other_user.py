"""A process that holds the descriptor of a view, and changes from root to the user `nobody`."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generate
import inference
import onnxruntime as ort

NOBODY = 65534


def run(
    model: dict[str, Any],
    ep: str,
    options: dict[str, str],
    fd: int,
    graph: str,
    provider_options: dict[str, str],
    sibling: dict[str, str],
) -> dict[str, Any]:
    """Returns the outputs, and the result of each attempt to open another view: as root, and as
    `nobody`. `graph` is the view's, below `fd`. `sibling` is another view: its "scope" directory,
    "view" and "graph".
    """
    warm_up(ep, options)
    as_root = attempts(fd, sibling)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    settings = inference.session_options(ep, provider_options, model["dimensions"])
    session = ort.InferenceSession(f"/proc/self/fd/{fd}/{graph}", settings, enable_fallback=0)
    return {
        "user": os.getresuid(),
        "providers": session.get_providers(),
        "outputs": inference.exact(inference.outputs(session, model)),
        "listed": os.listdir(fd),
        "as root": as_root,
        "as nobody": attempts(fd, sibling),
        "writes": writes(fd, graph),
    }


def warm_up(ep: str, options: dict[str, str]) -> None:
    """Loads all modules and libraries that are loaded late, because the user `nobody` may not read
    their directories.
    """
    with tempfile.TemporaryDirectory() as directory:
        source, graph = Path(directory) / "warm.onnx", Path(directory) / "warm_ctx.onnx"
        generate.mlp(source, width=64, layers=2)
        ort.ModelCompiler(inference.session_options(ep, options, {}), str(source)).compile_to_file(
            str(graph)
        )
        session = ort.InferenceSession(
            str(graph), inference.session_options(ep, options, {}), enable_fallback=0
        )
        model = {"inputs": {"x": {"dtype": "float32", "shape": [1, 64], "fill": "normal"}}}
        inference.exact(inference.outputs(session, model))


def attempts(fd: int, sibling: dict[str, str]) -> dict[str, str]:
    """Tries to open a sibling of the view `fd` in several ways. Returns "reached" or the error's
    name for each.
    """
    view, graph = os.path.basename(sibling["view"]), sibling["graph"]
    ways: dict[str, Callable[[], Any]] = {
        "open by name": lambda: read(f"{sibling['view']}/{graph}"),
        "list by name": lambda: os.listdir(sibling["view"]),
        "list the scope by name": lambda: os.listdir(sibling["scope"]),
        "list fd/..": lambda: os.listdir(f"/proc/self/fd/{fd}/.."),
        "open fd/../sibling": lambda: read(f"/proc/self/fd/{fd}/../{view}/{graph}"),
        "openat ..": lambda: os.listdir(
            keep(os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd))
        ),
        "openat ../sibling": lambda: read(f"../{view}/{graph}", dir_fd=fd),
        "openat .. with O_PATH, then the sibling": lambda: read(
            f"{view}/{graph}", keep(os.open("..", os.O_PATH, dir_fd=fd))
        ),
        "fchdir, then ../sibling": lambda: (os.fchdir(fd), read(f"../{view}/{graph}")),
        "out of the inner directory": lambda: read(
            f"/proc/self/fd/{fd}/{os.listdir(fd)[0]}/../../{view}/{graph}"
        ),
        "stat ../sibling": lambda: os.stat(f"../{view}", dir_fd=fd),
    }
    return {name: outcome(way) for name, way in ways.items()}


def writes(fd: int, graph: str) -> dict[str, str]:
    """Tries to change the open view."""
    inner = os.path.dirname(graph)
    ways: dict[str, Callable[[], Any]] = {
        "open the graph for writing": lambda: os.open(graph, os.O_WRONLY, dir_fd=fd),
        "make a file": lambda: os.open(f"{inner}/new", os.O_CREAT | os.O_WRONLY, dir_fd=fd),
        "unlink the graph": lambda: os.unlink(graph, dir_fd=fd),
        "chmod the graph": lambda: os.chmod(f"/proc/self/fd/{fd}/{graph}", 0o666),
        "rename the inner directory": lambda: os.rename(
            inner, "other", src_dir_fd=fd, dst_dir_fd=fd
        ),
    }
    return {name: outcome(way) for name, way in ways.items()}


def outcome(way: Callable[[], Any]) -> str:
    try:
        way()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "reached"


def read(path: str, dir_fd: int | None = None) -> bytes:
    descriptor = keep(os.open(path, os.O_RDONLY, dir_fd=dir_fd))
    return os.read(descriptor, 1)


def keep(descriptor: int) -> int:
    """Keeps the descriptor open until the process exits."""
    return descriptor
