"""Runs a piece of work in a process of its own, with the ONNX Runtime of a given folder.

A process has one ONNX Runtime, and what an execution provider remembers of one test would help the next one.
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


def run(
    work: str,
    runtime: Path,
    /,
    *,
    environment: dict[str, str] | None = None,
    descriptors: Sequence[int] = (),
    timeout: float = 180.0,
    **arguments: Any,
) -> Any:
    """Returns what `run(**arguments)` of children/`work`.py returned, all of it JSON, in a new process.

    `runtime` is the folder that `import onnxruntime` finds. The process inherits `descriptors`, and is ended after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="epcached-child-") as folder:
        answer = Path(folder) / "answer.json"
        paths = [str(runtime), str(HERE / "children"), str(PROJECT / "clients" / "python"), str(PROJECT / "testdata")]
        request = {"work": work, "paths": paths, "arguments": arguments, "answer": str(answer)}
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "EPCACHE_SOCKET")}
        done = subprocess.run(
            [os.environ.get("EPCACHED_PYTHON", sys.executable), HERE / "children" / "__main__.py"],
            input=json.dumps(request), env={**own, **(environment or {})}, capture_output=True, text=True, timeout=timeout, pass_fds=descriptors,
        )  # fmt: skip
        said = (done.stdout + done.stderr)[-8000:]
        assert done.returncode == 0, f"{work} under {runtime.name} ended with {done.returncode}:\n{said}"
        return json.loads(answer.read_text())
