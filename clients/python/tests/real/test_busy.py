"""Applications that keep their own processors busy: the daemon answers, and is waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import pytest
from daemon import Daemon

RUNTIME = "qnn-2.7.0"


@pytest.fixture(scope="module")
def daemon(start: Callable[..., Daemon], runtime: Callable[[str], Path]) -> Daemon:
    return start(runtime(RUNTIME))


@pytest.mark.parametrize(
    ("busy", "threads", "times"), [(4, 1, 30), (0, 32, 4)], ids=["interpreter", "processors"]
)
def test_every_request_of_a_busy_application_is_a_hit(
    busy: int, threads: int, times: int, daemon: Daemon, runtime: Callable[[str], Path], models: Any
) -> None:
    result = child.run(
        "busy",
        runtime(RUNTIME),
        hello=None,
        socket=daemon.socket,
        path=str(models.path("tiny-mlp")),
        ep="QNNExecutionProvider",
        options={"soc_model": "60"},
        loads=str(models.path("rapidocr-cls")),
        busy=busy,
        threads=threads,
        times=times,
    )
    assert result["outcomes"] == {"hit": threads * times}
