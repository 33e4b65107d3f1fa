"""The real daemon, on a state folder of its own, as a child of the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import epcache
from conftest import RUNTIMES

BIN = os.environ.get("EPCACHED_BIN", "")


def missing() -> str:
    """Returns why there is no real daemon to test with, "" if there is."""
    if not BIN or not (Path(BIN) / "epcached").exists():
        return "EPCACHED_BIN names no folder with epcached, see make build"
    return "" if RUNTIMES else "EPCACHED_RUNTIMES names no folder with runtimes, see testdata/fetch-runtimes"


class Daemon:
    """epcached with all runtimes that there are, started and stopped at will."""

    def __init__(self) -> None:
        # Readable on the way, as /var/lib is; what is in it is the daemon's business.
        self.folder = Path(tempfile.mkdtemp(prefix="epc"))
        self.folder.chmod(0o755)
        self.state = self.folder / "state"
        self.socket = str(self.folder / "s")
        self.log = self.folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        runtimes = [argument for runtime in RUNTIMES for argument in ("--runtime", str(runtime))]
        command = [f"{BIN}/epcached", "--state", str(self.state), "--socket", self.socket, "--log-level", "debug", *runtimes]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + 20
        while True:
            with contextlib.suppress(epcache.NoDaemon), self.client() as client:
                client._give_back(client._connect(until))
                break
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()
            time.sleep(0.02)
        # A user other than the daemon's is a user of it as well.
        os.chmod(self.socket, 0o666)

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
            self.process.wait(20)

    def remove(self) -> None:
        self.stop()
        for folder in (self.state, *self.state.rglob("*")):
            if folder.is_dir() and not folder.is_symlink():
                folder.chmod(0o700)
        shutil.rmtree(self.folder)

    def control(self, *arguments: str) -> str:
        command = [f"{BIN}/epcachectl", "--socket", self.socket, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def blobs(self) -> list[Path]:
        """Returns the stored files, the largest first."""
        files = [path for path in (self.state / "objects").rglob("*") if path.is_file()]
        return sorted(files, key=lambda path: -path.stat().st_size)


def flip_a_byte(path: Path) -> None:
    """Damages a file behind the daemon's back, in the middle, and keeps it from being noticed by its times' age."""
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x40]))
    path.chmod(0o444)
