"""epcachectl run: sessions of programs without epcache come from the cache."""

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
    """The program's output without epcached."""
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
def test_sessions_of_every_form_come_from_the_cache(
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


def test_without_ep_a_cpu_program_stays_on_the_cpu(
    run: Run, plainly: list[float], model: str
) -> None:
    ended, report = run.python(PROGRAM, model, "names", flags=())
    assert json.loads(ended.stdout) == {"output": plainly, "providers": [CPU]}
    [session] = report["sessions"]
    assert session["outcome"] == "bypassed" and "no --ep" in session["why"]


def test_without_a_daemon_the_program_is_unchanged_and_the_report_says_so(
    run: Run, plainly: list[float], model: str
) -> None:
    ended, report = run.python(PROGRAM, model, "names", socket="/nowhere")
    assert ended.returncode == 0 and ended.stderr == ""
    assert json.loads(ended.stdout) == {"output": plainly, "providers": [CPU]}
    assert report["outcomes"] == {"no daemon": 1}


def test_unsupported_sessions_are_unchanged_and_reported(
    run: Run, plainly: list[float], model: str
) -> None:
    ended, report = run.python(PROGRAM, model, "writes")
    assert json.loads(ended.stdout)["providers"] == [CPU] and Path(model + ".optimized").exists()
    [session] = report["sessions"]
    assert session["outcome"] == "bypassed" and "optimized_model_filepath" in session["why"]


def test_errors_and_exit_status_are_the_programs_own(run: Run, model: str) -> None:
    ended, report = run.python(PROGRAM, model, "missing")
    assert json.loads(ended.stdout) == "NoSuchFile" and ended.returncode == 7
    [note] = report["notes"]
    assert "could not be loaded, with or without epcached: NoSuchFile" in note


def test_missing_execution_provider_has_a_hint_for_the_command_line(run: Run, model: str) -> None:
    _, report = run.python(PROGRAM, model, "names", flags=("--ep", "NobodysExecutionProvider"))
    [session] = report["sessions"]
    assert (
        session["outcome"] == "failed"
        and "--runtime DIR" in session["why"]
        and "library=" not in session["why"]
    )


def test_the_programs_own_sitecustomize_still_runs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins; builtins.mine = __file__")
    ended, report = run.python(
        "-c",
        "import sitecustomize; print(mine, sitecustomize.__file__)",
        PYTHONPATH=str(tmp_path / "own"),
    )
    assert ended.stdout.split() == [str(tmp_path / "own" / "sitecustomize.py")] * 2, ended.stderr
    assert report["pythons"] == 1


def test_packages_beside_epcache_are_not_importable(run: Run) -> None:
    ended, report = run.python(
        "-c",
        "import onnxruntime, sys; print([p for p in sys.path if 'clients' in p or 'runtimes' in "
        "p])",
    )
    assert "clients/python'" not in ended.stdout and "runtimes" not in ended.stdout, ended.stdout
    assert report["notes"] == ["no session was made with onnxruntime"]


def test_python_that_ignores_its_environment_is_reported_as_not_reached(run: Run) -> None:
    _, report = run.python("-I", "-c", "pass")
    assert report["pythons"] == 0 and "no Python was reached" in report["notes"][0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_forwarded_and_death_by_signal_is_passed_on(
    programs: Path, number: signal.Signals
) -> None:
    script = (
        f"trap 'echo got; trap - {number.value}; kill -{number.value} $$' {number.value}; echo "
        "ready; while :; do sleep 0.02; done"
    )
    # In its own process group, as under a service manager, because a terminal sends signals to
    # both.
    child = subprocess.Popen(
        # The parent of the tests may ignore a signal. Children inherit that, and a shell then
        # cannot trap it.
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
