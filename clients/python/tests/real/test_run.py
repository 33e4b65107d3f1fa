"""epcachectl run: programs that know of no cache, with their sessions from it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE
from daemon import Daemon

OPENVINO = "OpenVINOExecutionProvider"
CPU = "CPUExecutionProvider"
PROGRAM = HERE / "programs" / "plain.py"


@pytest.fixture(scope="module")
def where(runtime: Callable[[str], Path]) -> Path:
    return runtime("openvino-1.8.1")


@pytest.fixture(scope="module")
def daemon(start: Callable[..., Daemon], where: Path) -> Daemon:
    return start(where)


@pytest.fixture
def model(models: Any, tmp_path: Path) -> str:
    return str(shutil.copy(models.path("tiny-mlp"), tmp_path / "model.onnx"))


@pytest.fixture
def run(programs: Path, where: Path, tmp_path: Path) -> Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, Any]]]:
    """Runs Python under epcachectl run, and returns how it ended and the report."""

    def go(socket: str, *arguments: str, flags: tuple[str, ...] = ("--ep", f"{OPENVINO}:CPU"), **environment: str) -> Any:
        report = tmp_path / "report.json"
        command = [f"{programs}/epcachectl", "run", f"--report={report}", "--json", "--runtime", str(where), *flags, "--", python(), *arguments]
        ended = subprocess.run(command, env=plain_environment(EPCACHE_SOCKET=socket, **environment), capture_output=True, text=True, timeout=120)
        return ended, json.loads(report.read_text())

    return go


def python() -> str:
    return os.environ["EPCACHED_PYTHON"]


def plain_environment(**more: str) -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "EPCACHE_SOCKET")}, **more}


@pytest.fixture(scope="module")
def plainly(where: Path, models: Any) -> list[float]:
    """What the program computes without epcached."""
    model = str(models.path("tiny-mlp"))
    ended = subprocess.run([python(), PROGRAM, model, "names"], env=plain_environment(PYTHONPATH=str(where)), capture_output=True, text=True, check=True)
    said = json.loads(ended.stdout)
    assert said["providers"] == [CPU]
    return said["output"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["names", "positional", "pairs", "named", "bytes", "subclass", "child"])
def test_sessions_come_from_the_cache_however_they_are_made(daemon: Daemon, run: Any, plainly: list[float], model: str, way: str) -> None:
    ended, report = run(daemon.socket, str(PROGRAM), model, way)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["providers"] == [OPENVINO, CPU]
    assert said["output"] == pytest.approx(plainly, rel=1e-4, abs=1e-5)
    [session] = report["sessions"]
    assert session["outcome"] in ("compiled", "hit") and report["notes"] == []
    if way == "names":
        again, report = run(daemon.socket, str(PROGRAM), model, way)
        assert again.stdout == ended.stdout and report["outcomes"] == {"hit": 1}


def test_a_program_of_which_nobody_asks_anything_stays_where_it_was(daemon: Daemon, run: Any, plainly: list[float], model: str) -> None:
    ended, report = run(daemon.socket, str(PROGRAM), model, "names", flags=())
    assert json.loads(ended.stdout) == {"output": plainly, "providers": [CPU]}
    [session] = report["sessions"]
    assert session["outcome"] == "bypassed" and "no --ep" in session["why"]


def test_without_a_daemon_it_is_what_it_was_and_that_is_told(run: Any, plainly: list[float], model: str) -> None:
    ended, report = run("/nowhere", str(PROGRAM), model, "names")
    assert ended.returncode == 0 and ended.stderr == ""
    assert json.loads(ended.stdout) == {"output": plainly, "providers": [CPU]}
    assert report["outcomes"] == {"no daemon": 1}


def test_what_the_cache_cannot_account_for_is_left_alone_and_told(daemon: Daemon, run: Any, plainly: list[float], model: str) -> None:
    ended, report = run(daemon.socket, str(PROGRAM), model, "writes")
    assert json.loads(ended.stdout)["providers"] == [CPU] and Path(model + ".optimized").exists()
    [session] = report["sessions"]
    assert session["outcome"] == "bypassed" and "optimized_model_filepath" in session["why"]


def test_errors_are_onnx_runtimes_own_and_the_exit_status_is_the_programs(daemon: Daemon, run: Any, model: str) -> None:
    ended, _ = run(daemon.socket, str(PROGRAM), model, "missing")
    assert json.loads(ended.stdout) == "NoSuchFile" and ended.returncode == 7


def test_a_sitecustomize_that_there_was_still_runs(daemon: Daemon, run: Any, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins; builtins.mine = __file__")
    ended, report = run(daemon.socket, "-c", "import sitecustomize; print(mine, sitecustomize.__file__)", PYTHONPATH=str(tmp_path / "own"))
    assert ended.stdout.split() == [str(tmp_path / "own" / "sitecustomize.py")] * 2, ended.stderr
    assert report["pythons"] == 1


def test_nothing_beside_epcache_is_given_to_the_program(daemon: Daemon, run: Any) -> None:
    ended, report = run(daemon.socket, "-c", "import onnxruntime, sys; print([p for p in sys.path if 'clients' in p or 'runtimes' in p])")
    assert "clients/python'" not in ended.stdout and "runtimes" not in ended.stdout, ended.stdout
    assert report["notes"] == ["no session was made with onnxruntime"]


def test_python_that_ignores_its_environment_is_said_not_to_be_reached(daemon: Daemon, run: Any) -> None:
    _, report = run(daemon.socket, "-I", "-c", "pass")
    assert report["pythons"] == 0 and "no Python was reached" in report["notes"][0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on_and_so_is_death_by_one(programs: Path, number: signal.Signals) -> None:
    script = f"trap 'echo got; trap - {number.value}; kill -{number.value} $$' {number.value}; echo ready; while :; do sleep 0.02; done"
    # A group of its own, as under a service manager: a terminal would send its signals to both.
    child = subprocess.Popen(
        # What runs the tests may ignore a signal, which is handed down, and which a shell then cannot trap.
        ["env", f"--default-signal={number.value}", f"{programs}/epcachectl", "run", "--", "sh", "-c", script],
        env=plain_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(number)
        out, _ = child.communicate(timeout=20)
        assert out == "got\n" and child.returncode == -number
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
