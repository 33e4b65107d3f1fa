"""Versions of OpenVINO's provider and of ONNX Runtime in all pairs, as package managers put them
together one by one.

The pairs replace each other in random order while one daemon runs. If a plain session works, the
same session with epcache has the same outputs, compiled and as a hit; if a plain session fails, the
client gets the same reason. `make test` takes the versions that other tests need as well; `make
matrix` fetches and takes all of MATRIX.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import epcache
import numpy as np
import pytest
from daemon import Daemon
from upgrade import PATIENCE, link

OPENVINO = "OpenVINOExecutionProvider"

# By version of the package, the runtime that it is taken from: see testdata/fetch-runtimes.
FEW = (
    {"1.4.0": "openvino-1.4.0", "1.8.0": "openvino-1.8.0-ort-1.28.0", "1.8.1": "openvino-1.8.1"},
    {
        "1.24.4": "openvino-1.8.0-ort-1.24.4",
        "1.28.0": "openvino-1.8.1-ort-1.28.0",
        "1.31.1": "openvino-1.8.1",
    },
)
MATRIX = (
    {
        version: f"openvino-{version}"
        for version in ("1.4.0", "1.4.1", "1.5.2", "1.6.1", "1.7.0", "1.8.0", "1.8.1")
    },
    {"1.31.1": "openvino-1.8.1"}
    | {version: f"openvino-1.8.1-ort-{version}" for version in ("1.24.4", "1.28.0", "1.32.0")},
)


def test_every_pair_that_works_without_epcached_works_with_it(
    start: Callable[..., Daemon], runtime: Callable[[str], Path], models: Any, tmp_path: Path
) -> None:
    providers, onnxruntimes = MATRIX if os.environ.get("EPCACHED_MATRIX") else FEW
    seed = int(os.environ.get("EPCACHED_SEED") or time.time_ns())
    print(f"EPCACHED_SEED={seed} repeats this run")
    pairs = [(provider, onnxruntime) for provider in providers for onnxruntime in onnxruntimes]
    random.Random(seed).shuffle(pairs)
    place, model = tmp_path / "runtime", "tiny-convolution"
    daemon: Daemon | None = None

    def sessions(**more: Any) -> list[dict[str, Any]]:
        assert daemon is not None
        arguments = {
            "model": models.entry(model),
            "path": str(models.path(model)),
            "ep": f"{OPENVINO}:CPU",
            **more,
        }
        made: list[dict[str, Any]] = child.run(
            "sessions", place, environment={"EPCACHE_SOCKET": daemon.socket}, **arguments
        )["sessions"]
        return made

    served = []
    for provider, onnxruntime in pairs:
        put(place, "onnxruntime_ep_openvino", runtime(providers[provider]))
        put(place, "onnxruntime", runtime(onnxruntimes[onnxruntime]))
        daemon = daemon or start(place)
        (plain,) = sessions(plain=True)
        pair = (provider, onnxruntime)
        if "error" in plain:
            print(*pair, "fails without epcached too")
            require_reason(daemon, place, models.path(model), plain["text"])
            continue
        first, second = sessions(times=2)
        print(*pair, first.get("outcome", first), second.get("outcome", second))
        for session in (first, second):
            told = f"{pair}: {session}"
            assert "error" not in session, told
            assert session["executed by"] == [OPENVINO], told
            assert session["outcome"] in ("compiled", "waited", "hit"), told + daemon.log()
            assert session["warnings"] == [], told
            assert "does not load" not in session["why"], told
            for mine, its in zip(session["values"], plain["values"], strict=True):
                np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5, err_msg=str(pair))
        assert second["outcome"] == "hit", (pair, first, second)
        served.append(pair)
    # The newest and the oldest versions must work in some pair, otherwise the test proves nothing.
    assert {provider for provider, _ in served} == set(providers)
    assert {onnxruntime for _, onnxruntime in served} == set(onnxruntimes)


def put(place: Path, package: str, of: Path) -> None:
    """Replaces a package of the runtime in `place` by that of another runtime."""
    place.mkdir(exist_ok=True)
    if not (place / package).exists() or (place / package).resolve() != of / package:
        link(place / package, of / package)


def require_reason(daemon: Daemon, place: Path, model: Path, plain: str) -> None:
    """Requires that a client gets the reason of a plain session with the runtime in `place`."""
    with (
        epcache.Client(daemon.socket, hello_limit=10) as client,
        pytest.raises(epcache.Error) as told,
    ):
        client.acquire(model, (f"{OPENVINO}:CPU", {}), runtime=str(place), timeout=PATIENCE).close()
    assert plain.strip().rsplit(" : ")[-1] in str(told.value)
