"""The worker as a child of the application: its answers, and the ways in which it ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import epcache
import pytest
from epcache import _worker

pytestmark = pytest.mark.usefixtures("no_leak")

RESULT = json.dumps(
    {"Result": {"ORTVersion": "1.31.1", "Seconds": 1.5, "EPs": [{"Name": "E", "Version": "2.0"}]}}
)


def program(directory: Path, script: str) -> str:
    path = directory / "worker"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def run(directory: Path, script: str, limit: float = 300.0) -> tuple[_worker.Result, list[str]]:
    told: list[str] = []
    result = _worker.compile(
        program(directory, script), {"Model": "/m.onnx"}, time.monotonic() + limit, told.append
    )
    return result, [phase for phase in told if phase]


def test_request_phases_and_result(tmp_path: Path) -> None:
    script = f"""
        [ "$1" = prepare ] || exit 62
        cat <&3 >{tmp_path}/request
        pwd >{tmp_path}/directory
        ls -l /proc/self/fd >{tmp_path}/fds
        echo '{{"Phase":"registering"}}' >&4
        echo '{{"Phase":"compiling"}}' >&4
        echo '{RESULT}' >&4"""
    os.environ["SECRET"] = "not for vendors' code"
    try:
        result, phases = run(tmp_path, script + f"\nenv >{tmp_path}/environment")
    finally:
        del os.environ["SECRET"]
    assert result == _worker.Result("1.31.1", 1.5, [("E", "2.0")])
    assert phases == ["registering", "compiling"]
    request = json.loads((tmp_path / "request").read_text())
    assert (request["Version"], request["Do"], request["Model"]) == (
        _worker.VERSION,
        "compile",
        "/m.onnx",
    )
    directory = (tmp_path / "directory").read_text().strip()
    assert not os.path.exists(directory), "its directory goes with it"
    environment = (tmp_path / "environment").read_text()
    assert "SECRET" not in environment
    assert f"TMPDIR={directory}" in environment


def test_process_inherits_nothing_else(tmp_path: Path) -> None:
    mine = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(mine, True)
    try:
        run(tmp_path, f"ls /proc/self/fd >{tmp_path}/fds; echo '{RESULT}' >&4")
    finally:
        os.close(mine)
    numbers = {int(number) for number in (tmp_path / "fds").read_text().split()}
    assert numbers == {0, 1, 2, 3, 4, 5}, "5 is the directory that is listed"


CASES: dict[str, tuple[str, type[Exception], dict[str, str], str]] = {
    "refusal": (
        'echo \'{"Refusal":{"Doing":"compile","Code":11,"Text":"no luck"}}\' >&4; exit 60',
        epcache.CompileFailed,
        {"reason": "refused", "code": "11"},
        "compile: no luck",
    ),
    "crash": (
        "echo last words >&2; kill -SEGV $$",
        epcache.CompileFailed,
        {"reason": "crash", "signal": "SIGSEGV"},
        r"crashed \(SIGSEGV\): last words",
    ),
    "crash of what it looks after": (
        "exit 139",
        epcache.CompileFailed,
        {"reason": "crash", "signal": "SIGSEGV"},
        "SIGSEGV",
    ),
    "killed": (
        "kill -KILL $$",
        epcache.CompileFailed,
        {"reason": "worker died", "signal": "SIGKILL"},
        "SIGKILL",
    ),
    "silent end": (
        "exit 0",
        epcache.CompileFailed,
        {"reason": "crash", "exit": "0"},
        "without a result",
    ),
    "garbage": (
        "echo '][' >&4; echo 7 >&4; exit 3",
        epcache.CompileFailed,
        {"reason": "crash", "exit": "3"},
        "status 3",
    ),
    "other version": (
        "echo of another version >&2; exit 61",
        _worker.NoWorker,
        {},
        "of another version",
    ),
    "no program behind the link": ("exec /nowhere", _worker.NoWorker, {}, "/nowhere"),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_of_the_worker(name: str, tmp_path: Path) -> None:
    script, kind, facts, text = CASES[name]
    with pytest.raises(kind, match=text) as caught:
        run(tmp_path, script)
    if isinstance(caught.value, epcache.Error):
        assert facts.items() <= caught.value.facts.items()


def test_missing_program_is_no_worker(tmp_path: Path) -> None:
    with pytest.raises(_worker.NoWorker):
        _worker.compile(str(tmp_path / "none"), {}, time.monotonic() + 10, lambda _: None)


@pytest.mark.parametrize("silent", [True, False])
def test_hanging_worker_and_its_children_are_killed(silent: bool, tmp_path: Path) -> None:
    script = f"""
        trap '' TERM
        sleep 1000 & echo $! >{tmp_path}/child
        {"" if silent else f"echo '{RESULT}' >&4"}
        wait"""
    if silent:
        for limit in (0.5, 5, 50):  # on a busy machine it may not have begun by then
            with pytest.raises(epcache.DeadlineExceeded):
                run(tmp_path, script, limit=limit)
            if (tmp_path / "child").exists():
                break
    else:
        assert run(tmp_path, script)[0].seconds == 1.5, "what it did before is done"
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 60
    while _lives(child):
        assert time.monotonic() < until, "it left a process behind"
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie counts as ended, because its parent may not reap it


def test_interrupt_kills_the_worker(tmp_path: Path) -> None:
    def interrupted(phase: str) -> None:
        raise KeyboardInterrupt

    script = f"echo $$ >{tmp_path}/pid; echo '{{\"Phase\":\"compiling\"}}' >&4; exec sleep 1000"
    with pytest.raises(KeyboardInterrupt):
        _worker.compile(program(tmp_path, script), {}, time.monotonic() + 300, interrupted)
    assert not _lives(int((tmp_path / "pid").read_text()))


def test_endless_answer_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_worker, "MAX_ANSWER", 1 << 20)
    with pytest.raises(epcache.CompileFailed):
        run(tmp_path, "exec yes >&4")


def test_application_that_ignores_sigchld(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        result, _ = run(tmp_path, f"echo '{RESULT}' >&4")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert result.ort_version == "1.31.1"


def test_lookup_of_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epcache._programs.DIRECTORIES", (str(tmp_path),))
    monkeypatch.delenv("EPCACHE_WORKER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert _worker.find() == ""
    installed = tmp_path / "epcached-ort"
    installed.touch(0o755)
    assert _worker.find() == str(installed)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "epcached-ort").touch(0o755)
    assert _worker.find() == str(tmp_path / "bin" / "epcached-ort")
    monkeypatch.setenv("EPCACHE_WORKER", "named")
    assert _worker.find() == os.path.abspath("named")
