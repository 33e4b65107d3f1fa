"""The real daemon, for the duration of a test."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from directories import short_directory

START_LIMIT = 60.0
STOP_LIMIT = 60.0


class Daemon:
    """epcached with its own store, which is removed with it. `state` is the state directory,
    `socket` the socket's path. The directories have short names: a socket's path may have no more
    than 107 bytes.
    """

    def __init__(self, programs: Path, runtimes: list[Path], configuration: str = "") -> None:
        self._programs = programs
        self._directory = short_directory("epcached-real-")
        self.state = self._directory / "state"
        self.socket = str(self._directory / "s")
        # Readable by all, like /var/lib, so that directories below have to protect themselves.
        self._directory.chmod(0o755)
        self._log = open(self._directory / "log", "w+")
        # After each compile the daemon would load the source model, to measure the build's gain.
        (self._directory / "epcached.toml").write_text(
            f"{configuration}\n[policy]\nmeasure_gain = false\n"
        )
        named = [argument for runtime in runtimes for argument in ("--runtime", str(runtime))]
        configuration_file = self._directory / "epcached.toml"
        self._command = [
            programs / "epcached",
            "--state",
            self.state,
            "--socket",
            self.socket,
            "--config",
            configuration_file,
            *named,
        ]
        self.start()

    def start(self) -> None:
        """Starts the daemon, with the existing store if there is one."""
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        self._wait_until_it_answers()

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            assert self._process.poll() is None, (
                f"the daemon ended with {self._process.returncode}:\n{self.log()}"
            )
            with socket.socket(socket.AF_UNIX) as one:
                if one.connect_ex(self.socket) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(f"the daemon does not answer after {START_LIMIT} s:\n{self.log()}")

    def log(self) -> str:
        """Returns what the daemon has written so far."""
        return (self._directory / "log").read_text()

    def control(self, *arguments: str) -> Any:
        """Returns what `epcachectl ARGUMENTS --json` prints. A status other than 0 is an error."""
        said = self._control(*arguments)
        return json.loads(said) if said.strip() else None

    def events(self) -> list[dict[str, Any]]:
        """Returns all events of the store, oldest first."""
        return [json.loads(line) for line in self._control("events").splitlines()]

    def refused(self, *arguments: str) -> str:
        """Returns the error message of `epcachectl ARGUMENTS`, which has to fail."""
        done = self._run(*arguments)
        assert done.returncode != 0, f"epcachectl {arguments}: {done.stdout}"
        return done.stderr

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [
            self._programs / "epcachectl",
            *arguments,
            "--json",
            "--socket",
            self.socket,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def _control(self, *arguments: str) -> str:
        done = self._run(*arguments)
        assert done.returncode == 0, (
            f"epcachectl {arguments} ended with {done.returncode}:\n{done.stderr}{done.stdout}"
        )
        return done.stdout

    def compiles(self) -> int:
        """Returns how many compiles succeeded since the store was made."""
        return int(self.control("status")["compiles"])

    def object_path(self, digest: str) -> Path:
        """Returns the file in which the store keeps the blob."""
        return self.state / "objects" / digest[:2] / digest

    def freeze(self) -> None:
        """Suspends the daemon; its socket stays."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resumes a suspended daemon."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills the daemon with SIGKILL; the store and the socket stay."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Stops the daemon and returns its exit status; the store stays."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_LIMIT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self._process.returncode

    def close(self) -> None:
        """Checks every byte of the store, stops the daemon, and removes everything."""
        try:
            if self._process.poll() is None:
                self.control("check", "--deep")
            status = self.stop()
            assert status == 0, f"the daemon ended with {status}:\n{self.log()}"
        finally:
            self.stop()
            self._log.close()
            shutil.rmtree(self._directory)
