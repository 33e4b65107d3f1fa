"""Many models of one shape in one process: each session computes with its own model's weights.

OpenVINO keeps a context binary for each path string as long as a session that uses it lives, and
descriptor numbers are given out again at once. Two things keep models apart: a view's inner
directory has an id that is never used again, and the files are named after their build key. Seen
with a daemon that was broken on purpose: with one id for all views the test "descriptor" fails, for
a build that was damaged and healed computes with the damaged bytes; with one file name as well
nearly every session computes with another model's weights; with one file name and unique ids all is
well.
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
    # Or nothing was tried: one number has to have led to many models.
    if how != "path":
        assert max(result["numbers"].values()) >= 5
