"""Applications with libraries that the daemon does not have compile under a claim; others with the
same libraries get the result.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import child
import pytest
from daemon import Daemon

EP = "OpenVINOExecutionProvider"
OPTIONS = {"load_config": json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "f32"}})}
NOBODY = 65534
MODEL = "silero-vad"


@pytest.fixture(scope="module")
def daemon(start: Callable[..., Daemon], runtime: Callable[[str], Path]) -> Daemon:
    """A daemon that has only another execution provider."""
    return start(runtime("qnn-2.7.0"))


@pytest.fixture
def run_application(
    daemon: Daemon, runtime: Callable[[str], Path], programs: Path, models: Any
) -> Callable[..., Any]:
    """Runs an application; models differ by test, so that tests share no builds."""
    daemon.control("rm", "--all", "--yes")

    def run(
        worker: str = str(programs / "epcached-ort"), where: Path | None = None, **more: Any
    ) -> Any:
        environment = {"EPCACHE_SOCKET": daemon.socket, "EPCACHE_WORKER": worker}
        wishes = {
            "model": models.entry(MODEL),
            "path": str(models.path(MODEL)),
            "ep": [f"{EP}:CPU", OPTIONS],
            **more,
        }
        return child.run(
            "claiming", where or runtime("openvino-1.8.1"), environment=environment, **wishes
        )

    return run


@pytest.fixture(scope="module")
def plain(runtime: Callable[[str], Path], models: Any) -> Any:
    """The output of plain ONNX Runtime with its own compiled model."""
    wishes = {
        "model": models.entry(MODEL),
        "path": str(models.path(MODEL)),
        "ep": EP,
        "options": OPTIONS,
        "level": "basic",
    }
    return child.run("plain", runtime("openvino-1.8.1"), **wishes)["sidecar"]["outputs"]


@pytest.mark.parametrize("how", ["worker", "in process", "model in memory"])
def test_claim_is_compiled_once_and_then_served(
    how: str, run_application: Callable[..., Any], daemon: Daemon, plain: Any
) -> None:
    compiles = daemon.compiles()
    ran = run_application(
        times=2,
        **(
            {"worker": "/nowhere"}
            if how == "in process"
            else {"in_memory": how == "model in memory"}
        ),
    )
    first, second = ran["sessions"]
    assert ran["warnings"] == []
    assert (first["outcome"], second["outcome"]) == ("put", "hit")
    assert first["build"] == second["build"]
    assert first["outputs"] == second["outputs"] == plain
    assert first["providers"][0] == second["providers"][0] == EP
    assert ("compiling in this process" in first["phases"]) == (how == "in process")
    assert daemon.compiles() == compiles, "the daemon compiled nothing"


def test_two_applications_share_one_compile(run_application: Callable[..., Any]) -> None:
    (first,) = run_application()["sessions"]
    (second,) = run_application()["sessions"]
    assert (first["outcome"], second["outcome"]) == ("put", "hit")
    assert first["outputs"] == second["outputs"]


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user: run `make test` as root"
)
def test_claim_of_another_user_than_the_daemons(
    run_application: Callable[..., Any],
    daemon: Daemon,
    programs: Path,
    plain: Any,
    reachable: Path,
    models: Any,
) -> None:
    """The daemon does not run that user's libraries, and identifies them by their bytes."""
    path = reachable / "model.onnx"
    shutil.copy(models.path(MODEL), path)
    path.chmod(0o644)
    probes = sum(event["kind"] == "probed" for event in daemon.events())
    ran = run_application(
        worker=str(reachable / "epcached-ort"),
        where=reachable / "runtime",
        path=str(path),
        user=NOBODY,
        times=2,
    )
    first, second = ran["sessions"]
    assert (first["outcome"], second["outcome"]) == ("put", "hit"), ran
    assert "compiling compiling" in first["phases"], "in a worker of its own"
    assert first["outputs"] == second["outputs"] == plain
    assert sum(event["kind"] == "probed" for event in daemon.events()) == probes


def test_plain_session_if_the_compile_module_cannot_be_imported(
    run_application: Callable[..., Any], plain: Any
) -> None:
    """A process that dropped the privileges to read its packages makes a plain session, and the
    next process gets the claim.
    """
    (session,) = (ran := run_application(hidden="epcache._compile"))["sessions"]
    assert (session["outcome"], session["providers"][0], session["outputs"]) == (
        "failed",
        EP,
        plain,
    )
    assert "cannot compile in this process" in session["why"] and len(ran["warnings"]) == 1
    assert run_application()["sessions"][0]["outcome"] == "put"


