"""epcachectl run: programs that know of no cache, with their sessions from it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from running import CPU, OPENVINO, PROGRAMS, Run, plain_environment, python

PROGRAM = PROGRAMS / "plain.py"


@pytest.fixture
def model(models: Any, tmp_path: Path) -> str:
    return str(shutil.copy(models.path("tiny-mlp"), tmp_path / "model.onnx"))


@pytest.fixture(scope="module")
def plainly(run: Run, models: Any) -> list[float]:
    """What the program computes without epcached."""
    model = str(models.path("tiny-mlp"))
    ended = subprocess.run(
        [python(), PROGRAM, model, "names"],
        env=plain_environment(PYTHONPATH=run.runtime),
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(ended.stdout)
    assert said["providers"] == [CPU]
    return said["output"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "way", ["names", "positional", "pairs", "named", "bytes", "subclass", "child"]
)
def test_sessions_come_from_the_cache_however_they_are_made(
    run: Run, plainly: list[float], model: str, way: str
) -> None:
    ended, report = run.python(PROGRAM, model, way)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["providers"] == [OPENVINO, CPU]
    assert said["output"] == pytest.approx(plainly, rel=1e-4, abs=1e-5)
    [session] = report["sessions"]
    assert session["outcome"] in ("compiled", "hit") and report["notes"] == []
    if way == "names":
        again, report = run.python(PROGRAM, model, way)
        assert again.stdout == ended.stdout and report["outcomes"] == {"hit": 1}


def test_a_program_of_which_nobody_asks_anything_stays_where_it_was(
    run: Run, plainly: list[float], model: str
) -> None:
    ended, report = run.python(PROGRAM, model, "names", flags=())
    assert json.loads(ended.stdout) == {"output": plainly, "providers": [CPU]}
    [session] = report["sessions"]
    assert session["outcome"] == "bypassed" and "no --ep" in session["why"]


def test_without_a_daemon_it_is_what_it_was_and_that_is_told(
    run: Run, plainly: list[float], model: str
) -> None:
    ended, report = run.python(PROGRAM, model, "names", socket="/nowhere")
    assert ended.returncode == 0 and ended.stderr == ""
    assert json.loads(ended.stdout) == {"output": plainly, "providers": [CPU]}
    assert report["outcomes"] == {"no daemon": 1}


def test_what_the_cache_cannot_account_for_is_left_alone_and_told(
    run: Run, plainly: list[float], model: str
) -> None:
    ended, report = run.python(PROGRAM, model, "writes")
    assert json.loads(ended.stdout)["providers"] == [CPU] and Path(model + ".optimized").exists()
    [session] = report["sessions"]
    assert session["outcome"] == "bypassed" and "optimized_model_filepath" in session["why"]


def test_errors_are_onnx_runtimes_own_and_the_exit_status_is_the_programs(
    run: Run, model: str
) -> None:
    ended, report = run.python(PROGRAM, model, "missing")
    assert json.loads(ended.stdout) == "NoSuchFile" and ended.returncode == 7
    [note] = report["notes"]
    assert "could not be loaded, with or without epcached: NoSuchFile" in note


def test_an_execution_provider_that_nothing_carries_is_told_in_the_command_lines_words(
    run: Run, model: str
) -> None:
    _, report = run.python(PROGRAM, model, "names", flags=("--ep", "NobodysExecutionProvider"))
    [session] = report["sessions"]
    assert (
        session["outcome"] == "failed"
        and "--runtime DIR" in session["why"]
        and "library=" not in session["why"]
    )


def test_a_sitecustomize_that_there_was_still_runs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins; builtins.mine = __file__")
    ended, report = run.python(
        "-c",
        "import sitecustomize; print(mine, sitecustomize.__file__)",
        PYTHONPATH=str(tmp_path / "own"),
    )
    assert ended.stdout.split() == [str(tmp_path / "own" / "sitecustomize.py")] * 2, ended.stderr
    assert report["pythons"] == 1


def test_nothing_beside_epcache_is_given_to_the_program(run: Run) -> None:
    ended, report = run.python(
        "-c",
        "import onnxruntime, sys; print([p for p in sys.path if 'clients' in p or 'runtimes' in "
        "p])",
    )
    assert "clients/python'" not in ended.stdout and "runtimes" not in ended.stdout, ended.stdout
    assert report["notes"] == ["no session was made with onnxruntime"]


def test_python_that_ignores_its_environment_is_said_not_to_be_reached(run: Run) -> None:
    _, report = run.python("-I", "-c", "pass")
    assert report["pythons"] == 0 and "no Python was reached" in report["notes"][0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on_and_so_is_death_by_one(
    programs: Path, number: signal.Signals
) -> None:
    script = (
        f"trap 'echo got; trap - {number.value}; kill -{number.value} $$' {number.value}; echo "
        "ready; while :; do sleep 0.02; done"
    )
    # A group of its own, as under a service manager: a terminal would send its signals to both.
    child = subprocess.Popen(
        # What runs the tests may ignore a signal, which is handed down, and which a shell then
        # cannot trap.
        [
            "env",
            f"--default-signal={number.value}",
            f"{programs}/epcachectl",
            "run",
            "--",
            "sh",
            "-c",
            script,
        ],
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(number)
        out, _ = child.communicate(timeout=120)
        assert out == "got\n" and child.returncode == -number
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
