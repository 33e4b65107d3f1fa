"""epcachectl run: however a program is started, its sessions come from the cache, or run reports
why not.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from running import CPU, OPENVINO, PROGRAMS, Run, python

# Slow modules. Those that most programs import anyway are not in the list.
HEAVY = (
    "{'dataclasses', 'inspect', 'json', 'pathlib', 'socket', 'tempfile', 'subprocess', "
    "'importlib.metadata'}"
)


@pytest.fixture
def model(models: Any, tmp_path: Path) -> str:
    return str(shutil.copy(models.path("tiny-mlp"), tmp_path / "model.onnx"))


def test_import_of_onnxruntime_imports_few_modules(run: Run, model: str) -> None:
    """Counts modules, because times depend on the machine; testdata/bench_run.py has the times."""
    code = f"""
import sys
began = set(sys.modules)
early = {{name for name in began if name.startswith("epcache") or name == "importlib.util"}}
assert not early - set(sys.orig_argv), began
import numpy
before = set(sys.modules)
import onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
class Own(onnxruntime.InferenceSession): pass
added = set(sys.modules) - before
ours = {{name for name in added if name.startswith("epcache")}}
print(sorted(ours), sorted(added & {HEAVY}))
assert Own({model!r}, options).get_providers()[0] == "{OPENVINO}"
"""
    ended, report = run.python("-S", "-c", "import site; site.main(); exec(" + repr(code) + ")")
    assert ended.returncode == 0, ended.stderr
    names = [
        "",
        "._onnxruntime",
        "._run",
        "._run._classes",
        "._run._environment",
        "._run._report",
        "._run._runtime_packages",
        "._session_options",
        "._version",
    ]
    # --runtime is in the variable; reading its JSON needs the module json.
    assert ended.stdout == f"{[f'epcache{name}' for name in names]} ['json']\n"
    assert report["notes"] == []


def test_the_programs_own_modules_and_packages_are_imported(
    run: Run, model: str, tmp_path: Path
) -> None:
    package = tmp_path / "app" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(PROGRAMS / "plain.py", package / "__main__.py")
    ended, report = run.python("-m", "mine", model, "names", cwd=tmp_path / "app")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["providers"] == [OPENVINO, CPU] and report["notes"] == []


def environment(directory: Path) -> Path:
    """Makes a virtual environment with the test's packages and a command as pip writes it; returns
    the command.
    """
    subprocess.run([python(), "-m", "venv", "--without-pip", directory], check=True)
    packages = subprocess.check_output(
        [python(), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    own = next((directory / "lib").glob("python3*")) / "site-packages"
    (own / "of-the-tests.pth").write_text(packages + "\n")
    module = (
        (PROGRAMS / "plain.py")
        .read_text()
        .replace(
            "model, way = sys.argv[1:3]", "def main():\n    pass\n\n\nmodel, way = sys.argv[1:3]"
        )
    )
    (own / "mine.py").write_text(module)
    command = directory / "bin" / "mine"
    command.write_text(
        f"#!{directory}/bin/python\nimport sys\nfrom mine import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    command.chmod(0o755)
    return command


@pytest.mark.parametrize("how", ["by its path", "by its name", "from a shell script"])
def test_a_command_installed_by_pip_in_an_environment(
    run: Run, model: str, tmp_path: Path, how: str
) -> None:
    command = environment(tmp_path / "venv")
    line: list[str | Path] = [command, model, "names"]
    path = f"{command.parent}:/usr/bin:/bin"
    if how == "by its name":
        line[0] = "mine"
    if how == "from a shell script":
        script = tmp_path / "start.sh"
        script.write_text(f'#!/bin/sh\ncd / && exec {command} "$@"\n')
        script.chmod(0o755)
        line[0] = script
    # epcachectl looks the command up, so PATH has to be in its environment.
    ended, report = run(*line, PATH=path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["providers"] == [OPENVINO, CPU] and report["notes"] == []


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_python_that_is_not_reached_is_reported(run: Run, model: str, flag: str) -> None:
    ended, report = run.python(flag, "-c", "pass")
    assert ended.returncode == 0
    assert report["pythons"] == 0
    [note] = report["notes"]
    assert "no Python was reached" in note and flag in note


def test_processes_of_a_program(run: Run, model: str) -> None:
    for way in ("spawn", "forkserver", "fork"):
        ended, report = run.python(PROGRAMS / "working.py", model, way)
        assert ended.returncode == 0, f"{way}: {ended.stderr}"
        assert [providers[0] for providers, _ in json.loads(ended.stdout)["results"]] == [
            OPENVINO
        ] * 2, way
        assert len(report["sessions"]) == 2 and report["notes"] == [], way


def test_a_fork_after_a_session_is_unchanged_and_reported(run: Run, model: str) -> None:
    """OpenVINO's threads do not survive a fork, and a session would wait for them forever; the
    program's CPU session works.
    """
    ended, report = run.python(PROGRAMS / "working.py", model, "fork", "before")
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    (providers, before), results = said["before"], said["results"]
    assert providers[0] == OPENVINO
    for providers, output in results:
        assert providers == [CPU] and output == pytest.approx(before, rel=1e-4, abs=1e-5)
    assert report["outcomes"] == {"bypassed": 2, report["sessions"][0]["outcome"]: 1}
    assert all("fork" in session["why"] for session in report["sessions"][1:])


def test_sessions_of_the_c_module_are_reported(run: Run, model: str) -> None:
    ended, report = run.python(PROGRAMS / "direct.py", model)
    assert ended.returncode == 0, ended.stderr
    assert len(report["sessions"]) == 1, "the one that was made with the Python class"
    [note] = report["notes"]
    assert "onnxruntime_pybind11_state.InferenceSession was used" in note


def test_invalid_options_leave_the_program_unchanged(run: Run, model: str) -> None:
    told = json.dumps({"runtime": run.runtime, "eps": [7]})
    code = (
        f"import os; os.environ['EPCACHE_RUN'] = {told!r}; import onnxruntime; "
        f"print(onnxruntime.InferenceSession({model!r}).get_providers())"
    )
    ended, report = run.python("-c", code)
    assert ended.stdout == f"{[CPU]}\n", ended.stderr
    assert report["notes"] == [
        "epcache cannot be used in this process: ValueError: EPCACHE_RUN: 7 is not an execution "
        "provider"
    ]
