"""python -m epcache doctor as a command: with a fake daemon, a real execution provider, and broken
packages.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FakeDaemon, Peer

pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

from epcache import _doctor  # noqa: E402
from providers import OPENVINO  # noqa: E402

CLIENT = str(Path(__file__).parent.parent)


def doctor(
    *arguments: str, path: list[str] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    directories = [CLIENT, *sys.path] if path is None else path
    given = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(directories),
        "EPCACHE_SOCKET": "/nowhere",
        **environment,
    }
    given = {name: value for name, value in given.items() if value}
    command = [sys.executable, "-m", "epcache", "doctor", *arguments]
    return subprocess.run(
        command, env=given, capture_output=True, text=True, timeout=120, check=False
    )


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.stdout, done.stderr
    return {one["subject"]: one for one in json.loads(done.stdout)["findings"]}


def explains(peer: Peer) -> None:
    peer.hello()
    while True:
        request = peer.acquire()
        explanation = {"decision": "miss", "reason": "there is none"}
        peer.send(
            {
                "request": request["request"],
                "acquire_reply": {"outcome": "explanation", "explanation": explanation},
            }
        )


def refuses(peer: Peer) -> None:
    peer.hello()
    request = peer.acquire()
    peer.send(
        {
            "request": request["request"],
            "error": {"class": 11, "text": "no such runtime", "hint": "add it"},
        }
    )
    peer.wait_for_end()


@pytest.fixture
def openvino() -> None:
    if reason := OPENVINO.missing():
        pytest.skip(reason)


def test_doctor_finds_no_problems(openvino: None) -> None:
    with FakeDaemon(explains) as daemon:
        done = doctor("--json", EPCACHE_SOCKET=daemon.path)
    found = findings(done)
    assert found["daemon"]["severity"] == "ok"
    assert f"fake answers at {daemon.path}" in found["daemon"]["text"]
    assert found["onnxruntime"]["severity"] == "ok"
    assert found[OPENVINO.name]["severity"] == "ok"
    assert "onnxruntime_ep_openvino" in found[OPENVINO.name]["text"]
    assert found[OPENVINO.name]["text"].endswith("the daemon serves it")
    told = json.loads(done.stdout)
    assert told["daemon"] is True
    assert (done.returncode == 0) == (told["problems"] == 0)


def test_execution_provider_that_the_daemon_does_not_serve(openvino: None) -> None:
    with FakeDaemon(refuses) as daemon:
        done = doctor("--socket", daemon.path, "--json")
    one = findings(done)[OPENVINO.name]
    assert (one["severity"], one["hint"]) == ("problem", "add it")
    assert one["text"].endswith("the daemon does not serve it: no such runtime")
    assert done.returncode == 1


def test_doctor_without_a_daemon_has_its_own_exit_status(openvino: None) -> None:
    done = doctor()
    assert done.returncode == 5
    assert "problem  daemon: no daemon answers" in done.stdout
    assert "unset EPCACHE_SOCKET" in done.stdout
    assert f"ok       {OPENVINO.name}: " in done.stdout, "the rest is looked at all the same"


def test_daemon_that_a_session_would_start(tmp_path: Path) -> None:
    program = tmp_path / "epcached"
    program.write_text("#!/bin/sh\ntouch \"$0.started\"\n")
    program.chmod(0o755)
    own = {
        "EPCACHE_SOCKET": "",
        "XDG_RUNTIME_DIR": str(tmp_path),
        "HOME": str(tmp_path),
        "EPCACHE_DAEMON": str(program),
    }
    one = findings(doctor("--json", EPCACHE_AUTOSTART="1", **own))["daemon"]
    assert one["severity"] == "ok"
    assert str(program) in one["text"]
    assert not Path(f"{program}.started").exists(), "it only looks"
    one = findings(doctor("--json", EPCACHE_AUTOSTART="0", **own))["daemon"]
    assert (one["severity"], "EPCACHE_AUTOSTART" in one["hint"]) == ("problem", True)


def test_daemon_that_does_not_answer(tmp_path: Path) -> None:
    """If a daemon exists but does not answer, no session starts another one."""
    place = tmp_path / "epcached" / "epcached.sock"
    place.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(place))
        silent.listen()
        done = doctor(
            "--json", EPCACHE_SOCKET="", XDG_RUNTIME_DIR=str(tmp_path), HOME="", XDG_STATE_HOME=""
        )
    found = findings(done)["daemon"]
    assert found["severity"] == "problem" and "suspended" in found["hint"], found
    assert str(place) in found["text"]


def test_without_onnxruntime(tmp_path: Path) -> None:
    done = doctor("--json", path=[CLIENT])
    one = findings(done)["onnxruntime"]
    assert (one["severity"], one["hint"]) == ("problem", "pip install onnxruntime")
    assert "No module named 'onnxruntime'" in one["text"]


def test_broken_packages_are_reported(tmp_path: Path, openvino: None) -> None:
    for name, code in {
        "crash": "import os; os.kill(os.getpid(), 11)",
        "raise": "raise RuntimeError('half installed')",
    }.items():
        directory = tmp_path / f"onnxruntime_ep_{name}"
        directory.mkdir()
        (directory / "__init__.py").write_text(code)
    found = findings(doctor("--json", path=[CLIENT, str(tmp_path), *sys.path]))
    crash, raised = found["onnxruntime_ep_crash"], found["onnxruntime_ep_raise"]
    assert (crash["severity"], raised["severity"]) == ("problem", "problem")
    assert "SIGSEGV" in crash["text"]
    assert raised["text"] == "RuntimeError: half installed"
    assert found[OPENVINO.name]["severity"] == "ok"


@pytest.mark.parametrize(("devices", "severity"), [("0", "warning"), ("1", "problem")])
def test_only_a_missing_device_is_a_warning(devices: str, severity: str) -> None:
    result = {"name": "EP", "error": "no device driver answers", "facts": {"devices": devices}}
    assert _doctor._execution_provider("package", result).severity == severity


def test_wrong_usage() -> None:
    assert doctor("--no-such-flag").returncode == 2
