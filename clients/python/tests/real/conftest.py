"""Fixtures of the tests with inference: the real daemon, real execution providers, real models.

EPCACHED_BIN, EPCACHED_RUNTIMES and EPCACHED_MODELS say where they are (see ../conftest.py),
EPCACHED_PYTHON which Python the children run under. `make test` sets them all. If one is not set,
the tests that need it are skipped; if it is invalid, they fail.

pytest's process does not import ONNX Runtime: see child.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE),
    str(HERE / "children"),
    str(HERE.parents[1]),
    str(HERE.parents[3] / "testdata"),
]

from daemon import Daemon  # noqa: E402
from running import Run  # noqa: E402

OPENVINO, QNN = "OpenVINOExecutionProvider", "QNNExecutionProvider"


def directory_of(variable: str, what: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set: {what}; `make test` sets it", allow_module_level=True)
    directory = Path(value).resolve()
    assert directory.is_dir(), f"{variable}: {directory} is no directory"
    return directory


@pytest.fixture(scope="session")
def programs() -> Path:
    return directory_of("EPCACHED_BIN", "the programs, as `make build` makes them")


@pytest.fixture(scope="session")
def runtime() -> Callable[[str], Path]:
    """Returns the directory of a runtime by its name, as testdata/fetch-runtimes has them."""

    def find(name: str) -> Path:
        path = (
            directory_of("EPCACHED_RUNTIMES", "runtimes, as testdata/fetch-runtimes makes them")
            / name
        )
        assert (path / "onnxruntime").is_dir(), f"EPCACHED_RUNTIMES has no {name}"
        return path

    return find


class Models:
    """The models that testdata/fetch-models leaves."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._entries: dict[str, dict[str, Any]] = {
            entry["name"]: entry
            for entry in json.loads((directory / "models.json").read_text())["models"]
        }

    def entry(self, name: str) -> dict[str, Any]:
        assert name in self._entries, f"EPCACHED_MODELS has no {name}"
        return self._entries[name]

    def path(self, name: str) -> Path:
        return self._directory / str(self.entry(name)["path"])


@pytest.fixture(scope="session")
def models() -> Models:
    return Models(directory_of("EPCACHED_MODELS", "models, as testdata/fetch-models makes them"))


@pytest.fixture(scope="module")
def start(programs: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons with their own stores; each is checked and stopped after the tests."""
    started: list[Daemon] = []

    def begin(*runtimes: Path, configuration: str = "") -> Daemon:
        started.append(Daemon(programs, list(runtimes), configuration))
        return started[-1]

    yield begin
    for daemon in started:
        daemon.close()


@pytest.fixture(scope="module")
def run(programs: Path, runtime: Callable[[str], Path], start: Callable[..., Daemon]) -> Run:
    """Starts programs under epcachectl run, with a daemon for the test module."""
    where = runtime("openvino-1.8.1")
    return Run(programs, where, start(where).socket)
