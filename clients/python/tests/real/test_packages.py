"""Real packages without epcache under epcachectl run: two small ones, for every test run. `make
packages` has eight.

EPCACHED_PACKAGES is the environment that testdata/fetch-packages makes.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, directory_of
from packages import MARK, TOLERANCE, differs
from running import CPU, OPENVINO, Run, plain_environment

PROGRAM = HERE.parents[3] / "testdata" / "package_programs.py"


@pytest.fixture(scope="module")
def packages() -> Path:
    return (
        directory_of("EPCACHED_PACKAGES", "packages, as testdata/fetch-packages makes them") / "bin"
    )


def result(ended: subprocess.CompletedProcess[str]) -> Any:
    """The output of one of the programs."""
    assert ended.returncode == 0, ended.stderr
    [line] = [line for line in ended.stdout.splitlines() if line.startswith(MARK)]
    return json.loads(line[len(MARK) :])["output"]


def failures(run: Run) -> int:
    """Returns the number of failed compiles."""
    status = run.control("status", "--json")
    return int(json.loads(status)["failures"])


def alone(packages: Path, name: str) -> Any:
    return result(
        subprocess.run(
            [packages / "python", PROGRAM, name],
            env=plain_environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
    )


def test_a_package_is_served_at_its_second_start(run: Run, packages: Path) -> None:
    plain = alone(packages, "magika")
    for outcome in ("compiled", "hit"):
        ended, report = run(packages / "python", PROGRAM, "magika")
        assert differs(result(ended), plain) <= TOLERANCE
        [session] = report["sessions"]
        assert (session["outcome"], session["providers"][0]) == (outcome, OPENVINO)
    # without `run` the program compiles nothing that could be saved
    assert report["notes"] == [] and report["saved_seconds"] == 0


def test_unserved_package_is_unchanged_and_reports_the_compilers_reason(
    run: Run, packages: Path
) -> None:
    """Its model has an operator that OpenVINO does not convert. The second start does not compile
    again, because the failure is remembered.
    """
    plain = alone(packages, "silero")
    before = failures(run)
    for _ in range(2):
        ended, report = run(packages / "python", PROGRAM, "silero")
        assert result(ended) == plain, "on the CPU, as without"
        [session] = report["sessions"]
        assert (session["outcome"], session["providers"]) == ("failed", [CPU])
        assert "silero_vad.onnx" in session["why"] or "Conv" in session["why"], session["why"]
    assert failures(run) == before + 1, "the failure is remembered"


def test_reasons_are_printed_by_default(run: Run, packages: Path, programs: Path) -> None:
    command = [
        programs / "epcachectl",
        "run",
        "--ep",
        f"{OPENVINO}:CPU",
        "--runtime",
        run.runtime,
        "--",
        packages / "python",
        PROGRAM,
        "silero",
    ]
    ended = subprocess.run(
        command,
        env=plain_environment(EPCACHE_SOCKET=run.socket),
        capture_output=True,
        text=True,
        timeout=60,
    )
    result(ended)
    said = [line for line in ended.stderr.splitlines() if line.startswith("epcachectl: ")]
    assert (
        len(said) == 1
        and "silero_vad.onnx ran on CPUExecutionProvider without the cache: failed" in said[0]
        and "Conv" in ended.stderr
    ), ended.stderr


def test_command_in_another_language_is_reported_as_not_reached(
    run: Run, packages: Path, tmp_path: Path
) -> None:
    """The command of magika is a program in Rust, with ONNX Runtime linked into it."""
    (tmp_path / "x.c").write_text(
        "#include <stdio.h>\nint main(void) { return puts(\"hello\"); }\n"
    )
    ended, report = run(packages / "magika", "--label", tmp_path / "x.c")
    assert ended.returncode == 0, ended.stderr
    assert report["pythons"] == 0 and "no Python was reached" in report["notes"][0]
    assert os.access(packages / "magika", os.X_OK)
