"""The real daemon with its own state directory, which a test may kill and restart."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import epcache
from directories import short_directory
from runtimes import OWN

BIN = os.environ.get("EPCACHED_BIN", "")
PATIENCE = (
    120.0  # seconds; far more than the start or stop of a daemon takes, even on a busy machine
)


def missing() -> str:
    """Returns why no real daemon can be used, "" if it can."""
    if not BIN:
        return "EPCACHED_BIN is not set: the directory with epcached, see make build"
    assert (Path(BIN) / "epcached").exists(), f"EPCACHED_BIN: no epcached in {BIN}"
    return (
        ""
        if OWN
        else (
            "EPCACHED_RUNTIMES is not set: the directory with runtimes, see testdata/fetch-runtimes"
        )
    )


class Daemon:
    """epcached with the runtimes of this process."""

    def __init__(self) -> None:
        self.directory = short_directory("epc")
        self.state = self.directory / "state"
        self.socket = str(self.directory / "s")
        self.log = self.directory / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        runtimes = [argument for runtime in OWN for argument in ("--runtime", str(runtime))]
        # Otherwise the daemon itself has a lease for a while, to measure a build's gain.
        self.directory.joinpath("config").write_text("[policy]\nmeasure_gain = false\n")
        command = [
            f"{BIN}/epcached",
            "--config",
            str(self.directory / "config"),
            "--state",
            str(self.state),
            "--socket",
            self.socket,
            "--log-level",
            "debug",
            *runtimes,
        ]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(epcache.NoDaemon), self.client() as client:
                client._connections.give_back(client._connections.connect(until))
                break
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()
            time.sleep(0.02)

    def client(self) -> epcache.Client:
        return epcache.Client(self.socket, hello_limit=5)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(PATIENCE)

    def remove(self) -> None:
        self.stop()
        for directory in (self.state, *self.state.rglob("*")):
            if directory.is_dir() and not directory.is_symlink():
                directory.chmod(0o700)
        shutil.rmtree(self.directory)

    def leases(self) -> int:
        """Returns the number of leased builds."""
        command = [f"{BIN}/epcachectl", "--socket", self.socket, "--json", "list"]
        listed = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
        return sum(build["leases"] > 0 for build in listed)

    def blobs(self) -> list[Path]:
        """Returns the stored files, the largest first."""
        files = [path for path in (self.state / "objects").rglob("*") if path.is_file()]
        return sorted(files, key=lambda path: -path.stat().st_size)


def flip_a_bit(path: Path) -> None:
    """Damages a file in the middle, unnoticed by the daemon."""
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))
    path.chmod(0o444)
