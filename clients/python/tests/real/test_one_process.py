"""Many models of one shape in one process: each session computes with its own model's weights.

OpenVINO caches a context binary by its path as long as a session uses it, and descriptor numbers
are reused at once. Two things distinguish models: a view's inner directory has an id that is never
reused, and files are named after their build key. With a daemon that was broken on purpose: with
one id for all views the test "descriptor" fails, because a recompiled build computes with the
damaged bytes; with one file name as well nearly every session computes with another model's
weights; with one file name and unique ids the tests pass.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import child
import pytest
from daemon import Daemon

CYCLES, MODELS, DAMAGES = 200, 20, 10


@pytest.fixture(scope="module")
def daemon(start: Callable[..., Daemon], runtime: Callable[[str], Path]) -> Daemon:
    return start(runtime("openvino-1.8.1"))


@pytest.mark.parametrize("how", ["descriptor", "path", "session"])
def test_every_session_returns_its_own_models_output(
    how: str, daemon: Daemon, runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    seed = int(os.environ.get("EPCACHED_SEED") or time.time_ns())
    print(f"EPCACHED_SEED={seed} repeats this run")
    result = child.run(
        "cycles",
        runtime("openvino-1.8.1"),
        timeout=400,
        socket=daemon.socket,
        state=str(daemon.state),
        directory=str(tmp_path),
        how=how,
        seed=seed,
        cycles=CYCLES,
        models=MODELS,
        damages=DAMAGES,
    )
    print(result)
    assert result["mistakes"] == []
    assert result["outcomes"]["healed"] == DAMAGES
    assert result["outcomes"]["hit"] > CYCLES / 2
    # Otherwise the test proves nothing: each number must have been used for many models.
    if how != "path":
        assert max(result["numbers"].values()) >= 5
