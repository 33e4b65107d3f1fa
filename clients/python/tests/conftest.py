"""Fixtures: descriptor accounting for every test, a model and a view, and the real daemon where it
was built.

EPCACHED_BIN       directory with epcached, epcachectl and epcached-ort
EPCACHED_RUNTIMES  directory of runtimes as testdata/fetch-runtimes makes them
EPCACHED_MODELS    directory of models as testdata/fetch-models makes it

`make test` sets them. Without one, the tests that need it are skipped and say so.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["EPCACHE_AUTOSTART"] = "0"  # tests that start a daemon set it
# because its thread opens sockets at any time, and tests count descriptors
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

HERE = Path(__file__).parent
PROJECT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE.parent), str(PROJECT / "testdata")]

from runtimes import OWN  # noqa: E402

sys.path[2:2] = [str(path) for path in OWN]

from descriptors import open_descriptors  # noqa: E402


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps idle connections longer, because a busy machine may delay the next request."""
    from epcache import _connections

    monkeypatch.setattr(_connections, "MAX_IDLE_AGE", 3600.0)


@pytest.fixture
def no_leak() -> Iterator[None]:
    """Fails when the test leaves a descriptor open."""
    gc.collect()
    before = open_descriptors()
    yield
    gc.collect()
    after = open_descriptors()
    assert {fd: name for fd, name in after.items() if before.get(fd) != name} == {}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no client looks into a model")
    return str(path)


@pytest.fixture
def view(tmp_path: Path) -> Path:
    directory = tmp_path / "view"
    (directory / "abc").mkdir(parents=True)
    (directory / "abc" / "x_ctx.onnx").write_bytes(b"compiled")
    return directory
