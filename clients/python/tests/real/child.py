"""Runs a function in a child process with the ONNX Runtime of a given directory. A process can have
only one ONNX Runtime, and execution providers keep state that would affect the next test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROJECT = HERE.parents[3]


class Child:
    """`run(**arguments)` of children/`work`.py, under way in another process.

    `runtime` is the directory that `import onnxruntime` finds there. The process inherits
    `descriptors`. It waits `hello` seconds to connect to a daemon, longer than applications do,
    because the machine may be busy. None: as long as applications do.
    """

    def __init__(
        self,
        work: str,
        runtime: Path,
        /,
        *,
        environment: dict[str, str] | None = None,
        descriptors: Sequence[int] = (),
        hello: float | None = 10.0,
        **arguments: Any,
    ) -> None:
        self._name = f"{work} under {runtime.name}"
        self._directory = tempfile.TemporaryDirectory(prefix="epcached-child-")
        self._answer = Path(self._directory.name) / "answer.json"
        paths = [runtime, HERE / "children", PROJECT / "clients" / "python", PROJECT / "testdata"]
        request = {
            "work": work,
            "paths": [str(path) for path in paths],
            "arguments": arguments,
            "hello": hello,
            "answer": str(self._answer),
        }
        own = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "EPCACHE_SOCKET")
        }
        # A file and not a pipe, because no process reads while this one runs.
        self._said = open(Path(self._directory.name) / "said", "w+")
        self._process = subprocess.Popen(
            [os.environ.get("EPCACHED_PYTHON", sys.executable), HERE / "children" / "__main__.py"],
            env={**own, **(environment or {})},
            pass_fds=descriptors,
            text=True,
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=self._said,
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            json.dump(request, stdin)

    def result(self, timeout: float = 180.0) -> Any:
        """Returns the function's result, which is JSON. The process is killed after `timeout`
        seconds.
        """
        try:
            status = self._process.wait(timeout)
            self._said.seek(0)
            assert status == 0, f"{self._name} ended with {status}:\n{self._said.read()[-8000:]}"
            return json.loads(self._answer.read_text())
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills the process and discards its output."""
        self._process.kill()
        self._process.wait()
        self._said.close()
        self._directory.cleanup()


def run(work: str, runtime: Path, /, *, timeout: float = 180.0, **arguments: Any) -> Any:
    """Starts a Child and returns its result."""
    return Child(work, runtime, **arguments).result(timeout)
