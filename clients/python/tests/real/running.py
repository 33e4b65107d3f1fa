"""Programs under epcachectl run, for the tests of run."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

OPENVINO = "OpenVINOExecutionProvider"
CPU = "CPUExecutionProvider"
PROGRAMS = Path(__file__).parent / "programs"
LIMIT = 120.0


def python() -> str:
    return os.environ["EPCACHED_PYTHON"]


def plain_environment(**more: str) -> dict[str, str]:
    """The environment of the tests without variables that make epcache importable."""
    return {
        **{
            key: value
            for key, value in os.environ.items()
            if key not in ("PYTHONPATH", "EPCACHE_SOCKET")
        },
        **more,
    }


class Run:
    """Starts programs under epcachectl run --ep OpenVINO."""

    def __init__(self, programs: Path, runtime: Path, socket: str) -> None:
        self._control, self.socket = f"{programs}/epcachectl", socket
        self.runtime = str(runtime)

    def __call__(
        self,
        *command: str | Path,
        flags: tuple[str, ...] = ("--ep", f"{OPENVINO}:CPU"),
        socket: str = "",
        cwd: Path | None = None,
        **environment: str,
    ) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        """Returns the ended command and the report. On a busy machine a session may fall back
        because the daemon does not answer within 50 ms: then the program is started again,
        because the tests are about the daemon's answers.
        """
        for _ in range(4):
            ended, report = self._once(command, flags, socket, cwd, environment)
            if socket or not any(
                "no answer in time" in str(session.get("why")) for session in report["sessions"]
            ):
                break
        return ended, report

    def _once(
        self,
        command: tuple[str | Path, ...],
        flags: tuple[str, ...],
        socket: str,
        cwd: Path | None,
        environment: dict[str, str],
    ) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="epcached-run-") as directory:
            report = Path(directory) / "report.json"
            line = [
                self._control,
                "run",
                f"--report={report}",
                "--json",
                "--runtime",
                self.runtime,
                *flags,
                "--",
                *map(str, command),
            ]
            own = plain_environment(EPCACHE_SOCKET=socket or self.socket, **environment)
            ended = subprocess.run(
                line, env=own, cwd=cwd, capture_output=True, text=True, timeout=LIMIT
            )
            return ended, json.loads(report.read_text())

    def control(self, *arguments: str) -> str:
        """Returns what `epcachectl ARGUMENTS` prints."""
        return subprocess.run(
            [self._control, *arguments, "--socket", self.socket],
            check=True,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        ).stdout

    def python(
        self, *arguments: str | Path, **more: Any
    ) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        return self(python(), *arguments, **more)