@pytest.fixture(scope="module")
def reachable(runtime: Callable[[str], Path], programs: Path) -> Iterator[Path]:
    """A directory with the runtime and the worker that every user may read."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        shutil.copytree(runtime("openvino-1.8.1"), directory / "runtime", symlinks=True)
        shutil.copy(programs / "epcached-ort", directory)
        yield directory


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user: run `make test` as root"
)
def test_epcachectl_claims_for_another_user(
    daemon: Daemon, programs: Path, reachable: Path, models: Any
) -> None:
    """Only applications of the same user are served the build that it put."""
    model = reachable / "other.onnx"
    shutil.copy(models.path("tiny-mlp"), model)
    model.chmod(0o644)
    shutil.copy(programs / "epcachectl", reachable)

    def get(user: int) -> Any:
        command = [
            reachable / "epcachectl",
            "--socket",
            daemon.socket,
            "--json",
            "get",
            model,
            "--ep",
            f"{EP}:CPU",
        ]
        command += ["--on-miss", "claim", "--runtime", reachable / "runtime"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            user=user,
            group=user,
            extra_groups=[],
            cwd="/",
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)[0]["outcome"]

    assert get(NOBODY) == "compiled"
    assert get(NOBODY) == "hit"
    assert get(NOBODY - 1) == "compiled"


def worker(directory: Path, script: str) -> str:
    path = directory / "worker"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_compiler_crash_does_not_end_the_application(
    run_application: Callable[..., Any], daemon: Daemon, tmp_path: Path
) -> None:
    (crashed,) = run_application(worker=worker(tmp_path, "echo last words >&2; kill -SEGV $$"))[
        "sessions"
    ]
    assert crashed["error"] == "CompileFailed"
    assert "crashed (SIGSEGV): last words" in crashed["text"]
    ended = [event["text"] for event in daemon.events() if event["kind"] == "claim ended"]
    assert "last words" in ended[-1], "and the daemon was told why"
    assert run_application()["sessions"][0]["outcome"] == "put", "the next one may try"


def test_compiler_error_makes_a_plain_session(
    run_application: Callable[..., Any], daemon: Daemon, tmp_path: Path, plain: Any
) -> None:
    refuses = (
        """echo '{"Refusal":{"Doing":"compile","Code":11,"Text":"out of luck"}}' >&4; exit 60"""
    )
    ran = run_application(worker=worker(tmp_path, refuses))
    (made,) = ran["sessions"]
    assert (made["outcome"], made["providers"][0]) == ("failed", EP)
    assert "out of luck" in made["why"]
    assert len(ran["warnings"]) == 1
    ended = [event["text"] for event in daemon.events() if event["kind"] == "claim ended"]
    assert "out of luck (code 11)" in ended[-1]


def test_built_in_execution_provider_compiles_under_a_claim(
    run_application: Callable[..., Any], daemon: Daemon
) -> None:
    """This process compiles, and the daemon checks the result. ONNX Runtime's CPU provider makes no
    EPContext nodes.
    """
    ran = run_application(ep=["CPUExecutionProvider", {}])
    (made,) = ran["sessions"]
    assert "compiling in this process" in made["phases"]
    assert (made["outcome"], made["providers"]) == ("failed", ["CPUExecutionProvider"])
    assert "no EPContext node" in made["why"]
    assert daemon.control("list") == []


@pytest.mark.parametrize(
    ("ep", "options", "version"),
    [(EP, {}, "openvino-1.8.1"), ("QNNExecutionProvider", {"soc_model": "60"}, "qnn-2.7.0")],
)
def test_artefact_does_not_depend_on_the_user_or_the_models_path(
    ep: str,
    options: dict[str, str],
    version: str,
    run_application: Callable[..., Any],
    daemon: Daemon,
    programs: Path,
    runtime: Callable[[str], Path],
    models: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ONNX Runtime hashes the spelling of the model's path into names."""
    monkeypatch.setenv("EPCACHE_WORKER", str(programs / "epcached-ort"))
    where, device = runtime(version), f"{ep}:CPU"
    copies = [tmp_path / "model.onnx", tmp_path / "below" / "another name.onnx"]
    for path in copies:
        path.parent.mkdir(exist_ok=True)
        shutil.copy(models.path("tiny-mlp"), path)

    def files() -> Any:
        (build,) = daemon.control("list")
        daemon.control("rm", "--all", "--yes")
        return build["files"]

    def application(path: Path, in_memory: bool) -> Any:
        ran = run_application(
            where=where,
            model=models.entry("tiny-mlp"),
            path=str(path),
            ep=[device, options],
            in_memory=in_memory,
        )
        assert ran["sessions"][0]["outcome"] == "put", ran
        return files()

    def command_line(path: Path, on_miss: str) -> Any:
        named = [f"--option={name}={value}" for name, value in options.items()]
        (answer,) = daemon.control(
            "get", str(path), "--ep", device, *named, "--runtime", str(where), "--on-miss", on_miss
        )
        assert answer["outcome"] == "compiled", answer
        return files()

    compiled = command_line(copies[0], "wait")  # by the daemon
    assert [command_line(path, "claim") for path in copies] == [compiled] * 2
    assert [application(path, in_memory) for path in copies for in_memory in (False, True)] == [
        compiled
    ] * 4


def test_missing_library_of_an_execution_provider_is_named(
    run_application: Callable[..., Any], runtime: Callable[[str], Path], models: Any, tmp_path: Path
) -> None:
    """The provider then takes no node, and only ONNX Runtime's log has the reason."""
    whole = runtime("qnn-2.7.0")
    for package in ("onnxruntime", "onnxruntime_qnn"):  # and not onnxruntime_qnn.libs
        shutil.copytree(whole / package, tmp_path / package, copy_function=os.symlink)
    tiny = {"model": models.entry("tiny-mlp"), "path": str(models.path("tiny-mlp"))}
    # For another target, because the daemon has builds of these libraries for the first one.
    (made,) = run_application(
        where=tmp_path, ep=["QNNExecutionProvider", {"soc_model": "43"}], **tiny
    )["sessions"]
    assert made["outcome"] == "failed"
    assert "libc++-71bc274c.so.1.0: cannot open shared object file" in made["why"]


def test_model_that_changes_during_the_compile_is_not_stored(
    run_application: Callable[..., Any], daemon: Daemon, tmp_path: Path, programs: Path, models: Any
) -> None:
    path = tmp_path / "model.onnx"
    shutil.copy(models.path(MODEL), path)
    real = programs / "epcached-ort"
    ran = run_application(
        worker=worker(tmp_path, f'touch {path}; exec {real} "$@"'), path=str(path)
    )
    (made,) = ran["sessions"]
    assert made["outcome"] == "failed"
    assert "changed while it was compiled" in made["why"]
    assert daemon.control("list") == []
