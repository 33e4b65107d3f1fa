"""Many processes request a model at once that is not compiled yet: single-flight."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from child import Child
from daemon import Daemon

EP = "OpenVINOExecutionProvider:CPU"
# Its compile is long enough for all requests to arrive before its end.
MODEL = "smart-turn"


class Asker:
    """A process that is ready to send a request."""

    def __init__(self, name: str, directory: Path, runtime: Path, wish: dict[str, Any]) -> None:
        self._said, self._go = directory / f"{name} said", directory / f"{name} go"
        self.process = Child("acquiring", runtime, said=str(self._said), go=str(self._go), **wish)
        self.wait_for("ready")

    def go(self) -> None:
        self._go.touch()

    def wait_for(self, *words: str) -> None:
        """Returns when the process has written one of the words."""
        deadline = time.monotonic() + 60
        while not (self._said.exists() and set(words) & set(self._said.read_text().split())):
            assert time.monotonic() < deadline, f"no word of {words}"
            time.sleep(0.005)


@pytest.mark.parametrize("killed", [False, True], ids=["all stay", "the first is killed"])
def test_eight_processes_share_one_compile(
    killed: bool,
    start: Callable[..., Daemon],
    runtime: Callable[[str], Path],
    models: Any,
    tmp_path: Path,
) -> None:
    where = runtime("openvino-1.8.1")
    daemon = start(where)
    wish = {
        "socket": daemon.socket,
        "path": str(models.path(MODEL)),
        "ep": EP,
        "runtime": str(where),
    }
    wish["dims"] = models.entry(MODEL)["dimensions"]
    first, *others = [
        Asker(str(number), tmp_path, where, wish) for number in range(9 if killed else 8)
    ]
    first.go()
    first.wait_for("compiling")
    for other in others:
        other.go()
    for other in others:
        other.wait_for("queued", "compiling")
    if killed:
        first.process.kill()
    else:
        others.append(first)
    answers = [asker.process.result() for asker in others]
    assert len(answers) == 8
    assert len({answer["build"] for answer in answers}) == 1
    for answer in answers:
        assert answer["files"] == answers[0]["files"] and answer["sizes"] == [
            size for _, size, _ in answer["files"]
        ]
    assert Counter(answer["outcome"] for answer in answers) == (
        {"waited": 8} if killed else {"waited": 7, "compiled": 1}
    )
    assert daemon.compiles() == 1
