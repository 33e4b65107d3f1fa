"""An execution provider that is part of ONNX Runtime: onnxruntime-openvino, the only package for
Linux on x86-64 with a provider that makes compiled models.

It cannot load those that it makes for the CPU, with plain ONNX Runtime either, because its wheel
lacks OpenVINO's reader of them. So these tests show that an application is not worse than without
epcached: it has the same provider and results, and failing compiles are not retried forever.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import pytest
from daemon import Daemon

EP = "OpenVINOExecutionProvider"
CLIENT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="onnxruntime-openvino 1.24.1 has no wheel for this Python"
)


@pytest.fixture(scope="module")
def where(runtime: Callable[[str], Path]) -> Path:
    return runtime("openvino_inside-1.24.1")


@pytest.fixture
def daemon(start: Callable[..., Daemon], runtime: Callable[[str], Path]) -> Daemon:
    """A daemon with OpenVINO as a plugin, which is another library than the built-in one."""
    return start(runtime("openvino-1.8.1"))


@pytest.fixture
def run_sessions(daemon: Daemon, where: Path, models: Any) -> Callable[..., Any]:
    def run(**more: Any) -> Any:
        wishes = {
            "model": models.entry("tiny-mlp"),
            "path": str(models.path("tiny-mlp")),
            "ep": [EP, {"device_type": "CPU"}],
            **more,
        }
        return child.run("claiming", where, environment={"EPCACHE_SOCKET": daemon.socket}, **wishes)

    return run


def test_built_in_provider_makes_plain_sessions(
    run_sessions: Callable[..., Any], daemon: Daemon
) -> None:
    ran = run_sessions(on_miss="wait")
    (made,) = ran["sessions"]
    assert (made["outcome"], made["providers"][0]) == ("bypassed", EP)
    (warning,) = ran["warnings"]
    assert "is built into this ONNX Runtime" in warning
    assert "onnxruntime-ep-openvino" in warning, "what would be served"
    assert daemon.compiles() == 0


def test_artefact_that_does_not_load_is_compiled_once(
    run_sessions: Callable[..., Any], daemon: Daemon
) -> None:
    plain = run_sessions(on_miss="wait")["sessions"][0]["outputs"]
    claims = [len(claimed(daemon))]
    for _ in range(3):
        (made,) = run_sessions()["sessions"]
        assert (made["outcome"], made["providers"][0]) == ("failed", EP)
        assert made["outputs"] == plain
        claims.append(len(claimed(daemon)))
    assert claims == [0, 1, 1, 1], "equal libraries would compile an equal build"
    decisions = [event["text"] for event in daemon.events() if event["kind"] == "report"]
    assert decisions, "the daemon was told"
    assert all(
        "compile_yourself" in text and "does not load here either" not in text for text in decisions
    ), decisions


def claimed(daemon: Daemon) -> list[Any]:
    return [event for event in daemon.events() if event["kind"] == "claimed"]


def test_missing_device_is_an_error(run_sessions: Callable[..., Any]) -> None:
    """The error names provider and device, as with a plugin; ONNX Runtime's own names neither."""
    (made,) = run_sessions(ep=[f"{EP}:NPU", {}])["sessions"]
    assert made["error"] == "Unavailable"
    assert "does not accept device NPU" in made["text"]


def test_doctor_reports_the_built_in_provider(where: Path, daemon: Daemon) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{CLIENT}{os.pathsep}{where}",
        "EPCACHE_SOCKET": daemon.socket,
    }
    done = subprocess.run(
        [os.environ.get("EPCACHED_PYTHON", sys.executable), "-m", "epcache", "doctor", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = {one["subject"]: one for one in json.loads(done.stdout)["findings"]}
    assert found[EP]["severity"] == "warning"
    assert "built into this ONNX Runtime" in found[EP]["text"]
    assert "pip install onnxruntime onnxruntime-ep-openvino" in found[EP]["hint"]
    assert done.returncode == 1, "nothing could be served"
