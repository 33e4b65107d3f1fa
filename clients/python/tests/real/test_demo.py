"""The demo on two small models, on a machine where OpenVINO has no device, and what reaches
standard output.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Models

PROJECT = Path(__file__).resolve().parents[4]
LIMIT = 900  # of what hangs
SMALL = ("silero-vad", "tiny-mlp")  # of others the simulator of the NPU takes a minute


@pytest.fixture(scope="module")
def hidden(runtime: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's runtimes, with an OpenVINO that finds no device because its plugin for CPUs is
    missing.
    """
    directory = tmp_path_factory.mktemp("runtimes")
    (directory / "qnn-2.7.0").symlink_to(runtime("qnn-2.7.0"))
    openvino = runtime("openvino-1.8.1").resolve()
    for file in openvino.rglob("*"):
        if file.is_file() and "cpu_plugin" not in file.name:
            link = directory / "openvino-1.8.1" / file.relative_to(openvino)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    return directory


def with_niceness(nice: int) -> None:
    """Raises the niceness of this process for good: root could lower it again."""
    libc, bounding_set_drop, sys_nice = ctypes.CDLL(None), 24, 23
    os.nice(nice)
    if os.geteuid() == 0:
        assert libc.prctl(bounding_set_drop, sys_nice, 0, 0, 0) == 0


@pytest.mark.parametrize(("unbuffered", "nice"), [("", 10), ("1", 0)])
def test_the_demo_shows_qnn_where_openvino_has_no_device(
    hidden: Path, programs: Path, models: Models, tmp_path: Path, unbuffered: str, nice: int
) -> None:
    report = tmp_path / "demo.md"
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DEMO_", "EPCACHE_", "PYTHONUNBUFFERED"))
    }
    environment |= {
        "EPCACHED_RUNTIMES": str(hidden),
        "EPCACHED_BIN": str(programs),
        "DEMO_REPORT": str(report),
    }
    if unbuffered:
        environment["PYTHONUNBUFFERED"] = unbuffered
    command = [sys.executable, PROJECT / "testdata" / "demo.py", *SMALL]
    done = subprocess.run(
        command,
        env=environment,
        preexec_fn=lambda: with_niceness(nice),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OpenVINO on the CPU: its plugin lists no device on this machine" in done.stdout
    table = report.read_text()
    assert "QNN" in table and all(f"| {name} |" in table for name in SMALL), table
    assert "2 of 2 models were hits" in table


def test_output_of_qualcomms_library_is_not_on_stdout(
    runtime: Callable[[str], Path], programs: Path, models: Models, tmp_path: Path
) -> None:
    qnn, socket, config = runtime("qnn-2.7.0"), str(tmp_path / "s"), tmp_path / "epcached.toml"
    config.write_text("")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("EPCACHE_", "PYTHONUNBUFFERED"))
    }

    def output_of(*command: str | Path, **more: str) -> str:
        done = subprocess.run(
            command, env={**environment, **more}, capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    daemon = [
        programs / "epcached",
        "--state",
        tmp_path / "state",
        "--socket",
        socket,
        "--config",
        config,
        "--runtime",
        qnn,
    ]
    with (
        open(tmp_path / "out", "w+") as out,
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(daemon, stdout=out, stderr=log) as process,
    ):
        try:
            until = time.monotonic() + 60
            while not Path(socket).exists():
                assert time.monotonic() < until and process.poll() is None, (
                    tmp_path / "log"
                ).read_text()
                time.sleep(0.02)
            control = [programs / "epcachectl", "--socket", socket, "--wait", "10s"]
            assert json.loads(output_of(*control, "status", "--json"))["version"]
            ep = "QNNExecutionProvider:CPU"
            get = [
                *control,
                "get",
                models.path("tiny-mlp"),
                "--ep",
                ep,
                "--option",
                "soc_model=60",
                "--json",
            ]
            assert [json.loads(output_of(*get))[0]["outcome"] for _ in range(2)] == [
                "compiled",
                "hit",
            ]
            path = os.pathsep.join(map(str, [qnn, PROJECT / "clients" / "python"]))
            assert json.loads(
                output_of(
                    sys.executable,
                    "-m",
                    "epcache",
                    "doctor",
                    "--json",
                    "--socket",
                    socket,
                    PYTHONPATH=path,
                )
            )["findings"]
            assert json.loads(
                output_of(*control, "doctor", "--python", sys.executable, "--json", PYTHONPATH=path)
            )["findings"]
        finally:
            process.terminate()
        assert process.wait(60) == 0
        assert out.read() == ""
