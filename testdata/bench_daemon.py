"""Shared by the benchmarks with a daemon: the daemon, the models, and processes that measure."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EP = "OpenVINOExecutionProvider"


def runtime() -> Path:
    return Path(os.environ["EPCACHED_RUNTIMES"]) / "openvino-1.8.1"


def models() -> dict[str, dict[str, Any]]:
    """The real models by name, with the absolute path of each graph in "file"."""
    directory = Path(os.environ["EPCACHED_MODELS"])
    listed = json.loads((directory / "models.json").read_text())["models"]
    return {m["name"]: {**m, "file": str(directory / m["path"])} for m in listed}


@contextlib.contextmanager
def daemon() -> Iterator[tuple[Path, Path, subprocess.Popen[bytes]]]:
    """Runs epcached without background measurements; yields a scratch directory, the socket and the
    process.
    """
    scratch = Path(tempfile.mkdtemp(prefix="epcached-bench-"))
    socket = scratch / "s"
    (scratch / "epcached.toml").write_text("[policy]\nmeasure_gain = false\n")
    process = subprocess.Popen(
        [
            Path(os.environ["EPCACHED_BIN"]) / "epcached",
            "--state",
            scratch / "state",
            "--config",
            scratch / "epcached.toml",
            "--socket",
            socket,
            "--runtime",
            runtime(),
            "--log-level",
            "error",
        ]
    )
    try:
        yield scratch, socket, process
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(scratch)


def measured(script: str, socket: Path, *arguments: str) -> dict[str, Any]:
    """Returns one measurement of a child process: the result of `script --child ...`."""
    out = subprocess.run(
        [sys.executable, script, "--child", *arguments],
        env={**os.environ, "EPCACHE_SOCKET": str(socket)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    return json.loads(out.stdout)


def importable() -> None:
    """Lets a measuring process import the runtime, the client and the inputs."""
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(runtime()), str(here.parent / "clients" / "python"), str(here)]
